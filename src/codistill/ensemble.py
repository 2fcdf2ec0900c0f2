"""Models that an agent keeps and answers with together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from codistill.agent import Agent
from codistill.data.validation import digest
from codistill.message import Message

_INPUTS = 4  # sets of inputs (test set, own samples, ...) whose sums are remembered


class Ensemble:
    """A series of terms, each a weighted sum of models: f(x) = Σ_t Σ_i w_ti g_ti(x).

    The models are kept in the agent's state as the bytes they travelled in, so a checkpoint holds them. The
    sum over earlier terms is remembered for inputs that come again: a growing ensemble is evaluated in
    every round at the cost of its newest term. Terms are added one by one from the left, so a remembered
    sum equals a fresh one to the bit.
    """

    def __init__(self, me: Agent) -> None:
        self._me = me
        self._terms: list[list[list[Any]]] = me.state.setdefault("ensemble", [])
        self._known: dict[str, tuple[int, np.ndarray, np.ndarray]] = me.memo.setdefault("ensemble", {})

    def __len__(self) -> int:
        return len(self._terms)

    def append(self, term: Sequence[tuple[float, Message]]) -> None:
        """Add the next term: models that are known to be sound, with their weights."""
        self._terms.append([[float(weight), message.encoded] for weight, message in term])

    def predict(self, x: np.ndarray, *, last: float = 1.0) -> np.ndarray:
        """The sum of all terms at x, the newest one scaled by `last`."""
        key, newest = digest(x), len(self._terms) - 1
        index, before, term = self._known.pop(key, (0, np.zeros((len(x), self._me.shard.classes)), None))
        if term is None:
            term = self._answer(0, x)
        while index < newest:
            before, index = before + term, index + 1
            term = self._answer(index, x)
        self._known[key] = index, before, term
        while len(self._known) > _INPUTS:
            del self._known[next(iter(self._known))]
        return before + last * term

    def _answer(self, index: int, x: np.ndarray) -> np.ndarray:
        total = np.zeros((len(x), self._me.shard.classes))
        for weight, data in self._terms[index]:
            model = self._me.open_model(self._me.name, Message.decode(data))
            total += weight * model.predict(x)
        return total
