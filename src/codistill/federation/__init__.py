"""A federation: agents, a protocol and what they share, checked before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from codistill.agent import Agent
from codistill.arguments import checked_arguments
from codistill.clock import Clock
from codistill.data.labels import LabelEncoding
from codistill.data.shard import PublicData, Shard
from codistill.data.validation import encoded_samples
from codistill.devices import CPU
from codistill.errors import RecipeError
from codistill.faults import Fault, Faults
from codistill.federation.checks import (
    agree_on_all_labels,
    as_agents,
    as_compression,
    as_protocol,
    as_public_data,
    as_seed,
    check_abilities,
    check_pair,
    check_shapes,
    check_topology,
)
from codistill.federation.clock_checks import as_clock, check_clock_runtime
from codistill.federation.local_run import run_on_this_machine
from codistill.federation.result import Result
from codistill.federation.runtime_options import RuntimeOptions
from codistill.hub import Hub
from codistill.protocol import Protocol
from codistill.results.scores import Score, as_scores
from codistill.runtimes.description import RunDescription, agree_on_all_columns
from codistill.runtimes.feature_samples import check_features
from codistill.runtimes.observers import check_observers
from codistill.runtimes.outgoing import Watcher
from codistill.runtimes.plan import Plan
from codistill.runtimes.safeguard import Safeguard, as_safeguard
from codistill.settings import check_setting
from codistill.topology import KINDS, Topology
from codistill.wire.compression import Compression

if TYPE_CHECKING:
    from codistill.runtimes.network.options import Network
    from codistill.runtimes.ray_cluster import RayCluster


class Federation:
    """Agents that learn from one another by a protocol.

    `public` are unlabelled samples that all agents share, `test` the common test set (samples, labels). `task`:
    "classification" or "regression", where the labels do not tell. `classes`: how many there are, or their names.
    `scores`: what is measured, the most important first: scikit-learn's names, a `Score`, or a function (y, answers).
    Everything is checked here; `run` then only runs.
    """

    @checked_arguments
    def __init__(
        self,
        agents: Sequence[Agent],
        protocol: Protocol,
        *,
        public: Any = None,
        test: tuple[Any, Any] | None = None,
        seed: int = 0,
        classes: int | Sequence[Any] | None = None,
        task: str | None = None,
        scores: Sequence[Any] = (),
        topology: Topology | None = None,
        faults: Sequence[Fault] = (),
        participation: float = 1.0,
        compression: Compression | None = None,
        safeguard: bool | Safeguard = False,
        clock: Clock | None = None,
        watchers: Sequence[Watcher] = (),
    ) -> None:
        agents, seed, protocol = as_agents(agents), as_seed(seed), as_protocol(protocol)
        check_pair(test, "The test set")
        for agent in agents:
            check_pair(agent._test, f"The test data of agent '{agent.name}'")
        encoding = agree_on_all_labels(agents, test, classes, task)
        classes = encoding.classes
        shared = None if public is None else as_public_data(public, seed)
        columns, notes = agree_on_all_columns(agents, test, shared)
        for agent in agents:
            agent.settle(classes, encoding, columns)
        if shared is not None:
            shared.order_columns(columns)
        tested = None if test is None else encoded_samples(*test, encoding, "the test set", columns)
        check_shapes(agents, tested, shared)
        samples = sum(len(agent.shard) for agent in agents)
        if protocol.pools_data:
            _pool(agents, encoding)
        names = [agent.name for agent in agents]
        if topology is not None:
            check_topology(topology, names, protocol)
        topology = topology or KINDS[protocol.topology](names)
        self.description = RunDescription(
            protocol=protocol,
            topology=topology,
            classes=classes,
            seed=seed,
            plan=Plan(),
            faults=Faults(faults, names, seed, participation),
            agents=tuple(agents),
            hub=Hub() if topology.hub else None,
            public=shared,
            test=tested,
            samples=samples,
            shape=agents[0].shape,
            compression=as_compression(compression),
            safeguard=as_safeguard(safeguard),
            watchers=tuple(watchers),
            encoding=encoding,
            clock=as_clock(clock, protocol, names),
            columns=columns,
            notes=tuple(notes),
        ).introduce()
        self.description = replace(self.description, scores=_scores(self.description, scores))
        check_abilities(agents, protocol, shared)

    @property
    def agents(self) -> tuple[Agent, ...]:
        """The agents, in the order in which they were given."""
        return self.description.agents

    @property
    def protocol(self) -> Protocol:
        """The protocol by which they learn."""
        return self.description.protocol

    @property
    def topology(self) -> Topology:
        """Who speaks to whom."""
        return self.description.topology

    @property
    def public(self) -> PublicData | None:
        """The public data that all agents share."""
        return self.description.public

    @property
    def test(self) -> tuple[np.ndarray, np.ndarray] | None:
        """The common test set."""
        return self.description.test

    @property
    def classes(self) -> int:
        """How many classes there are."""
        return self.description.classes

    @property
    def hub(self) -> Hub | None:
        """The hub, where the topology has one."""
        return self.description.hub

    @property
    def faults(self) -> Faults:
        """The faults that are injected, and who takes part in a round."""
        return self.description.faults

    @property
    def compression(self) -> Compression | None:
        """How messages are compressed."""
        return self.description.compression

    @property
    def seed(self) -> int:
        """The seed from which all randomness derives."""
        return self.description.seed

    @checked_arguments
    def run(
        self,
        rounds: int = 10,
        *,
        runtime: str = "processes",
        workers: int | None = None,
        device: str = CPU,
        idle: str = "memory",
        network: Network | None = None,
        ray: RayCluster | None = None,
        node_logs: str | None = None,
        evaluate_every: int = 1,
        evaluate_samples: int | None = None,
        evaluate_agents: str = "all",
        alone: bool = True,
        folder: str | Path | None = None,
        resume: bool = False,
        checkpoint_every: int = 1,
        features_at: Sequence[int] = (),
        progress: bool = True,
        observers: Sequence[Any] = (),
    ) -> Result:
        """Run the rounds; with a `folder`, metrics and checkpoints are kept there and `resume` goes on.

        `runtime`: "processes", "simulation", "network" (one process per node, real sockets and mutual TLS on this
        machine) or "ray" (on the nodes of a Ray cluster, see docs/how-to/cluster.md); the results are equal to the bit.
        `device`: where torch modules compute that do not say it themselves: "cpu", "cuda", "cuda:1", "mps" or "auto".
        `idle` = "disk" keeps models of agents that are not at work in files, for thousands of agents; `evaluate_agents`
        = "present" evaluates those that took part. `alone` also trains a copy of every agent alone, so that the gain is
        known. `features_at`: rounds after which the agents' features on 200 common test samples are kept, for a map in
        the report (not in the network, where they stay with the agents). `observers`: objects with any of the methods
        `started`, `evaluated`, `round_ended`, `finished`, called in this process with the records of
        `codistill.results.records`; a true value from `round_ended` stops the run after that round. For the network:
        `network` has its timeouts, and with `node_logs` ("text" or "json") every node writes its events to standard
        error. For a Ray cluster: `ray` says which, and what each agent or host needs there.
        """
        if not isinstance(alone, bool):
            raise RecipeError(
                "alone must be true or false.",
                f"{alone!r}"[:80],
                "What agents do alone is said by the protocol: define alone() in it.",
            )
        plan = Plan(
            rounds=rounds, evaluate_every=evaluate_every, evaluate_samples=evaluate_samples,
            evaluate_agents=evaluate_agents, baseline=alone, checkpoint_every=checkpoint_every,
            features_at=tuple(features_at) if isinstance(features_at, list) else features_at,  # type: ignore[arg-type]
        )  # fmt: skip
        check_setting(RuntimeOptions, "kind", runtime, "runtime")  # by the names of the arguments here
        check_setting(RuntimeOptions, "workers", workers, "workers")
        check_setting(RuntimeOptions, "idle", idle, "idle")
        options = RuntimeOptions(
            kind=runtime, workers=workers, device=device, idle=idle, checkpoint_every=checkpoint_every
        )
        description = replace(self.description, plan=plan)
        if options.kind == "network":
            plan.check_for_network()
        check_features(description)
        watching = check_observers(observers)
        for name, given, kind in (
            ("ray", ray, "ray"),
            ("network", network, "network"),
            ("node_logs", node_logs, "network"),
        ):
            if given is not None and options.kind != kind:
                raise RecipeError(
                    f"{name} is for the runtime '{kind}'.",
                    f"{name}=..., runtime='{options.kind}'",
                    f'Add runtime="{kind}", or leave {name} out.',
                )
        self._check_start(options, resume=resume, has_folder=folder is not None)
        return run_on_this_machine(
            description,
            options,
            network=network,
            ray=ray,
            node_logs=node_logs,
            folder=None if folder is None else Path(folder),
            resume=resume,
            progress=progress,
            observers=watching,
        )

    def _check_start(self, options: RuntimeOptions, *, resume: bool, has_folder: bool) -> None:
        if resume and not has_folder:
            raise RecipeError("To resume, a run needs its folder.", "no folder", "Pass folder=... as well.")
        if options.kind in ("network", "ray") and self.protocol.pools_data:
            raise RecipeError(
                f"{self.protocol.name} pools the data of all agents, which never leave their processes here.",
                self.protocol.name,
                "Run it in the runtime 'simulation', as a baseline.",
            )
        check_clock_runtime(self.description.clock, options.kind)
        if options.kind == "ray" and self.description.watchers:
            raise RecipeError(
                "watchers are called where messages are sent: in a Ray cluster in other processes, mostly elsewhere.",
                f"{len(self.description.watchers)} of them, in the runtime 'ray'",
                "Use the runtime 'simulation', where all messages pass this process; the messages are the same.",
            )
        used = [agent.name for agent in self.agents if agent.learned]
        if used and not resume:
            raise RecipeError(
                "A run must start with agents that have not been in a run yet, or its figures mean nothing.",
                f"'{used[0]}' has learned in an earlier run",
                "Make new agents with new models; or keep runs in a folder=... and go on with resume=True.",
            )


def _scores(description: RunDescription, asked: Sequence[Any]) -> tuple[Score, ...]:
    """The scores that were asked for, tried on the labels of a test set."""
    tests = [description.test, *(agent.test for agent in description.agents)]
    y = next((test[1] for test in tests if test is not None), None)
    names = None if description.encoding is None else description.encoding.names
    return as_scores(asked, description.task, description.classes, names, y)


def _pool(agents: Sequence[Agent], encoding: LabelEncoding) -> None:
    labelled = all(agent.shard.labels is not None for agent in agents)
    targets = [np.asarray(agent.shard.labels if labelled else agent.shard.targets) for agent in agents]
    raw = [Shard(agent._data[0], y, encoding.classes, agent.name).x for agent, y in zip(agents, targets, strict=True)]
    x, y = np.concatenate(raw), np.concatenate(targets)
    for agent in agents:
        agent.shard = Shard(agent.prepared.fit(x), y, encoding.classes, agent.name)
        agent.settle_test(encoding)
