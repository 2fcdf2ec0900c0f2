"""What keeps the columns of a table from being features, all of it at once, and the settings that would solve it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from codistill.core.errors import DataError
from codistill.data.cells import (
    Form,
    find_form,
    is_numeric,
    numbers_of,
    possible_date_formats,
    possible_forms,
    shown_cells,
)
from codistill.data.columns import Column, Columns, toml_key

if TYPE_CHECKING:
    import pandas as pd

_MOST_CATEGORIES = 30
_MOST_WORDS = 5  # distinct cells without a digit among numbers or dates, such as ? and unknown
_FEWEST_ROWS = 10  # from which on equal or different cells say something
_LISTED = 40  # problems in one message
_EXAMPLES, _LONGEST = 3, 30  # cells, and their letters


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What is wrong, or odd, with one column, and what would solve it."""

    column: str
    found: str
    kind: Mapping[str, Any] | None = None  # its entry in [data.columns]
    drop: bool = False
    missing: tuple[str, ...] = ()  # cells to list in missing_values
    note: str = ""  # on the solution
    stops: bool = True  # whether the table cannot be used like this
    error: DataError | None = field(default=None, compare=False)  # if this is the only one


def find_problems(
    frame: pd.DataFrame,
    kinds: Mapping[str, Column],
    owner: str,
    *,
    decimal: str | None = None,
    declared: bool = True,
) -> list[Problem]:
    """The problems of all columns. `kinds`: of some columns; `declared`: whether their cells are read, too."""
    found: list[Problem] = []
    others = {str(name): frame.iloc[:, place] for place, name in enumerate(frame.columns) if str(name) not in kinds}
    forms = {find_form(values, decimal) for values in others.values() if not is_numeric(values)}
    marks = {form.decimal for form in forms if form not in (None, Form())}
    for name in map(str, frame.columns):
        if name in others:
            values = others[name]
            one = _of_numbers(name, values, owner) if is_numeric(values) else _of_others(name, values, decimal, marks)
        else:
            one = _of_declared(name, frame[name], kinds[name], owner) if declared else None
        found += [one] if one is not None else []
    return found


def _of_declared(name: str, values: pd.Series[Any], column: Column, owner: str) -> Problem | None:
    if column.kind == "text" or (column.kind == "category" and (column.values is None or values.isna().all())):
        return None
    try:
        frame = values.to_frame(name)
        Columns({name: column}).fit(frame, owner=owner).transform(frame, owner)
    except DataError as error:
        return Problem(column=name, found=f"{error.must.rstrip('.')}: {error.found}", note=error.do, error=error)
    return None


def _of_numbers(name: str, values: pd.Series[Any], owner: str) -> Problem | None:
    """Numbers that are endless; and as a note columns that say nothing, or too much."""
    try:
        numbers = numbers_of(values, Column(kind="number"), owner)
    except DataError as error:
        return Problem(column=name, found=error.found, note="correct the cell, or drop the column", error=error)
    present = numbers[~np.isnan(numbers)]
    if len(present) < _FEWEST_ROWS:
        return None
    if (present == present[0]).all():
        return Problem(column=name, found=f"only the value {values.dropna().iloc[0]}", drop=True, stops=False)
    steps = np.diff(np.sort(present))
    if values.dtype.kind in "iu" and (steps == 1).all():
        return Problem(column=name, found="a number of its own in each row, without gaps", drop=True, stops=False)
    return None


def _of_others(name: str, values: pd.Series[Any], decimal: str | None, marks: set[str]) -> Problem | None:
    """What a column that pandas does not read as numbers could be."""
    cells = values.dropna()
    if not len(cells):
        return None
    if isinstance(cells.iloc[0], list | tuple | dict | set | np.ndarray):
        return Problem(column=name, found=f"cells that hold a {type(cells.iloc[0]).__name__}", drop=True)
    one = cells.drop_duplicates()
    made = _numbers_or_dates(name, values, one, decimal, marks)
    if made is not None:
        return made if made.stops or made.kind is not None else None
    has_digit = one.astype(str).str.contains(r"\d").to_numpy(dtype=bool)
    words = tuple(sorted(one[~has_digit].astype(str)))
    if 0 < len(words) <= min(_MOST_WORDS, int(has_digit.sum())):
        made = _numbers_or_dates(name, values.where(~values.isin(one[~has_digit])), one[has_digit], decimal, marks)
        if made is not None:
            kind = made.kind if made.kind and dict(made.kind) != {"kind": "number"} else None
            which = shown_cells(values, values.isin(one[~has_digit]).to_numpy(dtype=bool))
            what = "dates" if kind and kind["kind"] == "date" else "numbers"
            return Problem(column=name, found=f"{what} and {which}", kind=kind, missing=words, note=made.note)
    if len(one) == 1 and len(cells) >= _FEWEST_ROWS:
        return Problem(column=name, found=f"only the value {one.iloc[0]!r}"[:80], drop=True)
    spaces = float(cells.astype(str).str.count(" ").mean())
    if len(one) == len(cells) >= _FEWEST_ROWS and spaces < 1:
        return Problem(column=name, found=f"another text in each row{_such(one)}", drop=True, note="an identifier?")
    few = len(one) <= _MOST_CATEGORIES or len(one) * 10 <= len(cells)
    kind_of = "category" if few and spaces < 3 else "text"
    return Problem(column=name, found=f"{len(one)} different texts{_such(one)}", kind={"kind": kind_of})


def _numbers_or_dates(
    name: str, values: pd.Series[Any], one: pd.Series[Any], decimal: str | None, marks: set[str]
) -> Problem | None:
    """Cells as numbers or dates, if all are; `one`: each once."""
    present = values.notna().to_numpy(dtype=bool)
    if values.dtype.kind in "mM" or str(values.dtype).startswith("datetime"):
        return Problem(column=name, found=f"dates{_such(one)}", kind={"kind": "date"})
    form = find_form(one, decimal)
    if form is not None:
        found = f"numbers with {' and '.join(_form_words(form))}"
        return Problem(column=name, found=found, kind=None if form == Form() else _as_kind(form), stops=False)
    for bounds in (False, True):
        forms = possible_forms(one, decimal, bounds=bounds)
        if forms:
            chosen = next((form for form in forms if {form.decimal} == marks), forms[0])
            sure = find_form(one, decimal, bounds=bounds) is not None
            others = [] if sure else [each for each in forms if each != chosen]
            kind = {**_as_kind(chosen), **({"bounds": "value"} if bounds else {})}
            marked = present & values.astype(str).str.contains(r"^\s*[<>≤≥]").to_numpy(dtype=bool)
            found = f"bounds among numbers: {shown_cells(values, marked)}"
            found = found if bounds else f"numbers that can be read in two ways{_such(one)}"
            note = f"or {_toml(_as_kind(others[0]))}" if others else ""
            return Problem(column=name, found=found, kind=kind, note=note)
    formats = possible_date_formats(one)
    if formats:
        kind = {"kind": "date", **({} if formats[0] is None else {"format": formats[0]})}
        note = "" if len(formats) == 1 or formats[0] is None else f"or format = {json.dumps(formats[1])}"
        return Problem(column=name, found=f"dates{_such(one)}", kind=kind, note=note)
    return None


def _such(one: pd.Series[Any]) -> str:
    return ", such as " + ", ".join(repr(str(cell)[:_LONGEST]) for cell in one[:_EXAMPLES])


def _form_words(form: Form) -> list[str]:
    words = [f"a decimal {'comma' if form.decimal == ',' else 'point'}"]
    return words + ([f"thousands separated by {form.thousands!r}"] if form.thousands else [])


def _as_kind(form: Form) -> dict[str, Any]:
    kind: dict[str, Any] = {"kind": "number"}
    kind |= {"decimal": form.decimal} if form.decimal != "." else {}
    return kind | ({"thousands": form.thousands} if form.thousands else {})


def merged(problems: Iterable[Problem]) -> list[Problem]:
    """One problem for each column; if several tables ask for different kinds, the one that takes most."""
    order = ("number", "date", "category", "text")
    chosen: dict[str, Problem] = {}
    for each in problems:
        before = chosen.get(each.column)
        ranks = [order.index(p.kind["kind"]) if p is not None and p.kind else -1 for p in (before, each)]
        most = each if before is None or ranks[1] > ranks[0] else before
        cells = (*(before.missing if before else ()), *each.missing)
        chosen[each.column] = replace(most, missing=tuple(dict.fromkeys(cells)))
    return list(chosen.values())


# --- what to write: in a recipe TOML, in Python Python


def toml_advice(
    problems: Sequence[Problem], drop: Sequence[str] = (), missing: Sequence[str] = (), *, has_columns: bool = False
) -> str:
    """The settings of a recipe that would solve the problems; lists with what they held before."""
    more_drop, more_missing = _lists(problems)
    lines = []
    if more_drop:
        notes = [f"{p.column}: {p.note}" for p in problems if p.drop and p.note]
        comment = f"  # {'; '.join(notes)}" if notes else ""
        lines.append(f"drop = {_toml([*drop, *more_drop])}{comment}")
    if more_missing:
        lines.append(f"missing_values = {_toml([*missing, *more_missing])}  # or correct these cells")
    lines = ["# under [data]:", *lines, ""] if lines else []
    kinds = [each for each in problems if each.kind is not None]
    if kinds:
        lines.append("# under [data.columns]:" if has_columns else "[data.columns]")
        for each in kinds:
            entry = _toml(each.kind["kind"] if len(each.kind or ()) == 1 else each.kind)  # type: ignore[index]
            lines.append(f"{toml_key(each.column)} = {entry}{f'  # {each.note}' if each.note else ''}")
    return "\n".join(lines).strip()


def python_advice(problems: Sequence[Problem], x: str = "x") -> str:
    """The same as a line of Python."""
    drop, missing = _lists(problems)
    kinds = {p.column: dict(p.kind) if len(p.kind) > 1 else p.kind["kind"] for p in problems if p.kind is not None}
    steps = [f"{x} = {x}.drop(columns={json.dumps(drop, ensure_ascii=False)})"] if drop else []
    steps += [f'{x} = {x}.replace({json.dumps(missing, ensure_ascii=False)}, float("nan"))'] if missing else []
    steps += [f"codistill.Columns({json.dumps(kinds, ensure_ascii=False)}).fit({x}).transform({x})"]
    return "; ".join(steps)


def kinds_needed(problems: Sequence[Problem], owner: str) -> DataError:
    """The error of a frame in Python."""
    problems = merged(problems)
    return DataError(
        f"Columns of {owner} must hold numbers, or have a kind.",
        "; ".join(f"'{each.column}': {each.found}" for each in problems[:_LISTED]) + _more(problems),
        f"Write: {python_advice([each for each in problems if each.kind or each.drop or each.missing])}",
    )


def table_error(problems: Sequence[tuple[str, Problem]], **given: Any) -> DataError:
    """The error of the tables of a recipe: (table, problem) for each. `given`: see `toml_advice`."""
    every = [each for _, each in problems]
    if len(every) == 1 and every[0].error is not None:
        return every[0].error
    tables = dict.fromkeys(table for table, _ in problems)
    lines = [
        f"\n  {f'{table}, ' if len(tables) > 1 else ''}column '{each.column}': {each.found}"
        + (f" ({each.note})" if each.note and not (each.kind or each.drop or each.missing) else "")
        for table, each in problems[:_LISTED]
    ]
    must = f"All columns of {next(iter(tables)) if len(tables) == 1 else 'the tables'} must be usable as features."
    if len(every) == 1:
        advice = toml_advice(every, **given | {"has_columns": True}).removeprefix("# ").replace("\n", " ")
        written, _, comment = advice.partition("  # ")
        do = f"Write {written}{f' ({comment})' if comment else ''}; or list the column in 'drop' or 'ids'."
        return DataError(must, lines[0].strip(), do if advice else "Correct the cells.")
    advice = toml_advice(merged(every), **given)
    return DataError(
        must,
        f"{len(every)} problems:{''.join(lines)}{_more(every)}",
        f"Write in the recipe, or list columns in 'drop' or 'ids':\n\n{advice}\n" if advice else "Correct the cells.",
    )


def _more(problems: Sequence[Any]) -> str:
    return f"\n  and {len(problems) - _LISTED} more" if len(problems) > _LISTED else ""


def _lists(problems: Sequence[Problem]) -> tuple[list[str], list[str]]:
    """The columns to drop, and the cells that are missing ones."""
    drop = [each.column for each in problems if each.drop]
    return drop, list(dict.fromkeys(cell for each in problems for cell in each.missing))


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{{ {_pairs(value)} }}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(value, ensure_ascii=False)


def _pairs(table: Mapping[str, Any]) -> str:
    return ", ".join(f"{toml_key(key)} = {_toml(value)}" for key, value in table.items())
