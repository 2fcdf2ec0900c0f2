"""A federation: agents, a protocol and what they share, checked before anything runs."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from codistill.agent import Agent, Hub, Node
from codistill.data.shard import Shard
from codistill.data.validation import validate_samples
from codistill.errors import CheckpointError, CodistillError, RecipeError
from codistill.faults import Fault, Faults
from codistill.federation.checks import (
    as_agents,
    as_compression,
    as_count,
    as_public_data,
    as_seed,
    check_abilities,
    check_pair,
    check_shapes,
    check_topology,
    count_all_classes,
)
from codistill.federation.result import Result
from codistill.protocol import Protocol
from codistill.protocols.alone import baseline_of
from codistill.runtimes.drive import Plan, drive
from codistill.runtimes.host import Watcher
from codistill.runtimes.interrupt import GentleInterrupt
from codistill.runtimes.observers import Observer
from codistill.runtimes.observers.history import History
from codistill.runtimes.observers.progress import Progress
from codistill.runtimes.processes import Processes
from codistill.runtimes.runtime import Runtime, Simulation, Stage, load_nodes
from codistill.settings import check_settings, setting
from codistill.topology import KINDS, Topology
from codistill.wire.compression import Compression

if TYPE_CHECKING:
    from codistill.runtimes.store import Keeper


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
        compression: Compression | None = None,
        watchers: Sequence[Watcher] = (),
    ) -> None:
        self.agents, self.protocol, self.seed = as_agents(agents), protocol, as_seed(seed)
        if not isinstance(protocol, Protocol):
            raise RecipeError(
                "The protocol must be an instance of a Protocol.",
                repr(protocol),
                "Write for example codistill.FedMD().",
            )
        check_pair(test, "The test set")
        for agent in self.agents:
            check_pair(agent._test, f"The test data of agent '{agent.name}'")
        self.classes = count_all_classes(self.agents, test) if classes is None else as_count(classes, "classes")
        for agent in self.agents:
            agent.settle(self.classes)
        self.public = None if public is None else as_public_data(public, self.seed)
        self.test = None if test is None else validate_samples(*test, self.classes, "the test set")
        check_shapes(self.agents, self.test, self.public)
        self._samples = sum(len(agent.shard) for agent in self.agents)
        if protocol.pools_data:
            self._pool()
        names = [agent.name for agent in self.agents]
        if topology is not None:
            check_topology(topology, names, protocol)
        self.topology = topology or KINDS[protocol.topology](names)
        self.hub = Hub() if self.topology.hub else None
        self.faults = Faults(faults, names, self.seed, participation)
        self.compression = as_compression(compression)
        self._watchers = tuple(watchers)
        for node in (*self.agents, *([self.hub] if self.hub else [])):
            self._introduce(node)
        check_abilities(self.agents, protocol, self.public)

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
            for agent in self.agents:
                agent.learned = True
            history = self._train(plan, engine, keeper, interrupt, progress=progress)
        return Result(self, history, baseline, time.monotonic() - began, interrupted=history.interrupted)

    def _keeper(
        self, folder: str | Path | None, plan: Plan, engine: Engine, stack: ExitStack, *, resume: bool
    ) -> Keeper | None:
        if folder is None:
            return None
        from codistill.runtimes.store import Keeper

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
            history.outputs = keeper.outputs(start) if start == plan.rounds else None
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
        used = [agent.name for agent in self.agents if agent.learned]
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
        nodes: list[Node] = [*self.agents, *([self.hub] if self.hub else [])]
        return Stage(nodes, self.protocol, self.faults, self.test, self.seed, self._watchers, self.compression)

    def _alone(self) -> Federation | None:
        protocol = baseline_of(self.protocol)
        if protocol is None:
            return None
        return Federation(
            [agent.twin() for agent in self.agents], protocol, test=self.test, seed=self.seed, classes=self.classes
        )

    def _introduce(self, node: Node) -> None:
        node.seed, node.topology, node.classes = self.seed, self.topology, self.classes
        if self.public is not None:
            node.public = self.public
        if isinstance(node, Agent):
            node.shard.seed = self.seed
            node.learner.join(self._samples)

    def _pool(self) -> None:
        x = np.concatenate([agent.shard.x for agent in self.agents])
        labelled = all(agent.shard.labels is not None for agent in self.agents)
        y = np.concatenate([agent.shard.labels if labelled else agent.shard.targets for agent in self.agents])
        for agent in self.agents:
            agent.shard = Shard(x, y, self.classes, agent.name)


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
