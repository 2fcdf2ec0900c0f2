"""Mixing matrices: w_nm is the weight that agent n gives to what it receives from m; W is doubly stochastic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from codistill.errors import RecipeError

_EXACT = 1e-6  # how far a sum may be from 1: people write 0.333333


def as_mixing_matrix(matrix: Any, names: Sequence[str]) -> np.ndarray:
    """W as an array with a row and a column per agent, doubly stochastic and with a positive diagonal."""
    w = _as_square(matrix, names)
    for (row, column), value in _first(~np.isfinite(w) | (w < 0), w):
        raise RecipeError(
            "Every entry of the matrix W must be a finite number of at least 0.",
            f"{value:g} in row {_at(row, names)}, column {_at(column, names)}",
            "Change it: 0 stands for no link.",
        )
    for what, sums in (("row", w.sum(axis=1)), ("column", w.sum(axis=0))):
        for (place,), value in _first(abs(sums - 1) > _EXACT, sums):
            raise RecipeError(
                f"Every {what} of the matrix W must sum to 1.",
                f"{what} {_at(place, names)} sums to {value:.9g}",
                "Change its entries: with rows and columns that sum to 1, mixing keeps the mean of all agents.",
            )
    for (place,), value in _first(np.diag(w) <= 0, np.diag(w)):
        raise RecipeError(
            "Every entry on the diagonal of the matrix W must be above 0.",
            f"{value:g} in row {_at(place, names)}",
            "Give every agent some weight on its own value.",
        )
    return w


def spectral_gap(w: np.ndarray) -> float:
    """1 - the second largest singular value of W: a mixing step shrinks differences by at least this share.

    For a symmetric W that is 1 - |lambda_2|, the second largest eigenvalue in size. W is doubly stochastic, so the
    largest belongs to the mean, and without the mean (W - 11'/n) the second largest is the largest.
    """
    rest = w - 1 / len(w)
    second = np.abs(np.linalg.eigvalsh(rest)).max() if np.array_equal(w, w.T) else np.linalg.norm(rest, 2)
    return max(0.0, 1.0 - float(second))


def _as_square(matrix: Any, names: Sequence[str]) -> np.ndarray:
    must = f"The matrix W must have a row and a column for each of the {len(names)} agents."
    do = "Write a list of rows, each with a number per agent."
    try:
        w = np.array(matrix, dtype=np.float64)
    except (TypeError, ValueError):
        raise RecipeError(must, _unlike(matrix, names), do) from None
    if w.shape != (len(names), len(names)):
        raise RecipeError(must, f"the shape {' x '.join(map(str, w.shape)) or 'of a number'}", do)
    return w


def _unlike(matrix: Any, names: Sequence[str]) -> str:
    """Which row is malformed."""
    rows = matrix if isinstance(matrix, list | tuple) else []
    for number, row in enumerate(rows, 1):
        if not isinstance(row, list | tuple) or len(row) != len(names):
            return f"row {number} is {row!r}"[:80]
    return "entries that are no numbers"


def _first(wrong: np.ndarray, values: np.ndarray) -> list[tuple[tuple[int, ...], float]]:
    """The first wrong place, and the value there."""
    places = np.argwhere(wrong)[:1]
    return [(tuple(map(int, place)), float(values[tuple(place)])) for place in places]


def _at(place: int, names: Sequence[str]) -> str:
    return f"{place + 1} ('{names[place]}')"
