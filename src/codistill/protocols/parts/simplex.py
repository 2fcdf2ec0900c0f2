"""Rows of probabilities: those that arrive are checked, those that are kept stay on the simplex."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from codistill.protocol import Agent, Message, MessageError

_TOLERANCE = 0.05  # how far from probabilities what arrives may be: compression rounds


def accepted_probabilities(me: Agent, heard: Mapping[str, Message], array: str) -> dict[str, np.ndarray]:
    """An array of every message, by sender; a message whose rows are no probabilities is refused by name."""
    accepted = {}
    for sender, message in heard.items():
        p = message[array]
        with np.errstate(over="ignore"):
            sums = p.sum(axis=1)
        if p.min(initial=0) >= -_TOLERANCE and np.abs(sums - 1).max(initial=0) <= _TOLERANCE:
            accepted[sender] = p
            continue
        found = f"sums from {sums.min():.3g} to {sums.max():.3g}, smallest entry {p.min():.3g}"
        me.refuse(sender, MessageError(f"'{array}' must be probabilities.", found, "Look at what the sender does."))
    return accepted


def on_simplex(p: np.ndarray) -> np.ndarray:
    """Rows that are probabilities: negative entries become 0, and each row is divided by its sum.

    A row without a positive entry, as a regressor may predict, becomes uniform.
    """
    p = np.maximum(p, 0)
    sums = p.sum(axis=1, keepdims=True)
    answer: np.ndarray = np.where(sums > 0, p, 1) / np.where(sums > 0, sums, p.shape[1])
    return answer.astype(p.dtype, copy=False)
