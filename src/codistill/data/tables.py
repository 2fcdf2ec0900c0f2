"""Data sets from CSV and Parquet files: one file for all, or one file per agent."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from codistill.core.errors import DataError, RecipeError, nearest
from codistill.data.columns import Columns, check_number
from codistill.data.frames import listed, written_value
from codistill.data.labels import REGRESSION, check_label_mapping, check_spelling, mapped_labels
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

    def __post_init__(self) -> None:
        check_split(self.test_fraction, self.seed, self.scale)
        check_label_mapping(self.label_above, self.label_map)
        if self.missing not in MISSING:
            raise RecipeError(
                f"data.missing must be one of {', '.join(MISSING)}.",
                repr(self.missing),
                nearest(str(self.missing), MISSING),
            )


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
    model accepts NaN, "drop_rows" that have any, or "refuse".
    """
    made = TableOptions(label=label, **options)
    name = Path(path).stem
    frame = _read(Path(path), made)
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
    labels = []
    for agent, frame in frames.items():
        owner = f"the table of agent '{agent}'"
        frame[label] = mapped_labels(frame[label], made.label_above, made.label_map, owner)
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
                f"a column 'agent' in {owner}",
                "Rename it, or list it in 'drop'.",
            )
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
    features = frame.drop(columns=[options.label, *ids])
    columns = Columns(options.columns).fit(features, train, owner)
    x = columns.transform(features, owner)
    empty = np.isnan(x[train]).all(axis=0)
    if empty.any():
        raise DataError(
            f"Every column of {owner} must have at least one value in the training rows.",
            f"none in column '{columns.feature_names()[int(empty.argmax())]}'",
            "List the column in 'drop', or check 'missing_values'.",
        )
    raw = Dataset(
        name=name,
        x=x[train],
        y=y[train],
        x_test=x[test],
        y_test=y[test],
        classes=len(names),
        class_names=names,
        ids={column: _plain(frame[column])[train] for column in ids},
        ids_test={column: _plain(frame[column])[test] for column in ids},
        columns=columns,
    )
    return raw if options.scale_per_agent else scaled(raw, options.scale, columns=columns.numbers)


def _read(path: Path, options: TableOptions) -> pd.DataFrame:
    """The file's label, id and feature columns; labels and ids complete, numbers finite."""
    label, drop, ids = options.label, options.drop, options.ids
    roles = [label, *drop, *ids]
    if len(set(roles)) < len(roles):
        raise RecipeError(
            "A column can be only one of label, drop and ids.",
            listed(sorted({column for column in roles if roles.count(column) > 1})),
            "List it once.",
        )
    frame = read_file(path, options.missing_values)
    for column in [*roles, *options.columns]:
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
    if options.missing == "drop_rows":
        frame = frame.dropna(ignore_index=True)
    features = [column for column in frame.columns if column not in roles]
    if not features or frame.empty:
        raise DataError(
            f"Table {path} must have at least one row and one feature column.",
            f"{len(frame)} rows and {len(features)} feature columns",
            "Check the file, 'drop' and 'ids', and 'missing'.",
        )
    for column in frame.columns:
        if column not in [*roles, *options.columns]:
            check_number(frame[column], f"table {path}")
        gaps = frame[column].isna().to_numpy(dtype=bool)
        if gaps.any() and (column in roles or options.missing == "refuse"):
            row = int(gaps.argmax())
            raise DataError(
                f'Labels and ids of table {path} must be complete; with missing = "refuse", all cells.',
                f"{frame[column].iloc[row]} in column '{column}', data row {row + 1} (the first row is 1)",
                "Complete the cell, remove the row, or set missing = \"drop_rows\"; or list the column in 'drop'.",
            )
    return frame


def read_file(path: Path, missing_values: Sequence[str] = ()) -> pd.DataFrame:
    """A CSV or Parquet file with text column names; cells with one of `missing_values` are empty."""
    kind = path.suffix.lower()
    if kind not in (".csv", ".parquet"):
        raise DataError("A table must be a .csv or a .parquet file.", f"{path}", "Convert it, or correct its name.")
    try:
        with warnings.catch_warnings():
            # pandas only warns when rows are longer than the header, and drops the surplus.
            warnings.simplefilter("error", pd.errors.ParserWarning)
            is_csv = kind == ".csv"
            missing: dict[str, Any] = {"na_values": list(missing_values)} if missing_values else {}
            frame = pd.read_csv(path, index_col=False, low_memory=False, **missing) if is_csv else pd.read_parquet(path)
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
