"""Nodes in this process: the simulation of a run, with rounds or without, and the nodes of one host of a larger run."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import numpy as np

from codistill.engine.description import RunDescription
from codistill.engine.evaluation import features_of, score
from codistill.engine.exchange import Carrier, Report
from codistill.engine.host import BEGIN
from codistill.engine.placement import IdleStates, in_memory
from codistill.engine.runtime import Runtime, ShouldStop, load_nodes, never, one_thread, run, save_nodes
from codistill.engine.store import Saved, StoredState, content_of
from codistill.engine.without_rounds import AgentDriver, Messages, RelayDriver
from codistill.nodes.agent import Agent
from codistill.nodes.clock import SECOND, Clock
from codistill.nodes.node import Node
from codistill.nodes.record import record_of
from codistill.results.outputs import View
from codistill.results.records import Baseline, Evaluated, Scores
from codistill.topology import HUB
from codistill.wire.state import pack, unpack

TIME = ":time"  # beside the nodes of a checkpoint, in a run with a clock: no agent can have this name


class LocalRuntime(Runtime):
    """Nodes in this process, one thread: all nodes of a run (the simulation), or those of one of its hosts."""

    def __init__(
        self,
        description: RunDescription,
        idle: IdleStates | None = None,
        nodes: Sequence[Node] | None = None,
        links: Carrier | None = None,
    ) -> None:
        """`idle`: where states of agents that are not at work are kept; None: in memory. `nodes`: None for all nodes,
        in virtual time if the run has a clock; otherwise `links` lead to the others."""
        super().__init__(description)
        self.nodes = description.nodes if nodes is None else list(nodes)
        self._agents = [node for node in self.nodes if isinstance(node, Agent)]
        self._host, self._links = description.host(self.nodes, links), links
        self._host.idle = self.idle = idle
        self._time: VirtualTime | None = None
        if nodes is None and description.clock is not None:
            self._time = VirtualTime(description.clock, description.topology.names, description.seed)
        self._host.time = self._time
        self._single = ExitStack()
        self._single.enter_context(one_thread())

    @property
    def saved_nodes(self) -> tuple[str, ...]:
        return (*(node.name for node in self.nodes), *([TIME] if self._time else []))

    def run(self, phase: int, present: tuple[str, ...]) -> Report:
        """Run one phase here; with a clock, of those who are online."""
        time = self._time
        if time is None or phase == BEGIN:
            report = self._host.run(phase, present)
            if self._links is not None:
                self._links.flush()
            return report
        online = time.present(present)
        report = self._host.run(phase, online) if online else Report()
        report.present = online
        report.measures += [(name, "time", time.now / SECOND) for name in self.description.names]
        return report

    def evaluate_some(
        self, names: Collection[str] | None, samples: int | None, views: dict[str, View] | None = None
    ) -> dict[str, Scores]:
        wanted, scores = frozenset([agent.name for agent in self._agents] if names is None else names), {}
        for agent in self._agents:
            if agent.name in wanted:
                with in_memory(self.idle, agent):
                    scores[agent.name] = score(self.description, agent, samples, views)
        return scores

    def features(self) -> dict[str, np.ndarray]:
        return features_of(self.description, self._agents, self.idle)

    def save(self) -> dict[str, bytes | StoredState]:
        packed = [node for node in self.nodes if self.idle is None or not isinstance(node, Agent)]
        saved: dict[str, bytes | StoredState] = {**save_nodes(packed)}
        if self.idle is not None:
            saved |= self.idle.save(self._agents)
        return {**saved, TIME: pack(self._time.save())} if self._time else saved

    def load(self, saved: Saved) -> None:
        load_nodes(self.nodes, saved, self.idle)
        if self._time:
            self._time.load(content_of(saved[TIME]))

    load_saved = load  # states in files stay there, if agents that are not at work are kept on disk

    def close(self) -> None:
        self._single.close()


# --- Virtual time of a run with rounds, by logical clocks: what each node waits for decides when it goes on.


class VirtualTime:
    """The clocks of all nodes, in nanoseconds."""

    def __init__(self, clock: Clock, names: Sequence[str], seed: int) -> None:
        self._clock, self._seed = clock, seed
        self._step_time = clock.step_times(names, seed)
        self.now = 0  # when the last round ended
        self._numbers: dict[tuple[str, str], int] = {}  # messages so far, by sender and receiver
        self.begin_round()

    def begin_round(self) -> None:
        """All clocks show when the last round ended."""
        self._at: dict[str, int] = {}
        self._arrivals: dict[tuple[str, str], deque[int]] = {}

    def end_round(self) -> None:
        self.now = max(self._at.values(), default=self.now)

    def computed(self, node: Node) -> None:
        record = record_of(node)
        self._at[node.name] = self._of(node.name) + record.work * self._step_time.get(node.name, 0)
        record.work = 0

    def sent(self, sender: str, receiver: str) -> None:
        """A message is on its way; lost ones are waited for as long."""
        number = self._numbers[sender, receiver] = self._numbers.get((sender, receiver), 0) + 1
        arrival = self._of(sender) + self._clock.delay_of(sender, receiver, number, self._seed)
        self._arrivals.setdefault((sender, receiver), deque()).append(arrival)

    def received(self, sender: str, receiver: str) -> None:
        self._wait(receiver, self._arrivals[sender, receiver].popleft())

    def ended(self, sender: str, receiver: str) -> None:
        self._wait(receiver, self._of(sender))

    def _of(self, name: str) -> int:
        return self._at.get(name, self.now)

    def _wait(self, name: str, until: int) -> None:
        self._at[name] = max(self._of(name), until)

    def present(self, names: Sequence[str]) -> tuple[str, ...]:
        """Those of some agents that are online; where none is, the time passes until one is."""
        online = {name: self._clock.online_from(name, self.now) for name in names}
        self.now = min((time for time in online.values() if time is not None), default=self.now)
        return tuple(name for name, time in online.items() if time == self.now)

    def save(self) -> dict[str, Any]:
        return {"now": self.now, "numbers": self._numbers}

    def load(self, saved: Mapping[str, Any]) -> None:
        self.now, self._numbers = saved["now"], saved["numbers"]


# --- The simulation of a run without rounds: from event to event, in virtual time.

UNDER_WAY = ":under way"  # beside the nodes of a checkpoint: no agent can have this name

# Kinds of events, each with what follows its time and its number.
_START = "start"  # (agent): it starts its next round
_DUE = "due"  # (agent): the next step of its round is due
_ARRIVAL = "arrival"  # (sender, receiver, bytes or None if lost, whether the sender waits for an answer)


class AsynchronousSimulation(Runtime):
    """Every agent at its own pace; what elsewhere is a round is a period of virtual time.

    An agent computes when its round begins or is resumed. What it then sends leaves it, and what it receives is looked
    up, when the virtual time of that computing is over. The hub needs no time. Events of one time happen in the order
    in which they were scheduled, so that a run is the same whenever it is repeated.
    """

    def __init__(self, description: RunDescription) -> None:
        super().__init__(description)
        assert description.clock is not None
        self._clock, self._seed = description.clock, description.seed
        self._step_time = description.clock.step_times(description.topology.names, description.seed)
        self.now = self._end = 0
        self.report = Report()
        self._messages = Messages(description, self)
        self._drivers = {
            agent.name: AgentDriver(agent, description, self, self._messages) for agent in description.agents
        }
        hub = description.hub
        self._relay = None if hub is None else RelayDriver(hub, description, self, self._messages)
        self._events: list[tuple[Any, ...]] = []  # a heap of (time, number, kind, ...)
        self._scheduled = 0
        self._links: dict[tuple[str, str], tuple[int, int]] = {}  # messages so far, and when the last of them arrives
        self._took_part: set[str] = set()  # agents that were in a round of their own in the current period
        for name in self._drivers:
            self._schedule(0, _START, name)
        self._single = ExitStack()
        self._single.enter_context(one_thread())

    @property
    def saved_nodes(self) -> tuple[str, ...]:
        return (*super().saved_nodes, UNDER_WAY)

    def run(self, phase: int, present: tuple[str, ...]) -> Report:
        """All that happens up to the end of a period; who is present in it may start rounds. `begin` takes no time."""
        if phase == BEGIN:
            return self.description.host(self.description.nodes).run(BEGIN, present)
        end = self._end = (phase + 1) * self._messages.period
        self.report = Report()
        self._took_part = {name for name, driver in self._drivers.items() if driver.running}
        while self._events and self._events[0][0] <= end:
            self.now, _, kind, *what = heapq.heappop(self._events)
            (self._arrive if kind == _ARRIVAL else self._step)(*what)
        if self._relay is not None:
            self.report.collect(self._relay.hub)
        for name, driver in self._drivers.items():
            self.report.measures += [(name, "time", end / SECOND), (name, "own_rounds", float(driver.done))]
        self.report.present = tuple(name for name in self._drivers if name in self._took_part)
        return self.report

    def _schedule(self, time: int, kind: str, *what: Any) -> None:
        self._scheduled += 1
        heapq.heappush(self._events, (time, self._scheduled, kind, *what))

    def _step(self, name: str) -> None:
        """Let happen what takes no time; schedule the end of what does, and the end of each round."""
        driver = self._drivers[name]
        while (pause := driver.step()) is not None:
            if driver.running and self.now < self._end:
                self._took_part.add(name)
            if pause or (driver.running and driver.effect is None):
                self._schedule(self.now + pause, _DUE if driver.running else _START, name)
                return

    def _arrive(self, sender: str, receiver: str, data: bytes | None, asks: bool) -> None:
        if receiver == HUB:
            assert self._relay is not None
            self._relay.serve(sender, data, asks=asks)
            return
        self._drivers[receiver].deliver(sender, data)
        if sender == HUB:
            self._step(receiver)

    # --- the environment of the drivers ---------------------------------------------------------------

    def pause(self, driver: AgentDriver, since: int) -> int:
        """By its gradient steps; a round without any, in which no message is waited for, takes the time of one."""
        if not driver.running:
            return 0
        step_time = self._step_time[driver.agent.name]
        pause = driver.take_work() * step_time
        return max(pause, driver.began + step_time - self.now) if driver.effect is None else pause

    def may_send(self, receivers: Collection[str]) -> bool:
        return True

    def send(self, sender: str, receiver: str, data: bytes | None, *, asks: bool = False) -> bool:
        """Schedule the arrival; as on one connection, no message overtakes another of the same sender."""
        number, last = self._links.get((sender, receiver), (0, 0))
        arrival = max(last, self.now + self._clock.delay_of(sender, receiver, number + 1, self._seed))
        self._links[sender, receiver] = number + 1, arrival
        self._schedule(arrival, _ARRIVAL, sender, receiver, data, asks)
        return True

    # --- results and checkpoints ----------------------------------------------------------------------

    def evaluate_some(
        self, names: Collection[str] | None, samples: int | None, views: dict[str, View] | None = None
    ) -> dict[str, Scores]:
        """Evaluate agents as they were at the end of their last rounds."""
        wanted = frozenset(self._drivers if names is None else names)
        return {
            name: score(self.description, driver.last_completed(), samples, views)
            for name, driver in self._drivers.items()
            if name in wanted
        }

    def features(self) -> dict[str, np.ndarray]:
        return features_of(self.description, [driver.last_completed() for driver in self._drivers.values()])

    def save(self) -> dict[str, bytes]:
        """Every agent as it was at the end of its last round, the hub as it is, and what is under way."""
        saved = {name: pack(driver.dump()) for name, driver in self._drivers.items()}
        if self.description.hub is not None:
            saved |= save_nodes([self.description.hub])
        inbox = {
            name: {sender: parcel.data for sender, parcel in driver.inbox.items()}
            for name, driver in self._drivers.items()
        }
        under_way = {
            "events": self._events, "scheduled": self._scheduled, "links": self._links, "inbox": inbox,
            "numbers": self._messages.outgoing.numbers, "lies": self._messages.outgoing.lies,
            "served": 0 if self._relay is None else self._relay.served,
            "rounds": {name: driver.progress() for name, driver in self._drivers.items()},
        }  # fmt: skip
        return {**saved, UNDER_WAY: pack(under_way)}

    def load(self, saved: dict[str, bytes]) -> None:
        """Return to the end of a period: agents compute again what they had computed of their current rounds."""
        load_nodes(self.description.nodes, saved)
        under_way = unpack(saved[UNDER_WAY])
        self._events, self._scheduled, self._links = under_way["events"], under_way["scheduled"], under_way["links"]
        self._messages.outgoing.numbers, self._messages.outgoing.lies = under_way["numbers"], under_way["lies"]
        if self._relay is not None:
            self._relay.served = under_way["served"]
        for name, driver in self._drivers.items():
            driver.load(under_way["rounds"][name], under_way["inbox"][name])

    def finish(self, *, complete: bool) -> None:
        """Agents return to the end of their last rounds."""
        for driver in self._drivers.values():
            driver.abandon()

    def close(self) -> None:
        self._single.close()


def measure_alone(
    description: RunDescription, should_stop: ShouldStop = never, observers: Sequence[Any] = ()
) -> Baseline:
    """Train copies of the agents at hand alone, as the baseline; what they have reached, nothing if stopped."""
    baseline, evaluated = description.baseline(), list[Evaluated]()
    if baseline is not None:
        observers = [SimpleNamespace(evaluated=evaluated.append), *observers]
        outcome = run(baseline, LocalRuntime(baseline), observers=observers, should_stop=should_stop)
        if outcome.complete:
            rows = {name: [row["steps"] for row in outcome.rows if row["agent"] == name] for name in baseline.names}
            return Baseline(evaluated[-1].scores if evaluated else {}, rows)
    return Baseline({}, {})
