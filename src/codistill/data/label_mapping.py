"""Classes from the values of a label column: values that are named, or two sides of a threshold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from codistill.data.column_kinds import written_value
from codistill.errors import DataError, RecipeError

if TYPE_CHECKING:
    import pandas as pd


def check_label_mapping(above: float | None, names: Mapping[str, str] | None) -> None:
    """A label column is mapped in one way."""
    if above is not None and names:
        raise RecipeError(
            "[data] must say at most one of label_above and label_map.", "both", "Keep the one that is meant."
        )


def mapped_labels(
    column: pd.Series[Any], above: float | None, names: Mapping[str, str] | None, owner: str
) -> pd.Series[Any]:
    """The label column with classes in place of its values; unchanged where no mapping is given.

    `above` makes two classes, "at most 0" and "above 0" for a threshold of 0. `names` gives every value, written as
    in the file, a class; several values may share one.
    """
    if above is not None:
        return _compared(column, above, owner)
    return _named(column, names, owner) if names else column


def _compared(column: pd.Series[Any], above: float, owner: str) -> pd.Series[Any]:
    from pandas.api.types import is_numeric_dtype

    if not is_numeric_dtype(column.dtype):
        raise DataError(
            f"The label column '{column.name}' of {owner} must be numeric to be compared with label_above.",
            f"values such as {column.iloc[0]!r}",
            "Use label_map, which names a class for every value.",
        )
    return (column > above).map({False: f"at most {above:g}", True: f"above {above:g}"})


def _named(column: pd.Series[Any], names: Mapping[str, str], owner: str) -> pd.Series[Any]:
    written = column.map(written_value)
    unknown = ~written.isin(list(names))
    if unknown.any():
        row = int(unknown.to_numpy(dtype=bool).argmax())
        raise DataError(
            f"label_map must name a class for every value of the label column '{column.name}' of {owner}.",
            f"'{written.iloc[row]}' in data row {row + 1} (the first row is 1)",
            f"Add '{written.iloc[row]}' to label_map.",
        )
    return written.map(dict(names))
