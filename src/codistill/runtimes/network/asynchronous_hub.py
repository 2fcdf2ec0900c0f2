"""The hub of a run without rounds between machines: a relay that answers each message when it arrives.

It waits for nobody. A period of the run's clock gives one set of rows, with what agents have last said of themselves;
after the last period all are told to stop. An agent that joins late, or comes back, is told to go at once.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from codistill.clock import nanoseconds
from codistill.effects import Send
from codistill.errors import MessageError
from codistill.results.outputs import View
from codistill.results.records import Scores
from codistill.runtimes.carrier import Frame
from codistill.runtimes.description import RunDescription
from codistill.runtimes.host import BEGIN
from codistill.runtimes.message_in_transit import Parcel
from codistill.runtimes.network.answers import checked_report, checked_scores
from codistill.runtimes.network.connections import Connections
from codistill.runtimes.network.control import Control
from codistill.runtimes.network.event_log import timestamp
from codistill.runtimes.network.hub_agents import POLL
from codistill.runtimes.network.hub_runtime import HubRuntime
from codistill.runtimes.network.options import RETURN
from codistill.runtimes.outgoing import Outgoing
from codistill.runtimes.relay import Relay
from codistill.runtimes.round_report import Report
from codistill.runtimes.runtime import ShouldStop, Stopped, never
from codistill.topology import HUB
from codistill.wire.state import pack, unpack

_REPORTS = 3  # of one agent in a period; an honest one sends one, and another one at the end
_MOST_ROUNDS = 1 << 53  # of an agent's own: exact as a float


class AsynchronousHub(HubRuntime):
    """Serves the agents that are there, period by period."""

    def __init__(self, description: RunDescription, connections: Connections, *, run: str) -> None:
        super().__init__(description, connections, run=run)
        assert description.hub is not None
        assert description.clock is not None
        self._clock, self._hub = description.clock, description.hub
        self._relay = Relay(self._hub, description.protocol)
        self._outgoing = Outgoing(description.faults, (), description.compression)
        self._zero: float | None = None  # when the run's time was 0; None: it has not begun
        self._phase = 0
        self._report = Report()  # of the current period
        self._here: set[str] = set()  # who was there in the current period
        self._joined: set[str] = set()  # who has ever joined
        self._reports: Counter[str] = Counter()  # of the current period
        self._own_rounds: dict[str, int] = {}  # as agents have said
        self._scores: dict[str, Scores] = {}  # the newest of each
        self._views: dict[str, View] = {}  # of the last evaluation
        self.agents.on_ready, self.agents.on_report = self._welcome, self._take_report
        connections.without_turns()

    # --- the time of the run ------------------------------------------------------------------------

    def start(self, done: int, should_stop: ShouldStop = never) -> None:
        """Set how many periods are over; nobody is waited for yet."""
        self.agents.done, self.agents.stopping = done, should_stop
        self._phase = done
        self.agents.tell_state(status="waiting", round=done, rounds=self.description.plan.rounds, moved=timestamp())

    def _begin(self, phase: int) -> float:
        """Begin, or go on, when a quorum has joined: before that there is nobody to serve. Seconds waited.

        With `network.patience` the start waits that long for all. A restarted hub waits a few seconds at most.
        """
        began, names, network = time.monotonic(), self.description.names, self._connections.network
        while True:
            joined, waited = [name for name in names if self.agents.is_ready(name)], time.monotonic() - began
            enough = len(joined) >= self.agents.quorum(names) and (
                network.patience is None or len(joined) == len(names) or waited > network.patience
            )
            if enough or (phase > 0 and waited > RETURN):
                break
            self._pump(POLL)
        self._zero = time.monotonic() - phase * self._clock.period
        self.agents.tell_state(status="running")
        for name in joined:
            self._go(name)
        return time.monotonic() - began

    @property
    def _elapsed(self) -> float:
        assert self._zero is not None
        return time.monotonic() - self._zero

    def run(self, phase: int, present: tuple[str, ...]) -> Report:
        """Serve until the end of a period."""
        waited = 0.0
        if self._zero is None:
            waited = self._begin(max(0, phase))
        if phase == BEGIN:  # each agent begins by itself, when it is told to go
            return Report(waited=waited)
        self._phase, end = phase, (phase + 1) * self._clock.period
        self._here = {name for name in self.description.names if self.agents.is_ready(name)}
        while (left := end - self._elapsed) > 0:
            self._pump(min(left, POLL))
        if self.description.plan.is_last(phase):
            self._ask_for_last_scores()
        report, self._report = self._report, Report()
        report.collect(self._hub)
        for name in self.description.names:
            own = float(self._own_rounds.get(name, 0))
            report.measures += [(name, "time", end), (name, "own_rounds", own)]
            self._connections.allow_command(name)
        self._reports.clear()
        report.present = tuple(name for name in self.description.names if name in self._here and name in present)
        report.events, report.waited = self._connections.take_events(), waited
        self.agents.done = phase + 1
        self.agents.tell_state(status="running", round=phase + 1, present=list(report.present), moved=timestamp())
        return report

    def _pump(self, timeout: float) -> None:
        """Handle what arrives: answer messages, take reports."""
        if self.agents.stopping():
            raise Stopped
        for frame in self._connections.take_event(timeout):
            self._serve(frame)
        while (control := self._connections.next_control(0)) is not None:
            self.agents.handle(control)

    # --- agents -------------------------------------------------------------------------------------

    def _welcome(self, name: str) -> None:
        self._joined.add(name)
        self._here.add(name)
        if self._zero is not None:
            self._go(name)

    def _go(self, name: str) -> None:
        plan = self.description.plan
        self._connections.command(
            name, do="go", elapsed=self._elapsed, samples=self.agents.samples(), part=plan.evaluate_samples,
            evaluate_every=plan.evaluate_every, store_every=plan.checkpoint_every,
        )  # fmt: skip

    def _take_report(self, control: Control) -> None:
        """What an agent says of its rounds and its scores, if all of it may be used."""
        name, content = control.sender, control.content
        self._reports[name] += 1
        if self._reports[name] > _REPORTS:
            self._connections.sessions.strike(name, f"more than {_REPORTS} reports in a period")
            return
        commands, names = self.agents.commands, self.description.names
        done = commands.checked(name, _checked_rounds, content.get("own_rounds"))
        own = commands.checked(name, checked_report, name, content.get("report"), names, self.description.scores)
        scores = commands.checked(name, checked_scores, content.get("scores"), self.description.task_scores)
        if done is None or own is None or scores is None:
            return
        self._own_rounds[name] = done
        self._scores[name] = scores or self._scores.get(name, {})
        self._report = self._report.add(own)

    # --- messages -----------------------------------------------------------------------------------

    def _serve(self, frame: Frame) -> None:
        name, answer = frame.sender, None
        if frame.is_end or name in self._connections.sessions.excluded:
            return
        if frame.asks and not self._connections.takes_answers(name, self._phase + 1):
            self._connections.send_now(name, None)
            return
        if not frame.lost:
            self._report.count_received(HUB, frame.payload)
            parcel = Parcel(frame.payload, self._host.message_limit, self.description.compression or False)
            before = len(self._hub.rejected)
            now = 0.0 if self._zero is None else self._elapsed
            answer = self._relay.answer(name, parcel, nanoseconds(now))
            for sender, reason in self._hub.rejected[before:]:
                self._connections.sessions.strike(sender, reason)
        if not frame.asks:
            return
        data = None
        if answer is not None:
            [(_, data)] = self._outgoing.packed(
                self._hub, Send({name: answer}), self._phase, self._relay.served, self._report
            )
            self._outgoing.forget_messages()
        if not self._connections.send_now(name, data):
            self._connections.send_now(name, None)

    # --- results ------------------------------------------------------------------------------------

    def evaluate(self, samples: int | None, views: dict[str, View] | None = None) -> dict[str, Scores]:
        """The newest scores that agents have told; at the end they are asked, for `network.linger` at most."""
        if views is not None:
            views.update(self._views)
        return {name: self._scores[name] for name in self.description.names if name in self._scores}

    def _ask_for_last_scores(self) -> None:
        agents, end = self.agents, time.monotonic() + self._connections.network.linger
        here = [name for name in self.description.names if agents.is_ready(name)]
        number = agents.commands.ask(here, do="evaluate", samples=None, of=agents.samples(), views=True)
        answers = agents.commands.collect(
            number, here, lambda: self._pump(POLL), lambda: time.monotonic() > end or agents.stopping()
        )
        for name in self.description.names:
            if name in answers:
                self._scores[name] = self._take_scores(name, answers[name], self._views)

    def measure_baseline(self) -> None:  # type: ignore[override]
        """There is none: agents train for as long as the run goes on, which would have to be waited for."""
        self.agents.tell("agents are not trained alone as a baseline in a run without rounds between machines")

    def save(self) -> dict[str, bytes]:
        """The relay's state, and what agents have said of themselves; they keep their own states."""
        said = {"served": self._relay.served, "own_rounds": self._own_rounds, "scores": self._scores}
        return {self._hub.name: pack({**self._hub.dump(), "said": said})}

    def load(self, saved: dict[str, bytes]) -> None:
        """Return to what was saved."""
        state: dict[str, Any] = unpack(saved[self._hub.name])
        self._hub.resume(state)
        said = state["said"]
        self._relay.served, self._own_rounds, self._scores = said["served"], said["own_rounds"], said["scores"]

    def _awaited_at_the_end(self) -> Sequence[str]:
        """Of those that never joined nobody has to be told."""
        return [name for name in self.description.names if name in self._joined]


def _checked_rounds(rounds: Any) -> int:
    if type(rounds) is not int or not 0 <= rounds < _MOST_ROUNDS:
        raise MessageError("A number of rounds must be an integer.", f"{rounds!r}"[:80], "Send how many are done.")
    return rounds
