"""Labels as users give them: whether they are classes or real values, and how classes become numbers.

Strings, booleans and integers are classes. Integers that start at 0 are their own numbers; others, such as 1, 2, 3 or
-1, 1, are names of classes like strings, so that no class is there that nobody has. All agents and test sets of a
federation share one encoding.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from codistill.errors import DataError, RecipeError, nearest

CLASSIFICATION, REGRESSION = TASKS = ("classification", "regression")
_MOST_VALUES = 30  # distinct integers from which on a regressor is asked whether they are classes
_MANY_VALUES = 50  # the same for any model, where there are ...
_FEW_SAMPLES = 5  # ... fewer samples than this for each of them
_FEW_CLASSES = 1000  # any data may have as many; more than there are samples are a mistake
_SAY = 'say task = "regression" under [data] of the recipe, or task="regression" in Python'


@dataclass(frozen=True)
class LabelEncoding:
    """How the labels of a federation become numbers, the same on every node."""

    task: str
    classes: int  # columns of an output
    names: tuple[Any, ...] | None = None  # the classes by their numbers; None: labels are the numbers 0 .. classes-1

    @property
    def shown(self) -> tuple[str, ...]:
        """The names of the classes as text; of real values, the numbers of the outputs."""
        return tuple(str(name) for name in (range(self.classes) if self.names is None else self.names))

    def encode(self, y: Any, owner: str) -> Any:
        """Labels as numbers, real values as a matrix; what needs no encoding is returned as it is."""
        y = _dense(y)
        if self.task == REGRESSION:
            return _real_values(y, owner)
        if _dimensions(y) == 2:
            if has_several_labels(y):
                raise several_labels(owner, y)
            return np.asarray(y).argmax(axis=1) if is_one_hot(y) else y
        if self.names is None:
            values = plain_labels(y, owner)
            if values.dtype.kind == "U":
                raise DataError(
                    f"The classes must have names that all agents know before the labels of {owner} can be words.",
                    f"'{values[0]}', and classes 0 to {self.classes - 1}",
                    'Name them at the hub: class_names = ["no", "yes"] under [data] of its recipe, or '
                    'serve(classes=["no", "yes"]); or number the labels.',
                )
            return y if np.asarray(y).dtype.kind in "biuf" else values
        values = plain_labels(y, owner)
        codes = {str(name): code for code, name in enumerate(self.names)}
        keys = values.astype(np.int64).astype(str) if self._numbers_for(values) else values.astype(str)
        unknown = [key for key in dict.fromkeys(keys.tolist()) if key not in codes]
        if unknown:
            raise DataError(
                f"Every label of {owner} must be one of the classes {_listed(codes)}.",
                f"'{unknown[0]}'",
                f"{nearest(unknown[0], codes)} Correct the label, or name all classes.",
            )
        return np.array([codes[key] for key in keys.tolist()], dtype=np.int64)

    def _numbers_for(self, values: np.ndarray) -> bool:
        """Whether booleans stand for the integers 0 and 1."""
        names = self.names or ()
        return values.dtype.kind == "b" and not any(isinstance(name, bool | np.bool_ | str) for name in names)

    def decode(self, codes: np.ndarray) -> np.ndarray:
        """Classes as the user gave them, from their numbers."""
        return codes if self.names is None else np.asarray(self.names)[codes]


def agree_on_labels(
    given: Sequence[tuple[str, Any]],
    *,
    task: str | None = None,
    classes: int | Sequence[Any] | None = None,
    regressors: Sequence[str] = (),
    has_classifier: bool = False,
) -> LabelEncoding:
    """One encoding for all labels of a federation: (owner, labels) of every agent and of every test set.

    `task` and `classes` (how many, or their names) as far as they are said. `regressors`: agents whose models predict
    real values, in words: many integers are asked about then, as they may be no classes. `has_classifier`: whether a
    model predicts class probabilities: columns of which one is 1 in each row are classes then.
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
            raise RecipeError("A regression has no classes.", f"classes={classes!r}"[:80], "Leave classes out.")
        return LabelEncoding(REGRESSION, classes or columns or 1)
    if isinstance(classes, Sequence):
        return LabelEncoding(CLASSIFICATION, len(classes), class_names(classes))
    values = _classes_of(labelled, task)
    if task is None and classes is None and values.dtype.kind == "i":
        ask_about_values(values, sum(len(y) for _, y in labelled), regressors)
    names = _names(values, classes)
    if names is None and classes is None:
        _ask_about_negative(labelled, values)
        _check_numbering(values, sum(len(y) for _, y in labelled))
    if names is not None:
        return LabelEncoding(CLASSIFICATION, len(names), names)
    return LabelEncoding(CLASSIFICATION, classes or max(columns, int(values.max(initial=-1)) + 1))


def check_task(task: Any) -> None:
    """A task is one of two, or unset."""
    if task is not None and task not in TASKS:
        raise RecipeError(
            "task must be classification or regression.", f"{task!r}"[:80], nearest(str(task)[:80], TASKS)
        )


def class_names(names: Sequence[Any]) -> tuple[Any, ...] | None:
    """Names of classes: different strings or integers; None if they are the numbers 0, 1, 2 and so on."""
    odd = isinstance(names, str) or not all(isinstance(name, str | int | np.integer | np.bool_) for name in names)
    if odd or not len(names):
        raise RecipeError(
            "Classes must be a number, or a list of names.", f"{names!r}"[:80], 'Write classes=["benign", "malignant"].'
        )
    plain = tuple(name.item() if isinstance(name, np.generic) else name for name in names)
    if len({str(name) for name in plain}) < len(plain):
        raise RecipeError("Every class must have a name of its own.", f"{list(plain)}"[:120], "Name each class once.")
    check_spelling(map(str, plain), "the classes")
    numbers = all(type(name) is int for name in plain) and plain == tuple(range(len(plain)))
    return None if numbers else plain


def check_spelling(labels: Iterable[str], owner: str) -> None:
    """Labels that differ only in case or in blanks are asked about: they may be one class or two."""
    seen: dict[str, str] = {}
    for label in labels:
        other = seen.setdefault(" ".join(label.casefold().split()), label)
        if other != label:
            raise DataError(
                f"Labels of {owner} must differ in more than case or blanks.",
                f"{other!r} and {label!r}",
                "Are they one class? Write them alike; if they are two, rename one.",
            )


def ask_about_values(values: np.ndarray, samples: int, regressors: Sequence[str] = ()) -> None:
    """Raise an error if these distinct integers, of so many labels, look more like values to predict than classes."""
    count = len(values)
    like_values = count > _MANY_VALUES and samples < _FEW_SAMPLES * count
    if like_values or (regressors and count > _MOST_VALUES):
        model = f"; {regressors[0]} predicts real values" if regressors else ""
        raise DataError(
            "Labels must be classes, or the task must be said to be a regression.",
            f"{count:,} different integers, {values.min()} to {values.max()}, among {samples:,} labels{model}",
            f'Is this a regression? Then {_SAY}; if these are classes, say task = "classification".',
        )


def plain_labels(y: Any, owner: str) -> np.ndarray:
    """Labels as an array of booleans, integers or strings; of floats where some are no whole numbers."""
    try:
        array = np.asarray(y)
    except ValueError as problem:
        raise DataError(
            f"It must be possible to read the labels y of {owner} as one array.",
            f"{problem}"[:200],
            "Give one label per sample.",
        ) from None
    if array.ndim == 0:
        raise DataError(f"Labels y of {owner} must be one per sample.", f"{y!r}"[:80], "Give an array of labels.")
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
    kinds = {bool: bool, int: np.int64, float: np.float64}
    for kind, dtype in kinds.items():
        allowed = {bool: (bool, np.bool_), int: (int, np.integer), float: (int, float, np.integer, np.floating)}[kind]
        if all(isinstance(value, allowed) and (kind is bool or not isinstance(value, bool)) for value in values):
            return np.array(values, dtype=dtype)
    odd = next((value for value in values if not isinstance(value, str | bytes | int | float | np.generic)), None)
    if odd is not None:
        raise DataError(
            f"The labels of {owner} must be strings, integers or booleans.",
            f"a {type(odd).__name__}",
            "Convert them, e.g. by str().",
        )
    return np.array([value.decode() if isinstance(value, bytes) else str(value) for value in values])


def _missing(owner: str, value: Any, row: int) -> DataError:
    return DataError(
        f"Every sample of {owner} must have a label.",
        f"{value} in row {row} (counted from 0)",
        "Fill it in, or remove the sample.",
    )


def _classes_of(labelled: Sequence[tuple[str, Any]], task: str | None) -> np.ndarray:
    """The distinct labels of all owners, sorted; of mixed kinds as strings, as in tables."""
    parts = []
    for owner, y in labelled:
        values = plain_labels(y, owner)
        if values.dtype.kind == "f":
            row = int((values != np.floor(values)).argmax())
            do = f"Is this a regression? Then {_SAY}." if task is None else "Turn the values into classes."
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
    """The names of the classes of these distinct labels; None if labels are numbers of classes already."""
    plain = tuple(values.tolist())
    if values.dtype.kind == "b":
        return (False, True) if classes in (None, 2) else None
    if values.dtype.kind == "U":
        if classes is not None and classes != len(plain):
            raise DataError(
                f"There must be {classes} classes.",
                f"{len(plain)}: {_listed(plain)}",
                "Name them all: classes=[...], or leave classes out.",
            )
        return plain
    if classes is not None:
        numbers = all(0 <= value < classes for value in plain)
        return None if numbers or len(plain) != classes else plain
    # Integers from 0 on number the classes, and a gap is a class that nobody has; 1 alone is one of 0 and 1.
    # Of negative ones only -1 and 1 are a custom: -1 beside others often says that a label is missing.
    named = plain == (-1, 1) or (plain and plain[0] > 0 and plain != (1,))
    return plain if named else None


def _check_numbering(values: np.ndarray, samples: int) -> None:
    classes = int(values.max(initial=-1)) + 1
    if classes > max(_FEW_CLASSES, samples):
        raise DataError(
            "Labels from 0 on must number the classes 0, 1, 2 and so on.",
            f"a label {classes - 1} among {samples} labels",
            "Are some of them wrong? If not, name the classes: classes=[...], or number them anew.",
        )


def _ask_about_negative(labelled: Sequence[tuple[str, Any]], values: np.ndarray) -> None:
    for owner, y in labelled:
        labels = plain_labels(y, owner)
        if labels.dtype.kind == "i" and labels.min(initial=0) < 0:
            row = int((labels < 0).argmax())
            shown = ", ".join(map(str, values[:8].tolist())) + (", ..." if len(values) > 8 else "")
            raise DataError(
                f"Integer labels of {owner} must not be negative, unless all are -1 or 1.",
                f"{labels[row]} in row {row} (counted from 0)",
                f"Does {labels[row]} mean that the label is missing? Then remove such samples. If it is a class, name "
                f"all classes: classes=[{shown}] in Python; or number them from 0.",
            )


def has_several_labels(y: Any) -> bool:
    """Whether each sample has several labels (multi-label): columns of whole numbers or words, and not one-hot."""
    if _dimensions(y) != 2:
        return False
    array = np.asarray(y)
    if array.shape[1] < 2 or not len(array) or is_one_hot(array):
        return False
    # Zeros alone are no labels: of real numbers it takes some other whole ones.
    return array.dtype.kind != "f" or bool((array == np.floor(array)).all() and array.any())


def several_labels(owner: str, y: Any) -> DataError:
    """Labels with several columns are no real values, and are not supported as labels."""
    return DataError(
        f"Every sample of {owner} must have one label: multi-label classification is not supported.",
        f"a matrix of whole numbers or words, of shape {np.shape(y)}",
        "Give one column, y[:, 0], and train a federation for each; or, for real values, use regressors and "
        'task="regression".',
    )


def _dense(y: Any) -> Any:
    """A sparse matrix as an array; anything else as it is."""
    return y.toarray() if callable(getattr(y, "toarray", None)) else y


def is_one_hot(y: Any) -> bool:
    """Whether labels are a matrix of at least two columns, of which one is 1 in each row and all others are 0."""
    if _dimensions(y) != 2:
        return False
    array = np.asarray(y)
    if array.dtype.kind not in "biuf" or array.shape[1] < 2 or not len(array):
        return False
    return bool(((array == 0) | (array == 1)).all() and (array.sum(axis=1) == 1).all())


def _real_values(y: Any, owner: str) -> np.ndarray:
    """Targets of a regression as a matrix; each column is an output."""
    array = np.asarray(y)
    if array.dtype.kind == "O":
        array = _from_objects(array, owner).reshape(array.shape)
    if array.dtype.kind not in "biuf":
        raise DataError(
            f"The targets y of {owner} must be numbers, as the task is a regression.",
            f"{array.ravel()[0]!r}" if array.size else f"an array of type {array.dtype}",
            'Give real values; for classes say task = "classification".',
        )
    if array.ndim != 1:
        return array
    return (array if array.dtype.kind == "f" else array.astype(np.float64)).reshape(-1, 1)


def _dimensions(y: Any) -> int:
    try:
        return int(np.ndim(y))
    except ValueError:
        return 0  # not one array: said when its owner is settled


def _listed(names: Iterable[Any], most: int = 8) -> str:
    shown = [f"'{name}'" for name in names]
    return ", ".join(shown[:most]) + (f" and {len(shown) - most:,} more" if len(shown) > most else "")
