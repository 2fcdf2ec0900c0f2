"""The agents of a hub, as the hub sees them: who is connected, has joined and is free; and its talk with them."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from codistill.data.named_columns import BY_POSITION, Given, Names, agree_on_columns, difference
from codistill.errors import DataError, NetworkError
from codistill.runtimes.description import RunDescription
from codistill.runtimes.network.asking import Commands
from codistill.runtimes.network.connections import Connections
from codistill.runtimes.network.control import Control
from codistill.runtimes.network.event_log import timestamp
from codistill.runtimes.network.frame_header import FrameKind
from codistill.runtimes.network.inbox import Refusal
from codistill.runtimes.network.options import RETURN, WIRE_VERSION
from codistill.runtimes.network.terms import columns_digest, objection, read_columns, read_hello, terms_of
from codistill.runtimes.network.waiting import AgentStatus, Grace
from codistill.runtimes.runtime import ShouldStop, Stopped, never
from codistill.text import printable
from codistill.version import __version__

POLL = 0.2  # seconds between checks while the hub waits for agents
_REMIND = 30.0  # seconds between two reminders that say who is waited for

Columns = Names | str  # of the samples of an agent: their names, or of very many a digest


class ColumnOrder:
    """The columns of the agents' data frames, and their order: settled when all agents have said which they have.

    Until then agents with data frames wait: neither the names nor the order may depend on who came first. The names are
    those of the hub's own data frames, or else those that most agents have; the order is the one that a simulation of
    the same agents has. Agents with plain arrays do not wait, and get no names. In a run without rounds nobody
    waits: the first agent with a data frame is then enough.
    """

    def __init__(self, description: RunDescription) -> None:
        self._description = description
        self._said: dict[str, Columns | None] = {}  # by agents; None: a plain array
        self._settled: Columns | None = None
        self._why: str | None = None  # why no order could be settled
        self.notes: list[str] = []  # for the operator, to be taken
        self._noted: set[str] = set()
        self.waits = not description.asynchronous  # for agents that have not said anything yet

    def heard(self, name: str, columns: Columns | None, excluded: Sequence[str]) -> str | None:
        """An agent has said which columns it has; returns why it may not join with them."""
        known = self._settled or self._description.columns or None
        found = None if columns is None or known is None else _difference(columns, known)
        if found is not None:
            return printable(f"its columns differ from those of the federation: {found}", 400)
        if columns is None and self._description.columns:
            self._note(f"agent '{name}': {BY_POSITION}")
        if self._settled is None:
            self._said[name] = columns
            awaited = [one for one in self._description.names if one not in self._said and one not in excluded]
            if columns is not None and (not awaited or not self.waits):
                self._settle()
                return self._why or self.heard(name, columns, excluded)
        elif columns is None and any(said not in (None, self._settled) for said in self._said.values()):
            return "its samples are a plain array, and the data frames of others have their columns in different orders"
        return None

    def may_join(self, columns: Columns | None) -> bool:
        """Whether an agent can be told the order, or needs none."""
        return columns is None or self._settled is not None

    def told(self, columns: Columns | None) -> list[str] | None:
        """The order of the columns, for an agent that has said which it has."""
        return list(self._settled) if isinstance(columns, tuple) and isinstance(self._settled, tuple) else None

    def _settle(self) -> None:
        public, said = self._description.public, self._said
        given = [said[name] for name in self._description.names if said.get(name) is not None]
        votes = Counter(map(_kind, given))  # in the order of the roster, by which the first of the most frequent counts
        common = _kind(self._description.columns) if self._description.columns else votes.most_common(1)[0][0]
        agreed = {name: each for name, each in said.items() if each is None or _kind(each) == common}
        self._said, self._why = agreed, None
        if isinstance(common, str):
            self._settled = common
            return
        names = {name: each if isinstance(each, tuple) else () for name, each in agreed.items()}
        agents = [Given(f"agent '{one}'", names[one]) for one in self._description.names if one in names]
        others = [] if public is None else [Given("the public data", public.columns)]
        others += [Given("the samples of the hub", self._description.columns)] if self._description.columns else []
        try:
            self._settled, notes = agree_on_columns(agents, others)
        except DataError as error:
            self._why = printable(f"{error.must} Found: {error.found}", 400)
            return
        for note in notes:
            self._note(note)
        if public is not None:
            public.order_columns(self._settled)

    def _note(self, text: str) -> None:
        if text not in self._noted:
            self._noted.add(text)
            self.notes.append(text)


def _kind(columns: Columns | None) -> frozenset[str] | str:
    """What must be equal, as long as an order can be told: names in any order, or a digest of them in theirs."""
    return frozenset(columns) if isinstance(columns, tuple) else str(columns)


def _difference(columns: Columns, wanted: Columns) -> str | None:
    """In what the names of columns differ, in words; of very many only the digest is known."""
    if isinstance(columns, tuple) and isinstance(wanted, tuple):
        return difference(columns, wanted)
    digests = [columns_digest(each) if isinstance(each, tuple) else each for each in (columns, wanted)]
    return None if digests[0] == digests[1] else "other names, or another order, and too many to be sent"


class HubAgents:
    """Lets agents join, waits for them, and sends them commands; tells the operator who comes and goes."""

    def __init__(self, description: RunDescription, connections: Connections, *, run: str) -> None:
        """`run`: the name of this run, by which agents know their states of it."""
        self._description, self._connections = description, connections
        self.terms, self._run = terms_of(description), run
        self.done = 0  # rounds that count
        self.statuses = {name: AgentStatus() for name in description.names}
        self.stopping: ShouldStop = never
        self.commands = Commands(connections, self.statuses, self.tell)
        self.keeping: dict[str, int] = {}  # who has not confirmed yet that it has kept the last round
        self._started = False  # everybody has joined once, or patience has ended
        self._duplicates: set[int] = set()  # sessions of agents that are already connected by another one
        self.grace = Grace(connections.network.grace)
        self._columns = ColumnOrder(description)
        self.alone = 0  # the number of the command to train alone
        self.on_ready: Callable[[str], None] = _unnoticed  # takes who has joined
        self.on_report: Callable[[Control], None] | None = None  # takes reports that were not asked for
        self.on_state: Callable[..., None] = _ignore  # takes fields of the health file
        self._state: dict[str, Any] = {}  # those that were told last
        connections.on_hello = self._noticing(self._answer_hello)
        connections.on_presence = self._noticing(self._presence_changed)
        connections.on_refusal = self._refused_by

    def tell(self, text: str) -> None:
        """Tell the operator something and add it to the log of this round, if there is one."""
        self._connections.note(text, self.done + 1 if self.done < self._description.plan.rounds else 0)

    def tell_state(self, **changes: Any) -> None:
        """Tell the health file what has changed, and who is connected."""
        state = self._state | changes | {"here": [name for name in self._description.names if self.is_ready(name)]}
        if state != self._state:
            self._state = state
            self.on_state(**state)

    def tell_closed(self) -> None:
        """Tell the health file that all connections are closed."""
        self.on_state(status="done" if self._state.get("status") == "done" else "stopped", here=[])

    # --- who is there -----------------------------------------------------------------------------

    def samples(self) -> int:
        """Private samples of all agents, as far as they have said."""
        return sum(status.samples for status in self.statuses.values())

    def quorum(self, wanted: Sequence[str]) -> int:
        """How many of these agents a round needs."""
        return max(1, math.ceil(self._connections.network.quorum * len(wanted) - 1e-9))

    def is_excluded(self, name: str) -> bool:
        """Whether an agent may not take part any more."""
        return name in self._connections.sessions.excluded

    def is_ready(self, name: str) -> bool:
        """Whether an agent has joined and is connected."""
        return self.statuses[name].ready and self.commands.is_active(name)

    def is_free(self, name: str, *, keeping: bool = False) -> bool:
        """Whether an agent can take a command; `keeping`: also if all that it owes is to confirm the last round."""
        unanswered = self.statuses[name].unanswered
        idle = unanswered is None or (keeping and unanswered == self.keeping.get(name))
        return idle and self.is_ready(name)

    def wait_for(self, wanted: Sequence[str]) -> tuple[str, ...]:
        """Those of the wanted agents that are free: at first wait for all of them, later a quorum is enough."""
        began = reminded = now = time.monotonic()
        patience = self._connections.network.patience
        if patience is None and self.done:
            patience = RETURN
        while True:
            free = tuple(name for name in wanted if self.is_free(name, keeping=True))
            possible = [name for name in wanted if not self.is_excluded(name)]
            if len(possible) < self.quorum(wanted):
                raise NetworkError(
                    f"A round needs {self.quorum(wanted)} of {len(wanted)} agents.",
                    f"only {len(possible)} are left; excluded: {', '.join(filter(self.is_excluded, wanted))}",
                    "Restart the hub, which lets excluded agents join again; or lower network.quorum.",
                )
            everybody = not self._started and (patience is None or now - began < patience)
            self._columns.waits = everybody
            absent = [name for name in possible if name not in free]
            covered = [name for name in absent if self.grace.covers(name)]
            awaited = [name for name in absent if everybody and not self._joins_late(name)] or covered
            if len(free) >= self.quorum(wanted) and not awaited:
                self._started = True
                self.tell_state(status="running")
                return free
            if self.stopping():
                raise Stopped
            if now - began > 1 and (reminded == began or now - reminded > _REMIND):
                reminded = now
                missing = [name for name in wanted if name not in free]
                self._connections.tell(f"waiting for {', '.join(missing)} ({len(free)} of {len(wanted)} joined)")
                self.tell_state(status="waiting")
            self.pump(POLL)
            before, now = now, time.monotonic()
            self.grace.waited(covered, now - before)
            for name in absent:
                self.statuses[name].joining += now - before if self.commands.is_active(name) else 0.0

    def _joins_late(self, name: str) -> bool:
        """Whether an agent has been connected for as long as the deadline allows, and has not joined."""
        deadline = self._connections.network.deadline
        return deadline is not None and self.statuses[name].joining > deadline

    # --- commands and answers ---------------------------------------------------------------------

    def collect(self, number: int, names: Sequence[str], should_stop: ShouldStop = never) -> dict[str, Control]:
        """The answers of these agents to a command."""
        return self.commands.collect(number, names, lambda: self.pump(POLL), should_stop)

    def collect_rounds(self, number: int, names: Sequence[str]) -> dict[str, Control]:
        """Their answers to the command to run a round: what it has waited for their messages counts as well."""
        return self.commands.collect(number, names, lambda: self.pump(POLL), waited=self._connections.waited)

    def pump(self, timeout: float) -> bool:
        """Handle the next command or answer of an agent; False if there is none in time."""
        control = self._connections.next_control(timeout)
        if control is not None:
            self.handle(control)
        return control is not None

    def handle(self, control: Control) -> None:
        """Handle a command or an answer of an agent."""
        name, status = control.sender, self.statuses[control.sender]
        match control.do:
            case "ready" if not status.ready:
                status.ready, status.unanswered, status.joining = True, None, 0.0
                self.grace.returned(name)
                self._connections.tell(f"'{name}' joined")
                self.tell_state()
                self.on_ready(name)
            case "report" if self.on_report is not None:
                self.on_report(control)
            case "answer":
                self.commands.take(control)
            case "working" if control.content.get("number") == self.alone == status.unanswered and status.progress(
                control.content.get("round"), self._description.plan.rounds
            ):
                self.tell_state(moved=timestamp())
            case "leaving":
                status.ready = False
                self.grace.returned(name)  # nobody waits for it
                self.tell_state()
                self.tell(f"'{name}' leaves: {str(control.content.get('why'))[:300]}")
            case _:
                self._connections.sessions.strike(name, f"an unknown command '{control.do[:40]}'")

    # --- joining and leaving ----------------------------------------------------------------------

    def _noticing(self, handle: Callable[[Any], None]) -> Callable[[Any], None]:
        """Also note which agents are no longer ready after an event."""

        def handled(event: Any) -> None:
            before = [name for name, status in self.statuses.items() if status.ready]
            handle(event)
            for name in before:
                if not self.statuses[name].ready:
                    self.grace.disconnected(name)
            self.tell_state()

        return handled

    def _answer_hello(self, hello: Control) -> None:
        """Open a session for an agent, or tell it why not."""
        name, session_id, connections = hello.sender, hello.header.session_id, self._connections
        current = connections.sessions.current(name)
        is_other = connections.is_connected(name) and current != session_id
        if is_other and session_id not in connections.visible[name]:
            return  # of a session that has ended
        why = objection(self.terms, hello.content)
        if why is None:
            excluded = [each for each in self._description.names if self.is_excluded(each)]
            columns = read_columns(hello.content.get("columns"))
            why = self._columns.heard(name, columns, excluded)
        if why is not None:
            connections.tell(f"'{name}' may not join: {why}")
            connections.command(name, kind=FrameKind.HELLO, do="refused", why=why, session=session_id)
            return
        if is_other:
            if session_id not in self._duplicates:  # it sends a hello again and again, until the other one has ended
                self._duplicates.add(session_id)
                self.tell(f"'{name}' tries to join a second time: it must wait until its first process has ended")
            return
        if not self._columns.may_join(columns):
            return  # it asks again, until all agents have said which columns they have
        while self._columns.notes:
            self.tell(self._columns.notes.pop(0))
        connections.open_session(name, session_id, hello.header.number)
        status = self.statuses[name]
        if status.ready and current == session_id:  # a second hello: it has lost the connection, unnoticed here
            status.ready, status.unanswered = False, None
            connections.drop(name, "its connection was interrupted")
        said = read_hello(hello.content)
        if said is not None and self._description.hub is not None:  # which `objection` has checked
            status.samples, self._description.hub.hellos[name] = said.samples, said
        if current != session_id:
            status.ready, status.unanswered = False, None
        if not status.ready:
            terms = {**self.terms, "columns": self._columns.told(columns)}
            connections.command(
                name, kind=FrameKind.HELLO, do="welcome", run=self._run, done=self.done, terms=terms,
                version=__version__, wire=WIRE_VERSION, session=session_id,
            )  # fmt: skip

    def _presence_changed(self, name: str) -> None:
        status = self.statuses[name]
        if status.ready and not self._connections.is_connected(name):
            status.ready, status.unanswered = False, None
            self.tell(f"'{name}' disconnected")

    def _refused_by(self, refusal: Refusal) -> None:
        self._connections.tell(f"'{refusal.sender}' does not accept this hub: {refusal.why}")


def _ignore(**changes: Any) -> None:
    pass


def _unnoticed(name: str) -> None:
    pass
