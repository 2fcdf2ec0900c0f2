"""Data sets from CSV and Parquet files: one file for all, or one file per agent."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from codistill.data.column_kinds import check_number, written_value
from codistill.data.columns import Columns
from codistill.data.dataset import Dataset
from codistill.data.label_mapping import check_label_mapping, mapped_labels
from codistill.data.labels import REGRESSION, check_spelling
from codistill.data.scale import scaled
from codistill.data.split import check_split, hold_out, strata
from codistill.errors import DataError, RecipeError, nearest

MISSING = ("keep", "impute", "drop_rows", "refuse")


@dataclass(frozen=True, kw_only=True)
class TableOptions:
    """How tables are read: see `read_table`."""

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
    """Read one CSV or Parquet file; every column not named as something else is a feature.

    `label` is the column of classes (strings or integers; class names are its sorted values; `label_above` and
    `label_map`: see `mapped_labels`) or, with the task "regression", of real values to
    predict. `drop` lists columns to leave out, `ids` columns that say where a row comes from, for a partition by id. A
    fraction `test_fraction` of every class, chosen by `seed`, is held out for testing; if agents are made `by` one of
    the ids, a fraction of every class of every agent.

    `columns` gives the kinds of columns that are not numbers: see `Columns`. Numbers are scaled by the training rows;
    `scale` is "standard" by default, see `load`. With `scale_per_agent` they stay as they are, for each agent to scale.

    An empty cell is a missing value, and so is one that `missing_values` lists. `missing`: "keep" them as NaN,
    "impute" the same (each agent fills them in, whatever its model takes), "drop_rows" that have any, or "refuse".
    """
    made = TableOptions(label=label, **options)
    name = Path(path).stem
    frame = _read(Path(path), made)
    frame[label] = mapped_labels(frame[label], made.label_above, made.label_map, f"table '{name}'")
    return _dataset(name, frame, made, made.ids, by)


def read_tables(paths: Mapping[str, str | Path], label: str, **options: Any) -> Dataset:
    """Read one file per agent, by the agent's name; all files must have the same columns. Options: see `read_table`.

    `ids["agent"]` names the agent of each training row, so a partition by the id "agent" gives every
    agent its own file back. A fraction of every agent's rows of every class is held out for testing.
    """
    made = TableOptions(label=label, **options)
    if not paths:
        raise RecipeError("Tables per agent must name at least one file.", "none", "Give a file per agent.")
    frames = {agent: _read(Path(path), made) for agent, path in paths.items()}
    for agent, frame in frames.items():
        owner = f"the table of agent '{agent}'"
        frame[label] = mapped_labels(frame[label], made.label_above, made.label_map, owner)
    first = next(iter(frames))
    for agent, frame in frames.items():
        _check_same_columns(first, frames[first], agent, frame)
    labels = [_labels(frame[label], f"the table of agent '{agent}'", made.task) for agent, frame in frames.items()]
    if len({values.dtype.kind for values in labels}) > 1:
        labels = [values.astype(str) for values in labels]
    joined = pd.concat(_alike(list(frames.values())), ignore_index=True)
    joined[label] = np.concatenate(labels)
    joined["agent"] = np.repeat(list(frames), [len(frame) for frame in frames.values()])
    return _dataset("tables", joined, made, [*made.ids, "agent"], "agent")


def _alike(frames: list[pd.DataFrame]) -> list[pd.DataFrame]:
    """A column that is empty in one table has the type that it has in another."""
    for name in frames[0].columns:
        types = [frame[name].dtype for frame in frames if frame[name].notna().any()]
        for frame in frames:
            if types and frame[name].isna().all() and not pd.api.types.is_integer_dtype(types[0]):
                frame[name] = frame[name].astype(types[0])
    return frames


def _check_same_columns(first: str, example: pd.DataFrame, agent: str, frame: pd.DataFrame) -> None:
    odd = frame.columns.symmetric_difference(example.columns)
    if len(odd):
        raise DataError(
            "The tables of all agents must have the same columns.",
            f"{_quoted(odd)} in only one of the tables of agents '{first}' and '{agent}'",
            "Add the column to the other table, or remove it.",
        )
    if "agent" in frame.columns:
        raise DataError(
            "No column of a table per agent may be called 'agent', which names the agents themselves.",
            f"a column 'agent' in the table of agent '{agent}'",
            "Rename it, or list it in 'drop'.",
        )


def _dataset(name: str, frame: pd.DataFrame, options: TableOptions, ids: Sequence[str], by: str | None) -> Dataset:
    owner, task = f"table '{name}'", options.task
    labels = _labels(frame[options.label], owner, task)
    names, y = _encoded(labels, f"column '{options.label}' of {owner}", task)
    groups = strata(y if y.ndim == 1 else np.zeros(len(y), dtype=np.int64), None if by is None else _plain(frame[by]))
    train, test = hold_out(groups, options.test_fraction, options.seed, f"Table '{name}'")
    features = frame.drop(columns=[options.label, *ids])
    columns = Columns(options.columns).fit(features, train, owner)
    x = columns.transform(features, owner)
    _check_present(x[train], columns, owner)
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


def _check_present(x: np.ndarray, columns: Columns, owner: str) -> None:
    empty = np.isnan(x).all(axis=0)
    if empty.any():
        raise DataError(
            f"Every column of {owner} must have at least one value among the training rows.",
            f"none in column '{columns.feature_names()[int(empty.argmax())]}'",
            "List the column in 'drop', or check 'missing_values'.",
        )


def _read(path: Path, options: TableOptions) -> pd.DataFrame:
    """The file's label, id and feature columns; labels and ids complete, numbers finite."""
    label, drop, ids = options.label, options.drop, options.ids
    roles = [label, *drop, *ids]
    if len(set(roles)) < len(roles):
        raise RecipeError(
            "A column of a table may be only one of: label, dropped, id.",
            _quoted(sorted({column for column in roles if roles.count(column) > 1})),
            "Name it once.",
        )
    frame = read_file(path, options.missing_values)
    for column in [*roles, *options.columns]:
        if column not in frame.columns:
            raise DataError(
                f"Table {path} must have the column '{column}'.",
                f"columns {_quoted(frame.columns)}",
                nearest(column, frame.columns),
            )
    for column in options.columns:
        if column in roles:
            raise RecipeError(
                "[data.columns] gives the kinds of features.",
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
        if column in roles or options.missing == "refuse":
            _check_complete(frame[column], path)
    return frame


def read_file(path: Path, missing_values: Sequence[str] = ()) -> pd.DataFrame:
    """A CSV or Parquet file as it is, its columns named by text; cells with one of `missing_values` are empty."""
    kind = path.suffix.lower()
    if kind not in (".csv", ".parquet"):
        raise DataError("A table must be a .csv or a .parquet file.", f"{path}", "Convert it, or correct its name.")
    try:
        with warnings.catch_warnings():
            # pandas only warns when rows are longer than the header, and drops what is too much.
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


def _check_complete(column: pd.Series[Any], path: Path) -> None:
    bad = column.isna().to_numpy(dtype=bool)
    if bad.any():
        row = int(bad.argmax())
        raise DataError(
            f'Every label and id of table {path} must hold a value; with missing = "refuse", every cell.',
            f"{column.iloc[row]} in column '{column.name}', data row {row + 1} (the first row is 1)",
            "Fill the cell in, remove the row, or all such rows by missing = \"drop_rows\"; or 'drop' the column.",
        )


def _encoded(values: np.ndarray, owner: str, task: str | None) -> tuple[tuple[str, ...], np.ndarray]:
    """The names of the classes, and labels as their numbers; of a regression the column's own values (n, 1)."""
    if task == REGRESSION:
        return ("value",), values.astype(np.float64).reshape(-1, 1)
    names, y = np.unique(values, return_inverse=True)
    shown = tuple(str(each) for each in names)
    check_spelling(shown, owner)
    return shown, y.astype(np.int64)


def _labels(column: pd.Series[Any], owner: str, task: str | None = None) -> np.ndarray:
    values = _plain(column)
    if task == REGRESSION and values.dtype.kind not in "biuf":
        raise DataError(
            f"The label column '{column.name}' of {owner} must hold numbers, as the task is a regression.",
            f"'{values[0]}' in data row 1",
            'Name another column as the label, or say task = "classification".',
        )
    if values.dtype.kind in "fu" and task != REGRESSION:
        whole = values == np.floor(values)
        if not whole.all():
            row = int(whole.argmin())
            raise DataError(
                f"The label column '{column.name}' of {owner} must hold strings or integers, unless they are values to "
                "predict.",
                f"{values[row]} in data row {row + 1} (the first row is 1)",
                'Is this a regression? Then say task = "regression" under [data]; if not, turn the values into '
                "classes, or name another column.",
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


def _quoted(names: Any) -> str:
    return ", ".join(f"'{name}'" for name in names)
