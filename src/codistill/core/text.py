"""Human-readable numbers, safe CSV, and TOML and JSON within limits."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

_DEEPEST = 64  # levels of nested tables and lists; far fewer than Python's stack allows
# Text that a spreadsheet takes for a formula (OWASP: CSV injection), also after quotes; not a number or a dash.
_FORMULA = re.compile("'*[=+\\-@\t\r\n\uff1d\uff0b\uff0d\uff20]")
_HARMLESS = re.compile(r"-|[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|[+-]?(inf|nan)")
_LONGEST = 1024  # bits of an integer; Python refuses to print much larger ones
_TOO_DEEP = f"lists and tables are nested more than {_DEEPEST} deep"


def bytes_text(count: float) -> str:
    """1,234 -> '1.2 kB'."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def duration_text(seconds: float) -> str:
    """75 -> '1 min 15 s'."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes == 0:
        return f"{rest} s"
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def percent_text(share: float) -> str:
    """0.956 -> '95.6 %'."""
    return f"{100 * share:.1f} %"


def printable(text: str, most: int) -> str:
    """Received text as one printable line of at most `most` characters, safe for a terminal or a log."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:most])


def parse_toml(text: str) -> dict[str, Any]:
    """The tables of a TOML text; raises only `TOMLDecodeError`."""
    try:
        return _checked(tomllib.loads(text))  # type: ignore[no-any-return]
    except tomllib.TOMLDecodeError:
        raise
    except (ValueError, RecursionError) as error:
        # Python's own text goes on, after a semicolon, with how to raise its limit of digits.
        reason = _TOO_DEEP if isinstance(error, RecursionError) else str(error).partition(";")[0]
        raise tomllib.TOMLDecodeError(reason) from None


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text; raises only `ValueError`."""
    try:
        return _checked(json.loads(text))
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None


def flat(tables: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested tables by dotted names, of lists of tables by their places: {"a": {"b": 1}} -> a.b, 1."""
    if isinstance(tables, dict) and tables:
        items: Iterable[tuple[Any, Any]] = tables.items()
    elif isinstance(tables, list) and any(isinstance(item, dict) for item in tables):
        items = enumerate(tables)
    else:
        yield name, tables
        return
    for key, item in items:
        yield from flat(item, f"{name}.{key}" if name else str(key))


def _checked(value: Any) -> Any:
    """A value whose depth and integers are within limits."""
    level = [value]
    for _ in range(_DEEPEST):
        if any(isinstance(each, int) and each.bit_length() > _LONGEST for each in level):
            raise ValueError(f"an integer of more than {_LONGEST} bits")
        inner = [each for each in level if isinstance(each, dict | list)]
        level = [item for each in inner for item in (each.values() if isinstance(each, dict) else each)]
        if not level:
            return value
    raise RecursionError


def csv_text(frame: pd.DataFrame) -> str:
    """A frame as CSV, without its index.

    Text that a spreadsheet would take for a formula gets a leading quote ('), since names of agents, classes and
    columns may come from others.
    """
    safe = frame.copy()
    for place, kind in enumerate(safe.dtypes):
        if kind.kind not in "biuf":
            safe.isetitem(place, [_without_formula(cell) for cell in safe.iloc[:, place]])
    safe.columns = safe.columns.map(_without_formula)
    text: str = safe.to_csv(index=False)
    return text


def _without_formula(cell: Any) -> Any:
    formula = isinstance(cell, str) and _FORMULA.match(cell) and not _HARMLESS.fullmatch(cell)
    return f"'{cell}" if formula else cell
