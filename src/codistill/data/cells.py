"""The cells of a table as they are written: separators, numbers with commas and bounds, and dates."""

from __future__ import annotations

import csv
import functools
import re
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from codistill.core.errors import DataError, RecipeError
from codistill.data.frames import written_value

if TYPE_CHECKING:
    import pandas as pd

    from codistill.data.columns import Column

# --- separators of columns

SEPARATORS = {"comma": ",", "semicolon": ";", "tab": "\t", "pipe": "|"}
_SAMPLE = 1 << 16  # characters of a file that are compared


def find_separator(path: Path) -> str:
    """The character between the columns of a CSV file: the one by which all of its first rows have equally many."""
    try:
        with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
            sample = file.read(_SAMPLE)
            is_whole = not file.read(1)
    except OSError:
        return ","  # reported by what reads the file next
    found = {}
    for name, separator in SEPARATORS.items():
        try:
            rows = [row for row in csv.reader(sample.splitlines(), delimiter=separator) if row]
        except csv.Error:
            continue
        widths = {len(row) for row in (rows if is_whole else rows[:-1])}
        if len(widths) == 1 and widths != {1}:
            found[name] = separator
    if len(found) > 1:
        first = next(iter(found))
        raise DataError(
            f"The separator of the columns of {path} must be clear.",
            f"rows of equal length by each of {', '.join(found)}",
            f'Set separator = "{first}" (or another) under [data] of a recipe; otherwise, put cells that contain one '
            "in quotes.",
        )
    return next(iter(found.values()), ",")


_GROUPED = r"[1-9]\d{0,2}(?:\.\d{3})+"


def unclear_as_text(frame: pd.DataFrame, read: Callable[[list[int]], pd.DataFrame]) -> pd.DataFrame:
    """Columns such as 12 and 1.250 as text: where numbers have a decimal comma, the point may separate thousands.

    `read`: reads the columns at some places again, as text.
    """
    places = [place for place, kind in enumerate(frame.dtypes) if kind.kind == "f"]
    made = frame
    for name, cells in (read(places) if places else frame.iloc[:, :0]).items():
        texts = cells.dropna().astype(str).str.strip()
        is_grouped = texts.str.fullmatch(_GROUPED)
        if is_grouped.any() and (is_grouped | texts.str.fullmatch(r"\d{1,3}")).all():
            made = made.assign(**{str(name): cells})
    return made


# --- numbers


class Form(NamedTuple):
    """How numbers are written."""

    decimal: str = "."
    thousands: str | None = None


_FORMS = (Form(), Form(","), Form(".", ","), Form(",", "."), Form(".", " "), Form(",", " "), Form(".", "'"))
_THOUSANDS = (None, ",", ".", " ", "'")
_SPACES = dict.fromkeys(map(ord, "\u00a0\u2009\u202f"), " ")  # that stand between thousands, too


def check_marks(decimal: str | None, thousands: str | None, owner: str) -> None:
    if decimal not in (None, ".", ",") or thousands not in _THOUSANDS or (decimal == thousands and decimal is not None):
        raise RecipeError(
            f'{owner}.decimal must be "." or ",", and what separates thousands another one of ",", ".", " " or "\'".',
            f"decimal = {decimal!r}, thousands = {thousands!r}",
            'Example for 1.234,5: decimal = ",", thousands = ".".',
        )


def written_in(values: pd.Series[Any], form: Form, *, bounds: bool = False) -> np.ndarray:
    """(n,) the numbers in a column of this form; NaN for what is missing or no number. `bounds`: "<5" counts as 5."""
    return np.array([_number(value, form, bounds) for value in values.tolist()], dtype=np.float64)


@functools.cache
def _pattern(form: Form, bounds: bool) -> re.Pattern[str]:
    decimal, group = re.escape(form.decimal), re.escape(form.thousands or "")
    whole = rf"(?:\d+|[1-9]\d{{0,2}}(?:{group}\d{{3}})+)" if group else r"\d+"
    bound = r"(?:(?:[<>]=?|[≤≥])\s*)?" if bounds else ""
    return re.compile(rf"\s*{bound}([+-]?(?:{whole}(?:{decimal}\d*)?|{decimal}\d+)(?:[eE][+-]?\d+)?)\s*", re.ASCII)


def _number(value: Any, form: Form, bounds: bool) -> float:
    if not isinstance(value, str):
        try:
            return float(value)
        except (TypeError, ValueError):
            return np.nan
        except OverflowError:  # an integer beyond the range of floats
            return np.inf
    text = _pattern(form, bounds).fullmatch(value.translate(_SPACES))
    if text is None:
        return np.nan
    digits = text[1].replace(form.thousands, "") if form.thousands else text[1]
    return float(digits.replace(form.decimal, "."))


def find_form(values: pd.Series[Any], decimal: str | None = None, *, bounds: bool = False) -> Form | None:
    """The form by which all cells are numbers; None if there is none, or if several read different numbers.

    `decimal`: the mark that all numbers of the table have, if that is known.
    """
    cells = values.dropna().drop_duplicates()
    read = possible_forms(cells, decimal, bounds=bounds)
    numbers = [written_in(cells, form, bounds=bounds) for form in read]
    return read[0] if read and all(np.array_equal(each, numbers[0]) for each in numbers) else None


def possible_forms(cells: pd.Series[Any], decimal: str | None = None, *, bounds: bool = False) -> list[Form]:
    """All forms by which every cell is a number."""
    forms = [form for form in _FORMS if decimal in (None, form.decimal)]
    given = cells.tolist()
    return [form for form in forms if given and not any(np.isnan(_number(each, form, bounds)) for each in given)]


def is_numeric(values: pd.Series[Any]) -> bool:
    from pandas.api.types import is_numeric_dtype

    return bool(is_numeric_dtype(values.dtype))


def numbers_of(values: pd.Series[Any], column: Column, owner: str) -> np.ndarray:
    """(n,) a column of numbers, finite in 32 bits; missing ones are NaN."""
    if is_numeric(values):
        numbers = values.to_numpy(dtype=np.float64, na_value=np.nan)
        broken = numbers != np.where(np.isnan(numbers), numbers, np.rint(numbers))
        if column.thousands == "." and (broken & ~np.isnan(numbers)).any():
            raise DataError(
                f"Column '{values.name}' of {owner} must be text or whole numbers: points separate its thousands.",
                f"{values[broken & ~np.isnan(numbers)].iloc[0]}",
                "Read it as text: codistill does so where a semicolon, tab or pipe separates the columns.",
            )
    else:
        form, bounds = Form(column.decimal, column.thousands), column.bounds == "value"
        numbers = written_in(values, form, bounds=bounds)
        bad = np.isnan(numbers) & values.notna().to_numpy(dtype=bool)
        if bad.any():
            raise DataError(
                f"Column '{values.name}' of {owner} must hold numbers{_said(form, bounds)}.",
                shown_cells(values, bad),
                _about_numbers(values[bad]),
            )
    with np.errstate(over="ignore"):
        endless = np.isinf(numbers.astype(np.float32))
    if endless.any():
        row = int(endless.argmax())
        text = f"{values.iloc[row]}"
        shown = text if len(text) <= _LONG else f"a number of {len(text.lstrip('-'))} digits"
        raise DataError(
            f"Numbers of {owner} must be finite in 32 bits.",
            f"{shown} in column '{values.name}', data row {row + 1} (the first row is 1)",
            "Correct the cell, remove the row, or list the column in 'drop'.",
        )
    return numbers


def _said(form: Form, bounds: bool) -> str:
    parts = [f"with a decimal {'comma' if form.decimal == ',' else 'point'}"] if form != Form() else []
    parts += [f"thousands separated by {form.thousands!r}"] if form.thousands else []
    return " " + " and ".join([*parts, *(["bounds such as <5"] if bounds else [])]) if parts or bounds else ""


def _about_numbers(cells: pd.Series[Any]) -> str:
    if find_form(cells, bounds=True) is not None and find_form(cells) is None:
        return (
            'To read "<5" as 5, set bounds = "value" for the column; otherwise list such cells in \'missing_values\'.'
        )
    if possible_forms(cells.drop_duplicates()):
        return 'Set how they are written: decimal = "," or thousands = "," for the column.'
    return 'Correct them, or list such cells in \'missing_values\'; or set another kind, such as "category" or "text".'


_SHOWN, _LONG = 3, 40  # cells in a message, and their letters


def shown_cells(values: pd.Series[Any], chosen: np.ndarray) -> str:
    """The first of these cells with their rows, and how many more there are."""
    rows = np.flatnonzero(chosen)
    cells = [f"{values.iloc[row]!r}"[:60] + f" in data row {row + 1}" for row in rows[:_SHOWN]]
    return ", ".join(cells) + (f" and {len(rows) - _SHOWN} more" if len(rows) > _SHOWN else "")


# --- dates

PARTS = ("days", "year", "month", "day", "weekday", "hour")
_ISO = r"\d{4}-\d{2}-\d{2}(?:[T ]\d{2}:\d{2}(?::\d{2}(?:[.,]\d+)?)?(?:Z|[+-]\d{2}:?\d{2})?)?"
_ZONE = r"\d:\d{2}.*(?:Z|[+-]\d{2}:?\d{2})"
_DAYS = (
    "%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y", "%Y/%m/%d", "%d-%m-%Y", "%m-%d-%Y", "%d.%m.%y", "%d/%m/%y", "%m/%d/%y",
    "%d %b %Y", "%d %B %Y", "%b %d, %Y", "%B %d, %Y", "%Y%m%d",
)  # fmt: skip
_TIMES = ("", " %H:%M", " %H:%M:%S")
_DAY = 86_400_000_000  # microseconds


def possible_date_formats(cells: pd.Series[Any]) -> list[str | None]:
    """The formats by which every cell is a date; None: ISO 8601."""
    if not len(cells):
        return []
    first = written_value(cells.iloc[0]).strip()
    likely: list[str | None] = [None] if re.fullmatch(_ISO, first) else []
    for form in (day + time for time in _TIMES for day in _DAYS):
        with suppress(ValueError):
            datetime.strptime(first, form)
            likely.append(form)
    return [each for each in likely if not np.isnan(_moments(cells, each, None)[0]).any()]


def dates_of(values: pd.Series[Any], column: Column, owner: str) -> np.ndarray:
    """(n, parts) numbers made of a column of dates; missing ones are NaN.

    `days`: since 1970-01-01, with the time as a fraction; `weekday`: 0 is Monday. A time with an offset from UTC is
    converted to the column's time zone, or to UTC; a time without one is taken as it stands.
    """
    import pandas as pd

    moments, has_zone = _moments(values, column.format, column.timezone)
    present = values.notna().to_numpy(dtype=bool)
    bad = np.isnan(moments) & present
    if bad.any():
        how = "ISO 8601, such as 2026-03-31 or 2026-03-31 14:05" if column.format is None else f"'{column.format}'"
        found = [each for each in possible_date_formats(values.dropna()) if each is not None]
        raise DataError(
            f"Dates of column '{values.name}' of {owner} must be written as {how}.",
            shown_cells(values, bad),
            f'Set format = "{found[0]}" for the column.'
            if found
            else "Correct them, set format for the column, or list such cells in 'missing_values'.",
        )
    if column.timezone is None and has_zone[present].any() and not has_zone[present].all():
        raise DataError(
            f"Times of column '{values.name}' of {owner} must all have an offset from UTC, or none.",
            shown_cells(values, present & ~has_zone) + f", but {shown_cells(values, present & has_zone)}",
            'Set the zone of those without, such as timezone = "Europe/Berlin", for the column.',
        )
    gaps = np.isnan(moments)
    whole = np.where(gaps, 0, moments).astype(np.int64)
    stamps = pd.DatetimeIndex(whole.view("datetime64[us]"))
    made = {"days": whole / _DAY}
    for part in set(column.made_of) - {"days"}:
        made[part] = np.asarray(getattr(stamps, "day_of_week" if part == "weekday" else part), dtype=np.float64)
    return np.stack([np.where(gaps, np.nan, made[part]) for part in column.made_of], axis=1)


def _moments(values: pd.Series[Any], form: str | None, zone: str | None) -> tuple[np.ndarray, np.ndarray]:
    """(n,) microseconds since 1970 by the clock of the zone (NaN: missing, or no date); (n,) which had an offset."""
    import pandas as pd

    kind, moments = values.dtype, np.full(len(values), np.nan)
    if isinstance(kind, pd.DatetimeTZDtype):
        return _microseconds(values.dt.tz_convert(zone or "UTC").dt.tz_localize(None)), np.ones(len(values), dtype=bool)
    if kind.kind == "M":
        return _microseconds(values), np.zeros(len(values), dtype=bool)
    present = values.notna().to_numpy(dtype=bool)
    texts = pd.Series([written_value(value) for value in values[present]], dtype=object).astype(str).str.strip()
    has_zone = np.zeros(len(values), dtype=bool)
    has_zone[present] = texts.str.fullmatch(rf".*{_ZONE}").to_numpy(dtype=bool)
    if form is None:
        texts = texts.where(texts.str.fullmatch(_ISO).astype(bool), "")
    for zoned in (False, True):
        chosen = np.flatnonzero(present)[has_zone[present] == zoned]
        if len(chosen):
            part = texts[has_zone[present] == zoned]
            read = pd.to_datetime(part, format=form or "ISO8601", errors="coerce", utc=True)
            moments[chosen] = _microseconds(read.dt.tz_convert(zone or "UTC" if zoned else "UTC").dt.tz_localize(None))
    return moments, has_zone


def _microseconds(stamps: pd.Series[Any]) -> np.ndarray:
    gaps = stamps.isna().to_numpy(dtype=bool)
    values = stamps.to_numpy().astype("datetime64[us]").astype(np.int64)
    return np.where(gaps, np.nan, values)


def check_format(form: str) -> str | None:
    """What is wrong with a format of dates; None if nothing is."""
    import pandas as pd

    if "%" not in form:
        return "no % in it"
    try:
        pd.to_datetime(pd.Series(["1"]), format=form, errors="coerce")
    except (ValueError, TypeError) as error:
        return f"{error}"[:100]
    return None
