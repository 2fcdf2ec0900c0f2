"""Drives all nodes of a run without rounds through virtual time, from event to event.

An agent computes when its round begins or goes on. What it then sends leaves it, and what it receives is looked up,
when the virtual time of that computing is over. The hub needs no time. Events of one time happen in the order in which
they were scheduled, so that a run is the same whenever it is repeated.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from typing import Any

from codistill.base_node import Node
from codistill.clock import SECOND, nanoseconds
from codistill.effects import Send
from codistill.runtimes.description import RunDescription
from codistill.runtimes.message_in_transit import Parcel
from codistill.runtimes.outgoing import Outgoing
from codistill.runtimes.own_rounds import OwnRounds
from codistill.runtimes.relay import Relay
from codistill.runtimes.round_report import Report
from codistill.topology import HUB
from codistill.wire.codec import SIZE_LIMIT

# Kinds of events, each with what follows its time and its number.
_START = "start"  # (agent): it starts its next round, if it is online
_DUE = "due"  # (agent): the computing is over; what its round has come to happens now
_ARRIVAL = "arrival"  # (sender, receiver, bytes or None if lost, whether the sender waits for an answer)


class EventHost:
    """All agents, and the relay if there is a hub; time in nanoseconds."""

    def __init__(self, description: RunDescription) -> None:
        clock, names, seed = description.clock, description.topology.names, description.seed
        assert clock is not None
        self._clock, self._seed, self._faults, self._compression = (
            clock, seed, description.faults, description.compression,
        )  # fmt: skip
        self._period = nanoseconds(clock.period)
        self._step_time = clock.step_times(names, seed)
        self.rounds = {
            agent.name: OwnRounds(agent, description.protocol, description.after_round) for agent in description.agents
        }
        self._relay = None if description.hub is None else Relay(description.hub, description.protocol)
        self._outgoing = Outgoing(description.faults, description.watchers, description.compression)
        self._events: list[tuple[Any, ...]] = []  # a heap of (time, number, kind, ...)
        self._scheduled = 0
        self._links: dict[tuple[str, str], tuple[int, int]] = {}  # messages so far, and when the last of them arrives
        self._inbox: dict[str, dict[str, Parcel]] = {name: {} for name in self.rounds}  # newest of each sender
        self._waiting: set[str] = set()  # agents that have just asked the hub, and wait for its answer
        self._now = self._end = 0
        self._report = Report()
        self._took_part: set[str] = set()  # agents that were in a round of their own in the current period
        self._handlers: dict[str, Callable[..., None]] = {_START: self._start, _DUE: self._due, _ARRIVAL: self._arrive}
        for name in self.rounds:
            self._schedule(0, _START, name)

    def run(self, phase: int) -> Report:
        """All that happens up to the end of a period."""
        end = self._end = (phase + 1) * self._period
        self._report = Report()
        self._took_part = {name for name, rounds in self.rounds.items() if rounds.running}
        while self._events and self._events[0][0] <= end:
            self._now, _, kind, *what = heapq.heappop(self._events)
            self._handlers[kind](*what)
        if self._relay is not None:
            self._report.collect(self._relay.hub)
        for name, rounds in self.rounds.items():
            self._report.measures += [(name, "time", end / SECOND), (name, "own_rounds", float(rounds.done))]
        self._report.present = tuple(name for name in self.rounds if name in self._took_part)
        return self._report

    def _schedule(self, time: int, kind: str, *what: Any) -> None:
        self._scheduled += 1
        heapq.heappush(self._events, (time, self._scheduled, kind, *what))

    # --- rounds --------------------------------------------------------------------------------------

    def _start(self, name: str) -> None:
        """Start an agent's next round, now or as soon as it takes part."""
        ready = self._ready_from(name)
        if ready is None:
            return
        if ready > self._now:
            self._schedule(ready, _START, name)
            return
        if self._now < self._end:
            self._took_part.add(name)
        self.rounds[name].begin(self._now)
        self._go_on(name)

    def _ready_from(self, name: str) -> int | None:
        """From when on it is online and takes part in the period; None: never again."""
        online = self._clock.online_from(name, self._now)
        if online is None or online > self._now:
            return online
        period = self._now // self._period
        return self._now if name in self._faults.present(period) else (period + 1) * self._period

    def _go_on(self, name: str) -> None:
        """Let happen what takes no time; schedule the end of the computing that does."""
        rounds = self.rounds[name]
        while True:
            due = self._now + rounds.take_work() * self._step_time[name]
            if rounds.effect is None:
                # A round in which nothing is computed and no message is waited for takes the time of a step.
                due = max(due, rounds.began + self._step_time[name])
            if due > self._now or rounds.effect is None:
                self._schedule(due, _DUE, name)
                return
            if not self._happen(rounds):
                return

    def _due(self, name: str) -> None:
        rounds = self.rounds[name]
        if rounds.effect is None:
            rounds.end(self._report)
            self._start(name)
        elif self._happen(rounds):
            self._go_on(name)

    def _happen(self, rounds: OwnRounds) -> bool:
        """Send or receive, as the agent's round has come to; False if it has to wait for the hub's answer."""
        name, effect = rounds.agent.name, rounds.effect
        if isinstance(effect, Send):
            self._post(rounds.agent, effect, by=rounds.done)
            if effect.asks:
                self._waiting.add(name)
            rounds.go_on(self._now)
        elif name in self._waiting:
            return False
        else:
            assert effect is not None
            arrived = self._inbox[name]
            rounds.go_on(self._now, {sender: arrived.pop(sender) for sender in effect.senders if sender in arrived})
        return True

    # --- messages ------------------------------------------------------------------------------------

    def _post(self, node: Node, effect: Send, by: int) -> None:
        period = self._now // self._period
        for receiver, data in self._outgoing.packed(node, effect, period, by, self._report):
            self._send(node.name, receiver, data, asks=effect.asks)
        self._outgoing.forget_messages()

    def _send(self, sender: str, receiver: str, data: bytes | None, *, asks: bool = False) -> None:
        """Put a message on its way; as on one connection, none overtakes another of the same sender."""
        number, last = self._links.get((sender, receiver), (0, 0))
        arrival = max(last, self._now + self._clock.delay_of(sender, receiver, number + 1, self._seed))
        self._links[sender, receiver] = number + 1, arrival
        self._schedule(arrival, _ARRIVAL, sender, receiver, data, asks)

    def _arrive(self, sender: str, receiver: str, data: bytes | None, asks: bool) -> None:
        parcel = None if data is None else self._parcel(data)
        if receiver == HUB:
            self._serve(sender, parcel, asks=asks)
            return
        if parcel is not None:
            self._report.count_received(receiver, parcel.data)
        if sender == HUB:
            self._waiting.discard(receiver)
            self.rounds[receiver].go_on(self._now, {} if parcel is None else {HUB: parcel})
            self._go_on(receiver)
        elif parcel is not None:
            self._inbox[receiver][sender] = parcel

    def _serve(self, sender: str, parcel: Parcel | None, *, asks: bool) -> None:
        """Answer a message, if its sender waits for that; it is told where there is no answer."""
        assert self._relay is not None
        answer = None if parcel is None else self._relay.answer(sender, parcel, self._now)
        if asks and answer is not None:
            self._post(self._relay.hub, Send({sender: answer}), by=self._relay.served)
        elif asks:
            self._send(HUB, sender, None)

    def _parcel(self, data: bytes) -> Parcel:
        return Parcel(data, SIZE_LIMIT, self._compression or False)

    # --- checkpoints ---------------------------------------------------------------------------------

    def save(self) -> dict[str, Any]:
        """All that is under way, besides what nodes keep."""
        inbox = {
            name: {sender: parcel.data for sender, parcel in arrived.items()} for name, arrived in self._inbox.items()
        }
        return {
            "events": self._events, "scheduled": self._scheduled, "links": self._links, "inbox": inbox,
            "numbers": self._outgoing.numbers, "lies": self._outgoing.lies,
            "served": 0 if self._relay is None else self._relay.served,
            "rounds": {name: rounds.progress() for name, rounds in self.rounds.items()},
        }  # fmt: skip

    def load(self, saved: Mapping[str, Any]) -> None:
        """Go on from what was saved; the nodes have returned to what they kept."""
        self._events, self._scheduled, self._links = saved["events"], saved["scheduled"], saved["links"]
        self._outgoing.numbers, self._outgoing.lies = saved["numbers"], saved["lies"]
        if self._relay is not None:
            self._relay.served = saved["served"]
        for name, rounds in self.rounds.items():
            self._inbox[name] = {sender: self._parcel(data) for sender, data in saved["inbox"][name].items()}
            rounds.resume(saved["rounds"][name], self._parcel)
