"""What the engine keeps of a node and no protocol sees: counters and reports, its data, its life across rounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from codistill.core.errors import DataError
from codistill.core.rng import Key, derive, seed_libraries
from codistill.data.frame_encoding import FrameEncoding, non_numeric
from codistill.data.frames import (
    Given,
    Names,
    Naming,
    as_frame,
    check_positions,
    check_same,
    column_names,
    is_text,
    places,
    texts,
    unclear_order,
    width,
)
from codistill.data.labels import CLASSIFICATION, LabelEncoding, check_task
from codistill.data.shard import Preparation, Shard, released
from codistill.data.split import hold_out, strata
from codistill.data.validation import (
    as_floats,
    check_shape,
    encoded_samples,
    is_dataset,
    plain_samples,
    read_dataset,
)
from codistill.learners.ability import Ability
from codistill.topology import HUB
from codistill.wire.compression import Residue
from codistill.wire.message import Message

if TYPE_CHECKING:
    from codistill.nodes.agent import Agent
    from codistill.nodes.node import Call, Node


class NodeRecord:
    """Of a node: what it reports of a round, the moment its randomness derives from, and what lives across rounds."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.work = 0  # batches of computing since it was last asked; counted by the guard around its learner
        self.steps = 0  # gradient steps of this round; counted by the same guard
        self.exchanges = 0  # of this round: how often it waited for messages of others
        self.rejected: list[tuple[str, str]] = []  # (sender, reason) of messages refused this round
        self.unreported: list[tuple[str, str]] = []  # the same, for the report of the next round
        self.remarks: list[str] = []  # for the operator, of this round
        self.measures: list[tuple[str, str, float]] = []  # (agent, name, value) of this round
        self.residue: Residue = {}  # what compression has lost of its messages; kept in the checkpoint
        self.moment: tuple[Key, ...] = ()  # (name, phase, step), which all its randomness derives from
        self.calls: list[Call[Any]] = []  # of verbs that were not awaited yet
        self._heard: set[str] = set()  # whom it has waited for since it last sent something

    def start(self, phase: Key, present: tuple[str, ...]) -> None:
        """Enter a round (or "begin"): from here on all randomness derives from (seed, name, phase)."""
        self.remarks, self.measures, self.calls = [], [], []
        self.steps, self.exchanges, self._heard = 0, 0, set()
        self.rejected, self.unreported = self.unreported, []
        self.node.diverged = False
        self.enter(phase, present, float(phase) if isinstance(phase, int) else 0.0)

    def enter(self, phase: Key, present: tuple[str, ...], time: float) -> None:
        """The same, and what is to be reported stays: a relay of a run without rounds, before each message."""
        self.node.present, self.node.time = present, time
        self.moment = self.node.name, phase, 0
        seed_libraries(self.node.seed, *self.moment)

    def step(self, effects: int) -> None:
        """Seed the libraries again after some effects: other nodes may have drawn from them meanwhile."""
        name, phase, step = self.moment
        self.moment = name, phase, int(step) + effects
        seed_libraries(self.node.seed, *self.moment)

    def count(self, senders: tuple[str, ...] | None) -> None:
        """Count exchanges: receiving from several senders, one after the other, is waiting once for all of them.

        None: it does not receive, but send.
        """
        if senders is None:
            self._heard = set()
            return
        here = set(senders)
        if len(self.node.present) < len(self.node.roster):  # nobody waits for those who are absent
            here &= {*self.node.present, HUB}
        if here and (not self._heard or self._heard & here):
            self.exchanges += 1
            self._heard = set()
        self._heard |= here

    def check_awaited(self) -> None:
        if self.calls:
            call, self.calls = self.calls[0], []
            call.refuse("a call without 'await'")

    def measured(self) -> list[tuple[str, str, float]]:
        """All (agent, figure, value) of this round; of the hub one for each agent and figure, the mean over steps."""
        if self.node.name != HUB:
            return self.measures
        given: dict[tuple[str, str], list[float]] = {}
        for agent, figure, value in self.measures:
            given.setdefault((agent, figure), []).append(value)
        return [(agent, figure, sum(values) / len(values)) for (agent, figure), values in given.items()]

    def computing(self) -> AbstractContextManager[Any]:
        """Entered while the node computes: then torch computes on the device of its model, if it has one."""
        return nullcontext()

    def dump(self) -> dict[str, Any]:
        return {"state": self.node.state, **({"residue": self.residue} if self.residue else {})}

    def resume(self, saved: dict[str, Any]) -> None:
        self.node.state, self.node.memo, self.residue = saved["state"], {}, saved.get("residue", {})


class AgentRecord(NodeRecord):
    """Of an agent: also its data as they were given, its test data, its safeguard, and where its state is."""

    node: Agent

    def __init__(self, agent: Agent, x: Any, y: Any, test: Any, task: str | None, prepare: Any, releases: Any) -> None:
        super().__init__(agent)
        check_task(task)
        self.task = task  # what its labels are, as far as its owner says so: "classification" or "regression"
        self.given_test: tuple[Any, Any] | None = test
        self.test: tuple[np.ndarray, np.ndarray] | None = None  # checked and prepared
        self.validation: tuple[np.ndarray, np.ndarray] | None = None  # the same, of its own samples, held out
        self.validation_split = (0.0, 0)  # which share of its samples is held out, and the seed of the run
        self._held: Shard | None = None  # these samples, before they are prepared
        self.kept: np.ndarray | None = None  # places of the samples that it learns from; None: all
        self.class_mix: np.ndarray | None = None  # how many samples of each class it holds
        self.learned = False  # whether it has been in a run
        self.safeguard: Any = None  # set by the runtime: an AgentSafeguard, where its answers have one
        self.reload: Callable[[], None] | None = None  # brings back its state, while that is not in memory
        self.random_items: Any = None  # a dataset whose items differ whenever they are read
        if y is None and is_dataset(x):
            x, y, self.random_items = read_dataset(x, self._owner)
        frame, self.by_argument = as_frame(x), isinstance(x, Mapping)
        self.column_names = column_names(x, f"the samples x of {self._owner}")  # in their order; empty: unknown
        self.frame: FrameEncoding | None = None  # of its data frame, for models that get frames
        self.data: tuple[Any, Any]
        self.has_names = False  # of its own, from a data frame
        self.dtypes: dict[str, Any] = {}
        if frame is not None and (self.column_names or non_numeric(frame)):
            self.use_frame(FrameEncoding.of(frame, text=is_text(x)))
        if self.frame is not None and self.frame.coded and (agent.learner.takes_frames or prepare is not None):
            self.data = self.frame.encode(x, f"the samples x of {self._owner}"), y
        else:
            self.data = plain_samples(x, f"the samples x of {self._owner}"), y
        if releases is not None:
            self.data, self.random_items = released(releases, *self.data, self.random_items, agent.name)
        self.naming = Naming(self._owner)  # what columns and classes are called, known when labels are encoded
        self.named: Naming | None = None  # the same, if this is a copy with numbered ones
        self.prepare = prepare
        self.prepared = self._preparation()
        self.shape: tuple[int, ...] = ()  # of one sample, before it is prepared

    @property
    def _owner(self) -> str:
        return f"agent '{self.node.name}'"

    def _preparation(self) -> Preparation:
        takes_missing = self.node.learner.takes_missing
        return Preparation(self.prepare, takes_missing=takes_missing, owner=self._owner, frame=self.frame)

    # --- its data -----------------------------------------------------------------------------------

    @property
    def is_coded(self) -> bool:
        """Whether some columns of its samples hold no numbers."""
        return self.frame is not None and bool(self.frame.coded)

    def use_frame(self, frame: FrameEncoding) -> None:
        """Take the names and types of the data frame that its samples are."""
        self.frame, self.column_names, self.has_names, self.dtypes = frame, frame.names, True, frame.dtypes

    def use_columns_of(self, other: AgentRecord) -> None:
        """Of a copy of an agent, which was given its samples as an array: what is known of their columns."""
        self.column_names, self.has_names, self.frame = other.column_names, other.has_names, other.frame
        self.dtypes, self.by_argument = other.dtypes, other.by_argument
        self.prepared = self._preparation()

    def view_of(self, what: str) -> Callable[[Any], np.ndarray]:
        """Turns samples that all agents share into those that its model takes: of a frame its own columns, by name."""

        def view(x: Any) -> np.ndarray:
            return self.prepared(x if isinstance(x, np.ndarray) else self.own_columns(x, f"{what} for {self._owner}"))

        return view

    def given_frame(self) -> Any:
        """Its samples as the data frame that they were."""
        return None if self.frame is None else self.frame.decode(self.training_samples())

    def training_samples(self) -> np.ndarray:
        """The samples that it learns from, before they are prepared: all but those held out for validation."""
        x = np.asarray(self.data[0])
        return x if self.kept is None else x[self.kept]

    def own_columns(self, x: Any, what: str, *, leave_out: bool = True) -> np.ndarray:
        """(n, d) a frame's columns that it has itself, in its order; of those that hold no numbers the codes."""
        if self.frame is None:
            raise DataError(
                f"{self._owner.capitalize()} must be given a data frame, as the others: agents have different columns.",
                f"an array of shape {np.shape(self.data[0])}",
                "Pass its x as a data frame, so that its columns are found by name.",
            )
        if self.is_coded:
            return self.frame.encode(x, what, leave_out=leave_out)
        return as_floats(np.asarray(plain_samples(x, what, self.column_names, leave_out=leave_out)))

    def given_columns(self) -> Given:
        """What is known of the columns of its samples."""
        return Given(self._owner, self.column_names if self.has_names else (), width(self.data[0]))

    def order_columns(self, wanted: Names) -> None:
        """Bring the columns of its samples into the order that all agents share."""
        x, y = self.data
        if self.has_names:
            check_same(self.column_names, wanted, self._owner, "those of the other samples of the federation")
        if self.has_names and self.column_names != wanted:
            if self.given_test is not None and as_frame(self.given_test[0]) is None:
                raise unclear_order(f"the test data of {self._owner}", self._owner)
            check_positions([getattr(self.node.learner, "estimator", None), self.prepare], self._owner, wanted)
            self.data = np.ascontiguousarray(x[:, places(self.column_names, wanted)]), y
            self.frame = FrameEncoding(wanted, self.dtypes)
            self.prepared = self._preparation()
        self.column_names = wanted if width(x) == len(wanted) else ()

    def encode_labels(self, classes: int, encoding: LabelEncoding | None = None, columns: Names = ()) -> None:
        """Make the shard, now that the federation knows which classes there are, and in which order the columns are."""
        agent, encoding = self.node, encoding or LabelEncoding(CLASSIFICATION, classes)
        self.order_columns(columns or (self.column_names if self.has_names else ()))
        x, y = self.data
        agent.shard = shard = Shard(x, encoding.encode(y, self._owner), classes, agent.name, self.random_items)
        self.shape = shard.x.shape[1:]
        held = self._hold_out(shard)
        shard = agent.shard
        counted = encoding.classes if encoding.task == CLASSIFICATION else 0
        own = Naming(self._owner, self.column_names, self.dtypes, counted, encoding.names, self.by_argument, self.frame)
        self.naming = self.named or own
        given, shard.x = shard.x, self.prepared.fit(shard.x, self.naming)
        agent.learner.take_names(self._naming_after_preparation(), shard.x)
        if agent.learner.frame is not None and not agent.learner.ready:
            self.prepared.takes_missing = agent.learner.takes_missing_in_frames(given, shard.targets)
            shard.x = self.prepared.fit(given, self.naming)
        if shard.labels is not None:
            self.class_mix = np.bincount(shard.labels, minlength=classes)
        self._held = held
        self.prepare_validation()
        self.encode_test(encoding)

    def prepare_validation(self) -> None:
        """Prepare the samples held out as those that it learns from."""
        held = self._held
        if held is not None:
            self.validation = self.prepared(held.x), held.targets if held.labels is None else held.labels

    def _hold_out(self, whole: Shard) -> Shard | None:
        """Hold a share of every class out of the shard, before anything is fitted to it, for validation.

        They are the same in every runtime and after a resume: they depend on the samples, the seed and its name alone.
        """
        self.kept = self.validation = None
        share, seed = self.validation_split
        if not share:
            return None
        groups = strata(whole.targets if whole.labels is None else whole.labels)
        own_seed = derive(seed, self.node.name, "validation") >> 1
        self.kept, held = hold_out(groups, share, own_seed, self._owner.capitalize(), "validation")
        self.node.shard = whole.part(self.kept)
        return whole.part(held)

    def _naming_after_preparation(self) -> Naming:
        """The names that its model may use: a transformer has made other columns of those that were given."""
        if self.prepared.transformer is None:
            return self.naming
        made = self.prepared.arguments
        if made is None:
            return replace(self.naming, columns=(), frame=None)
        names = texts(made.columns)
        dtypes = dict(zip(names, made.dtypes, strict=True))
        return replace(self.naming, columns=names, dtypes=dtypes, frame=None, by_argument=True)

    def encode_test(self, encoding: LabelEncoding) -> None:
        if self.given_test is not None:
            owner = f"the test data of {self._owner}"
            x, y = self.given_test
            x = self.own_columns(x, owner, leave_out=False) if self.is_coded else x
            x, y = encoded_samples(x, y, encoding, owner, self.column_names)
            check_shape(x.shape[1:], self.shape, owner, self._owner)
            self.test = self.prepared(x), y

    def join_info(self, about: Ability) -> JoinInfo:
        """What it says of its data and, as far as these abilities are concerned, of its model."""
        learner, x = self.node.learner, self.training_samples()
        about &= learner.abilities
        features = None
        if Ability.FEATURES in about:
            with suppress(Exception):  # what is wrong with the samples is reported when they are checked
                features = int(learner.evaluated_features(x[:1]).shape[1])
        if Ability.WEIGHTS not in about:
            return JoinInfo(len(x), None, features)
        weights, norms = learner.weights(), learner.batch_norm
        body = {name: array for name, array in weights.items() if name not in norms}
        return JoinInfo(len(x), Message(weights).layout, features, Message(body).layout, learner.frozen)

    # --- its life -----------------------------------------------------------------------------------

    @property
    def models(self) -> tuple[Any, ...]:
        """The agent, and under a safeguard the two that learn alone."""
        return self.node, *(self.safeguard.models if self.safeguard else ())

    def join(self, federation_samples: int) -> None:
        for agent in self.models:
            agent.learner.join(federation_samples)

    def place(self) -> None:
        for agent in self.models:
            agent.learner.place()

    def computing(self) -> AbstractContextManager[Any]:
        return self.node.learner.computing()

    def dump(self) -> dict[str, Any]:
        guarded = {} if self.safeguard is None else {"safeguard": self.safeguard.dump()}
        return {"learner": self.node.learner.state(), **super().dump(), **guarded}

    def resume(self, saved: dict[str, Any]) -> None:
        self.reload = None
        self.node.learner.restore(saved["learner"])
        super().resume(saved)
        if self.safeguard is not None:
            self.safeguard.resume(saved["safeguard"])

    def offload(self) -> None:
        """Free the memory of its model and state; `resume` brings back what was dumped."""
        self.node.learner.offload()
        self.node.state, self.node.memo, self.residue = {}, {}, {}
        if self.node.shard is not None:
            self.node.shard.offload()
        if self.safeguard is not None:
            self.safeguard.offload()


@dataclass(frozen=True, slots=True)
class JoinInfo:
    """What an agent says of itself when it joins; the hub judges its messages by it."""

    samples: int
    weights: str | None = None  # digest of the names, shapes and dtypes of its weights
    features: int | None = None  # how many its model has
    body: str | None = None  # digest of its weights without those of batch norm
    frozen: str | None = None  # digest of the values of its frozen weights, which are not sent


@overload
def record_of(node: Agent) -> AgentRecord: ...
@overload
def record_of(node: Node) -> NodeRecord: ...
def record_of(node: Node) -> NodeRecord:
    return node._record
