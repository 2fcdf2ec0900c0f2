"""The columns of a table as features: numbers, categories and text, by scikit-learn's transformers."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from codistill.data.column_kinds import ENCODINGS, Column, as_column, check_number, written_value
from codistill.data.named_columns import column_names, listed
from codistill.errors import DataError, RecipeError, nearest
from codistill.text import parse_toml

if TYPE_CHECKING:
    import pandas as pd


class Columns:
    """A schema: which columns a table has, of which kind. `transform` makes features (n, d) of a frame.

    `kinds` has the column's name as key and as value its kind ("number", "category", "text") or a table with the
    fields of `Column`. If every category lists its `values` and no text is encoded by tfidf, the schema holds no
    statistics of anybody's data: organisations that agree on it make the same features without exchanging anything.
    Otherwise `fit` completes it by a frame. Numbers come first, then categories, then text. A missing number or
    ordinal category is NaN; of a missing one-hot category no column is 1.
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
            raise RecipeError(
                "The schema must be a readable file.", f"{path}: {error.strerror}", "Check the path."
            ) from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise RecipeError(f"{path} must be valid TOML.", str(error), "Fix the line it names.") from None
        return cls(tables)

    def fit(self, frame: pd.DataFrame, training: np.ndarray | None = None, owner: str = "the frame") -> Columns:
        """The same schema, completed by a frame.

        Numeric columns that it does not name are numbers; categories are those that occur; the vocabulary and the
        weights of tfidf are those of the rows `training` (unset: of all).
        """
        frame = self._named(frame, owner)
        found = {str(name): _completed(frame[name], self.columns.get(str(name)), owner) for name in frame.columns}
        fitted = Columns({})
        fitted.columns = found
        rows = frame if training is None else frame.iloc[training]
        for name, column in found.items():
            if column.encoding == "tfidf":
                fitted._vocabularies[name] = _tfidf(rows[name], column, owner)
        return fitted

    def transform(self, frame: pd.DataFrame, owner: str = "the frame") -> np.ndarray:
        """Features (n, d) as 64-bit numbers; columns of the frame that the schema does not name are left out."""
        frame = self._named(frame, owner)
        if not len(frame):
            return np.empty((0, len(self.feature_names())))
        parts = [self._features(frame[name], column, owner) for name, column in self._in_order()]
        if not parts:
            raise DataError("A schema must have at least one column.", "none", "Name the columns and their kinds.")
        return np.concatenate(parts, axis=1)

    @property
    def numbers(self) -> int:
        """How many of the features are numbers; they come first, and only they are scaled."""
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
        """Of each column its name, its kind, and how it becomes features."""
        return [(name, column.kind, self._words(name, column)) for name, column in self._in_order()]

    def as_plain(self) -> list[dict[str, Any]]:
        """A fitted schema as numbers and text, a table for each column in its order."""
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
        """The schema that `as_plain` has written; a ValueError, or an error of a column, if it is anything else."""
        made = cls({})
        for table in tables:
            options = {key: value for key, value in table.items() if key not in ("name", "terms", "weights")}
            name, column = str(table["name"]), as_column(str(table["name"]), options)
            made.columns[name] = column
            if column.encoding == "tfidf":
                made._vocabularies[name] = _with_vocabulary(table["terms"], np.asarray(table["weights"]), column)
        return made

    def _words(self, name: str, column: Column) -> str:
        if column.kind == "category":
            values = list(column.values or ())
            shown = ", ".join(values[:6]) + (", ..." if len(values) > 6 else "")
            return f"{column.encoding} of {len(values)}: {shown}"
        return f"{column.encoding}, {self._width(name, column)} features" if column.kind == "text" else ""

    def _in_order(self) -> list[tuple[str, Column]]:
        return sorted(self.columns.items(), key=lambda item: list(ENCODINGS).index(item[1].kind))

    def _width(self, name: str, column: Column) -> int:
        vocabulary = self._vocabularies.get(name)
        return column.features if vocabulary is None else len(vocabulary.vocabulary_)

    def _named(self, frame: pd.DataFrame, owner: str) -> pd.DataFrame:
        """The frame with its columns named by text, each once, all of the schema among them."""
        names = column_names(frame, owner) or tuple(map(str, frame.columns))
        missing = [name for name in self.columns if name not in set(names)]
        if missing:
            which = f"column {listed(missing)}" if len(missing) == 1 else f"columns {listed(missing)}"
            raise DataError(
                f"{_sentence(owner)} must have the {which} of the schema.",
                f"columns {', '.join(map(repr, names))}"[:300],
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
                    f"Column '{values.name}', encoded by tfidf, must get its vocabulary from a frame.",
                    "a schema that was not fitted",
                    "Call columns = columns.fit(frame) first, or encode it by hashing, which needs no vocabulary.",
                )
            return np.asarray(self._vocabularies[str(values.name)].transform(written).toarray(), dtype=np.float64)
        from sklearn.feature_extraction.text import HashingVectorizer

        made = HashingVectorizer(n_features=column.features).transform(written)
        return np.asarray(made.toarray(), dtype=np.float64)


def _completed(values: pd.Series[Any], column: Column | None, owner: str) -> Column:
    """The column with its categories; of no kind: a number, if it is one."""
    if column is None or column.kind == "number":
        check_number(values, owner)
    if column is None:
        return Column(kind="number")
    if column.kind != "category" or column.values is not None:
        return column
    present = sorted({written_value(value) for value in values.dropna()}, key=_by_number)
    if not present:
        raise DataError(
            f"Column '{values.name}' of {owner}, a category, must have at least one value.",
            "only empty cells",
            "List its values in the schema, or list the column in 'drop'.",
        )
    return replace(column, values=tuple(present))


def _by_number(value: str) -> tuple[int, float, str]:
    """Categories that are numbers in their order, 2 before 10; then all others."""
    try:
        return 0, float(value), value
    except ValueError:
        return 1, 0.0, value


def _encoded(written: pd.Series[Any], column: Column, owner: str) -> np.ndarray:
    from sklearn.preprocessing import OneHotEncoder, OrdinalEncoder

    if column.values is None:
        raise DataError(
            f"The category '{written.name}' must have its values listed, or get them from a frame.",
            "a schema that was not fitted",
            "List them as values = [...] in the schema, or call columns = columns.fit(frame) first.",
        )
    strange = ~written.isin([*column.values, ""])
    if column.unknown == "refuse" and strange.any():
        row = int(strange.to_numpy(dtype=bool).argmax())
        raise DataError(
            f"Every value of the category '{written.name}' of {owner} must be in the schema.",
            f"'{written.iloc[row]}' in data row {row + 1} (the first row is 1); the schema has "
            f"{', '.join(column.values)}"[:300],
            f'{nearest(written.iloc[row], column.values)} Add it to values, or set unknown = "ignore".',
        )
    cells = written.to_numpy(dtype=object)[:, None]
    known = [np.array(column.values, dtype=object)]
    if column.encoding == "one_hot":
        made = OneHotEncoder(categories=known, handle_unknown="ignore", sparse_output=False)
    else:
        made = OrdinalEncoder(categories=known, handle_unknown="use_encoded_value", unknown_value=np.nan)
    return np.asarray(made.fit(known[0][:, None]).transform(cells), dtype=np.float64)


def _tfidf(values: pd.Series[Any], column: Column, owner: str) -> Any:
    from sklearn.feature_extraction.text import TfidfVectorizer

    try:
        return TfidfVectorizer(max_features=column.features).fit(values.dropna().astype(str))
    except ValueError as error:
        raise DataError(
            f"Column '{values.name}' of {owner} must hold words to be encoded by tfidf.",
            f"{error}",
            "Encode it by hashing, make it a category, or list it in 'drop'.",
        ) from None


def _with_vocabulary(terms: Any, weights: np.ndarray, column: Column) -> Any:
    """What `_tfidf` has fitted, from its terms and their weights."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    names = [str(term) for term in terms]
    if not 1 <= len(names) <= column.features or weights.shape != (len(names),) or not np.isfinite(weights).all():
        raise ValueError(f"{len(names)} terms and weights of shape {weights.shape}")
    made = TfidfVectorizer(max_features=column.features, vocabulary=names)
    made.idf_ = weights.astype(np.float64)
    return made


def _sentence(owner: str) -> str:
    return owner[:1].upper() + owner[1:]
