"""How the frames of one agent become arrays, and frames again before its own model sees them.

All of codistill works on arrays of numbers: batches, held-out rows, checkpoints, evaluation. Numbers of a frame stay as
they are; of text, categories and dates an array holds codes, which mean nothing outside of their agent. A learner that
takes frames, and a transformer `prepare=`, get them decoded, with names and types as in the agent's own samples.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from codistill.core.errors import DataError
from codistill.data.frames import Names, as_frame, in_order, is_text, listed, texts

if TYPE_CHECKING:
    import pandas as pd

_EXACT = 1 << 53  # integers up to here are exact as 64-bit floats


class FrameEncoding:
    """The columns of an agent's samples by name and type, and a code for each value that is no number.

    `text`: the samples are plain texts, one for each row, which a model gets as a series. New values get new codes, so
    every encoded frame can be decoded; which values a model knows is its own matter.
    """

    def __init__(self, names: Names, dtypes: Mapping[str, Any], *, text: bool = False) -> None:
        self.names, self.dtypes, self.text = names, dict(dtypes), text
        self.coded = tuple(name for name in names if not _is_numeric(self.dtypes[name]))
        self._values: dict[str, list[Any]] = {name: [] for name in self.coded}  # by code
        self._codes: dict[str, dict[tuple[type, Any], int]] = {name: {} for name in self.coded}

    @classmethod
    def of(cls, frame: pd.DataFrame, *, text: bool = False) -> FrameEncoding:
        """An encoding for frames like this one."""
        names = texts(frame.columns)
        return cls(names, dict(zip(names, frame.dtypes, strict=True)), text=text)

    # Copies of an agent and of its model share one encoding: a code means the same to all of them.
    def __copy__(self) -> FrameEncoding:
        return self

    def __deepcopy__(self, memo: Any) -> FrameEncoding:
        return self

    @property
    def is_coded(self) -> np.ndarray:
        """(d,) which columns hold codes."""
        return np.array([name in self._values for name in self.names], dtype=bool)

    def encode(self, x: Any, what: str, *, leave_out: bool = True) -> np.ndarray:
        """(n, d) 64-bit numbers of a frame's columns by name; missing values are NaN.

        `leave_out`: drop other columns instead of raising.
        """
        import pandas as pd

        if self.text and (is_text(x) or _is_empty(x)):
            frame = pd.DataFrame({self.names[0]: pd.Series(x).array})
        else:
            frame = self._own_columns(x, what, leave_out)
        made = np.empty((len(frame), len(self.names)))
        for place, name in enumerate(self.names):
            column = frame.iloc[:, place]
            made[:, place] = self._coded(name, column, what) if name in self._values else _numbers(name, column, what)
        return made

    def _own_columns(self, x: Any, what: str, leave_out: bool) -> pd.DataFrame:
        frame, start = as_frame(x), what[:1].upper() + what[1:]
        found = f"a {type(x).__name__}" + (f" of shape {np.shape(x)}" if hasattr(x, "shape") else "")
        if frame is None and self.text:
            raise DataError(f"{start} must be texts.", found, "Pass a list, an array or a series of strings.")
        if frame is None:
            wanted = f"column{'s' * (len(self.names) > 1)} {listed(self.names)}"
            must = f"{start} must be a data frame, since columns are found by name."
            raise DataError(must, found, f"Pass a frame with the {wanted}.")
        own: pd.DataFrame = in_order(frame, self.names, what, leave_out=leave_out)
        return own

    def _coded(self, name: str, column: pd.Series[Any], what: str) -> np.ndarray:
        import pandas as pd

        if self.text and column.isna().any():
            row = int(column.isna().to_numpy().argmax())
            raise DataError(
                f"Every text in {what} must be a string.",
                f"a missing one in row {row} (counted from 0)",
                'Remove the row, or write an empty text: x.fillna("").',
            )
        try:
            codes, found = pd.factorize(column)
            keys = [(type(value), value) for value in map(_plain, found)]
            known, values = self._codes[name], self._values[name]
            if not keys:
                return np.full(len(column), np.nan)
            if _is_numeric(column.dtype) and values and not isinstance(values[0], int | float):
                raise _other_kind(name, what, f"numbers, {self._shown(name)} in the samples of the agent", "text")
            places = np.empty(len(keys))
            for at, key in enumerate(keys):
                code = known.setdefault(key, len(values))
                if code == len(values):
                    values.append(key[1])
                places[at] = code
        except TypeError:
            raise DataError(
                f"Each cell of column '{name}' in {what} must hold one value.",
                f"a {type(column.dropna().iloc[0]).__name__}",
                "Make columns of its parts, or drop it.",
            ) from None
        return np.where(codes < 0, np.nan, places[codes])

    def _shown(self, name: str) -> str:
        return f"{self._values[name][0]!r}"[:40]

    def decode(self, rows: np.ndarray) -> Any:
        """The frame of encoded rows, with the types of the agent's own samples; of texts a series."""
        import pandas as pd

        columns = {name: self._decoded(name, rows[:, place]) for place, name in enumerate(self.names)}
        return columns[self.names[0]] if self.text else pd.DataFrame(columns)

    def _decoded(self, name: str, values: np.ndarray) -> pd.Series[Any]:
        import pandas as pd

        kind = self.dtypes[name]
        if name in self._values:
            known = np.empty(len(self._values[name]) + 1, dtype=object)
            known[:-1], known[-1] = self._values[name], np.nan
            if isinstance(kind, pd.CategoricalDtype):  # of other categories the model has not heard
                categories = set(kind.categories)
                known[:-1] = [value if value in categories else np.nan for value in self._values[name]]
            places = np.where(np.isnan(values), len(known) - 1, values).astype(np.int64)
            return pd.Series(known[places], name=name).astype(kind)
        whole = isinstance(kind, np.dtype) and kind.kind in "iub"
        if whole and np.isnan(values).any():
            return pd.Series(values, name=name)  # as in pandas, where integers have no missing value
        return pd.Series(values, name=name).astype(kind)

    # --- values that are met in predictions only, and forgotten afterwards: an agent may answer for years

    def mark(self) -> dict[str, int]:
        """How many values there are now, for `forget`."""
        return {name: len(values) for name, values in self._values.items()}

    def forget(self, mark: Mapping[str, int]) -> None:
        """Drop the codes that were given since `mark`."""
        for name, size in mark.items():
            for value in self._values[name][size:]:
                del self._codes[name][type(value), value]
            del self._values[name][size:]

    # --- in files: names and types, no values but the categories of a type, which belong to the type

    def as_plain(self) -> dict[str, Any]:
        """Names and types as plain values."""
        return {"text": self.text, "columns": [{"name": name, **_plain_type(self.dtypes[name])} for name in self.names]}

    @classmethod
    def from_plain(cls, saved: Mapping[str, Any]) -> FrameEncoding:
        """The inverse of `as_plain`; raises a ValueError or TypeError on anything else."""
        columns = saved["columns"]
        names = tuple(str(column["name"]) for column in columns)
        if len(set(names)) < len(names):
            raise ValueError("a column twice")
        kinds = {name: _type_of(column) for name, column in zip(names, columns, strict=True)}
        return cls(names, kinds, text=saved["text"] is True and len(names) == 1)


def frame_digest(frame: pd.DataFrame) -> str:
    """The SHA-256 of a frame's names and values, columns in any order; equal on any machine."""
    digested = hashlib.sha256(f"frame {len(frame)}\n".encode())
    names = texts(frame.columns)
    for place in sorted(range(len(names)), key=names.__getitem__):
        column = frame.iloc[:, place]
        digested.update(f"{len(names[place].encode())} {names[place]}\n".encode())
        if _is_numeric(column.dtype):
            digested.update(_numbers(names[place], column, "the public data").astype("<f8").tobytes())
            continue
        gaps = column.isna().to_numpy(dtype=bool)
        for value, gap in zip(map(_plain, column), gaps.tolist(), strict=True):
            written = b"" if gap else f"{value}".encode()
            digested.update(b"-" if gap else f"{len(written)} ".encode() + written)
    return digested.hexdigest()


def non_numeric(frame: pd.DataFrame) -> list[str]:
    """The columns of a frame that hold no numbers."""
    return [name for name, kind in zip(texts(frame.columns), frame.dtypes, strict=True) if not _is_numeric(kind)]


def _is_empty(x: Any) -> bool:
    return not hasattr(x, "columns") and np.shape(x) == (0,)


def _numbers(name: str, column: pd.Series[Any], what: str) -> np.ndarray:
    if not _is_numeric(column.dtype):
        if column.isna().all():
            return np.full(len(column), np.nan)
        raise _other_kind(name, what, f"{column.dropna().iloc[0]!r}"[:60], "numbers")
    values = column.to_numpy(dtype=np.float64, na_value=np.nan)
    if column.dtype.kind in "iu" and len(values) and np.nanmax(np.abs(values), initial=0) > _EXACT:
        raise DataError(
            f"Whole numbers in {what} must be at most 2^53.",
            f"{int(np.nanmax(np.abs(values)))} in column '{name}'",
            f"If it is an identifier, drop it or write it as text: x['{name}'].astype(str).",
        )
    with np.errstate(over="ignore"):
        endless = np.isinf(values.astype(np.float32))
    if endless.any():
        row = int(endless.argmax())
        raise DataError(
            f"All values in {what} must be finite 32-bit numbers.",
            f"{values[row]} in column '{name}', row {row} (counted from 0)",
            "Impute, rescale or remove such rows.",
        )
    return values


def _other_kind(name: str, what: str, found: str, wanted: str) -> DataError:
    return DataError(
        f"Column '{name}' of {what} must hold {wanted}, as in the samples that the model learns from.",
        found,
        f"Convert the column, for example by x['{name}'].astype({'str' if wanted == 'text' else 'float'}).",
    )


def _is_numeric(kind: Any) -> bool:
    from pandas.api.types import is_numeric_dtype

    return bool(is_numeric_dtype(kind))


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _plain_type(kind: Any) -> dict[str, Any]:
    import pandas as pd

    if not isinstance(kind, pd.CategoricalDtype):
        return {"type": str(kind)}
    categories = [_plain(value) for value in kind.categories]
    if not all(isinstance(value, str | bool | int | float) for value in categories):
        raise DataError(
            "The categories of a saved model's columns must be text or numbers.",
            f"{categories[0]!r}"[:60],
            "Convert the column before the run, for example by astype(str).",
        )
    return {"type": "category", "categories": categories, "ordered": bool(kind.ordered)}


def _type_of(column: Mapping[str, Any]) -> Any:
    import pandas as pd

    if "categories" in column:
        return pd.CategoricalDtype([_plain(value) for value in column["categories"]], ordered=column["ordered"] is True)
    return pd.api.types.pandas_dtype(str(column["type"]))
