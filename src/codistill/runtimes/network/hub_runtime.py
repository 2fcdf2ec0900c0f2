"""The hub's side of a federation between machines: it waits for the agents, runs the rounds, and counts them.

An agent that disconnects or is late is dropped from the current round. Below the quorum a round is retried from the
state before it. An agent's model and state stay with the agent: the hub only says which rounds count.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from typing import Any

from codistill.errors import NetworkError
from codistill.results.outputs import View
from codistill.results.records import Scores
from codistill.runtimes.description import RunDescription
from codistill.runtimes.host import BEGIN
from codistill.runtimes.network.answers import checked_report, checked_view
from codistill.runtimes.network.asking import Commands
from codistill.runtimes.network.connections import Connections
from codistill.runtimes.network.control import Control
from codistill.runtimes.network.frame_header import FrameKind, Turn
from codistill.runtimes.network.inbox import Refusal
from codistill.runtimes.network.options import RETURN, WIRE_VERSION
from codistill.runtimes.network.terms import objection, read_hello, terms_of
from codistill.runtimes.network.waiting import AgentStatus, Grace, MissedRounds, Unreliable, missed_text
from codistill.runtimes.round_report import Report
from codistill.runtimes.runtime import Runtime, ShouldStop, Stopped, load_nodes, never, one_thread, save_nodes
from codistill.version import __version__

_POLL = 0.2  # seconds between checks while the hub waits for agents
_REMIND = 30.0  # seconds between two reminders that say who is waited for


class HubRuntime(Runtime):
    """Drives the agents of a roster by commands, and the hub's own node in this process."""

    def __init__(self, description: RunDescription, connections: Connections, *, run: str) -> None:
        """`run`: the name of this run, by which agents know their states of it."""
        super().__init__(description)
        self._connections, self._terms, self._run = connections, terms_of(description), run
        self._host = description.host(description.nodes, connections)
        self.done = 0  # rounds that count
        self.statuses = {name: AgentStatus() for name in description.names}
        self._stopping: ShouldStop = never
        self._commands = Commands(connections, self.statuses, self.tell)
        self._keeping: dict[str, int] = {}  # who has not confirmed yet that it has kept the last round
        self._unstored: set[str] = set()  # who has kept its last round in memory only
        self._started = False  # everybody has joined once, or patience has ended
        self._duplicates: set[int] = set()  # sessions of agents that are already connected by another one
        self._grace, self._missed = Grace(connections.network.grace), MissedRounds()
        self._unreliable = Unreliable()
        self._alone = 0  # the number of the command to train alone
        self.on_state: Callable[..., None] = _ignore  # takes fields of the health file
        self._state: dict[str, Any] = {}  # those that were told last
        self._single = ExitStack()
        self._single.enter_context(one_thread())
        connections.on_hello = self._noticing(self._answer_hello)
        connections.on_presence = self._noticing(self._presence_changed)
        connections.on_refusal = self._refused_by
        connections.backlog = self._host.backlog
        self._host.message_limit = connections.transport.limit

    # --- the runtime ------------------------------------------------------------------------------

    def start(self, done: int, should_stop: ShouldStop = never) -> None:
        """Set which rounds count; continue when all agents have joined, also those not sampled in the next round."""
        self.done, self._stopping = done, should_stop
        self.tell_state(status="waiting", round=done, rounds=self.description.plan.rounds, moved=_now())
        if 0 < done < self.description.plan.rounds:
            self._wait_for_agents(self.description.names)

    def run(self, phase: int, present: tuple[str, ...]) -> Report:
        """Drive one phase to its end with the agents that are connected, as often as it takes to reach the quorum."""
        if phase == BEGIN:  # each agent begins by itself, at its first command
            began = time.monotonic()
            self._wait_for_agents(self.description.names)  # all of them, also those whom the first rounds leave out
            return Report(waited=time.monotonic() - began)
        attempt, waited = 0, 0.0
        before = save_nodes(self.description.nodes)
        while True:
            began = time.monotonic()
            joined = self._wait_for_agents(present)
            waited += time.monotonic() - began
            left_out = self._unreliable.among(joined, phase)
            if len(joined) - len(left_out) >= self._quorum(present):
                joined = tuple(name for name in joined if name not in left_out)
            self._tell_missed(joined)
            began = time.monotonic()
            report = self._attempt(Turn(phase, attempt), joined)
            done = report.present or ()
            if len(done) >= self._quorum(present):
                break
            missing = [name for name in present if name not in done]
            self.tell(f"retried: it ended without {', '.join(missing)}")
            load_nodes(self.description.nodes, before)
            attempt += 1
            time.sleep(min(1.0, 0.05 * attempt))  # the cause may need time to pass
        self.done = phase + 1
        for name, rounds in self._unreliable.ended(phase, joined, done).items():
            self.tell(f"'{name}' has not completed its last rounds: it is left out of the next {rounds}")
        for name in present:
            if name not in done:
                self._missed.add(name, self.done)
        self._grace.completed(done, time.monotonic() - began)
        store = self.description.plan.has_checkpoint(self.done)
        self._unstored = self._unstored - set(done) if store else self._unstored | set(done)
        number = self._commands.ask(done, do="keep", round=self.done, store=store)
        self._keeping = dict.fromkeys(done, number)
        report.events = self._connections.take_events()
        report.waited = waited
        self.tell_state(status="running", round=self.done, present=list(done), moved=_now())
        return report

    def _attempt(self, turn: Turn, present: tuple[str, ...]) -> Report:
        number = self._commands.ask(
            present, do="run", turn=[turn.phase, turn.attempt], present=list(present), samples=self._samples()
        )
        self._connections.begin(turn, present)
        report = self._host.run(turn.phase, present)
        self._connections.finish()
        for name, why in self._connections.dropped.items():
            self.tell(f"continues without '{name}': {why}")
        done = []
        for _, sender, reason in report.refused:
            if sender in self.statuses:
                self._connections.sessions.strike(sender, reason)
        for name, answer in self._collect(number, present).items():
            own = self._commands.checked(
                name, checked_report, name, answer.content.get("report"), self.description.names,
                self.description.scores,
            )  # fmt: skip
            if own is not None and name not in self._connections.dropped and not self._is_excluded(name):
                report = report.add(own)
                done.append(name)
        report.present = tuple(name for name in present if name in done)
        return report

    def evaluate(self, samples: int | None, views: dict[str, View] | None = None) -> dict[str, Scores]:
        """Let every agent that is there measure itself; only figures come back."""
        free = [name for name in self.description.names if self._is_free(name, keeping=True)]
        number = self._commands.ask(free, do="evaluate", samples=samples, of=self._samples(), views=views is not None)
        scores: dict[str, Scores] = {}
        for name, answer in self._collect(number, free).items():
            scores[name] = self._commands.scores(name, answer, self.description.task_scores)
            if views is not None and self.description.test is not None:
                labels, classes = self.description.test[1], int(self._terms["classes"])
                view = self._commands.checked(name, checked_view, answer.arrays, labels, classes)
                views.update({} if view is None else {name: view})
        if views:
            ordered = {name: views[name] for name in self.description.names if name in views}
            views.clear()
            views.update(ordered)
        return scores

    def measure_baseline(self) -> dict[str, Scores]:
        """Let every agent train a copy of its model alone, and tell its scores."""
        joined = self._wait_for_agents(self.description.names)
        for name in joined:
            self.statuses[name].trained = 0
        self.tell_state(status="training alone, as a baseline")
        rounds = self.description.plan.rounds
        self._alone = self._commands.ask(joined, do="alone", rounds=rounds, samples=self._samples())
        answers = self._collect(self._alone, joined, self._stopping)
        for name in joined:
            if name not in answers and not self._stopping():
                self.tell(f"the baseline of '{name}' is missing")
        wanted = self.description.task_scores
        return {name: self._commands.scores(name, answers.get(name), wanted) for name in self.description.names}

    def save(self) -> dict[str, bytes]:
        """The hub's own state, once every agent has kept its own."""
        for number in set(self._keeping.values()):
            self._collect(number, [name for name, asked in self._keeping.items() if asked == number])
        self._keeping = {}
        behind = [name for name in self.description.names if name in self._unstored and self._is_free(name)]
        self._unstored -= self._collect(self._commands.ask(behind, do="store"), behind).keys()
        return save_nodes(self.description.nodes)

    def load(self, saved: dict[str, bytes]) -> None:
        """Restore the hub's saved state; agents restore theirs when they join."""
        load_nodes(self.description.nodes, saved)

    def finish(self, *, complete: bool) -> None:
        """Tell all agents that the run is over, or that the hub pauses it."""
        self.tell_state(status="done" if complete else "stopped")
        if complete:
            self.send_done()
        else:
            self.send_stop("paused")

    def send_stop(self, why: str) -> None:
        """Tell all agents that the run is over, or that the hub pauses it."""
        self._connections.command(*self.description.names, do="stop", why=why, number=0)

    def send_done(self) -> None:
        """Tell all agents that the run is over; wait up to `linger` seconds for those that are disconnected."""
        linger = self._connections.network.linger
        end, told = time.monotonic() + linger, set(self._connections.sessions.excluded)
        while True:
            ready = [name for name in self.description.names if name not in told and self._is_ready(name)]
            self._tell_missed(ready)
            self._connections.command(*ready, do="stop", why="done", number=0)
            told.update(ready)
            missing = [name for name in self.description.names if name not in told]
            if not missing or time.monotonic() > end or self._stopping():
                return
            if ready or end - time.monotonic() > linger - _POLL:
                self._connections.tell(f"done; waiting up to {linger:g} s to tell {', '.join(missing)}")
            self._pump(_POLL)

    def close(self) -> None:
        """Close all connections."""
        self._connections.transport.close()
        self.on_state(status="done" if self._state.get("status") == "done" else "stopped", here=[])
        self._single.close()

    def tell(self, text: str) -> None:
        """Tell the operator something and add it to the log of this round, if there is one."""
        self._connections.note(text, self.done + 1 if self.done < self.description.plan.rounds else 0)

    def tell_state(self, **changes: Any) -> None:
        """Tell the health file what has changed, and who is connected."""
        state = self._state | changes | {"here": [name for name in self.description.names if self._is_ready(name)]}
        if state != self._state:
            self._state = state
            self.on_state(**state)

    def _tell_missed(self, names: Sequence[str]) -> None:
        """Tell agents that are back, and the operator, which rounds they have missed."""
        for name in names:
            missed = self._missed.take(name)
            if missed is not None:
                count, first, last = missed
                self.tell(f"'{name}' is back: it {missed_text(*missed)}")
                self._connections.command(name, do="missed", count=count, first=first, last=last)

    # --- commands and answers ---------------------------------------------------------------------

    def _samples(self) -> int:
        return sum(status.samples for status in self.statuses.values())

    def _quorum(self, wanted: Sequence[str]) -> int:
        return max(1, math.ceil(self._connections.network.quorum * len(wanted) - 1e-9))

    def _is_excluded(self, name: str) -> bool:
        return name in self._connections.sessions.excluded

    def _is_ready(self, name: str) -> bool:
        return self.statuses[name].ready and self._commands.is_active(name)

    def _is_free(self, name: str, *, keeping: bool = False) -> bool:
        """Whether an agent can take a command; `keeping`: also if all that it owes is to confirm the last round."""
        unanswered = self.statuses[name].unanswered
        idle = unanswered is None or (keeping and unanswered == self._keeping.get(name))
        return idle and self._is_ready(name)

    def _wait_for_agents(self, wanted: Sequence[str]) -> tuple[str, ...]:
        """Those of the wanted agents that are free: at first wait for all of them, later a quorum is enough."""
        began = reminded = now = time.monotonic()
        patience = self._connections.network.patience
        if patience is None and self.done:
            patience = RETURN
        while True:
            free = tuple(name for name in wanted if self._is_free(name, keeping=True))
            possible = [name for name in wanted if not self._is_excluded(name)]
            if len(possible) < self._quorum(wanted):
                raise NetworkError(
                    f"A round needs {self._quorum(wanted)} of {len(wanted)} agents.",
                    f"only {len(possible)} are left; excluded: {', '.join(filter(self._is_excluded, wanted))}",
                    "Restart the hub, which lets excluded agents join again; or lower network.quorum.",
                )
            everybody = not self._started and (patience is None or now - began < patience)
            absent = [name for name in possible if name not in free]
            covered = [name for name in absent if self._grace.covers(name)]
            awaited = [name for name in absent if everybody and not self._joins_late(name)] or covered
            if len(free) >= self._quorum(wanted) and not awaited:
                self._started = True
                self.tell_state(status="running")
                return free
            if self._stopping():
                raise Stopped
            if now - began > 1 and (reminded == began or now - reminded > _REMIND):
                reminded = now
                missing = [name for name in wanted if name not in free]
                self._connections.tell(f"waiting for {', '.join(missing)} ({len(free)} of {len(wanted)} joined)")
                self.tell_state(status="waiting")
            self._pump(_POLL)
            before, now = now, time.monotonic()
            self._grace.waited(covered, now - before)
            for name in absent:
                self.statuses[name].joining += now - before if self._commands.is_active(name) else 0.0

    def _joins_late(self, name: str) -> bool:
        """Whether an agent has been connected for as long as the deadline allows, and has not joined."""
        deadline = self._connections.network.deadline
        return deadline is not None and self.statuses[name].joining > deadline

    def _collect(self, number: int, names: Sequence[str], should_stop: ShouldStop = never) -> dict[str, Control]:
        return self._commands.collect(number, names, lambda: self._pump(_POLL), should_stop)

    def _pump(self, timeout: float) -> bool:
        control = self._connections.next_control(timeout)
        if control is None:
            return False
        name, status = control.sender, self.statuses[control.sender]
        match control.do:
            case "ready" if not status.ready:
                status.ready, status.unanswered, status.joining = True, None, 0.0
                self._grace.returned(name)
                self._connections.tell(f"'{name}' joined")
                self.tell_state()
            case "answer":
                self._commands.take(control)
            case "working" if control.content.get("number") == self._alone == status.unanswered and status.progress(
                control.content.get("round"), self.description.plan.rounds
            ):
                self.tell_state(moved=_now())
            case "leaving":
                status.ready = False
                self._grace.returned(name)  # nobody waits for it
                self.tell_state()
                self.tell(f"'{name}' leaves: {str(control.content.get('why'))[:300]}")
            case _:
                self._connections.sessions.strike(name, f"an unknown command '{control.do[:40]}'")
        return True

    # --- joining and leaving ----------------------------------------------------------------------

    def _noticing(self, handle: Callable[[Any], None]) -> Callable[[Any], None]:
        """Also note which agents are no longer ready after an event."""

        def handled(event: Any) -> None:
            before = [name for name, status in self.statuses.items() if status.ready]
            handle(event)
            for name in before:
                if not self.statuses[name].ready:
                    self._grace.disconnected(name)
            self.tell_state()

        return handled

    def _answer_hello(self, hello: Control) -> None:
        """Open a session for an agent, or tell it why not."""
        name, session_id, connections = hello.sender, hello.header.session_id, self._connections
        current = connections.sessions.current(name)
        is_other = connections.is_connected(name) and current != session_id
        if is_other and session_id not in connections.visible[name]:
            return  # of a session that has ended
        why = objection(self._terms, hello.content)
        if why is not None:
            connections.tell(f"'{name}' may not join: {why}")
            connections.command(name, kind=FrameKind.HELLO, do="refused", why=why, session=session_id)
            return
        if is_other:
            if session_id not in self._duplicates:  # it sends a hello again and again, until the other one has ended
                self._duplicates.add(session_id)
                self.tell(f"'{name}' tries to join a second time: it must wait until its first process has ended")
            return
        connections.open_session(name, session_id, hello.header.number)
        status = self.statuses[name]
        if status.ready and current == session_id:  # a second hello: it has lost the connection, unnoticed here
            status.ready, status.unanswered = False, None
            connections.drop(name, "its connection was interrupted")
        said = read_hello(hello.content)
        if said is not None and self.description.hub is not None:  # which `objection` has checked
            status.samples, self.description.hub.hellos[name] = said.samples, said
        if current != session_id:
            status.ready, status.unanswered = False, None
        if not status.ready:
            connections.command(
                name, kind=FrameKind.HELLO, do="welcome", run=self._run, done=self.done, terms=self._terms,
                version=__version__, wire=WIRE_VERSION, session=session_id,
            )  # fmt: skip

    def _presence_changed(self, name: str) -> None:
        status = self.statuses[name]
        if status.ready and not self._connections.is_connected(name):
            status.ready, status.unanswered = False, None
            self.tell(f"'{name}' disconnected")

    def _refused_by(self, refusal: Refusal) -> None:
        self._connections.tell(f"'{refusal.sender}' does not accept this hub: {refusal.why}")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _ignore(**changes: Any) -> None:
    pass
