"""Several data sets of one task as one, whose samples say which of them they are from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from codistill.data.dataset import Dataset
from codistill.errors import DataError

SOURCE = "source"  # the id that holds the name of a sample's data set


def joined(parts: Sequence[Dataset], ranges: Sequence[float | None]) -> Dataset:
    """All training samples as one data set, and all test samples; `ids["source"]` names the data set of each.

    `ranges`: the largest value that the images of each can have. All images get the range of the first data set.
    Other ids are left out, as they need not mean the same in all data sets.
    """
    names = [part.name for part in parts]
    if not names or len(set(names)) < len(names):
        raise DataError(
            "data.sources must name at least one data set, and each once.", f"{names}", "Name different data sets."
        )
    first = parts[0]
    for part in parts[1:]:
        _check_alike(first, part)
    factors = [1.0 if each is None or each == ranges[0] else (ranges[0] or 1.0) / each for each in ranges]
    return Dataset(
        " + ".join(names),
        np.concatenate([_times(part.x, factor) for part, factor in zip(parts, factors, strict=True)]),
        np.concatenate([part.y for part in parts]),
        np.concatenate([_times(part.x_test, factor) for part, factor in zip(parts, factors, strict=True)]),
        np.concatenate([part.y_test for part in parts]),
        first.classes,
        first.class_names,
        {SOURCE: np.repeat(names, [len(part.y) for part in parts])},
        {SOURCE: np.repeat(names, [len(part.y_test) for part in parts])},
    )


def _check_alike(first: Dataset, other: Dataset) -> None:
    if other.x.shape[1:] != first.x.shape[1:]:
        raise DataError(
            "All samples of data.sources must have one shape.",
            f"{first.x.shape[1:]} in '{first.name}', {other.x.shape[1:]} in '{other.name}'",
            "Images are brought to one shape by size and channels, e.g. size = 28 and channels = 3."
            if first.x.ndim == other.x.ndim == 4
            else "Name data sets of one shape.",
        )
    if other.class_names != first.class_names or other.y.ndim != first.y.ndim:
        raise DataError(
            "All data sets of data.sources must have the same classes.",
            f"{_classes(first)} in '{first.name}', {_classes(other)} in '{other.name}'",
            "Name data sets of one task.",
        )


def _classes(dataset: Dataset) -> str:
    if dataset.y.ndim != 1:
        return "real values"
    names = dataset.class_names
    shown = names if len(names) <= 4 else (*names[:2], "...", names[-1])
    return f"{len(names)} classes ({', '.join(shown)})"


def _times(x: np.ndarray, factor: float) -> np.ndarray:
    return x if factor == 1 else x.astype(np.float32) * np.float32(factor)
