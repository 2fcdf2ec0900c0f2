"""Columns of data frames by name: all samples of a federation get them in one order.

A plain array has no names: its columns are taken by position. Beside an array, all frames must have the same order, and
a note reports it. A frame whose columns are numbered 0, 1, 2, as by default in pandas, counts as an array.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from codistill.core.errors import DataError, LearnerError, closest, nearest

if TYPE_CHECKING:
    from codistill.data.frame_encoding import FrameEncoding

Names = tuple[str, ...]  # of the columns, in their order; empty: unknown
BY_POSITION = "a plain array beside data frames; its columns are taken by position"
TEXT = "text"  # the column of samples that are plain texts
_SHOWN, _ASKED = 6, 3  # names in a message, and suggested corrections of spelling
_COMPARED = 1_000  # names that may have been meant


class Given(NamedTuple):
    """The columns of one owner's samples."""

    owner: str  # as in "agent 'a'"
    names: Names
    width: int | None = None  # number of columns; None: unknown, or not a table


def as_frame(x: Any) -> Any:
    """A pandas data frame, converted from a pyarrow or polars table, a table of arrays, or texts; None if x is neither.

    Texts become a frame of one column: the series' name, or "text".
    """
    if isinstance(x, Mapping) and not hasattr(x, "toarray"):  # some sparse matrices are tables of their entries
        return _packed(x)
    pandas = sys.modules.get("pandas")  # if it is not imported, x is no frame
    if pandas is not None and isinstance(x, pandas.DataFrame):
        return x
    if is_text(x):
        import pandas as pd

        name = getattr(x, "name", None)
        return pd.DataFrame({TEXT if name is None else str(name): pd.Series(x).array})
    if callable(getattr(x, "to_pandas", None)) and hasattr(x, "columns"):
        return x.to_pandas()
    return None


def is_text(x: Any) -> bool:
    """Whether x is a list, an array or a series of texts, one for each sample; some may be missing."""
    if isinstance(x, list | tuple):
        given: Any = x
    else:
        shape, kind = tuple(getattr(x, "shape", ())), str(getattr(x, "dtype", ""))
        if len(shape) != 1 or not (kind in ("object", "str", "string") or kind.startswith("<U")):
            return False
        given = np.asarray(x, dtype=object).tolist()
    return any(isinstance(each, str) for each in given) and all(
        isinstance(each, str) or each is None or str(each) in ("nan", "<NA>") for each in given
    )


def _packed(table: Mapping[Any, Any]) -> Any:
    """A table of arrays, one for each argument of a module, as a frame; those of a matrix are "name[0]", "name[1]"."""
    import pandas as pd

    columns: dict[str, np.ndarray] = {}
    try:
        for name, values in table.items():
            array = np.asarray(values)
            if array.ndim == 1:
                columns[str(name)] = array
            else:
                columns |= {f"{name}[{i}]": column for i, column in enumerate(array.T.reshape(-1, len(array)))}
                if array.ndim != 2:
                    raise ValueError(f"'{name}' has the shape {array.shape}")
        return pd.DataFrame(columns)
    except (TypeError, ValueError) as error:
        raise DataError(
            "A table of samples must have an array for each name, with one value or one row for each sample.",
            " ".join(str(error).split())[:200],
            "Make all rows equally long; tokenizers do so by padding=True.",
        ) from None


def packed_parts(names: Names) -> dict[str, int | list[int]]:
    """The arrays of a table by name, and where each column of them is now; empty if none of them was a matrix."""
    parts: dict[str, int | list[int]] = {}
    matrices: dict[str, dict[int, int]] = {}
    for place, column in enumerate(names):
        matrix = re.fullmatch(r"(.+)\[(\d{1,9})\]", column)
        if matrix:
            matrices.setdefault(matrix[1], {})[int(matrix[2])] = place
        else:
            parts[column] = place
    if any(sorted(at) != list(range(len(at))) for at in matrices.values()):
        return {}  # columns of a frame that only look alike
    ordered: dict[str, int | list[int]] = {name: [at[i] for i in sorted(at)] for name, at in matrices.items()}
    return parts | ordered if matrices else {}


def column_names(x: Any, what: str) -> Names:
    """The column names of a data frame as text; empty for arrays, and for columns numbered from 0 on."""
    frame = as_frame(x)
    if frame is None:
        return ()
    names = texts(frame.columns)
    twice = [name for name, times in Counter(names).items() if times > 1]
    if twice:
        raise DataError(
            f"Column names of {what} must be unique.",
            f"{listed(twice)} more than once",
            "Rename the columns, or drop them: x.loc[:, ~x.columns.duplicated()].",
        )
    numbers = list(frame.columns)
    integers = all(isinstance(name, int | np.integer) and not isinstance(name, bool | np.bool_) for name in numbers)
    return () if integers and numbers == list(range(len(numbers))) else names


def given_samples(owner: str, x: Any, what: str) -> Given:
    """The columns of an owner's samples; `what` as in "the samples x of agent 'a'"."""
    return Given(owner, column_names(x, what), width(x))


def width(x: Any) -> int | None:
    """The number of columns of a table; None for anything else."""
    shape = tuple(getattr(x, "shape", ()))
    return int(shape[1]) if len(shape) == 2 else None


def in_order(frame: Any, wanted: Names, what: str, *, leave_out: bool = False) -> Any:
    """A data frame with these columns, in this order; `leave_out`: drop other columns instead of raising."""
    names = column_names(frame, what) or (texts(frame.columns) if set(wanted) == set(texts(frame.columns)) else ())
    if not names or not wanted or names == wanted:
        return frame
    if not (leave_out and set(wanted) <= set(names)):
        check_same(names, wanted, what, "those of the training samples" if leave_out else "those of the others")
    return frame.iloc[:, places(names, wanted)]


def places(names: Names, wanted: Names) -> list[int]:
    place = {name: number for number, name in enumerate(names)}
    return [place[name] for name in wanted]


def check_same(names: Names, wanted: Names, what: str, whose: str, why: str = "") -> None:
    found = difference(names, wanted)
    if found is None:
        return
    missing = _one_sided(wanted, names)[:_COMPARED]
    asked = ""  # about names that are probably misspelt
    for name in _one_sided(names, wanted)[:_ASKED]:
        close = closest(name, missing)
        if close is not None:
            missing.remove(close)
            asked += f"Did you mean '{close[:60]}' by '{name[:60]}'? "
    must = f"The columns of {what} must be {whose}{why and ': '}{why}."
    raise DataError(must, found, f"{asked}Rename, add or drop columns.")


def difference(names: Names, wanted: Names) -> str | None:
    """Missing and extra columns, as text; None if at most the order differs."""
    if names == wanted:
        return None
    missing, extra = _one_sided(wanted, names), _one_sided(names, wanted)
    parts = [f"{kind}: {listed(some)}" for kind, some in (("missing", missing), ("extra", extra)) if some]
    return "; ".join(parts) or None


def agree_on_columns(
    agents: Sequence[Given], others: Sequence[Given] = (), settled: Names = ()
) -> tuple[Names, list[str]]:
    """One column order for all samples of a federation, and notes on arrays among data frames.

    It is the most frequent order among agents; ties go to the first of `others` (public data, test set) that has one of
    them, otherwise to the first agent. If no agent has names, the order of `others`. `settled`: a given order, which
    all samples must have.
    """
    everybody = [_by_number(each, [*agents, *others]) for each in (*agents, *others)]
    named = [each for each in everybody if each.names]
    if not named:
        return (), []
    first = Given("the federation", settled) if settled else named[0]
    for each in named:
        check_same(each.names, first.names, each.owner, f"those of {first.owner}")
    votes = [each.names for each in everybody[: len(agents)] if each.names] or [first.names]
    counted = Counter(votes)
    most = [names for names, times in counted.items() if times == max(counted.values())]
    chosen = settled or next((each.names for each in everybody[len(agents) :] if each.names in most), most[0])
    arrays = [each for each in everybody if not each.names]
    odd = next((each for each in named if each.names != chosen), None)
    if arrays and odd is not None:
        raise unclear_order(arrays[0].owner, odd.owner)
    return chosen, [f"{each.owner}: {BY_POSITION}" for each in arrays]


def unclear_order(array: str, frame: str) -> DataError:
    return DataError(
        "Beside a plain array, all data frames must have the same column order.",
        f"{array} is an array, and {frame} has another column order than others",
        "Pass a data frame instead of the array, or reorder the columns of all frames.",
    )


def written_value(value: Any) -> str:
    """A value as text; 1.0 becomes "1", since pandas reads integers with gaps as floats."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def listed(names: Iterable[Any]) -> str:
    """The first names, quoted, and the number of the others."""
    quoted = [f"'{str(name)[:60]}'" for name in names]
    return ", ".join(quoted[:_SHOWN]) + (f" and {len(quoted) - _SHOWN:,} more" if len(quoted) > _SHOWN else "")


def _by_number(each: Given, everybody: Sequence[Given]) -> Given:
    """Name an array's columns by position if the names of the others are the numbers from 0 on."""
    if each.names or each.width is None:
        return each
    positions = tuple(map(str, range(each.width)))
    named = any(other.names and set(other.names) == set(positions) for other in everybody)
    return each._replace(names=positions) if named else each


def texts(columns: Any) -> Names:
    """Names as text; several levels are joined."""
    return tuple(", ".join(map(str, name)) if isinstance(name, tuple) else str(name) for name in columns)


def _one_sided(names: Names, others: Names) -> list[str]:
    known = set(others)
    return [name for name in names if name not in known]


# --- options of scikit-learn estimators that name columns or classes, while we fit them to arrays and numbered labels

_WEIGHTS = ("class_weight", "class_weights")
_INNER = ("estimator", "base_estimator", "estimators", "regressor", "classifier")  # inner models of the same samples
# Options of boosting, in scikit-learn and other libraries, that give columns by position (or by name).
_OF_COLUMNS = (
    "categorical_features", "monotonic_cst", "interaction_cst", "monotone_constraints", "interaction_constraints",
    "feature_weights", "cat_features",
)  # fmt: skip


@dataclass(frozen=True)
class Naming:
    """The names of columns and classes that an estimator's options may use."""

    owner: str = "the agent"
    columns: Names = ()  # of the samples as the estimator gets them; empty: unknown
    dtypes: Mapping[str, Any] = field(default_factory=dict)  # of the data frame, by column
    classes: int = 0  # 0: real values, or not known yet
    class_names: tuple[Any, ...] | None = None  # None: the numbers 0, 1, 2
    by_argument: bool = False  # whether the samples were given as a table of arrays, each for an argument of the model
    frame: FrameEncoding | None = None  # of its data frame, for models that get frames
    decoded: bool = False  # whether this model gets frames: then columns are named in its options as they are


@contextmanager
def by_number(estimator: Any, naming: Naming, x: np.ndarray) -> Iterator[None]:
    """Replace names in an estimator's options by positions; x: the samples, for functions that select columns."""
    changed = [*_columns(estimator, naming, x), *_weights(estimator, naming)]
    before = [(part, {name: _options(part)[name]}) for part, name, _ in changed]
    for part, name, value in changed:
        part.set_params(**{name: value})
    try:
        yield
    finally:
        for part, options in reversed(before):
            part.set_params(**options)


def check_names(estimator: Any, naming: Naming, x: np.ndarray) -> None:
    if naming.decoded:
        for part in _receivers(estimator):
            for _, value in _given_columns(part):
                if _is_named(value) and not callable(value):
                    _place(value, naming, x, part)
    with by_number(estimator, naming, x):
        pass


def has_own_transformer(estimator: Any) -> bool:
    """Whether a part of it is a transformer of the owner's own making, which may work on columns by name."""
    parts = [part for part in _parts(estimator) if callable(getattr(part, "transform", None))]
    return any(
        type(part).__module__.partition(".")[0] != "sklearn" or type(part).__name__ == "FunctionTransformer"
        for part in parts
    )


def takes_frame(estimator: Any, frame: FrameEncoding | None) -> bool:
    """Whether an estimator gets its samples as a frame: if some columns hold no numbers, or by its own transformers.

    Otherwise it gets an array, in which its options find columns by `by_number`, so that it may be sent to others.
    """
    return frame is not None and (bool(frame.coded) or has_own_transformer(estimator))


def check_positions(estimators: list[Any], owner: str, wanted: Names) -> None:
    """Raise if an option gives columns by position, which refers to the samples before reordering."""
    for estimator in estimators:
        for part in _parts(estimator):
            for name, value in _given_columns(part):
                if not _is_named(value):
                    raise DataError(
                        f"{type(part).__name__} of {owner} gives columns by position, so its x must have the common "
                        "column order.",
                        f"{name}: {value!r}"[:120],
                        f"Use column names there, or reorder x: {listed(wanted)}.",
                    )


def _columns(estimator: Any, naming: Naming, x: np.ndarray) -> list[tuple[Any, str, Any]]:
    """(estimator, option, value by position) for each option that names columns."""
    changed = []
    for part in () if naming.decoded else _receivers(estimator):
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
    """The parts of an estimator that get the untransformed samples, and may select columns."""
    if not hasattr(estimator, "get_params"):
        return
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
        own = (
            {} if "Bagging" in type(estimator).__name__ else _options(estimator)
        )  # bagging gives its parts random columns
        for inner in (own[name] for name in _INNER if own.get(name) is not None):
            for each in inner if isinstance(inner, list) else [inner]:
                yield from _receivers(each[1] if isinstance(each, tuple) else each)


def _parts(estimator: Any) -> list[Any]:
    if not hasattr(estimator, "get_params"):
        return []
    return [estimator, *(part for part in _options(estimator, deep=True).values() if hasattr(part, "get_params"))]


def _options(part: Any, *, deep: bool = False) -> dict[str, Any]:
    """The options of an estimator; none if it does not store them as scikit-learn does."""
    try:
        return dict(part.get_params(deep=deep))
    except (RuntimeError, AttributeError, TypeError):
        return {}


def _given_columns(part: Any) -> list[tuple[str, Any]]:
    if _is_column_transformer(part):
        everything = slice(None)
        return [
            (f"transformers {name!r}", spec)
            for name, _, spec in part.transformers
            if not (isinstance(spec, slice) and spec == everything)
        ]
    own = _options(part)
    return [(name, own[name]) for name in _OF_COLUMNS if own.get(name) is not None and not isinstance(own[name], str)]


def _is_column_transformer(part: Any) -> bool:
    return any(base.__name__ == "ColumnTransformer" for base in type(part).__mro__) and hasattr(part, "transformers")


def _is_named(spec: Any) -> bool:
    """Whether columns are given by name or by a function."""
    if isinstance(spec, slice):
        return isinstance(spec.start, str) or isinstance(spec.stop, str)
    if isinstance(spec, Mapping | list | tuple | set) or hasattr(spec, "__array__"):
        names = list(spec)
        return bool(names) and all(isinstance(name, str) for name in names)
    return isinstance(spec, str) or callable(spec)


def _place(spec: Any, naming: Naming, x: np.ndarray, part: Any) -> Any:
    """Columns by position; positions are returned unchanged."""
    if not _is_named(spec):
        return spec
    names = naming.columns
    if not names:
        raise DataError(
            f"{type(part).__name__} of {naming.owner} must give columns by position, since they have no names.",
            f"{spec!r}"[:120],
            "Pass x as a data frame, without a transformer prepare=; or use positions: [0, 3].",
        )
    if isinstance(spec, str):
        return _placed(spec, naming, part)
    if isinstance(spec, slice):
        start, stop = (None if end is None else _placed(end, naming, part) for end in (spec.start, spec.stop))
        return slice(start, None if stop is None else stop + 1, spec.step)  # slices of names include the end
    given = spec
    if callable(spec):
        import pandas as pd

        frame = pd.DataFrame(x, columns=pd.Index(names))
        full = {name: kind for name, kind in naming.dtypes.items() if not frame[name].isna().any()}
        given = spec(frame.astype(full))
    if isinstance(given, str | slice):  # of one column, as text is selected, or of a range
        return _place(given, naming, x, part)
    given = list(given)
    named = all(isinstance(name, str) for name in given)
    return [_placed(name, naming, part) for name in given] if named else given


def _placed(name: str, naming: Naming, part: Any) -> int:
    if name not in naming.columns:
        raise DataError(
            f"{type(part).__name__} of {naming.owner} names an unknown column.",
            f"'{name}'"[:80],
            nearest(name, naming.columns)[:300],
        )
    return naming.columns.index(name)


def _weights(estimator: Any, naming: Naming) -> list[tuple[Any, str, Any]]:
    """(estimator, option, weights by number) for each option that weighs classes by name."""
    changed: list[tuple[Any, str, Any]] = []
    for part in _parts(estimator) if naming.classes else ():
        for name, value in _options(part).items():
            if name in _WEIGHTS and isinstance(value, Mapping):
                changed.append((part, name, _weights_by_number(value, naming, part)))
            elif name in ("param_grid", "param_distributions"):
                changed.append((part, name, _grid(value, naming, part)))
    return changed


def _grid(grid: Any, naming: Naming, part: Any) -> Any:
    """The grid of a search, with class weights by number."""
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
    """The weight of each class; 1 by default, as in scikit-learn."""
    names = tuple(range(naming.classes)) if naming.class_names is None else naming.class_names
    codes = {str(name): code for code, name in enumerate(names)}
    keys = {key: written_value(key.item() if isinstance(key, np.generic) else key) for key in weights}
    numbers = not any(isinstance(name, int) and not isinstance(name, bool) for name in names)
    if numbers and all(isinstance(key, int | np.integer) and 0 <= key < naming.classes for key in weights):
        codes = {str(code): code for code in range(naming.classes)}  # numbers of classes with non-numeric names
        keys = {key: str(int(key)) for key in weights}
    for key, text in keys.items():
        if text not in codes:
            raise LearnerError(
                f"class_weight of {type(part).__name__} of {naming.owner} names an unknown class.",
                f"{key!r}"[:80],
                nearest(text, codes)[:300],
            )
    given = {codes[keys[key]]: weight for key, weight in weights.items()}
    return {code: given.get(code, 1.0) for code in range(naming.classes)}
