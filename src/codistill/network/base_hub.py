"""What both hubs are built on, the one with rounds and the one without.

Agents as the hub sees them: who is connected, has joined and is free; and what it asks them.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from types import MappingProxyType
from typing import Any

from codistill.core import __version__
from codistill.core.errors import DataError, MessageError, NetworkError
from codistill.core.text import printable
from codistill.data.frames import BY_POSITION, Given, Names, agree_on_columns, difference
from codistill.engine.description import RunDescription
from codistill.engine.runtime import Runtime, ShouldStop, Stopped, never, one_thread
from codistill.network.commands import AgentStatus, Grace, checked_scores, checked_view, missed_text
from codistill.network.connections import Connections, Control
from codistill.network.frames import FrameKind
from codistill.network.log import timestamp
from codistill.network.options import RETURN, WIRE_VERSION
from codistill.network.terms import columns_digest, objection, read_columns, read_hello, terms_of
from codistill.network.transport import ignore
from codistill.results.outputs import View
from codistill.results.records import Scores

POLL = 0.2  # seconds between checks while the hub waits for agents
_REMIND = 30.0  # seconds between two log lines that name missing agents

Columns = Names | str  # of the samples of an agent: their names, or of very many a digest


class ColumnOrder:
    """The columns of the agents' data frames, and their order: settled when all agents have sent theirs.

    Until then agents with data frames wait: neither the names nor the order may depend on who came first. The names are
    those of the hub's own data frames, or else those that most agents have; the order is the one that a simulation of
    the same agents has. Agents with plain arrays do not wait, and get no names. In a run without rounds no agent
    waits: the first one with a data frame decides.

    Where the protocol does not need the same inputs, agents may differ: if they do, or some of their columns hold no
    numbers, there is no common order, and each finds its own columns in public data by name.
    """

    def __init__(self, description: RunDescription) -> None:
        self._description = description
        self._said: dict[str, Columns | None] = {}  # by agents; None: a plain array
        self._settled: Columns | None = None
        self._why: str | None = None  # why no order could be settled
        self.notes: list[str] = []  # for the operator, to be taken
        self._noted: set[str] = set()
        self.waits = not description.asynchronous  # for agents that have not said anything yet
        self._may_differ = not description.protocol.needs_same_inputs()
        self._coded = False  # whether some agent has columns that hold no numbers

    def heard(
        self, name: str, columns: Columns | None, excluded: Sequence[str], *, is_coded: bool = False
    ) -> str | None:
        """An agent has said which columns it has; returns why it may not join with them."""
        self._coded = self._coded or is_coded
        known = self._settled or self._description.columns or None
        found = None if columns is None or known is None else _difference(columns, known)
        if found is not None and not self._may_differ:
            return printable(f"its columns differ from those of the federation: {found}", 400)
        if columns is None and self._description.columns:
            self._note(f"agent '{name}': {BY_POSITION}")
        if self._settled is None:
            self._said[name] = columns
            awaited = [one for one in self._description.names if one not in self._said and one not in excluded]
            if columns is not None and (not awaited or not self.waits):
                self._settle()
                return self._why or self.heard(name, columns, excluded)
        elif columns is None and self._settled and not set(self._said.values()) <= {None, self._settled}:
            return "its samples are a plain array, and the data frames of others have their columns in different orders"
        return None

    def may_join(self, columns: Columns | None) -> bool:
        """Whether the order for an agent is settled, or it needs none."""
        return columns is None or self._settled is not None

    def order_for(self, columns: Columns | None) -> list[str] | None:
        """The order of the columns, for an agent that has sent their names."""
        order = self._settled
        return list(order) if order and isinstance(columns, tuple) and isinstance(order, tuple) else None

    def _settle(self) -> None:
        public, said = self._description.public, self._said
        given = [said[name] for name in self._description.names if said.get(name) is not None]
        if self._may_differ and (self._coded or len(set(map(_kind, given))) > 1):
            self._settled = ()
            return
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
    """What must be equal: names in any order, or a digest of ordered names if there are too many to send."""
    return frozenset(columns) if isinstance(columns, tuple) else str(columns)


def _difference(columns: Columns, wanted: Columns) -> str | None:
    """How the names of columns differ, as a text; of very many only the digest is known."""
    if isinstance(columns, tuple) and isinstance(wanted, tuple):
        return difference(columns, wanted)
    digests = [columns_digest(each) if isinstance(each, tuple) else each for each in (columns, wanted)]
    return None if digests[0] == digests[1] else "other names, or another order, and too many to be sent"


class BaseHub(Runtime):
    """Lets agents join, waits for them, and asks them to do something; logs who joins and leaves."""

    def __init__(self, description: RunDescription, connections: Connections, *, run: str) -> None:
        """`run`: the name of this run, by which agents know their states of it."""
        super().__init__(description)
        self._connections = connections
        self.terms, self._run = terms_of(description), run
        self.done = 0  # rounds that count
        self.statuses = {name: AgentStatus() for name in description.names}
        self.stopping: ShouldStop = never
        self._number = 0  # of the last command
        self._answers: dict[str, Control] = {}  # the newest of each agent
        self.keeping: dict[str, int] = {}  # who has not confirmed yet that it has kept the last round
        self._started = False  # all have joined once, or patience has ended
        self._duplicates: set[int] = set()  # sessions of agents that are already connected by another one
        self.grace = Grace(connections.network.grace)
        self._columns = ColumnOrder(description)
        self.alone = 0  # the number of the command to train alone
        self.on_state: Callable[..., None] = ignore  # called with fields of the health file
        self._state: dict[str, Any] = {}  # the newest ones
        self.awaited: Collection[str] = description.names  # at the end
        connections.on_hello = self._noticing(self._answer_hello)
        connections.on_presence = self._noticing(self._presence_changed)
        connections.on_refusal = lambda refusal: connections.tell(
            f"'{refusal.sender}' does not accept this hub: {refusal.why}"
        )
        self._single = ExitStack()
        self._single.enter_context(one_thread())

    def start(self, done: int, should_stop: ShouldStop = never) -> None:
        self.done, self.stopping = done, should_stop
        self.tell_state(status="waiting", round=done, rounds=self.description.spec.rounds, moved=timestamp())

    def tell(self, text: str) -> None:
        """Log an event, also in the log of this round, if there is one."""
        self._connections.note(text, self.done + 1 if self.done < self.description.spec.rounds else 0)

    def tell_state(self, **changes: Any) -> None:
        """Update the health file: what has changed, and who is connected."""
        state = self._state | changes | {"here": [name for name in self.description.names if self.is_ready(name)]}
        if state != self._state:
            self._state = state
            self.on_state(**state)

    def tell_missed(self, names: Sequence[str]) -> None:
        for name in names:
            missed = self.statuses[name].take_missed()
            if missed is not None:
                count, first, last = missed
                self.tell(f"'{name}' is back: it {missed_text(*missed)}")
                self._connections.command(name, do="missed", count=count, first=first, last=last)

    # --- who is connected -----------------------------------------------------------------------------

    def samples(self) -> int:
        """Private samples of all agents that have said how many they have."""
        return sum(status.samples for status in self.statuses.values())

    def quorum(self, wanted: Sequence[str]) -> int:
        """How many of these agents a round needs."""
        return max(1, math.ceil(self._connections.network.quorum * len(wanted) - 1e-9))

    def is_excluded(self, name: str) -> bool:
        return name in self._connections.sessions.excluded

    def is_active(self, name: str) -> bool:
        return self._connections.is_connected(name) and not self.is_excluded(name)

    def is_ready(self, name: str) -> bool:
        """Whether an agent has joined and is connected."""
        return self.statuses[name].ready and self.is_active(name)

    def is_free(self, name: str, *, keeping: bool = False) -> bool:
        """Whether an agent can take a command; `keeping`: also if all that it owes is to confirm the last round."""
        unanswered = self.statuses[name].unanswered
        idle = unanswered is None or (keeping and unanswered == self.keeping.get(name))
        return idle and self.is_ready(name)

    def wait_for(self, wanted: Sequence[str]) -> tuple[str, ...]:
        """Those of the wanted agents that are free: at first wait for all of them, later a quorum is enough."""
        began = reminded = now = time.monotonic()
        patience, deadline = self._connections.network.patience, self._connections.network.deadline
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
            # Not one that has been connected for as long as the deadline allows, and has not joined.
            in_time = [name for name in absent if deadline is None or self.statuses[name].joining <= deadline]
            awaited = (in_time if everybody else []) or covered
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
                self.statuses[name].joining += now - before if self.is_active(name) else 0.0

    # --- commands and answers ---------------------------------------------------------------------

    def ask(self, names: Sequence[str], **content: Any) -> int:
        self._number += 1
        for name in names:
            self.statuses[name].unanswered = self._number
        self._connections.command(*names, number=self._number, **content)
        return self._number

    def collect(
        self,
        number: int,
        names: Sequence[str],
        should_stop: ShouldStop = never,
        waited: Mapping[str, float] = MappingProxyType({}),
        pump: Callable[[float], None] | None = None,
    ) -> dict[str, Control]:
        """The answers to a command, of the agents that answer before they disconnect or are late.

        An answer that is waited for restarts the deadline of all; progress in training alone, that of its sender.
        `waited`: seconds of their deadline that agents have used up before.
        """
        since, deadline = time.monotonic(), self._connections.network.deadline
        before = len(names)
        while True:
            pending = [name for name in names if self.statuses[name].unanswered == number and self.is_active(name)]
            now = time.monotonic()
            if len(pending) < before:
                since, before = now, len(pending)
            spent = [waited.get(name, 0.0) + now - max(since, self.statuses[name].progressed) for name in pending]
            late = deadline is not None and all(each >= deadline for each in spent)
            if not pending or late or should_stop():
                for name in pending:
                    self.tell(f"'{name}' is late: it takes part again once it has answered")
                found = {name: self._answers.get(name) for name in names}
                return {name: a for name, a in found.items() if a is not None and a.content.get("number") == number}
            (pump or self.pump)(POLL)

    def _take_answer(self, answer: Control) -> None:
        """Keep an answer. Each command is answered once, in order: anything else is a strike."""
        name, number = answer.sender, answer.content.get("number")
        status = self.statuses[name]
        if type(number) is not int or not status.answered < number <= self._number:
            self._connections.sessions.strike(name, "an unexpected answer")
            return
        status.answered = number
        if number == status.unanswered:  # not to a command that timed out
            status.unanswered = None
            self._answers[name] = answer
        if answer.content.get("trouble"):
            self.tell(f"'{name}': {str(answer.content['trouble'])[:300]}")

    def checked(self, name: str, check: Callable[..., Any], *given: Any) -> Any:
        """Part of an answer, or None and a strike if it may not be used."""
        try:
            return check(*given)
        except MessageError as error:
            self._connections.sessions.strike(name, str(error))
        except Exception as error:  # an unforeseen form must not end the rounds of the others
            self._connections.sessions.strike(name, f"an answer that cannot be read ({type(error).__name__})")
        return None

    def take_scores(self, name: str, answer: Control, views: dict[str, View] | None = None) -> Scores:
        """The scores of an answer, if they are those that the terms ask for; its outputs are put into `views`."""
        scores = self.checked(name, checked_scores, answer.content.get("scores"), self.description.task_scores)
        if views is not None and self.description.test is not None:
            labels, classes = self.description.test[1], int(self.terms["classes"])
            view = self.checked(name, checked_view, answer.arrays, labels, classes)
            views.update({} if view is None else {name: view})
        return scores or {}

    def pump(self, timeout: float) -> None:
        control = self._connections.next_control(timeout)
        if control is not None:
            self.handle(control)

    def handle(self, control: Control) -> None:
        name, status = control.sender, self.statuses[control.sender]
        match control.do:
            case "ready" if not status.ready:
                status.ready, status.unanswered, status.joining = True, None, 0.0
                self.grace.returned(name)
                self._connections.tell(f"'{name}' joined")
                self.tell_state()
                self.on_ready(name)
            case "answer":
                self._take_answer(control)
            case "working" if control.content.get("number") == self.alone == status.unanswered and status.progress(
                control.content.get("round"), self.description.spec.rounds
            ):
                self.tell_state(moved=timestamp())
            case "leaving":
                status.ready = False
                self.grace.returned(name)  # no round waits for it
                self.tell_state()
                self.tell(f"'{name}' leaves: {str(control.content.get('why'))[:300]}")
            case _:
                self._connections.sessions.strike(name, f"an unknown command '{control.do[:40]}'")

    def on_ready(self, name: str) -> None:
        """An agent has joined."""

    # --- joining and leaving ----------------------------------------------------------------------

    def _noticing(self, handle: Callable[[Any], None]) -> Callable[[Any], None]:
        """Wrap a handler: note which agents are no longer ready after the event."""

        def handled(event: Any) -> None:
            before = [name for name, status in self.statuses.items() if status.ready]
            handle(event)
            for name in before:
                if not self.statuses[name].ready:
                    self.grace.disconnected(name)
            self.tell_state()

        return handled

    def _answer_hello(self, hello: Control) -> None:
        name, session_id, connections = hello.sender, hello.header.session_id, self._connections
        current = connections.sessions.current.get(name)
        is_other = connections.is_connected(name) and current != session_id
        if is_other and session_id not in connections.visible[name]:
            return  # of a session that has ended
        why = objection(self.terms, hello.content)
        if why is None:
            excluded = [each for each in self.description.names if self.is_excluded(each)]
            columns = read_columns(hello.content.get("columns"))
            is_coded = hello.content.get("own_columns") is True
            why = self._columns.heard(name, columns, excluded, is_coded=is_coded)
        if why is not None:
            connections.tell(f"'{name}' may not join: {why}")
            connections.command(name, kind=FrameKind.HELLO, do="refused", why=why, session=session_id)
            return
        if is_other:
            if session_id not in self._duplicates:  # it repeats its hello until the other one has ended
                self._duplicates.add(session_id)
                self.tell(f"'{name}' tries to join a second time: it must wait until its first process has ended")
            return
        if not self._columns.may_join(columns):
            return  # it asks again, until the columns of all agents are known
        while self._columns.notes:
            self.tell(self._columns.notes.pop(0))
        connections.open_session(name, session_id, hello.header.number)
        status = self.statuses[name]
        if status.ready and current == session_id:  # a second hello: it lost the connection, which was not noticed here
            status.ready, status.unanswered = False, None
            connections.drop(name, "its connection was interrupted")
        said = read_hello(hello.content)
        if said is not None and self.description.hub is not None:  # `objection` has checked it
            status.samples, self.description.hub.joined[name] = said.samples, said
        if current != session_id:
            status.ready, status.unanswered = False, None
        if not status.ready:
            terms = {**self.terms, "columns": self._columns.order_for(columns)}
            connections.command(
                name, kind=FrameKind.HELLO, do="welcome", run=self._run, done=self.done, terms=terms,
                version=__version__, wire=WIRE_VERSION, session=session_id,
            )  # fmt: skip

    def _presence_changed(self, name: str) -> None:
        status = self.statuses[name]
        if status.ready and not self._connections.is_connected(name):
            status.ready, status.unanswered = False, None
            self.tell(f"'{name}' disconnected")

    # --- the end ----------------------------------------------------------------------------------

    def finish(self, *, complete: bool) -> None:
        """Tell all agents that the run is over, or that the hub pauses it.

        At the end, those of the `awaited` agents that are disconnected have `network.linger` seconds to come back, and
        those that are about to join as long to say that they are ready: before, they do not listen.
        """
        self.tell_state(status="done" if complete else "stopped")
        if not complete:
            self._connections.command(*self.description.names, do="stop", why="paused", number=0)
            return
        linger = self._connections.network.linger
        end, told = time.monotonic() + linger, set(self._connections.sessions.excluded)
        while True:
            ready = [name for name in self.description.names if name not in told and self.is_ready(name)]
            self.tell_missed(ready)
            self._connections.command(*ready, do="stop", why="done", number=0)
            told.update(ready)
            expected = {*self.awaited, *filter(self.is_active, self.description.names)}
            missing = [name for name in self.description.names if name in expected - told]
            if not missing or time.monotonic() > end or self.stopping():
                return
            if ready or end - time.monotonic() > linger - POLL:
                self._connections.tell(f"done; waiting up to {linger:g} s to tell {', '.join(missing)}")
            self.pump(POLL)

    def close(self) -> None:
        self._connections.transport.close()
        self.on_state(status="done" if self._state.get("status") == "done" else "stopped", here=[])
        self._single.close()
