"""A trained agent's model in a file: saved, loaded, and predicting as the agent did at the end of its run.

The file is 32 bytes (SHA-256 of the rest) and a safetensors body, see `codistill.wire.state`: arrays, numbers and text.
It holds the agent's model and what else its protocol's `predict` reads, such as the models of an ensemble; no training
rows, unless the model itself keeps them (nearest neighbours, support vectors, kernels).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from codistill.agent import Agent
from codistill.data.scale import Scaling
from codistill.errors import CheckpointError, CodistillError, DataError, LearnerError, RecipeError
from codistill.faults import Faults
from codistill.federation.result import TrainedAgent
from codistill.files import writing
from codistill.learners.ability import Learner
from codistill.learners.portable.saved_learner import load_learner, save_learner
from codistill.protocol import Protocol
from codistill.protocols import PROTOCOLS
from codistill.runtimes.description import RunDescription
from codistill.runtimes.plan import Plan
from codistill.runtimes.state_file import read_body, write_body
from codistill.settings import from_table
from codistill.topology import Topology
from codistill.version import __version__

FORMAT = "codistill model 1"
_LARGEST = 1 << 26  # values of a sample, and classes


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Samples:
    """What is known of the samples that a model takes."""

    columns: tuple[str, ...] = ()  # names of the features, in order; empty: unknown
    label: str | None = None  # the column of a table that holds the labels
    unused: tuple[str, ...] = ()  # columns of a table that are neither features nor labels
    scaling: Scaling | None = None  # done to the values before the model sees them

    @classmethod
    def of(cls, agent: Agent) -> Samples:
        """Of an agent whose samples were a data frame, the names of its columns."""
        names = list(getattr(agent._data[0], "columns", ()))
        return cls(columns=tuple(names) if all(isinstance(name, str) for name in names) else ())


class TrainedModel(TrainedAgent):
    """A model from a file, with the methods of scikit-learn: `predict`, `predict_proba`, `decision_function`.

    It takes samples as they were before codistill scaled them: what a recipe did to the columns is part of the model.
    """

    def __init__(
        self, agent: Agent, description: RunDescription, samples: Samples, class_names: Sequence[str] | None
    ) -> None:
        super().__init__(agent, description)
        self.samples = samples
        self.class_names = None if class_names is None else tuple(class_names)  # of a table's labels, by class
        self.shape: tuple[int, ...] = agent.shard.x.shape[1:]

    @property
    def protocol(self) -> str:
        """The name of the protocol by which the agent was trained."""
        return self._description.protocol.name

    def decision_function(self, x: Any) -> np.ndarray:
        """(n, C) what the protocol answers, as it is: probabilities, scores or real values."""
        if hasattr(x, "columns") and self.samples.columns:
            x = in_order(x, self.samples.columns, f"the samples for agent '{self.name}'")
        scaling = self.samples.scaling
        if scaling is not None:
            x = self._scaled(x, scaling)
        return super().decision_function(x)

    def _scaled(self, x: Any, scaling: Scaling) -> Any:
        try:
            array = np.asarray(x, dtype=np.float64)
        except (TypeError, ValueError):
            return x  # told by what checks the samples next
        return scaling.apply(array, "samples") if array.shape[1:] == self.shape else x

    def __repr__(self) -> str:
        kind = f"{self._description.classes} classes" if self.is_classifier else "real values"
        return f"<trained model of agent '{self.name}' ({self.protocol}): {self.learner.describe()}, {kind}>"


def is_onnx(path: str | Path) -> bool:
    """Whether a file's name says that it is an ONNX model."""
    return Path(path).suffix.lower() == ".onnx"


def in_order(frame: Any, columns: Sequence[str], owner: str) -> Any:
    """The columns of a data frame that a model takes, in its order; more columns are left out."""
    missing = [name for name in columns if name not in set(frame.columns)]
    if missing:
        shown = ", ".join(f"'{name}'" for name in missing[:5])
        raise DataError(
            f"The columns of {owner} must be those that the model was trained on.",
            f"no {shown}" + (f" and {len(missing) - 5} more" if len(missing) > 5 else ""),
            "Add or rename them; their order does not matter.",
        )
    return frame[list(columns)]


def save_model(
    trained: TrainedAgent, path: str | Path, *, samples: Samples | None = None, class_names: Sequence[str] | None = None
) -> Path:
    """Write a trained agent's model; returns its path. `load` opens it again. A file .onnx gets an ONNX graph."""
    if is_onnx(path):
        from codistill.federation.onnx_file import save_onnx

        return save_onnx(trained, path)
    agent, description = trained._agent, trained._description
    protocol = description.protocol
    if not agent.learner.ready:
        raise LearnerError(
            f"The model of agent '{agent.name}' must be trained before it is saved.",
            f"{agent.learner.describe()}, which has not been trained",
            "Run at least one round in which this agent is present.",
        )
    if isinstance(trained, TrainedModel):
        samples, class_names = samples or trained.samples, class_names or trained.class_names
    known = samples or Samples.of(agent)
    scaling = known.scaling
    content = {
        "format": FORMAT,
        "codistill": __version__,
        "agent": agent.name,
        "protocol": {"name": protocol.name, "class": _class_of(protocol), "settings": _settings_of(protocol)},
        "roster": list(description.topology.names),
        "state": _state_for_predictions(protocol, agent),
        "classes": agent.shard.classes,
        "is_classifier": trained.is_classifier,
        "class_names": None if class_names is None else list(class_names),
        "shape": list(agent.shard.x.shape[1:]),
        "columns": list(known.columns),
        "label": known.label,
        "unused": list(known.unused),
        "scaling": None if scaling is None else {"shift": scaling.shift, "divisor": scaling.divisor},
        "learner": save_learner(agent.learner),
    }
    target = Path(path)
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
    write_body(target, content)
    return target


def load(path: str | Path, *, model: Any = None, protocol: Protocol | None = None) -> TrainedModel:
    """Open a model that `save` or `codistill export` has written; nothing in the file is executed.

    `model`: an untrained model of the same class, where the file alone cannot tell how to build it: classes of one's
    own, and torch modules of no registered architecture. `protocol`: an instance of a protocol of one's own, if that
    has a `predict` of its own. With `model` the file must be one that you trust. A file .onnx is opened as such.
    """
    if is_onnx(path):
        from codistill.federation.onnx_file import load_onnx

        return load_onnx(path)
    content = read_body(Path(path), "a saved model")
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        found = content.get("format") if isinstance(content, dict) else None
        kind = "a checkpoint of a run, or of an agent" if found is None else repr(found)[:80]
        raise CheckpointError(
            f"{path} must be a saved model of this version of codistill.",
            kind,
            "Name a file that save or 'codistill export' wrote; read a checkpoint by codistill.read_state(path).",
        )
    try:
        return _model_of(content, model, protocol)
    except CodistillError:
        raise
    except Exception as error:  # a file that was changed by others than codistill can fail in any way
        raise CheckpointError(
            f"{path} must be as it was written.", f"{type(error).__name__}: {error}"[:200], "Save the model again."
        ) from None


def _model_of(content: dict[str, Any], model: Any, own: Protocol | None) -> TrainedModel:
    shape, classes = tuple(int(size) for size in content["shape"]), int(content["classes"])
    check_sizes(shape, classes)
    learner = load_learner(content["learner"], shape, classes, model)
    scaling = content["scaling"]
    samples = Samples(
        columns=tuple(map(str, content["columns"])), label=content["label"], unused=tuple(content["unused"]),
        scaling=None if scaling is None else Scaling(scaling["shift"], scaling["divisor"]),
    )  # fmt: skip
    made = assemble(
        str(content["agent"]), learner, shape, classes, samples, content["class_names"],
        is_classifier=content["is_classifier"] is True, protocol=_protocol_of(content["protocol"], own),
        roster=tuple(str(each) for each in content["roster"]),
    )  # fmt: skip
    made._agent.state = content["state"]
    return made


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
    class_names: Sequence[str] | None,
    *,
    is_classifier: bool,
    protocol: Protocol,
    roster: tuple[str, ...],
) -> TrainedModel:
    """A trained model around a learner, without any data."""
    # In the place of the private data, which are in no file: one row of zeros, which nothing reads.
    rows = np.zeros((1, *shape), np.float32)
    agent = Agent(name, learner, rows, np.zeros(1, np.int64) if is_classifier else np.zeros((1, classes)))
    agent.settle(classes)
    agent.class_mix, agent.classes, agent.topology = None, classes, Topology.silent(roster)
    description = RunDescription(
        protocol=protocol, topology=agent.topology, classes=classes, seed=0, plan=Plan(),
        faults=Faults((), roster, 0), agents=(agent,),
    )  # fmt: skip
    return TrainedModel(agent, description, samples, class_names)


def _state_for_predictions(protocol: Protocol, agent: Agent) -> dict[str, Any]:
    """What `predict` reads of the agent's state: nothing, unless the protocol has a `predict` of its own."""
    if type(protocol).predict is Protocol.predict:
        return {}
    names = agent.state if protocol.predicts_with is None else protocol.predicts_with
    return {name: agent.state[name] for name in names if name in agent.state}


def _settings_of(protocol: Protocol) -> dict[str, Any]:
    """Of a protocol that `load` can make by its name; one's own is passed to `load`."""
    return dataclasses.asdict(protocol) if PROTOCOLS.get(protocol.name) is type(protocol) else {}


def _class_of(protocol: Protocol) -> str | None:
    """The class that is needed to predict; None: any, since its answer is that of the agent's model."""
    kind = type(protocol)
    return None if kind.predict is Protocol.predict else f"{kind.__module__}.{kind.__qualname__}"


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
