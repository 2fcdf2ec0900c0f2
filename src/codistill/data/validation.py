"""Validation of a user's arrays: each error says what is wrong and what to do."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from codistill.data.dataset import Dataset
from codistill.data.torch_datasets import is_dataset
from codistill.errors import DataError

CLASS_LIMIT = 1_000_000
REAL_VALUES = " Real values to predict need the shape (n, 1): y.reshape(-1, 1)."


def validate_samples(x: Any, y: Any, classes: int, owner: str) -> tuple[np.ndarray, np.ndarray]:
    """Check a user's samples; return x as floats and y as int64 labels or as real-valued targets.

    Double precision is kept where it is given (kernel regression is exact to more digits than float32 has);
    everything else becomes float32.

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
        check_finite(targets, f"the targets y of {owner}")
        targets = as_floats(targets)
    else:
        targets = checked_labels(targets, f"the labels y of {owner}", classes, real_values=REAL_VALUES)
    _check_lengths(features, targets, owner)
    return as_floats(features), targets


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
) -> Dataset:
    """A data set of a user's arrays, with images as (samples, channels, height, width)."""
    owner = f"data set '{name}'"
    x = channels_first(_features(x, f"x_train of {owner}"), f"x_train of {owner}")
    x_test = channels_first(_features(x_test, f"x_test of {owner}"), f"x_test of {owner}")
    y = checked_labels(y, f"y_train of {owner}", len(class_names) or None)
    y_test = checked_labels(y_test, f"y_test of {owner}", len(class_names) or None)
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


def _features(x: Any, what: str) -> np.ndarray:
    array = _array(x, what)
    if array.ndim < 2 or array.size == 0:
        raise DataError(
            f"There must be at least one sample and one feature in {what}, the first axis being the samples.",
            f"an array of shape {array.shape}",
            "Give samples; a single feature needs the shape (n, 1).",
        )
    check_finite(array, what)
    return array


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


def check_finite(array: np.ndarray, what: str) -> None:
    """Raise `DataError` unless every value is finite in float32."""
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
