"""A trained agent's model as an ONNX file, and ONNX files opened for predictions.

The graph takes samples as they were before a recipe scaled them, `samples` (n, ...), and gives `answers` (n, C): class
probabilities, scores or real values. What else is known stands in its metadata, under the key "codistill", as JSON.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from codistill.core.errors import CheckpointError, CodistillError, DataError, LearnerError
from codistill.core.files import write_atomically, writing
from codistill.core.text import csv_text
from codistill.data.columns import Columns
from codistill.data.frames import listed
from codistill.data.shard import Preparation
from codistill.data.tables import read_file
from codistill.federation.result import TrainedAgent
from codistill.federation.trained_model import (
    Samples,
    TrainedModel,
    assemble,
    check_sizes,
    known_samples,
    load,
    safeguard_in_use,
)
from codistill.learners.portable import open_model
from codistill.learners.portable.onnx_models import INSTALL, is_installed
from codistill.learners.portable.saved_learner import OpenedModel
from codistill.nodes.record import record_of
from codistill.protocol import Protocol
from codistill.results.outputs import are_probabilities

_KEY = "codistill"
_FILE_LIMIT = 1 << 28  # bytes


class _Onnx(Protocol):
    """In the place of a protocol: the graph is the whole answer."""

    name = "onnx"


def save_onnx(trained: TrainedAgent, path: str | Path, *, samples: Samples | None = None) -> Path:
    """Write a trained agent's model as ONNX; a `LearnerError` says why a model has no such form."""
    _check_installed()
    from codistill.learners.portable.onnx_export import as_graph

    protocol = trained._description.protocol
    if type(protocol).predict is not Protocol.predict and trained._agent.state:
        raise LearnerError(
            "Only an agent that answers with a model of its own can be written as ONNX.",
            f"'{trained.name}' answers with what {protocol.name} has collected",
            "Leave --onnx out: codistill's own format holds all of it. With ekd, single = true makes one model of it.",
        )
    agent, samples = trained._agent, known_samples(trained, samples)
    _check_expressible(trained, samples)
    fill = None if record_of(agent).prepared.takes_missing else record_of(agent).prepared.fill_values()
    if fill is not None and samples.scaling is not None:  # before the scaling, which is part of the graph
        fill = fill * samples.scaling.divisor.reshape(-1) + samples.scaling.shift.reshape(-1)
    graph = as_graph(agent.learner, record_of(agent).shape, samples.scaling, trained.name)
    names = trained._encoding.names
    known = {
        "agent": trained.name,
        "model": trained.learner.describe(),
        "is_classifier": trained.is_classifier,
        "classes": agent.shard.classes,
        "labels": None if names is None else list(names),
        "columns": None if samples.columns is None else list(samples.columns.columns),
        "label": samples.label,
        "unused": list(samples.unused),
        "missing_values": list(samples.missing_values),
        "fill": None if fill is None else [float(value) for value in fill],
    }
    graph.metadata_props.add(key=_KEY, value=json.dumps(known))
    target = Path(path)
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(target, graph.SerializeToString())
    return target


def _check_expressible(trained: TrainedAgent, samples: Samples) -> None:
    """Raise an error unless the agent's learner and a scaling are all of its answer."""
    odd = ""
    if safeguard_in_use(trained) is not None:
        odd = "a safeguard, which mixes two models: the taught one and the agent's own"
    elif record_of(trained._agent).prepared.transformer is not None:
        odd = "a transformer of its own before the model (prepare, scale_per_agent)"
    elif samples.columns is not None and any(kind != "number" for _, kind, _ in samples.columns.describe()):
        odd = "columns that are categories, text or dates"
    if odd:
        raise LearnerError(
            "Only an agent that answers with one model of numbers can be written as ONNX.",
            f"'{trained.name}' has {odd}",
            "Leave --onnx out: codistill's own format holds all of it.",
        )


def load_onnx(path: str | Path) -> TrainedModel:
    """Open an ONNX file for predictions, checked and limited as a model that arrives in a message."""
    _check_installed()
    from onnx import ModelProto

    from codistill.learners.portable.onnx_graph import to_message

    try:
        size = Path(path).stat().st_size
        if size > _FILE_LIMIT:
            raise ValueError(f"{size} bytes, above the limit of {_FILE_LIMIT}")
        graph = ModelProto.FromString(Path(path).read_bytes())
        texts = [entry.value for entry in graph.metadata_props if entry.key == _KEY]
        known = json.loads(texts[0]) if texts else {}  # nothing in a graph of another origin
        if not isinstance(known, dict):
            raise ValueError("metadata that are no table")
        message = to_message(graph)
        shape, classes = _sizes(graph, known)
        check_sizes(shape, classes)
        opened = OpenedModel(open_model(message, shape, classes), str(known.get("model", "ONNX graph")))
        fill = None if known.get("fill") is None else np.asarray(known["fill"], dtype=np.float64)
        labels, columns = known.get("labels"), known.get("columns")
        samples = Samples(
            columns=None if columns is None else Columns(dict.fromkeys(map(str, columns), "number")),
            label=known.get("label"), unused=tuple(map(str, known.get("unused", ()))),
            missing_values=tuple(map(str, known.get("missing_values", ()))),
        )  # fmt: skip
        if (fill is not None and fill.shape != shape) or (labels is not None and len(labels) != classes):
            raise ValueError("metadata of another model")
        name = str(known.get("agent", "model"))
        return assemble(
            name, opened, shape, classes, samples, labels,
            is_classifier=bool(known.get("is_classifier", classes > 1)), protocol=_Onnx(), roster=(),
            prepared_shape=shape,
            preparation=Preparation(None, takes_missing=fill is None, owner=f"agent '{name}'", fill=fill),
        )  # fmt: skip
    except OSError as error:
        raise CheckpointError(f"{path} must be a readable file.", f"{error.strerror}", "Check the path.") from None
    except Exception as error:  # protobuf, onnx and a hostile graph can fail in any way
        found = error.found if isinstance(error, CodistillError) else f"{type(error).__name__}: {error}"
        raise CheckpointError(
            f"{path} must be an ONNX model of one input and standard operators.",
            " ".join(found.split())[:200],
            "Name a file that 'codistill export --onnx' wrote, or a graph (n, features) to (n, outputs) of floats.",
        ) from None


def _sizes(graph: Any, known: dict[str, Any]) -> tuple[tuple[int, ...], int]:
    weights = {tensor.name for tensor in graph.graph.initializer}
    given = next(value for value in graph.graph.input if value.name not in weights)
    shape = tuple(dim.dim_value for dim in list(given.type.tensor_type.shape.dim)[1:])
    outputs = [dim.dim_value for dim in graph.graph.output[-1].type.tensor_type.shape.dim]
    return shape, int(known.get("classes", outputs[-1] if len(outputs) == 2 else 0))


def _check_installed() -> None:
    if not is_installed():
        raise LearnerError("ONNX needs the packages onnx and onnxruntime.", "they are not installed", f"Run: {INSTALL}")


# --- Predictions for the rows of a table: its columns are found by name, and become features as in training.


def predict_table(model: Path, table: Path, *, label: str | None = None) -> tuple[pd.DataFrame, list[str]]:
    """A row of answers per row of a CSV or Parquet file, and notes for the user.

    For classes: `class`, and a column of probabilities (or scores) per class; for real values: `value`.
    """
    trained = load(model)
    frame = read_file(table, trained.samples.missing_values)
    samples, notes = _samples(trained, frame, label, table)
    return _as_frame(trained, trained.answers(samples)), notes


def write_predictions(predictions: pd.DataFrame, path: Path) -> None:
    if path.suffix.lower() not in (".csv", ".parquet"):
        raise DataError("Predictions are written to a .csv or a .parquet file.", f"{path}", "Change the suffix.")
    is_csv = path.suffix.lower() == ".csv"
    write_atomically(path, csv_text(predictions).encode() if is_csv else predictions.to_parquet(index=False))


def _samples(trained: TrainedModel, frame: pd.DataFrame, label: str | None, table: Path) -> tuple[Any, list[str]]:
    """What the model takes of a table, and notes on what was left out."""
    known, wanted = trained.samples, math.prod(trained.shape)
    if label is not None and label not in frame.columns:
        raise DataError(f"Table {table} must have the column '{label}'.", "no such column", "Remove --label.")
    left_out = {label, known.label, *known.unused} - {None}
    record = record_of(trained._agent)
    if known.columns is not None or record.is_coded:
        names = record.column_names if known.columns is None else tuple(known.columns.columns)
        more = [name for name in frame.columns if name not in names and name not in left_out]
        return frame, [f"columns that the model does not know are left out: {listed(more)}"] if more else []
    features = frame[[name for name in frame.columns if name not in left_out]]
    if features.shape[1] != wanted:
        raise DataError(
            f"Table {table} must have a column for each of the {wanted} values of a sample.",
            f"{features.shape[1]} columns: {listed(features.columns)}",
            "Name the column of labels by --label, and remove what was not part of the training.",
        )
    numbers = Columns(dict.fromkeys(map(str, features.columns), "number")).transform(features, f"table {table}")
    note = f"the model does not know the names of its columns: they are taken by position, {listed(features.columns)}"
    return numbers.reshape(len(features), *trained.shape), [note]


def _as_frame(trained: TrainedModel, answers: np.ndarray) -> pd.DataFrame:
    if not trained.is_classifier:
        names = ["value"] if answers.shape[1] == 1 else [f"value_{i}" for i in range(answers.shape[1])]
        return pd.DataFrame(answers, columns=pd.Index(names))
    names = list(trained.class_names)
    kind = "probability" if are_probabilities(answers) else "score"
    columns = {"class": [names[i] for i in answers.argmax(axis=1)]}
    return pd.DataFrame(columns | {f"{kind}_{name}": answers[:, i] for i, name in enumerate(names)})
