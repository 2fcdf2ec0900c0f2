"""Models that travel: who is next on the ring, and predictions as labels."""

from __future__ import annotations

import numpy as np

from codistill.protocol import Agent


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
