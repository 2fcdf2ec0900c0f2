"""The columns of a table as features: numbers, categories and text."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from codistill.core.errors import DataError, RecipeError, nearest
from codistill.core.settings import check_settings, from_table, setting
from codistill.core.text import parse_toml
from codistill.data.frames import column_names, listed, written_value

if TYPE_CHECKING:
    import pandas as pd


class Columns:
    """A schema: the columns of a table and their kinds. `transform` turns a frame into features (n, d).

    `kinds` maps a column's name to its kind ("number", "category", "text") or to a table with the fields of `Column`.
    If every category lists its `values` and no text is encoded by tfidf, the schema holds no statistics of the data:
    organisations that agree on it make the same features without exchanging anything. Otherwise `fit` completes it
    from a frame. Numbers come first, then categories, then text. A missing number or ordinal category is NaN; a
    missing one-hot category is all zeros.
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

        Numeric columns that it does not name are numbers; categories are those that occur; the vocabulary and weights
        of tfidf come from the rows `training` (unset: all).
        """
        frame = self._named(frame, owner)
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
        """The number of numeric features; they come first, and only they are scaled."""
        return sum(column.kind == "number" for column in self.columns.values())

    def feature_names(self) -> list[str]:
        """A name for each feature."""
        names: list[str] = []
        for name, column in self._in_order():
            if column.encoding == "one_hot":
                names += [f"{name}={value}" for value in column.values or ()]
            elif column.kind == "text":
                names += [f"{name}[{number}]" for number in range(self._width(name, column))]
            else:
                names.append(name)
        return names

    def describe(self) -> list[tuple[str, str, str]]:
        """Name, kind and encoding of each column."""
        shown = []
        for name, column in self._in_order():
            words = f"{column.encoding}, {self._width(name, column)} features" if column.kind == "text" else ""
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
            options = {key: value for key, value in asdict(column).items() if value is not None}
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

    def _features(self, values: pd.Series[Any], column: Column, owner: str) -> np.ndarray:
        if column.kind == "number":
            check_number(values, owner)
            return values.to_numpy(dtype=np.float64, na_value=np.nan)[:, None]
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
    """The column with its categories; without a kind it must be a number."""
    if column is None or column.kind == "number":
        check_number(values, owner)
    if column is None:
        return Column(kind="number")
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


# --- what columns could be, for advice

_MOST_CATEGORIES = 30


def suggested_kinds(frame: pd.DataFrame) -> dict[str, str]:
    """A kind for each column that holds no numbers: "category", "text" or "date"."""
    from pandas.api.types import is_numeric_dtype

    kinds = {}
    for place, name in enumerate(map(str, frame.columns)):
        values = frame.iloc[:, place].dropna()
        if not is_numeric_dtype(values.dtype):
            kinds[name] = _suggested(values)
    return kinds


def _suggested(values: pd.Series[Any]) -> str:
    if values.dtype.kind in "mM":
        return "date"
    written = values.astype(str)
    distinct = written.nunique()
    words = written.str.count(" ").mean() if len(written) else 0
    few = distinct <= _MOST_CATEGORIES or distinct * 10 <= len(written)
    return "category" if few and words < 3 else "text"


# --- one column

ENCODINGS = {"number": (), "category": ("one_hot", "ordinal"), "text": ("hashing", "tfidf")}  # the first by default


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

    @property
    def encoding(self) -> str:
        """The encoding; empty for numbers."""
        return self.encode or (*ENCODINGS[self.kind], "")[0]


def check_number(values: pd.Series[Any], owner: str) -> None:
    """Raise unless a column is empty or holds numbers that are finite in 32 bits."""
    import pandas as pd

    if not pd.api.types.is_numeric_dtype(values.dtype):
        try:
            bad = pd.to_numeric(values, errors="coerce").isna() & values.notna()
        except OverflowError:  # integers beyond the range of floats
            large = [len(f"{value}".lstrip("-")) for value in values]
            row = int(np.argmax(large))
            raise _too_large(f"a number of {large[row]} digits", values.name, row, owner) from None
        if not bad.any() and values.isna().all():
            return
        row = int(bad.to_numpy(dtype=bool).argmax())
        raise DataError(
            f"Feature columns of {owner} must be numeric, or have a kind.",
            f"column '{values.name}' of type {values.dtype}, with {f'{values.iloc[row]!r}'[:80]} in data row {row + 1}",
            f'Set its kind, e.g. {_key(values.name)} = "category" or "text" in [data.columns]; encode it as numbers; '
            "list it in 'drop' or 'ids'; or list such values in 'missing_values'.",
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


def as_column(name: str, kind: Any) -> Column:
    """A column from its kind, or from a table with its kind and options."""
    if isinstance(kind, Column):
        return kind
    if isinstance(kind, str):
        kind = {"kind": kind}
    if not isinstance(kind, Mapping):
        raise RecipeError(
            f"Column '{name}' must have a kind or a table.", f"{kind!r}"[:80], f'Write {_key(name)} = "category".'
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


def _key(name: Any) -> str:
    """A column's name as a key of TOML."""
    return str(name) if str(name).replace("_", "").replace("-", "").isalnum() else f'"{name}"'
