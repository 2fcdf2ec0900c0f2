"""Bring the values of a data set to a common range, by its training samples."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from codistill.data.dataset import Dataset
from codistill.data.validation import check_finite

SCALES = ("unit", "standard", "none")


def scaled(dataset: Dataset, scale: str | None, full_range: float | None = None) -> Dataset:
    """The data set as float32, shifted and scaled by its training samples; see `load`."""
    images = dataset.x.ndim == 4
    # Columns such as dates differ only in digits that float32 would drop before the shift.
    x = dataset.x.astype(np.float32 if images else np.float64, order="C")
    shift, divisor = _shift_and_divisor(x, scale or ("unit" if images else "standard"))
    if images and scale in (None, "unit"):
        divisor = np.float64(full_range or _full_range(dataset.x))

    def finish(part: np.ndarray, key: str) -> np.ndarray:
        with np.errstate(over="ignore", invalid="ignore"):
            part -= shift.astype(part.dtype)
            part /= divisor.astype(part.dtype)
        check_finite(part, f"the scaled {key} of data set '{dataset.name}'")
        return np.ascontiguousarray(part, dtype=np.float32)

    x_test = finish(dataset.x_test.astype(x.dtype, order="C"), "x_test")
    return replace(dataset, x=finish(x, "x"), x_test=x_test)


def _shift_and_divisor(x: np.ndarray, scale: str) -> tuple[Any, Any]:
    """What to subtract and divide by, per channel or column; one that is constant is divided by 1."""
    over = (0, 2, 3) if x.ndim == 4 else (0,)
    if scale == "none" or (scale == "unit" and x.ndim == 4):
        return np.float64(0), np.float64(1)
    low, high = x.min(axis=over, keepdims=True), x.max(axis=over, keepdims=True)
    if scale == "unit":
        return low, np.where(high > low, high - low, 1)
    mean = x.mean(axis=over, keepdims=True, dtype=np.float64)
    return mean, np.where(high > low, x.std(axis=over, keepdims=True, dtype=np.float64), 1)


def _full_range(x: np.ndarray) -> float:
    if x.dtype in (np.uint8, np.uint16):
        return float(np.iinfo(x.dtype).max)
    return max(1.0, float(np.abs(x.astype(np.float64)).max()))
