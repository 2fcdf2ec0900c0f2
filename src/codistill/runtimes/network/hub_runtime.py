"""The hub's side of a federation between machines: it waits for the agents, runs the rounds, and counts them.

An agent that disconnects or is late is dropped from the current round. Below the quorum a round is retried from the
state before it. An agent's model and state stay with the agent: the hub only says which rounds count.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from codistill.errors import MessageError, NetworkError
from codistill.results.outputs import View
from codistill.results.records import Scores
from codistill.runtimes.description import RunDescription
from codistill.runtimes.host import BEGIN, Report
from codistill.runtimes.network.answers import checked_report, checked_scores, checked_view
from codistill.runtimes.network.connections import Connections, Control
from codistill.runtimes.network.frame_header import FrameKind, Turn
from codistill.runtimes.network.options import RETURN, WIRE_VERSION
from codistill.runtimes.network.terms import objection, read_hello, terms_of
from codistill.runtimes.runtime import Runtime, ShouldStop, Stopped, load_nodes, never, one_thread, save_nodes
from codistill.version import __version__

_POLL = 0.2  # seconds between checks while the hub waits for agents
_REMIND = 30.0  # seconds between two reminders that say who is waited for


@dataclass
class AgentStatus:
    """What the hub knows of an agent of the roster."""

    ready: bool = False  # it has joined: it knows the terms and has restored a state that counts
    unanswered: int | None = None  # the number of the command that it has not answered yet
    answered: int = 0  # the number of the last command that it has answered
    samples: int = 0


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
        self._number = 0
        self._answers: dict[str, Control] = {}
        self._keeping: dict[str, int] = {}  # who has not confirmed yet that it has kept the last round
        self._unstored: set[str] = set()  # who has kept its last round in memory only
        self._started = False  # everybody has joined once, or patience has ended
        self._notified: set[str] = set()  # excluded agents that have been told so
        self._duplicates: set[int] = set()  # sessions of agents that are already connected by another one
        self._single = ExitStack()
        self._single.enter_context(one_thread())
        connections.on_hello, connections.on_presence = self._answer_hello, self._presence_changed
        connections.backlog = self._host.backlog

    # --- the runtime ------------------------------------------------------------------------------

    def start(self, done: int, should_stop: ShouldStop = never) -> None:
        """Set which rounds count; continue when all agents have joined, also those not sampled in the next round."""
        self.done, self._stopping = done, should_stop
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
        store = self.description.plan.has_checkpoint(self.done)
        self._unstored = self._unstored - set(done) if store else self._unstored | set(done)
        number = self._ask(done, do="keep", round=self.done, store=store)
        self._keeping = dict.fromkeys(done, number)
        self._notify_excluded()
        report.events = self._connections.take_events()
        report.waited = waited
        return report

    def _notify_excluded(self) -> None:
        """Tell each excluded agent once that it is excluded: its messages are ignored from now on."""
        excluded = self._connections.sessions.excluded
        for name in excluded.keys() - self._notified:
            self._notified.add(name)
            self.statuses[name].ready = False
            self._connections.command(
                name, do="refused", why=f"it is excluded from the run: {excluded[name]}", number=0
            )

    def _attempt(self, turn: Turn, present: tuple[str, ...]) -> Report:
        number = self._ask(
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
            own = self._checked(name, checked_report, name, answer.content.get("report"), self.description.names)
            if own is not None and name not in self._connections.dropped and not self._is_excluded(name):
                report = report.add(own)
                done.append(name)
        report.present = tuple(name for name in present if name in done)
        return report

    def evaluate(self, samples: int | None, views: dict[str, View] | None = None) -> dict[str, Scores]:
        """Let every agent that is there measure itself; only figures come back."""
        free = [name for name in self.description.names if self._is_free(name, keeping=True)]
        number = self._ask(free, do="evaluate", samples=samples, of=self._samples(), views=views is not None)
        scores: dict[str, Scores] = {}
        for name, answer in self._collect(number, free).items():
            scores[name] = self._scores(name, answer)
            if views is not None and self.description.test is not None:
                labels, classes = self.description.test[1], int(self._terms["classes"])
                view = self._checked(name, checked_view, answer.arrays, labels, classes)
                views.update({} if view is None else {name: view})
        self._strike_other_kinds(scores)
        if views:
            ordered = {name: views[name] for name in self.description.names if name in views}
            views.clear()
            views.update(ordered)
        return scores

    def _strike_other_kinds(self, scores: dict[str, Scores]) -> None:
        """An accuracy where the others sent errors, or the other way round, is not what was asked for."""
        kinds = {name: any("rmse" in key for key in found) for name, found in scores.items() if found}
        usual = Counter(kinds.values()).most_common(1)
        for name, kind in kinds.items():
            if kind != usual[0][0]:
                self._connections.sessions.strike(name, "scores of another kind than the others'")
                scores[name] = {}

    def measure_baseline(self) -> dict[str, Scores]:
        """Let every agent train a copy of its model alone, and tell its scores."""
        joined = self._wait_for_agents(self.description.names)
        rounds = self.description.plan.rounds
        number = self._ask(joined, do="alone", rounds=rounds, samples=self._samples())
        answers = self._collect(number, joined, patient=True)
        return {name: self._scores(name, answers.get(name)) for name in self.description.names}

    def save(self) -> dict[str, bytes]:
        """The hub's own state, once every agent has kept its own."""
        for name, number in self._keeping.items():
            self._collect(number, [name])
        self._keeping = {}
        behind = [name for name in self.description.names if name in self._unstored and self._is_free(name)]
        self._unstored -= self._collect(self._ask(behind, do="store"), behind).keys()
        return save_nodes(self.description.nodes)

    def load(self, saved: dict[str, bytes]) -> None:
        """Restore the hub's saved state; agents restore theirs when they join."""
        load_nodes(self.description.nodes, saved)

    def finish(self, *, complete: bool) -> None:
        """Tell all agents that the run is over, or that the hub pauses it."""
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
        self._single.close()

    def tell(self, text: str) -> None:
        """Tell the operator something and add it to the log of this round."""
        self._connections.note(text, self.done + 1)

    # --- commands and answers ---------------------------------------------------------------------

    def _samples(self) -> int:
        return sum(status.samples for status in self.statuses.values())

    def _quorum(self, wanted: Sequence[str]) -> int:
        return max(1, math.ceil(self._connections.network.quorum * len(wanted) - 1e-9))

    def _is_excluded(self, name: str) -> bool:
        return name in self._connections.sessions.excluded

    def _is_active(self, name: str) -> bool:
        return self._connections.is_connected(name) and not self._is_excluded(name)

    def _is_ready(self, name: str) -> bool:
        return self.statuses[name].ready and self._is_active(name)

    def _is_free(self, name: str, *, keeping: bool = False) -> bool:
        """Whether an agent can take a command; `keeping`: also if all that it owes is to confirm the last round."""
        unanswered = self.statuses[name].unanswered
        idle = unanswered is None or (keeping and unanswered == self._keeping.get(name))
        return idle and self._is_ready(name)

    def _wait_for_agents(self, wanted: Sequence[str]) -> tuple[str, ...]:
        """Those of the wanted agents that are free: at first wait for all of them, later a quorum is enough."""
        began = reminded = time.monotonic()
        patience = self._connections.network.patience
        if patience is None and self.done:
            patience = RETURN
        while True:
            self._exclude_revoked()
            free = tuple(name for name in wanted if self._is_free(name, keeping=True))
            possible = [name for name in wanted if not self._is_excluded(name)]
            waited = time.monotonic() - began
            everybody = not self._started and (patience is None or waited < patience)
            if len(free) >= max(1, len(possible) if everybody else self._quorum(wanted)):
                self._started = True
                return free
            if self._stopping():
                raise Stopped
            if len(possible) < self._quorum(wanted):
                raise NetworkError(
                    f"A round needs {self._quorum(wanted)} of {len(wanted)} agents.",
                    f"only {len(possible)} are left; excluded: {', '.join(filter(self._is_excluded, wanted))}",
                    "Restart the hub, which lets excluded agents join again; or lower network.quorum.",
                )
            if waited > 1 and (reminded == began or time.monotonic() - reminded > _REMIND):
                reminded = time.monotonic()
                missing = [name for name in wanted if name not in free]
                self._connections.tell(f"waiting for {', '.join(missing)} ({len(free)} of {len(wanted)} joined)")
            self._pump(_POLL)

    def _exclude_revoked(self) -> None:
        for name in self._connections.transport.revoked():
            self._connections.sessions.exclude(
                name, "its certificate has been revoked; a new one is accepted after the hub is restarted"
            )

    def _ask(self, names: Sequence[str], **content: Any) -> int:
        self._number += 1
        for name in names:
            self.statuses[name].unanswered = self._number
        self._connections.command(*names, number=self._number, **content)
        return self._number

    def _collect(self, number: int, names: Sequence[str], *, patient: bool = False) -> dict[str, Control]:
        """The answers to a command, of the agents that answer before they disconnect or are late."""
        since, deadline = time.monotonic(), None if patient else self._connections.network.deadline
        before = len(names)
        while True:
            pending = [name for name in names if self.statuses[name].unanswered == number and self._is_active(name)]
            late = deadline is not None and time.monotonic() - since > deadline
            if not pending or late or (patient and self._stopping()):
                for name in pending:
                    self.tell(f"'{name}' is late: it takes part again once it has answered")
                found = {name: self._answers.get(name) for name in names}
                return {name: a for name, a in found.items() if a is not None and a.content.get("number") == number}
            if len(pending) < before:  # only an answer that is waited for resets the deadline
                since, before = time.monotonic(), len(pending)
            self._pump(_POLL)

    def _pump(self, timeout: float) -> bool:
        control = self._connections.next_control(timeout)
        if control is None:
            return False
        name, status = control.sender, self.statuses[control.sender]
        match control.do:
            case "ready":
                status.ready, status.unanswered = True, None
                self._connections.tell(f"'{name}' joined")
            case "answer" if not self._is_asked(status, control.content.get("number")):
                self._connections.sessions.strike(name, "an unexpected answer")
            case "answer":
                if control.content.get("number") == status.unanswered:  # not to a command that timed out
                    status.unanswered = None
                    self._answers[name] = control
                if control.content.get("trouble"):
                    self.tell(f"'{name}': {str(control.content['trouble'])[:300]}")
            case "leaving":
                status.ready = False
                self.tell(f"'{name}' leaves: {str(control.content.get('why'))[:300]}")
            case _:
                self._connections.sessions.strike(name, f"an unknown command '{control.do[:40]}'")
        return True

    def _is_asked(self, status: AgentStatus, number: Any) -> bool:
        """Whether an answer to this command is expected: each is answered once, in order."""
        asked = type(number) is int and status.answered < number <= self._number
        status.answered = number if asked else status.answered
        return asked

    def _scores(self, name: str, answer: Control | None) -> Scores:
        return {} if answer is None else self._checked(name, checked_scores, answer.content.get("scores")) or {}

    def _checked(self, name: str, check: Callable[..., Any], *given: Any) -> Any:
        try:
            return check(*given)
        except MessageError as error:
            self._connections.sessions.strike(name, str(error))
            return None

    # --- joining and leaving ----------------------------------------------------------------------

    def _answer_hello(self, hello: Control) -> None:
        """Open a session for an agent, or tell it why not."""
        name, session_id, connections = hello.sender, hello.header.session_id, self._connections
        current = connections.sessions.current(name)
        is_other = connections.is_connected(name) and current != session_id
        if is_other and session_id not in connections.visible[name]:
            return  # of a session that has ended
        excluded = connections.sessions.excluded.get(name)
        why = objection(self._terms, hello.content) if excluded is None else f"it is excluded from the run: {excluded}"
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
