"""A trained agent's model as an ONNX file, and ONNX files opened for predictions.

The graph takes samples as they were before a recipe scaled them, `samples` (n, ...), and gives `answers` (n, C): class
probabilities, scores or real values. What else is known stands in its metadata, under the key "codistill", as JSON.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from codistill.errors import CheckpointError, CodistillError, LearnerError
from codistill.federation.result import TrainedAgent
from codistill.federation.trained_model import Samples, TrainedModel, assemble, check_sizes
from codistill.files import write_atomically, writing
from codistill.learners.portable.onnx_models import INSTALL, is_installed
from codistill.learners.portable.receiving import open_model
from codistill.learners.portable.saved_learner import OpenedModel
from codistill.protocol import Protocol

_KEY = "codistill"
_FILE_LIMIT = 1 << 28  # bytes


class _Onnx(Protocol):
    """In the place of a protocol: the graph is the whole answer."""

    name = "onnx"


def save_onnx(trained: TrainedAgent, path: str | Path) -> Path:
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
    model = trained if isinstance(trained, TrainedModel) else None
    samples = Samples.of(trained._agent) if model is None else model.samples
    shape = trained._agent.shard.x.shape[1:]
    graph = as_graph(trained._agent.learner, shape, samples.scaling, trained.name)
    known = {
        "agent": trained.name,
        "model": trained.learner.describe(),
        "is_classifier": trained.is_classifier,
        "classes": trained._agent.shard.classes,
        "class_names": None if model is None or model.class_names is None else list(model.class_names),
        "columns": list(samples.columns),
        "label": samples.label,
        "unused": list(samples.unused),
    }
    graph.metadata_props.add(key=_KEY, value=json.dumps(known))
    target = Path(path)
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(target, graph.SerializeToString())
    return target


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
        known = _known(graph)
        message = to_message(graph)
        shape, classes = _sizes(graph, known)
        check_sizes(shape, classes)
        opened = OpenedModel(open_model(message, shape, classes), str(known.get("model", "ONNX graph")))
        names = known.get("class_names")
        samples = Samples(
            columns=tuple(map(str, known.get("columns", ()))), label=known.get("label"),
            unused=tuple(map(str, known.get("unused", ()))),
        )  # fmt: skip
        return assemble(
            str(known.get("agent", "model")), opened, shape, classes, samples,
            None if names is None else [str(name) for name in names],
            is_classifier=bool(known.get("is_classifier", classes > 1)), protocol=_Onnx(), roster=(),
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


def _known(graph: Any) -> dict[str, Any]:
    """What codistill has noted in a graph; nothing in one of another origin."""
    texts = [entry.value for entry in graph.metadata_props if entry.key == _KEY]
    known = json.loads(texts[0]) if texts else {}
    if not isinstance(known, dict):
        raise ValueError("metadata that are no table")
    return known


def _sizes(graph: Any, known: dict[str, Any]) -> tuple[tuple[int, ...], int]:
    weights = {tensor.name for tensor in graph.graph.initializer}
    given = next(value for value in graph.graph.input if value.name not in weights)
    shape = tuple(dim.dim_value for dim in list(given.type.tensor_type.shape.dim)[1:])
    outputs = [dim.dim_value for dim in graph.graph.output[-1].type.tensor_type.shape.dim]
    return shape, int(known.get("classes", outputs[-1] if len(outputs) == 2 else 0))


def _check_installed() -> None:
    if not is_installed():
        raise LearnerError("ONNX needs the packages onnx and onnxruntime.", "they are not installed", f"Run: {INSTALL}")
