"""What one column of a table holds: numbers, categories or text; checked before it becomes features."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from codistill.errors import DataError, RecipeError, nearest
from codistill.settings import check_settings, from_table, setting

if TYPE_CHECKING:
    import pandas as pd

ENCODINGS = {"number": (), "category": ("one_hot", "ordinal"), "text": ("hashing", "tfidf")}  # the first by default


@dataclass(frozen=True, kw_only=True)
class Column:
    """What one column holds, and how it becomes features."""

    kind: str = setting(help="what the column holds", choices=tuple(ENCODINGS))
    encode: str | None = setting(
        None,
        "a category as one_hot or ordinal, text by hashing or tfidf; unset: one_hot, hashing",
        choices=("one_hot", "ordinal", "hashing", "tfidf"),
    )
    values: tuple[str, ...] | None = setting(None, "the categories, in order; unset: those that occur, sorted")
    unknown: str = setting("refuse", "a category that is not among the values", choices=("refuse", "ignore"))
    features: int = setting(256, "how many features a text becomes; tfidf: at most", at_least=1, at_most=1 << 16)

    def __post_init__(self) -> None:
        check_settings(self, "columns")
        fitting = ENCODINGS[self.kind]
        if self.encode is not None and self.encode not in fitting:
            raise RecipeError(
                f"columns.encode of a {self.kind} column must be {' or '.join(fitting) or 'unset'}.",
                repr(self.encode),
                "Change it, or the kind of the column.",
            )
        if self.values is not None and (self.kind != "category" or not self.values or _twice(self.values)):
            raise RecipeError(
                "columns.values must list the values of a category, each once.",
                f"{list(self.values)} for a {self.kind} column",
                "Correct the list, or leave it out.",
            )

    @property
    def encoding(self) -> str:
        """How it becomes features; empty for numbers, which are features already."""
        return self.encode or (*ENCODINGS[self.kind], "")[0]


def check_number(values: pd.Series[Any], owner: str) -> None:
    """A column of numbers holds numbers, finite ones in 32 bits; or nothing."""
    import pandas as pd

    if not pd.api.types.is_numeric_dtype(values.dtype):
        try:
            bad = pd.to_numeric(values, errors="coerce").isna() & values.notna()
        except OverflowError:  # integers that no float can hold
            large = [len(f"{value}".lstrip("-")) for value in values]
            row = int(np.argmax(large))
            raise _too_large(f"a number of {large[row]} digits", values.name, row, owner) from None
        if not bad.any() and values.isna().all():
            return
        row = int(bad.to_numpy(dtype=bool).argmax())
        raise DataError(
            f"Every feature column of {owner} must be numeric, or its kind must be said.",
            f"column '{values.name}' of type {values.dtype}, with {f'{values.iloc[row]!r}'[:80]} in data row {row + 1}",
            f'Say its kind, e.g. {_key(values.name)} = "category" or "text" in [data.columns]; encode it as numbers; '
            "list it in 'drop' or 'ids'; or list such a cell in 'missing_values'.",
        )
    if pd.api.types.is_float_dtype(values.dtype):
        numbers = values.to_numpy(dtype=np.float64, na_value=np.nan)
        with np.errstate(over="ignore"):
            bad_numbers = np.isinf(numbers.astype(np.float32))
        if bad_numbers.any():
            row = int(bad_numbers.argmax())
            raise _too_large(f"{values.iloc[row]}", values.name, row, owner)


def _too_large(number: str, column: Any, row: int, owner: str) -> DataError:
    return DataError(
        f"Numbers of {owner} must be finite in 32 bits.",
        f"{number} in column '{column}', data row {row + 1} (the first row is 1)",
        "Correct the cell, remove the row, or list the column in 'drop'.",
    )


def written_value(value: Any) -> str:
    """A value as a person writes it: pandas reads a column of integers with gaps as floats."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def as_column(name: str, kind: Any) -> Column:
    """A column from its kind, or from a table with its kind and options."""
    if isinstance(kind, Column):
        return kind
    if isinstance(kind, str):
        kind = {"kind": kind}
    if not isinstance(kind, Mapping):
        raise RecipeError(
            f"Column '{name}' must be given a kind or a table.", f"{kind!r}"[:80], f'Write {_key(name)} = "category".'
        )
    if kind.get("kind") not in list(ENCODINGS):
        raise RecipeError(
            f"The kind of column '{name}' must be one of {', '.join(ENCODINGS)}.",
            repr(kind.get("kind")),
            nearest(str(kind.get("kind")), ENCODINGS),
        )
    values = kind.get("values")
    if isinstance(values, Sequence) and not isinstance(values, str):
        kind = {**kind, "values": [written_value(value) for value in values]}
    made: Column = from_table(Column, kind, f"data.columns.{name}")
    return made


def _twice(values: Sequence[str]) -> bool:
    return len(set(values)) < len(values)


def _key(name: Any) -> str:
    """A column's name as a key of TOML."""
    return str(name) if str(name).replace("_", "").replace("-", "").isalnum() else f'"{name}"'
