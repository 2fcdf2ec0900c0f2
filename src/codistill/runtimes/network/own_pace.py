"""One agent of a run without rounds between machines: its own rounds, one after the other, in real time.

Whoever owns it calls `advance` again and again. A step computes until the agent sends or receives, or waits a moment;
so commands are heard between two steps. How slow agents and messages are by the run's clock is imitated by waiting.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from codistill.agent import Agent
from codistill.clock import SECOND, nanoseconds
from codistill.effects import Send
from codistill.runtimes.carrier import Frame
from codistill.runtimes.description import RunDescription
from codistill.runtimes.host import BEGIN
from codistill.runtimes.message_in_transit import Parcel, room_of
from codistill.runtimes.network.connections import Connections
from codistill.runtimes.network.frame_header import Turn
from codistill.runtimes.outgoing import Outgoing
from codistill.runtimes.own_rounds import OwnRounds
from codistill.runtimes.round_report import Report
from codistill.topology import HUB

MOMENT = 0.1  # seconds that a step waits at most


class OwnPace:
    """Drives an agent through rounds of its own, with the messages that its connections bring."""

    def __init__(self, description: RunDescription, connections: Connections, limit: int) -> None:
        """`limit`: bytes of the largest message that is accepted."""
        clock = description.clock
        assert clock is not None
        self._description, self._connections, self._clock, self._limit = description, connections, clock, limit
        self._agent: Agent = description.agents[0]
        self.rounds = OwnRounds(self._agent, description.protocol, description.after_round)
        self._slowness = clock.factor(self._agent.name, description.topology.names, description.seed)
        self._outgoing = Outgoing(description.faults, description.watchers, description.compression)
        self._report = Report()  # since the last one was taken
        self.refused: list[tuple[str, str, str]] = []  # in the last round: (receiver, sender, reason)
        self._newest: dict[str, Parcel] = {}  # the last message of each sender, if the agent has not used it
        self._waits = False  # for the hub's answer
        self._sent: dict[str, int] = {}  # messages to each receiver: by their numbers delays are drawn
        self._answers = 0  # of the hub
        self._due = 0.0  # when the next step may happen; earlier, the agent is still computing by the run's clock
        self._zero = time.monotonic()  # when the run's time was 0
        connections.without_turns()
        connections.backlog = self._backlog

    # --- time -----------------------------------------------------------------------------------

    def set_time(self, elapsed: float) -> None:
        """The run has gone on for so many seconds."""
        self._zero = time.monotonic() - elapsed

    @property
    def elapsed(self) -> float:
        """Seconds since the run's start."""
        return max(0.0, time.monotonic() - self._zero)

    @property
    def period(self) -> int:
        """The number of the current period, from 0."""
        return int(self.elapsed / self._clock.period)

    # --- rounds ---------------------------------------------------------------------------------

    def begin(self, samples: int) -> None:
        """What an agent does before its first round; a message cannot be sent there."""
        self._agent.join(samples)
        alone = self._description.host([self._agent])
        self._report = self._report.add(alone.run(BEGIN, (self._agent.name,)))

    def advance(self) -> bool:
        """The next step, or a moment of waiting for it; True: a round has ended."""
        self._take_messages(self._connections.arrived())
        left, rounds = self._due - time.monotonic(), self.rounds
        if left > 0:
            self._wait(left)
        elif not rounds.running:
            if self._agent.name not in self._description.faults.present(self.period):
                self._wait(MOMENT)
            else:
                self._connections.turn = Turn(rounds.done)  # the audit log counts rounds by it
                self._compute(lambda: rounds.begin(self._now))
        elif rounds.effect is None:
            before = len(self._report.refused)
            self._compute(lambda: rounds.end(self._report))
            self.refused = self._report.refused[before:]
            return True
        elif isinstance(rounds.effect, Send):
            self._send(rounds.effect)
        elif self._waits:
            self._wait(MOMENT)
        else:
            parcels = {name: self._newest.pop(name) for name in rounds.effect.senders if name in self._newest}
            self._compute(lambda: rounds.go_on(self._now, parcels))
        return False

    def stop_waiting(self) -> None:
        """The hub has disconnected: there will be no answer."""
        self._waits = False

    def take_report(self) -> Report:
        """What has happened since the last call."""
        report, self._report = self._report, Report()
        return report

    @property
    def _now(self) -> int:
        return nanoseconds(self.elapsed)

    def _compute(self, step: Callable[[], None]) -> None:
        """Compute up to the next effect, which is due when the agent would have come to it at its own speed."""
        began = time.monotonic()
        step()
        now = time.monotonic()
        self._due = now + max(0.0, self._slowness - 1) * (now - began)
        if self.rounds.running and isinstance(self.rounds.effect, Send):
            self._due += max((self._delay(self._agent.name, name) for name in self.rounds.effect.messages), default=0.0)

    def _delay(self, sender: str, receiver: str) -> float:
        """Seconds that the next message from one to the other is on its way, by the run's clock."""
        number = self._answers if sender == HUB else self._sent.get(receiver, 0)
        return self._clock.delay_of(sender, receiver, number + 1, self._description.seed) / SECOND

    # --- messages -------------------------------------------------------------------------------

    def _send(self, effect: Send) -> None:
        connections = self._connections
        if not all(connections.messages.take_own(name) for name in effect.messages):
            self._wait(MOMENT)  # faster than its receivers allow
            return
        for name, data in self._outgoing.packed(self._agent, effect, self.period, self.rounds.done, self._report):
            self._sent[name] = self._sent.get(name, 0) + 1
            # A neighbour that has not taken the last messages would read this one when it is old.
            behind = name != HUB and connections.transport.is_behind(name)
            gone = data is None or behind or not connections.is_connected(name)
            sent = not gone and connections.send_now(name, data, asks=effect.asks)
            if effect.asks:
                self._waits = sent
                self._newest.pop(HUB, None)
        self._outgoing.forget_messages()
        self._compute(lambda: self.rounds.go_on(self._now))

    def _wait(self, seconds: float) -> None:
        self._take_messages(self._connections.take_event(min(seconds, MOMENT)))

    def _take_messages(self, frames: list[Frame]) -> None:
        for frame in frames:
            if frame.is_end or (frame.sender == HUB and not self._waits):
                continue  # an answer to what was asked before a connection was lost
            if frame.sender == HUB:
                self._waits = False
                self._due = max(self._due, time.monotonic() + self._delay(HUB, self._agent.name))
                self._answers += 1
            if not frame.lost:
                self._report.count_received(self._agent.name, frame.payload)
                self._newest[frame.sender] = Parcel(frame.payload, self._limit, self._description.compression or False)

    def _backlog(self, sender: str) -> int:
        """Bytes of a sender that are kept here."""
        return room_of(self._newest[sender]) if sender in self._newest else 0
