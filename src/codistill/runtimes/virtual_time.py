"""Virtual time of a run with rounds, by logical clocks: what each node waits for decides when it goes on.

Computing moves an agent's clock forward. A message arrives at its sender's clock plus its delay, and whoever takes it
has from then on at least that time. The hub computes in no time. A round ends when the last node has ended it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from codistill.base_node import Node
from codistill.clock import Clock


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
        """The round has ended for all."""
        self.now = max(self._at.values(), default=self.now)

    def computed(self, node: Node) -> None:
        """A node has computed until it sends, receives or ends."""
        self._at[node.name] = self._of(node.name) + node.work * self._step_time.get(node.name, 0)
        node.work = 0

    def sent(self, sender: str, receiver: str) -> None:
        """A message is on its way; lost ones are waited for as long."""
        number = self._numbers[sender, receiver] = self._numbers.get((sender, receiver), 0) + 1
        arrival = self._of(sender) + self._clock.delay_of(sender, receiver, number, self._seed)
        self._arrivals.setdefault((sender, receiver), deque()).append(arrival)

    def received(self, sender: str, receiver: str) -> None:
        """The receiver takes the next message of the sender."""
        self._wait(receiver, self._arrivals[sender, receiver].popleft())

    def ended(self, sender: str, receiver: str) -> None:
        """The receiver learns that the sender has ended its round without another message."""
        self._wait(receiver, self._of(sender))

    def _of(self, name: str) -> int:
        return self._at.get(name, self.now)

    def _wait(self, name: str, until: int) -> None:
        self._at[name] = max(self._of(name), until)

    def present(self, names: Sequence[str]) -> tuple[str, ...]:
        """Those of some agents that are online; where none is, the time passes until one is."""
        later = [self._clock.online_from(name, self.now) for name in names]
        self.now = min((time for time in later if time is not None), default=self.now)
        return self._clock.online(names, self.now)

    def save(self) -> dict[str, Any]:
        """What lives across rounds."""
        return {"now": self.now, "numbers": self._numbers}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Return to what was saved."""
        self.now, self._numbers = saved["now"], saved["numbers"]
