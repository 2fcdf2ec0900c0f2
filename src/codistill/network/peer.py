"""A peer: an agent without a hub, which sends to its neighbours only and counts its rounds by itself.

When two neighbours connect, both say which round they are in and meet in the round after the later one; the one that
is behind skips the rounds between, and tells its other neighbours. No peer waits for a neighbour that is disconnected
or already further. So after a fault all peers are in the same round again.

In a run without rounds a peer exchanges with its neighbours at its own pace, and counts its own periods.
"""

from __future__ import annotations

import math
import threading
import time
from abc import abstractmethod
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from codistill.certs.credentials import Credentials
from codistill.core.errors import NetworkError
from codistill.core.text import printable
from codistill.engine.description import RunDescription
from codistill.engine.evaluation import score
from codistill.engine.exchange import Report
from codistill.engine.host import BEGIN
from codistill.engine.runtime import Runtime, ShouldStop, Stopped, load_nodes, never, one_thread
from codistill.network.agent_rounds import ImitatedTime, LinkDriver, Stopwatch, linked_host
from codistill.network.connections import Connections, Control
from codistill.network.frames import FrameKind, Refusal, Turn
from codistill.network.log import EventLog
from codistill.network.options import RETURN, Network, derived_limit
from codistill.network.policy import ANYTHING, AuditLog, Policy, audited
from codistill.network.terms import difference, terms_of
from codistill.network.transport import Transport
from codistill.nodes.agent import Agent
from codistill.nodes.clock import SECOND
from codistill.nodes.record import record_of
from codistill.results.outputs import View
from codistill.results.records import Baseline, Scores
from codistill.runtimes.simulation import measure_alone
from codistill.topology import Topology
from codistill.wire.state import pack, unpack

_POLL = 0.2  # seconds between checks while waiting for neighbours
_RETRY = 1.0  # seconds between two hellos without an answer
_REMIND = 30.0  # seconds between two log lines that name missing neighbours
_WHY = 300  # characters of why a neighbour refuses
_LINGER = 60.0  # seconds that a peer which is done stays connected for neighbours that are not


class BasePeer(Runtime):
    """What both kinds of peers are built on: which neighbours have joined, refuse or are done; what they are told."""

    def __init__(self, description: RunDescription, connections: Connections) -> None:
        super().__init__(description)
        self._connections, self._terms = connections, terms_of(description)
        self._agent: Agent = description.agents[0]
        self.others = connections.transport.others
        self.stopping: ShouldStop = never
        self.at = BEGIN - 1  # the last phase that this peer has entered
        self.started = False  # all neighbours have joined once, or patience has ended
        self.finished: set[str] = set()  # neighbours that are done
        self.refusals: dict[str, str] = {}  # neighbours that refused this peer at the start, and why
        self._differences: dict[str, str] = {}  # neighbours that this peer refused, and why
        self._seen: dict[str, float] = {}  # since when a neighbour that has not joined is visible
        self._last_hello = 0.0
        self._samples = {self._agent.name: len(self._agent.shard)}
        connections.on_hello, connections.on_presence = self._on_hello, self._presence_changed
        connections.on_refusal = self._refused_by
        self._single = ExitStack()
        self._single.enter_context(one_thread())

    @abstractmethod
    def _needed(self, waited: float) -> float:
        """The share of the neighbours which may join that must be connected, after so many seconds of waiting."""

    def _meet(self, to: int, whom: str) -> None:
        """A neighbour can be met in a round; a peer without rounds skips none for that."""

    def start(self, done: int, should_stop: ShouldStop = never) -> None:
        self.at, self.stopping = BEGIN - 1 if done == 0 else done - 1, should_stop

    def close(self) -> None:
        self._connections.transport.close()
        self._single.close()

    def tell(self, text: str) -> None:
        self._connections.note(text, max(0, self.at + 1))

    def send_done(self) -> None:
        self._connections.command(*self.others, reached=Turn(int(self._terms["rounds"])), do="done")

    def strike_refused(self, refused: list[tuple[str, str, str]]) -> None:
        for receiver, sender, reason in refused:
            if receiver == self._agent.name:
                self._connections.sessions.strike(sender, reason)

    # --- waiting --------------------------------------------------------------------------------------

    def _is_possible(self, name: str) -> bool:
        """Whether a neighbour may join: not one that is excluded, is done, refuses, or was silent for too long."""
        if name in self._connections.sessions.excluded or name in self.finished or name in self.refusals:
            return False
        if self._connections.is_connected(name) or not self._connections.visible.get(name):
            self._seen.pop(name, None)
            return True
        since, deadline = self._seen.setdefault(name, time.monotonic()), self._connections.network.deadline
        return deadline is None or time.monotonic() - since <= deadline

    def wait(self) -> float:
        """Wait until there are enough: without neighbours there is nothing to learn from. Seconds waited.

        With a deadline, a neighbour that is visible and does not join is waited for that long, and so is the quorum.
        """
        began = reminded = time.monotonic()
        while True:
            self.pump(0)
            self.repeat_hellos()
            possible = [name for name in self.others if self._is_possible(name)]
            if self.refusals and not possible and not self.started:
                raise NetworkError(
                    "At least one neighbour must agree to the terms.",
                    "; ".join(f"'{name}' says: {why}" for name, why in self.refusals.items())[:600],
                    "Give all peers the same recipe and the same version of codistill.",
                )
            connected = [name for name in possible if self._connections.is_connected(name)]
            waited = time.monotonic() - began
            if len(connected) >= math.ceil(self._needed(waited) * len(possible) - 1e-9):
                if not self.started:
                    self._agent.learner.join(sum(self._samples.values()))
                self.started = True
                return time.monotonic() - began
            if self.stopping():
                raise Stopped
            if waited > 1 and (reminded == began or time.monotonic() - reminded > _REMIND):
                reminded = time.monotonic()
                self._connections.tell(f"waiting for {', '.join(name for name in possible if name not in connected)}")
            self.pump(_POLL)

    # --- commands and join requests -------------------------------------------------------------------

    def pump(self, timeout: float) -> None:
        control = self._connections.next_control(timeout)
        if control is None:
            return
        match control.do:
            case "jump" if type(control.content.get("to")) is int:
                if control.content["to"] < int(self._terms["rounds"]):
                    self._meet(control.content["to"], control.sender)
            case "done":
                self.finished.add(control.sender)
            case _:
                self._connections.sessions.strike(control.sender, f"an unknown command '{control.do[:40]}'")

    def _presence_changed(self, name: str) -> None:
        """A session of a neighbour has appeared or disappeared: send a hello to a new one."""
        new = self._connections.visible.get(name, set()) - {self._connections.sessions.current.get(name)}
        if not self._connections.visible.get(name):
            self._differences.pop(name, None)  # what comes next may differ in something else
        if new:
            self._send_hello(name)

    def repeat_hellos(self) -> None:
        """To neighbours that are visible and not connected: a hello may have come before the subscription existed."""
        if time.monotonic() - self._last_hello > _RETRY:
            self._last_hello = time.monotonic()
            for name in self.others:
                waits = self._connections.visible.get(name) and not self._connections.is_connected(name)
                if waits and name not in self.refusals:
                    self._send_hello(name)

    def _send_hello(self, name: str) -> None:
        samples = len(self._agent.shard)
        self._connections.command(
            name, kind=FrameKind.HELLO, do="hello", at=self.at, samples=samples, terms=self._terms
        )

    def _on_hello(self, hello: Control) -> None:
        name, session_id = hello.sender, hello.header.session_id
        if hello.do == "refused" and self.started:
            self._connections.sessions.exclude(name, "it refuses to continue with this peer")
            return
        if hello.do == "refused":
            # It refuses for itself only: this peer starts with the others, if there are any.
            if name not in self.refusals:
                self.refusals[name] = printable(str(hello.content.get("why")), _WHY)
                self.tell(f"'{name}' refuses this peer: {self.refusals[name]}")
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
        new = self._connections.sessions.current.get(name) != session_id
        self._connections.open_session(name, session_id, hello.header.number)
        if not new:
            return
        self.finished.discard(name)
        self.refusals.pop(name, None)
        self._differences.pop(name, None)
        meeting = min(max(self.at, at) + 1, int(self._terms["rounds"]))
        self._connections.meeting_turn[name] = Turn(meeting)
        self._connections.newest_turn.pop(name, None)
        self._send_hello(name)  # if it was connected before, this tells it which round this peer is in
        self._connections.tell(f"'{name}' joined")
        self._meet(meeting, name)

    def _refused_by(self, refusal: Refusal) -> None:
        """A neighbour does not accept the connection itself: this peer is not in its graph, or revoked."""
        self._connections.tell(f"'{refusal.sender}' does not accept this peer: {refusal.why}")
        if refusal.final and not self.started:
            self.refusals[refusal.sender] = refusal.why


class PeerRuntime(BasePeer):
    """Drives one agent through its rounds, in the same round as its neighbours."""

    def __init__(self, description: RunDescription, connections: Connections) -> None:
        super().__init__(description, connections)
        self._host = linked_host(description, [self._agent], connections)
        self._host.time = None if description.clock is None else ImitatedTime(description)
        self._stopwatch = Stopwatch()
        self._resume_at = BEGIN  # phases before this one are skipped
        self._skipped = False

    def measure_baseline(self) -> Baseline:
        return measure_alone(self.description, self.stopping)

    def run(self, phase: int, present: tuple[str, ...]) -> Report:
        """Drive one phase with the connected neighbours; skip it if they are already further."""
        others, waited = self.others, self.wait()
        self._stopwatch.start()
        self._skipped = phase != BEGIN and phase < self._resume_at
        if self._skipped:
            return Report(present=(), waited=waited)
        missing = [name for name in others if not self._is_in_round(name, phase)]
        self.at = phase
        self._connections.begin(Turn(phase), [name for name in others if name not in missing])
        report = self._host.run(phase, tuple(name for name in present if name not in missing))
        for name, why in self._connections.dropped.items():
            self.tell(f"continues without '{name}': {why}")
        self.strike_refused(report.refused)
        if missing and phase != BEGIN:
            report.events.append(f"without {', '.join(missing)}")
        report.events += self._connections.take_events()
        report.waited = waited
        if self.description.clock is not None and phase != BEGIN:
            report.measures.append((self._agent.name, "time", self._stopwatch.elapsed))
        return report

    def _needed(self, waited: float) -> float:
        """At first all of them, later a quorum; after a deadline, any number."""
        network = self._connections.network
        patience = network.patience
        if patience is None and self.at >= 0:  # restarted: some may never come back
            patience = RETURN
        if not self.started and (patience is None or waited < patience):
            return 1.0
        late = self.started and network.deadline is not None and waited > network.deadline
        return 0.0 if late else network.quorum

    def _is_in_round(self, name: str, phase: int) -> bool:
        meets = self._connections.meeting_turn.get(name, Turn(phase)) <= Turn(phase)
        refused = name in self._connections.sessions.excluded or name in self.refusals
        return self._connections.is_connected(name) and meets and not refused

    def _meet(self, to: int, whom: str) -> None:
        """Skip the rounds up to one, and tell the other neighbours, which may be behind as well."""
        if to <= max(self.at + 1, self._resume_at):
            return
        self._resume_at = to
        self.tell(f"skips rounds to meet '{whom}' in round {to + 1}")
        connected = [name for name in self.others if self._connections.is_connected(name)]
        self._connections.command(*connected, reached=Turn(to), do="jump", to=to)

    def evaluate(self, samples: int | None, views: dict[str, View] | None = None) -> dict[str, Scores]:
        if self._skipped:
            return {}
        return {self._agent.name: score(self.description, self._agent, samples, views)}

    def save(self) -> dict[str, bytes]:
        return self._stopwatch.save(self.description)

    def load(self, saved: dict[str, bytes]) -> None:
        load_nodes(self.description.nodes, saved)
        self._stopwatch.load(saved[self._agent.name])

    def finish(self, *, complete: bool) -> None:
        """Say that it is done, and stay for a while until its neighbours have heard all that it said."""
        if not complete:
            return
        self.send_done()
        end = time.monotonic() + _LINGER
        while time.monotonic() < end and any(
            self._connections.is_connected(name) and name not in self.finished for name in self.others
        ):
            self.pump(_POLL)


# --- Without rounds -------------------------------------------------------------------------------------


class PeerWithoutRounds(BasePeer):
    """Drives one agent through rounds of its own, in a thread; this one waits for the ends of periods."""

    def __init__(self, description: RunDescription, connections: Connections) -> None:
        super().__init__(description, connections)
        assert description.clock is not None
        self._period = description.clock.period
        self._links = LinkDriver(description, connections)
        self._driver = self._links.driver
        self._begun = False
        self._saved = b""  # its state at the end of a round, once in a period
        self._scores: Scores = {}
        self._judged = -1  # the period in which it was last evaluated and saved
        self._report, self._lock = Report(), threading.Lock()
        self._thread: threading.Thread | None = None
        self._ends = threading.Event()  # the thread is to end, or has ended
        self._error: BaseException | None = None

    def run(self, phase: int, present: tuple[str, ...]) -> Report:
        """Wait for the end of a period, while another thread runs the rounds."""
        waited = self._begin(max(0, phase)) if self._thread is None else 0.0
        if phase == BEGIN:
            return Report(waited=waited)
        self.at, end = phase, (phase + 1) * self._period
        while (left := end - self._links.now / SECOND) > 0:
            if self.stopping():
                raise Stopped
            self._ends.wait(min(left, _POLL))
            self._raise_error()
        if self.description.spec.is_last(phase):
            self._end()
        with self._lock:
            report, self._report = self._report, Report()
        name = self._agent.name
        report.measures += [(name, "time", end), (name, "own_rounds", float(self._driver.done))]
        report.waited = waited
        return report

    def _begin(self, phase: int) -> float:
        """Start the rounds, when a quorum of the neighbours has joined. Seconds waited."""
        waited = self.wait()
        if not self._begun:
            self._links.begin(sum(self._samples.values()))
        self._save()
        self._links.set_time(phase * self._period)
        self._thread = threading.Thread(target=self._work, name=f"rounds of {self._agent.name}", daemon=True)
        self._thread.start()
        return waited

    def _needed(self, waited: float) -> float:
        """A quorum; with patience, at first all of them. A restarted peer waits a few seconds at most."""
        network = self._connections.network
        if self.at >= 0 and waited > RETURN:
            return 0.0
        return 1.0 if network.patience is not None and waited < network.patience else network.quorum

    # --- the thread of the rounds -------------------------------------------------------------------

    def _work(self) -> None:
        try:
            with one_thread():  # which is set for each thread
                while not self._ends.is_set():
                    self.pump(0)
                    self.repeat_hellos()
                    if self._links.advance():
                        self._end_round()
        except BaseException as error:  # raised in the thread that waits for the period
            self._error = error
        finally:
            self._ends.set()

    def _end_round(self) -> None:
        self.strike_refused(self._links.refused)
        period, plan = self._links.period, self.description.spec
        if period == self._judged:
            return
        self._judged = period
        if plan.is_evaluated(period):
            self._scores = score(self.description, self._agent, plan.evaluate_samples)
        self._save()
        self._take_report()

    def _take_report(self) -> None:
        with self._lock:
            self._report = self._report.add(self._links.take_report())
            self._report.events += self._connections.take_events()

    def _save(self) -> None:
        self._saved = pack({**self._driver.dump(), "own_rounds": self._driver.done})

    def _end(self) -> None:
        """End the thread; the agent returns to the end of its last completed round."""
        self._ends.set()
        if self._thread is not None and self._thread.is_alive():
            self._thread.join()
        self._raise_error()
        if self._thread is not None:
            self._driver.abandon()
            self._save()
            self._take_report()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    # --- results ------------------------------------------------------------------------------------

    def evaluate(self, samples: int | None, views: dict[str, View] | None = None) -> dict[str, Scores]:
        """Its newest scores; at the end, those of its last completed round."""
        if views is not None:
            self._scores = score(self.description, self._agent, samples, views)
        return {self._agent.name: self._scores}

    def save(self) -> dict[str, bytes]:
        """Its state of a completed round, and how many there were."""
        return {self._agent.name: self._saved or pack({**record_of(self._agent).dump(), "own_rounds": 0})}

    def load(self, saved: dict[str, bytes]) -> None:
        state: dict[str, Any] = unpack(saved[self._agent.name])
        record_of(self._agent).resume(state)
        self._driver.done, self._begun = state["own_rounds"], True

    def finish(self, *, complete: bool) -> None:
        self._end()
        if complete:
            self.send_done()

    def close(self) -> None:
        self._ends.set()
        if self._thread is not None:
            self._thread.join()
        super().close()


# --- Opening --------------------------------------------------------------------------------------------


def open_peer(
    description: RunDescription,
    network: Network,
    own: Credentials | None,
    listen: str,
    dial: Mapping[str, str],
    log: EventLog,
    audit: AuditLog | None = None,
    policy: Policy = ANYTHING,
) -> PeerRuntime | PeerWithoutRounds:
    others = neighbours(description.topology, description.names[0])
    name, limit = description.names[0], network.message_limit or derived_limit(description)
    transport = Transport(name, others, network, own, listen=listen, dial=dial, limit=limit, tell=log.tell)
    checked = audited(transport, audit, policy)
    make = PeerWithoutRounds if description.asynchronous else PeerRuntime
    return make(description, Connections(checked, network, log.tell, deadline=network.deadline))


def neighbours(topology: Topology, name: str) -> list[str]:
    """All peers that one sends to or receives from, in the order of the topology."""
    linked = {*topology.neighbours(name), *topology.sources(name)}
    return [other for other in topology.names if other in linked]


def check_neighbours(topology: Topology, name: str, dialled: Mapping[str, str]) -> None:
    linked = neighbours(topology, name)
    for other in dialled:
        if other not in linked:
            raise NetworkError(
                f"A peer of '{name}' must be its neighbour in the topology.",
                f"'{other}'",
                f"Its neighbours are: {', '.join(linked) or 'none'}.",
            )
