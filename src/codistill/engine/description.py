"""The description of a run: all that a runtime needs, whoever has made it.

A `Federation` makes one with all agents at hand, `join` one with a single agent, `serve` one with the hub alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from codistill.core.errors import DataError
from codistill.core.rng import generator
from codistill.core.spec import OPTIONS, RunSpec
from codistill.data.frames import Given, Names, agree_on_columns, as_frame, check_same, given_samples, listed, width
from codistill.data.labels import CLASSIFICATION, REGRESSION, LabelEncoding
from codistill.data.shard import PublicData
from codistill.data.validation import encoded_samples, not_numbers
from codistill.engine.exchange import Carrier, Watcher
from codistill.engine.host import Host
from codistill.engine.safeguard import AgentSafeguard, Safeguard
from codistill.nodes.agent import Agent, Hub, twin_of
from codistill.nodes.clock import Clock
from codistill.nodes.faults import Faults
from codistill.nodes.node import Node
from codistill.nodes.record import record_of
from codistill.protocol import Protocol
from codistill.protocols.alone import baseline_of
from codistill.results.outputs import FeatureSpace, Outputs
from codistill.results.records import Row
from codistill.results.scores import DEFAULT_SCORES, Score
from codistill.results.summary import Summary
from codistill.topology import Topology
from codistill.wire.compression import Compression

_TRIED = 100  # rows of a frame of test data, to see before the run whether an agent's transformer can take them
Build = Callable[[Sequence[str]], "tuple[Protocol, list[Agent]]"]


@dataclass(frozen=True, kw_only=True, eq=False)
class RunDescription:
    """The protocol, who takes part, what they share, and the nodes that are at hand in this process."""

    protocol: Protocol
    topology: Topology
    classes: int
    seed: int
    faults: Faults
    spec: RunSpec = field(default_factory=RunSpec)
    agents: tuple[Agent, ...] = ()  # at hand: all of them in a simulation, one on an agent's machine, none on a hub's
    hub: Hub | None = None  # where it is at hand
    public: PublicData | None = None
    test: tuple[Any, np.ndarray] | None = None  # an array, or a frame of which agents take columns of their own
    samples: int | None = None  # private samples of all agents together; None: told when they have met
    shape: tuple[int, ...] | None = None  # of a sample; None: whatever the agents have
    compression: Compression | None = None
    safeguard: Safeguard | None = None  # of the agents at hand
    validation: float = 0.0  # share of its own samples that each agent holds out, to be measured on
    watchers: tuple[Watcher, ...] = ()  # called for every message that is sent: (sender, receiver, bytes)
    tells_class_mix: bool = True  # whether scores may depend on an agent's class counts: not if others see them
    reported: tuple[str, ...] = ()  # whose rows the metrics hold; empty: the agents at hand, or else all
    encoding: LabelEncoding | None = None  # of the agents' labels; None: they are numbers of classes or real values
    scores: tuple[Score, ...] = DEFAULT_SCORES  # what is measured
    clock: Clock | None = None  # how fast agents and messages are; None: that does not matter
    columns: Names = ()  # names of the columns of all samples, in their order; empty: unknown
    notes: tuple[str, ...] = ()  # on the data, for the user
    build: Build | None = None  # makes agents by name, on another machine; None: they are sent there
    _test_parts: dict[int, tuple[Any, np.ndarray]] = field(default_factory=dict, init=False)  # by size

    @property
    def asynchronous(self) -> bool:
        return self.clock is not None and self.clock.asynchronous

    @property
    def nodes(self) -> list[Node]:
        return [*self.agents, *([self.hub] if self.hub else [])]

    @property
    def names(self) -> tuple[str, ...]:
        """The agents whose rows the metrics hold."""
        return self.reported or tuple(agent.name for agent in self.agents) or self.topology.names

    @property
    def task(self) -> str:
        """Whether classes or real values are measured: by the test set, the labels, or the columns if in doubt."""
        if self.test is not None:
            return CLASSIFICATION if self.test[1].ndim == 1 else REGRESSION
        if self.encoding is not None:
            return self.encoding.task
        return REGRESSION if self.classes == 1 else CLASSIFICATION

    @property
    def class_names(self) -> tuple[str, ...]:
        return tuple(map(str, range(self.classes))) if self.encoding is None else self.encoding.shown

    @property
    def task_scores(self) -> tuple[Score, ...]:
        return tuple(score for score in self.scores if score.task == self.task)

    def tested(self, samples: int | None) -> tuple[Any, np.ndarray]:
        """The common test set, or a seeded part of it: the same in every round, and for every agent.

        Its samples are a data frame where agents have columns of their own.
        """
        assert self.test is not None
        x, y = self.test
        if samples is None or samples >= len(x):
            return x, y
        if samples not in self._test_parts:
            chosen = np.sort(generator(self.seed, "evaluation").choice(len(x), samples, replace=False))
            self._test_parts[samples] = rows_of(x, chosen), y[chosen]
        return self._test_parts[samples]

    def bind_nodes(self) -> RunDescription:
        """Give the nodes at hand what they share: who takes part, the seed, the data that all have."""
        for node in self.nodes:
            node.seed, node.topology, node.classes = self.seed, self.topology, self.classes
            node.asynchronous, node.sampled = self.asynchronous, self.faults.participation < 1
            if self.public is not None:
                node.public = self.public
        for agent in self.agents:
            record = record_of(agent)
            if agent.shard is None:
                if self.validation:
                    record.validation_split = self.validation, self.seed
                record.encode_labels(self.classes, self.encoding, self.columns)
            if self.public is not None:
                agent.public = self.public.prepared(record.view_of("the public data"))
            if self.test is not None and not isinstance(self.test[0], np.ndarray) and record.prepare is not None:
                record.view_of("the test set")(rows_of(self.test[0], np.arange(min(_TRIED, len(self.test[0])))))
            agent.shard.seed = self.seed
            if self.safeguard is not None and self.baseline_protocol is not None and record.safeguard is None:
                record.safeguard = AgentSafeguard(self.safeguard, agent)
            if self.samples is not None:
                record.join(self.samples)
        if self.hub is not None:
            self.hub.joined |= {agent.name: record_of(agent).join_info(self.protocol.needs) for agent in self.agents}
        return self

    def of_agent(self, name: str) -> RunDescription:
        mine = tuple(agent for agent in self.agents if agent.name == name)
        return replace(self, agents=mine, hub=None, reported=(name,))

    def of_hub(self) -> RunDescription:
        return replace(self, agents=(), reported=self.names)

    @cached_property
    def baseline_protocol(self) -> Protocol | None:
        """What the agents do in the baseline; None: there is nothing to compare with."""
        return baseline_of(self.protocol)

    def baseline(self) -> RunDescription | None:
        """The run of the same agents alone: untouched copies of them, without a message."""
        protocol = self.baseline_protocol
        if protocol is None:
            return None
        names = self.topology.names
        return RunDescription(
            protocol=protocol,
            topology=Topology.silent(names),
            classes=self.classes,
            seed=self.seed,
            spec=self.spec.of_baseline(),
            faults=Faults((), names, self.seed),
            agents=tuple(twin_of(agent) for agent in self.agents),
            test=self.test,
            samples=self.samples,
            shape=self.shape,
            tells_class_mix=self.tells_class_mix,
            encoding=self.encoding,
            scores=self.scores,
            columns=self.columns,
            validation=self.validation,
            # In the same time, not in as many rounds of others.
            clock=self.clock if self.asynchronous and protocol.asynchronous else None,
        ).bind_nodes()

    def host(self, nodes: list[Node], links: Carrier | None = None) -> Host:
        host = Host(nodes, self.protocol, self.faults, links, self.watchers, self.compression)
        host.after = self.after_round
        return host

    @property
    def after_round(self) -> Callable[[Agent, int], Any] | None:
        """What is done when an agent has ended its round t: its safeguard weighs what it was taught."""
        alone = self.baseline_protocol
        if alone is None:
            return None

        def weigh(agent: Agent, t: int) -> None:
            safeguard = record_of(agent).safeguard
            if safeguard is not None:
                safeguard.end_round(agent, t, self.protocol, alone)

        return weigh

    def answer(self, agent: Agent, x: np.ndarray) -> np.ndarray:
        """What an agent answers: as the protocol says, and with a safeguard mixed with its own model."""
        return self.answers(agent, x)[0]

    def answers(self, agent: Agent, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What an agent answers, and what the protocol alone would."""
        with record_of(agent).computing():
            taught = self.protocol.predict(agent, x)
        safeguard, alone = record_of(agent).safeguard, self.baseline_protocol
        if safeguard is None or alone is None or not safeguard.ready:
            return taught, taught
        return safeguard.answer(taught, alone, x), taught


# --- What is shown of a run.

ELSEWHERE = "on its own machine"  # in the place of a model that this process does not see


def models_of(description: RunDescription) -> tuple[dict[str, str], np.ndarray | None]:
    """The model of each agent, and its samples of each class; None where those of some agent are unknown."""
    models = {agent.name: agent.learner.describe() for agent in description.agents}
    mixes = [record_of(agent).class_mix for agent in description.agents]
    known = [mix for mix in mixes if mix is not None]
    counts = np.stack(known) if known and len(known) == len(mixes) else None
    return {name: models.get(name, ELSEWHERE) for name in description.names}, counts


def summary_of(
    description: RunDescription,
    rows: Sequence[Row],
    alone_rows: Sequence[Row] | None,
    outputs: Outputs | None,
    features: Sequence[FeatureSpace],
    seconds: float,
) -> Summary:
    """Everything that is shown of a run."""
    models, counts = models_of(description)
    return Summary(
        title=description.protocol.name,
        protocol=description.protocol.name,
        agents=models,
        rows=list(rows),
        alone_rows=None if alone_rows is None else list(alone_rows),
        counts=counts,
        class_names=description.class_names,
        seconds=seconds,
        test_samples=0 if description.test is None else len(description.test[0]),
        outputs=outputs,
        features=tuple(features),
        topology=description.topology,
        faults=description.faults.injected,
        scores=description.task_scores,
    )


def settings_of(description: RunDescription) -> dict[str, Any]:
    """What a run is run with, by the names that a recipe has for it; every default is written out."""
    tables: dict[str, Any] = {"compression": description.compression, "safeguard": description.safeguard}
    tables["clock"] = description.clock
    models = Counter(agent.learner.describe() for agent in description.agents)
    return {
        "seed": description.seed,
        "agents": len(description.names),
        "models": ", ".join(f"{count} {model}" for model, count in models.items()) or ELSEWHERE,
        "samples": description.samples,
        "public": 0 if description.public is None else len(description.public),
        "task": description.task,
        "classes": description.classes,
        "topology": "star" if description.topology.hub else description.topology.kind,
        "faults": len(description.faults.injected),
        "runtime.participation": description.faults.participation,
        "evaluation.scores": ", ".join(score.name for score in description.task_scores),
        "protocol.name": description.protocol.name or type(description.protocol).__name__,
        **{f"protocol.{name}": value for name, value in asdict(description.protocol).items()},
        **{
            option.metadata["recipe"] or f"runtime.{name}": getattr(description.spec, name)
            for name, option in OPTIONS.items()
        },
        **{key: asdict(table) for key, table in tables.items() if table is not None},
    }


def rows_of(x: Any, places: np.ndarray) -> Any:
    """Rows of an array or a frame."""
    return x[places] if isinstance(x, np.ndarray) else x.iloc[places]


# --- The columns of all samples: in one order, or of each agent its own.


@dataclass(frozen=True)
class SharedColumns:
    """What the samples of a federation have in common.

    Usually these are all columns, in one order. Where the protocol does not need that, each agent may have columns of
    its own, of any type: then public and test data are frames of which it takes them by name.
    """

    columns: Names  # of all samples, in their order; empty: unknown, or each agent has its own
    own: bool  # whether each agent has its own
    notes: tuple[str, ...]  # for the user

    def take_public(self, public: PublicData | None) -> None:
        """Bring public data into the common order, if there is one."""
        if public is not None and not self.own:
            if public.is_coded:
                raise not_numbers(public.frame, "the public data")
            public.order_columns(self.columns)
        elif public is not None and public.frame is None:
            raise _no_frame("The public data", public.x)

    def take_test(self, test: tuple[Any, Any] | None, encoding: LabelEncoding) -> tuple[Any, np.ndarray] | None:
        """The common test set, checked."""
        if test is None:
            return None
        if not self.own:
            return encoded_samples(*test, encoding, "the test set", self.columns)
        frame = as_frame(test[0])
        if frame is None:
            raise _no_frame("The test set", test[0])
        rows = np.zeros((len(frame), 1), np.float32)  # agents check their columns when they take them
        return frame, encoded_samples(rows, test[1], encoding, "the test set")[1]


def agree_on_all_columns(
    agents: Sequence[Agent],
    protocol: Protocol,
    test: tuple[Any, Any] | None,
    public: PublicData | None,
    settled: Names = (),
) -> SharedColumns:
    """The columns of the samples of these agents and what they share. `settled`: an order that a hub has told."""
    others = shared_columns(test, public)
    shared = others[:1] if public is not None else []
    for agent in agents:
        own_test = record_of(agent).given_test
        if own_test is not None:
            owner = f"the test data of agent '{agent.name}'"
            others.append(given_samples(owner, own_test[0], owner))
    given = [record_of(agent).given_columns() for agent in agents]
    named = [each for each in given if each.names]
    differ = len({frozenset(each.names) for each in (*named, *shared) if each.names}) > 1 and bool(named)
    coded = any(record_of(agent).is_coded for agent in agents)
    if protocol.needs_same_inputs():
        for each in (*named, *others) if differ or coded else ():
            if each.names:
                check_same(
                    each.names, named[0].names, each.owner, f"those of {named[0].owner}", protocol.why_same_inputs()
                )
    if coded or differ:  # with the same inputs everywhere they do not differ: that was refused
        frame = None if test is None else as_frame(test[0])
        for agent in agents if frame is not None else ():
            record_of(agent).own_columns(frame, f"the test set for agent '{agent.name}'")
        return SharedColumns((), True, tuple(_lacking(named)))
    columns, notes = agree_on_columns(given, others, settled)
    moved = [each.owner for each in named if each.names != columns]
    notes += [f"{owner}: its columns are brought into the order of the others" for owner in moved]
    return SharedColumns(columns, False, tuple(notes))


def _lacking(named: Sequence[Given]) -> list[str]:
    """Which agents lack columns that others have."""
    everything = dict.fromkeys(name for each in named for name in each.names)
    lacking = {each.owner: [name for name in everything if name not in set(each.names)] for each in named}
    return [f"{owner}: it does not have {listed(names)} of the others" for owner, names in lacking.items() if names]


def shared_columns(test: tuple[Any, Any] | None, public: PublicData | None) -> list[Given]:
    shared = [] if public is None else [Given("the public data", public.columns, width(public.x))]
    return shared if test is None else [*shared, given_samples("the test set", test[0], "the test set")]


def _no_frame(what: str, x: Any) -> DataError:
    return DataError(
        f"{what} must be a data frame: agents have columns of their own, which are found by name.",
        f"an array of shape {np.shape(x)}",
        "Pass a frame with the columns of all agents.",
    )
