"""Probabilities that travel: what arrives must be some, and what is kept stays some."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from codistill.protocol import Agent, Message, MessageError

_LOOSE = 0.05  # how far from probabilities what arrives may be: compression rounds


def probabilities(me: Agent, heard: Mapping[str, Message], array: str) -> dict[str, np.ndarray]:
    """An array of every message, by sender; who sends no probabilities is refused by name."""
    sound = {}
    for sender, message in heard.items():
        p = message[array]
        sums = p.sum(axis=1)
        if p.min(initial=0) >= -_LOOSE and np.abs(sums - 1).max(initial=0) <= _LOOSE:
            sound[sender] = p
            continue
        found = f"sums from {sums.min():.3g} to {sums.max():.3g}, smallest entry {p.min():.3g}"
        me.refuse(sender, MessageError(f"'{array}' must be probabilities.", found, "Look at what the sender does."))
    return sound


def on_simplex(p: np.ndarray) -> np.ndarray:
    """Rows that are probabilities again: rounding, and compression on the wire, leave sums that are nearly one."""
    p = np.maximum(p, 0)
    answer: np.ndarray = p / p.sum(axis=1, keepdims=True)
    return answer
