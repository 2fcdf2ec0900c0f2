"""A federation: agents, a protocol and what they share, checked before anything runs; and its runs from here."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from codistill.core.devices import AUTO, CPU, check_fork
from codistill.core.errors import RecipeError
from codistill.core.settings import clear_argument_errors, from_table, takes_fields
from codistill.core.spec import RunSpec
from codistill.core.text import bytes_text
from codistill.data.labels import LabelEncoding
from codistill.data.shard import PublicData, Shard
from codistill.engine.description import RunDescription, agree_on_all_columns
from codistill.engine.exchange import Watcher
from codistill.engine.observers import Progress, check_observers
from codistill.engine.placement import IdleStates, devices_by_name, devices_of, place_agents
from codistill.engine.runtime import Outcome, Runtime, Stopped, run
from codistill.engine.safeguard import Safeguard, as_safeguard
from codistill.engine.store import BASELINE, RunFolder
from codistill.federation.checks import (
    agree_on_all_labels,
    as_agents,
    as_clock,
    as_compression,
    as_protocol,
    as_public_data,
    as_seed,
    as_topology,
    as_validation,
    check_abilities,
    check_pair,
    check_shapes,
    checked_run,
)
from codistill.federation.result import NOT_BEGUN, Result, open_store, write_devices
from codistill.nodes.agent import Agent, Hub
from codistill.nodes.clock import Clock
from codistill.nodes.faults import Fault, Faults
from codistill.nodes.record import record_of
from codistill.protocol import Protocol
from codistill.results.records import Row, RunStarted
from codistill.results.scores import as_scores
from codistill.runtimes.ray_cluster import RayCluster, joined
from codistill.runtimes.simulation import AsynchronousSimulation, LocalRuntime
from codistill.runtimes.workers import GentleInterrupt, Processes, default_workers
from codistill.topology import Topology
from codistill.wire.compression import Compression

if TYPE_CHECKING:
    from codistill.network.options import Network
    from codistill.runtimes.ray_runtime import RayHosts


class Federation:
    """Agents that learn from one another by a protocol.

    `public` are unlabelled samples that all agents share, `test` the common test set (samples, labels). `task`:
    "classification" or "regression", where the labels do not tell. `classes`: how many there are, or their names.
    `scores`: what is measured, the most important first: scikit-learn's names, a `Score`, or a function (y, answers).
    `validation`: the share of its own samples that each agent holds out. Nobody learns from them; every evaluation
    measures on them, too, and the result has the best round by them. Everything is checked here; `run` then only runs.
    """

    @clear_argument_errors
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
        validation: float = 0.0,
        clock: Clock | None = None,
        watchers: Sequence[Watcher] = (),
    ) -> None:
        agents, seed, protocol = as_agents(agents), as_seed(seed), as_protocol(protocol)
        validation = as_validation(validation)
        check_pair(test, "The test set")
        for agent in agents:
            check_pair(record_of(agent).given_test, f"The test data of agent '{agent.name}'")
        encoding = agree_on_all_labels(agents, test, classes, task)
        classes = encoding.classes
        shared = None if public is None else as_public_data(public, seed)
        columns = agree_on_all_columns(agents, protocol, test, shared)
        for agent in agents:
            record_of(agent).validation_split = validation, seed
            record_of(agent).encode_labels(classes, encoding, columns.columns)
        columns.take_public(shared)
        tested = columns.take_test(test, encoding)
        if not columns.own:
            check_shapes(agents, tested, shared)
        samples = sum(len(agent.shard) for agent in agents)
        if protocol.pools_data:
            _pool(agents, encoding)
        names = [agent.name for agent in agents]
        topology = as_topology(topology, names, protocol)
        self.description = RunDescription(
            protocol=protocol,
            topology=topology,
            classes=classes,
            seed=seed,
            faults=Faults(faults, names, seed, participation),
            agents=tuple(agents),
            hub=Hub() if topology.hub else None,
            public=shared,
            test=tested,
            samples=samples,
            shape=None if columns.own else record_of(agents[0]).shape,
            compression=as_compression(compression),
            safeguard=as_safeguard(safeguard),
            validation=validation,
            watchers=tuple(watchers),
            encoding=encoding,
            clock=as_clock(clock, protocol, names),
            columns=columns.columns,
            notes=columns.notes,
        ).bind_nodes()
        tests = [tested, *(record_of(agent).test for agent in agents)]
        y = next((test[1] for test in tests if test is not None), None)  # tried on: labels of any test set
        measured = as_scores(scores, self.description.task, classes, encoding.names, y)
        self.description = replace(self.description, scores=measured)
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

    @takes_fields(RunSpec)
    def run(
        self,
        rounds: int = RunSpec.rounds,
        *,
        folder: str | Path | None = None,
        resume: bool = False,
        progress: bool = True,
        observers: Sequence[Any] = (),
        network: Network | None = None,
        ray: RayCluster | None = None,
        node_logs: str | None = None,
        **options: Any,
    ) -> Result:
        """Run the rounds; with a `folder`, metrics and checkpoints are kept there and `resume` goes on.

        `options` are the fields of `codistill.core.spec.RunSpec`, see docs/recipes.md. The results are equal to the bit
        in every `runtime`: "processes", "simulation", "network" (one process per node, real sockets and mutual TLS on
        this machine) and "ray" (on the nodes of a Ray cluster, see docs/how-to/cluster.md).
        `observers`: objects with any of the methods `started`, `evaluated`, `round_ended`, `finished`, called in this
        process with the records of `codistill.results.records`; a true value from `round_ended` stops the run after
        that round. For the network: `network` has its timeouts, and with `node_logs` ("text" or "json") every node
        writes its events to standard error. For a Ray cluster: `ray` says which, and what each agent or host needs.
        """
        spec: RunSpec = from_table(RunSpec, {"rounds": rounds, **options}, "run")
        watching = check_observers(observers)
        for name, given in (("ray", ray), ("network", network), ("node_logs", node_logs)):
            runtime = "ray" if name == "ray" else "network"
            if given is not None and spec.runtime != runtime:
                raise RecipeError(
                    f"{name} is for the runtime '{runtime}'.",
                    f"{name}=..., runtime='{spec.runtime}'",
                    f'Add runtime="{runtime}", or leave {name} out.',
                )
        description = checked_run(self.description, spec)
        if resume and folder is None:
            raise RecipeError("To resume, a run needs its folder.", "no folder", "Pass folder=... as well.")
        used = [agent.name for agent in self.agents if record_of(agent).learned]
        if used and not resume:
            raise RecipeError(
                "A run must start with agents that have not been in a run yet, or its figures mean nothing.",
                f"'{used[0]}' has learned in an earlier run",
                "Make new agents with new models; or keep runs in a folder=... and go on with resume=True.",
            )
        return run_on_this_machine(
            description, network=network, ray=ray, node_logs=node_logs, folder=None if folder is None else Path(folder),
            resume=resume, progress=progress, observers=watching,
        )  # fmt: skip


def _pool(agents: Sequence[Agent], encoding: LabelEncoding) -> None:
    labelled = all(agent.shard.labels is not None for agent in agents)
    targets = [np.asarray(agent.shard.labels if labelled else agent.shard.targets) for agent in agents]
    raw = [
        Shard(record_of(agent).training_samples(), y, encoding.classes, agent.name).x
        for agent, y in zip(agents, targets, strict=True)
    ]
    y = np.concatenate(targets)
    for agent in agents:
        record = record_of(agent)
        # Codes mean nothing to others: each agent encodes the frames of all.
        x = np.concatenate(
            [each if other is agent or not record.is_coded else record.own_columns(record_of(other).given_frame(), "x")
             for other, each in zip(agents, raw, strict=True)]
        )  # fmt: skip
        agent.shard = Shard(record_of(agent).prepared.fit(x), y, encoding.classes, agent.name)
        record_of(agent).prepare_validation()
        record_of(agent).encode_test(encoding)


# --- a run from this machine: its folder, the baseline of agents alone, and then the run itself


def run_on_this_machine(
    description: RunDescription,
    *,
    network: Network | None = None,
    ray: RayCluster | None = None,
    node_logs: str | None = None,
    folder: Path | None = None,
    resume: bool = False,
    progress: bool = True,
    observers: Sequence[Any] = (),
) -> Result:
    """Run what is described; `observers` watch the run itself, not the baseline."""
    spec, began = description.spec, time.monotonic()
    outcome = NOT_BEGUN
    alone_rows: list[Row] | None = None

    def result() -> Result:
        alone = outcome.baseline_rows if spec.runtime == "network" else alone_rows
        return Result(description, replace(outcome, seconds=time.monotonic() - began), alone)

    with ExitStack() as stack:
        if spec.runtime == "ray":
            chosen = _ray_options(description, ray)
            # First: Ray has a handler for SIGTERM, which is replaced below.
            stack.enter_context(joined(chosen.address, output=chosen.output))
        else:
            agents = len(description.agents)
            workers = min(spec.workers or default_workers(agents), agents)
            processes = {"simulation": 1, "network": agents}.get(spec.runtime, workers)
            place_agents(description, spec.device, processes)
        interrupt = stack.enter_context(GentleInterrupt())
        # Locked first and until the end: no other process may write there meanwhile.
        store = open_store(folder, stack, description, resume=resume)
        hosts: RayHosts | None = None
        if spec.runtime == "ray":
            from codistill.runtimes.ray_runtime import RayHosts

            hosts = RayHosts(
                description, chosen, workers=spec.workers, device=spec.device, on_disk=spec.idle == "disk",
                should_stop=lambda: interrupt.asked,
            )  # fmt: skip
            stack.enter_context(hosts)
            try:
                hosts.survive(lambda: None)  # which opens them
            except Stopped:
                return result()
        if store is not None:
            write_devices(store.folder, devices_by_name(description.agents) if hosts is None else hosts.devices)
        if len(description.agents) >= MANY and spec.runtime not in ("network", "ray"):
            need = memory_need(description, saves=folder is not None)
            print(f"note: {need.sentence(spec.idle)}.", file=sys.stderr)
        watching = [Notes(), *([] if hosts is None else [hosts])]

        def outcome_of(
            this: RunDescription, home: Path | None, store: RunFolder | None, observers: Sequence[Any] = ()
        ) -> Outcome | None:
            shown = [*([Progress()] if progress else []), *watching, *observers]

            def attempt() -> Outcome:
                runtime = _make_runtime(this, home, network, node_logs, hosts, baseline=this is not description)
                return run(
                    runtime.description, runtime, store=store, observers=shown, should_stop=lambda: interrupt.asked,
                    alone_rows=alone_rows,
                )  # fmt: skip

            with suppress(Stopped):
                return attempt() if hosts is None else hosts.survive(attempt)
            return None

        baseline = description.baseline() if spec.alone and spec.runtime != "network" else None
        if baseline is not None:
            check_abilities(baseline.agents, baseline.protocol, None)
            beside = None if folder is None else folder / BASELINE
            alone = outcome_of(baseline, beside, open_store(beside, stack, resume=resume))
            alone_rows = None if alone is None else alone.rows
        if not interrupt.asked:
            for agent in description.agents:
                record_of(agent).learned = True
            outcome = outcome_of(description, folder, store, observers) or NOT_BEGUN
    return result()


def _ray_options(description: RunDescription, given: RayCluster | None) -> RayCluster:
    """The settings of a run in a Ray cluster, which shows an agent the GPUs that it was asked for, and no others."""
    chosen = given or RayCluster()
    default = description.spec.device
    wishes = {agent.name: getattr(agent.learner, "device", None) or default for agent in description.agents}
    on_gpu = [name for name, device in wishes.items() if device not in (AUTO, CPU)]
    if on_gpu and chosen.gpus_per_host is None and chosen.gpus_per_agent is None:
        raise RecipeError(
            "In a Ray cluster, agents that compute on a GPU must ask for one.",
            f"device = '{wishes[on_gpu[0]]}' of agent '{on_gpu[0]}', and no gpus_per_agent in [ray]",
            "Add gpus_per_agent, such as 0.25: then four agents share a GPU.",
        )
    return chosen


class Notes:
    """Prints notes about a resumed run on standard error."""

    def started(self, record: RunStarted) -> None:
        for note in record.notes:
            print(f"note: {note}", file=sys.stderr)


# The memory estimate before a run: by the sizes of models, optimisers, agents and rounds.

MANY = 100  # agents from which on the memory of a run is estimated
_ROW = 1000  # bytes of a row of the metrics in memory
_AT_WORK = 4  # weights beside a model's own that an agent at work has: gradients, two messages, the round's start
_CHECKPOINT = 3  # copies of all states while a checkpoint of states in memory is written


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes of memory: what this process holds, what a run adds at its peak, and what there is; None: unknown."""

    held: int | None
    added: int
    available: int | None

    def sentence(self, idle: str) -> str:
        """What is expected and, where that is too much, what to do."""
        held = "" if self.held is None else f"this process holds {bytes_text(self.held)}, and "
        text = f"memory: {held}the run adds about {bytes_text(self.added)} at its peak"
        if self.available is None:
            return text
        text += f"; {bytes_text(self.available)} are available"
        if self.added <= self.available:
            return text
        disk = 'keep agents that are not at work on disk (runtime.idle = "disk", in Python idle="disk"), ' * (
            idle == "memory"
        )
        return f"{text}. That is too much: {disk}let fewer agents take part in a round, or use fewer or smaller models"


def memory_need(description: RunDescription, *, saves: bool) -> MemoryNeed:
    """What a run with all agents at hand will need; `saves`: whether it writes checkpoints."""
    spec, agents = description.spec, description.agents
    sizes = [agent.learner.memory() for agent in agents]
    copies = 3 if description.safeguard is not None else 1  # of a model: two more that learn alone
    weights = copies * sum(size for size, _ in sizes)
    moments = copies * sum(size for _, size in sizes)
    share = description.faults.participation
    added = int(share * (_AT_WORK * weights + 2 * moments)) + _ROW * len(agents) * spec.rounds
    if spec.idle == "memory":
        worked = min(1.0, share * spec.rounds)  # the share of agents that have worked by the end, at most
        states = weights + int(worked * moments)
        # Models of agents that work are no longer shared with the processes that were forked.
        added += int(worked * moments) + (states if spec.runtime == "processes" else 0)
        added += _CHECKPOINT * states if saves and spec.checkpoint_every else 0
    if spec.alone and description.baseline_protocol is not None:
        added += weights + (moments if spec.idle == "memory" else 0)  # copies of all agents, trained alone
    return MemoryNeed(_told_by_system("/proc/self/status", "VmRSS:"), added, _available())


def _available() -> int | None:
    """Bytes that processes may still take, where the system tells: of the machine, or of its container."""
    free = _told_by_system("/proc/meminfo", "MemAvailable:")
    try:
        limit, used = (int(Path(f"/sys/fs/cgroup/memory.{name}").read_text()) for name in ("max", "current"))
    except (OSError, ValueError):  # no container, or one without a limit
        return free
    return limit - used if free is None else min(free, limit - used)


def _told_by_system(file: str, key: str) -> int | None:
    """Bytes, from a line such as "VmRSS: 12 kB"."""
    try:
        lines = Path(file).read_text().splitlines()
        return next((1024 * int(line.split()[1]) for line in lines if line.startswith(key)), None)
    except (OSError, ValueError):
        return None


def _make_runtime(
    description: RunDescription,
    folder: Path | None,
    network: Network | None,
    node_logs: str | None,
    hosts: RayHosts | None,
    *,
    baseline: bool,
) -> Runtime:
    """The runtime of a run, or of its `baseline` of agents alone; `hosts`: in a Ray cluster."""
    spec = description.spec
    idle: IdleStates | None = None  # where states of agents are kept that are not at work; None: in memory
    if spec.idle == "disk":
        if spec.runtime not in ("simulation", "processes", "ray") or description.asynchronous:
            raise RecipeError(
                "idle = \"disk\" is for the rounds of the runtimes 'simulation', 'processes' and 'ray'.",
                "a run without rounds" if description.asynchronous else f"the runtime '{spec.runtime}'",
                'Remove idle, or choose runtime.kind = "processes".',
            )
        idle = IdleStates(folder, description.topology.names)
    if hosts is not None:
        return hosts.runtime(description, idle, baseline=baseline)
    if description.asynchronous and spec.runtime == "simulation":
        return AsynchronousSimulation(description)
    # Pooling data is for a baseline, and never leaves this process.
    if spec.runtime == "simulation" or description.protocol.pools_data:
        return LocalRuntime(description, idle)
    check_fork(devices_of(description.agents), spec.runtime)
    if spec.runtime == "processes":
        return Processes(description, spec.workers, idle)
    from codistill.network.local import local_network

    return local_network(description, folder=folder, network=network, logs=node_logs)
