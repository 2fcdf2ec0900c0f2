"""Federations between machines: the hub's side and an agent's side, from Python and from the command line.

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

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from codistill.agent import Agent, Hub
from codistill.certs.credentials import Credentials, read_credentials
from codistill.data.shard import PublicData
from codistill.data.validation import validate_samples
from codistill.errors import CodistillError, NetworkError, RecipeError
from codistill.faults import Fault, Faults
from codistill.federation.checks import (
    as_compression,
    as_count,
    as_names,
    as_protocol,
    as_public_data,
    as_seed,
    check_abilities,
    check_pair,
    check_shapes,
    check_topology,
)
from codistill.federation.result import Result, TrainedAgent
from codistill.files import locked, writing
from codistill.protocol import Protocol
from codistill.results.outputs import Outputs
from codistill.runtimes.description import RunDescription
from codistill.runtimes.forked import Channel, ForkedProcess, ForkedRuntime
from codistill.runtimes.interrupt import GentleInterrupt
from codistill.runtimes.network.addresses import split
from codistill.runtimes.network.connections import Connections
from codistill.runtimes.network.diagnosis import probe
from codistill.runtimes.network.event_log import HEALTH, EventLog
from codistill.runtimes.network.opening import check_neighbours, open_hub, open_peer, run_name
from codistill.runtimes.network.options import Network
from codistill.runtimes.network.remote_agent import RemoteAgent
from codistill.runtimes.network.terms import Terms, description_under, hello_of, terms_of
from codistill.runtimes.network.transport import Transport
from codistill.runtimes.observers import check_observers
from codistill.runtimes.observers.progress import Progress
from codistill.runtimes.plan import Plan
from codistill.runtimes.running import Outcome, run
from codistill.runtimes.runtime import Runtime, ShouldStop, load_nodes, never, save_nodes, warm_up
from codistill.runtimes.store import RunFolder
from codistill.topology import HUB, KINDS, Topology
from codistill.wire.compression import Compression

# --- a hub ------------------------------------------------------------------------------------------


def serve(
    protocol: Protocol,
    agents: Sequence[str],
    *,
    classes: int,
    listen: str,
    rounds: int = 10,
    certs: str | Path | None = None,
    insecure: bool = False,
    public: Any = None,
    test: tuple[Any, Any] | None = None,
    seed: int = 0,
    faults: Sequence[Fault] = (),
    participation: float = 1.0,
    compression: Compression | None = None,
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

    `classes`: how many there are, 1 for one real value. `public` must be the same on every node. With a `folder`
    metrics and checkpoints are kept there, and a run that is there goes on. `observers` as in `Federation.run`; with
    `background` they are called in the process of the hub. `log`: tell on standard error what happens.
    """
    description = describe_hub(
        protocol, agents, classes=classes, public=public, test=test, seed=seed, faults=faults,
        participation=participation, compression=compression,
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
    classes: int,
    plan: Plan,
    public: Any = None,
    test: tuple[Any, Any] | None = None,
    seed: int = 0,
    topology: Topology | None = None,
    faults: Sequence[Fault] = (),
    participation: float = 1.0,
    compression: Compression | None = None,
) -> RunDescription:
    """The description of a run whose agents hold their data, as its hub (or a peer without its agent) has it."""
    protocol, names, seed, classes = (
        as_protocol(protocol),
        as_names(agents),
        as_seed(seed),
        as_count(classes, "classes"),
    )
    check_pair(test, "The test set")
    if topology is not None:
        check_topology(topology, names, protocol)
    topology = topology or KINDS[protocol.topology](names)
    shared = public if isinstance(public, PublicData) or public is None else as_public_data(public, seed)
    if protocol.needs_public and shared is None:
        raise RecipeError(
            f"{protocol.name} needs public data on every node.", "none", "Pass the same public=... everywhere."
        )
    return RunDescription(
        protocol=protocol,
        topology=topology,
        classes=classes,
        seed=seed,
        plan=plan,
        faults=Faults(faults, names, seed, participation),
        hub=Hub() if topology.hub else None,
        public=shared,
        test=None if test is None else validate_samples(*test, classes, "the test set"),
        compression=as_compression(compression),
    ).introduce()


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
        _check_no_pooling(self.description.protocol)
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
        own, log = self.description.of_hub(), self._log()
        with ExitStack() as stack:
            interrupt = stack.enter_context(GentleInterrupt())
            store, name = self._store(stack), run_name(self.folder)
            runtime = ForkedRuntime(
                HUB,
                own,
                lambda: open_hub(own, self.network, self.own, self.listen, EventLog(HUB, quiet=self.quiet), name),
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
        return None if self.folder is None else _open_store(self.folder, stack)

    def _run(self, runtime: Runtime, log: EventLog, store: RunFolder | None, should_stop: ShouldStop) -> Outcome:
        open_to_all = "" if self.own else ", without certificates: anyone who gets there can join"
        log.tell(f"listens at {self.listen}{open_to_all}")
        shown = [Progress()] if self.progress and self.log_format == "text" else []
        return run(
            runtime.description, runtime, store=store, observers=[log, *shown, *self.observers],
            should_stop=should_stop,
        )  # fmt: skip


# --- an agent ---------------------------------------------------------------------------------------


def join(
    agent: Agent,
    hub: str,
    *,
    certs: str | Path | None = None,
    insecure: bool = False,
    public: Any = None,
    test: tuple[Any, Any] | None = None,
    protocol: type[Protocol] | None = None,
    accepts: Sequence[str] | None = None,
    network: Network | None = None,
    folder: str | Path | None = None,
    log: bool = True,
    background: bool = False,
) -> TrainedAgent | BackgroundNode:
    """Take part with an agent in the federation of a hub, until the run is over; returns the trained agent.

    The hub tells the protocol, the number of classes and the rounds. `protocol`: a class of one's own, where the hub
    runs one that is not codistill's. `accepts`: names of the protocols that this agent takes part in; None: any.
    With a `folder` its states are kept there, and it goes on with them when it joins the same run again.
    """
    if not isinstance(agent, Agent):
        raise RecipeError("Only an Agent can join.", f"{agent!r}"[:80], "Write codistill.Agent(name, model, x, y).")
    check_pair(test, "The test set")
    own = credentials_for("agent", [hub], certs, insecure=insecure)
    _check_name(agent.name, own)
    node = AgentNode(
        agent, hub, own, network or Network(), None if folder is None else Path(folder),
        None if public is None else as_public_data(public, 0), test, protocol,
        None if accepts is None else tuple(accepts), quiet=not log,
    )  # fmt: skip
    warm_up()  # here: several agents of one notebook then need it once
    started = BackgroundNode(ForkedProcess(agent.name, node.work), node.trained_from)
    return started if background else started.wait_for_it()


@dataclass(frozen=True)
class AgentNode:
    """An agent with all that it needs to join a hub."""

    agent: Agent
    hub: str
    own: Credentials | None
    network: Network
    folder: Path | None = None
    public: PublicData | None = None
    test: tuple[Any, Any] | None = None  # not yet checked against the number of classes
    protocol: type[Protocol] | None = None
    accepts: tuple[str, ...] | None = None
    log_format: str = "text"
    quiet: bool = False

    def run_here(self, should_stop: ShouldStop = never) -> tuple[bool, RunDescription | None]:
        """Take part in this process, which can fork no node afterwards; True if the run is over."""
        name, joined = self.agent.name, []
        health = None if self.folder is None else self.folder / HEALTH
        log = EventLog(name, form=self.log_format, health=health, quiet=self.quiet)
        warm_up()
        trouble = probe(self.hub, HUB, self.own)
        if trouble:
            log.tell(f"{trouble}; trying again until somebody does")
        transport = Transport(name, (HUB,), self.network, self.own, dial=[self.hub])

        def settle(terms: Terms) -> RunDescription:
            joined.append(self.describe(terms))
            return joined[0]

        connections = Connections(transport, self.network, log.tell)
        try:
            with ExitStack() as stack:
                if self.folder is not None:
                    with writing(self.folder):
                        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                    stack.enter_context(locked(self.folder))  # two processes would overwrite each other's states
                hello = hello_of(self.agent, self.public)
                remote = RemoteAgent(connections, hello, settle, self.folder, should_stop, log.progress)
                complete = remote.run()
        finally:
            log.closed()
            transport.close()
        if complete:
            log.tell("the run is over")
        return complete, joined[0] if joined else None

    def describe(self, terms: Terms) -> RunDescription:
        """The run under the hub's terms, with this agent checked and introduced."""
        if self.public is not None:
            self.public.seed = int(terms["seed"])
        test = None if self.test is None else validate_samples(*self.test, int(terms["classes"]), "the test set")
        description = description_under(terms, self.agent, self.public, test, self.protocol)
        check_accepted(description.protocol, self.accepts)
        return check_agent(description.introduce())

    def work(self, channel: Channel, should_stop: ShouldStop) -> None:
        """Take part in a process of its own, and hand over what was learnt."""
        complete, description = self.run_here(should_stop)
        channel.send(
            complete=complete,
            terms=None if description is None else terms_of(description),
            saved=None if description is None else save_nodes([self.agent]),
        )

    def trained_from(self, content: Mapping[str, Any]) -> TrainedAgent:
        """The agent, with what was handed over."""
        if content["saved"] is None:
            raise NetworkError(
                f"Agent '{self.agent.name}' must have joined the run.", "it was stopped before", "Join again."
            )
        description = self.describe(content["terms"])
        load_nodes([self.agent], content["saved"])
        self.agent.learned = True
        return TrainedAgent(self.agent, description)


@dataclass(frozen=True)
class PeerNode:
    """An agent with all that it needs to take part among peers."""

    description: RunDescription  # with this agent alone
    listen: str
    dial: Mapping[str, str]  # addresses of some of its neighbours, by name
    own: Credentials | None
    network: Network
    folder: Path
    progress: bool = True
    log_format: str = "text"

    def __post_init__(self) -> None:
        name, topology = self.description.names[0], self.description.topology
        _check_no_pooling(self.description.protocol)
        if topology.hub:
            raise NetworkError(
                f"{self.description.protocol.name} has a hub.", "--listen and --peer", "Join it by --hub HOST:PORT."
            )
        check_neighbours(topology, name, self.dial)

    def run_here(self, should_stop: ShouldStop = never) -> Outcome:
        """Take part in this process, until all rounds are done or it is asked to stop."""
        name = self.description.names[0]
        warm_up()
        log = EventLog(name, form=self.log_format, health=self.folder / HEALTH)
        for other, address in self.dial.items():
            trouble = probe(address, other, self.own)
            if trouble:
                log.tell(f"{trouble}; trying again until '{other}' does")
        with ExitStack() as stack:
            store = _open_store(self.folder, stack)
            runtime = open_peer(self.description, self.network, self.own, self.listen, self.dial, log)
            title = f"{name}: {self.description.protocol.name}"
            shown = [Progress(title)] if self.progress and self.log_format == "text" else []
            return run(self.description, runtime, store=store, observers=[log, *shown], should_stop=should_stop)


# --- in the background ------------------------------------------------------------------------------


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


# --- checks -----------------------------------------------------------------------------------------


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
    return None if certs is None else read_credentials(Path(os.fspath(certs)), role)


def _check_name(name: str, own: Credentials | None) -> None:
    if own is not None and own.name != name:
        raise NetworkError(
            "An agent's name is its certificate's name.",
            f"'{name}', certificate of '{own.name}'",
            "Name the agent as its certificate, or pass its own folder as certs=...",
        )


def check_has_hub(protocol: Protocol, topology: Topology) -> None:
    """Only a topology with a hub is served."""
    if not topology.hub:
        raise NetworkError(
            "A hub is for protocols with a hub.",
            f"{protocol.name} on a topology of the kind {topology.kind}",
            "Start every agent by 'codistill join RECIPE --listen HOST:PORT --peer NAME=HOST:PORT'.",
        )


def check_accepted(protocol: Protocol, accepts: Sequence[str] | None) -> None:
    """An agent decides itself what it takes part in."""
    if accepts is not None and protocol.name not in accepts:
        raise NetworkError(
            "The federation must run a protocol that this agent accepts.",
            f"{protocol.name}; accepted: {', '.join(accepts) or 'none'}",
            "Ask whoever runs the hub; or change accepts = (...) of this agent.",
        )


def check_agent(description: RunDescription) -> RunDescription:
    """The agent at hand has the data and the abilities that the run needs."""
    agents = description.agents
    check_shapes(agents, description.test, description.public)
    try:
        check_abilities(agents, description.protocol, description.public)
    except CodistillError as error:
        error.add_note(f"The federation runs {description.protocol.name}.")
        raise
    return description


def with_agent(description: RunDescription, agent: Agent) -> RunDescription:
    """The same run with one agent at hand, checked and introduced."""
    return check_agent(replace(description, agents=(agent,), hub=None, reported=(agent.name,)).introduce())


def _check_no_pooling(protocol: Protocol) -> None:
    if protocol.pools_data:
        raise RecipeError(
            f"{protocol.name} pools the data of all agents, which never leave their machines here.",
            protocol.name,
            "Run it by 'codistill run', as a baseline.",
        )


def _open_store(folder: Path, stack: ExitStack) -> RunFolder:
    store = RunFolder(folder)
    stack.callback(store.close)
    store.open(resume=True)
    return store
