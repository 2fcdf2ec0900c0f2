"""The hub of a federation between machines, from Python and from the command line; see `joining` for an agent.

    # on the hub's machine                                      # on an agent's machine
    cd.serve(cd.FedMD(), ["north", "south"], classes=2,         cd.join(cd.Agent("north", model, x, y), "hub.org:7447",
             public=u, listen="0.0.0.0:7447", certs="certs/hub")        public=u, certs="certs/north")

Both block until the run is over; with `background=True` each runs in a process of its own and returns a handle.
Certificates are made by `codistill certs`, or from Python:

    from codistill.certs.authority import Authority
    authority = Authority("certs"); authority.create()
    authority.issue("hub", "hub.org"); authority.issue("agent", "north")
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from codistill.arguments import checked_arguments
from codistill.certs.credentials import Credentials
from codistill.clock import Clock
from codistill.data.labels import (
    CLASSIFICATION,
    REGRESSION,
    LabelEncoding,
    agree_on_labels,
    check_task,
    has_several_labels,
    is_one_hot,
    several_labels,
)
from codistill.data.named_columns import agree_on_columns
from codistill.data.shard import PublicData
from codistill.data.validation import encoded_samples
from codistill.errors import RecipeError
from codistill.faults import Fault, Faults
from codistill.federation.checks import (
    as_classes,
    as_compression,
    as_count,
    as_names,
    as_protocol,
    as_public_data,
    as_seed,
    check_pair,
    check_topology,
)
from codistill.federation.clock_checks import as_clock, check_clock_runtime
from codistill.federation.nodes import BackgroundNode, check_has_hub, check_no_pooling, credentials_for, open_store
from codistill.federation.result import Result
from codistill.federation.run_facts import write_facts
from codistill.files import own_folder
from codistill.hub import Hub
from codistill.protocol import Protocol
from codistill.results.outputs import Outputs
from codistill.results.scores import as_scores
from codistill.runtimes.description import RunDescription, shared_columns
from codistill.runtimes.forked import Channel, ForkedProcess, ForkedRuntime
from codistill.runtimes.interrupt import GentleInterrupt
from codistill.runtimes.network.event_log import HEALTH, EventLog
from codistill.runtimes.network.opening import open_hub, run_name
from codistill.runtimes.network.options import Network
from codistill.runtimes.observers import check_observers
from codistill.runtimes.observers.progress import Progress
from codistill.runtimes.plan import Plan
from codistill.runtimes.running import Outcome, run
from codistill.runtimes.runtime import Runtime, ShouldStop, never
from codistill.runtimes.store import RunFolder
from codistill.topology import HUB, KINDS, Topology
from codistill.wire.compression import Compression


@checked_arguments
def serve(
    protocol: Protocol,
    agents: Sequence[str],
    *,
    classes: int | Sequence[Any],
    listen: str,
    rounds: int = 10,
    certs: str | Path | None = None,
    insecure: bool = False,
    public: Any = None,
    test: tuple[Any, Any] | None = None,
    task: str | None = None,
    scores: Sequence[str] = (),
    seed: int = 0,
    faults: Sequence[Fault] = (),
    participation: float = 1.0,
    compression: Compression | None = None,
    clock: Clock | None = None,
    network: Network | None = None,
    evaluate_every: int = 1,
    evaluate_samples: int | None = None,
    alone: bool = True,
    checkpoint_every: int = 1,
    folder: str | Path | None = None,
    progress: bool = True,
    log: bool = True,
    observers: Sequence[Any] = (),
    background: bool = False,
) -> Result | BackgroundNode:
    """Run a federation as its hub: wait for the agents of these names, run the rounds, return the `Result`.

    `classes`: how many there are, or their names where the agents' labels are not 0, 1, 2 and so on; 1 for one real
    value. `task`: "regression" where there are several real values. `scores`: what the agents measure, by name.
    `public` must be the same on every node. With a `folder` metrics and checkpoints are kept there, and a run that is
    there goes on. `observers` as in `Federation.run`; with `background` they are called in the process of the hub.
    `log`: tell on standard error what happens. With `clock=Clock(asynchronous=True)` agents go on at their own
    pace, and `rounds` counts periods of `clock.period` seconds.
    """
    description = describe_hub(
        protocol, agents, classes=classes, task=task, scores=scores, public=public, test=test, seed=seed,
        faults=faults, participation=participation, compression=compression, clock=clock,
        plan=Plan(
            rounds=rounds, evaluate_every=evaluate_every, evaluate_samples=evaluate_samples, baseline=bool(alone),
            checkpoint_every=checkpoint_every,
        ),
    )  # fmt: skip
    own = credentials_for("hub", [listen], certs, insecure=insecure)
    node = HubNode(
        description, listen, own, network or Network(), None if folder is None else Path(folder),
        tuple(check_observers(observers)), progress=progress, quiet=not log,
    )  # fmt: skip
    if background:
        return BackgroundNode(ForkedProcess(HUB, node.work), node.result_from)
    return node.run_apart()


def describe_hub(
    protocol: Protocol,
    agents: Sequence[str],
    *,
    classes: int | Sequence[Any],
    plan: Plan,
    task: str | None = None,
    scores: Sequence[str] = (),
    public: Any = None,
    test: tuple[Any, Any] | None = None,
    seed: int = 0,
    topology: Topology | None = None,
    faults: Sequence[Fault] = (),
    participation: float = 1.0,
    compression: Compression | None = None,
    clock: Clock | None = None,
) -> RunDescription:
    """The description of a run whose agents hold their data, as its hub (or a peer without its agent) has it."""
    protocol, names, seed = as_protocol(protocol), as_names(agents), as_seed(seed)
    check_pair(test, "The test set")
    encoding = _encoding(classes, task, test)
    if topology is not None:
        check_topology(topology, names, protocol)
    topology = topology or KINDS[protocol.topology](names)
    shared = public if isinstance(public, PublicData) or public is None else as_public_data(public, seed)
    if protocol.needs_public and shared is None:
        raise RecipeError(
            f"{protocol.name} needs public data on every node.", "none", "Pass the same public=... everywhere."
        )
    check_clock_runtime(clock, "network")
    columns, notes = agree_on_columns((), shared_columns(test, shared))
    if shared is not None:
        shared.order_columns(columns)
    made = RunDescription(
        protocol=protocol,
        topology=topology,
        classes=encoding.classes,
        seed=seed,
        plan=plan,
        faults=Faults(faults, names, seed, participation),
        hub=Hub() if topology.hub else None,
        public=shared,
        test=None if test is None else encoded_samples(*test, encoding, "the test set", columns),
        compression=as_compression(compression),
        clock=as_clock(clock, protocol, names),
        encoding=encoding,
        columns=columns,
        notes=tuple(notes),
    ).introduce()
    unnamed = [one for one in ([scores] if isinstance(scores, str) else scores) if not isinstance(one, str)]
    if unnamed:
        raise RecipeError(
            "A hub asks its agents for scores by name.", f"{unnamed[0]!r}"[:80], "Measure it in a simulation."
        )
    return replace(made, scores=as_scores(scores, made.task, made.classes))


def _encoding(given: Any, task: str | None, test: tuple[Any, Any] | None) -> LabelEncoding:
    """What a hub without the agents' labels knows of them."""
    check_task(task)
    classes = as_classes(given)
    if isinstance(classes, list):
        return agree_on_labels((), classes=classes, task=task or CLASSIFICATION)
    counted = as_count(classes, "classes")
    if task is None and test is not None and has_several_labels(test[1]):
        raise several_labels("the test set", test[1])
    real = counted == 1 if test is None else np.ndim(test[1]) == 2 and not is_one_hot(test[1])
    return LabelEncoding(task or (REGRESSION if real else CLASSIFICATION), counted)


@dataclass(frozen=True)
class HubNode:
    """A hub with all that it needs to run."""

    description: RunDescription
    listen: str
    own: Credentials | None
    network: Network
    folder: Path | None = None
    observers: tuple[Any, ...] = ()
    progress: bool = True
    log_format: str = "text"
    quiet: bool = False

    def __post_init__(self) -> None:
        check_no_pooling(self.description.protocol)
        check_has_hub(self.description.protocol, self.description.topology)

    def run_here(self, should_stop: ShouldStop = never) -> Outcome:
        """Run it in this process, which can fork no node afterwards."""
        log = self._log()
        with ExitStack() as stack:
            store = self._store(stack)
            hub = open_hub(self.description.of_hub(), self.network, self.own, self.listen, log, run_name(self.folder))
            return self._run(hub, log, store, should_stop)

    def run_apart(self) -> Result:
        """Run the rounds here, with the connections in a process of their own."""
        own, log = self.description.of_hub(), EventLog(HUB, form=self.log_format, quiet=self.quiet)
        with ExitStack() as stack:
            interrupt = stack.enter_context(GentleInterrupt())
            store, name = self._store(stack), run_name(self.folder)
            runtime = ForkedRuntime(
                HUB,
                own,
                lambda: open_hub(own, self.network, self.own, self.listen, self._log(), name),
            )
            return self._result(self._run(runtime, log, store, lambda: interrupt.asked))

    def work(self, channel: Channel, should_stop: ShouldStop) -> None:
        """Run it in a process of its own, and hand over the results."""
        outcome = self.run_here(should_stop)
        channel.send(
            done=outcome.done, complete=outcome.complete, rows=outcome.rows, baseline_rows=outcome.baseline_rows,
            outputs=None if outcome.outputs is None else outcome.outputs.encode(), seconds=outcome.seconds,
            events=list(outcome.events),
        )  # fmt: skip

    def result_from(self, content: Mapping[str, Any]) -> Result:
        """The results that were handed over."""
        outputs = None if content["outputs"] is None else Outputs.decode(content["outputs"])
        return self._result(Outcome(**{**content, "outputs": outputs, "events": tuple(content["events"])}))

    def _result(self, outcome: Outcome) -> Result:
        return Result(
            self.description.of_hub(), outcome.rows, outcome.baseline_rows, outcome.outputs, outcome.seconds,
            interrupted=not outcome.complete, events=outcome.events,
        )  # fmt: skip

    def _log(self) -> EventLog:
        health = None if self.folder is None else self.folder / HEALTH
        return EventLog(HUB, form=self.log_format, health=health, quiet=self.quiet)

    def _store(self, stack: ExitStack) -> RunFolder | None:
        if self.folder is None:
            return None
        own_folder(self.folder, 0o755)
        store = open_store(self.folder, stack)
        write_facts(self.folder, self.description.of_hub())
        return store

    def _run(self, runtime: Runtime, log: EventLog, store: RunFolder | None, should_stop: ShouldStop) -> Outcome:
        open_to_all = "" if self.own else ", without certificates: anyone who gets there can join"
        log.tell(f"listens at {self.listen}{open_to_all}")
        shown = [Progress()] if self.progress and self.log_format == "text" else []
        return run(
            runtime.description, runtime, store=store, observers=[log, *shown, *self.observers],
            should_stop=should_stop,
        )  # fmt: skip
