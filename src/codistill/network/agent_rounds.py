"""What an agent of a network does in its rounds, with a common round or without, and when its hub commands it.

A slow agent and slow messages of the run's clock are imitated by waiting, so that a recipe shows in real time what
they cost.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection
from typing import Any

from codistill.core.errors import CheckpointError, NetworkError, StorageError
from codistill.engine.description import RunDescription
from codistill.engine.evaluation import score
from codistill.engine.exchange import Frame, Report, room_of
from codistill.engine.host import BEGIN, Host
from codistill.engine.runtime import ShouldStop
from codistill.engine.without_rounds import AgentDriver, Messages
from codistill.network.connections import Connections
from codistill.network.frames import Turn
from codistill.network.options import derived_limit
from codistill.network.state_store import StateStore
from codistill.nodes.agent import Agent
from codistill.nodes.clock import SECOND, nanoseconds
from codistill.nodes.node import Node, Send
from codistill.nodes.record import record_of
from codistill.results.outputs import View
from codistill.results.records import Baseline, RoundEnded, Scores
from codistill.runtimes.simulation import measure_alone
from codistill.topology import HUB
from codistill.wire.state import pack, unpack

_PROGRESS = 0.5  # seconds between two messages of an agent that trains alone


class AgentWork(ABC):
    """What agents do in both kinds of runs with a hub: continue with a stored state, begin, and evaluate themselves."""

    is_going = False  # whether it does something when the hub does not command it
    uncounted = False  # whether its state includes a round that the hub has not counted

    def __init__(self, description: RunDescription, connections: Connections) -> None:
        self._description, self._connections = description, connections
        self._agent = description.agents[0]
        connections.transport.accept(connections.network.message_limit or derived_limit(description))
        self.states = StateStore(None)  # of the run, once its name is known
        self._begun = False

    @abstractmethod
    def return_to(self, done: int) -> int:
        """Continue when the hub has counted `done` rounds; the number of rounds of its state."""

    @abstractmethod
    def _begin(self, samples: int) -> None:
        """Run the phase before its first round, also if it is only evaluated."""

    def leave(self) -> None:
        """Stop where this agent can be evaluated; with rounds, nothing is under way between two commands."""

    def evaluate(self, part: int | None, samples: int, *, views: bool) -> tuple[View, Scores]:
        """Its outputs on the common test set, if `views`, and its scores."""
        self._begin(samples)
        self.leave()
        seen: dict[str, View] = {}
        scores = score(self._description, self._agent, part, seen if views else None)
        return seen.get(self._agent.name, {}), scores

    def _put(self, done: int, state: dict[str, Any], *, store: bool) -> str | None:
        """Keep a state; returns why it could not be stored, if so."""
        try:
            self.states.put(done, pack(state), store=store)
        except StorageError as error:
            self._connections.tell(f"{error.must} Found: {error.found}. Continuing from memory: free some space.")
            return error.found
        return None

    def _resume(self, found: tuple[int, bytes]) -> int:
        """Continue with a stored state; the number of its rounds."""
        try:
            record_of(self._agent).resume(unpack(found[1]))
        except Exception as error:  # a state of another model: each library raises errors of its own
            raise CheckpointError(
                "The stored state must fit the agent's model and protocol.",
                f"{type(error).__name__}: {error}"[:200],
                "Use the model that it was trained with; or choose another state by 'codistill restore'.",
            ) from error
        return found[0]


def linked_host(description: RunDescription, nodes: list[Node], connections: Connections) -> Host:
    """The host of this process, with links to other nodes: what it holds of a sender counts as held here."""
    host = description.host(nodes, connections)
    connections.backlog, host.message_limit = host.backlog, connections.transport.limit
    return host


class AgentWithRounds(AgentWork):
    """The agent of a run with rounds and a hub, with its host and its states."""

    def __init__(self, description: RunDescription, connections: Connections) -> None:
        super().__init__(description, connections)
        self._host = linked_host(description, [self._agent], connections)
        self._host.time = None if description.clock is None else ImitatedTime(description)
        self._beginning = Report()  # of the phase before the first round; sent with that of the first round

    def return_to(self, done: int) -> int:
        found = self.states.newest(done)
        if found is None:
            if self._begun:
                raise NetworkError(
                    "An agent needs a state of a round that the hub has counted.",
                    f"the hub has counted {done} rounds, and all states of this agent are newer",
                    "Join again with a new process: it starts with a new model.",
                )
            self.uncounted = False
            return 0
        self._begun, self.uncounted = True, False
        return self._resume(found)

    def run_round(self, turn: Turn, present: tuple[str, ...], samples: int) -> Report:
        """Take part in a round, after the phase before the first one where that is still to be done."""
        if self.uncounted:
            self.return_to(turn.phase)  # its last round was not counted
        self._begin(samples)
        self.uncounted = True
        self._connections.begin(turn, (HUB,))
        before, self._beginning = self._beginning, Report()
        report = before.add(self._host.run(turn.phase, present))
        self._connections.finish()
        return report

    def _begin(self, samples: int) -> None:
        record_of(self._agent).join(samples)
        if not self._begun:
            self._connections.begin(Turn(BEGIN), ())
            self._beginning = self._host.run(BEGIN, self._agent.roster)
            self._begun = True
            self.states.put(0, pack(record_of(self._agent).dump()), store=False)

    def keep(self, done: int, *, store: bool) -> str | None:
        """Keep the state of a round that counts; returns what went wrong, if anything did."""
        self.uncounted = False
        why = self._put(done, record_of(self._agent).dump(), store=store)
        return None if why is None else f"it could not store round {done}: {why}; it continues from memory"

    def store(self) -> str | None:
        try:
            self.states.store_newest()
        except StorageError as error:
            return f"it could not store its state: {error.found}; it continues from memory"
        return None

    def train_alone(self, samples: int, number: int, should_stop: ShouldStop) -> Baseline:
        """The scores of a copy of its model that is trained alone; `number`: of the hub's command."""
        self._agent.learner.join(samples)
        progress = _TrainingAlone(self._connections, number)
        return measure_alone(self._description, should_stop, [progress])


class _TrainingAlone:
    """Reports to the hub which rounds of training alone are done: its deadline is then for the next one only."""

    def __init__(self, connections: Connections, number: int) -> None:
        self._connections, self._number = connections, number
        self._told = time.monotonic()

    def round_ended(self, record: RoundEnded) -> None:
        if time.monotonic() - self._told > _PROGRESS:
            self._told = time.monotonic()
            self._connections.command(HUB, do="working", number=self._number, round=record.round)


# --- Without rounds -------------------------------------------------------------------------------------

_ANY = 1 << 62  # a number of rounds above all others


class AgentWithoutRounds(AgentWork):
    """The agent of a run without rounds with a hub; its states are numbered by its own rounds, which all count."""

    def __init__(self, description: RunDescription, connections: Connections) -> None:
        super().__init__(description, connections)
        self._links = LinkDriver(description, connections)
        self._driver, self.take_report = self._links.driver, self._links.take_report
        self._kept = -1  # the rounds of its own that it has stored last
        self._part: int | None = None  # test samples of an evaluation
        self._evaluate_every = self._store_every = 1  # periods
        self._reported = self._evaluated = self._stored = -1  # the periods in which it last did so

    @property
    def done(self) -> int:
        """Rounds of its own, since the start of the run."""
        return self._driver.done

    def return_to(self, done: int) -> int:
        """Continue as it is or, in a new process, with its newest state; the number of rounds of its own."""
        self.is_going = False  # until the hub says so
        self._driver.waits = False  # the hub was disconnected: no answer will come
        found = None if self._begun else self.states.newest(_ANY)
        if found is not None:
            self._driver.done = self._kept = self._resume(found)
            self._begun = True
        return self._driver.done

    def go(self, elapsed: float, samples: int, part: int | None, evaluate_every: int, store_every: int) -> None:
        """Start or continue `elapsed` seconds after the start of the run; evaluate and store as often as it says."""
        self._links.set_time(elapsed)
        self._part, self._evaluate_every, self._store_every = part, max(1, evaluate_every), store_every
        self._begin(samples)
        self.is_going = True

    def _begin(self, samples: int) -> None:
        if not self._begun:
            self._links.begin(samples)
            self._begun = True
        else:
            record_of(self._agent).join(samples)

    def advance(self) -> Scores | None:
        """A step of its rounds; None unless it is to report: once in a period, after a round, evaluated or not."""
        ended, period = self._links.advance(), self._links.period
        if not ended or period == self._reported:
            return None
        self._reported = period
        scores: Scores = {}
        if period // self._evaluate_every != self._evaluated:
            self._evaluated = period // self._evaluate_every
            scores = score(self._description, self._driver.last_completed(), self._part)
        if self._store_every and period // self._store_every != self._stored:
            self._stored = period // self._store_every
            self._store()
        return scores

    def _store(self) -> None:
        done = self._driver.done
        if self._begun and done != self._kept and self._put(done, self._driver.dump(), store=True) is None:
            self._kept = done

    def leave(self) -> None:
        """Return to the end of the last completed round, store it, and start no other one."""
        self.is_going = False
        self._driver.abandon()
        self._store()


_MOMENT = 0.1  # seconds that a step waits at most


class LinkDriver:
    """Drives the agent of this process in real time, with the messages of its links; its driver's environment."""

    def __init__(self, description: RunDescription, connections: Connections) -> None:
        assert description.clock is not None
        self._description, self._connections, self._clock = description, connections, description.clock
        self._agent: Agent = description.agents[0]
        self._slowness = self._clock.factor(self._agent.name, description.topology.names, description.seed)
        self.report = Report()  # since the last one was taken
        self._messages = Messages(description, self, connections.transport.limit)
        self.driver = AgentDriver(self._agent, description, self, self._messages)
        self.refused: list[tuple[str, str, str]] = []  # in the last round: (receiver, sender, reason)
        self._numbers: dict[tuple[str, str], int] = {}  # messages by sender and receiver, for their delays
        self._due = 0.0  # when the next step may happen; earlier, the agent is still computing by the run's clock
        self._zero = time.monotonic()  # when the run's time was 0
        connections.without_turns()
        connections.backlog = self._backlog

    def set_time(self, elapsed: float) -> None:
        """The run started `elapsed` seconds ago."""
        self._zero = time.monotonic() - elapsed

    @property
    def now(self) -> int:
        """Nanoseconds since the start of the run."""
        return nanoseconds(max(0.0, time.monotonic() - self._zero))

    @property
    def period(self) -> int:
        """The number of the current period, from 0."""
        return self.now // self._messages.period

    def begin(self, samples: int) -> None:
        """What an agent does before its first round; a message cannot be sent there."""
        record_of(self._agent).join(samples)
        alone = self._description.host([self._agent])
        self.report = self.report.add(alone.run(BEGIN, (self._agent.name,)))

    def advance(self) -> bool:
        """The next step, or a moment of waiting for it; True: a round has ended."""
        self._deliver(self._connections.arrived())
        left = self._due - time.monotonic()
        if left > 0:
            self._wait(left)
            return False
        done, refused = self.driver.done, len(self.report.refused)
        pause = self.driver.step()
        if pause is None:
            self._wait(_MOMENT)
        else:
            self._due = time.monotonic() + pause / SECOND
        if self.driver.running:
            self._connections.turn = Turn(self.driver.done)  # the audit log counts rounds by it
        if self.driver.done == done:
            return False
        self.refused = self.report.refused[refused:]
        return True

    def take_report(self) -> Report:
        report, self.report = self.report, Report()
        return report

    def _wait(self, seconds: float) -> None:
        self._deliver(self._connections.take_event(min(seconds, _MOMENT)))

    def _deliver(self, frames: list[Frame]) -> None:
        for frame in frames:
            if frame.is_end:
                continue
            if frame.sender == HUB and self.driver.waits:
                arrival = time.monotonic() + self._delay(HUB, self._agent.name) / SECOND
                self._due = max(self._due, arrival)
                self._count(HUB, self._agent.name)
            self.driver.deliver(frame.sender, None if frame.lost else frame.payload)

    def _backlog(self, sender: str) -> int:
        return room_of(self.driver.inbox[sender]) if sender in self.driver.inbox else 0

    # --- the environment of the driver ----------------------------------------------------------------

    def pause(self, driver: AgentDriver, since: int) -> int:
        """By how much slower than this machine the agent is, and for what it sends the longest delay."""
        pause = int(max(0.0, self._slowness - 1) * (self.now - since))
        if driver.running and isinstance(driver.effect, Send):
            pause += max((self._delay(self._agent.name, name) for name in driver.effect.messages), default=0)
        return pause

    def may_send(self, receivers: Collection[str]) -> bool:
        return all(self._connections.own_messages.take(name) for name in receivers)

    def send(self, sender: str, receiver: str, data: bytes | None, *, asks: bool = False) -> bool:
        """Send a message to a node that is connected and has taken the last ones: this one would be old when read."""
        self._count(sender, receiver)
        is_behind = receiver != HUB and self._connections.transport.is_behind(receiver)
        if data is None or is_behind or not self._connections.is_connected(receiver):
            return False
        return self._connections.send_now(receiver, data, asks=asks)

    def _delay(self, sender: str, receiver: str) -> int:
        number = self._numbers.get((sender, receiver), 0) + 1
        return self._clock.delay_of(sender, receiver, number, self._description.seed)

    def _count(self, sender: str, receiver: str) -> None:
        self._numbers[sender, receiver] = self._numbers.get((sender, receiver), 0) + 1


# --- The clock of a run with rounds ---------------------------------------------------------------------


class ImitatedTime:
    """Of the only agent of a host: it waits where a virtual clock would be moved forward."""

    def __init__(self, description: RunDescription) -> None:
        assert description.clock is not None
        self._clock, self._seed, [agent] = description.clock, description.seed, description.agents
        self._slowness = self._clock.factor(agent.name, description.topology.names, description.seed)
        self._numbers: dict[tuple[str, str], int] = {}  # messages so far, by sender and receiver
        self.begin_round()

    def begin_round(self) -> None:
        self._since = time.monotonic()  # when it began to compute
        self._due: dict[str, deque[float]] = {}  # when messages arrive, by sender

    def end_round(self) -> None:
        """Real time needs no care."""

    def computed(self, node: Node) -> None:
        """It has computed until it sends, receives or ends: wait for as long as it would at its own speed."""
        time.sleep(max(0.0, self._slowness - 1) * (time.monotonic() - self._since))
        self._since = time.monotonic()

    def sent(self, sender: str, receiver: str) -> None:
        """A message is here, and counts as arrived after its delay; one of the hub after that of the way there, too."""
        number = self._numbers[sender, receiver] = self._numbers.get((sender, receiver), 0) + 1
        delay = self._clock.delay_of(sender, receiver, number, self._seed)
        if sender == HUB:
            delay += self._clock.delay_of(receiver, sender, number, self._seed)
        self._due.setdefault(sender, deque()).append(time.monotonic() + delay / SECOND)

    def received(self, sender: str, receiver: str) -> None:
        """Wait until the message has arrived; then it computes again."""
        time.sleep(max(0.0, self._due[sender].popleft() - time.monotonic()))
        self._since = time.monotonic()

    def ended(self, sender: str, receiver: str) -> None:
        self._since = time.monotonic()


class Stopwatch:
    """Seconds since the first round of a run with a clock began, over restarts; saved beside the state of a node."""

    def __init__(self) -> None:
        self._zero: float | None = None
        self._before = 0.0

    def start(self) -> None:
        if self._zero is None:
            self._zero = time.monotonic() - self._before

    @property
    def elapsed(self) -> float:
        return self._before if self._zero is None else time.monotonic() - self._zero

    def save(self, description: RunDescription) -> dict[str, bytes]:
        """The states of the nodes in this process, with the time if the run has a clock."""
        shown = {} if description.clock is None else {"elapsed": self.elapsed}
        return {node.name: pack({**record_of(node).dump(), **shown}) for node in description.nodes}

    def load(self, state: bytes) -> None:
        self._before = unpack(state).get("elapsed", 0.0)
