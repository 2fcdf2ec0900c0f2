"""Decentralized knowledge distillation (Li, Chen, Lu. FedDKD): averaging models by what they compute."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from codistill.protocol import Agent, Hub, Message
from codistill.protocols.parts.losses import distillation


def dkd_gradient(me: Agent, w: dict[str, np.ndarray], x: torch.Tensor) -> dict[str, np.ndarray]:
    """Algorithm 2, DKDSGD: 1/B̃ ∂ Σ_x L_CE(Φ(x; w_k), Φ(x; w)) / ∂w, where w_k are the agent's own weights.

    L_CE is the cross-entropy of the student's softmax against the teacher's, which has the gradient of their KL. Empty
    where it is not finite: then w is far beyond any model.
    """
    gradient = me.learner.gradient_at(w, x, distillation)
    return gradient if all(np.isfinite(array).all() for array in gradient.values()) else {}


def floats(weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The weights that have a gradient, or could have: all but counters and masks."""
    return {name: array for name, array in weights.items() if array.dtype.kind == "f"}


def accepted_gradients(
    me: Hub, heard: Mapping[str, Message], w: Mapping[str, np.ndarray], shares: Mapping[str, int]
) -> dict[str, Message]:
    """The gradients by w of those who have a share q_k, with it; an agent that had no w sends an empty message."""
    expected = floats(w)
    return {
        name: Message(message.arrays, {"samples": shares[name]})
        for name, message in heard.items()
        if name in shares and message and me.accepts(name, message, expected)
    }


def stepped(w: Mapping[str, np.ndarray], gradient: Mapping[str, np.ndarray], rate: float) -> dict[str, np.ndarray]:
    """w - γ ∇, for the weights that have a gradient; finite, whatever was sent."""
    with np.errstate(over="ignore"):
        moved = {name: array - np.asarray(rate, array.dtype) * gradient[name] for name, array in floats(w).items()}
    return dict(w) | {name: array if np.isfinite(array).all() else w[name] for name, array in moved.items()}
