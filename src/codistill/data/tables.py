"""Data sets from CSV and Parquet files: one file for all, or one file per agent."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from codistill.data.dataset import Dataset
from codistill.data.scale import scaled
from codistill.data.split import check_split, hold_out
from codistill.errors import DataError, RecipeError, nearest


def read_table(
    path: str | Path,
    label: str,
    test_fraction: float = 0.2,
    seed: int = 0,
    scale: str | None = None,
    drop: Sequence[str] = (),
    ids: Sequence[str] = (),
) -> Dataset:
    """Read one CSV or Parquet file; every column not named here is a feature and must be numeric.

    `label` is the column of classes (strings or integers; class names are its sorted values), `drop`
    lists columns to leave out, `ids` columns that say where a row comes from, for a partition by id.
    A fraction of every class is held out for testing. `scale` is "standard" by default; see `load`.
    """
    check_split(test_fraction, seed, scale)
    frame = _read(Path(path), label, drop, ids)
    return _dataset(Path(path).stem, frame, label, ids, test_fraction, seed, scale)


def read_tables(
    paths: Mapping[str, str | Path],
    label: str,
    test_fraction: float = 0.2,
    seed: int = 0,
    scale: str | None = None,
    drop: Sequence[str] = (),
    ids: Sequence[str] = (),
) -> Dataset:
    """Read one file per agent, by the agent's name; all files must have the same columns.

    `ids["agent"]` names the agent of each training row, so a partition by the id "agent" gives every
    agent its own file back. A fraction of every agent's rows of every class is held out for testing.
    """
    check_split(test_fraction, seed, scale)
    if not paths:
        raise RecipeError("Tables per agent must name at least one file.", "none", "Give a file per agent.")
    frames = {agent: _read(Path(path), label, drop, ids) for agent, path in paths.items()}
    first = next(iter(frames))
    for agent, frame in frames.items():
        _check_same_columns(first, frames[first], agent, frame)
    labels = [_labels(frame[label], f"the table of agent '{agent}'") for agent, frame in frames.items()]
    if len({values.dtype.kind for values in labels}) > 1:
        labels = [values.astype(str) for values in labels]
    joined = pd.concat(list(frames.values()), ignore_index=True)
    joined[label] = np.concatenate(labels)
    joined["agent"] = np.repeat(list(frames), [len(frame) for frame in frames.values()])
    return _dataset("tables", joined, label, [*ids, "agent"], test_fraction, seed, scale)


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


def _dataset(
    name: str,
    frame: pd.DataFrame,
    label: str,
    ids: Sequence[str],
    test_fraction: float,
    seed: int,
    scale: str | None,
) -> Dataset:
    names, y = np.unique(_labels(frame[label], f"table '{name}'"), return_inverse=True)
    features = frame.drop(columns=[label, *ids])
    x = features.to_numpy(dtype=np.float64)
    agents = np.unique(_plain(frame["agent"]), return_inverse=True)[1] if "agent" in ids else 0
    train, test = hold_out(agents * len(names) + y, test_fraction, seed, f"Table '{name}'")
    raw = Dataset(
        name=name,
        x=x[train],
        y=y[train].astype(np.int64),
        x_test=x[test],
        y_test=y[test].astype(np.int64),
        classes=len(names),
        class_names=tuple(str(each) for each in names),
        ids={column: _plain(frame[column])[train] for column in ids},
        columns=tuple(features.columns),
    )
    return scaled(raw, scale)


def _read(path: Path, label: str, drop: Sequence[str], ids: Sequence[str]) -> pd.DataFrame:
    """The file's label, id and feature columns, complete and with numeric features."""
    roles = [label, *drop, *ids]
    if len(set(roles)) < len(roles):
        raise RecipeError(
            "A column of a table may be only one of: label, dropped, id.",
            _quoted(sorted({column for column in roles if roles.count(column) > 1})),
            "Name it once.",
        )
    frame = read_file(path)
    for column in roles:
        if column not in frame.columns:
            raise DataError(
                f"Table {path} must have the column '{column}'.",
                f"columns {_quoted(frame.columns)}",
                nearest(column, frame.columns),
            )
    frame = frame.drop(columns=list(drop))
    features = [column for column in frame.columns if column not in roles]
    if not features or frame.empty:
        raise DataError(
            f"Table {path} must have at least one row and one feature column.",
            f"{len(frame)} rows and {len(features)} feature columns",
            "Check the file, 'drop' and 'ids'.",
        )
    for column in features:
        _check_numeric(frame[column], path)
    for column in frame.columns:
        _check_complete(frame[column], path)
    return frame


def read_file(path: Path) -> pd.DataFrame:
    """A CSV or Parquet file as it is, with its columns named by text."""
    kind = path.suffix.lower()
    if kind not in (".csv", ".parquet"):
        raise DataError("A table must be a .csv or a .parquet file.", f"{path}", "Convert it, or correct its name.")
    try:
        with warnings.catch_warnings():
            # pandas only warns when rows are longer than the header, and drops what is too much.
            warnings.simplefilter("error", pd.errors.ParserWarning)
            is_csv = kind == ".csv"
            frame = pd.read_csv(path, index_col=False, low_memory=False) if is_csv else pd.read_parquet(path)
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
    return frame.rename(columns=str)


def _check_numeric(column: pd.Series[Any], path: Path) -> None:
    if not pd.api.types.is_numeric_dtype(column.dtype):
        raise DataError(
            f"Every feature column of table {path} must be numeric.",
            f"column '{column.name}' of type {column.dtype}",
            "Encode it as numbers, or list it in 'drop' or 'ids'.",
        )


def _check_complete(column: pd.Series[Any], path: Path) -> None:
    bad = column.isna().to_numpy(dtype=bool)
    if pd.api.types.is_float_dtype(column.dtype):
        with np.errstate(over="ignore"):
            bad = bad | ~np.isfinite(column.to_numpy(dtype=np.float32, na_value=np.nan))
    if bad.any():
        row = int(bad.argmax())
        raise DataError(
            f"Every cell of table {path} must hold a value, and numbers must be finite in 32 bits.",
            f"{column.iloc[row]} in column '{column.name}', data row {row + 1} (the first row is 1)",
            "Fill the cell in, remove the row, or list the column in 'drop'.",
        )


def _labels(column: pd.Series[Any], owner: str) -> np.ndarray:
    values = _plain(column)
    if values.dtype.kind in "fu":
        whole = values == np.floor(values)
        if not whole.all():
            row = int(whole.argmin())
            raise DataError(
                f"The label column '{column.name}' of {owner} must hold strings or integers.",
                f"{values[row]} in data row {row + 1} (the first row is 1)",
                "Name another column as the label, or turn its values into classes.",
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
