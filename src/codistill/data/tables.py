"""Data sets from CSV and Parquet files, of features or of texts: one file for all, or one file per agent."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from codistill.core.errors import DataError, RecipeError, nearest
from codistill.data.cells import (
    SEPARATORS,
    find_form,
    find_separator,
    is_numeric,
    unclear_as_text,
    written_in,
)
from codistill.data.columns import Columns, number_column
from codistill.data.frames import TEXT, listed, written_value
from codistill.data.labels import REGRESSION, check_label_mapping, check_spelling, mapped_labels
from codistill.data.problems import Problem, find_problems, table_error
from codistill.data.split import check_split, hold_out, scaled, strata
from codistill.data.validation import Dataset

MISSING = ("keep", "impute", "drop_rows", "refuse")


@dataclass(frozen=True, kw_only=True)
class TableOptions:
    """Options of `read_table`."""

    label: str
    test_fraction: float = 0.2
    seed: int = 0
    scale: str | None = None
    scale_per_agent: bool = False
    drop: Sequence[str] = ()
    ids: Sequence[str] = ()
    columns: Mapping[str, Any] = field(default_factory=dict)
    missing: str = "keep"
    missing_values: Sequence[str] = ()
    label_above: float | None = None
    label_map: Mapping[str, str] | None = None
    task: str | None = None
    separator: str | None = None
    decimal: str | None = None
    text: str | None = None
    is_text: bool = False

    def __post_init__(self) -> None:
        check_split(self.test_fraction, self.seed, self.scale)
        check_label_mapping(self.label_above, self.label_map)
        if self.missing not in MISSING:
            raise RecipeError(
                f"data.missing must be one of {', '.join(MISSING)}.",
                repr(self.missing),
                nearest(str(self.missing), MISSING),
            )

    def kinds(self, frame: pd.DataFrame) -> dict[str, Any]:
        """The kinds of a table's columns, as given; and of others the decimal mark of their numbers, if it is known."""
        marked = {str(name): number_column(frame[name], self.decimal) for name in frame if self.decimal is not None}
        return {name: column for name, column in marked.items() if len(column.options) > 1} | dict(self.columns)


def read_table(path: str | Path, label: str, *, by: str | None = None, **options: Any) -> Dataset:
    """Read one CSV or Parquet file; every other column is a feature.

    `label` is the column of classes (strings or integers; class names are its sorted values; `label_above` and
    `label_map`: see `mapped_labels`) or, with the task "regression", of real values to predict. `drop` lists columns to
    ignore, `ids` columns that say where a row comes from, for a partition by id. A fraction `test_fraction` of every
    class, chosen by `seed`, is held out for testing; if agents are made `by` one of the ids, of every class of every
    agent.

    `columns` gives the kinds of columns that are not numbers: see `Columns`. Numbers are scaled by the training rows;
    `scale` is "standard" by default, see `load`. With `scale_per_agent`, each agent scales them by its own rows.

    Empty cells and `missing_values` are missing. `missing`: "keep" them as NaN, "impute" them at each agent even if its
    model accepts NaN, "drop_rows" that have any, or "refuse". `separator` of the columns of a CSV file and `decimal`
    mark of numbers: unset, they are found where they are clear.

    With `is_text`, the samples are the strings in the column `text` (unset: "text", or the only one that is left), and
    other columns are left out.

    What is wrong with columns is one error, with the settings that would solve all of it.
    """
    made = TableOptions(label=label, **options)
    name = Path(path).stem
    frame = _read(Path(path), made)
    _check_cells({f"table {path}": frame}, made)
    frame[label] = mapped_labels(frame[label], made.label_above, made.label_map, f"table '{name}'")
    return _dataset(name, frame, made, made.ids, by)


def read_tables(paths: Mapping[str, str | Path], label: str, **options: Any) -> Dataset:
    """Read one file per agent, by the agent's name; all files must have the same columns. Options: see `read_table`.

    `ids["agent"]` names the agent of each training row, for a partition by the id "agent". A fraction of every agent's
    rows of every class is held out for testing.
    """
    made = TableOptions(label=label, **options)
    if not paths:
        raise RecipeError("Tables per agent need at least one file.", "none", "Give one file per agent.")
    frames = {agent: _read(Path(path), made) for agent, path in paths.items()}
    first, example = next(iter(frames.items()))
    for agent, frame in frames.items():
        odd = frame.columns.symmetric_difference(example.columns)
        if len(odd):
            raise DataError(
                "The tables of all agents must have the same columns.",
                f"{listed(odd)} only in the table of agent '{first}' or '{agent}'",
                "Add the column to the other table, or remove it.",
            )
        if "agent" in frame.columns:
            raise DataError(
                "The column name 'agent' is reserved in tables per agent.",
                f"a column 'agent' in the table of agent '{agent}'",
                "Rename it, or list it in 'drop'.",
            )
    _check_cells({f"table {paths[agent]}": frame for agent, frame in frames.items()}, made)
    labels = []
    for agent, frame in frames.items():
        owner = f"the table of agent '{agent}'"
        frame[label] = mapped_labels(frame[label], made.label_above, made.label_map, owner)
        labels.append(_labels(frame[label], owner, made.task))
    if len({values.dtype.kind for values in labels}) > 1:
        labels = [values.astype(str) for values in labels]
    for name in example.columns:  # one that is empty in one table gets the type that it has in another
        types = [frame[name].dtype for frame in frames.values() if frame[name].notna().any()]
        for frame in frames.values():
            if types and frame[name].isna().all() and not pd.api.types.is_integer_dtype(types[0]):
                frame[name] = frame[name].astype(types[0])
    joined = pd.concat(frames.values(), ignore_index=True)
    joined[label] = np.concatenate(labels)
    joined["agent"] = np.repeat(list(frames), [len(frame) for frame in frames.values()])
    return _dataset("tables", joined, made, [*made.ids, "agent"], "agent")


def _dataset(name: str, frame: pd.DataFrame, options: TableOptions, ids: Sequence[str], by: str | None) -> Dataset:
    owner, task = f"table '{name}'", options.task
    labels = _labels(frame[options.label], owner, task)
    if task == REGRESSION:
        names: tuple[str, ...] = ("value",)
        y = labels.astype(np.float64).reshape(-1, 1)
    else:
        values, codes = np.unique(labels, return_inverse=True)
        names, y = tuple(str(each) for each in values), codes.astype(np.int64)
        check_spelling(names, f"column '{options.label}' of {owner}")
    groups = strata(y, None if by is None else _plain(frame[by]))
    train, test = hold_out(groups, options.test_fraction, options.seed, f"Table '{name}'")
    parts: dict[str, Any] = {
        "y": y[train],
        "y_test": y[test],
        "classes": len(names),
        "class_names": names,
        "ids": {column: _plain(frame[column])[train] for column in ids},
        "ids_test": {column: _plain(frame[column])[test] for column in ids},
    }
    if options.is_text:
        column = _text_column(frame, options, owner)
        texts = frame[column].astype(str).to_numpy(dtype=object)
        return Dataset(name, x=texts[train], x_test=texts[test], **parts, text=column)
    features = frame.drop(columns=[options.label, *ids])
    columns = Columns(options.kinds(features)).fit(features, train, owner)
    x = columns.transform(features, owner)
    empty = np.isnan(x[train]).all(axis=0)
    if empty.any():
        raise DataError(
            f"Every column of {owner} must have at least one value in the training rows.",
            f"none in column '{columns.feature_names()[int(empty.argmax())]}'",
            "List the column in 'drop', or check 'missing_values'.",
        )
    raw = Dataset(name, x=x[train], x_test=x[test], **parts, columns=columns)
    return raw if options.scale_per_agent else scaled(raw, options.scale, columns=columns.numbers)


def _read(path: Path, options: TableOptions) -> pd.DataFrame:
    """The file's label, id and feature columns, or its texts."""
    label, drop, ids = options.label, options.drop, options.ids
    roles = [label, *drop, *ids]
    if len(set(roles)) < len(roles):
        raise RecipeError(
            "A column can be only one of label, drop and ids.",
            listed(sorted({column for column in roles if roles.count(column) > 1})),
            "List it once.",
        )
    frame = read_file(path, options.missing_values, options.separator)
    for column in [*roles, *options.columns, *filter(None, [options.text])]:
        if column not in frame.columns:
            raise DataError(
                f"Table {path} must have the column '{column}'.",
                f"columns {listed(frame.columns)}",
                nearest(column, frame.columns),
            )
    for column in options.columns:
        if column in roles:
            raise RecipeError(
                "[data.columns] must contain features only.",
                f"'{column}', which is the label, dropped or an id",
                f"Remove '{column}' from one of them.",
            )
    frame = frame.drop(columns=list(drop))
    if options.is_text:
        frame = frame[[label, *ids, _text_column(frame, options, f"table {path}")]]
    if options.missing == "drop_rows":
        frame = frame.dropna(ignore_index=True)
    features = [column for column in frame.columns if column not in roles]
    if not features or frame.empty:
        raise DataError(
            f"Table {path} must have at least one row and one feature column.",
            f"{len(frame)} rows and {len(features)} feature columns",
            "Check the file, 'drop' and 'ids', and 'missing'.",
        )
    return frame.assign(**{label: _numbers_of_labels(frame[label], options)})


def _check_cells(frames: Mapping[str, pd.DataFrame], options: TableOptions) -> None:
    """Raise one error about everything that is wrong with the cells of these tables, by their names."""
    found: list[tuple[str, Problem]] = []
    for owner, frame in frames.items():
        roles = [options.label, *options.ids]
        for column in frame.columns:
            gaps = frame[column].isna().to_numpy(dtype=bool)
            if gaps.any() and (column in roles or options.missing == "refuse" or options.is_text):
                found.append((owner, _gap(frame[column], gaps, owner)))
        features = frame.drop(columns=roles)
        if not options.is_text:
            problems = find_problems(features, Columns(options.columns).columns, owner, decimal=options.decimal)
            found += [(owner, each) for each in problems if each.stops]
    if found:
        raise table_error(found, drop=options.drop, missing=options.missing_values, has_columns=bool(options.columns))


def _gap(values: pd.Series[Any], gaps: np.ndarray, owner: str) -> Problem:
    row = int(gaps.argmax())
    more = f" and {gaps.sum() - 1} more" if gaps.sum() > 1 else ""
    found = f"{values.iloc[row]} in column '{values.name}', data row {row + 1}"
    error = DataError(
        f'Labels, ids and texts of {owner} must be complete; with missing = "refuse", all cells.',
        f"{found} (the first row is 1){more}",
        "Complete the cell, remove the row, or set missing = \"drop_rows\"; or list the column in 'drop'.",
    )
    advice = 'complete the cell, or set missing = "drop_rows"'
    return Problem(column=str(values.name), found=f"no value in data row {row + 1}{more}", note=advice, error=error)


def _numbers_of_labels(column: pd.Series[Any], options: TableOptions) -> Any:
    """Labels that are to be numbers, read by the form in which they are written."""
    if is_numeric(column) or (options.task != REGRESSION and options.label_above is None):
        return column
    form = find_form(column, options.decimal)
    return column if form is None else written_in(column, form)


def _text_column(frame: pd.DataFrame, options: TableOptions, owner: str) -> str:
    if options.text is not None:
        return options.text
    left = [str(name) for name in frame.columns if name not in (options.label, *options.ids, "agent")]
    if len(left) != 1 and TEXT not in left:
        raise RecipeError(
            f"The column of texts of {owner} must be clear.",
            f"columns {listed(left)}",
            'Set text = "..." under [data] to one of them.',
        )
    return TEXT if TEXT in left else left[0]


def read_file(path: Path, missing_values: Sequence[str] = (), separator: str | None = None) -> pd.DataFrame:
    """A CSV or Parquet file with text column names; cells with one of `missing_values` are empty.

    `separator`: the name of what separates the columns of a CSV file; unset: as its first rows say.
    """
    kind = path.suffix.lower()
    if kind not in (".csv", ".tsv", ".parquet"):
        raise DataError("A table must be a .csv, .tsv or .parquet file.", f"{path}", "Convert it, or correct its name.")
    is_csv = kind != ".parquet"
    between = SEPARATORS[separator] if separator is not None else find_separator(path) if is_csv else ","
    try:
        with warnings.catch_warnings():
            # pandas only warns when rows are longer than the header, and drops the surplus.
            warnings.simplefilter("error", pd.errors.ParserWarning)
            missing: dict[str, Any] = {"na_values": list(missing_values)} if missing_values else {}
            reading = {"sep": between, "low_memory": False, **missing}
            frame = pd.read_csv(path, index_col=False, **reading) if is_csv else pd.read_parquet(path)
            if between != ",":
                frame = unclear_as_text(frame, lambda at: pd.read_csv(path, **reading, usecols=at, dtype=str))
    except ImportError as problem:
        raise DataError(
            f"Table {path} needs the package 'pyarrow'.",
            "it is not installed",
            "Run: pip install codistill[parquet]",
        ) from problem
    except (OSError, ValueError, pd.errors.ParserWarning) as problem:
        raise DataError(
            f"Table {path} must be a readable {kind} file.",
            f"{problem}".strip().rstrip("."),
            "Check the path and the file.",
        ) from problem
    frame = frame.reset_index(drop=frame.index.names == [None])
    if missing_values and not is_csv:
        frame = frame.mask(frame.map(written_value).isin(list(missing_values)))
    return frame.rename(columns=str)


def _labels(column: pd.Series[Any], owner: str, task: str | None) -> np.ndarray:
    values = _plain(column)
    if task == REGRESSION and values.dtype.kind not in "biuf":
        raise DataError(
            f"The label column '{column.name}' of {owner} must be numeric for a regression.",
            f"'{values[0]}' in data row 1",
            'Choose another label column, or set task = "classification".',
        )
    if values.dtype.kind in "fu" and task != REGRESSION:
        whole = values == np.floor(values)
        if not whole.all():
            row = int(whole.argmin())
            raise DataError(
                f"The label column '{column.name}' of {owner} must hold strings or integers for a classification.",
                f"{values[row]} in data row {row + 1} (the first row is 1)",
                'For a regression, set task = "regression" under [data]; otherwise turn the values into classes, or '
                "choose another column.",
            )
        return values.astype(np.int64)
    return values


def _plain(column: pd.Series[Any]) -> np.ndarray:
    """A column as an array of numbers or strings, never of Python objects."""
    if pd.api.types.is_bool_dtype(column.dtype):
        return column.to_numpy(dtype=bool)
    if pd.api.types.is_float_dtype(column.dtype):
        return column.to_numpy(dtype=np.float64)
    if pd.api.types.is_integer_dtype(column.dtype):
        unsigned = pd.api.types.is_unsigned_integer_dtype(column.dtype)
        return column.to_numpy(dtype=np.uint64 if unsigned else np.int64)
    return np.asarray([str(value) for value in column])
