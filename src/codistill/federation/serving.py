"""The hub of a federation between machines, from Python and from the command line; see `joining` for an agent.

Both block until the run is over; with `background=True` each runs in a process of its own and returns a handle.
docs/how-to/network.md shows examples, also of making certificates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from codistill.certs.credentials import Credentials
from codistill.core.errors import NetworkError, RecipeError
from codistill.core.files import own_folder
from codistill.core.settings import from_table, takes_fields
from codistill.core.spec import NOT_BY_HUB, RunSpec
from codistill.data.frame_encoding import non_numeric
from codistill.data.frames import agree_on_columns, as_frame
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
from codistill.data.shard import PublicData
from codistill.engine.description import RunDescription, SharedColumns, shared_columns
from codistill.engine.observers import Progress, check_observers
from codistill.engine.runtime import Outcome, ShouldStop, never, run
from codistill.federation.checks import (
    as_classes,
    as_clock,
    as_compression,
    as_names,
    as_protocol,
    as_public_data,
    as_seed,
    as_topology,
    check_pair,
    checked_run,
)
from codistill.federation.result import Result, open_store
from codistill.network.hub import open_hub, run_name
from codistill.network.listener import split
from codistill.network.log import HEALTH, EventLog
from codistill.network.options import Network
from codistill.nodes.agent import Hub
from codistill.nodes.clock import Clock
from codistill.nodes.faults import Fault, Faults
from codistill.protocol import Protocol
from codistill.results.outputs import Outputs
from codistill.results.scores import as_scores
from codistill.runtimes.workers import Channel, ForkedProcess, GentleInterrupt
from codistill.topology import HUB, Topology
from codistill.wire.compression import Compression


@takes_fields(RunSpec, leave_out=NOT_BY_HUB)
def serve(
    protocol: Protocol,
    agents: Sequence[str],
    *,
    classes: int | Sequence[Any],
    listen: str,
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
    folder: str | Path | None = None,
    progress: bool = True,
    log: bool = True,
    observers: Sequence[Any] = (),
    background: bool = False,
    **options: Any,
) -> Result | BackgroundNode:
    """Run a federation as its hub: wait for the agents of these names, run the rounds, return the `Result`.

    `classes`: how many there are, or their names where the agents' labels are not 0, 1, 2 and so on; 1 for one real
    value. `task`: "regression" where there are several real values. `scores`: what the agents measure, by name.
    `public` must be the same on every node. With a `folder` metrics and checkpoints are kept there, and a run that is
    there goes on. `observers` as in `Federation.run`; with `background` they are called in the process of the hub.
    `log`: write what happens to standard error. With `clock=Clock(asynchronous=True)` agents go on at their own
    pace, and `rounds` counts periods of `clock.period` seconds.
    """
    description = describe_hub(
        protocol, agents, classes=classes, task=task, scores=scores, public=public, test=test, seed=seed,
        faults=faults, participation=participation, compression=compression, clock=clock,
        spec=from_table(RunSpec, options, "serve"),
    )  # fmt: skip
    own = credentials_for("hub", [listen], certs, insecure=insecure)
    node = HubNode(
        description, listen, own, network or Network(), None if folder is None else Path(folder),
        tuple(check_observers(observers)), progress=progress, quiet=not log,
    )  # fmt: skip
    if background:
        return BackgroundNode(ForkedProcess(HUB, node.work), node.result_from)
    with GentleInterrupt() as interrupt:
        outcome = node.run_here(lambda: interrupt.asked)
    return Result(node.description.of_hub(), outcome, outcome.baseline_rows)


def describe_hub(
    protocol: Protocol,
    agents: Sequence[str],
    *,
    classes: int | Sequence[Any],
    spec: RunSpec,
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
    topology = as_topology(topology, names, protocol)
    shared = public if isinstance(public, PublicData) or public is None else as_public_data(public, seed)
    if protocol.needs_public and shared is None:
        raise RecipeError(
            f"{protocol.name} needs public data on every node.", "none", "Pass the same public=... everywhere."
        )
    tested = None if test is None else as_frame(test[0])
    own = any(frame is not None and non_numeric(frame) for frame in (tested, None if shared is None else shared.frame))
    columns, notes = ((), []) if own else agree_on_columns((), shared_columns(test, shared))
    common = SharedColumns(columns, own, tuple(notes))
    common.take_public(shared)
    made = RunDescription(
        protocol=protocol,
        topology=topology,
        classes=encoding.classes,
        seed=seed,
        faults=Faults(faults, names, seed, participation),
        hub=Hub() if topology.hub else None,
        public=shared,
        test=common.take_test(test, encoding),
        compression=as_compression(compression),
        clock=as_clock(clock, protocol, names),
        encoding=encoding,
        columns=columns,
        notes=common.notes,
    ).bind_nodes()
    unnamed = [one for one in ([scores] if isinstance(scores, str) else scores) if not isinstance(one, str)]
    if unnamed:
        raise RecipeError(
            "A hub asks its agents for scores by name.", f"{unnamed[0]!r}"[:80], "Measure it in a simulation."
        )
    made = replace(made, scores=as_scores(scores, made.task, made.classes))
    return checked_run(made, replace(spec, runtime="network"))


def _encoding(given: Any, task: str | None, test: tuple[Any, Any] | None) -> LabelEncoding:
    """What a hub without the agents' labels knows of them."""
    check_task(task)
    classes = as_classes(given)
    if isinstance(classes, list):
        return agree_on_labels((), classes=classes, task=task or CLASSIFICATION)
    if task is None and test is not None and has_several_labels(test[1]):
        raise several_labels("the test set", test[1])
    real = classes == 1 if test is None else np.ndim(test[1]) == 2 and not is_one_hot(test[1])
    return LabelEncoding(task or (REGRESSION if real else CLASSIFICATION), classes)


def check_has_hub(protocol: Protocol, topology: Topology) -> None:
    if not topology.hub:
        raise NetworkError(
            "A hub is for protocols with a hub.",
            f"{protocol.name} on a topology of the kind {topology.kind}",
            "Start every agent by 'codistill join RECIPE --listen HOST:PORT --peer NAME=HOST:PORT'.",
        )


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
        check_has_hub(self.description.protocol, self.description.topology)

    def run_here(self, should_stop: ShouldStop = never) -> Outcome:
        health = None if self.folder is None else self.folder / HEALTH
        log = EventLog(HUB, form=self.log_format, health=health, quiet=self.quiet)
        with ExitStack() as stack:
            if self.folder is not None:
                own_folder(self.folder, 0o755)
            store = open_store(self.folder, stack, self.description.of_hub())
            hub = open_hub(self.description.of_hub(), self.network, self.own, self.listen, log, run_name(self.folder))
            open_to_all = "" if self.own else ", without certificates: anyone who gets there can join"
            log.tell(f"listens at {self.listen}{open_to_all}")
            shown = [Progress()] if self.progress and self.log_format == "text" else []
            return run(
                hub.description, hub, store=store, observers=[log, *shown, *self.observers], should_stop=should_stop
            )

    def work(self, channel: Channel, should_stop: ShouldStop) -> None:
        """Run it in a process of its own, and hand over the results."""
        outcome = self.run_here(should_stop)
        channel.send(
            done=outcome.done, complete=outcome.complete, rows=outcome.rows, baseline_rows=outcome.baseline_rows,
            outputs=None if outcome.outputs is None else outcome.outputs.encode(), seconds=outcome.seconds,
            events=list(outcome.events),
        )  # fmt: skip

    def result_from(self, content: Mapping[str, Any]) -> Result:
        outputs = None if content["outputs"] is None else Outputs.decode(content["outputs"])
        outcome = Outcome(**{**content, "outputs": outputs, "events": tuple(content["events"])})
        return Result(self.description.of_hub(), outcome, outcome.baseline_rows)


# What a hub and an agent between machines have in common: a process of their own, and certificates.


class BackgroundNode:
    """A hub or an agent in a process of its own."""

    def __init__(self, process: ForkedProcess, read: Callable[[Mapping[str, Any]], Any]) -> None:
        self._process, self._read = process, read
        self._result: Any = None

    @property
    def is_running(self) -> bool:
        """Whether it still takes part."""
        return self._result is None and self._process.is_alive

    def wait(self, timeout: float | None = None) -> Any:
        """Wait for the end: the `Result` of a hub, the trained agent of an agent; raises the error if it failed."""
        if self._result is None:
            if not self._process.channel.poll(timeout):
                raise TimeoutError(f"'{self._process.name}' still takes part after {timeout:g} s.")
            try:
                content = self._process.receive()
            finally:
                self._process.end()
            if content is None:
                raise self._process.killed()
            self._result = self._read(content)
        return self._result

    def wait_for_it(self) -> Any:
        """Wait for the end; Ctrl-C stops it gently."""
        with GentleInterrupt() as interrupt:
            asked = False
            while True:
                try:
                    return self.wait(0.2)
                except TimeoutError:
                    if interrupt.asked and not asked:
                        asked = True
                        self.stop()

    def stop(self) -> None:
        """Ask it to stop gently: a hub at the end of its round, an agent when its round counts."""
        self._process.stop()


def credentials_for(
    role: str, addresses: Sequence[str], certs: str | Path | None, *, insecure: bool
) -> Credentials | None:
    """The certificate of a node in a folder; None only with `insecure`."""
    for address in addresses:
        split(address)
    if (certs is None) != bool(insecure):
        raise NetworkError(
            "A federation between machines must use certificates, or say that it does not.",
            "both certs and insecure" if insecure else "no certs",
            "Make them by codistill.certs.authority.Authority or 'codistill certs', and pass certs=FOLDER; "
            "if anyone may read, join and forge: insecure=True.",
        )
    return None if certs is None else Credentials(Path(certs), role)
