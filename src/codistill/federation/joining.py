"""An agent of a federation between machines, under a hub or among peers; see `serving` for the hub."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from codistill.certs.credentials import Credentials
from codistill.core import __version__
from codistill.core.devices import check_fork
from codistill.core.errors import CodistillError, NetworkError, RecipeError
from codistill.core.files import locked, own_folder
from codistill.core.settings import clear_argument_errors
from codistill.data.shard import PublicData
from codistill.engine.description import RunDescription
from codistill.engine.observers import Progress
from codistill.engine.placement import devices_of
from codistill.engine.runtime import Outcome, ShouldStop, load_nodes, never, run, save_nodes, warm_up
from codistill.engine.safeguard import Safeguard, as_safeguard
from codistill.federation.checks import as_public_data, check_abilities, check_pair, check_shapes, of_class
from codistill.federation.result import NOT_BEGUN, TrainedAgent, open_store
from codistill.federation.serving import BackgroundNode, credentials_for
from codistill.network.agent import RemoteAgent, probe
from codistill.network.connections import Connections
from codistill.network.log import HEALTH, EventLog
from codistill.network.options import Network
from codistill.network.peer import check_neighbours, neighbours, open_peer
from codistill.network.policy import ANYTHING, DAILY, AuditLog, Policy, audited, make_policy, read_policy
from codistill.network.terms import Terms, description_under, hello_of, terms_of
from codistill.network.transport import Transport
from codistill.nodes.agent import Agent
from codistill.nodes.record import record_of
from codistill.protocol import Protocol
from codistill.protocols import PROTOCOLS
from codistill.runtimes.workers import Channel, ForkedProcess
from codistill.topology import HUB


@clear_argument_errors
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
    of_class(Agent, agent, "Only an Agent can join.", "Write codistill.Agent(name, model, x, y).")
    check_pair(test, "The test set")
    own = credentials_for("agent", [hub], certs, insecure=insecure)
    if own is not None and own.name != agent.name:
        raise NetworkError(
            "An agent's name is its certificate's name.",
            f"'{agent.name}', certificate of '{own.name}'",
            "Name the agent as its certificate, or pass its own folder as certs=...",
        )
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
        self.policy.check_hub(self.hub)
        health = None if self.folder is None else self.folder / HEALTH
        log = EventLog(self.agent.name, form=self.log_format, health=health, quiet=self.quiet)
        with ExitStack() as stack:
            if self.folder is not None:
                own_folder(self.folder)
                stack.enter_context(locked(self.folder))  # two processes would overwrite each other's states
            stack.callback(log.closed)
            audit = Audit(self, self.agent.name, log, stack, {HUB: self.hub})
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
                self.policy, lambda run, at: audit.joined(told, (HUB,), run, at),
            )  # fmt: skip
            complete = remote.run()
        finally:
            transport.close()
        return complete, joined[0] if joined else None

    def describe(self, terms: Terms) -> RunDescription:
        """The run under the hub's terms, with this agent, checked and bound to it."""
        if self.public is not None:
            self.public.seed = int(terms["seed"])
        description = description_under(terms, self.agent, self.public, self.test, self.protocol)
        self.policy.check_protocol(description.protocol)  # before anything is made for a protocol that is not accepted
        introduced = check_agent(replace(description, safeguard=self.safeguard).bind_nodes())
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
        record_of(self.agent).learned = True
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
        if topology.hub:
            raise NetworkError(
                f"{self.description.protocol.name} has a hub.", "--listen and --peer", "Join it by --hub HOST:PORT."
            )
        check_neighbours(topology, name, self.dial)
        self.policy.check(self.description)

    def run_here(self, should_stop: ShouldStop = never) -> Outcome:
        name = self.description.names[0]
        warm_up()
        log = EventLog(name, form=self.log_format, health=self.folder / HEALTH)
        with ExitStack() as stack:
            own_folder(self.folder)
            store = open_store(self.folder, stack)
            audit = Audit(self, name, log, stack, self.dial)
            if not audit.wait_for_allowance(should_stop):
                return NOT_BEGUN
            terms = terms_of(self.description)
            audit.joined(terms, neighbours(self.description.topology, name), None, 0)
            for other, address in self.dial.items():
                trouble = probe(address, other, self.own)
                if trouble:
                    log.tell(f"{trouble}; trying again until '{other}' does")
            runtime = open_peer(
                self.description, self.network, self.own, self.listen, self.dial, log, audit.log, self.policy
            )
            title = f"{name}: {self.description.protocol.name}"
            shown = [Progress(title)] if self.progress and self.log_format == "text" else []
            return run(self.description, runtime, store=store, observers=[log, *shown], should_stop=should_stop)


def check_agent(description: RunDescription) -> RunDescription:
    """Raise unless the agent has the data and the abilities that the run needs."""
    agents = description.agents
    if not record_of(agents[0]).is_coded and (description.public is None or description.public.frame is None):
        check_shapes(agents, description.test, description.public)
    try:
        check_abilities(agents, description.protocol, description.public)
    except CodistillError as error:
        error.add_note(f"The federation runs {description.protocol.name}.")
        raise
    return description


def with_agent(description: RunDescription, agent: Agent) -> RunDescription:
    """The same run with this agent's data and model, checked and bound to it."""
    return check_agent(replace(description, agents=(agent,), hub=None, reported=(agent.name,)).bind_nodes())


# --- An agent's policy and audit log at the start of its part in a federation and at each join.

_POLL = 1.0  # seconds between checks while waiting for the next day


def policy_from(
    given: str | Path | Mapping[str, Any] | None, accepts: Sequence[str] | None, own: type[Protocol] | None = None
) -> Policy:
    """The policy in a file or in tables, for the protocols in `accepts` only if that is given."""
    policy = (
        make_policy(given or {}, own) if given is None or isinstance(given, Mapping) else read_policy(Path(given), own)
    )
    return policy.accepting(accepts)


def check_countable(policy: Policy, folder: Path | None) -> None:
    """Limits that hold across restarts need a folder to count in."""
    counted = [rule for rule in ("rounds", *DAILY) if getattr(policy, rule) is not None]
    if counted and folder is None:
        raise RecipeError(
            f"{counted[0]} of a policy is counted in the audit log, which is in the agent's folder.",
            "no folder",
            "Pass folder=..., or leave that rule out.",
        )


class Audit:
    """The log of one agent, if it has a folder, and its policy.

    It begins with the start of a process: who it is, whom it connects to, and its policy. The folder is locked, and the
    log open until the stack is closed.
    """

    def __init__(
        self, node: AgentNode | PeerNode, name: str, events: EventLog, stack: ExitStack, links: Mapping[str, str]
    ) -> None:
        self.log = None if node.folder is None else AuditLog(node.folder)
        self._policy, self._events, self._own = node.policy, events, node.own
        cut = 0 if self.log is None else self.log.cut
        if cut:
            events.tell(f"audit log: its last line was cut off after {cut} bytes and is removed; it was not sent")
        events.tell(f"policy: {node.policy}")
        if self.log is not None:
            stack.callback(self.log.close)
            self.log.append(
                "started", node=name, version=__version__,
                certificate=None if node.own is None else node.own.common_name,
                links=dict(links), policy=node.policy.plain(), policy_digest=node.policy.digest,
                **({"cut": cut} if cut else {}),
            )  # fmt: skip

    def wait_for_allowance(self, should_stop: ShouldStop) -> bool:
        """Wait until the day is over on which a daily limit was reached; False if asked to stop before that."""
        told = False
        while self.log is not None:
            self.log.usage.begin(datetime.now(UTC).date().isoformat())
            rule = self._policy.waits(self.log.usage)
            if rule is None:
                break
            if not told:
                told = True
                self._events.tell(f"waiting until the day is over (UTC): its policy has {rule}")
                self._events.state(status="waiting")
            if should_stop():
                return False
            time.sleep(_POLL)
        return True

    def joined(self, terms: Terms, others: Sequence[str], run: str | None, at: int) -> None:
        """Log the terms under which everything after this line is released, and tell the head of the log."""
        if self.log is None:
            return
        certificates = {} if self._own is None else {name: self._own.accepted_common_name(name) for name in others}
        kind = PROTOCOLS.get(str(terms["protocol"].get("name")))
        self.log.append(
            "joined", run=run, at=at, exchanges=None if kind is None else kind.exchanges, certificates=certificates,
            terms=terms,
        )  # fmt: skip
        self._events.tell(f"audit log: {self.log}")

    def refused(self, error: CodistillError) -> None:
        """Log that this agent does not take part under the terms that it was told."""
        if self.log is not None:
            self.log.append("refused", why=f"{error}"[:1000])
