"""Where data sets come from: scikit-learn, a folder of .npz files, or Hugging Face."""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from codistill.data.dataset import Dataset, DatasetInfo
from codistill.data.labels import CLASSIFICATION, REGRESSION, agree_on_labels
from codistill.data.split import with_test_part
from codistill.data.validation import channels_first, checked_dataset
from codistill.errors import DataError, nearest

BUNDLED = ("breast_cancer", "digits", "linear", "wine")
FOLDER_VARIABLE = "CODISTILL_DATA"
ARRAYS = ("x_train", "y_train", "x_test", "y_test")
UNREADABLE = (OSError, ValueError, EOFError, MemoryError, NotImplementedError, zipfile.BadZipFile, zlib.error)


def bundled(name: str, test_fraction: float, seed: int) -> Dataset:
    """A data set that comes with scikit-learn, or is made up."""
    if name == "linear":
        return linear_regression(seed)
    import sklearn.datasets

    bunch = getattr(sklearn.datasets, f"load_{name}")()
    x = bunch.images[:, None] if name == "digits" else bunch.data
    names = tuple(str(each) for each in bunch.target_names)
    return with_test_part(name, x, bunch.target.astype(np.int64), names, test_fraction, seed)


def linear_regression(seed: int, features: int = 100, samples: int = 150, tested: int = 1000) -> Dataset:
    """A random linear regression b = A x* without noise, after Afonin & Karimireddy, appendix A.

    They draw n = 1.5 d samples, d = 100, and do not say from what: here all numbers are standard normal,
    and x* is scaled so that b has variance 1.
    """
    rng = np.random.default_rng([seed, *b"linear"])
    truth = rng.standard_normal((features, 1)) / np.sqrt(features)
    x, x_test = rng.standard_normal((samples, features)), rng.standard_normal((tested, features))
    return Dataset("linear", x, x @ truth, x_test, x_test @ truth, 1, ("b",))


def check_same_task(dataset: Dataset, task: str | None) -> None:
    """A bundled data set has the task that it has."""
    real = dataset.y.ndim == 2
    if task is not None and (task == REGRESSION) != real:
        raise DataError(
            f"The task of data set '{dataset.name}' is {'regression' if real else 'classification'}.",
            f'task = "{task}"',
            "Leave task out, or choose another data set.",
        )


def from_folder(name: str, data_dir: str | Path | None, task: str | None = None) -> Dataset:
    """The data set in the file `<name>.npz` of the data folder."""
    if not name or Path(name).name != name or "\\" in name:
        raise DataError(
            "The name of a data set must be a plain name without a path.",
            f"{name!r}",
            f"Give the folder by --data-dir or {FOLDER_VARIABLE}, and the name of a file in it without .npz.",
        )
    folder = data_folder(data_dir)
    path = folder / f"{name}.npz" if folder else None
    if path is None or not path.is_file():
        raise _unknown(name, folder)
    return _read_npz(name, path, task)


def find_table(path: str, data_dir: str | Path | None) -> Path:
    """A recipe's table: an absolute path where it was found beside the recipe, otherwise a file of the data folder."""
    folder = None if Path(path).is_absolute() else data_folder(data_dir)
    if Path(path).is_absolute() or (folder is not None and (folder / path).is_file()):
        return folder / path if folder else Path(path)
    raise DataError(
        "A table must be a file beside the recipe or in the data folder.",
        f"'{path}' in neither; the data folder is {folder or 'not set'}",
        f"Check the name, or set the data folder by --data-dir or {FOLDER_VARIABLE}.",
    )


def folder_catalogue(data_dir: str | Path | None) -> list[DatasetInfo]:
    """Describe every .npz file of the data folder, without reading the images."""
    return [_peek(path) for path in _files(data_folder(data_dir))]


def data_folder(data_dir: str | Path | None) -> Path | None:
    """The folder that was named, or that of the environment; None if neither is."""
    chosen = data_dir or os.environ.get(FOLDER_VARIABLE)
    if not chosen:
        return None
    folder = Path(chosen).expanduser()
    if not folder.is_dir():
        raise DataError("The data folder must exist.", f"{folder}", f"Set it by --data-dir or {FOLDER_VARIABLE}.")
    return folder


def _files(folder: Path | None) -> list[Path]:
    return sorted(folder.glob("*.npz")) if folder else []


def _unknown(name: str, folder: Path | None) -> DataError:
    held = [path.stem for path in _files(folder)]
    there = f"the folder {folder} holds {', '.join(held) or 'no .npz file'}" if folder else "no folder is set"
    return DataError(
        "A data set must be bundled, a file <name>.npz in the data folder, or 'hf:owner/name'.",
        f"'{name}', while {', '.join(BUNDLED)} are bundled and {there}",
        f"{nearest(name, [*BUNDLED, *held])} Set the folder by --data-dir or {FOLDER_VARIABLE}.",
    )


def _read_npz(name: str, path: Path, task: str | None) -> Dataset:
    try:
        with zipfile.ZipFile(path) as archive:
            keys = [entry.removesuffix(".npy") for entry in archive.namelist()]
            wanted = [key for key in keys if key in ARRAYS or key.endswith(("_train", "_test"))]
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
    flat = {key: each for key, each in arrays.items() if each.ndim == 1}
    ids = {key.removesuffix("_train"): each for key, each in flat.items() if key.endswith("_train")}
    ids_test = {key: flat[f"{key}_test"] for key in ids if f"{key}_test" in flat}
    return checked_dataset(name, x, y, x_test, y_test, ids, ids_test=ids_test, task=task)


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
            y = _read_array(archive, "y_train")
            labels, task = [(f"y_train of data set '{name}'", y)], CLASSIFICATION if y.ndim == 1 else None
            classes = agree_on_labels(labels, task=task).classes
        # A view of the shape of x that takes no memory.
        shape = channels_first(np.broadcast_to(np.uint8(0), train), f"x_train of data set '{name}'").shape
    except (*UNREADABLE, KeyError, DataError) as problem:
        return DatasetInfo(name, "folder", problem=str(problem))
    return DatasetInfo(name, "folder", train[0], test[0], shape[1:], classes)


def from_hugging_face(name: str, test_fraction: float, seed: int, task: str | None = None) -> Dataset:
    """The data set `hf:owner/name`, from Hugging Face or its cache."""
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
        y_test = np.asarray(list(test[label]))
        return checked_dataset(name, x, y, _columns(name, test, inputs), y_test, {}, names, task=task)
    whole = checked_dataset(name, x, y, x[:1], y[:1], {}, names, task=task)
    return with_test_part(name, whole.x, whole.y, whole.class_names, test_fraction, seed)


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
