"""A peer: an agent without a hub, which sends to its neighbours only and counts its rounds by itself.

When two neighbours connect, both say which round they are in and meet in the round after the later one; the one that
is behind skips the rounds between, and tells its other neighbours. No peer waits for a neighbour that is disconnected
or already further. So after a fault all peers are in the same round again.
"""

from __future__ import annotations

import math
import time
from contextlib import ExitStack
from typing import Any

from codistill.agent import Agent
from codistill.errors import NetworkError
from codistill.results.outputs import View
from codistill.results.records import Baseline, Scores
from codistill.runtimes.description import RunDescription
from codistill.runtimes.evaluation import score
from codistill.runtimes.host import BEGIN
from codistill.runtimes.network.connections import Connections
from codistill.runtimes.network.control import Control
from codistill.runtimes.network.frame_header import FrameKind, Turn
from codistill.runtimes.network.imitated_time import Stopwatch, imitated_time
from codistill.runtimes.network.inbox import Refusal
from codistill.runtimes.network.options import RETURN
from codistill.runtimes.network.terms import difference, terms_of
from codistill.runtimes.round_report import Report
from codistill.runtimes.running import measure_alone
from codistill.runtimes.runtime import Runtime, ShouldStop, Stopped, load_nodes, never, one_thread
from codistill.text import printable

_POLL = 0.2  # seconds between checks while waiting for neighbours
_RETRY = 1.0  # seconds between two hellos without an answer
_REMIND = 30.0  # seconds between two reminders that say who is waited for
_WHY = 300  # characters of why a neighbour refuses
_LINGER = 60.0  # seconds that a peer which is done stays connected for neighbours that are not


class PeerRuntime(Runtime):
    """Drives one agent through its rounds, in the same round as its neighbours."""

    def __init__(self, description: RunDescription, connections: Connections) -> None:
        super().__init__(description)
        self._connections, self._terms = connections, terms_of(description)
        self._stopping: ShouldStop = never
        self._agent: Agent = description.agents[0]
        self._host = description.host([self._agent], connections)
        self._host.time = imitated_time(description)
        self._stopwatch = Stopwatch()
        self._at = BEGIN - 1  # the last phase that it has entered
        self._resume_at = BEGIN  # phases before this one are skipped
        self._skipped = False
        self._finished: set[str] = set()  # neighbours that are done
        self._refusals: dict[str, str] = {}  # neighbours that refused this peer at the start, and why
        self._differences: dict[str, str] = {}  # neighbours that this peer refused, and why
        self._seen: dict[str, float] = {}  # since when a neighbour that has not joined is visible
        self._single = ExitStack()
        self._single.enter_context(one_thread())
        connections.on_hello, connections.on_presence = self._on_hello, self._presence_changed
        connections.on_refusal = self._refused_by
        connections.backlog = self._host.backlog
        self._host.message_limit = connections.transport.limit
        self._started = False  # all neighbours have joined once, or patience has ended
        self._last_hello = 0.0
        self._samples = {self._agent.name: len(self._agent.shard)}

    def start(self, done: int, should_stop: ShouldStop = never) -> None:
        """Say how far this peer is."""
        self._at, self._stopping = BEGIN - 1 if done == 0 else done - 1, should_stop

    def measure_baseline(self) -> Baseline:
        """Train a copy of its model alone."""
        return measure_alone(self.description, self._stopping)

    def run(self, phase: int, present: tuple[str, ...]) -> Report:
        """Drive one phase with the connected neighbours; skip it if they are already further."""
        began = time.monotonic()
        self._wait_for_neighbours()
        waited = time.monotonic() - began
        self._stopwatch.start()
        self._skipped = phase != BEGIN and phase < self._resume_at
        if self._skipped:
            return Report(present=(), waited=waited)
        missing = {name for name in self._connections.transport.others if not self._is_in_round(name, phase)}
        self._at = phase
        self._connections.begin(
            Turn(phase), [name for name in self._connections.transport.others if name not in missing]
        )
        report = self._host.run(phase, tuple(name for name in present if name not in missing))
        for name, why in self._connections.dropped.items():
            self.tell(f"continues without '{name}': {why}")
        for receiver, sender, reason in report.refused:
            if receiver == self._agent.name:
                self._connections.sessions.strike(sender, reason)
        if missing and phase != BEGIN:
            report.events.append(
                f"without {', '.join(name for name in self._connections.transport.others if name in missing)}"
            )
        report.events += self._connections.take_events()
        report.waited = waited
        if self.description.clock is not None and phase != BEGIN:
            report.measures.append((self._agent.name, "time", self._stopwatch.elapsed))
        return report

    def evaluate(self, samples: int | None, views: dict[str, View] | None = None) -> dict[str, Scores]:
        """Evaluate this agent."""
        if self._skipped:
            return {}
        return {self._agent.name: score(self.description, self._agent, samples, views)}

    def save(self) -> dict[str, bytes]:
        """Its own state."""
        return self._stopwatch.save(self.description)

    def load(self, saved: dict[str, bytes]) -> None:
        """Return to what was saved."""
        load_nodes(self.description.nodes, saved)
        self._stopwatch.load(saved[self._agent.name])

    def finish(self, *, complete: bool) -> None:
        """Say that it is done, and stay for a while until its neighbours have heard all that it said."""
        if not complete:
            return
        self._connections.command(
            *self._connections.transport.others, reached=Turn(int(self._terms["rounds"])), do="done"
        )
        end = time.monotonic() + _LINGER
        while time.monotonic() < end and any(
            self._connections.is_connected(name) and name not in self._finished
            for name in self._connections.transport.others
        ):
            self._pump(_POLL)

    def close(self) -> None:
        """Close all connections."""
        self._connections.transport.close()
        self._single.close()

    def tell(self, text: str) -> None:
        """Tell the operator something and add it to the log of this round."""
        self._connections.note(text, max(0, self._at + 1))

    # --- staying in the same round -------------------------------------------------------------------

    def _is_in_round(self, name: str, phase: int) -> bool:
        meets = self._connections.meeting_turn.get(name, Turn(phase)) <= Turn(phase)
        refused = name in self._connections.sessions.excluded or name in self._refusals
        return self._connections.is_connected(name) and meets and not refused

    def _is_possible(self, name: str) -> bool:
        """Whether a neighbour may join: not one that is excluded, is done, refuses, or was silent for too long."""
        if name in self._connections.sessions.excluded or name in self._finished or name in self._refusals:
            return False
        if self._connections.is_connected(name) or not self._connections.visible.get(name):
            self._seen.pop(name, None)
            return True
        since, deadline = self._seen.setdefault(name, time.monotonic()), self._connections.network.deadline
        return deadline is None or time.monotonic() - since <= deadline

    def _wait_for_neighbours(self) -> None:
        """At first for all of them, later for the quorum: without neighbours there is nothing to learn from.

        With a deadline, a neighbour that is visible and does not join is waited for that long, and so is the quorum.
        """
        began = reminded = time.monotonic()
        others = self._connections.transport.others
        while True:
            self._pump(0)
            self._repeat_hellos()
            possible = [name for name in others if self._is_possible(name)]
            if self._refusals and not possible and not self._started:
                raise self._refused_by_all()
            connected = [name for name in possible if self._connections.is_connected(name)]
            waited = time.monotonic() - began
            if self._are_enough(len(connected), len(possible), waited):
                if not self._started:
                    self._agent.learner.join(sum(self._samples.values()))
                self._started = True
                return
            if self._stopping():
                raise Stopped
            if waited > 1 and (reminded == began or time.monotonic() - reminded > _REMIND):
                reminded = time.monotonic()
                self._connections.tell(f"waiting for {', '.join(name for name in possible if name not in connected)}")
            self._pump(_POLL)

    def _are_enough(self, connected: int, possible: int, waited: float) -> bool:
        """Whether to go on with so many of those that may join, after so many seconds."""
        patience, deadline = self._connections.network.patience, self._connections.network.deadline
        if patience is None and self._at >= 0:  # restarted: some may never come back
            patience = RETURN
        everybody = not self._started and (patience is None or waited < patience)
        share = 1.0 if everybody else self._connections.network.quorum
        late = self._started and deadline is not None and waited > deadline
        return late or connected >= math.ceil(share * possible - 1e-9)

    def _refused_by_all(self) -> NetworkError:
        reasons = "; ".join(f"'{name}' says: {why}" for name, why in self._refusals.items())
        return NetworkError(
            "At least one neighbour must agree to the terms.",
            reasons[:600],
            "Give all peers the same recipe and the same version of codistill.",
        )

    def _pump(self, timeout: float) -> None:
        control = self._connections.next_control(timeout)
        if control is None:
            return
        match control.do:
            case "jump" if type(control.content.get("to")) is int:
                if control.content["to"] < int(self._terms["rounds"]):
                    self._jump(control.content["to"], f"'{control.sender}'")
            case "done":
                self._finished.add(control.sender)
            case _:
                self._connections.sessions.strike(control.sender, f"an unknown command '{control.do[:40]}'")

    def _presence_changed(self, name: str) -> None:
        """A session of a neighbour has appeared or disappeared: send a hello to a new one."""
        new = self._connections.visible.get(name, set()) - {self._connections.sessions.current(name)}
        if not self._connections.visible.get(name):
            self._differences.pop(name, None)  # what comes next may differ in something else
        if new:
            self._send_hello(name)

    def _repeat_hellos(self) -> None:
        """To neighbours that are visible and not connected: a hello may have come before the subscription existed."""
        if time.monotonic() - self._last_hello > _RETRY:
            self._last_hello = time.monotonic()
            for name in self._connections.transport.others:
                waits = self._connections.visible.get(name) and not self._connections.is_connected(name)
                if waits and name not in self._refusals:
                    self._send_hello(name)

    def _send_hello(self, name: str) -> None:
        samples = len(self._agent.shard)
        self._connections.command(
            name, kind=FrameKind.HELLO, do="hello", at=self._at, samples=samples, terms=self._terms
        )

    def _on_hello(self, hello: Control) -> None:
        name, session_id = hello.sender, hello.header.session_id
        if hello.do == "refused" and self._started:
            self._connections.sessions.exclude(name, "it refuses to continue with this peer")
            return
        if hello.do == "refused":
            # Its word counts for itself alone: this peer starts with the others, if there are any.
            if name not in self._refusals:
                self._refusals[name] = printable(str(hello.content.get("why")), _WHY)
                self.tell(f"'{name}' refuses this peer: {self._refusals[name]}")
            return
        terms: Any = hello.content.get("terms")
        at: Any = hello.content.get("at")
        is_well_formed = isinstance(terms, dict) and type(at) is int
        why = difference(self._terms, terms) if is_well_formed else "malformed join request"
        if why is not None:
            if name not in self._differences:
                self._differences[name] = why
                self.tell(f"'{name}' may not join: {why}")
            self._connections.command(name, kind=FrameKind.HELLO, do="refused", why=why)
            return
        samples = hello.content.get("samples")
        self._samples[name] = samples if type(samples) is int and 0 < samples < 1 << 48 else 0
        new = self._connections.sessions.current(name) != session_id
        self._connections.open_session(name, session_id, hello.header.number)
        if not new:
            return
        self._finished.discard(name)
        self._refusals.pop(name, None)
        self._differences.pop(name, None)
        meeting = min(max(self._at, at) + 1, int(self._terms["rounds"]))
        self._connections.meeting_turn[name] = Turn(meeting)
        self._connections.newest_turn.pop(name, None)
        self._send_hello(name)  # if it was connected before, this tells it which round this peer is in
        self._connections.tell(f"'{name}' joined")
        self._jump(meeting, f"'{name}'")

    def _refused_by(self, refusal: Refusal) -> None:
        """A neighbour does not accept the connection itself: this peer is not in its graph, or revoked."""
        self._connections.tell(f"'{refusal.sender}' does not accept this peer: {refusal.why}")
        if refusal.final and not self._started:
            self._refusals[refusal.sender] = refusal.why

    def _jump(self, to: int, whom: str) -> None:
        """Skip the rounds up to one, and tell the other neighbours, which may be behind as well."""
        if to <= max(self._at + 1, self._resume_at):
            return
        self._resume_at = to
        self.tell(f"skips rounds to meet {whom} in round {to + 1}")
        connected = [name for name in self._connections.transport.others if self._connections.is_connected(name)]
        self._connections.command(*connected, reached=Turn(to), do="jump", to=to)
