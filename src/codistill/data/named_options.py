"""Options of scikit-learn estimators that name columns or classes: codistill fits them to arrays and numbered labels.

While an estimator or a transformer is fitted, names of columns (in a ColumnTransformer, as categorical features) are
replaced by positions, and names of classes (in `class_weight`) by the numbers of the classes. What its owner wrote
stands there again afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from codistill.data.named_columns import Names, listed
from codistill.errors import DataError, LearnerError, nearest

_WEIGHTS = ("class_weight", "class_weights")
_INNER = ("estimator", "base_estimator", "estimators", "regressor", "classifier")  # options that get the same samples
# Options of boosting, of scikit-learn and of others, that give columns by position (or by name).
_OF_COLUMNS = (
    "categorical_features", "monotonic_cst", "interaction_cst", "monotone_constraints", "interaction_constraints",
    "feature_weights", "cat_features",
)  # fmt: skip


@dataclass(frozen=True)
class Naming:
    """What an estimator's owner calls columns and classes."""

    owner: str = "the agent"
    columns: Names = ()  # of the samples as the estimator gets them; empty: unknown
    dtypes: Mapping[str, Any] = field(default_factory=dict)  # as they were in the data frame, by column
    classes: int = 0  # 0: real values, or not known yet
    class_names: tuple[Any, ...] | None = None  # by the numbers of the classes; None: these are the names


@contextmanager
def by_number(estimator: Any, naming: Naming, x: np.ndarray | None = None) -> Iterator[None]:
    """Have an estimator without names in its options; x: the samples, which a function that selects columns may see."""
    changed = [*_columns(estimator, naming, x), *_weights(estimator, naming)]
    before = [(part, {name: _options(part)[name]}) for part, name, _ in changed]
    for part, name, value in changed:
        part.set_params(**{name: value})
    try:
        yield
    finally:
        for part, options in reversed(before):
            part.set_params(**options)


def check_names(estimator: Any, naming: Naming, x: np.ndarray | None = None) -> None:
    """Raise an error if an option names a column or a class that there is not."""
    with by_number(estimator, naming, x):
        pass


def check_positions(estimators: list[Any], owner: str, wanted: Names) -> None:
    """Options that give columns by position mean those of the samples as they were given, so these keep their order."""
    for estimator in estimators:
        for part in _parts(estimator):
            for name, value in _given_columns(part):
                if not _is_named(value):
                    raise DataError(
                        f"The columns of {owner} must have the order of the others, since its {type(part).__name__} "
                        "gives columns by position.",
                        f"{name}: {value!r}"[:120],
                        f"Name the columns there, or give x in this order: {listed(wanted)}.",
                    )


# --- columns --------------------------------------------------------------------------------------------------------


def _columns(estimator: Any, naming: Naming, x: np.ndarray | None) -> list[tuple[Any, str, Any]]:
    """(estimator, option, value by position) of each option that names columns."""
    changed = []
    for part in _receivers(estimator):
        if _is_column_transformer(part):
            specs = [(name, step, _place(spec, naming, x, part)) for name, step, spec in part.transformers]
            if any(new[2] is not old[2] for new, old in zip(specs, part.transformers, strict=True)):
                changed.append((part, "transformers", specs))
            continue
        for name, value in _given_columns(part):
            if isinstance(value, Mapping):
                given = {_place(key, naming, x, part): each for key, each in value.items()}
                changed.append((part, name, [given.get(i, 0) for i in range(len(naming.columns))]))
            elif _is_named(value):
                changed.append((part, name, _place(list(value), naming, x, part)))
    return changed


def _receivers(estimator: Any) -> Iterator[Any]:
    """The parts of an estimator that get the samples as they are, which select columns among them."""
    if not hasattr(estimator, "get_params"):
        return
    kind = type(estimator).__name__
    if _is_column_transformer(estimator):
        yield estimator
    elif hasattr(estimator, "steps"):
        first = [step for _, step in estimator.steps if step is not None and not isinstance(step, str)][:1]
        for step in first:
            yield from _receivers(step)
    elif hasattr(estimator, "transformer_list"):
        for _, step in estimator.transformer_list:
            yield from _receivers(step)
    else:
        yield estimator
        own = {} if "Bagging" in kind else _options(estimator)  # each part of a bag gets other columns
        for inner in (own[name] for name in _INNER if own.get(name) is not None):
            for each in inner if isinstance(inner, list) else [inner]:
                yield from _receivers(each[1] if isinstance(each, tuple) else each)


def _parts(estimator: Any) -> list[Any]:
    """An estimator and all that it is made of."""
    if not hasattr(estimator, "get_params"):
        return []
    return [estimator, *(part for part in _options(estimator, deep=True).values() if hasattr(part, "get_params"))]


def _options(part: Any, *, deep: bool = False) -> dict[str, Any]:
    """The options of an estimator; none of one that does not keep them as scikit-learn does."""
    try:
        return dict(part.get_params(deep=deep))
    except (RuntimeError, AttributeError, TypeError):
        return {}


def _given_columns(part: Any) -> list[tuple[str, Any]]:
    """The options of an estimator that select columns, with their values."""
    if _is_column_transformer(part):
        return [(f"transformers {name!r}", spec) for name, _, spec in part.transformers if not _is_all(spec)]
    own = _options(part)
    return [(name, own[name]) for name in _OF_COLUMNS if own.get(name) is not None and not isinstance(own[name], str)]


def _is_column_transformer(part: Any) -> bool:
    return any(base.__name__ == "ColumnTransformer" for base in type(part).__mro__) and hasattr(part, "transformers")


def _is_all(spec: Any) -> bool:
    return isinstance(spec, slice) and spec == slice(None)


def _is_named(spec: Any) -> bool:
    """Whether columns are given by name, or by a function that finds them."""
    if isinstance(spec, slice):
        return isinstance(spec.start, str) or isinstance(spec.stop, str)
    if isinstance(spec, Mapping | list | tuple | set) or hasattr(spec, "__array__"):
        names = list(spec)
        return bool(names) and all(isinstance(name, str) for name in names)
    return isinstance(spec, str) or callable(spec)


def _place(spec: Any, naming: Naming, x: np.ndarray | None, part: Any) -> Any:
    """Columns by position; what is given so already is returned as it is."""
    if not _is_named(spec):
        return spec
    names = naming.columns
    if not names:
        raise DataError(
            f"{type(part).__name__} of {naming.owner} must give columns by position, since its samples have no names.",
            f"{spec!r}"[:120],
            "Give x as a data frame, without a transformer prepare= before this model; or write positions: [0, 3].",
        )
    if callable(spec):
        return _placed_list(spec(_as_frame(x, naming)), naming, part)
    if isinstance(spec, slice):
        start, stop = (None if end is None else _placed(end, naming, part) for end in (spec.start, spec.stop))
        return slice(start, None if stop is None else stop + 1, spec.step)  # by name, the end is part of it
    return _placed(spec, naming, part) if isinstance(spec, str) else _placed_list(spec, naming, part)


def _placed_list(spec: Any, naming: Naming, part: Any) -> Any:
    given = list(spec) if not isinstance(spec, str | slice) else spec
    if isinstance(given, list) and given and all(isinstance(name, str) for name in given):
        return [_placed(name, naming, part) for name in given]
    return given


def _placed(name: str, naming: Naming, part: Any) -> int:
    if name not in naming.columns:
        raise DataError(
            f"{type(part).__name__} of {naming.owner} must name columns of its samples.",
            f"'{name}'"[:80],
            nearest(name, naming.columns)[:300],
        )
    return naming.columns.index(name)


def _as_frame(x: np.ndarray | None, naming: Naming) -> Any:
    import pandas as pd

    frame = pd.DataFrame(np.zeros((1, len(naming.columns))) if x is None else x, columns=pd.Index(naming.columns))
    return frame.astype({name: kind for name, kind in naming.dtypes.items() if not frame[name].isna().any()})


# --- classes --------------------------------------------------------------------------------------------------------


def _weights(estimator: Any, naming: Naming) -> list[tuple[Any, str, Any]]:
    """(estimator, option, weights by number) of each option that weighs classes by name."""
    changed: list[tuple[Any, str, Any]] = []
    for part in _parts(estimator) if naming.classes else ():
        own = _options(part)
        changed += [
            (part, name, _weights_by_number(own[name], naming, part))
            for name in _WEIGHTS
            if isinstance(own.get(name), Mapping)
        ]
        for name in ("param_grid", "param_distributions"):
            if name in own:
                changed.append((part, name, _grid(own[name], naming, part)))
    return changed


def _grid(grid: Any, naming: Naming, part: Any) -> Any:
    """What a search tries, with each of its class weights by number."""
    if isinstance(grid, list | tuple):
        return [_grid(each, naming, part) for each in grid]
    if not isinstance(grid, Mapping):
        return grid
    made = dict(grid)
    for name, values in grid.items():
        if str(name).rpartition("__")[2] in _WEIGHTS and isinstance(values, list | tuple):
            made[name] = [_weights_by_number(v, naming, part) if isinstance(v, Mapping) else v for v in values]
    return made


def _weights_by_number(weights: Mapping[Any, Any], naming: Naming, part: Any) -> dict[int, Any]:
    """The weight of each class; as in scikit-learn it is 1 where none is given."""
    names = tuple(range(naming.classes)) if naming.class_names is None else naming.class_names
    codes = {str(name): code for code, name in enumerate(names)}
    keys = {key: _text(key) for key in weights}
    numbers = not any(isinstance(name, int) and not isinstance(name, bool) for name in names)
    if numbers and all(isinstance(key, int | np.integer) and 0 <= key < naming.classes for key in weights):
        codes = {str(code): code for code in range(naming.classes)}  # of names that are no numbers, the numbers
        keys = {key: str(int(key)) for key in weights}
    for key, text in keys.items():
        if text not in codes:
            raise LearnerError(
                f"class_weight of {type(part).__name__} of {naming.owner} must name classes of the federation.",
                f"{key!r}"[:80],
                nearest(text, codes)[:300],
            )
    given = {codes[keys[key]]: weight for key, weight in weights.items()}
    return {code: given.get(code, 1.0) for code in range(naming.classes)}


def _text(key: Any) -> str:
    """The name of a class as text, as labels are read: 1.0 is 1."""
    plain = key.item() if isinstance(key, np.generic) else key
    return str(int(plain)) if isinstance(plain, float) and plain.is_integer() else str(plain)
