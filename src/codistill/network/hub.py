"""The hub of a federation between machines, with rounds and without.

With rounds it waits for the agents, runs the rounds, and counts them. An agent that disconnects or is late is dropped
from the current round. Below the quorum a round is retried from the state before it. An agent's model and state stay
with the agent: the hub only says which rounds count.

Without rounds it is a relay that answers each message when it arrives, and waits for nobody. Each period of the run's
clock gives one set of rows, with what agents have last reported; after the last period all agents stop. An agent that
joins late, or comes back, starts at once.
"""

from __future__ import annotations

import json
import secrets
import time
from collections import Counter
from pathlib import Path
from typing import Any

from codistill.certs.credentials import Credentials
from codistill.core.errors import CheckpointError, MessageError
from codistill.core.files import write_atomically
from codistill.core.text import parse_json
from codistill.engine.description import RunDescription
from codistill.engine.exchange import Frame, Report
from codistill.engine.host import BEGIN
from codistill.engine.runtime import ShouldStop, Stopped, load_nodes, never, save_nodes
from codistill.engine.without_rounds import Messages, RelayDriver
from codistill.network.agent_rounds import Stopwatch, linked_host
from codistill.network.base_hub import POLL, BaseHub
from codistill.network.commands import Unreliable, checked_report, checked_scores, checked_steps
from codistill.network.connections import Connections, Control
from codistill.network.frames import Turn
from codistill.network.log import EventLog, timestamp
from codistill.network.options import RETURN, Network, derived_limit
from codistill.network.transport import Transport
from codistill.nodes.clock import nanoseconds
from codistill.nodes.record import record_of
from codistill.results.outputs import View
from codistill.results.records import Baseline, Scores
from codistill.topology import HUB
from codistill.wire.state import pack, unpack

RUN = "network.json"  # in the folder of a run with a hub: its name


class HubRuntime(BaseHub):
    """Drives the agents of a roster by commands through common rounds, and the hub's own node in this process."""

    def __init__(self, description: RunDescription, connections: Connections, *, run: str) -> None:
        super().__init__(description, connections, run=run)
        self._host = linked_host(description, description.nodes, connections)
        self._stopwatch = Stopwatch()
        self._unstored: set[str] = set()  # who has kept its last round in memory only
        self._unreliable = Unreliable()

    def start(self, done: int, should_stop: ShouldStop = never) -> None:
        """Continue when all agents have joined, also those not sampled in the next round."""
        super().start(done, should_stop)
        if 0 < done < self.description.spec.rounds:
            self.wait_for(self.description.names)

    def run(self, phase: int, present: tuple[str, ...]) -> Report:
        """Drive one phase to its end with the agents that are connected, as often as it takes to reach the quorum."""
        if phase == BEGIN:  # each agent begins by itself, at its first command
            began = time.monotonic()
            self.wait_for(self.description.names)  # all of them, also those whom the first rounds leave out
            self._stopwatch.start()
            return Report(waited=time.monotonic() - began)
        attempt, waited = 0, 0.0
        self._stopwatch.start()
        before = save_nodes(self.description.nodes)
        while True:
            began = time.monotonic()
            joined = self.wait_for(present)
            waited += time.monotonic() - began
            left_out = self._unreliable.among(joined, phase)
            if len(joined) - len(left_out) >= self.quorum(present):
                joined = tuple(name for name in joined if name not in left_out)
            self.tell_missed(joined)
            began = time.monotonic()
            report = self._attempt(Turn(phase, attempt), joined)
            done = report.present or ()
            if len(done) >= self.quorum(present):
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
                self.statuses[name].miss(self.done)
        self.grace.completed(done, time.monotonic() - began)
        store = self.description.spec.has_checkpoint(self.done)
        self._unstored = self._unstored - set(done) if store else self._unstored | set(done)
        number = self.ask(done, do="keep", round=self.done, store=store)
        self.keeping = dict.fromkeys(done, number)
        report.events = self._connections.take_events()
        report.waited = waited
        if self.description.clock is not None:
            elapsed = self._stopwatch.elapsed
            report.measures += [(name, "time", elapsed) for name in self.description.names]
        self.tell_state(status="running", round=self.done, present=list(done), moved=timestamp())
        return report

    def _attempt(self, turn: Turn, present: tuple[str, ...]) -> Report:
        number = self.ask(
            present, do="run", turn=[turn.phase, turn.attempt], present=list(present), samples=self.samples()
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
        # The time spent waiting for their messages counts as well.
        for name, answer in self.collect(number, present, waited=self._connections.waited).items():
            content, names = answer.content.get("report"), self.description.names
            own = self.checked(name, checked_report, name, content, names, self.description.scores)
            if own is not None and name not in self._connections.dropped and not self.is_excluded(name):
                report = report.add(own)
                done.append(name)
        report.present = tuple(name for name in present if name in done)
        return report

    def evaluate(self, samples: int | None, views: dict[str, View] | None = None) -> dict[str, Scores]:
        """Let every connected agent evaluate itself; only figures come back."""
        free = [name for name in self.description.names if self.is_free(name, keeping=True)]
        number = self.ask(free, do="evaluate", samples=samples, of=self.samples(), views=views is not None)
        answers = self.collect(number, free)
        return {name: self.take_scores(name, answers[name], views) for name in free if name in answers}

    def measure_baseline(self) -> Baseline:
        joined = self.wait_for(self.description.names)
        for name in joined:
            self.statuses[name].trained = 0
        self.tell_state(status="training alone, as a baseline")
        rounds = self.description.spec.rounds
        self.alone = self.ask(joined, do="alone", rounds=rounds, samples=self.samples())
        answers = self.collect(self.alone, joined, self.stopping)
        for name in joined:
            if name not in answers and not self.stopping():
                self.tell(f"the baseline of '{name}' is missing")
        steps = {
            name: self.checked(name, checked_steps, answer.content["steps"], rounds)
            for name, answer in answers.items()
            if answer.content.get("steps") is not None
        }
        return Baseline(
            {name: self.take_scores(name, answers[name]) if name in answers else {} for name in self.description.names},
            {name: counts for name, counts in steps.items() if counts is not None},
        )

    def save(self) -> dict[str, bytes]:
        for number in set(self.keeping.values()):
            self.collect(number, [name for name, asked in self.keeping.items() if asked == number])
        self.keeping = {}
        behind = [name for name in self.description.names if name in self._unstored and self.is_free(name)]
        self._unstored -= self.collect(self.ask(behind, do="store"), behind).keys()
        return self._stopwatch.save(self.description)

    def load(self, saved: dict[str, bytes]) -> None:
        """Restore the hub's saved state; agents restore theirs when they join."""
        load_nodes(self.description.nodes, saved)
        self._stopwatch.load(saved[HUB])


# --- Without rounds -------------------------------------------------------------------------------------

_REPORTS = 3  # of one agent in a period; an honest one sends one, and another one at the end
_MOST_ROUNDS = 1 << 53  # of an agent's own: exact as a float


class HubWithoutRounds(BaseHub):
    """Answers the connected agents, period by period; the environment of the relay's driver."""

    def __init__(self, description: RunDescription, connections: Connections, *, run: str) -> None:
        super().__init__(description, connections, run=run)
        assert description.hub is not None
        assert description.clock is not None
        self._clock, self._hub = description.clock, description.hub
        self.report = Report()  # of the current period
        messages = Messages(description, self, connections.transport.limit)
        self._relay = RelayDriver(self._hub, description, self, messages)
        self._zero: float | None = None  # when the run's time was 0; None: it has not begun
        self._here: set[str] = set()  # who was connected in the current period
        self.awaited: set[str] = set()  # who has ever joined
        self._reports: Counter[str] = Counter()  # of the current period
        self._own_rounds: dict[str, int] = {}  # as agents have reported
        self._scores: dict[str, Scores] = {}  # the newest of each
        self._views: dict[str, View] = {}  # of the last evaluation
        connections.without_turns()

    def run(self, phase: int, present: tuple[str, ...]) -> Report:
        waited = self._begin(max(0, phase)) if self._zero is None else 0.0
        if phase == BEGIN:  # each agent begins by itself, when it starts
            return Report(waited=waited)
        end = (phase + 1) * self._clock.period
        self._here = {name for name in self.description.names if self.is_ready(name)}
        while (left := end - self._elapsed) > 0:
            self._pump(min(left, POLL))
        if self.description.spec.is_last(phase):
            self._ask_for_last_scores()
        report, self.report = self.report, Report()
        report.collect(self._hub)
        for name in self.description.names:
            own = float(self._own_rounds.get(name, 0))
            report.measures += [(name, "time", end), (name, "own_rounds", own)]
            self._connections.commands.grant(name)  # to report on a period it is not asked
        self._reports.clear()
        report.present = tuple(name for name in self.description.names if name in self._here and name in present)
        report.events, report.waited = self._connections.take_events(), waited
        self.done = phase + 1
        self.tell_state(status="running", round=phase + 1, present=list(report.present), moved=timestamp())
        return report

    def _begin(self, phase: int) -> float:
        """Begin or continue when a quorum has joined. Seconds waited.

        With `network.patience` the start waits that long for all. A restarted hub waits a few seconds at most.
        """
        began, names, network = time.monotonic(), self.description.names, self._connections.network
        while True:
            joined, waited = [name for name in names if self.is_ready(name)], time.monotonic() - began
            enough = len(joined) >= self.quorum(names) and (
                network.patience is None or len(joined) == len(names) or waited > network.patience
            )
            if enough or (phase > 0 and waited > RETURN):
                break
            self._pump(POLL)
        self._zero = time.monotonic() - phase * self._clock.period
        self.tell_state(status="running")
        for name in joined:
            self._go(name)
        return time.monotonic() - began

    def _pump(self, timeout: float) -> None:
        if self.stopping():
            raise Stopped
        for frame in self._connections.take_event(timeout):
            self._serve(frame)
        while (control := self._connections.next_control(0)) is not None:
            self.handle(control)

    def _serve(self, frame: Frame) -> None:
        if frame.is_end or frame.sender in self._connections.sessions.excluded:
            return
        if frame.asks and not self._connections.takes_answers(frame.sender, self.done + 1):
            self._connections.send_now(frame.sender, None)
            return
        before = len(record_of(self._hub).rejected)
        self._relay.serve(frame.sender, None if frame.lost else frame.payload, asks=frame.asks)
        for sender, reason in record_of(self._hub).rejected[before:]:
            self._connections.sessions.strike(sender, reason)

    # --- the environment of the relay -----------------------------------------------------------------

    @property
    def _elapsed(self) -> float:
        """Seconds since the start of the run."""
        return 0.0 if self._zero is None else time.monotonic() - self._zero

    @property
    def now(self) -> int:
        """Nanoseconds since the start of the run."""
        return nanoseconds(self._elapsed)

    def send(self, sender: str, receiver: str, data: bytes | None, *, asks: bool = False) -> bool:
        """Send an answer; an agent that would not accept it learns that there is none."""
        return self._connections.send_now(receiver, data) or self._connections.send_now(receiver, None)

    # --- agents ---------------------------------------------------------------------------------------

    def on_ready(self, name: str) -> None:
        self.awaited.add(name)
        self._here.add(name)
        if self._zero is not None:
            self._go(name)

    def _go(self, name: str) -> None:
        plan = self.description.spec
        self._connections.command(
            name, do="go", elapsed=self._elapsed, samples=self.samples(), part=plan.evaluate_samples,
            evaluate_every=plan.evaluate_every, store_every=plan.checkpoint_every,
        )  # fmt: skip

    def handle(self, control: Control) -> None:
        """Use an agent's report on its rounds and its scores, if all of it is valid; or another command or answer."""
        if control.do != "report":
            super().handle(control)
            return
        name, content = control.sender, control.content
        self._reports[name] += 1
        if self._reports[name] > _REPORTS:
            self._connections.sessions.strike(name, f"more than {_REPORTS} reports in a period")
            return
        names = self.description.names
        done = self.checked(name, _checked_rounds, content.get("own_rounds"))
        own = self.checked(name, checked_report, name, content.get("report"), names, self.description.scores)
        scores = self.checked(name, checked_scores, content.get("scores"), self.description.task_scores)
        if done is None or own is None or scores is None:
            return
        self._own_rounds[name] = done
        self._scores[name] = scores or self._scores.get(name, {})
        self.report = self.report.add(own)

    # --- results --------------------------------------------------------------------------------------

    def evaluate(self, samples: int | None, views: dict[str, View] | None = None) -> dict[str, Scores]:
        """The newest scores that agents have reported; at the end they are asked, for `network.linger` at most."""
        if views is not None:
            views.update(self._views)
        return {name: self._scores[name] for name in self.description.names if name in self._scores}

    def _ask_for_last_scores(self) -> None:
        end = time.monotonic() + self._connections.network.linger
        here = [name for name in self.description.names if self.is_ready(name)]
        number = self.ask(here, do="evaluate", samples=None, of=self.samples(), views=True)
        answers = self.collect(number, here, lambda: time.monotonic() > end or self.stopping(), pump=self._pump)
        for name in self.description.names:
            if name in answers:
                self._scores[name] = self.take_scores(name, answers[name], self._views)

    def measure_baseline(self) -> None:
        """There is none: it would take as long as the run itself."""
        self.tell("agents are not trained alone as a baseline in a run without rounds between machines")

    def save(self) -> dict[str, bytes]:
        """The relay's state, and what agents have reported; they keep their own states."""
        said = {"served": self._relay.served, "own_rounds": self._own_rounds, "scores": self._scores}
        return {self._hub.name: pack({**record_of(self._hub).dump(), "said": said})}

    def load(self, saved: dict[str, bytes]) -> None:
        state: dict[str, Any] = unpack(saved[self._hub.name])
        record_of(self._hub).resume(state)
        said = state["said"]
        self._relay.served, self._own_rounds, self._scores = said["served"], said["own_rounds"], said["scores"]


def _checked_rounds(rounds: Any) -> int:
    if type(rounds) is not int or not 0 <= rounds < _MOST_ROUNDS:
        raise MessageError("A number of rounds must be an integer.", f"{rounds!r}"[:80], "Send how many are done.")
    return rounds


# --- Opening --------------------------------------------------------------------------------------------


def open_hub(
    description: RunDescription, network: Network, own: Credentials | None, listen: str, log: EventLog, run: str
) -> HubRuntime | HubWithoutRounds:
    limit = network.message_limit or derived_limit(description)
    transport = Transport(HUB, description.topology.names, network, own, listen=listen, limit=limit, tell=log.tell)
    connections = Connections(transport, network, log.tell, deadline=network.deadline, leads=True)
    make = HubWithoutRounds if description.asynchronous else HubRuntime
    hub = make(description, connections, run=run)
    hub.on_state, log.is_of_hub = log.state, True
    return hub


def run_name(folder: Path | None) -> str:
    """The name of the run in a folder, by which agents know their states of it; made once."""
    if folder is None:
        return secrets.token_hex(16)
    path = folder / RUN
    if not path.exists():
        write_atomically(path, json.dumps({"run": secrets.token_hex(16)}).encode())
    try:
        return str(parse_json(path.read_text("utf-8"))["run"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is corrupted.", f"{error}", "Start in another folder.") from None
