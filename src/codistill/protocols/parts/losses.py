"""The distillation loss, and the bound on a gradient that was received."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn.functional import kl_div, log_softmax, softmax


def distillation(student: torch.Tensor, teacher: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """KL(ψ(teacher, E) ‖ ψ(student, E)), the mean over samples; both are outputs before the softmax."""
    if temperature != 1:
        student, teacher = student / temperature, teacher / temperature
    return kl_div(log_softmax(student, dim=1), softmax(teacher, dim=1), reduction="batchmean")


def clip_rows(gradient: np.ndarray, longest: float | None) -> np.ndarray:
    """A copy in which no row is longer than `longest`, in the Euclidean norm; None: as it is."""
    if longest is None:
        return gradient.copy()
    norms = np.linalg.norm(gradient.astype(np.float64), axis=1, keepdims=True)
    clipped: np.ndarray = gradient * np.minimum(1, longest / np.maximum(norms, 1e-300)).astype(np.float32)
    return clipped
