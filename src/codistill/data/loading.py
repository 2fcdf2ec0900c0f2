"""Data sets by name: bundled with scikit-learn, from a folder of .npz files, or from Hugging Face."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from codistill.data import sources
from codistill.data.dataset import Dataset, DatasetInfo
from codistill.data.images import resized
from codistill.data.joined import joined
from codistill.data.scale import largest_value, scaled
from codistill.data.split import check_split, split_public, subset

__all__ = ["Dataset", "DatasetInfo", "catalogue", "load", "split_public"]


def load(
    name: str | Sequence[str],
    data_dir: str | Path | None = None,
    test_fraction: float = 0.2,
    seed: int = 0,
    samples: int | None = None,
    test_samples: int | None = None,
    scale: str | None = None,
    task: str | None = None,
    size: int | None = None,
    channels: int | None = None,
) -> Dataset:
    """Load a data set by name, or several of one task as one.

    `name` is a bundled set (`digits`, `breast_cancer`, `wine`, or `linear`: a made-up linear regression with
    real-valued targets); `hf:owner/name` for Hugging Face; or the
    file `<name>.npz` in `data_dir`, which is by default the environment variable `CODISTILL_DATA`. A
    bundled name always means the bundled set.

    An .npz file holds x_train, y_train, x_test and y_test. Its x are tables (N, d), grey images (N, H, W),
    or images with a channel axis, last or first: it is the axis 1 or 3 whose length is 1, 3 or 4; if both
    are, the shorter one, and of two equal ones the last. A one-dimensional array `<id>_train` becomes
    `ids["<id>"]`, and `<id>_test` beside it `ids_test["<id>"]`.

    Sets without a test part are split: `test_fraction` of every class, chosen by `seed`. `samples` and
    `test_samples` keep a random subset, also chosen by `seed`; a smaller subset is part of a larger one.

    `size` and `channels`: images become squares of so many pixels and have so many channels; see `resized`.

    Of several names, `samples` and `test_samples` count for each; `ids["source"]` and `ids_test["source"]` name
    the data set of a sample, and other ids are left out. All must have the same classes and, after `size` and
    `channels`, one shape. Images get the range of values of the first data set.

    `scale` uses the training samples that are kept. "unit": images divided by the range of their type, or
    by their largest magnitude where the type does not tell and it exceeds 1; the columns of tables mapped
    to 0 … 1. "standard": mean 0 and standard deviation 1, per channel or column. "robust": median 0 and
    interquartile range 1. "none": unchanged. By default images are "unit" and tables "standard". With the
    task "regression" the labels of an .npz file or of Hugging Face are real values to predict.
    """
    check_split(test_fraction, seed, scale)
    names = (name,) if isinstance(name, str) else tuple(name)
    parts, ranges = [], []
    for each in names:
        kept = subset(_read(each, data_dir, test_fraction, seed, task), samples, test_samples, seed)
        # Before images are resized: then their type no longer tells.
        ranges.append(16.0 if each == "digits" else largest_value(kept.x) if kept.x.ndim == 4 else None)
        parts.append(resized(kept, size, channels))
    if isinstance(name, str):
        return scaled(parts[0], scale, full_range=ranges[0])
    return scaled(joined(parts, ranges), scale, full_range=ranges[0])


def _read(name: str, data_dir: str | Path | None, test_fraction: float, seed: int, task: str | None) -> Dataset:
    """All samples of one data set, as they are."""
    if name.startswith("hf:"):
        return sources.from_hugging_face(name, test_fraction, seed, task)
    if name in sources.BUNDLED:
        bundled = sources.bundled(name, test_fraction, seed)
        sources.check_same_task(bundled, task)
        return bundled
    return sources.from_folder(name, data_dir, task)


def catalogue(data_dir: str | Path | None = None) -> list[DatasetInfo]:
    """Describe every bundled set and every .npz file of the data folder, without reading the images."""
    bundled = [load(name) for name in sources.BUNDLED]
    infos = [
        DatasetInfo(each.name, "bundled", len(each.x), len(each.x_test), each.x.shape[1:], each.classes)
        for each in bundled
    ]
    return infos + sources.folder_catalogue(data_dir)
