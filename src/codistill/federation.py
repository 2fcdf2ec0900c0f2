"""A federation: agents, a protocol and what they share, checked before anything runs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from codistill.agent import Agent, Hub, Node, count_classes
from codistill.data.checks import validate_samples
from codistill.data.shard import Reference, Shard
from codistill.errors import DataError, LearnerError, RecipeError
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
        self.agents, self.protocol, self.seed = list(agents), protocol, seed
        _check_names(self.agents)
        if not isinstance(protocol, Protocol):
            raise RecipeError(
                "The protocol must be an instance of a Protocol.",
                repr(protocol),
                "Write for example codistill.FedMD().",
            )
        self.classes = classes or max(
            count_classes(y) for y in [agent._data[1] for agent in self.agents] + ([test[1]] if test else [])
        )
        for agent in self.agents:
            agent.settle(self.classes)
        self.public = None if public is None else Reference(public, seed)
        self.test = None if test is None else validate_samples(*test, self.classes, "the test set")
        self._check_shapes()
        if protocol.pools_data:
            self._pool()
        names = [agent.name for agent in self.agents]
        self.topology = topology or KINDS[protocol.topology](names)
        self.faults = Faults(faults, names, seed, participation)
        self._watchers = tuple(watchers)
        self._options = {"faults": tuple(faults), "participation": participation}
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
        keeper = None if folder is None else Path(folder)
        began = time.monotonic()
        yardstick = self._alone() if alone else None
        baseline = None
        if yardstick is not None:
            # What is shown of the agents alone is where they end: one evaluation, on the full test set.
            last = Plan(rounds=rounds, evaluate_every=rounds)
            where = keeper and keeper / "alone"
            baseline = yardstick._train(last, engine, where, resume=resume, progress=progress, keep_agents=False)
            if baseline.interrupted:
                return Result(self, History(), baseline, time.monotonic() - began, interrupted=True)
        history = self._train(plan, engine, keeper, resume=resume, progress=progress)
        return Result(self, history, baseline, time.monotonic() - began, interrupted=history.interrupted)

    def _train(
        self,
        plan: Plan,
        engine: Engine,
        folder: Path | None,
        *,
        resume: bool,
        progress: bool,
        keep_agents: bool = True,
    ) -> History:
        from codistill.experiments.store import Keeper

        history = History()
        observers: list[Observer] = [history]
        start, saved = 0, None
        if folder is not None:
            keeper = Keeper(folder, plan.rounds, engine.checkpoint_every)
            observers.append(keeper)
            if resume:
                start, saved, rows = keeper.latest()
                history.rows.extend(rows)
            else:
                keeper.clear()
        stage = self._stage()
        with GentleInterrupt() as interrupt:
            runtime = self._start(stage, engine)
            try:
                if saved is not None:
                    runtime.load(saved)
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
        labelled = self.agents[0].shard.labels is not None
        y = np.concatenate([agent.shard.labels if labelled else agent.shard.targets for agent in self.agents])
        for agent in self.agents:
            agent.shard = Shard(x, y, self.classes, agent.name)

    def _check_shapes(self) -> None:
        first = self.agents[0]
        wanted = first.shard.x.shape[1:]
        others = [(f"agent '{agent.name}'", agent.shard.x) for agent in self.agents[1:]]
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


def _check_names(agents: Sequence[Agent]) -> None:
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
