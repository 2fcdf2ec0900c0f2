"""The K largest entries of each row with their columns; and which rows are probabilities.

The entries left out become their mean: it has the least squared error, the row keeps its sum, and no dropped entry
exceeds a kept one. A row of probabilities needs no mean in the message: its kept entries travel unchanged, and the
receiver spreads 1 - Σ kept evenly over the others. (Renormalising the kept entries instead would make flat rows
confident, and repeated exchange would feed that back.) Logits keep their largest entries and the ratios between these;
the mass of the others is slightly underestimated. Since the fill keeps sums, the residue of error feedback stays
bounded.
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


def keep(x: np.ndarray, k: int, *, fill: bool) -> tuple[np.ndarray, np.ndarray]:
    """Columns (n, k) in ascending order, and their entries; with `fill` a last column, the mean of the others."""
    columns = np.sort(np.argsort(-x, axis=1, kind="stable")[:, :k], axis=1)
    kept = np.take_along_axis(x, columns, axis=1)
    if not fill:
        return columns, kept
    left_out = np.ones(x.shape, dtype=bool)
    np.put_along_axis(left_out, columns, False, axis=1)
    return columns, np.column_stack([kept, x.mean(axis=1, dtype=np.float64, where=left_out).astype(x.dtype)])


def spread(columns: np.ndarray, values: np.ndarray, width: int) -> np.ndarray:
    """The rows in their full width again; without a column of fills they are probabilities."""
    k = columns.shape[1]
    fill = values[:, k:]
    if values.shape[1] == k:
        missing = 1 - values.sum(axis=1, keepdims=True, dtype=np.float64)
        fill = (np.maximum(missing, 0) / (width - k)).astype(values.dtype)
    rows = np.repeat(fill, width, axis=1)
    np.put_along_axis(rows, columns, values[:, :k], axis=1)
    return rows
