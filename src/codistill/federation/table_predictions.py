"""Predictions for the rows of a table: its columns are found by name, scaled as in training, and answered."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from codistill.data.tables import read_file
from codistill.errors import DataError
from codistill.federation.trained_model import TrainedModel, in_order, load
from codistill.files import write_atomically
from codistill.results.outputs import are_probabilities


def predict_table(model: Path, table: Path, *, label: str | None = None) -> tuple[pd.DataFrame, list[str]]:
    """A row of answers per row of a CSV or Parquet file, and notes for the user.

    For classes: `class`, and a column of probabilities (or scores) per class; for real values: `value`.
    """
    trained = load(model)
    frame = read_file(table)
    features, notes = _features(trained, frame, label, table)
    answers = trained.decision_function(_numbers(features, table).reshape(len(features), *trained.shape))
    return _as_frame(trained, answers), notes


def write_predictions(predictions: pd.DataFrame, path: Path) -> None:
    """Write a table as its suffix says."""
    if path.suffix.lower() not in (".csv", ".parquet"):
        raise DataError("Predictions are written to a .csv or a .parquet file.", f"{path}", "Change the suffix.")
    out = io.BytesIO()
    if path.suffix.lower() == ".csv":
        predictions.to_csv(out, index=False)
    else:
        predictions.to_parquet(out, index=False)
    write_atomically(path, out.getvalue())


def _features(
    trained: TrainedModel, frame: pd.DataFrame, label: str | None, table: Path
) -> tuple[pd.DataFrame, list[str]]:
    """The columns that the model takes, in its order, and notes on what was left out."""
    known, wanted = trained.samples, math.prod(trained.shape)
    if label is not None and label not in frame.columns:
        raise DataError(f"Table {table} must have the column '{label}'.", "no such column", "Remove --label.")
    left_out = {label, known.label, *known.unused} - {None}
    if known.columns:
        more = [str(name) for name in frame.columns if name not in known.columns and name not in left_out]
        shown = ", ".join(more[:5]) + (f" and {len(more) - 5} more" if len(more) > 5 else "")
        notes = [f"columns that the model does not know are left out: {shown}"] if more else []
        return in_order(frame, known.columns, f"table {table}"), notes
    features = frame[[name for name in frame.columns if name not in left_out]]
    if features.shape[1] != wanted:
        raise DataError(
            f"Table {table} must have a column for each of the {wanted} values of a sample.",
            f"{features.shape[1]} columns: {_shown(list(features.columns))}",
            "Name the column of labels by --label, and remove what was not part of the training.",
        )
    return features, []


def _numbers(features: pd.DataFrame, table: Path) -> np.ndarray:
    for column in features.columns:
        values = features[column]
        if not pd.api.types.is_numeric_dtype(values.dtype):
            raise DataError(
                f"Every column of table {table} that the model takes must be numeric.",
                f"column '{column}' of type {values.dtype}",
                "Encode it as in training.",
            )
        bad = values.isna().to_numpy(dtype=bool)
        if bad.any():
            raise DataError(
                f"Every cell of table {table} must hold a value.",
                f"none in column '{column}', data row {int(bad.argmax()) + 1} (the first row is 1)",
                "Fill it in, or remove the row.",
            )
    return features.to_numpy(dtype=np.float64)


def _as_frame(trained: TrainedModel, answers: np.ndarray) -> pd.DataFrame:
    if not trained.is_classifier:
        names = ["value"] if answers.shape[1] == 1 else [f"value_{i}" for i in range(answers.shape[1])]
        return pd.DataFrame(answers, columns=pd.Index(names))
    names = list(map(str, trained.class_names or range(answers.shape[1])))
    kind = "probability" if are_probabilities(answers) else "score"
    columns = {"class": [names[i] for i in answers.argmax(axis=1)]}
    return pd.DataFrame(columns | {f"{kind}_{name}": answers[:, i] for i, name in enumerate(names)})


def _shown(names: Sequence[object]) -> str:
    texts = [f"'{name}'" for name in names[:6]]
    return ", ".join(texts) + (", ..." if len(names) > 6 else "")
