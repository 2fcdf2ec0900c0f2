"""Columns of data frames by name: all samples of a federation have them in one order, whoever gave them in which.

A plain array has no names: its columns are taken by position. Where it meets data frames they must have one order, and
a note says so. A frame whose columns are numbered 0, 1, 2 and so on, as pandas does by itself, is like an array.
"""

from __future__ import annotations

import difflib
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from codistill.errors import DataError

Names = tuple[str, ...]  # of the columns, in their order; empty: unknown
BY_POSITION = "a plain array beside data frames; its columns are taken by position"
_SHOWN, _ASKED = 6, 3  # names in a message; and those of which it asks whether they are misspelt


class Given(NamedTuple):
    """Samples that somebody gave, by the names of their columns."""

    owner: str  # as in "agent 'a'"
    names: Names
    width: int | None = None  # columns; None: unknown, or no table


def as_frame(x: Any) -> Any:
    """A data frame of pandas, also from a table of another library (pyarrow, polars); None if x is neither."""
    pandas = sys.modules.get("pandas")  # where nobody has imported it, there is no frame of it
    if pandas is not None and isinstance(x, pandas.DataFrame):
        return x
    if callable(getattr(x, "to_pandas", None)) and hasattr(x, "columns"):
        return x.to_pandas()
    return None


def column_names(x: Any, what: str) -> Names:
    """The names of a data frame's columns as text; empty for arrays, and for columns numbered from 0 on."""
    frame = as_frame(x)
    if frame is None:
        return ()
    names = _texts(frame.columns)
    twice = [name for name, times in Counter(names).items() if times > 1]
    if twice:
        raise DataError(
            f"Every column of {what} must have a name of its own.",
            f"{listed(twice)} more than once",
            "Rename the columns, or drop them: x.loc[:, ~x.columns.duplicated()].",
        )
    return () if _is_numbered(frame.columns) else names


def given_samples(owner: str, x: Any, what: str) -> Given:
    """What is known of the columns of somebody's samples; `what` as in "the samples x of agent 'a'"."""
    return Given(owner, column_names(x, what), width(x))


def width(x: Any) -> int | None:
    """How many columns a table has; None for what is none, or must be read first."""
    shape = tuple(getattr(x, "shape", ()))
    return int(shape[1]) if len(shape) == 2 else None


def in_order(frame: Any, wanted: Names, what: str, *, leave_out: bool = False) -> Any:
    """A data frame of pandas with these columns, in this order; `leave_out` others, which are refused otherwise."""
    names = column_names(frame, what) or (_texts(frame.columns) if set(wanted) == set(_texts(frame.columns)) else ())
    if not names or not wanted or names == wanted:
        return frame
    if not (leave_out and set(wanted) <= set(names)):
        check_same(names, wanted, what, "those of the training samples" if leave_out else "those of the others")
    return frame.iloc[:, places(names, wanted)]


def places(names: Names, wanted: Names) -> list[int]:
    """Where each of the wanted columns is."""
    place = {name: number for number, name in enumerate(names)}
    return [place[name] for name in wanted]


def check_same(names: Names, wanted: Names, what: str, whose: str) -> None:
    """Raise a `DataError` that says which columns are missing and which are too many."""
    found = difference(names, wanted)
    if found is not None:
        raise DataError(
            f"The columns of {what} must be {whose}.", found, f"{_similar(names, wanted)}Rename, add or drop columns."
        )


def difference(names: Names, wanted: Names) -> str | None:
    """Which columns are missing and which are too many, in words; None if only the order may differ."""
    if names == wanted:
        return None
    missing, extra = _one_sided(wanted, names), _one_sided(names, wanted)
    parts = [f"{kind}: {listed(some)}" for kind, some in (("missing", missing), ("extra", extra)) if some]
    return "; ".join(parts) or None


def agree_on_columns(
    agents: Sequence[Given], others: Sequence[Given] = (), settled: Names = ()
) -> tuple[Names, list[str]]:
    """One order of the columns for all samples of a federation, and notes on arrays among data frames.

    It is the order that most agents have; if several are equally frequent, that of the first of `others` (public data,
    test set) that has one of them, and else of the first agent. Without names at any agent, that of `others`. Where it
    is `settled` elsewhere, all samples must have these columns.
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
    """Of an array it is not known in which of several orders its columns are."""
    return DataError(
        "A plain array beside data frames needs frames whose columns all have one order.",
        f"{array} is an array, and {frame} has its columns in another order than others",
        "Give it as a data frame with the same names, or bring the columns of all frames into one order.",
    )


def listed(names: Sequence[str]) -> str:
    """Some names for a person."""
    shown = ", ".join(f"'{name[:60]}'" for name in names[:_SHOWN])
    return shown + (f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else "")


def _by_number(each: Given, everybody: Sequence[Given]) -> Given:
    """An array where the names of the others are numbers from 0 on, which are its positions."""
    if each.names or each.width is None:
        return each
    positions = tuple(map(str, range(each.width)))
    named = any(other.names and set(other.names) == set(positions) for other in everybody)
    return each._replace(names=positions) if named else each


def _texts(columns: Any) -> Names:
    """Names as text; those of several levels joined."""
    return tuple(", ".join(map(str, name)) if isinstance(name, tuple) else str(name) for name in columns)


def _is_numbered(columns: Any) -> bool:
    numbers = list(columns)
    integers = all(isinstance(name, int | np.integer) and not isinstance(name, bool | np.bool_) for name in numbers)
    return integers and numbers == list(range(len(numbers)))


def _one_sided(names: Names, others: Names) -> list[str]:
    """The names that are not among the others."""
    known = set(others)
    return [name for name in names if name not in known]


def _similar(names: Names, wanted: Names) -> str:
    """Names that are probably misspelt, as questions."""
    missing = {name.strip().lower(): name for name in _one_sided(wanted, names)}
    asked = ""
    for name in _one_sided(names, wanted)[:_ASKED]:
        close = difflib.get_close_matches(name.strip().lower(), missing, n=1, cutoff=0.6)
        if close:
            asked += f"Did you mean '{missing.pop(close[0])[:60]}' by '{name[:60]}'? "
    return asked
