"""An agent of a federation between machines, under a hub or among peers; see `serving` for the hub."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from codistill.agent import Agent
from codistill.arguments import checked_arguments
from codistill.certs.credentials import Credentials
from codistill.data.shard import PublicData
from codistill.devices import check_fork
from codistill.errors import CodistillError, NetworkError, RecipeError
from codistill.federation.auditing import Audit, check_countable, policy_from
from codistill.federation.checks import (
    as_public_data,
    check_pair,
)
from codistill.federation.nodes import (
    BackgroundNode,
    check_agent,
    check_no_pooling,
    credentials_for,
    open_store,
)
from codistill.federation.result import TrainedAgent
from codistill.files import locked, own_folder
from codistill.protocol import Protocol
from codistill.runtimes.description import RunDescription
from codistill.runtimes.forked import Channel, ForkedProcess
from codistill.runtimes.network.audited_transport import audited
from codistill.runtimes.network.connections import Connections
from codistill.runtimes.network.diagnosis import probe
from codistill.runtimes.network.event_log import HEALTH, EventLog
from codistill.runtimes.network.opening import check_neighbours, neighbours, open_peer
from codistill.runtimes.network.options import Network
from codistill.runtimes.network.policy import ANYTHING, Policy
from codistill.runtimes.network.remote_agent import RemoteAgent
from codistill.runtimes.network.terms import Terms, description_under, hello_of, terms_of
from codistill.runtimes.network.transport import Transport
from codistill.runtimes.observers.progress import Progress
from codistill.runtimes.placement import devices_of
from codistill.runtimes.running import Outcome, run
from codistill.runtimes.runtime import ShouldStop, load_nodes, never, save_nodes, warm_up
from codistill.runtimes.safeguard import Safeguard, as_safeguard
from codistill.topology import HUB


@checked_arguments
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
    policy: str | Path | Mapping[str, Any] | None = None,
    network: Network | None = None,
    safeguard: bool | Safeguard = True,
    folder: str | Path | None = None,
    log: bool = True,
    background: bool = False,
) -> TrainedAgent | BackgroundNode:
    """Take part with an agent in the federation of a hub, until the run is over; returns the trained agent.

    The hub tells the protocol, the number of classes and the rounds. `protocol`: a class of one's own, where the hub
    runs one that is not codistill's. `accepts`: names of the protocols that this agent takes part in; None: any.
    `policy`: a file policy.toml, or its tables: what this agent agrees to and what it releases, whatever the hub says.
    `safeguard`: form its answer from what it was taught and its own model, trained alone, by samples that it holds out;
    nobody else sees any of this.
    With a `folder` its states are kept there, and it goes on with them when it joins the same run again; everything
    that it releases is listed in audit.jsonl there.
    """
    if not isinstance(agent, Agent):
        raise RecipeError("Only an Agent can join.", f"{agent!r}"[:80], "Write codistill.Agent(name, model, x, y).")
    check_pair(test, "The test set")
    own = credentials_for("agent", [hub], certs, insecure=insecure)
    _check_name(agent.name, own)
    rules, home = policy_from(policy, accepts, protocol), None if folder is None else Path(folder)
    check_countable(rules, home)
    node = AgentNode(
        agent, hub, own, network or Network(), home, None if public is None else as_public_data(public, 0), test,
        protocol, rules, quiet=not log, safeguard=as_safeguard(safeguard),
    )  # fmt: skip
    check_fork(devices_of([agent]), "network")
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
    policy: Policy = ANYTHING
    log_format: str = "text"
    quiet: bool = False
    safeguard: Safeguard | None = None

    def run_here(self, should_stop: ShouldStop = never) -> tuple[bool, RunDescription | None]:
        """Take part in this process, which can fork no node afterwards; True if the run is over."""
        self.policy.check_hub(self.hub)
        health = None if self.folder is None else self.folder / HEALTH
        log = EventLog(self.agent.name, form=self.log_format, health=health, quiet=self.quiet)
        with ExitStack() as stack:
            if self.folder is not None:
                own_folder(self.folder)
                stack.enter_context(locked(self.folder))  # two processes would overwrite each other's states
            stack.callback(log.closed)
            audit = Audit.open(self.folder, self.policy, log, stack)
            audit.start(self.agent.name, self.own, {HUB: self.hub})
            if not audit.wait_for_allowance(should_stop):
                return False, None
            complete, description = self._take_part(audit, log, should_stop)
        if complete:
            log.tell("the run is over")
        return complete, description

    def _take_part(self, audit: Audit, log: EventLog, should_stop: ShouldStop) -> tuple[bool, RunDescription | None]:
        joined: list[RunDescription] = []
        told: Terms = {}
        warm_up()
        trouble = probe(self.hub, HUB, self.own)
        if trouble:
            log.tell(f"{trouble}; trying again until somebody does")
        transport = Transport(
            self.agent.name, (HUB,), self.network, self.own, dial={HUB: self.hub}, limit=self.network.message_limit,
            tell=log.tell,
        )  # fmt: skip

        def settle(terms: Terms) -> RunDescription:
            told.update(terms)
            try:
                joined.append(self.describe(terms))
            except CodistillError as error:
                audit.refused(error)
                raise
            for note in joined[0].notes:
                log.tell(note)
            return joined[0]

        connections = Connections(audited(transport, audit.log, self.policy), self.network, log.tell)
        try:
            remote = RemoteAgent(
                connections, hello_of(self.agent, self.public), settle, self.folder, should_stop, log.progress,
                self.policy, lambda run, at: audit.joined(told, self.own, (HUB,), run, at),
            )  # fmt: skip
            complete = remote.run()
        finally:
            transport.close()
        return complete, joined[0] if joined else None

    def describe(self, terms: Terms) -> RunDescription:
        """The run under the hub's terms, with this agent checked and introduced."""
        if self.public is not None:
            self.public.seed = int(terms["seed"])
        description = description_under(terms, self.agent, self.public, self.test, self.protocol)
        self.policy.check_protocol(description.protocol)  # before anything is made for a protocol that is not accepted
        introduced = check_agent(replace(description, safeguard=self.safeguard).introduce())
        self.policy.check(introduced)
        return introduced

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
    policy: Policy = ANYTHING

    def __post_init__(self) -> None:
        name, topology = self.description.names[0], self.description.topology
        check_no_pooling(self.description.protocol)
        if topology.hub:
            raise NetworkError(
                f"{self.description.protocol.name} has a hub.", "--listen and --peer", "Join it by --hub HOST:PORT."
            )
        check_neighbours(topology, name, self.dial)
        self.policy.check(self.description)

    def run_here(self, should_stop: ShouldStop = never) -> Outcome:
        """Take part in this process, until all rounds are done or it is asked to stop."""
        name = self.description.names[0]
        warm_up()
        log = EventLog(name, form=self.log_format, health=self.folder / HEALTH)
        with ExitStack() as stack:
            own_folder(self.folder)
            store = open_store(self.folder, stack)
            audit = Audit.open(self.folder, self.policy, log, stack)
            audit.start(name, self.own, self.dial)
            if not audit.wait_for_allowance(should_stop):
                return Outcome(0, complete=False, rows=[], outputs=None, baseline_rows=None, seconds=0.0)
            terms = terms_of(self.description)
            audit.joined(terms, self.own, neighbours(self.description.topology, name), None, 0)
            self._probe(log)
            runtime = open_peer(
                self.description, self.network, self.own, self.listen, self.dial, log, audit.log, self.policy
            )
            title = f"{name}: {self.description.protocol.name}"
            shown = [Progress(title)] if self.progress and self.log_format == "text" else []
            return run(self.description, runtime, store=store, observers=[log, *shown], should_stop=should_stop)

    def _probe(self, log: EventLog) -> None:
        for other, address in self.dial.items():
            trouble = probe(address, other, self.own)
            if trouble:
                log.tell(f"{trouble}; trying again until '{other}' does")


def _check_name(name: str, own: Credentials | None) -> None:
    if own is not None and own.name != name:
        raise NetworkError(
            "An agent's name is its certificate's name.",
            f"'{name}', certificate of '{own.name}'",
            "Name the agent as its certificate, or pass its own folder as certs=...",
        )
