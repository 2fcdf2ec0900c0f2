"""A trained agent's model in a file: saved, loaded, and predicting as the agent did at the end of its run.

The file is 32 bytes (SHA-256 of the rest) and a safetensors body, see `codistill.wire.state`: arrays, numbers and text.
It holds the agent's model and what else its protocol's `predict` reads, such as the models of an ensemble; under a
safeguard also the model that was trained alone; and what is done to samples before. It holds no training rows, unless
the model itself keeps them (nearest neighbours, support vectors, kernels).
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from codistill.core import __version__
from codistill.core.errors import CheckpointError, CodistillError, LearnerError, RecipeError
from codistill.core.files import writing
from codistill.core.settings import clear_argument_errors, from_table
from codistill.data.columns import Columns
from codistill.data.frame_encoding import FrameEncoding
from codistill.data.frames import as_frame, column_names
from codistill.data.labels import CLASSIFICATION, REGRESSION, LabelEncoding
from codistill.data.shard import Preparation
from codistill.data.split import Scaling
from codistill.engine.description import RunDescription
from codistill.engine.safeguard import SafeguardedAnswer
from codistill.engine.store import read_body, write_body
from codistill.federation.result import TrainedAgent
from codistill.learners.ability import AnyLearner, Learner
from codistill.learners.portable.saved_learner import load_learner, load_transformer, save_learner, save_transformer
from codistill.nodes.agent import Agent, twin_of
from codistill.nodes.faults import Faults
from codistill.nodes.record import record_of
from codistill.protocol import Protocol
from codistill.protocols import PROTOCOLS
from codistill.protocols.alone import baseline_of
from codistill.topology import Topology

FORMAT = "codistill model 1"
_LARGEST = 1 << 26  # values of a sample, and classes


class TrainedModel(TrainedAgent):
    """A model from a file: a fitted estimator to scikit-learn, as an agent is after its run.

    It takes samples as they were before codistill scaled them: what a recipe did to the columns is part of the model.
    """

    _kind = "loaded"

    def __init__(self, agent: Agent, description: RunDescription, samples: Samples) -> None:
        super().__init__(agent, description)
        self.samples = samples
        self.shape: tuple[int, ...] = record_of(agent).shape

    @property
    def protocol(self) -> str:
        """The name of the protocol by which the agent was trained."""
        return self._description.protocol.name

    @property
    def class_names(self) -> tuple[str, ...]:
        """The names of the classes as text, in the order of the columns of `predict_proba`."""
        return self._description.class_names

    def answers(self, x: Any) -> np.ndarray:
        what = f"the samples for agent '{self.name}'"
        if self.samples.columns is not None:
            self._note_positions(tuple(self.samples.columns.feature_names()), column_names(x, what))
        return super().answers(self.samples.features(x, self.shape, what))

    @property
    def feature_names_in_(self) -> np.ndarray:
        """(d,) the names of the columns of a table, as they were; no such attribute where they are unknown."""
        if self.samples.columns is None:
            return super().feature_names_in_
        return np.array(list(self.samples.columns.columns), dtype=object)

    @property
    def n_features_in_(self) -> int:
        """The number of columns of a table, as they were; no such attribute for images."""
        return super().n_features_in_ if self.samples.columns is None else len(self.samples.columns.columns)


def is_onnx(path: str | Path) -> bool:
    return Path(path).suffix.lower() == ".onnx"


def save_model(trained: TrainedAgent, path: str | Path, *, samples: Samples | None = None) -> Path:
    """Write a trained agent's model; returns its path. `load` opens it again. A file .onnx gets an ONNX graph."""
    if is_onnx(path):
        from codistill.federation.onnx_file import save_onnx

        return save_onnx(trained, path, samples=samples)
    agent, description = trained._agent, trained._description
    protocol, names = description.protocol, trained._encoding.names
    preparation, guard, alone = record_of(agent).prepared, safeguard_in_use(trained), description.baseline_protocol
    transformer = preparation.transformer
    if not agent.learner.ready:
        raise LearnerError(
            f"The model of agent '{agent.name}' must be trained before it is saved.",
            f"{agent.learner.describe()}, which has not been trained",
            "Run at least one round in which this agent is present.",
        )
    safeguard = None
    if guard is not None and alone is not None:
        safeguard = {
            "own": save_learner(guard.own.learner),
            "state": _state_for_predictions(alone, guard.own),
            "weight": guard.weight,
            "threshold": guard.threshold,
            "seen": guard.seen,
            "factors": guard.factors,
        }
    frame = record_of(agent).frame
    in_frames = frame is not None and (frame.coded or preparation.frame is not None or agent.learner.frame is not None)
    content = {
        "format": FORMAT,
        "codistill": __version__,
        "agent": agent.name,
        "protocol": {
            "name": protocol.name,
            "class": _class_of(protocol),
            # Of a protocol that `load` can make by its name; one's own is passed to `load`.
            "settings": dataclasses.asdict(protocol) if PROTOCOLS.get(protocol.name) is type(protocol) else {},
        },
        "roster": list(description.topology.names),
        "state": _state_for_predictions(protocol, agent),
        "classes": agent.shard.classes,
        "is_classifier": trained.is_classifier,
        "labels": None if names is None else list(names),
        "shape": list(record_of(agent).shape),
        "prepared_shape": list(agent.shard.x.shape[1:]),
        "samples": known_samples(trained, samples).as_plain(),
        "preparation": {
            "transformer": None if transformer is None else save_transformer(transformer, f"agent '{agent.name}'"),
            "takes_missing": preparation.takes_missing,
            "fill": preparation.fill_values(),
        },
        "learner": save_learner(agent.learner),
        "safeguard": safeguard,
        **({"frame": frame.as_plain()} if frame is not None and in_frames else {}),
    }
    target = Path(path)
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
    write_body(target, content)
    return target


def known_samples(trained: TrainedAgent, given: Samples | None) -> Samples:
    """What is known of the samples: as given, as the file said, or by the agent's own data frame."""
    if given is None and isinstance(trained, TrainedModel):
        return trained.samples
    record = record_of(trained._agent)
    names = () if record.is_coded else record.column_names  # its frame says what else there is
    return given or Samples(columns=Columns(dict.fromkeys(names, "number")) if names else None)


def safeguard_in_use(trained: TrainedAgent) -> SafeguardedAnswer | None:
    """What mixes the taught answer with that of the agent's own model; None if nothing does."""
    guard: SafeguardedAnswer | None = record_of(trained._agent).safeguard
    used = guard is not None and guard.ready and trained._description.baseline_protocol is not None
    return guard if used else None


@clear_argument_errors
def load(path: str | Path, *, model: Any = None, protocol: Protocol | None = None, prepare: Any = None) -> TrainedModel:
    """Open a model that `save` or `codistill export` has written; nothing in the file is executed.

    `model`: an untrained model of the same class, where the file alone cannot tell how to build it: classes of one's
    own, and torch modules of no registered architecture. `protocol`: an instance of a protocol of one's own, if that
    has a `predict` of its own. `prepare`: a transformer of the agent's own class. With `model` or `prepare` the file
    must be one that you trust. A file .onnx is opened as such.
    """
    if is_onnx(path):
        from codistill.federation.onnx_file import load_onnx

        return load_onnx(path)
    content = read_body(Path(path), "a saved model")
    found = content.get("format") if isinstance(content, dict) else None
    if found != FORMAT:
        kind = "a checkpoint of a run, or of an agent" if found is None else repr(found)[:80]
        raise CheckpointError(
            f"{path} must be a saved model of this version of codistill.",
            kind,
            "Name a file that save or 'codistill export' wrote; read a checkpoint by codistill.read_state(path).",
        )
    try:
        return _model_of(content, model, protocol, prepare)
    except CodistillError:
        raise
    except Exception as error:  # a file that was changed by others than codistill can fail in any way
        raise CheckpointError(
            f"{path} is corrupted.", f"{type(error).__name__}: {error}"[:200], "Save the model again."
        ) from None


def _model_of(content: dict[str, Any], model: Any, own: Protocol | None, prepare: Any) -> TrainedModel:
    shape, prepared = (tuple(int(size) for size in content[key]) for key in ("shape", "prepared_shape"))
    name, classes, labels = str(content["agent"]), int(content["classes"]), content["labels"]
    for each in (shape, prepared):
        check_sizes(each, classes)
    if labels is not None and len(labels) != classes:
        raise ValueError(f"{len(labels)} names of {classes} classes")
    samples = Samples.from_plain(content["samples"], shape)
    saved = content["preparation"]
    transformer = None if saved["transformer"] is None else load_transformer(saved["transformer"], prepare)
    frame = FrameEncoding.from_plain(content["frame"]) if "frame" in content else None
    if frame is not None and (len(frame.names),) != shape:
        raise ValueError(f"a data frame of {len(frame.names)} columns for samples of shape {shape}")
    fill = None if saved["fill"] is None else np.asarray(saved["fill"], dtype=np.float64)
    if fill is not None and fill.shape != prepared:
        raise ValueError(f"values for missing ones of shape {fill.shape} for samples of shape {prepared}")
    preparation = Preparation(
        transformer, takes_missing=saved["takes_missing"] is True, owner=f"agent '{name}'", fill=fill, frame=frame
    )
    if frame is None and preparation(np.zeros((2, *shape), np.float32)).shape != (2, *prepared):
        raise ValueError(f"a model of {prepared} features for samples of shape {shape}")
    guard = content["safeguard"]
    # Two models from one that the caller has made: a copy for each.
    fresh = [copy.deepcopy(model) for _ in range(2)]
    made = assemble(
        name, load_learner(content["learner"], prepared, classes, fresh[0], frame), shape, classes, samples, labels,
        is_classifier=content["is_classifier"] is True, protocol=_protocol_of(content["protocol"], own),
        roster=tuple(str(each) for each in content["roster"]), prepared_shape=prepared,
        preparation=preparation, frame=frame,
    )  # fmt: skip
    agent = made._agent
    agent.state = content["state"]
    if guard is not None:
        learner = load_learner(guard["own"], prepared, classes, fresh[1], frame)
        record_of(agent).safeguard = _loaded_safeguard(agent, learner, guard)
    return made


def _loaded_safeguard(agent: Agent, learner: Learner, saved: dict[str, Any]) -> SafeguardedAnswer:
    weight, threshold, seen = float(saved["weight"]), saved["threshold"], np.asarray(saved["seen"], dtype=bool)
    factors = None if saved["factors"] is None else np.asarray(saved["factors"], dtype=np.float64)
    if not 0 <= weight <= 1 or any(
        each.shape != (agent.classes,) for each in (seen, seen if factors is None else factors)
    ):
        raise ValueError(f"a safeguard of weight {weight} for {seen.shape} classes")
    own = twin_of(agent)
    own.learner, own.state, own.shard = cast(AnyLearner, learner), saved["state"], agent.shard
    own.classes, own.topology = agent.classes, Topology.silent((agent.name,))
    return SafeguardedAnswer(own, weight, None if threshold is None else float(threshold), seen, factors)


def check_sizes(shape: tuple[int, ...], classes: int) -> None:
    """Raise ValueError for sizes in a file that no model has."""
    if min(shape, default=1) < 1 or math.prod(shape) > _LARGEST or not 1 <= classes <= _LARGEST:
        raise ValueError(f"samples of shape {shape} and {classes} classes")


def assemble(
    name: str,
    learner: Learner,
    shape: tuple[int, ...],
    classes: int,
    samples: Samples,
    labels: Sequence[Any] | None,
    *,
    is_classifier: bool,
    protocol: Protocol,
    roster: tuple[str, ...],
    prepared_shape: tuple[int, ...],
    preparation: Preparation,
    frame: FrameEncoding | None = None,
) -> TrainedModel:
    """A trained model around a learner, without any data; `labels`: the classes, where they are not numbers from 0."""
    names = None if labels is None else tuple(labels)
    encoding = LabelEncoding(CLASSIFICATION if is_classifier else REGRESSION, classes, names)
    # In the place of the private data, which are in no file: one row of zeros, which nothing reads.
    agent = Agent(name, learner, np.zeros((1, *prepared_shape), np.float32), np.zeros((1, classes)))
    record = record_of(agent)
    record.encode_labels(classes, LabelEncoding(REGRESSION, classes))
    record.prepared, record.shape, record.class_mix = preparation, shape, None
    if frame is not None:
        record.use_frame(frame)
    agent.classes, agent.topology = classes, Topology.silent(roster)
    description = RunDescription(
        protocol=protocol, topology=agent.topology, classes=classes, seed=0,
        faults=Faults((), roster, 0), agents=(agent,), encoding=encoding,
    )  # fmt: skip
    return TrainedModel(agent, description, samples)


def _state_for_predictions(protocol: Protocol, agent: Agent) -> dict[str, Any]:
    """What `predict` reads of the agent's state: nothing, unless the protocol has a `predict` of its own."""
    if type(protocol).predict is Protocol.predict:
        return {}
    names = agent.state if protocol.predicts_with is None else protocol.predicts_with
    return {name: agent.state[name] for name in names if name in agent.state}


def _class_of(protocol: Protocol) -> str | None:
    """The class that is needed to predict; None: any, since its answers are those of the agent's models."""
    kind, alone = type(protocol), baseline_of(protocol)
    plain = all(type(each).predict is Protocol.predict for each in (protocol, alone or protocol))
    return None if plain else f"{kind.__module__}.{kind.__qualname__}"


def _protocol_of(saved: dict[str, Any], own: Protocol | None) -> Protocol:
    name, needed = saved["name"], saved["class"]
    if own is not None:
        return own
    known = PROTOCOLS.get(name)
    if known is not None and needed in (None, f"{known.__module__}.{known.__qualname__}"):
        made: Protocol = from_table(known, {k: v for k, v in saved["settings"].items() if v is not None}, "protocol")
        return made
    if needed is None:  # a protocol of one's own whose agents answer with their model
        unnamed: type[Protocol] = type("SavedProtocol", (Protocol,), {"name": str(name)})
        return unnamed()
    raise RecipeError(
        f"The protocol of this model has a predict of its own: {needed}.",
        "no protocol=",
        "Pass an instance of it: codistill.load(path, protocol=...).",
    )


# --- What is done to a sample before a trained model sees it: columns, scaling and preparation, as plain values and
# back.


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Samples:
    """What is known of the samples that a model takes."""

    columns: Columns | None = None  # how the columns of a table become features; None: their names are unknown
    label: str | None = None  # the column of a table that holds the labels
    unused: tuple[str, ...] = ()  # columns of a table that are neither features nor labels
    missing_values: tuple[str, ...] = ()  # cells of a table that count as empty
    scaling: Scaling | None = None  # done to the features before they are prepared

    def features(self, x: Any, shape: tuple[int, ...], owner: str) -> Any:
        """Samples as the agent was given them, from a frame or an array as they were before they were scaled."""
        columns, frame = self.columns, None if self.columns is None else as_frame(x)
        if columns is not None and frame is not None:
            # With numbered columns, a frame can be taken by position, as an array.
            fits = frame.shape[1] == columns.numbers == len(columns.columns)
            if column_names(x, owner) or not fits:
                x = columns.transform(frame, owner)
        if self.scaling is None:
            return x
        try:
            array = np.asarray(x, dtype=np.float64)
        except (TypeError, ValueError):
            return x  # told by what checks the samples next
        return self.scaling.apply(array, owner) if array.shape[1:] == shape else x

    def as_plain(self) -> dict[str, Any]:
        scaling = self.scaling
        return {
            "columns": None if self.columns is None else self.columns.as_plain(),
            "label": self.label,
            "unused": list(self.unused),
            "missing_values": list(self.missing_values),
            "scaling": None if scaling is None else {"shift": scaling.shift, "divisor": scaling.divisor},
        }

    @classmethod
    def from_plain(cls, saved: dict[str, Any], shape: tuple[int, ...]) -> Samples:
        """What `as_plain` returned; a ValueError or DataError if it does not belong to samples of `shape`."""
        scaling, columns = saved["scaling"], saved["columns"]
        schema = None if columns is None else Columns.from_plain(columns)
        if schema is not None and (len(schema.feature_names()),) != shape:
            raise ValueError(f"{len(schema.feature_names())} features for samples of shape {shape}")
        return cls(
            columns=schema, label=saved["label"], unused=tuple(map(str, saved["unused"])),
            missing_values=tuple(map(str, saved["missing_values"])),
            scaling=None if scaling is None else Scaling(np.asarray(scaling["shift"]), np.asarray(scaling["divisor"])),
        )  # fmt: skip
