"""Predictions for the rows of a table: its columns are found by name, and become features as in training."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from codistill.data.columns import Columns
from codistill.data.tables import read_file
from codistill.errors import DataError
from codistill.federation.trained_model import TrainedModel, load
from codistill.files import write_atomically
from codistill.results.outputs import are_probabilities
from codistill.text import csv_text


def predict_table(model: Path, table: Path, *, label: str | None = None) -> tuple[pd.DataFrame, list[str]]:
    """A row of answers per row of a CSV or Parquet file, and notes for the user.

    For classes: `class`, and a column of probabilities (or scores) per class; for real values: `value`.
    """
    trained = load(model)
    frame = read_file(table, trained.samples.missing_values)
    samples, notes = _samples(trained, frame, label, table)
    return _as_frame(trained, trained.decision_function(samples)), notes


def write_predictions(predictions: pd.DataFrame, path: Path) -> None:
    """Write a table as its suffix says."""
    if path.suffix.lower() not in (".csv", ".parquet"):
        raise DataError("Predictions are written to a .csv or a .parquet file.", f"{path}", "Change the suffix.")
    out = io.BytesIO()
    if path.suffix.lower() == ".csv":
        out.write(csv_text(predictions).encode())
    else:
        predictions.to_parquet(out, index=False)
    write_atomically(path, out.getvalue())


def _samples(trained: TrainedModel, frame: pd.DataFrame, label: str | None, table: Path) -> tuple[Any, list[str]]:
    """What the model takes of a table, and notes on what was left out."""
    known, wanted = trained.samples, math.prod(trained.shape)
    if label is not None and label not in frame.columns:
        raise DataError(f"Table {table} must have the column '{label}'.", "no such column", "Remove --label.")
    left_out = {label, known.label, *known.unused} - {None}
    if known.columns is not None:
        names = known.columns.columns
        more = [str(name) for name in frame.columns if name not in names and name not in left_out]
        shown = ", ".join(more[:5]) + (f" and {len(more) - 5} more" if len(more) > 5 else "")
        return frame, [f"columns that the model does not know are left out: {shown}"] if more else []
    features = frame[[name for name in frame.columns if name not in left_out]]
    if features.shape[1] != wanted:
        raise DataError(
            f"Table {table} must have a column for each of the {wanted} values of a sample.",
            f"{features.shape[1]} columns: {_shown(list(features.columns))}",
            "Name the column of labels by --label, and remove what was not part of the training.",
        )
    numbers = Columns(dict.fromkeys(map(str, features.columns), "number")).transform(features, f"table {table}")
    shown = _shown(list(features.columns))
    note = f"the model does not know the names of its columns: they are taken by position, {shown}"
    return numbers.reshape(len(features), *trained.shape), [note]


def _as_frame(trained: TrainedModel, answers: np.ndarray) -> pd.DataFrame:
    if not trained.is_classifier:
        names = ["value"] if answers.shape[1] == 1 else [f"value_{i}" for i in range(answers.shape[1])]
        return pd.DataFrame(answers, columns=pd.Index(names))
    names = list(trained.class_names)
    kind = "probability" if are_probabilities(answers) else "score"
    columns = {"class": [names[i] for i in answers.argmax(axis=1)]}
    return pd.DataFrame(columns | {f"{kind}_{name}": answers[:, i] for i, name in enumerate(names)})


def _shown(names: Sequence[object]) -> str:
    texts = [f"'{name}'" for name in names[:6]]
    return ", ".join(texts) + (", ..." if len(names) > 6 else "")
