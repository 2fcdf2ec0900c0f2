"""Probabilities that travel: what arrives must be some, and what is kept stays some."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from codistill.protocol import Agent, LearnerError, Message, MessageError

_LOOSE = 0.05  # how far from probabilities what arrives may be: compression rounds


def probabilities(me: Agent, heard: Mapping[str, Message], array: str) -> dict[str, np.ndarray]:
    """An array of every message, by sender; who sends no probabilities is refused by name."""
    sound = {}
    for sender, message in heard.items():
        p = message[array]
        if _are_probabilities(p):
            sound[sender] = p
            continue
        sums = p.sum(axis=1)
        found = f"sums from {sums.min():.3g} to {sums.max():.3g}, smallest entry {p.min():.3g}"
        me.refuse(sender, MessageError(f"'{array}' must be probabilities.", found, "Look at what the sender does."))
    return sound


def check_classes(agents: Sequence[Agent], protocol: str) -> None:
    """Soft-decisions are probabilities of classes: targets must be classes, or such probabilities themselves."""
    for agent in agents:
        if agent.shard.labels is None and not _are_probabilities(agent.shard.targets):
            raise LearnerError(
                f"{protocol} exchanges probabilities of classes, so targets must be classes, or probabilities of them.",
                f"agent '{agent.name}' has real values as targets",
                "Give classes as labels, or use a protocol for real values: avgkd, akd, pkd, ekd.",
            )


def _are_probabilities(p: np.ndarray) -> bool:
    return p.shape[1] > 1 and bool(p.min(initial=0) >= -_LOOSE and np.abs(p.sum(axis=1) - 1).max(initial=0) <= _LOOSE)


def on_simplex(p: np.ndarray) -> np.ndarray:
    """Rows that are probabilities: rounding, and compression on the wire, leave sums that are nearly one.

    A row without anything above 0, as a regressor may answer, becomes uniform.
    """
    p = np.maximum(p, 0)
    sums = p.sum(axis=1, keepdims=True)
    answer: np.ndarray = np.where(sums > 0, p, 1) / np.where(sums > 0, sums, p.shape[1])
    return answer.astype(p.dtype, copy=False)
