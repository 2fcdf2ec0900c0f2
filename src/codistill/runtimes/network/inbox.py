"""What has arrived and was not handled yet: a queue for each sender, served in turn.

However much one sender sends, the next event of every other one is handled after at most one of its own. A sender
whose queue is full is not read from until there is room again, so its own link fills up, and nobody else's.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

from codistill.runtimes.message_in_transit import EACH
from codistill.runtimes.network.frame_header import FrameHeader


@dataclass(frozen=True, slots=True)
class ReceivedFrame:
    """A frame as it arrived: nothing of it has been checked but its size."""

    sender: str
    header: bytes
    payload: bytes
    at: float | None = None  # when it arrived; it may be handled much later

    @property
    def size(self) -> int:
        """Bytes that it takes in its queue."""
        return len(self.header) + len(self.payload) + EACH


@dataclass(frozen=True, slots=True)
class Oversized:
    """A frame above the limit: its content was discarded while it arrived."""

    sender: str
    header: FrameHeader
    length: int
    limit: int
    size: int = EACH


@dataclass(frozen=True, slots=True)
class Presence:
    """A session of a node has appeared or disappeared."""

    sender: str
    session_id: int
    here: bool
    size: int = EACH


@dataclass(frozen=True, slots=True)
class Refusal:
    """The other end does not accept this node; `final`: it will not do so later either."""

    sender: str
    why: str
    final: bool
    size: int = EACH


Event = ReceivedFrame | Oversized | Presence | Refusal


class Inbox:
    """Queues of events by sender. One thread puts, another takes."""

    def __init__(self, senders: Iterable[str], room: int, has_room: Callable[[str], None]) -> None:
        """`room`: bytes of a sender that are read ahead; `has_room`: called when a full queue has room again."""
        self.room, self._has_room = room, has_room
        self._queues: dict[str, deque[Event]] = {name: deque() for name in senders}
        self._held = dict.fromkeys(self._queues, 0)
        self._full: set[str] = set()
        self._turns: deque[str] = deque()  # senders with something in their queue, the next to be served first
        self._lock = threading.Lock()
        self._is_waiting = False
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()  # wakes whoever waits: faster than a condition

    def put(self, event: Event) -> bool:
        """Add an event; False if its sender should not be read from until `has_room` is called."""
        with self._lock:
            events = self._queues[event.sender]
            if not events:
                self._turns.append(event.sender)
            events.append(event)
            self._held[event.sender] += event.size
            if self._held[event.sender] > self.room:
                self._full.add(event.sender)
            is_full = event.sender in self._full
            wake, self._is_waiting = self._is_waiting, False
        if wake:
            self._wake.put(None)
        return not is_full

    def take(self, timeout: float) -> Event | None:
        """The next event, of the sender whose turn it is; None if none arrives in time."""
        end = time.monotonic() + timeout
        while (event := self._next()) is None:
            left = end - time.monotonic()
            if left <= 0:
                return None
            with suppress(queue.Empty):
                self._wake.get(timeout=left)
        return event

    def _next(self) -> Event | None:
        freed = None
        with self._lock:
            if not self._turns:
                self._is_waiting = True
                return None
            self._is_waiting = False
            sender = self._turns.popleft()
            events = self._queues[sender]
            event = events.popleft()
            if events:
                self._turns.append(sender)
            self._held[sender] -= event.size
            if sender in self._full and 2 * self._held[sender] <= self.room:
                self._full.discard(sender)
                freed = sender
        if freed is not None:
            self._has_room(freed)
        return event

    def is_full(self, sender: str) -> bool:
        """Whether a sender's queue is full."""
        return sender in self._full

    def qsize(self) -> int:
        """How many events there are."""
        with self._lock:
            return sum(map(len, self._queues.values()))
