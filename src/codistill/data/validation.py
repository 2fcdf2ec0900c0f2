"""Validation of a user's arrays: each error says what is wrong and what to do."""

from __future__ import annotations

import hashlib
import math
import sys
from typing import Any

import numpy as np

from codistill.data.dataset import Dataset
from codistill.data.labels import CLASSIFICATION, REGRESSION, LabelEncoding, agree_on_labels
from codistill.data.named_columns import Names, as_frame, in_order
from codistill.data.torch_datasets import is_dataset
from codistill.errors import DataError

CLASS_LIMIT = 1_000_000
DENSE_LIMIT = 2 << 30  # bytes that a sparse matrix may take as a dense array
REAL_VALUES = " Real values to predict need the shape (n, 1): y.reshape(-1, 1)."


def validate_samples(x: Any, y: Any, classes: int, owner: str, columns: Names = ()) -> tuple[np.ndarray, np.ndarray]:
    """Check a user's samples; return x as floats and y as int64 labels or as real-valued targets.

    Double precision is kept where it is given (kernel regression is exact to more digits than float32 has);
    everything else becomes float32. NaN in a table (n, d) is a missing value: an agent fills it in where its model does
    not take it. Frames and sparse matrices become arrays; those of a frame have its columns in the order of `columns`.

    `y` is one label per sample, or a matrix with one real-valued target per sample and class. `owner`
    names whose samples they are, e.g. "agent 'a'".
    """
    features = _features(
        plain_samples(x, f"the samples x of {owner}", columns), f"the samples x of {owner}", missing=True
    )
    targets = _array(y, f"the labels y of {owner}")
    if targets.ndim == 2:
        if targets.shape[1] != classes:
            raise DataError(
                f"Real-valued targets y of {owner} must have one column for each of {classes} classes.",
                f"an array of shape {targets.shape}",
                "For labels, give a one-dimensional array, e.g. y.ravel().",
            )
        check_finite(targets, f"the targets y of {owner}")
        targets = as_floats(targets)
    else:
        targets = checked_labels(targets, f"the labels y of {owner}", classes, real_values=REAL_VALUES)
    _check_lengths(features, targets, owner)
    return as_floats(features), targets


def encoded_samples(
    x: Any, y: Any, encoding: LabelEncoding, owner: str, columns: Names = ()
) -> tuple[np.ndarray, np.ndarray]:
    """Check samples whose labels are as a user gave them: strings, booleans, numbers; see `validate_samples`."""
    return validate_samples(x, encoding.encode(y, owner), encoding.classes, owner, columns)


def as_floats(array: np.ndarray) -> np.ndarray:
    """Numbers as float64 if they are that, otherwise as float32."""
    return np.ascontiguousarray(array, dtype=np.float64 if array.dtype == np.float64 else np.float32)


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
    y, y_test, class_names = _labels_of_dataset(y, y_test, owner, class_names, task)
    _check_lengths(x, y, f"the training part of {owner}")
    _check_lengths(x_test, y_test, f"the test part of {owner}")
    if x.shape[1:] != x_test.shape[1:]:
        raise DataError(
            f"Training and test samples of {owner} must have the same shape.",
            f"{x.shape[1:]} and {x_test.shape[1:]}",
            "Bring them to the same shape.",
        )
    unknown = np.setdiff1d(y_test, y).tolist() if y.ndim == 1 else []
    if unknown:
        raise DataError(
            f"Every test label of {owner} must also be in its training part.",
            f"label {class_names[unknown[0]]} only in y_test",
            "Remove those test samples or add training samples of that class.",
        )
    ids_test = ids_test or {}
    _check_ids(ids, "train", len(y), owner)
    _check_ids(ids_test, "test", len(y_test), owner)
    return Dataset(name, x, y, x_test, y_test, len(class_names), class_names, ids, ids_test)


def _check_ids(ids: dict[str, np.ndarray], part: str, samples: int, owner: str) -> None:
    for key, values in ids.items():
        if len(values) != samples:
            raise DataError(
                f"The ids {key}_{part} of {owner} must give one id to each {part}{'ing' * (part == 'train')} sample.",
                f"{len(values)} ids for {samples} samples",
                f"Make them as long as y_{part}, or give the array another name.",
            )


def _labels_of_dataset(
    y: Any, y_test: Any, owner: str, class_names: tuple[str, ...], task: str | None
) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
    """Training and test labels as numbers of the classes, or real values; and the names of the classes."""
    parts = {f"y_train of {owner}": y, f"y_test of {owner}": y_test}
    if class_names and task != REGRESSION:
        encoding = LabelEncoding(CLASSIFICATION, len(class_names))
    else:
        encoding = agree_on_labels([*parts.items()], task=task or CLASSIFICATION)
        class_names = encoding.shown
    found = []
    for what, values in parts.items():
        numbers = encoding.encode(values, what)
        if task == REGRESSION:
            check_finite(numbers, what)
            found.append(as_floats(numbers))
        else:
            found.append(checked_labels(numbers, what, encoding.classes))
    return found[0], found[1], class_names


def digest(x: np.ndarray) -> str:
    """The SHA-256 of an array's type, shape and values: equal arrays, on any machine, have equal digests."""
    array = np.asarray(x)
    if array.dtype.hasobject:
        raise DataError("An array with a digest must hold plain values.", "Python objects", "Convert it.")
    array = array.astype(array.dtype.newbyteorder("<"), copy=False)
    digested = hashlib.sha256(f"{array.dtype.str} {array.shape}\n".encode())
    digested.update(array.tobytes(order="C"))
    return digested.hexdigest()


def channels_first(x: np.ndarray, what: str) -> np.ndarray:
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


def _features(x: Any, what: str, *, missing: bool = False) -> np.ndarray:
    array = _array(plain_samples(x, what), what)
    if array.ndim < 2 or array.size == 0:
        raise DataError(
            f"There must be at least one sample and one feature in {what}, the first axis being the samples.",
            f"an array of shape {array.shape}",
            "Give samples; a single feature needs the shape (n, 1).",
        )
    check_finite(array, what, missing=missing and array.ndim == 2)
    return array


def plain_samples(x: Any, what: str, columns: Names = (), *, leave_out: bool = False) -> Any:
    """A frame's or a sparse matrix's values as an array; anything else as it is.

    `columns`: the names of a frame's columns in their order, where that is settled; others are refused, or left out.
    """
    sparse = sys.modules.get("scipy.sparse")
    if sparse is not None and sparse.issparse(x):
        return _dense(x, what)
    frame = as_frame(x)
    if frame is None:
        return x
    from pandas.api.types import is_bool_dtype, is_numeric_dtype

    frame = in_order(frame, columns, what, leave_out=leave_out)
    for column, kind in zip(frame.columns, frame.dtypes, strict=True):
        if not is_numeric_dtype(kind) and len(frame):
            raise DataError(
                f"All values in {what} must be numbers.",
                f"column '{column}' of type {kind}",
                f'Encode it by codistill.Columns({{"{column}": "category"}}).fit(x).transform(x), or leave it out.',
            )
    mixed = len({is_bool_dtype(kind) for kind in frame.dtypes}) > 1  # numpy has no common type of these but object
    exact = all(isinstance(kind, np.dtype) for kind in frame.dtypes) and not mixed and len(frame)
    return frame.to_numpy() if exact else frame.to_numpy(dtype=np.float64, na_value=np.nan)


def _dense(x: Any, what: str) -> np.ndarray:
    """Models of all kinds read dense arrays, so a sparse matrix must be small enough to become one."""
    size = 4 * math.prod(x.shape)
    if size > DENSE_LIMIT:
        raise DataError(
            f"A sparse matrix in {what} must take at most {DENSE_LIMIT >> 30} GiB as a dense array of 32-bit numbers.",
            f"shape {x.shape}, which takes {size / (1 << 30):.1f} GiB",
            "Reduce its columns first, e.g. by sklearn.decomposition.TruncatedSVD or fewer hashed features.",
        )
    dense: np.ndarray = x.astype(np.float32).toarray()
    return dense


def checked_labels(y: Any, what: str, classes: int | None = None, *, real_values: str = "") -> np.ndarray:
    """A user's labels as int64 in 0 … classes-1; `real_values` is the advice if they are not labels."""
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
            f"Number the classes 0, 1, 2 and so on.{real_values if array[row] != np.floor(array[row]) else ''}",
        )
    return array.astype(np.int64)


def check_finite(array: np.ndarray, what: str, *, missing: bool = False) -> None:
    """Raise `DataError` unless every value is finite in float32, or NaN where values may be `missing`."""
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
            "Fill in, rescale or remove such rows.",
        )


def check_shape(x: np.ndarray, wanted: tuple[int, ...], owner: str, first: str) -> None:
    """All samples of a federation have one shape."""
    if x.shape[1:] != wanted:
        raise DataError(
            f"All samples must have the shape of those of {first}, {wanted}.",
            f"{owner} has {x.shape[1:]}",
            "Bring all samples to one shape.",
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
        raise DataError(f"There must be {what}.", "None", "Give them; or a torch Dataset of pairs (x, y), alone.")
    if is_dataset(values):
        raise DataError(
            f"It must be possible to read {what} as one array.",
            f"a torch {type(values).__name__}",
            "An agent takes a dataset of pairs (x, y) alone: Agent(name, model, dataset). Elsewhere give arrays.",
        )
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
