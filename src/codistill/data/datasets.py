"""Data sets by name: bundled with scikit-learn, from a folder of .npz files, or from Hugging Face."""

from __future__ import annotations

import hashlib
import math
import os
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from codistill.errors import DataError, RecipeError, nearest

BUNDLED = ("breast_cancer", "digits", "wine")
FOLDER_VARIABLE = "CODISTILL_DATA"
SCALES = ("unit", "standard", "none")
CLASS_LIMIT = 1_000_000
ARRAYS = ("x_train", "y_train", "x_test", "y_test")
UNREADABLE = (OSError, ValueError, EOFError, MemoryError, NotImplementedError, zipfile.BadZipFile, zlib.error)


@dataclass(frozen=True, eq=False)
class Dataset:
    """Training and test samples of one classification task.

    `x` is float32: images (samples, channels, height, width) or tables (samples, features); `y` is int64
    in 0 … classes-1. `ids` says of every training sample where it comes from, e.g. `{"writer": …}`.
    """

    name: str
    x: np.ndarray
    y: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    classes: int
    class_names: tuple[str, ...]
    ids: dict[str, np.ndarray] = field(default_factory=dict)


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


def load(
    name: str,
    data_dir: str | Path | None = None,
    test_fraction: float = 0.2,
    seed: int = 0,
    samples: int | None = None,
    test_samples: int | None = None,
    scale: str | None = None,
) -> Dataset:
    """Load a data set by name.

    `name` is a bundled set (`digits`, `breast_cancer`, `wine`); `hf:owner/name` for Hugging Face; or the
    file `<name>.npz` in `data_dir`, which is by default the environment variable `CODISTILL_DATA`. A
    bundled name always means the bundled set.

    An .npz file holds x_train, y_train, x_test and y_test. Its x are tables (N, d), grey images (N, H, W),
    or images with a channel axis, last or first: it is the axis 1 or 3 whose length is 1, 3 or 4; if both
    are, the shorter one, and of two equal ones the last. A one-dimensional array `<id>_train` becomes
    `ids["<id>"]`.

    Sets without a test part are split: `test_fraction` of every class, chosen by `seed`. `samples` and
    `test_samples` keep a random subset, also chosen by `seed`; a smaller subset is part of a larger one.

    `scale` uses the training samples that are kept. "unit": images divided by the range of their type, or
    by their largest magnitude where the type does not tell and it exceeds 1; the columns of tables mapped
    to 0 … 1. "standard": mean 0 and standard deviation 1, per channel or column. "none": unchanged. By
    default images are "unit" and tables "standard".
    """
    check_split(test_fraction, seed, scale)
    if name.startswith("hf:"):
        raw = _from_hugging_face(name, test_fraction, seed)
    elif name in BUNDLED:
        raw = _bundled(name, test_fraction, seed)
    else:
        raw = _from_folder(name, data_dir)
    kept = _subset(raw, samples, test_samples, seed)
    return scaled(kept, scale, full_range=16.0 if name == "digits" else None)


def catalogue(data_dir: str | Path | None = None) -> list[DatasetInfo]:
    """Describe every bundled set and every .npz file of the data folder, without reading the images."""
    bundled = [load(name) for name in BUNDLED]
    infos = [
        DatasetInfo(each.name, "bundled", len(each.x), len(each.x_test), each.x.shape[1:], each.classes)
        for each in bundled
    ]
    return infos + [_peek(path) for path in _files(_folder(data_dir))]


def validate_samples(x: Any, y: Any, classes: int, owner: str) -> tuple[np.ndarray, np.ndarray]:
    """Check a user's samples; return x as float32 and y as int64 labels or as float32 targets.

    `y` is one label per sample, or a matrix with one real-valued target per sample and class. `owner`
    names whose samples they are, e.g. "agent 'a'".
    """
    features = _features(x, f"the samples x of {owner}")
    targets = _array(y, f"the labels y of {owner}")
    if targets.ndim == 2:
        if targets.shape[1] != classes:
            raise DataError(
                f"Real-valued targets y of {owner} must have one column for each of {classes} classes.",
                f"an array of shape {targets.shape}",
                "For labels, give a one-dimensional array, e.g. y.ravel().",
            )
        _check_finite(targets, f"the targets y of {owner}")
        targets = np.ascontiguousarray(targets, dtype=np.float32)
    else:
        targets = _labels(targets, f"the labels y of {owner}", classes)
    _check_lengths(features, targets, owner)
    return np.ascontiguousarray(features, dtype=np.float32), targets


def digest(x: np.ndarray) -> str:
    """The SHA-256 of an array's type, shape and values: equal arrays, on any machine, have equal digests."""
    array = np.asarray(x)
    if array.dtype.hasobject:
        raise DataError("An array with a digest must hold plain values.", "Python objects", "Convert it.")
    array = array.astype(array.dtype.newbyteorder("<"), copy=False)
    digested = hashlib.sha256(f"{array.dtype.str} {array.shape}\n".encode())
    digested.update(array.tobytes(order="C"))
    return digested.hexdigest()


def split_reference(dataset: Dataset, size: int | float, seed: int) -> tuple[np.ndarray, Dataset]:
    """Split off `size` training samples (a count, or a fraction below 1) as public, unlabelled ones.

    Returns the public x, in random order, and the data set without those samples.
    """
    total = len(dataset.x)
    count = round(size * total) if isinstance(size, float) and math.isfinite(size) else size
    too_much = isinstance(size, float) and size >= 1
    if too_much or not _is_count(count) or not 1 <= count < total:
        raise DataError(
            f"A reference set split off data set '{dataset.name}' must take at least 1 of its {total} "
            f"training samples and leave at least 1.",
            f"size {size!r}",
            "Give a count of samples as an integer, or a fraction between 0 and 1.",
        )
    order = _generator(seed, "reference").permutation(total)
    return dataset.x[order[:count]], _training_part(dataset, np.sort(order[count:]))


def check_split(test_fraction: float, seed: int, scale: str | None) -> None:
    """Hold the settings that every source of data shares to their bounds."""
    if not 0 < test_fraction < 1:
        raise RecipeError("data.test_fraction must be between 0 and 1.", f"{test_fraction!r}", "0.2 is a usual choice.")
    _check_seed(seed)
    if scale is not None and scale not in SCALES:
        raise RecipeError(f"data.scale must be one of {', '.join(SCALES)}.", f"{scale!r}", nearest(str(scale), SCALES))


def hold_out(strata: np.ndarray, fraction: float, seed: int, owner: str) -> tuple[np.ndarray, np.ndarray]:
    """Indices of a training and a test part that hold every stratum in the same proportion.

    Every stratum keeps at least one training sample, so no test label is unknown in training.
    """
    _, stratum, sizes = np.unique(strata, return_inverse=True, return_counts=True)
    # Rounding the running total, not each share, gives many small strata their part all the same.
    quotas = np.diff(np.round(fraction * np.cumsum(sizes)).astype(int), prepend=0)
    quotas = np.minimum(quotas, sizes - 1)
    if quotas.sum() == 0:
        raise DataError(
            f"{owner} must have enough samples to hold some of each kind out for testing.",
            f"{len(strata)} samples in {len(sizes)} groups, and a test fraction of {fraction}",
            "Give more samples, or raise test_fraction.",
        )
    shuffled = _generator(seed, "test").permutation(len(strata))
    grouped = np.split(shuffled[np.argsort(stratum[shuffled], kind="stable")], np.cumsum(sizes)[:-1])
    test = np.concatenate([group[:quota] for group, quota in zip(grouped, quotas, strict=True)])
    train = np.concatenate([group[quota:] for group, quota in zip(grouped, quotas, strict=True)])
    return np.sort(train), np.sort(test)


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
        _check_finite(part, f"the scaled {key} of data set '{dataset.name}'")
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


def _bundled(name: str, test_fraction: float, seed: int) -> Dataset:
    import sklearn.datasets

    bunch = getattr(sklearn.datasets, f"load_{name}")()
    x = bunch.images[:, None] if name == "digits" else bunch.data
    names = tuple(str(each) for each in bunch.target_names)
    return _without_test(name, x, bunch.target.astype(np.int64), names, test_fraction, seed)


def _without_test(
    name: str, x: np.ndarray, y: np.ndarray, class_names: tuple[str, ...], test_fraction: float, seed: int
) -> Dataset:
    train, test = hold_out(y, test_fraction, seed, f"Data set '{name}'")
    return Dataset(name, x[train], y[train], x[test], y[test], len(class_names), class_names)


def _folder(data_dir: str | Path | None) -> Path | None:
    chosen = data_dir or os.environ.get(FOLDER_VARIABLE)
    if not chosen:
        return None
    folder = Path(chosen).expanduser()
    if not folder.is_dir():
        raise DataError("The data folder must exist.", f"{folder}", f"Set it by --data-dir or {FOLDER_VARIABLE}.")
    return folder


def _files(folder: Path | None) -> list[Path]:
    return sorted(folder.glob("*.npz")) if folder else []


def _from_folder(name: str, data_dir: str | Path | None) -> Dataset:
    if not name or Path(name).name != name or "\\" in name:
        raise DataError(
            "The name of a data set must be a plain name without a path.",
            f"{name!r}",
            f"Give the folder by --data-dir or {FOLDER_VARIABLE}, and the name of a file in it without .npz.",
        )
    folder = _folder(data_dir)
    path = folder / f"{name}.npz" if folder else None
    if path is None or not path.is_file():
        raise _unknown(name, folder)
    return _read_npz(name, path)


def _unknown(name: str, folder: Path | None) -> DataError:
    held = [path.stem for path in _files(folder)]
    there = f"the folder {folder} holds {', '.join(held) or 'no .npz file'}" if folder else "no folder is set"
    return DataError(
        "A data set must be bundled, a file <name>.npz in the data folder, or 'hf:owner/name'.",
        f"'{name}', while {', '.join(BUNDLED)} are bundled and {there}",
        f"{nearest(name, [*BUNDLED, *held])} Set the folder by --data-dir or {FOLDER_VARIABLE}.",
    )


def _read_npz(name: str, path: Path) -> Dataset:
    try:
        with zipfile.ZipFile(path) as archive:
            keys = [entry.removesuffix(".npy") for entry in archive.namelist()]
            wanted = [key for key in keys if key in ARRAYS or key.endswith("_train")]
            arrays = {key: _read_array(archive, key) for key in wanted}
    except UNREADABLE as problem:
        raise DataError(
            f"Data set '{name}' must be a readable .npz file without Python objects.",
            f"{path}: {problem}",
            "Write it by numpy.savez with arrays of numbers.",
        ) from problem
    missing = [key for key in ARRAYS if key not in arrays]
    if missing:
        raise DataError(
            f"Data set '{name}' must hold the arrays {', '.join(ARRAYS)}.",
            f"no {', no '.join(missing)} in {path}",
            "Add what is missing.",
        )
    x, y, x_test, y_test = (arrays.pop(key) for key in ARRAYS)
    ids = {key.removesuffix("_train"): each for key, each in arrays.items() if each.ndim == 1}
    return _checked(name, x, y, x_test, y_test, ids)


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
        return DatasetInfo(name, "folder", problem="The bundled set has this name; rename the file.")
    try:
        with zipfile.ZipFile(path) as archive:
            train, test = _read_shape(archive, "x_train"), _read_shape(archive, "x_test")
            y = _labels(_read_array(archive, "y_train"), f"y_train of data set '{name}'")
        # A view of the shape of x that takes no memory.
        shape = _channels_first(np.broadcast_to(np.uint8(0), train), f"x_train of data set '{name}'").shape
    except (*UNREADABLE, KeyError, DataError) as problem:
        return DatasetInfo(name, "folder", problem=str(problem))
    return DatasetInfo(name, "folder", train[0], test[0], shape[1:], int(y.max()) + 1)


def _from_hugging_face(name: str, test_fraction: float, seed: int) -> Dataset:
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
    except Exception as problem:  # the library passes on whatever its many sources raise
        raise DataError(
            f"Data set '{name}' must be available on Hugging Face or in its cache.",
            f"{type(problem).__name__}: {problem}",
            "Check the name, written hf:owner/name, and the network.",
        ) from problem
    if "train" not in splits:
        raise DataError(f"Data set '{name}' must have a split 'train'.", f"{', '.join(splits)}", "Choose another set.")
    train = splits["train"]
    test = next((splits[key] for key in ("test", "validation") if key in splits), None)
    inputs, label = _choose_columns(name, train.features)
    x, y = _columns(name, train, inputs), np.asarray(list(train[label]))
    names = tuple(getattr(train.features[label], "names", ()))
    if test is not None:
        return _checked(name, x, y, _columns(name, test, inputs), np.asarray(list(test[label])), {}, names)
    whole = _checked(name, x, y, x[:1], y[:1], {}, names)
    return _without_test(name, whole.x, whole.y, whole.class_names, test_fraction, seed)


def _choose_columns(name: str, features: Mapping[str, Any]) -> tuple[list[str], str]:
    """The one image column, or else all numeric ones; and the label column."""
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
            "Convert it to a .npz file and load that from the data folder.",
        )
    return inputs, labels[0]


def _columns(name: str, split: Any, columns: Sequence[str]) -> np.ndarray:
    parts = [[np.asarray(value) for value in split[column]] for column in columns]
    shapes = sorted({value.shape for part in parts for value in part})
    if len(shapes) != 1:
        raise DataError(
            f"All samples of data set '{name}' must have the same shape.",
            f"shapes {', '.join(map(str, shapes[:3]))}",
            "Resize them into a .npz file and load that from the data folder.",
        )
    return np.stack(parts[0]) if shapes[0] else np.column_stack(parts)


def _checked(
    name: str,
    x: np.ndarray,
    y: np.ndarray,
    x_test: np.ndarray,
    y_test: np.ndarray,
    ids: dict[str, np.ndarray],
    class_names: tuple[str, ...] = (),
) -> Dataset:
    owner = f"data set '{name}'"
    x = _channels_first(_features(x, f"x_train of {owner}"), f"x_train of {owner}")
    x_test = _channels_first(_features(x_test, f"x_test of {owner}"), f"x_test of {owner}")
    y = _labels(y, f"y_train of {owner}", len(class_names) or None)
    y_test = _labels(y_test, f"y_test of {owner}", len(class_names) or None)
    _check_lengths(x, y, f"the training part of {owner}")
    _check_lengths(x_test, y_test, f"the test part of {owner}")
    if x.shape[1:] != x_test.shape[1:]:
        raise DataError(
            f"Training and test samples of {owner} must have the same shape.",
            f"{x.shape[1:]} and {x_test.shape[1:]}",
            "Bring them to the same shape.",
        )
    unknown = np.setdiff1d(y_test, y)
    if len(unknown):
        raise DataError(
            f"Every test label of {owner} must also be in its training part.",
            f"label {unknown[0]} only in y_test",
            "Remove those test samples or add training samples of that class.",
        )
    for key, values in ids.items():
        if len(values) != len(y):
            raise DataError(
                f"The ids {key}_train of {owner} must give one id to each training sample.",
                f"{len(values)} ids for {len(y)} samples",
                "Make them as long as y_train, or give the array another name.",
            )
    class_names = class_names or tuple(map(str, range(int(y.max()) + 1)))
    return Dataset(name, x, y, x_test, y_test, len(class_names), class_names, ids)


def _channels_first(x: np.ndarray, what: str) -> np.ndarray:
    """Tables as they are; images as (samples, channels, height, width), by the rule in `load`."""
    if x.ndim == 2:
        return x
    if x.ndim == 3:
        return x[:, None]
    axes = [axis for axis in (3, 1) if x.ndim == 4 and x.shape[axis] in (1, 3, 4)]
    if not axes:
        raise DataError(
            f"The samples {what} must be a table (N, d), or images (N, H, W), (N, H, W, C) or (N, C, H, W) "
            "with 1, 3 or 4 channels.",
            f"shape {x.shape}",
            "Reshape them.",
        )
    return np.moveaxis(x, min(axes, key=lambda axis: x.shape[axis]), 1)


def _array(values: Any, what: str) -> np.ndarray:
    try:
        array = np.asarray(values)
    except ValueError as problem:
        raise DataError(
            f"It must be possible to read {what} as one array.", f"{problem}", "Make all rows equally long."
        ) from problem
    if array.dtype.kind not in "buif":
        raise DataError(
            f"All values in {what} must be numbers.",
            f"an array of type {array.dtype}",
            "Convert or encode what is not a number.",
        )
    return array


def _features(x: Any, what: str) -> np.ndarray:
    array = _array(x, what)
    if array.ndim < 2 or array.size == 0:
        raise DataError(
            f"There must be at least one sample and one feature in {what}, the first axis being the samples.",
            f"an array of shape {array.shape}",
            "Give samples; a single feature needs the shape (n, 1).",
        )
    _check_finite(array, what)
    return array


def _check_finite(array: np.ndarray, what: str) -> None:
    if array.dtype.kind != "f":
        return
    with np.errstate(over="ignore"):
        fine = np.isfinite(array.astype(np.float32, copy=False)).reshape(len(array), -1)
    if not fine.all():
        row = int(fine.all(axis=1).argmin())
        value = array[row].reshape(-1)[int(fine[row].argmin())]
        raise DataError(
            f"All values in {what} must be finite 32-bit numbers.",
            f"{value} in row {row} (counted from 0)",
            "Fill in, rescale or remove such rows.",
        )


def _labels(y: Any, what: str, classes: int | None = None) -> np.ndarray:
    array = _array(y, what)
    if array.ndim != 1 or array.size == 0:
        raise DataError(
            f"There must be one label for each sample in {what}.",
            f"an array of shape {array.shape}",
            "Give a one-dimensional array, e.g. y.ravel().",
        )
    limit = classes or CLASS_LIMIT
    wrong = (array < 0) | (array >= limit)
    if array.dtype.kind == "f":
        wrong |= array != np.floor(array)
    if wrong.any():
        row = int(wrong.argmax())
        raise DataError(
            f"Every label in {what} must be a whole number from 0 to {limit - 1}.",
            f"{array[row]} in row {row} (counted from 0)",
            "Number the classes 0, 1, 2 and so on.",
        )
    return array.astype(np.int64)


def _check_lengths(x: np.ndarray, y: np.ndarray, owner: str) -> None:
    if len(x) != len(y):
        raise DataError(
            f"There must be as many labels as samples in {owner}.",
            f"{len(x)} samples and {len(y)} labels",
            "Check that both come from the same source, in the same order.",
        )


def _is_count(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _subset(dataset: Dataset, samples: int | None, test_samples: int | None, seed: int) -> Dataset:
    if samples is not None:
        chosen = _choose(dataset.name, "samples", samples, len(dataset.x), seed)
        dataset = _training_part(dataset, chosen)
    if test_samples is not None:
        chosen = _choose(dataset.name, "test_samples", test_samples, len(dataset.x_test), seed)
        dataset = replace(dataset, x_test=dataset.x_test[chosen], y_test=dataset.y_test[chosen])
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
