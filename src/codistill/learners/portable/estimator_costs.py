"""What the predictions of a received scikit-learn model compute and hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator

from codistill.learners.portable.estimator_structure import inside
from codistill.learners.portable.model_limits import BLOCK, Cost

_WIDTH = 1 << 16  # numbers that a part may have for a row: features, hidden units, components
_CALL, _STEP, _NUMBER = 1_000_000, 100, 10  # operations: per call of a part, per node on a path, per parameter


def estimator_cost(model: Any, features: int) -> tuple[int, Callable[[int], Cost]]:
    """The rows to predict at a time, and what predictions for some rows take; ValueError where a part is too wide.

    A row takes every parameter once, and at most every other node of a tree.
    """
    parts = list(inside(model))
    arrays = [array for part in parts if type(part).__name__ != "TreePredictor" for array in _arrays(vars(part))]
    width = max([features, *(max(shape) for shape in arrays)])
    if width > max(_WIDTH, features):
        raise ValueError(f"a model of {width} numbers for each row, above the limit of {max(_WIDTH, features)}")
    nodes = sum(_nodes(part) for part in parts)
    each = sum(map(math.prod, arrays)) * _NUMBER + nodes // 2 * _STEP
    block = max(1, BLOCK // width)
    called = sum(isinstance(part, BaseEstimator) for part in parts)

    def cost(rows: int) -> Cost:
        return Cost(rows, rows * each + math.ceil(rows / block) * called * _CALL, 8 * min(rows, block) * width)

    return block, cost


def _arrays(item: Any) -> Iterator[tuple[int, ...]]:
    """Shapes of the arrays of a part, and of lists of numbers in the place of arrays."""
    if isinstance(item, np.ndarray) and item.dtype != object and item.ndim:
        yield item.shape
    elif isinstance(item, dict):
        for value in item.values():
            yield from _arrays(value)
    elif isinstance(item, list | tuple):
        if item and isinstance(item[0], int | float | np.number):
            yield (len(item),)
        else:
            for value in item:
                yield from _arrays(value)


def _nodes(part: Any) -> int:
    tree = vars(part).get("tree_")
    if tree is not None:
        return int(tree.node_count)
    return len(part.nodes) if type(part).__name__ == "TreePredictor" else 0
