"""Labels: whether they are classes or real values, and how classes become numbers.

Strings, booleans and integers are classes. Integers from 0 on are class numbers; others, such as 1, 2, 3 or -1, 1, are
names like strings, so that no empty class is created. All agents and test sets of a federation share one encoding.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from codistill.core.errors import DataError, RecipeError, nearest
from codistill.data.frames import listed, written_value

if TYPE_CHECKING:
    import pandas as pd

CLASSIFICATION, REGRESSION = TASKS = ("classification", "regression")
_MOST_VALUES = 30  # distinct integers above which the task of a regressor must be explicit
_MANY_VALUES = 50  # the same for any model, if there are ...
_FEW_SAMPLES = 5  # ... fewer samples than this per value
_FEW_CLASSES = 1000  # more classes than this and than samples are a mistake
_SAY = 'set task = "regression" under [data] of the recipe, or task="regression" in Python'


@dataclass(frozen=True)
class LabelEncoding:
    """The mapping of a federation's labels to numbers, equal on every node."""

    task: str
    classes: int  # columns of an output
    names: tuple[Any, ...] | None = None  # of the classes; None: labels are the numbers 0 .. classes-1

    @property
    def shown(self) -> tuple[str, ...]:
        """Class names as text; for real values, the indices of the outputs."""
        return tuple(str(name) for name in (range(self.classes) if self.names is None else self.names))

    def encode(self, y: Any, owner: str) -> Any:
        """Labels as numbers, real values as a matrix; numbers of classes are returned unchanged."""
        y = _dense(y)
        if self.task == REGRESSION:
            return _real_values(y, owner)
        if _dimensions(y) == 2:
            if has_several_labels(y):
                raise several_labels(owner, y)
            return np.asarray(y).argmax(axis=1) if is_one_hot(y) else y
        values = plain_labels(y, owner)
        if self.names is None:
            if values.dtype.kind == "U":
                raise DataError(
                    f"Text labels of {owner} need class names that all agents share.",
                    f"'{values[0]}', and classes 0 to {self.classes - 1}",
                    'Set them at the hub: class_names = ["no", "yes"] under [data] of its recipe, or '
                    'serve(classes=["no", "yes"]); or number the labels.',
                )
            return y if np.asarray(y).dtype.kind in "biuf" else values
        codes = {str(name): code for code, name in enumerate(self.names)}
        # Booleans stand for the integers 0 and 1, unless the classes are booleans or text.
        numbers = values.dtype.kind == "b" and not any(isinstance(name, bool | np.bool_ | str) for name in self.names)
        keys = values.astype(np.int64).astype(str) if numbers else values.astype(str)
        unknown = [key for key in dict.fromkeys(keys.tolist()) if key not in codes]
        if unknown:
            raise DataError(
                f"Labels of {owner} must be among the classes {listed(codes)}.",
                f"'{unknown[0]}'",
                f"{nearest(unknown[0], codes)} Correct the label, or list all classes.",
            )
        return np.array([codes[key] for key in keys.tolist()], dtype=np.int64)

    def decode(self, codes: np.ndarray) -> np.ndarray:
        return codes if self.names is None else np.asarray(self.names)[codes]


def agree_on_labels(
    given: Sequence[tuple[str, Any]],
    *,
    task: str | None = None,
    classes: int | Sequence[Any] | None = None,
    regressors: Sequence[str] = (),
    has_classifier: bool = False,
) -> LabelEncoding:
    """One encoding for all labels of a federation: (owner, labels) of every agent and every test set.

    `task` and `classes` (their number or names): unset if unknown. `regressors`: agents, as text, whose models predict
    real values; many integer labels then need an explicit task. `has_classifier`: whether a model predicts class
    probabilities; one-hot columns are classes then.
    """
    check_task(task)
    given = [(owner, _dense(y)) for owner, y in given]
    if task is None and has_classifier and given and all(is_one_hot(y) for _, y in given):
        task = CLASSIFICATION
    for owner, y in given:
        if has_several_labels(y) and (task == CLASSIFICATION or (task is None and has_classifier)):
            raise several_labels(owner, y)
        if _dimensions(y) == 2 and np.asarray(y).dtype.kind not in "biuf":
            raise DataError(
                f"Labels of {owner} must be one-dimensional.", f"an array of shape {np.shape(y)}", "Write y.ravel()."
            )
    columns = max((np.shape(y)[1] for _, y in given if _dimensions(y) == 2), default=0)
    labelled = [(owner, y) for owner, y in given if _dimensions(y) == 1]
    if task == REGRESSION or (task is None and not labelled):
        if isinstance(classes, Sequence):
            raise RecipeError("A regression has no classes.", f"classes={classes!r}"[:80], "Remove classes.")
        return LabelEncoding(REGRESSION, classes or columns or 1)
    if isinstance(classes, Sequence):
        return LabelEncoding(CLASSIFICATION, len(classes), class_names(classes))
    labelled = [(owner, plain_labels(y, owner)) for owner, y in labelled]
    values = _classes_of(labelled, task)
    if task is None and classes is None and values.dtype.kind == "i":
        ask_about_values(values, sum(len(y) for _, y in labelled), regressors)
    names = _names(values, classes)
    if names is None and classes is None:
        _check_numbering(labelled, values)
    if names is not None:
        return LabelEncoding(CLASSIFICATION, len(names), names)
    return LabelEncoding(CLASSIFICATION, classes or max(columns, int(values.max(initial=-1)) + 1))


def check_task(task: Any) -> None:
    if task is not None and task not in TASKS:
        raise RecipeError(
            "task must be classification or regression.", f"{task!r}"[:80], nearest(str(task)[:80], TASKS)
        )


def class_names(names: Sequence[Any]) -> tuple[Any, ...] | None:
    """Distinct class names, strings or integers; None if they are the numbers 0, 1, 2 and so on."""
    odd = isinstance(names, str) or not all(isinstance(name, str | int | np.integer | np.bool_) for name in names)
    if odd or not len(names):
        raise RecipeError(
            "classes must be a number or a list of names.", f"{names!r}"[:80], 'Write classes=["benign", "malignant"].'
        )
    plain = tuple(name.item() if isinstance(name, np.generic) else name for name in names)
    if len({str(name) for name in plain}) < len(plain):
        raise RecipeError("Class names must be unique.", f"{list(plain)}"[:120], "List each class once.")
    check_spelling(map(str, plain), "the classes")
    numbers = all(type(name) is int for name in plain) and plain == tuple(range(len(plain)))
    return None if numbers else plain


def check_spelling(labels: Iterable[str], owner: str) -> None:
    """Raise if labels differ only in case or blanks, since they may be one class or two."""
    seen: dict[str, str] = {}
    for label in labels:
        other = seen.setdefault(" ".join(label.casefold().split()), label)
        if other != label:
            raise DataError(
                f"Labels of {owner} must differ in more than case or blanks.",
                f"{other!r} and {label!r}",
                "Use one spelling if they are one class; otherwise rename one of them.",
            )


def ask_about_values(values: np.ndarray, samples: int, regressors: Sequence[str] = ()) -> None:
    """Raise if these distinct integers, among `samples` labels, look like values to predict rather than classes."""
    count = len(values)
    like_values = count > _MANY_VALUES and samples < _FEW_SAMPLES * count
    if like_values or (regressors and count > _MOST_VALUES):
        model = f"; {regressors[0]} predicts real values" if regressors else ""
        raise DataError(
            "The task must be explicit: the labels could be classes or real values.",
            f"{count:,} different integers, {values.min()} to {values.max()}, among {samples:,} labels{model}",
            f'For a regression, {_SAY}; for classes, set task = "classification".',
        )


def plain_labels(y: Any, owner: str) -> np.ndarray:
    """Labels as an array of booleans, integers or strings; of floats if some are not whole numbers."""
    try:
        array = np.asarray(y)
    except ValueError as problem:
        raise DataError(
            f"The labels y of {owner} must be readable as one array.",
            f"{problem}"[:200],
            "Give one label per sample.",
        ) from None
    if array.ndim == 0:
        raise DataError(
            f"The samples of {owner} must have one label y each.", f"{y!r}"[:80], "Pass an array of labels."
        )
    if array.dtype.kind not in "biuf":
        array = _from_objects(array, owner)
    if array.dtype.kind == "f":
        if not np.isfinite(array).all():
            row = int(np.isfinite(array).argmin())
            raise _missing(owner, array[row], row)
        whole = (array == np.floor(array)).all() and np.abs(array).max(initial=0) < 2**62
        return array.astype(np.int64) if whole else array
    return array.astype(np.int64) if array.dtype.kind in "iu" else array


def _from_objects(array: np.ndarray, owner: str) -> np.ndarray:
    values = array.astype(object).ravel().tolist()
    for row, value in enumerate(values):
        if value is None or value != value or str(value) in ("<NA>", "NaT") or not str(value).strip():
            raise _missing(owner, value, row)
    whole, real = int | np.integer, int | float | np.integer | np.floating
    for dtype, kind in ((bool, bool | np.bool_), (np.int64, whole), (np.float64, real)):
        if all(isinstance(value, kind) and (dtype is bool or not isinstance(value, bool)) for value in values):
            return np.array(values, dtype=dtype)
    odd = next((value for value in values if not isinstance(value, str | bytes | int | float | np.generic)), None)
    if odd is not None:
        raise DataError(
            f"The labels of {owner} must be strings, integers or booleans.",
            f"a {type(odd).__name__}",
            "Convert them, e.g. with str().",
        )
    return np.array([value.decode() if isinstance(value, bytes) else str(value) for value in values])


def _missing(owner: str, value: Any, row: int) -> DataError:
    return DataError(
        f"Every sample of {owner} must have a label.",
        f"{value} in row {row} (counted from 0)",
        "Add it, or remove the sample.",
    )


def _classes_of(labelled: Sequence[tuple[str, np.ndarray]], task: str | None) -> np.ndarray:
    """The sorted distinct labels of all owners; mixed kinds as strings, as in tables."""
    parts = []
    for owner, values in labelled:
        if values.dtype.kind == "f":
            row = int((values != np.floor(values)).argmax())
            do = f"For a regression, {_SAY}." if task is None else "Turn the values into classes."
            raise DataError(
                f"Labels of {owner} must be classes: strings, integers or booleans.",
                f"{values[row]} in row {row} (counted from 0)",
                f"{do} The same holds for all agents and tests.",
            )
        parts.append(np.unique(values))
    kinds = {part.dtype.kind for part in parts}
    if "U" in kinds:
        found = np.unique(np.concatenate([part.astype(str) for part in parts]))
        check_spelling(found.tolist(), "all agents and tests")
        return found
    if not parts:
        return np.zeros(0, dtype=np.int64)
    return np.unique(np.concatenate(parts))


def _names(values: np.ndarray, classes: int | None) -> tuple[Any, ...] | None:
    """The class names of these distinct labels; None if they are class numbers."""
    plain = tuple(values.tolist())
    if values.dtype.kind == "b":
        return (False, True) if classes in (None, 2) else None
    if values.dtype.kind == "U":
        if classes is not None and classes != len(plain):
            raise DataError(
                f"There must be {classes} classes.",
                f"{len(plain)}: {listed(plain)}",
                "List all their names as classes=[...], or remove classes.",
            )
        return plain
    if classes is not None:
        numbers = all(0 <= value < classes for value in plain)
        return None if numbers or len(plain) != classes else plain
    # Integers from 0 on are class numbers, and a gap is an empty class; 1 alone is one of 0 and 1. Negative labels are
    # usual only as -1 and 1: elsewhere, -1 often marks a missing label.
    named = plain == (-1, 1) or (plain and plain[0] > 0 and plain != (1,))
    return plain if named else None


def _check_numbering(labelled: Sequence[tuple[str, np.ndarray]], values: np.ndarray) -> None:
    """Raise if integer labels are negative, or so large that they are no class numbers."""
    for owner, labels in labelled:
        if labels.dtype.kind == "i" and labels.min(initial=0) < 0:
            row = int((labels < 0).argmax())
            shown = ", ".join(map(str, values[:8].tolist())) + (", ..." if len(values) > 8 else "")
            raise DataError(
                f"Integer labels of {owner} must not be negative, unless all are -1 or 1.",
                f"{labels[row]} in row {row} (counted from 0)",
                f"If {labels[row]} marks missing labels, remove these samples. If it is a class, list all classes: "
                f"classes=[{shown}] in Python; or number them from 0.",
            )
    largest, samples = int(values.max(initial=-1)), sum(len(labels) for _, labels in labelled)
    if largest >= max(_FEW_CLASSES, samples):
        raise DataError(
            "Integer labels from 0 on must be the class numbers 0, 1, 2 and so on.",
            f"a label {largest} among {samples} labels",
            "Correct wrong labels; otherwise list the classes as classes=[...], or renumber them.",
        )


def has_several_labels(y: Any) -> bool:
    """Whether samples are multi-label: columns of whole numbers or text that are not one-hot."""
    if _dimensions(y) != 2:
        return False
    array = np.asarray(y)
    if array.shape[1] < 2 or not len(array) or is_one_hot(array):
        return False
    # A float matrix of zeros is not a matrix of labels.
    return array.dtype.kind != "f" or bool((array == np.floor(array)).all() and array.any())


def several_labels(owner: str, y: Any) -> DataError:
    return DataError(
        f"Every sample of {owner} must have one label: multi-label classification is not supported.",
        f"a matrix of whole numbers or text of shape {np.shape(y)}",
        'Run one federation per column, y[:, 0]; for real values, use regressors and task="regression".',
    )


def _dense(y: Any) -> Any:
    """A sparse matrix as an array; anything else unchanged."""
    return y.toarray() if callable(getattr(y, "toarray", None)) else y


def is_one_hot(y: Any) -> bool:
    """Whether labels are a one-hot matrix of at least two columns."""
    if _dimensions(y) != 2:
        return False
    array = np.asarray(y)
    if array.dtype.kind not in "biuf" or array.shape[1] < 2 or not len(array):
        return False
    return bool(((array == 0) | (array == 1)).all() and (array.sum(axis=1) == 1).all())


def _real_values(y: Any, owner: str) -> np.ndarray:
    """Targets of a regression as a matrix with one column per output."""
    array = np.asarray(y)
    if array.dtype.kind == "O":
        array = _from_objects(array, owner).reshape(array.shape)
    if array.dtype.kind not in "biuf":
        raise DataError(
            f"The targets y of {owner} must be numeric for a regression.",
            f"{array.ravel()[0]!r}" if array.size else f"an array of type {array.dtype}",
            'Pass real values; for classes, set task = "classification".',
        )
    if array.ndim != 1:
        return array
    return (array if array.dtype.kind == "f" else array.astype(np.float64)).reshape(-1, 1)


def _dimensions(y: Any) -> int:
    try:
        return int(np.ndim(y))
    except ValueError:
        return 0  # ragged: reported when its owner's samples are checked


# --- classes from the values of a label column: by a mapping or a threshold


def check_label_mapping(above: float | None, names: Mapping[str, str] | None) -> None:
    if above is not None and names:
        raise RecipeError(
            "At most one of label_above and label_map can be set under [data].", "both", "Remove one of them."
        )


def mapped_labels(
    column: pd.Series[Any], above: float | None, names: Mapping[str, str] | None, owner: str
) -> pd.Series[Any]:
    """The label column with its values replaced by classes; unchanged without a mapping.

    `above` makes two classes, such as "at most 0" and "above 0" for a threshold of 0. `names` maps every value, written
    as in the file, to a class; several values may share one.
    """
    if above is not None:
        from pandas.api.types import is_numeric_dtype

        if not is_numeric_dtype(column.dtype):
            raise DataError(
                f"label_above needs a numeric label column '{column.name}' in {owner}.",
                f"values such as {column.iloc[0]!r}",
                "Use label_map, which maps every value to a class.",
            )
        return (column > above).map({False: f"at most {above:g}", True: f"above {above:g}"})
    if not names:
        return column
    written = column.map(written_value)
    unknown = ~written.isin(list(names))
    if unknown.any():
        row = int(unknown.to_numpy(dtype=bool).argmax())
        raise DataError(
            f"label_map must contain every value of the label column '{column.name}' of {owner}.",
            f"'{written.iloc[row]}' in data row {row + 1} (the first row is 1)",
            f"Add '{written.iloc[row]}' to label_map.",
        )
    return written.map(dict(names))
