"""Bring the values of a data set to a common range, by its training samples."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from codistill.data.dataset import Dataset
from codistill.data.validation import check_finite

SCALES = ("unit", "standard", "robust", "none")


@dataclass(frozen=True, eq=False)
class Scaling:
    """What was subtracted from samples and what they were divided by, so that others are scaled in the same way."""

    shift: np.ndarray  # per channel or column, or one for all
    divisor: np.ndarray

    def apply(self, x: np.ndarray, owner: str) -> np.ndarray:
        """Samples as float32, shifted and scaled; `owner` says whose they are, for the error."""
        return self.finish(for_scaling(x), owner)

    def finish(self, part: np.ndarray, owner: str) -> np.ndarray:
        """The same for a copy of one's own, which is changed."""
        with np.errstate(over="ignore", invalid="ignore"):
            part -= self.shift.astype(part.dtype)
            part /= self.divisor.astype(part.dtype)
        check_finite(part, f"the scaled {owner}", missing=part.ndim == 2)
        return np.ascontiguousarray(part, dtype=np.float32)


def for_scaling(x: np.ndarray) -> np.ndarray:
    """A copy of samples with the precision in which they are scaled."""
    # Columns such as dates differ only in digits that float32 would drop before the shift.
    return x.astype(np.float32 if x.ndim == 4 else np.float64, order="C")


def scaled(dataset: Dataset, scale: str | None, full_range: float | None = None, columns: int | None = None) -> Dataset:
    """The data set as float32, shifted and scaled by its training samples; see `load`.

    Of a table only the first `columns` are, if so many are given.
    """
    images = dataset.x.ndim == 4
    x = for_scaling(dataset.x)
    shift, divisor = _shift_and_divisor(x, scale or ("unit" if images else "standard"))
    if columns is not None and columns < x.shape[1] and scale != "none":
        shift = np.where(np.arange(x.shape[1]) < columns, shift, 0)
        divisor = np.where(np.arange(x.shape[1]) < columns, divisor, 1)
    if images and scale in (None, "unit"):
        divisor = np.float64(full_range or largest_value(dataset.x))
    scaling = Scaling(np.asarray(shift), np.asarray(divisor))
    x_test = scaling.apply(dataset.x_test, f"x_test of data set '{dataset.name}'")
    return replace(dataset, x=scaling.finish(x, f"x of data set '{dataset.name}'"), x_test=x_test, scaling=scaling)


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


def largest_value(x: np.ndarray) -> float:
    """The largest value that images can have, by their type; or the largest magnitude that they have, at least 1."""
    if x.dtype in (np.uint8, np.uint16):
        return float(np.iinfo(x.dtype).max)
    return max(1.0, float(np.abs(x.astype(np.float64)).max()))
