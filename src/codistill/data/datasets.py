"""Data sets by name: bundled with scikit-learn, from a folder of .npz files, or from Hugging Face."""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import interpolate

from codistill.core.errors import DataError, nearest
from codistill.data.labels import CLASSIFICATION, REGRESSION, agree_on_labels
from codistill.data.split import check_split, largest_value, scaled, split_public, subset, with_test_part
from codistill.data.validation import Dataset, channels_first, checked_dataset

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

    `name` is a bundled set (`digits`, `breast_cancer`, `wine`, or `linear`: a synthetic linear regression),
    `hf:owner/name` for Hugging Face, or the file `<name>.npz` in `data_dir` (default: the environment variable
    `CODISTILL_DATA`). A bundled name always means the bundled set.

    An .npz file holds x_train, y_train, x_test and y_test. Its x are tables (N, d), grey images (N, H, W), or images
    with a channel axis, last or first: axis 1 or 3 with length 1, 3 or 4; if both qualify, the shorter one, and of two
    equal ones the last. A one-dimensional array `<id>_train` becomes `ids["<id>"]`, and `<id>_test` beside it
    `ids_test["<id>"]`.

    Sets without a test part are split: `test_fraction` of every class, chosen by `seed`. `samples` and `test_samples`
    keep a random subset, also chosen by `seed`; a smaller subset is part of a larger one. `size` and `channels`:
    convert images to this size and number of channels; see `resized`.

    With several names, `samples` and `test_samples` apply to each; `ids["source"]` and `ids_test["source"]` name the
    data set of a sample, and other ids are dropped. All must have the same classes and, after `size` and `channels`,
    the same shape. Images get the range of values of the first data set.

    `scale` is fitted to the kept training samples. "unit": divide images by the range of their type, or, for types
    without a natural range, by their largest magnitude if it exceeds 1; map the columns of tables to 0 … 1.
    "standard": mean 0 and standard deviation 1, per channel or column. "robust": median 0 and interquartile range 1.
    "none": unchanged. The default is "unit" for images and "standard" for tables. With the task "regression", the
    labels of an .npz file or of Hugging Face are real values to predict.
    """
    check_split(test_fraction, seed, scale)
    names = (name,) if isinstance(name, str) else tuple(name)
    parts, ranges = [], []
    for each in names:
        if each.startswith("hf:"):
            whole = from_hugging_face(each, test_fraction, seed, task)
        elif each in BUNDLED:
            whole = bundled(each, test_fraction, seed, task)
        else:
            whole = from_folder(each, data_dir, task)
        kept = subset(whole, samples, test_samples, seed)
        # Before resizing, which changes the type of images.
        ranges.append(16.0 if each == "digits" else largest_value(kept.x) if kept.x.ndim == 4 else None)
        parts.append(resized(kept, size, channels))
    if isinstance(name, str):
        return scaled(parts[0], scale, full_range=ranges[0])
    return scaled(joined(parts, ranges), scale, full_range=ranges[0])


@dataclass(frozen=True)
class DatasetInfo:
    """One line of the catalogue; `problem` says why a file cannot be used, and is empty otherwise."""

    name: str
    where: str
    train: int = 0
    test: int = 0
    shape: tuple[int, ...] = ()
    classes: int = 0
    problem: str = ""


def catalogue(data_dir: str | Path | None = None) -> list[DatasetInfo]:
    """Describe every bundled set and every .npz file of the data folder, without reading the images."""
    infos = [
        DatasetInfo(each.name, "bundled", len(each.x), len(each.x_test), each.x.shape[1:], each.classes)
        for each in map(load, BUNDLED)
    ]
    folder = data_folder(data_dir)
    return infos + [_peek(path) for path in (sorted(folder.glob("*.npz")) if folder else [])]


# --- images of one size and number of channels

LUMA = (0.299, 0.587, 0.114)  # of red, green and blue in a grey value (ITU-R BT.601)


def resized(dataset: Dataset, size: int | None, channels: int | None) -> Dataset:
    """The data set with images of `size` x `size` pixels and `channels` channels; changed images are float32.

    Interpolation is bilinear with antialiasing. A grey image is repeated in every channel; colours become their luma.
    """
    if size is None and channels is None:
        return dataset
    if dataset.x.ndim != 4:
        raise DataError(
            "data.size and data.channels need images.",
            f"samples of shape {dataset.x.shape[1:]} in data set '{dataset.name}'",
            "Remove them.",
        )
    x, x_test = (_with_size(_with_channels(part, channels, dataset.name), size) for part in (dataset.x, dataset.x_test))
    return replace(dataset, x=x, x_test=x_test)


def _with_channels(images: np.ndarray, channels: int | None, name: str) -> np.ndarray:
    given = images.shape[1]
    if channels is None or channels == given:
        return images
    if given == 1:
        return np.repeat(images, channels, axis=1)
    if (given, channels) == (3, 1):
        return np.tensordot(images.astype(np.float32), np.array(LUMA, np.float32), axes=(1, 0))[:, None]
    raise DataError(
        "data.channels must equal that of the images, except from grey to any number, or from 3 to 1.",
        f"{channels} for the {given} channels of data set '{name}'",
        f"Set channels = {given}, or convert the images.",
    )


def _with_size(images: np.ndarray, size: int | None) -> np.ndarray:
    if size is None or images.shape[2:] == (size, size):
        return images
    floats = torch.from_numpy(np.ascontiguousarray(images, dtype=np.float32))
    # align_corners=False: the outer edges of both images coincide.
    pixels = interpolate(floats, (size, size), mode="bilinear", align_corners=False, antialias=True)
    return np.asarray(pixels.numpy())


# --- several data sets of one task as one

SOURCE = "source"  # the id with the name of a sample's data set


def joined(parts: Sequence[Dataset], ranges: Sequence[float | None]) -> Dataset:
    """All training samples and all test samples as one data set; `ids["source"]` names the data set of each.

    `ranges`: the largest possible value of the images of each. All images get the range of the first data set. Other
    ids are dropped, as they may have different meanings.
    """
    names = [part.name for part in parts]
    if not names or len(set(names)) < len(names):
        raise DataError("data.sources must list one or more different data sets.", f"{names}", "Correct the list.")
    first = parts[0]
    for other in parts[1:]:
        if other.x.shape[1:] != first.x.shape[1:]:
            raise DataError(
                "All samples of data.sources must have the same shape.",
                f"{first.x.shape[1:]} in '{first.name}', {other.x.shape[1:]} in '{other.name}'",
                "Convert the images with size and channels, e.g. size = 28 and channels = 3."
                if first.x.ndim == other.x.ndim == 4
                else "Choose data sets of one shape.",
            )
        if other.class_names != first.class_names or other.y.ndim != first.y.ndim:
            raise DataError(
                "All data sets of data.sources must have the same classes.",
                f"{_classes(first)} in '{first.name}', {_classes(other)} in '{other.name}'",
                "Choose data sets of one task.",
            )
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


def _classes(dataset: Dataset) -> str:
    if dataset.y.ndim != 1:
        return "real values"
    names = dataset.class_names
    shown = names if len(names) <= 4 else (*names[:2], "...", names[-1])
    return f"{len(names)} classes ({', '.join(shown)})"


def _times(x: np.ndarray, factor: float) -> np.ndarray:
    return x if factor == 1 else x.astype(np.float32) * np.float32(factor)


# --- sources: scikit-learn, a folder of .npz files, Hugging Face

BUNDLED = ("breast_cancer", "digits", "linear", "wine")
FOLDER_VARIABLE = "CODISTILL_DATA"
ARRAYS = ("x_train", "y_train", "x_test", "y_test")
UNREADABLE = (OSError, ValueError, EOFError, MemoryError, NotImplementedError, zipfile.BadZipFile, zlib.error)


def bundled(name: str, test_fraction: float, seed: int, task: str | None) -> Dataset:
    real = name == "linear"
    if task is not None and (task == REGRESSION) != real:
        raise DataError(
            f"The task of data set '{name}' is {'regression' if real else 'classification'}.",
            f'task = "{task}"',
            "Remove task, or choose another data set.",
        )
    if real:
        return linear_regression(seed)
    import sklearn.datasets

    bunch = getattr(sklearn.datasets, f"load_{name}")()
    x = bunch.images[:, None] if name == "digits" else bunch.data
    names = tuple(str(each) for each in bunch.target_names)
    return with_test_part(name, x, bunch.target.astype(np.int64), names, test_fraction, seed)


def linear_regression(seed: int) -> Dataset:
    """A random linear regression b = A x* without noise, after Afonin & Karimireddy, appendix A.

    They draw n = 1.5 d samples, d = 100, and do not state the distribution: here all numbers are standard normal, and
    x* is scaled so that b has variance 1.
    """
    features, samples, tested = 100, 150, 1000
    rng = np.random.default_rng([seed, *b"linear"])
    truth = rng.standard_normal((features, 1)) / np.sqrt(features)
    x, x_test = rng.standard_normal((samples, features)), rng.standard_normal((tested, features))
    return Dataset("linear", x, x @ truth, x_test, x_test @ truth, 1, ("b",))


def from_folder(name: str, data_dir: str | Path | None, task: str | None) -> Dataset:
    if not name or Path(name).name != name or "\\" in name:
        raise DataError(
            "The name of a data set must not contain a path.",
            f"{name!r}",
            f"Set the folder with --data-dir or {FOLDER_VARIABLE}, and give the name of a file in it without .npz.",
        )
    folder = data_folder(data_dir)
    path = folder / f"{name}.npz" if folder else None
    if path is None or not path.is_file():
        held = [each.stem for each in sorted(folder.glob("*.npz"))] if folder else []
        there = f"the data folder {folder} holds {', '.join(held) or 'no .npz file'}"
        raise DataError(
            f"Unknown data set '{name}': it must be bundled, a file <name>.npz in the data folder, or 'hf:owner/name'.",
            f"bundled are {', '.join(BUNDLED)}; {there if folder else 'no data folder is set'}",
            f"{nearest(name, [*BUNDLED, *held])} Set the data folder with --data-dir or {FOLDER_VARIABLE}.",
        )
    try:
        with zipfile.ZipFile(path) as archive:
            keys = [entry.removesuffix(".npy") for entry in archive.namelist()]
            wanted = [key for key in keys if key in ARRAYS or key.endswith(("_train", "_test"))]
            arrays = {key: _read_array(archive, key) for key in wanted}
    except UNREADABLE as problem:
        raise DataError(
            f"Data set '{name}' must be a readable .npz file without Python objects.",
            f"{path}: {problem}",
            "Write it with numpy.savez, as arrays of numbers.",
        ) from problem
    missing = [key for key in ARRAYS if key not in arrays]
    if missing:
        raise DataError(
            f"Data set '{name}' must hold the arrays {', '.join(ARRAYS)}.",
            f"no {', no '.join(missing)} in {path}",
            "Add them.",
        )
    x, y, x_test, y_test = (arrays.pop(key) for key in ARRAYS)
    flat = {key: each for key, each in arrays.items() if each.ndim == 1}
    ids = {key.removesuffix("_train"): each for key, each in flat.items() if key.endswith("_train")}
    ids_test = {key: flat[f"{key}_test"] for key in ids if f"{key}_test" in flat}
    return checked_dataset(name, x, y, x_test, y_test, ids, ids_test=ids_test, task=task)


def find_table(path: str, data_dir: str | Path | None) -> Path:
    """A recipe's table: an absolute path if it was found beside the recipe, otherwise a file of the data folder."""
    return _find(path, data_dir, "table", "file")


def find_folder(path: str, data_dir: str | Path | None) -> Path:
    """The same for a folder of files."""
    return _find(path, data_dir, "folder", "folder")


def _find(path: str, data_dir: str | Path | None, what: str, kind: str) -> Path:
    folder = None if Path(path).is_absolute() else data_folder(data_dir)
    if Path(path).is_absolute():
        return Path(path)
    if folder is not None and ((folder / path).is_file() if kind == "file" else (folder / path).is_dir()):
        return folder / path
    raise DataError(
        f"The {what} '{path}' must be beside the recipe or in the data folder.",
        f"no such {kind}; the data folder is {folder or 'not set'}",
        f"Check the name, or set the data folder with --data-dir or {FOLDER_VARIABLE}.",
    )


def data_folder(data_dir: str | Path | None) -> Path | None:
    """The given folder, or that of the environment; None if neither is set."""
    chosen = data_dir or os.environ.get(FOLDER_VARIABLE)
    if not chosen:
        return None
    folder = Path(chosen).expanduser()
    if not folder.is_dir():
        raise DataError("The data folder must exist.", f"no {folder}", f"Set it with --data-dir or {FOLDER_VARIABLE}.")
    return folder


def _read_array(archive: zipfile.ZipFile, key: str) -> np.ndarray:
    with archive.open(f"{key}.npy") as stream:
        try:
            return np.lib.format.read_array(stream, allow_pickle=False)
        except UNREADABLE as problem:
            raise ValueError(f"{key}: {problem}") from problem


def _read_shape(archive: zipfile.ZipFile, key: str) -> tuple[int, ...]:
    with archive.open(f"{key}.npy") as stream:
        old = np.lib.format.read_magic(stream) == (1, 0)
        read = np.lib.format.read_array_header_1_0 if old else np.lib.format.read_array_header_2_0
        return tuple(read(stream)[0])


def _peek(path: Path) -> DatasetInfo:
    name = path.stem
    if name in BUNDLED:
        return DatasetInfo(name, "folder", problem="A bundled set has this name; rename the file.")
    try:
        with zipfile.ZipFile(path) as archive:
            train, test = _read_shape(archive, "x_train"), _read_shape(archive, "x_test")
            y = _read_array(archive, "y_train")
            labels, task = [(f"y_train of data set '{name}'", y)], CLASSIFICATION if y.ndim == 1 else None
            classes = agree_on_labels(labels, task=task).classes
        # A view with the shape of x, without its memory.
        shape = channels_first(np.broadcast_to(np.uint8(0), train), f"x_train of data set '{name}'").shape
    except (*UNREADABLE, KeyError, DataError) as problem:
        return DatasetInfo(name, "folder", problem=str(problem))
    return DatasetInfo(name, "folder", train[0], test[0], shape[1:], classes)


def from_hugging_face(name: str, test_fraction: float, seed: int, task: str | None) -> Dataset:
    try:
        import datasets
    except ImportError as problem:
        raise DataError(
            f"Data set '{name}' needs the package 'datasets'.",
            "it is not installed",
            "Run: pip install codistill[huggingface]",
        ) from problem
    try:
        splits = datasets.load_dataset(name.removeprefix("hf:"))
    except Exception as problem:  # the library does not document its errors
        raise DataError(
            f"Data set '{name}' must be available on Hugging Face or in its cache.",
            f"{type(problem).__name__}: {problem}",
            "Check the name, hf:owner/name, and the network.",
        ) from problem
    if "train" not in splits:
        found = f"splits {', '.join(splits)}"
        raise DataError(f"Data set '{name}' must have a split 'train'.", found, "Choose another data set.")
    train = splits["train"]
    test = next((splits[key] for key in ("test", "validation") if key in splits), None)
    inputs, label = _choose_columns(name, train.features)
    x, y = _columns(name, train, inputs), np.asarray(list(train[label]))
    names = tuple(getattr(train.features[label], "names", ()))
    if test is not None:
        y_test = np.asarray(list(test[label]))
        return checked_dataset(name, x, y, _columns(name, test, inputs), y_test, {}, names, task=task)
    whole = checked_dataset(name, x, y, x[:1], y[:1], {}, names, task=task)
    return with_test_part(name, whole.x, whole.y, whole.class_names, test_fraction, seed)


def _choose_columns(name: str, features: Mapping[str, Any]) -> tuple[list[str], str]:
    """The first image column, or otherwise all numeric ones; and the label column."""
    kinds = {column: type(kind).__name__ for column, kind in features.items()}
    labels = [column for column, kind in kinds.items() if kind == "ClassLabel"]
    labels += [column for column in ("label", "labels", "target", "y") if column in kinds]
    inputs = [column for column, kind in kinds.items() if kind == "Image"][:1] or [
        column
        for column, kind in features.items()
        if str(getattr(kind, "dtype", "")).startswith(("int", "uint", "float"))
        and kinds[column] == "Value"
        and column not in labels
    ]
    if not labels or not inputs:
        raise DataError(
            f"Data set '{name}' must have a label column and either an image or numeric columns.",
            ", ".join(f"{column} ({kind})" for column, kind in kinds.items()),
            "Convert it to a .npz file in the data folder.",
        )
    return inputs, labels[0]


def _columns(name: str, split: Any, columns: Sequence[str]) -> np.ndarray:
    parts = [[np.asarray(value) for value in split[column]] for column in columns]
    shapes = sorted({value.shape for part in parts for value in part})
    if len(shapes) != 1:
        raise DataError(
            f"All samples of data set '{name}' must have the same shape.",
            f"shapes {', '.join(map(str, shapes[:3]))}",
            "Resize them into a .npz file in the data folder.",
        )
    return np.stack(parts[0]) if shapes[0] else np.column_stack(parts)
