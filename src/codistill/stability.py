"""What an agent does when a loss without bound has driven its model astray: stop the step, say so, go back."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from codistill.agent import Agent

# Outputs before the softmax of a model in use are below a hundred or so, and so are its losses. Far beyond, the
# squares of their gradients, which Adam keeps, would soon be infinite.
_LARGEST_OUTPUT, _LARGEST_LOSS = 1e4, 1e9
_GROWTH = 10  # where data have large units, outputs may be large from the start, and grow by this in a round


class Foothold:
    """An agent's learner as it was at the start of a round, to return to when its outputs go astray.

    `astray` is True for the rest of a round in which outputs or a loss were: a protocol can leave out the term
    that did it.
    """

    def __init__(self, me: Agent) -> None:
        self._me = me
        self._state = _copied(me.learner.state())
        self._limit: float | None = None
        self.astray = False

    def outputs(self, x: torch.Tensor) -> torch.Tensor:
        """The learner's outputs before the softmax, with a graph; of the learner as it was, if they are astray."""
        f: torch.Tensor = self._me.learner(x)
        return f if self._is_sound(f) else self._me.learner(x)

    def with_features(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As `outputs`, with the features of the same pass."""
        f, h = self._me.learner.with_features(x)
        return (f, h) if self._is_sound(f) else self._me.learner.with_features(x)

    def descend(self, loss: torch.Tensor) -> None:
        """A step down the loss, unless it is astray."""
        if abs(float(loss.detach())) <= _LARGEST_LOSS:
            self._me.learner.descend(loss)
        else:
            self._say("its loss was not finite, or beyond a billion; it leaves out that step, and goes on.")

    def check(self) -> None:
        """At the end of a round: a last step may have left weights that are no numbers."""
        if not self._me.learner.is_finite():
            self._return("its weights, or the memory of its optimiser, were not finite")

    def _is_sound(self, f: torch.Tensor) -> bool:
        """Whether outputs are within bounds; if not, the learner has returned."""
        largest = float(f.detach().abs().max())
        if self._limit is None and largest < float("inf"):  # the first of the round: as it was before
            self._limit = max(_LARGEST_OUTPUT, _GROWTH * largest)
        # Not "> limit": a comparison with NaN is False.
        if largest <= (self._limit or _LARGEST_OUTPUT):
            return True
        self._return("its outputs were not finite, or far beyond what they were")
        return False

    def _return(self, why: str) -> None:
        self._me.learner.restore(_copied(self._state))  # a copy: an optimiser goes on in what it is given
        self._say(f"{why}; it is back to where the round began, and goes on from there.")

    def _say(self, text: str) -> None:
        if not self.astray:
            self._me.remark(text)
        self.astray = True


def _copied(tree: Any) -> Any:
    """Nested tables with copies of their tensors and arrays: a tenth of the time of a deep copy."""
    if isinstance(tree, torch.Tensor):
        return tree.detach().clone()
    if isinstance(tree, dict):
        return {name: _copied(item) for name, item in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_copied(item) for item in tree)
    return tree.copy() if isinstance(tree, np.ndarray) else tree
