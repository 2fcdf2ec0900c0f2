"""Seeded splits of samples (test part, public data, subsets), and scaling by the training samples."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from codistill.core.errors import DataError, RecipeError, nearest
from codistill.data.validation import Dataset, check_finite


def check_split(test_fraction: float, seed: int, scale: str | None) -> None:
    if not 0 < test_fraction < 1:
        raise RecipeError("data.test_fraction must be between 0 and 1.", f"{test_fraction!r}", "The default is 0.2.")
    _check_seed(seed)
    if scale is not None and scale not in SCALES:
        raise RecipeError(f"data.scale must be one of {', '.join(SCALES)}.", f"{scale!r}", nearest(str(scale), SCALES))


def hold_out(
    groups: np.ndarray, fraction: float, seed: int, owner: str, purpose: str = "test"
) -> tuple[np.ndarray, np.ndarray]:
    """Indices of a training and a test (or validation) part, stratified by group.

    Every group keeps at least one training sample, so no test label is unknown in training.
    """
    _, group, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    # Rounding the cumulative sum, not each share, holds samples out of many small groups too.
    quotas = np.diff(np.round(fraction * np.cumsum(sizes)).astype(int), prepend=0)
    quotas = np.minimum(quotas, sizes - 1)
    if quotas.sum() == 0:
        raise DataError(
            f"{owner} has too few samples to hold some out for {purpose}.",
            f"{len(groups)} samples in {len(sizes)} groups, and a {purpose} fraction of {fraction}",
            f"Add samples, or raise {purpose if purpose == 'validation' else 'test_fraction'}.",
        )
    shuffled = _generator(seed, purpose).permutation(len(groups))
    grouped = np.split(shuffled[np.argsort(group[shuffled], kind="stable")], np.cumsum(sizes)[:-1])
    test = np.concatenate([rows[:quota] for rows, quota in zip(grouped, quotas, strict=True)])
    train = np.concatenate([rows[quota:] for rows, quota in zip(grouped, quotas, strict=True)])
    return np.sort(train), np.sort(test)


def with_test_part(
    name: str, x: np.ndarray, y: np.ndarray, class_names: tuple[str, ...], test_fraction: float, seed: int
) -> Dataset:
    """Make a data set of samples without a test part: hold out a fraction of every class."""
    train, test = hold_out(strata(y), test_fraction, seed, f"Data set '{name}'")
    return Dataset(name, x[train], y[train], x[test], y[test], len(class_names), class_names)


def with_validation_part(dataset: Dataset, fraction: float, seed: int, by: str | None = None) -> Dataset:
    """The data set with a fraction of its training samples, of every class, in place of its test part.

    It is for choosing hyper-parameters, so that the test samples stay unseen. `by`: an id to stratify by as well; see
    `strata`.
    """
    groups = strata(dataset.y, None if by is None else dataset.ids[by])
    kept, held = hold_out(groups, fraction, seed, f"Data set '{dataset.name}'", "validation")
    ids_test = {key: values[held] for key, values in dataset.ids.items()}
    return replace(_training_part(dataset, kept), x_test=dataset.x[held], y_test=dataset.y[held], ids_test=ids_test)


def without_test_part(dataset: Dataset) -> Dataset:
    """The data set without its test samples."""
    ids_test = {key: values[:0] for key, values in dataset.ids_test.items()}
    return replace(dataset, x_test=dataset.x_test[:0], y_test=dataset.y_test[:0], ids_test=ids_test)


def strata(y: np.ndarray, owners: np.ndarray | None = None) -> np.ndarray:
    """The group of each sample for `hold_out`: its owner and class; real values are one class.

    Only the class if groups would have fewer than two samples on average, one of which must stay for training.
    """
    classes = y if y.ndim == 1 else np.zeros(len(y), dtype=np.int64)
    if owners is None:
        return classes
    owner, label = (np.unique(values, return_inverse=True)[1] for values in (owners, classes))
    groups: np.ndarray = owner * (label.max() + 1) + label
    return groups if 2 * len(np.unique(groups)) <= len(groups) else classes


def split_public(dataset: Dataset, size: int | float, seed: int) -> tuple[np.ndarray, Dataset]:
    """Split off `size` training samples (a count, or a fraction below 1) as public, unlabelled samples.

    Returns the public x, in random order, and the data set without these samples.
    """
    total = len(dataset.x)
    too_much = isinstance(size, float) and size >= 1
    count = round(size * total) if isinstance(size, float) and math.isfinite(size) and not too_much else size
    if too_much or not _is_count(count) or not 1 <= count < total:
        raise DataError(
            f"Public data from data set '{dataset.name}' must be 1 to {total - 1} of its {total} training samples.",
            f"size {size!r}",
            "Give an integer number of samples, or a fraction between 0 and 1.",
        )
    order = _generator(seed, "reference").permutation(total)
    return dataset.x[order[:count]], _training_part(dataset, np.sort(order[count:]))


def subset(dataset: Dataset, samples: int | None, test_samples: int | None, seed: int) -> Dataset:
    """The data set with at most this many training and test samples, chosen by the seed."""
    if samples is not None:
        chosen = _choose(dataset.name, "samples", samples, len(dataset.x), seed)
        dataset = _training_part(dataset, chosen)
    if test_samples is not None:
        chosen = _choose(dataset.name, "test_samples", test_samples, len(dataset.x_test), seed)
        ids_test = {key: values[chosen] for key, values in dataset.ids_test.items()}
        dataset = replace(dataset, x_test=dataset.x_test[chosen], y_test=dataset.y_test[chosen], ids_test=ids_test)
    return dataset


def _choose(name: str, setting: str, count: int, total: int, seed: int) -> np.ndarray:
    if not _is_count(count) or count < 1:
        raise RecipeError(
            f"data.{setting} must be an integer, 1 or more.",
            f"{count!r}",
            "Remove it to keep all samples.",
        )
    if count > total:
        raise DataError(
            f"data.{setting} must not exceed the {total} samples of data set '{name}'.",
            f"{count}",
            "Lower it, or remove it to keep all samples.",
        )
    return np.sort(_generator(seed, setting).permutation(total)[:count])


def _training_part(dataset: Dataset, chosen: np.ndarray) -> Dataset:
    ids = {key: values[chosen] for key, values in dataset.ids.items()}
    return replace(dataset, x=dataset.x[chosen], y=dataset.y[chosen], ids=ids)


def _generator(seed: int, purpose: str) -> np.random.Generator:
    """An independent generator for each purpose, so that one choice does not affect another."""
    _check_seed(seed)
    return np.random.default_rng([seed, *purpose.encode()])


def _check_seed(seed: int) -> None:
    if not _is_count(seed) or seed < 0:
        raise RecipeError("The seed of the data must be an integer, 0 or more.", f"{seed!r}", "The default is 0.")


def _is_count(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


# --- scaling

SCALES = ("unit", "standard", "robust", "none")


@dataclass(frozen=True, eq=False)
class Scaling:
    """A fitted shift and divisor, to scale other samples in the same way."""

    shift: np.ndarray  # per channel or column, or one for all
    divisor: np.ndarray

    def apply(self, x: np.ndarray, owner: str) -> np.ndarray:
        """Samples as float32, shifted and scaled; `owner`: for the error."""
        part = _for_scaling(x)
        with np.errstate(over="ignore", invalid="ignore"):
            part -= self.shift.astype(part.dtype)
            part /= self.divisor.astype(part.dtype)
        check_finite(part, f"the scaled {owner}", missing=part.ndim == 2)
        return np.ascontiguousarray(part, dtype=np.float32)


def _for_scaling(x: np.ndarray) -> np.ndarray:
    """A copy of samples: float32 for images, float64 for tables."""
    # float32 would drop the digits in which columns such as dates differ.
    return x.astype(np.float32 if x.ndim == 4 else np.float64, order="C")


def scaled(dataset: Dataset, scale: str | None, full_range: float | None = None, columns: int | None = None) -> Dataset:
    """The data set as float32, scaled by its training samples; see `load`. `columns`: scale only so many, the first."""
    images = dataset.x.ndim == 4
    shift, divisor = _shift_and_divisor(_for_scaling(dataset.x), scale or ("unit" if images else "standard"))
    if columns is not None and columns < dataset.x.shape[1] and scale != "none":
        shift = np.where(np.arange(dataset.x.shape[1]) < columns, shift, 0)
        divisor = np.where(np.arange(dataset.x.shape[1]) < columns, divisor, 1)
    if images and scale in (None, "unit"):
        divisor = np.float64(full_range or largest_value(dataset.x))
    scaling = Scaling(np.asarray(shift), np.asarray(divisor))
    x_test, x = (
        scaling.apply(part, f"{name} of data set '{dataset.name}'")
        for name, part in (("x_test", dataset.x_test), ("x", dataset.x))
    )
    return replace(dataset, x=x, x_test=x_test, scaling=scaling)


def _shift_and_divisor(x: np.ndarray, scale: str) -> tuple[Any, Any]:
    """Shift and divisor per channel or column; the divisor of a constant one is 1."""
    over = (0, 2, 3) if x.ndim == 4 else (0,)
    if scale == "none" or (scale == "unit" and x.ndim == 4):
        return np.float64(0), np.float64(1)
    if scale == "robust":
        low, centre, high = np.nanquantile(x, (0.25, 0.5, 0.75), axis=over, keepdims=True)
        return centre, np.where(high > low, high - low, 1)
    # Missing values are NaN and only in tables, which are float64 here; every column has at least one value.
    gaps = bool(np.isnan(x).any())
    least, most = (np.nanmin, np.nanmax) if gaps else (np.min, np.max)
    low, high = least(x, axis=over, keepdims=True), most(x, axis=over, keepdims=True)
    if scale == "unit":
        return low, np.where(high > low, high - low, 1)
    mean, deviation = (np.nanmean, np.nanstd) if gaps else (np.mean, np.std)
    spread = deviation(x, axis=over, keepdims=True, dtype=np.float64)
    return mean(x, axis=over, keepdims=True, dtype=np.float64), np.where(high > low, spread, 1)


def own_scaler(scale: str | None) -> Any:
    """A scikit-learn transformer that scales a table in the same way; None for the scale "none"."""
    from sklearn.preprocessing import MinMaxScaler, RobustScaler, StandardScaler

    makers = {"standard": StandardScaler, "robust": RobustScaler, "unit": MinMaxScaler}
    return None if scale == "none" else makers[scale or "standard"]()


def largest_value(x: np.ndarray) -> float:
    """The largest value of the images' integer type; otherwise their largest magnitude, at least 1."""
    if x.dtype in (np.uint8, np.uint16):
        return float(np.iinfo(x.dtype).max)
    return max(1.0, float(np.abs(x.astype(np.float64)).max()))
