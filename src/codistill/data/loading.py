"""Data sets by name: bundled with scikit-learn, from a folder of .npz files, or from Hugging Face."""

from __future__ import annotations

from pathlib import Path

from codistill.data import sources
from codistill.data.dataset import Dataset, DatasetInfo
from codistill.data.scale import scaled
from codistill.data.split import check_split, split_public, subset

__all__ = ["Dataset", "DatasetInfo", "catalogue", "load", "split_public"]


def load(
    name: str,
    data_dir: str | Path | None = None,
    test_fraction: float = 0.2,
    seed: int = 0,
    samples: int | None = None,
    test_samples: int | None = None,
    scale: str | None = None,
    task: str | None = None,
) -> Dataset:
    """Load a data set by name.

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

    `scale` uses the training samples that are kept. "unit": images divided by the range of their type, or
    by their largest magnitude where the type does not tell and it exceeds 1; the columns of tables mapped
    to 0 … 1. "standard": mean 0 and standard deviation 1, per channel or column. "robust": median 0 and
    interquartile range 1. "none": unchanged. By default images are "unit" and tables "standard". With the
    task "regression" the labels of an .npz file or of Hugging Face are real values to predict.
    """
    check_split(test_fraction, seed, scale)
    if name.startswith("hf:"):
        raw = sources.from_hugging_face(name, test_fraction, seed, task)
    elif name in sources.BUNDLED:
        raw = sources.bundled(name, test_fraction, seed)
        sources.check_same_task(raw, task)
    else:
        raw = sources.from_folder(name, data_dir, task)
    kept = subset(raw, samples, test_samples, seed)
    return scaled(kept, scale, full_range=16.0 if name == "digits" else None)


def catalogue(data_dir: str | Path | None = None) -> list[DatasetInfo]:
    """Describe every bundled set and every .npz file of the data folder, without reading the images."""
    bundled = [load(name) for name in sources.BUNDLED]
    infos = [
        DatasetInfo(each.name, "bundled", len(each.x), len(each.x_test), each.x.shape[1:], each.classes)
        for each in bundled
    ]
    return infos + sources.folder_catalogue(data_dir)
