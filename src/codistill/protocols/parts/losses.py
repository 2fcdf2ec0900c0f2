"""The distillation losses that protocols share."""

from __future__ import annotations

import torch
from torch.nn.functional import kl_div, log_softmax, softmax


def distillation(student: torch.Tensor, teacher: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """KL(ψ(teacher, E) ‖ ψ(student, E)), the mean over samples; both are outputs before the softmax."""
    return kl_div(
        log_softmax(student / temperature, dim=1), softmax(teacher / temperature, dim=1), reduction="batchmean"
    )
