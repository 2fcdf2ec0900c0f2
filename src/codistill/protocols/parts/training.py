"""Local training: gradient steps and their sizes, terms of the loss, and labels from a model that travelled."""

from __future__ import annotations

from collections.abc import Iterable
from math import log

import numpy as np
import torch

from codistill.protocol import Agent

SCHEDULES = ("constant", "decayed", "summable")


def train_locally(me: Agent, batches: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """A gradient step down the owner's loss ℓ(f(x), y) for each batch."""
    for x, y in batches:
        me.learner.descend(me.learner.loss(me.learner(x), y))


def activation_divergence(features: torch.Tensor) -> torch.Tensor:
    """1/B Σ_i KL(a_i ‖ U), a = softmax of the features and U uniform: Σ_j a_j log a_j + log d."""
    log_a = torch.log_softmax(features, dim=1)
    return (log_a.exp() * log_a).sum(dim=1).mean() + log(features.shape[1])


def set_lr(me: Agent, factor: float, lr: float | None) -> None:
    """Let the learner take steps of `factor` times `lr`, or times its owner's learning rate."""
    if lr is not None or factor != 1.0:
        me.learner.set_lr(factor, lr)


def lr_factor(schedule: str, decay: float, t: int, step: int) -> float:
    """η_t / η_0 in round t and at gradient step `step`, counted from the start of the run."""
    if schedule == "decayed":
        return decay**t
    # Σ η_t = ∞ and Σ η_t² < ∞: exponents in (1/2, 1]
    return (1 + step / 100) ** -0.75 if schedule == "summable" else 1.0


def communication_steps(t: int, steps: int, every: int, first: int = 0) -> range:
    """Of the steps `first`, `first` + 1, ... of round t, each with `steps` steps, every `every`-th of the whole run."""
    start = first + -(t * steps + first) % every
    return range(start, first + steps, every)


def ring_neighbours(me: Agent) -> tuple[str, str]:
    """The agents before and after on the ring of those who are present; oneself if there is nobody else."""
    ring, place = me.present, me.present.index(me.name)
    return ring[place - 1], ring[(place + 1) % len(ring)]


def as_targets(me: Agent, predictions: np.ndarray) -> np.ndarray:
    """Predictions as labels for the agent's own model.

    A model that predicts probabilities can only be fitted to probabilities: of a teacher's real values it learns
    the positive part, scaled to sum to 1.
    """
    targets = np.asarray(predictions, dtype=np.float64)
    if not me.learner.probabilistic or targets.min(initial=0.0) >= 0:
        return targets
    positive = np.maximum(targets, 0) + 1e-12
    return np.asarray(positive / positive.sum(axis=1, keepdims=True))
