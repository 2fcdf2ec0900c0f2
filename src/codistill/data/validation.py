"""Data sets, and validation of user data: arrays, data frames, sparse matrices and torch datasets."""

from __future__ import annotations

import hashlib
import math
import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data import Dataset as TorchDataset

from codistill.core.errors import DataError
from codistill.core.rng import Key, seed_libraries
from codistill.data.cells import is_numeric
from codistill.data.frames import Names, as_frame, in_order, texts
from codistill.data.labels import CLASSIFICATION, REGRESSION, LabelEncoding, agree_on_labels

if TYPE_CHECKING:
    import pandas as pd

    from codistill.data.columns import Columns
    from codistill.data.split import Scaling

DENSE_LIMIT = 2 << 30  # bytes that a sparse matrix may take as a dense array


_EXACT = 1 << 24  # integers up to here are exact in float32


def validate_samples(x: Any, y: Any, classes: int, owner: str, columns: Names = ()) -> tuple[np.ndarray, np.ndarray]:
    """Check a user's samples; return x as floats and y as int64 labels or as real-valued targets.

    float64 is kept, since kernel regression needs more digits than float32 has, and so are large integers; everything
    else becomes float32. NaN in a table (n, d) is a missing value, which an agent imputes if its model does not accept
    it. Frames and sparse matrices become arrays; frames with the column order `columns`.

    `y` is one label per sample, or a matrix with one real-valued target per sample and class. `owner`: for errors,
    e.g. "agent 'a'".
    """
    what = f"the samples x of {owner}"
    features = _features(plain_samples(x, what, columns), what, missing=True)
    targets = _array(y, f"the labels y of {owner}")
    if targets.ndim == 2:
        if targets.shape[1] != classes:
            raise DataError(
                f"Real-valued targets y of {owner} must have one column for each of {classes} classes.",
                f"an array of shape {targets.shape}",
                "For labels, pass a one-dimensional array, e.g. y.ravel().",
            )
        check_finite(targets, f"the targets y of {owner}")
        targets = as_floats(targets)
    else:
        targets = checked_labels(targets, f"the labels y of {owner}", classes)
    _check_lengths(features, targets, owner)
    return as_floats(features), targets


def encoded_samples(
    x: Any, y: Any, encoding: LabelEncoding, owner: str, columns: Names = ()
) -> tuple[np.ndarray, np.ndarray]:
    """Check samples with the user's labels (strings, booleans, numbers); see `validate_samples`."""
    return validate_samples(x, encoding.encode(y, owner), encoding.classes, owner, columns)


def as_floats(array: np.ndarray) -> np.ndarray:
    """float64 stays, integers that float32 cannot hold become float64, anything else becomes float32."""
    large = array.dtype.kind in "iu" and array.size and max(abs(int(array.min())), abs(int(array.max()))) > _EXACT
    return np.ascontiguousarray(array, dtype=np.float64 if large or array.dtype == np.float64 else np.float32)


@dataclass(frozen=True, eq=False)
class Dataset:
    """Training and test samples of one task.

    `x` is float32: images (samples, channels, height, width) or tables (samples, features); `y` is int64
    in 0 … classes-1, or real-valued with a column per output. `ids` says of every training sample where it comes
    from, e.g. `{"writer": …}`; `ids_test` of every test sample, as far as that is known.
    """

    name: str
    x: np.ndarray
    y: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    classes: int
    class_names: tuple[str, ...]
    ids: dict[str, np.ndarray] = field(default_factory=dict)
    ids_test: dict[str, np.ndarray] = field(default_factory=dict)
    columns: Columns | None = None  # of a table: what its features are made from
    scaling: Scaling | None = None  # what was done to the values as they were read
    text: str | None = None  # the column of texts, if each sample is a text: then `x` is (samples,), of strings


def checked_dataset(
    name: str,
    x: np.ndarray,
    y: np.ndarray,
    x_test: np.ndarray,
    y_test: np.ndarray,
    ids: dict[str, np.ndarray],
    class_names: tuple[str, ...] = (),
    ids_test: dict[str, np.ndarray] | None = None,
    task: str | None = None,
) -> Dataset:
    """A data set of a user's arrays, with images as (samples, channels, height, width)."""
    owner = f"data set '{name}'"
    x = channels_first(_features(x, f"x_train of {owner}"), f"x_train of {owner}")
    x_test = channels_first(_features(x_test, f"x_test of {owner}"), f"x_test of {owner}")
    given = {f"y_train of {owner}": y, f"y_test of {owner}": y_test}
    if class_names and task != REGRESSION:
        encoding = LabelEncoding(CLASSIFICATION, len(class_names))
    else:
        encoding = agree_on_labels([*given.items()], task=task or CLASSIFICATION)
        class_names = encoding.shown
    found = []
    for what, values in given.items():
        numbers = encoding.encode(values, what)
        if task == REGRESSION:
            check_finite(numbers, what)
            found.append(as_floats(numbers))
        else:
            found.append(checked_labels(numbers, what, encoding.classes))
    y, y_test = found
    _check_lengths(x, y, f"the training part of {owner}")
    _check_lengths(x_test, y_test, f"the test part of {owner}")
    check_shape(x_test.shape[1:], x.shape[1:], f"the test part of {owner}", "the training part")
    unknown = np.setdiff1d(y_test, y).tolist() if y.ndim == 1 else []
    if unknown:
        raise DataError(
            f"Every test label of {owner} must also be in its training part.",
            f"label {class_names[unknown[0]]} only in y_test",
            "Remove those test samples or add training samples of that class.",
        )
    ids_test = ids_test or {}
    for part, of_part, samples in (("train", ids, len(y)), ("test", ids_test, len(y_test))):
        for key, values in of_part.items():
            if len(values) != samples:
                raise DataError(
                    f"The ids {key}_{part} of {owner} must have one id per {part}{'ing' * (part == 'train')} sample.",
                    f"{len(values)} ids for {samples} samples",
                    f"Make it as long as y_{part}, or rename the array.",
                )
    return Dataset(name, x, y, x_test, y_test, len(class_names), class_names, ids, ids_test)


def digest(x: np.ndarray) -> str:
    """The SHA-256 of an array's type, shape and values (numbers or strings), equal on any machine."""
    array = np.asarray(x)
    if array.dtype.hasobject and all(isinstance(each, str) for each in array.flat):
        written = hashlib.sha256(f"text {array.shape}\n".encode())
        for each in array.flat:
            written.update(f"{len(each.encode())} {each}".encode())
        return written.hexdigest()
    if array.dtype.hasobject:
        raise DataError("Only arrays of plain values have a digest.", "Python objects", "Convert them to numbers.")
    array = array.astype(array.dtype.newbyteorder("<"), copy=False)
    digested = hashlib.sha256(f"{array.dtype.str} {array.shape}\n".encode())
    digested.update(array.tobytes(order="C"))
    return digested.hexdigest()


def channels_first(x: np.ndarray, what: str) -> np.ndarray:
    """Images as (samples, channels, height, width), by the rule in `load`; tables unchanged."""
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


def _features(x: Any, what: str, *, missing: bool = False) -> np.ndarray:
    array = _array(plain_samples(x, what), what)
    if array.ndim < 2 or array.size == 0:
        raise DataError(
            f"There must be at least one sample and one feature in {what}, with samples along the first axis.",
            f"an array of shape {array.shape}",
            "Reshape it; a single feature needs the shape (n, 1).",
        )
    check_finite(array, what, missing=missing and array.ndim == 2)
    return array


def plain_samples(x: Any, what: str, columns: Names = (), *, leave_out: bool = False) -> Any:
    """The values of a frame or a sparse matrix as an array; anything else unchanged.

    `columns`: the required columns of a frame in their order, if known; others raise an error, or are dropped.
    """
    sparse = sys.modules.get("scipy.sparse")
    if sparse is not None and sparse.issparse(x):
        size = 4 * math.prod(x.shape)
        if size > DENSE_LIMIT:
            raise DataError(
                f"A sparse matrix in {what} must take at most {DENSE_LIMIT >> 30} GiB as a dense array of 32-bit "
                "numbers.",
                f"shape {x.shape}, which takes {size / (1 << 30):.1f} GiB",
                "Reduce its columns first, e.g. with sklearn.decomposition.TruncatedSVD or fewer hashed features.",
            )
        return x.astype(np.float32).toarray()
    frame = as_frame(x)
    if frame is None:
        return x
    from pandas.api.types import is_bool_dtype, is_numeric_dtype

    frame = in_order(frame, columns, what, leave_out=leave_out)
    if len(frame) and not all(map(is_numeric_dtype, frame.dtypes)):
        raise not_numbers(frame, what)
    mixed = len({is_bool_dtype(kind) for kind in frame.dtypes}) > 1  # their common type in numpy is object
    exact = all(isinstance(kind, np.dtype) for kind in frame.dtypes) and not mixed and len(frame)
    return frame.to_numpy() if exact else frame.to_numpy(dtype=np.float64, na_value=np.nan)


_SHOWN = 8  # columns in a message


def not_numbers(frame: pd.DataFrame, what: str) -> DataError:
    """All columns of a frame that hold no numbers, and what turns them into numbers."""
    from codistill.data.problems import find_problems, python_advice

    names = texts(frame.columns)
    found = find_problems(frame.set_axis(list(names), axis=1), {}, what)
    wanted = [each for each in found if each.kind or each.missing or (each.stops and each.drop)]
    kinds = zip(names, frame.dtypes, strict=True)
    shown = [f"'{name}' ({kind})" for place, (name, kind) in enumerate(kinds) if not is_numeric(frame.iloc[:, place])]
    more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    do = [f"Encode them: {python_advice(wanted)}."] if wanted else []
    do += ["Or use a scikit-learn pipeline that encodes them, as the model or as prepare=: it gets the frame as it is."]
    return DataError(
        f"All values in {what} must be numbers.",
        f"column{'s' * (len(shown) > 1)} {', '.join(shown[:_SHOWN])}{more}",
        " ".join(do),
    )


def checked_labels(y: Any, what: str, classes: int) -> np.ndarray:
    """Labels as int64 in 0 … classes-1."""
    array = _array(y, what)
    if array.ndim != 1 or array.size == 0:
        raise DataError(
            f"There must be one label for each sample in {what}.",
            f"an array of shape {array.shape}",
            "Pass a one-dimensional array, e.g. y.ravel().",
        )
    wrong = (array < 0) | (array >= classes)
    if array.dtype.kind == "f":
        wrong |= array != np.floor(array)
    if wrong.any():
        row = int(wrong.argmax())
        fraction = array[row] != np.floor(array[row])
        real_values = " Real values to predict need the shape (n, 1): y.reshape(-1, 1)." if fraction else ""
        raise DataError(
            f"Every label in {what} must be a whole number from 0 to {classes - 1}.",
            f"{array[row]} in row {row} (counted from 0)",
            f"Number the classes 0, 1, 2 and so on.{real_values}",
        )
    return array.astype(np.int64)


def check_finite(array: np.ndarray, what: str, *, missing: bool = False) -> None:
    """Raise `DataError` unless every value is finite in float32, or NaN if values may be `missing`."""
    if array.dtype.kind != "f" or not array.size:
        return
    with np.errstate(over="ignore"):
        fine = np.isfinite(array.astype(np.float32, copy=False)).reshape(len(array), -1)
    if missing and not fine.all():
        fine |= np.isnan(array)
    if not fine.all():
        row = int(fine.all(axis=1).argmin())
        value = array[row].reshape(-1)[int(fine[row].argmin())]
        raise DataError(
            f"All values in {what} must be finite 32-bit numbers.",
            f"{value} in row {row} (counted from 0)",
            "Impute, rescale or remove such rows.",
        )


def check_shape(shape: tuple[int, ...], wanted: tuple[int, ...], owner: str, first: str) -> None:
    if shape != wanted:
        raise DataError(
            f"All samples must have the shape of those of {first}, {wanted}.",
            f"{owner} has {shape}",
            "Reshape the samples.",
        )


def _check_lengths(x: np.ndarray, y: np.ndarray, owner: str) -> None:
    if len(x) != len(y):
        raise DataError(
            f"There must be as many labels as samples in {owner}.",
            f"{len(x)} samples and {len(y)} labels",
            "Check that both come from the same source, in the same order.",
        )


def _array(values: Any, what: str) -> np.ndarray:
    if values is None:
        raise DataError(f"There must be {what}.", "None", "Pass them, or only a torch Dataset of pairs (x, y).")
    if is_dataset(values):
        raise DataError(
            f"Cannot read {what} as one array.",
            f"a torch {type(values).__name__}",
            "Pass a dataset of pairs (x, y) alone, Agent(name, model, dataset); elsewhere pass arrays.",
        )
    try:
        array = np.asarray(values)
    except ValueError as problem:
        raise DataError(f"Cannot read {what} as one array.", f"{problem}", "Make all rows equally long.") from problem
    if array.dtype.kind not in "buif":
        raise DataError(
            f"All values in {what} must be numbers.",
            f"an array of type {array.dtype}",
            "Convert or encode the other values.",
        )
    return array


# --- torch datasets

_COMPARED = 64  # items that are read twice, to find out whether they are random


def is_dataset(data: Any) -> bool:
    return isinstance(data, TorchDataset | DataLoader)


def read_dataset(data: Any, owner: str) -> tuple[np.ndarray, np.ndarray, Any]:
    """All samples and labels, and the data set itself if its items are random (None otherwise)."""
    items: Any = data.dataset if isinstance(data, DataLoader) else data  # the federation makes its own batches
    whole = not isinstance(data, DataLoader) or type(data.sampler) in (SequentialSampler, RandomSampler)
    if not whole and not isinstance(items, IterableDataset):
        raise DataError(
            f"The DataLoader of {owner} must cover its whole dataset, since the federation draws the batches.",
            f"a sampler of type {type(data.sampler).__name__}",
            "Pass the dataset, or torch.utils.data.Subset(dataset, indices).",
        )
    with seeded(0, "dataset"):
        each: Iterable[Any] = items if isinstance(items, IterableDataset) else (items[i] for i in range(len(items)))
        pairs = [_pair(item, owner) for item in each]
    if not pairs:
        raise DataError(f"The dataset of {owner} must not be empty.", "no samples", "Check the dataset.")
    x = _stacked([sample for sample, _ in pairs], owner)
    y = np.asarray([label for _, label in pairs])
    if isinstance(items, IterableDataset):
        return x, y, None
    few = np.arange(min(len(x), _COMPARED))
    with seeded(1, "dataset"):
        is_random = not np.array_equal(read_items(items, few, owner), x[few])
    return x, y, items if is_random else None


def read_items(items: Any, indices: np.ndarray, owner: str) -> np.ndarray:
    return _stacked([_pair(items[int(i)], owner)[0] for i in indices], owner)


@contextmanager
def seeded(seed: int, *keys: Key) -> Iterator[None]:
    """Seed the libraries temporarily, and restore their states, so that reading does not affect dropout."""
    before = torch.default_generator.get_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
    seed_libraries(seed, *keys)
    try:
        yield
    finally:
        torch.default_generator.set_state(before[0])
        np.random.set_state(before[1])  # noqa: NPY002
        random.setstate(before[2])


def _pair(item: Any, owner: str) -> tuple[np.ndarray, Any]:
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise DataError(
            f"Every item of the dataset of {owner} must be a pair of a sample and a label.",
            f"{type(item).__name__} of {len(item)}" if isinstance(item, tuple | list) else type(item).__name__,
            "Return (x, y) from __getitem__.",
        )
    return np.asarray(item[0], dtype=np.float32), np.asarray(item[1]).tolist()


def _stacked(samples: list[np.ndarray], owner: str) -> np.ndarray:
    shapes = sorted({sample.shape for sample in samples})
    if len(shapes) > 1:
        raise DataError(
            f"All items of the dataset of {owner} must have the same shape.",
            f"{shapes[0]} and {shapes[1]}",
            "Resize or crop them in the dataset's transform.",
        )
    return np.stack(samples)
