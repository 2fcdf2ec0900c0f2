"""Bring the values of a data set to a common range, by its training samples."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from codistill.data.dataset import Dataset
from codistill.data.validation import check_finite

SCALES = ("unit", "standard", "robust", "none")


def scaled(dataset: Dataset, scale: str | None, full_range: float | None = None, columns: int | None = None) -> Dataset:
    """The data set as float32, shifted and scaled by its training samples; see `load`.

    Of a table only the first `columns` are, if so many are given.
    """
    images = dataset.x.ndim == 4
    # Columns such as dates differ only in digits that float32 would drop before the shift.
    x = dataset.x.astype(np.float32 if images else np.float64, order="C")
    shift, divisor = _shift_and_divisor(x, scale or ("unit" if images else "standard"))
    if columns is not None and columns < x.shape[1] and scale != "none":
        shift = np.where(np.arange(x.shape[1]) < columns, shift, 0)
        divisor = np.where(np.arange(x.shape[1]) < columns, divisor, 1)
    if images and scale in (None, "unit"):
        divisor = np.float64(full_range or _full_range(dataset.x))

    def finish(part: np.ndarray, key: str) -> np.ndarray:
        with np.errstate(over="ignore", invalid="ignore"):
            part -= shift.astype(part.dtype)
            part /= divisor.astype(part.dtype)
        check_finite(part, f"the scaled {key} of data set '{dataset.name}'", missing=not images)
        return np.ascontiguousarray(part, dtype=np.float32)

    x_test = finish(dataset.x_test.astype(x.dtype, order="C"), "x_test")
    return replace(dataset, x=finish(x, "x"), x_test=x_test)


def _shift_and_divisor(x: np.ndarray, scale: str) -> tuple[Any, Any]:
    """What to subtract and divide by, per channel or column; one that is constant is divided by 1."""
    over = (0, 2, 3) if x.ndim == 4 else (0,)
    if scale == "none" or (scale == "unit" and x.ndim == 4):
        return np.float64(0), np.float64(1)
    if scale == "robust":
        low, centre, high = np.nanquantile(x, (0.25, 0.5, 0.75), axis=over, keepdims=True)
        return centre, np.where(high > low, high - low, 1)
    if x.ndim == 2 and np.isnan(x).any():
        return _of_present(x, scale)
    low, high = x.min(axis=over, keepdims=True), x.max(axis=over, keepdims=True)
    if scale == "unit":
        return low, np.where(high > low, high - low, 1)
    mean = x.mean(axis=over, keepdims=True, dtype=np.float64)
    return mean, np.where(high > low, x.std(axis=over, keepdims=True, dtype=np.float64), 1)


def _of_present(x: np.ndarray, scale: str) -> tuple[Any, Any]:
    """The same where values are missing: by those that are not; every column has one."""
    low, high = np.nanmin(x, axis=0, keepdims=True), np.nanmax(x, axis=0, keepdims=True)
    if scale == "unit":
        return low, np.where(high > low, high - low, 1)
    return np.nanmean(x, axis=0, keepdims=True), np.where(high > low, np.nanstd(x, axis=0, keepdims=True), 1)


def own_scaler(scale: str | None) -> Any:
    """A scikit-learn transformer that scales a table in the same way; None where nothing is scaled."""
    from sklearn.preprocessing import MinMaxScaler, RobustScaler, StandardScaler

    makers = {"standard": StandardScaler, "robust": RobustScaler, "unit": MinMaxScaler}
    return None if scale == "none" else makers[scale or "standard"]()


def _full_range(x: np.ndarray) -> float:
    if x.dtype in (np.uint8, np.uint16):
        return float(np.iinfo(x.dtype).max)
    return max(1.0, float(np.abs(x.astype(np.float64)).max()))
