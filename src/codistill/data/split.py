"""Seeded choices of samples: a test part, public data, a smaller subset."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from codistill.data.dataset import Dataset
from codistill.data.scale import SCALES
from codistill.errors import DataError, RecipeError, nearest


def check_split(test_fraction: float, seed: int, scale: str | None) -> None:
    """Check the settings that every source of data shares."""
    if not 0 < test_fraction < 1:
        raise RecipeError("data.test_fraction must be between 0 and 1.", f"{test_fraction!r}", "0.2 is a usual choice.")
    _check_seed(seed)
    if scale is not None and scale not in SCALES:
        raise RecipeError(f"data.scale must be one of {', '.join(SCALES)}.", f"{scale!r}", nearest(str(scale), SCALES))


def hold_out(
    groups: np.ndarray, fraction: float, seed: int, owner: str, purpose: str = "test"
) -> tuple[np.ndarray, np.ndarray]:
    """Indices of a training and a test (or validation) part that hold every group in the same proportion.

    Every group keeps at least one training sample, so no test label is unknown in training.
    """
    _, group, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    # Rounding the running total, not each share, gives many small groups their part too.
    quotas = np.diff(np.round(fraction * np.cumsum(sizes)).astype(int), prepend=0)
    quotas = np.minimum(quotas, sizes - 1)
    if quotas.sum() == 0:
        raise DataError(
            f"{owner} must have enough samples to hold some of each kind out for {purpose}.",
            f"{len(groups)} samples in {len(sizes)} groups, and a {purpose} fraction of {fraction}",
            f"Give more samples, or raise {purpose if purpose == 'validation' else 'test_fraction'}.",
        )
    shuffled = _generator(seed, purpose).permutation(len(groups))
    grouped = np.split(shuffled[np.argsort(group[shuffled], kind="stable")], np.cumsum(sizes)[:-1])
    test = np.concatenate([rows[:quota] for rows, quota in zip(grouped, quotas, strict=True)])
    train = np.concatenate([rows[quota:] for rows, quota in zip(grouped, quotas, strict=True)])
    return np.sort(train), np.sort(test)


def with_test_part(
    name: str, x: np.ndarray, y: np.ndarray, class_names: tuple[str, ...], test_fraction: float, seed: int
) -> Dataset:
    """A data set of samples that come without a test part: a fraction of every class becomes it."""
    strata = y if y.ndim == 1 else np.zeros(len(y), dtype=np.int64)
    train, test = hold_out(strata, test_fraction, seed, f"Data set '{name}'")
    return Dataset(name, x[train], y[train], x[test], y[test], len(class_names), class_names)


def with_validation_part(dataset: Dataset, fraction: float, seed: int, by: str | None = None) -> Dataset:
    """The data set with a fraction of its training samples, of every class, in place of its test part.

    Hyper-parameters are chosen on it, so that the test samples stay unseen. `by` names an id whose values are held
    out in the same proportion too: see `strata`.
    """
    classes = dataset.y if dataset.y.ndim == 1 else np.zeros(len(dataset.y), dtype=int)
    groups = strata(classes, None if by is None else dataset.ids[by])
    kept, held = hold_out(groups, fraction, seed, f"Data set '{dataset.name}'", "validation")
    ids_test = {key: values[held] for key, values in dataset.ids.items()}
    return replace(_training_part(dataset, kept), x_test=dataset.x[held], y_test=dataset.y[held], ids_test=ids_test)


def strata(classes: np.ndarray, owners: np.ndarray | None) -> np.ndarray:
    """The group of each sample for `hold_out`: its owner and class.

    Only the class where owners are so many that a group has less than two samples on average, one of which must stay.
    """
    if owners is None:
        return classes
    owner, label = (np.unique(values, return_inverse=True)[1] for values in (owners, classes))
    groups: np.ndarray = owner * (label.max() + 1) + label
    return groups if 2 * len(np.unique(groups)) <= len(groups) else classes


def split_public(dataset: Dataset, size: int | float, seed: int) -> tuple[np.ndarray, Dataset]:
    """Split off `size` training samples (a count, or a fraction below 1) as public, unlabelled ones.

    Returns the public x, in random order, and the data set without those samples.
    """
    total = len(dataset.x)
    too_much = isinstance(size, float) and size >= 1
    count = round(size * total) if isinstance(size, float) and math.isfinite(size) and not too_much else size
    if too_much or not _is_count(count) or not 1 <= count < total:
        raise DataError(
            f"Public data split off data set '{dataset.name}' must take at least 1 of its {total} "
            f"training samples and leave at least 1.",
            f"size {size!r}",
            "Give a count of samples as an integer, or a fraction between 0 and 1.",
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
            "Leave it out to keep all samples.",
        )
    if count > total:
        raise DataError(
            f"data.{setting} must be at most what data set '{name}' holds.",
            f"{count} of {total} samples",
            "Lower it, or leave it out to keep all samples.",
        )
    return np.sort(_generator(seed, setting).permutation(total)[:count])


def _training_part(dataset: Dataset, chosen: np.ndarray) -> Dataset:
    ids = {key: values[chosen] for key, values in dataset.ids.items()}
    return replace(dataset, x=dataset.x[chosen], y=dataset.y[chosen], ids=ids)


def _generator(seed: int, purpose: str) -> np.random.Generator:
    """Independent randomness for each purpose, so that one choice does not shift another."""
    _check_seed(seed)
    return np.random.default_rng([seed, *purpose.encode()])


def _check_seed(seed: int) -> None:
    if not _is_count(seed) or seed < 0:
        raise RecipeError("The seed of the data must be an integer, 0 or more.", f"{seed!r}", "Try 0.")


def _is_count(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
