"""The clock of a run with rounds between machines: slow agents and slow messages are imitated by waiting.

So a recipe shows in real time how long rounds are in which everybody waits for the slowest.
"""

from __future__ import annotations

import time
from collections import deque

from codistill.base_node import Node
from codistill.clock import SECOND
from codistill.runtimes.description import RunDescription
from codistill.runtimes.virtual_time import VirtualTime
from codistill.topology import HUB
from codistill.wire.state import pack, unpack


class ImitatedTime(VirtualTime):
    """Of the only agent of a host: it waits where a virtual clock would be moved forward."""

    def __init__(self, description: RunDescription) -> None:
        assert description.clock is not None
        names, [agent] = description.topology.names, description.agents
        self._slowness = description.clock.factor(agent.name, names, description.seed)
        self._since = time.monotonic()  # when it began to compute
        super().__init__(description.clock, names, description.seed)

    def begin_round(self) -> None:
        """It begins to compute."""
        self._since = time.monotonic()
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
        """As if something was received."""
        self._since = time.monotonic()


class Stopwatch:
    """Seconds since the first round of a run with a clock began, over restarts; saved beside the state of a node."""

    def __init__(self) -> None:
        self._zero: float | None = None
        self._before = 0.0

    def start(self) -> None:
        """Start it, unless it is running."""
        if self._zero is None:
            self._zero = time.monotonic() - self._before

    @property
    def elapsed(self) -> float:
        """Seconds so far."""
        return self._before if self._zero is None else time.monotonic() - self._zero

    def save(self, description: RunDescription) -> dict[str, bytes]:
        """The states of the nodes at hand, with the time where it matters."""
        shown = {} if description.clock is None else {"elapsed": self.elapsed}
        return {node.name: pack({**node.dump(), **shown}) for node in description.nodes}

    def load(self, state: bytes) -> None:
        """Go on from the time in a node's state."""
        self._before = unpack(state).get("elapsed", 0.0)


def imitated_time(description: RunDescription) -> ImitatedTime | None:
    """The time of a host with one agent, if the run has a clock."""
    return None if description.clock is None else ImitatedTime(description)
