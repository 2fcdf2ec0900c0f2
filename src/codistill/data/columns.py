"""The columns of a table as features: numbers, dates, categories and text."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

import numpy as np

from codistill.core.errors import DataError, RecipeError, nearest
from codistill.core.settings import check_settings, from_table, setting
from codistill.core.text import parse_toml
from codistill.data.cells import PARTS, check_format, check_marks, dates_of, find_form, is_numeric, numbers_of
from codistill.data.frames import column_names, listed, written_value

if TYPE_CHECKING:
    import pandas as pd


class Columns:
    """A schema: the columns of a table and their kinds. `transform` turns a frame into features (n, d).

    `kinds` maps a column's name to its kind ("number", "date", "category", "text") or to a table with the fields of
    `Column`. If every category lists its `values` and no text is encoded by tfidf, the schema holds no statistics of
    the data: organisations that agree on it make the same features without exchanging anything. Otherwise `fit`
    completes it from a frame. Numbers come first, then dates, then categories, then text. A missing number, date or
    ordinal category is NaN; a missing one-hot category is all zeros.
    """

    def __init__(self, kinds: Mapping[str, Any]) -> None:
        self.columns = {str(name): as_column(str(name), kind) for name, kind in kinds.items()}
        self._vocabularies: dict[str, Any] = {}  # fitted, of columns encoded by tfidf

    @classmethod
    def read(cls, path: str | Path) -> Columns:
        """The schema in a TOML file: one line `name = "kind"` or one table `[name]` for each column."""
        try:
            tables = parse_toml(Path(path).read_text("utf-8-sig"))
        except OSError as error:
            raise RecipeError(f"The schema {path} must be readable.", f"{error.strerror}", "Check the path.") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise RecipeError(f"{path} must be valid TOML.", str(error), "Correct that line.") from None
        return cls(tables)

    def fit(self, frame: pd.DataFrame, training: np.ndarray | None = None, owner: str = "the frame") -> Columns:
        """The same schema, completed from a frame.

        Numeric columns that it does not name are numbers, also those that are written with a decimal comma or
        separated thousands, where that is clear; categories are those that occur; the vocabulary and weights of tfidf
        come from the rows `training` (unset: all).
        """
        frame = self._named(frame, owner)
        self._check_kinds(frame, owner)
        found = {str(name): _completed(frame[name], self.columns.get(str(name)), owner) for name in frame.columns}
        fitted = Columns(found)
        rows = frame if training is None else frame.iloc[training]
        for name, column in found.items():
            if column.encoding == "tfidf":
                fitted._vocabularies[name] = _tfidf(rows[name], column, owner)
        return fitted

    def transform(self, frame: pd.DataFrame, owner: str = "the frame") -> np.ndarray:
        """Features (n, d) as 64-bit numbers; other columns of the frame are ignored."""
        frame = self._named(frame, owner)
        if not len(frame):
            return np.empty((0, len(self.feature_names())))
        parts = [self._features(frame[name], column, owner) for name, column in self._in_order()]
        if not parts:
            raise DataError("A schema needs at least one column.", "none", "Give the columns and their kinds.")
        return np.concatenate(parts, axis=1)

    @property
    def numbers(self) -> int:
        """The number of features of numbers and dates; they come first, and only they are scaled."""
        return sum({"number": 1, "date": len(each.made_of)}.get(each.kind, 0) for each in self.columns.values())

    def feature_names(self) -> list[str]:
        """A name for each feature."""
        names: list[str] = []
        for name, column in self._in_order():
            if column.encoding == "one_hot":
                names += [f"{name}={value}" for value in column.values or ()]
            elif column.kind == "text":
                names += [f"{name}[{number}]" for number in range(self._width(name, column))]
            elif column.kind == "date" and column.made_of != ("days",):
                names += [f"{name}:{part}" for part in column.made_of]
            else:
                names.append(name)
        return names

    def describe(self) -> list[tuple[str, str, str]]:
        """Name, kind and encoding of each column."""
        shown = []
        for name, column in self._in_order():
            words = f"{column.encoding}, {self._width(name, column)} features" if column.kind == "text" else ""
            if column.kind == "date":
                words = ", ".join(column.made_of)
            elif column.kind == "number":
                words = ", ".join(f"{key} {value!r}" for key, value in column.options.items() if key != "kind")
            if column.kind == "category":
                values = list(column.values or ())
                some = ", ".join(values[:6]) + (", ..." if len(values) > 6 else "")
                words = f"{column.encoding} of {len(values)}: {some}"
            shown.append((name, column.kind, words))
        return shown

    def as_plain(self) -> list[dict[str, Any]]:
        """A fitted schema as plain values, one table per column."""
        tables = []
        for name, column in self.columns.items():
            options: dict[str, Any] = {**column.options}
            vocabulary = self._vocabularies.get(name)
            if vocabulary is not None:
                terms = sorted(vocabulary.vocabulary_, key=vocabulary.vocabulary_.__getitem__)
                options |= {"terms": [str(term) for term in terms], "weights": np.asarray(vocabulary.idf_)}
            tables.append({"name": name, **options})
        return tables

    @classmethod
    def from_plain(cls, tables: Any) -> Columns:
        """The inverse of `as_plain`; raises ValueError, or the error of a column, on anything else."""
        fitted = ("name", "terms", "weights")
        made = cls({t["name"]: {key: value for key, value in t.items() if key not in fitted} for t in tables})
        for table, (name, column) in zip(tables, made.columns.items(), strict=True):
            if column.encoding == "tfidf":
                made._vocabularies[name] = _with_vocabulary(table["terms"], np.asarray(table["weights"]), column)
        return made

    def _in_order(self) -> list[tuple[str, Column]]:
        return sorted(self.columns.items(), key=lambda item: list(ENCODINGS).index(item[1].kind))

    def _width(self, name: str, column: Column) -> int:
        vocabulary = self._vocabularies.get(name)
        return column.features if vocabulary is None else len(vocabulary.vocabulary_)

    def _named(self, frame: pd.DataFrame, owner: str) -> pd.DataFrame:
        """The frame with unique text names, which include all columns of the schema."""
        names = column_names(frame, owner) or tuple(map(str, frame.columns))
        missing = [name for name in self.columns if name not in set(names)]
        if missing:
            which = f"column {listed(missing)}" if len(missing) == 1 else f"columns {listed(missing)}"
            raise DataError(
                f"{owner[:1].upper()}{owner[1:]} must have the {which} of the schema.",
                f"columns {listed(names)}",
                nearest(missing[0], names),
            )
        return frame if names == tuple(frame.columns) else frame.set_axis(list(names), axis=1)

    def _check_kinds(self, frame: pd.DataFrame, owner: str) -> None:
        """Raise an error that names all columns which hold no numbers and have no kind."""
        from codistill.data.problems import find_problems, kinds_needed

        found = [each for each in find_problems(frame, self.columns, owner, declared=False) if each.stops]
        if found:
            raise kinds_needed(found, owner)

    def _features(self, values: pd.Series[Any], column: Column, owner: str) -> np.ndarray:
        if column.kind == "number":
            return numbers_of(values, column, owner)[:, None]
        if column.kind == "date":
            return dates_of(values, column, owner)
        import pandas as pd

        written = values.astype(object).map(lambda value: "" if pd.isna(value) else written_value(value)).astype(str)
        if column.kind == "category":
            return _encoded(written, column, owner)
        if column.encoding == "tfidf":
            if values.name not in self._vocabularies:
                raise DataError(
                    f"Column '{values.name}', encoded by tfidf, needs a fitted vocabulary.",
                    "a schema that was not fitted",
                    "Call columns = columns.fit(frame) first, or encode it by hashing, which needs no vocabulary.",
                )
            return np.asarray(self._vocabularies[str(values.name)].transform(written).toarray(), dtype=np.float64)
        from sklearn.feature_extraction.text import HashingVectorizer

        made = HashingVectorizer(n_features=column.features).transform(written)
        return np.asarray(made.toarray(), dtype=np.float64)


def _completed(values: pd.Series[Any], column: Column | None, owner: str) -> Column:
    """The column with its categories; without a kind it is a number."""
    if column is None:
        return number_column(values)
    if column.kind != "category" or column.values is not None:
        return column
    present = sorted({written_value(value) for value in values.dropna()}, key=_by_number)
    if not present:
        raise DataError(
            f"The category '{values.name}' of {owner} must have at least one value.",
            "only empty cells",
            "List its values in the schema, or list the column in 'drop'.",
        )
    return replace(column, values=tuple(present))


def _by_number(value: str) -> tuple[int, float, str]:
    """A sort key: numeric categories by value, 2 before 10; then all others."""
    try:
        return 0, float(value), value
    except ValueError:
        return 1, 0.0, value


def _encoded(written: pd.Series[Any], column: Column, owner: str) -> np.ndarray:
    import pandas as pd

    if column.values is None:
        raise DataError(
            f"The values of category '{written.name}' must be known.",
            "a schema that was not fitted",
            "List them as values = [...] in the schema, or call columns = columns.fit(frame) first.",
        )
    strange = ~written.isin([*column.values, ""])
    if column.unknown == "refuse" and strange.any():
        row = int(strange.to_numpy(dtype=bool).argmax())
        raise DataError(
            f"All values of category '{written.name}' of {owner} must be in the schema.",
            f"'{written.iloc[row]}' in data row {row + 1} (the first row is 1); the schema has "
            f"{', '.join(column.values)}"[:300],
            f'{nearest(written.iloc[row], column.values)} Add it to values, or set unknown = "ignore".',
        )
    codes = pd.Index(column.values).get_indexer(pd.Index(written))[:, None]  # -1 for others and missing ones
    if column.encoding == "ordinal":
        return np.where(codes < 0, np.nan, codes)
    return np.asarray(codes == np.arange(len(column.values)), dtype=np.float64)


def _tfidf(values: pd.Series[Any], column: Column, owner: str) -> Any:
    from sklearn.feature_extraction.text import TfidfVectorizer

    try:
        return TfidfVectorizer(max_features=column.features).fit(values.dropna().astype(str))
    except ValueError as error:
        raise DataError(
            f"Column '{values.name}' of {owner} must contain words to be encoded by tfidf.",
            f"{error}",
            "Encode it by hashing, make it a category, or list it in 'drop'.",
        ) from None


def _with_vocabulary(terms: Any, weights: np.ndarray, column: Column) -> Any:
    """The vectorizer of `_tfidf`, from its terms and weights."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    names = [str(term) for term in terms]
    if not 1 <= len(names) <= column.features or weights.shape != (len(names),) or not np.isfinite(weights).all():
        raise ValueError(f"{len(names)} terms and weights of shape {weights.shape}")
    made = TfidfVectorizer(max_features=column.features, vocabulary=names)
    made.idf_ = weights.astype(np.float64)
    return made


# --- one column

# The first by default.
ENCODINGS = {"number": (), "date": (), "category": ("one_hot", "ordinal"), "text": ("hashing", "tfidf")}
_OF_KIND = {
    "category": ("values", "unknown"), "text": ("features",), "date": ("parts", "format", "timezone"),
    "number": ("decimal", "thousands", "bounds"),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Column:
    """The kind and the encoding of one column."""

    kind: str = setting(help="kind of values", choices=tuple(ENCODINGS))
    encode: str | None = setting(
        None,
        "encoding of a category (one_hot, ordinal) or text (hashing, tfidf); unset: one_hot, hashing",
        choices=("one_hot", "ordinal", "hashing", "tfidf"),
    )
    values: tuple[str, ...] | None = setting(None, "the categories, in order; unset: those that occur, sorted")
    unknown: str = setting("refuse", "what to do with other categories", choices=("refuse", "ignore"))
    features: int = setting(256, "number of features of a text; tfidf: at most", at_least=1, at_most=1 << 16)
    parts: tuple[str, ...] | None = setting(
        None, f"the numbers that a date becomes: {', '.join(PARTS)}; unset: days, since 1970-01-01"
    )
    format: str | None = setting(None, "how dates are written, such as %d.%m.%Y; unset: ISO 8601, such as 2026-03-31")
    timezone: str | None = setting(None, "the zone that times with an offset are converted to; unset: UTC")
    decimal: str = setting(".", 'the decimal mark of numbers, "." or ","')
    thousands: str | None = setting(None, "what separates thousands of numbers: a comma, point, space or apostrophe")
    bounds: str = setting(
        "refuse",
        "numbers below or above a limit, such as <1 and >5: refused, or their value",
        choices=("refuse", "value"),
    )

    def __post_init__(self) -> None:
        check_settings(self, "columns")
        fitting = ENCODINGS[self.kind]
        if self.encode is not None and self.encode not in fitting:
            raise RecipeError(
                f"columns.encode of a {self.kind} column must be {' or '.join(fitting) or 'unset'}.",
                repr(self.encode),
                "Correct it, or the kind of the column.",
            )
        values = self.values
        if values is not None and (self.kind != "category" or not values or len(set(values)) < len(values)):
            raise RecipeError(
                "columns.values must list the values of a category, each once.",
                f"{list(values)} for a {self.kind} column",
                "Correct the list, or leave it out.",
            )

        for kind, names in _OF_KIND.items():
            odd = [name for name in names if name in self.options and kind != self.kind]
            if odd:
                raise RecipeError(
                    f"columns.{odd[0]} is for a {kind} column.",
                    f"a {self.kind} column",
                    "Remove it, or correct the kind.",
                )
        check_marks(self.decimal, self.thousands, "columns")
        if self.kind == "date":
            self._check_date()

    def _check_date(self) -> None:
        odd = [part for part in self.made_of if part not in PARTS]
        if odd or not self.made_of or len(set(self.made_of)) < len(self.made_of):
            raise RecipeError(
                f"columns.parts of a date must list some of {', '.join(PARTS)}, each once.",
                f"{list(self.made_of)}"[:80],
                nearest(odd[0], PARTS) if odd else "Correct the list.",
            )
        wrong = None if self.format is None else check_format(self.format)
        if wrong is not None:
            raise RecipeError(
                "columns.format must say how dates are written.",
                f"{self.format!r}: {wrong}"[:160],
                'Example: "%d.%m.%Y" for 31.03.2026.',
            )
        if self.timezone is not None:
            try:
                ZoneInfo(self.timezone)
            except (KeyError, ValueError, OSError):
                raise RecipeError(
                    "columns.timezone must be the name of a time zone.",
                    repr(self.timezone)[:80],
                    'Example: "Europe/Berlin".',
                ) from None

    @property
    def options(self) -> dict[str, Any]:
        """The fields that were set, as in a recipe."""
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        defaults = {each.name: each.default for each in fields(self)}
        return {name: value for name, value in given.items() if value != defaults[name]}

    @property
    def made_of(self) -> tuple[str, ...]:
        """The numbers that a date becomes."""
        return ("days",) if self.parts is None else self.parts

    @property
    def encoding(self) -> str:
        """The encoding; empty for numbers."""
        return self.encode or (*ENCODINGS[self.kind], "")[0]


def number_column(values: pd.Series[Any], decimal: str | None = None) -> Column:
    """A column of numbers, by the form in which they are written."""
    form = None if is_numeric(values) else find_form(values, decimal)
    return Column(kind="number") if form is None else Column(kind="number", **form._asdict())


def as_column(name: str, kind: Any) -> Column:
    """A column from its kind, or from a table with its kind and options."""
    if isinstance(kind, Column):
        return kind
    if isinstance(kind, str):
        kind = {"kind": kind}
    if not isinstance(kind, Mapping):
        raise RecipeError(
            f"Column '{name}' must have a kind or a table.", f"{kind!r}"[:80], f'Write {toml_key(name)} = "category".'
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


def toml_key(name: Any) -> str:
    """A column's name as a key of TOML."""
    bare = re.fullmatch(r"[A-Za-z0-9_-]+", str(name))
    return str(name) if bare else json.dumps(str(name), ensure_ascii=False)
