"""A federation: agents, a protocol and what they share, checked before anything runs."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import numpy as np

from codistill.agent import Agent, Hub, Node, count_classes
from codistill.data.checks import validate_samples
from codistill.data.shard import Reference, Shard
from codistill.errors import CheckpointError, CodistillError, DataError, LearnerError, RecipeError
from codistill.learners.plain import PlainLearner
from codistill.learners.sklearn import SklearnLearner
from codistill.learners.torch import TorchLearner
from codistill.protocol import Protocol
from codistill.result import Result
from codistill.runtimes.drive import Plan, drive
from codistill.runtimes.faults import Fault, Faults
from codistill.runtimes.host import Watcher
from codistill.runtimes.interrupt import GentleInterrupt
from codistill.runtimes.observers import Observer
from codistill.runtimes.observers.history import History
from codistill.runtimes.observers.progress import Progress
from codistill.runtimes.processes import Processes
from codistill.runtimes.runtime import Runtime, Simulation, Stage, load_nodes
from codistill.settings import check_settings, setting
from codistill.topology import KINDS, Topology

if TYPE_CHECKING:
    from codistill.experiments.store import Keeper

_FEW_CLASSES = 1000  # as many are believed of any data; more than there are samples are a mistake
_LEARNED: WeakSet[Agent] = WeakSet()  # agents that have been in a run


@dataclass(frozen=True, kw_only=True)
class Engine:
    """Where the rounds are computed, and how often what was reached is saved."""

    kind: str = setting("processes", "worker processes, or all in this one", choices=("processes", "simulation"))
    workers: int | None = setting(None, "worker processes; absent: one per core", at_least=1)
    checkpoint_every: int = setting(1, "rounds between checkpoints; 0: never", at_least=0)

    def __post_init__(self) -> None:
        check_settings(self, "runtime")


class Federation:
    """Agents that learn from one another by a protocol.

    `public` are unlabelled samples that all agents share, `test` the common test set (samples, labels).
    Everything is checked here; `run` then only runs.
    """

    def __init__(
        self,
        agents: Sequence[Agent],
        protocol: Protocol,
        *,
        public: Any = None,
        test: tuple[Any, Any] | None = None,
        seed: int = 0,
        classes: int | None = None,
        topology: Topology | None = None,
        faults: Sequence[Fault] = (),
        participation: float = 1.0,
        watchers: Sequence[Watcher] = (),
    ) -> None:
        self.agents, self.protocol, self.seed = _as_agents(agents), protocol, _as_seed(seed)
        if not isinstance(protocol, Protocol):
            raise RecipeError(
                "The protocol must be an instance of a Protocol.",
                repr(protocol),
                "Write for example codistill.FedMD().",
            )
        _check_pair(test, "The test set")
        for agent in self.agents:
            _check_pair(agent._test, f"The test data of agent '{agent.name}'")
        self.classes = self._count_classes(test) if classes is None else _as_count(classes, "classes")
        for agent in self.agents:
            agent.settle(self.classes)
        self.public = None if public is None else _as_reference(public, self.seed)
        self.test = None if test is None else validate_samples(*test, self.classes, "the test set")
        self._check_shapes()
        if protocol.pools_data:
            self._pool()
        names = [agent.name for agent in self.agents]
        self.topology = KINDS[protocol.topology](names) if topology is None else self._checked(topology)
        self.faults = Faults(faults, names, self.seed, participation)
        self._watchers = tuple(watchers)
        self._check_abilities()
        nodes: list[Node] = [*self.agents, Hub()] if self.topology.hub else [*self.agents]
        for node in nodes:
            self._introduce(node)

    def run(
        self,
        rounds: int = 10,
        *,
        runtime: str = "processes",
        workers: int | None = None,
        evaluate_every: int = 1,
        evaluate_samples: int | None = None,
        alone: bool = True,
        folder: str | Path | None = None,
        resume: bool = False,
        checkpoint_every: int = 1,
        progress: bool = True,
    ) -> Result:
        """Run the rounds; with a `folder`, metrics and checkpoints are kept there and `resume` goes on.

        `alone` also trains a twin of every agent by itself, so that the gain is known.
        """
        plan = Plan(rounds=rounds, evaluate_every=evaluate_every, evaluate_samples=evaluate_samples)
        engine = Engine(kind=runtime, workers=workers, checkpoint_every=checkpoint_every)
        if resume and folder is None:
            raise RecipeError("To resume, a run needs its folder.", "no folder", "Pass folder=... as well.")
        self._check_fresh(resume)
        began = time.monotonic()
        with ExitStack() as stack:
            interrupt = stack.enter_context(GentleInterrupt())
            # Taken first and kept to the end: nobody else may write there meanwhile.
            keeper = self._keeper(folder, plan, engine, stack, resume=resume)
            yardstick = self._alone() if alone else None
            baseline = None
            if yardstick is not None:
                # What is shown of the agents alone is where they end: one evaluation, on the full test set.
                last = Plan(rounds=rounds, evaluate_every=rounds)
                where = None if folder is None else Path(folder) / "alone"
                beside = self._keeper(where, last, engine, stack, resume=resume)
                baseline = yardstick._train(last, engine, beside, interrupt, progress=progress, keep_agents=False)
                if interrupt.asked:
                    return Result(self, History(), baseline, time.monotonic() - began, interrupted=True)
            _LEARNED.update(self.agents)
            history = self._train(plan, engine, keeper, interrupt, progress=progress)
        return Result(self, history, baseline, time.monotonic() - began, interrupted=history.interrupted)

    def _keeper(
        self, folder: str | Path | None, plan: Plan, engine: Engine, stack: ExitStack, *, resume: bool
    ) -> Keeper | None:
        if folder is None:
            return None
        from codistill.experiments.store import Keeper

        keeper = Keeper(Path(folder), plan.rounds, engine.checkpoint_every)
        stack.callback(keeper.closed)
        keeper.begin(resume=resume)
        return keeper

    def _train(
        self,
        plan: Plan,
        engine: Engine,
        keeper: Keeper | None,
        interrupt: GentleInterrupt,
        *,
        progress: bool,
        keep_agents: bool = True,
    ) -> History:
        history = History()
        observers: list[Observer] = [history]
        start, saved = 0, None
        if keeper is not None:
            observers.append(keeper)
            start, saved, rows = keeper.latest()
            history.rows.extend(rows)
            for note in keeper.notes:
                print(f"note: {note}", file=sys.stderr)
        stage = self._stage()
        runtime = self._start(stage, engine)
        try:
            if saved is not None:
                _load(runtime, saved, stage)
            if progress:
                observers.append(Progress(self.protocol.name, plan.rounds, len(self.agents), start))
            done = drive(stage, runtime, plan, observers, start=start, should_stop=lambda: interrupt.asked)
            if keep_agents and not isinstance(runtime, Simulation):
                load_nodes(stage.nodes, runtime.save())
        finally:
            for observer in observers:
                observer.closed()
            runtime.close()
        history.interrupted = done < plan.rounds
        return history

    def _check_fresh(self, resume: bool) -> None:
        used = [agent.name for agent in self.agents if agent in _LEARNED]
        if used and not resume:
            raise RecipeError(
                "A run must start with agents that have not been in a run yet, or its figures mean nothing.",
                f"'{used[0]}' has learned in an earlier run",
                "Make new agents with new models; or keep runs in a folder=... and go on with resume=True.",
            )

    def _start(self, stage: Stage, engine: Engine) -> Runtime:
        # Pooling data is for a yardstick, and never leaves this process.
        if engine.kind == "simulation" or self.protocol.pools_data:
            return Simulation(stage)
        return Processes(stage, engine.workers)

    def _stage(self) -> Stage:
        nodes: list[Node] = [*self.agents]
        if self.topology.hub:
            hub = Hub()
            self._introduce(hub)
            nodes.append(hub)
        return Stage(nodes, self.protocol, self.faults, self.test, self.seed, self._watchers)

    def _alone(self) -> Federation | None:
        protocol = self.protocol.alone()
        if protocol is None:
            return None
        return Federation(
            [agent.twin() for agent in self.agents], protocol, test=self.test, seed=self.seed, classes=self.classes
        )

    def _introduce(self, node: Node) -> None:
        node.seed, node.topology = self.seed, self.topology
        if self.public is not None:
            node.public = self.public
        if isinstance(node, Agent):
            node.shard.seed = self.seed
            node.learner.join(sum(len(agent.shard) for agent in self.agents))

    def _pool(self) -> None:
        x = np.concatenate([agent.shard.x for agent in self.agents])
        labelled = all(agent.shard.labels is not None for agent in self.agents)
        y = np.concatenate([agent.shard.labels if labelled else agent.shard.targets for agent in self.agents])
        for agent in self.agents:
            agent.shard = Shard(x, y, self.classes, agent.name)

    def _count_classes(self, test: tuple[Any, Any] | None) -> int:
        given = [agent._data[1] for agent in self.agents] + ([] if test is None else [test[1]])
        classes = samples = 0
        for y in given:
            with suppress(ValueError, TypeError):  # not an array at all: said when its owner is settled
                classes, samples = max(classes, count_classes(y)), samples + len(y)
        if classes > max(_FEW_CLASSES, samples):
            raise DataError(
                "Labels must number the classes 0, 1, 2 and so on.",
                f"a label {classes - 1} among {samples} samples",
                "Number them anew, e.g. by np.unique(y, return_inverse=True)[1]; or say classes=... if this is meant.",
            )
        return classes

    def _checked(self, topology: Topology) -> Topology:
        if not isinstance(topology, Topology):
            raise RecipeError(
                "The topology must be a Topology.", repr(topology), "Write for example codistill.Topology.ring(names)."
            )
        names = [agent.name for agent in self.agents]
        if sorted(topology.names) != sorted(names):
            raise RecipeError(
                "The topology must have the federation's agents, each once.",
                f"a topology of {', '.join(topology.names) or 'nobody'}; agents {', '.join(names)}",
                "Make it from the agents' names.",
            )
        if self.protocol.topology == "star" and not topology.hub:
            raise RecipeError(
                f"{self.protocol.name} needs a topology with a hub.",
                "a topology without",
                "Use a star, or leave it out.",
            )
        linked = any(topology.neighbours(name) for name in names)
        if self.protocol.topology in ("complete", "ring") and topology.hub and not linked:
            raise RecipeError(
                f"Agents of {self.protocol.name} speak to one another, so its topology needs links between them.",
                "a star, with links to the hub only",
                "Use complete or ring, or leave it out.",
            )
        return topology

    def _check_shapes(self) -> None:
        first = self.agents[0]
        wanted = first.shard.x.shape[1:]
        others = [(f"agent '{agent.name}'", agent.shard.x) for agent in self.agents[1:]]
        others += [(f"the test data of agent '{agent.name}'", agent.test[0]) for agent in self.agents if agent.test]
        others += [("the test set", self.test[0])] if self.test else []
        others += [("the reference set", self.public.x)] if self.public else []
        for owner, x in others:
            if x.shape[1:] != wanted:
                raise DataError(
                    f"All samples must have the shape of those of agent '{first.name}', {wanted}.",
                    f"{owner} has {x.shape[1:]}",
                    "Bring all samples to one shape.",
                )

    def _check_abilities(self) -> None:
        protocol = self.protocol
        if protocol.needs_public and self.public is None:
            raise RecipeError(
                f"{protocol.name} needs unlabelled reference data that all agents share.",
                "none",
                "Pass public=..., or set [data] public in the recipe; or use a protocol without: avgkd, fedavg.",
            )
        for agent in self.agents:
            has = agent.learner.abilities
            missing = protocol.needs & ~has
            if missing:
                from codistill.protocols import PROTOCOLS

                fitting = [name for name, other in PROTOCOLS.items() if other.needs in has and not other.pools_data]
                raise LearnerError(
                    f"{protocol.name} needs learners with the ability '{protocol.needs.words()}'.",
                    f"agent '{agent.name}' has {agent.learner.describe()}, which lacks '{missing.words()}'",
                    f"{agent.learner.advice(missing)} Protocols that work with it as it is: {', '.join(fitting)}.",
                )
            agent.learner.check(agent.shard.x, agent.shard.targets, agent.name)
        protocol.check(self.agents)


def _load(runtime: Runtime, saved: dict[str, bytes], stage: Stage) -> None:
    if set(saved) == {node.name for node in stage.nodes}:
        try:
            return runtime.load(saved)
        except CodistillError:
            raise
        except Exception as error:  # a state of another model: each library has its own way to say so
            found = f"{type(error).__name__}: {error}"[:200]
    else:
        found = f"a run of {', '.join(sorted(saved))}"
    raise CheckpointError(
        "A run must be resumed with the agents and models that it began with.",
        found,
        "Use the same agents and models, or another folder.",
    )


def _as_agents(agents: Sequence[Agent]) -> list[Agent]:
    if isinstance(agents, Agent):
        raise RecipeError("Agents must be given as a list.", f"the agent '{agents.name}' alone", "Write [agent].")
    try:
        given = list(agents)
    except TypeError:
        raise RecipeError("Agents must be given as a list.", repr(agents)[:80], "Write [agent, ...].") from None
    _check_agents(given)
    return given


def _check_agents(agents: list[Agent]) -> None:
    if not agents:
        raise RecipeError("A federation must have at least one agent.", "none", "Add agents.")
    for agent in agents:
        if not isinstance(agent, Agent):
            raise RecipeError(
                "Every agent must be an Agent.", repr(agent)[:80], "Write codistill.Agent(name, model, x, y)."
            )
    names = [agent.name for agent in agents]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise RecipeError("Every agent must have a name of its own.", f"'{twice[0]}' more than once", "Rename one.")
    owners: dict[int, str] = {}
    for agent in agents:
        for part in (agent.learner, _wrapped(agent.learner)):
            other = owners.setdefault(id(part), agent.name)
            if other != agent.name:
                raise LearnerError(
                    "Every agent must have a model of its own.",
                    f"agents '{other}' and '{agent.name}' share one",
                    "Make one for each, or give each a copy.deepcopy(model).",
                )


def _wrapped(learner: Any) -> Any:
    match learner:
        case TorchLearner():
            return learner.module
        case SklearnLearner():
            return learner.estimator
        case PlainLearner():
            return learner.model
    return learner


def _as_seed(seed: Any) -> int:
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
        raise RecipeError("seed must be an integer of at least 0.", repr(seed), "Choose another seed.")
    return int(seed)  # numpy's integers are other keys of randomness than Python's


def _as_count(count: Any, name: str) -> int:
    if isinstance(count, bool) or not isinstance(count, int | np.integer) or count < 1:
        raise RecipeError(f"{name} must be an integer of at least 1.", repr(count), "Change it, or leave it out.")
    return int(count)


def _as_reference(public: Any, seed: int) -> Reference:
    try:
        len(public)
    except TypeError:
        raise DataError(
            "The reference data must be samples.", repr(public)[:80], "Pass the samples themselves as public=..."
        ) from None
    return Reference(public, seed)


def _check_pair(test: Any, owner: str) -> None:
    if test is not None and not (isinstance(test, tuple | list) and len(test) == 2):
        raise DataError(
            f"{owner} must be a pair of samples and labels.",
            f"{type(test).__name__} of {len(test)}" if hasattr(test, "__len__") else type(test).__name__,
            "Write test=(x, y).",
        )
