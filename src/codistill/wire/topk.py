"""The K largest entries of each row with their columns; and which rows are probabilities.

In a row of probabilities the kept entries are renormalised, and the others become 0. In any other row the others
become their mean: it has the least squared error, the row keeps its sum, and no dropped entry exceeds a kept one.
(Logits keep their largest entries and the ratios between these; the mass of the others is slightly underestimated.
Since the fill keeps sums, the residue of error feedback stays bounded.)
"""

from __future__ import annotations

import numpy as np

_TOLERANCE = 1e-3  # a row sums to 1 within this


def probability_rows(x: np.ndarray) -> np.ndarray:
    """Which rows of the last axis are probabilities: two or more non-negative numbers that sum to 1."""
    if x.ndim == 0 or x.shape[-1] < 2:
        return np.zeros(x.shape[:-1], dtype=bool)
    with np.errstate(over="ignore"):
        sums = x.sum(axis=-1, dtype=np.float64)
    return np.asarray((np.abs(sums - 1.0) <= _TOLERANCE) & (x.min(axis=-1) >= 0))


def renormalise(x: np.ndarray) -> np.ndarray:
    """Rows as probabilities: nothing below 0, and the sum 1 (but 0 where there is nothing above 0)."""
    positive = np.maximum(x, 0)
    sums = positive.sum(axis=-1, keepdims=True, dtype=np.float64).astype(x.dtype)
    return np.asarray(positive / np.where(sums > 0, sums, 1).astype(x.dtype))


def keep(x: np.ndarray, k: int, probable: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Columns (n, k) in ascending order; their entries and, unless all rows are probabilities, the fill."""
    columns = np.sort(np.argsort(-x, axis=1, kind="stable")[:, :k], axis=1)
    kept = np.take_along_axis(x, columns, axis=1)
    kept[probable] = renormalise(kept[probable])
    if probable.all():
        return columns, kept
    left_out = np.ones(x.shape, dtype=bool)
    np.put_along_axis(left_out, columns, False, axis=1)
    mean = x.mean(axis=1, dtype=np.float64, where=left_out).astype(x.dtype)
    return columns, np.column_stack([kept, np.where(probable, 0, mean).astype(x.dtype)])


def spread(columns: np.ndarray, values: np.ndarray, width: int) -> np.ndarray:
    """The rows in their full width again."""
    k = columns.shape[1]
    fill = values[:, k:] if values.shape[1] > k else np.zeros((len(values), 1), values.dtype)
    rows = np.repeat(fill, width, axis=1)
    np.put_along_axis(rows, columns, values[:, :k], axis=1)
    return rows
