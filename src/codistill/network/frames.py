"""Frames: what two nodes send each other, how frames are read from a connection, and the inbox of a node.

Each end of a connection sends a preface, then frames: the length of a payload, a header, the payload. The header holds
a frame's kind, the sender's session, its number, and its turn; so the payload is the encoded message and nothing else.
"""

from __future__ import annotations

import queue
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

from codistill.core.text import printable
from codistill.engine.exchange import EACH
from codistill.network.options import WIRE_VERSION, Bucket

if TYPE_CHECKING:
    from codistill.network.link import Stream

_LAYOUT = struct.Struct("<BQQiH")  # kind, session, number, phase, attempt
HEADER_SIZE = _LAYOUT.size


class FrameKind(IntEnum):
    """What a frame is."""

    MESSAGE = 0  # of a protocol
    LOST = 1  # replaces a message that an injected fault has dropped
    END = 2  # the sender's part of a turn is over
    CONTROL = 3  # of the runtime itself: commands and answers
    HELLO = 4  # the first frame of a session, sent again after a reconnection
    PING = 5  # empty: this end of the link is alive
    REFUSED = 6  # this node does not accept the other one, and closes the link
    ASK = 7  # a message whose sender waits for the answer; in a run without rounds


MESSAGES = frozenset({FrameKind.MESSAGE, FrameKind.ASK})  # kinds with a message of the protocol
EMPTY = frozenset({FrameKind.LOST, FrameKind.END, FrameKind.PING})  # kinds without content
_KINDS = tuple(FrameKind)  # faster to index than FrameKind(number), which is done for every frame


class Turn(NamedTuple):
    """A phase and the number of the attempt at it: later turns are larger."""

    phase: int
    attempt: int = 0


class FrameHeader(NamedTuple):
    """What is sent beside a payload."""

    kind: FrameKind
    session_id: int  # drawn at random when a process starts: frames of an earlier session are ignored
    number: int  # grows by one with each frame from a sender to a receiver: a replayed frame is noticed
    turn: Turn = Turn(0)

    def encode(self) -> bytes:
        return _LAYOUT.pack(self.kind, self.session_id, self.number, *self.turn)

    @classmethod
    def decode(cls, data: bytes) -> FrameHeader:
        """From bytes; a `ValueError` if they are not a header."""
        if len(data) != _LAYOUT.size:
            raise ValueError(f"a header of {len(data)} bytes instead of {_LAYOUT.size}")
        kind, session_id, number, phase, attempt = _LAYOUT.unpack(data)
        if kind >= len(_KINDS):
            raise ValueError(f"unknown frame kind {kind}")
        return cls(_KINDS[kind], session_id, number, Turn(phase, attempt))


# --- The preface of each end of a connection: who it is, how long it may be silent, and how much it accepts.

_PREFACE = struct.Struct("<8sHQIQB")
_MAGIC = b"codistil"
_SHORTEST, _LONGEST = 0.5, 600.0  # seconds of a lease


class Refused(Exception):
    """The other end is not admitted; `final`: it will not be admitted later either."""

    def __init__(self, why: str, *, final: bool) -> None:
        super().__init__(why)
        self.final = final


@dataclass(frozen=True)
class Preface:
    """What a node sends first."""

    session_id: int
    lease: float  # seconds of silence after which the other end may close the link
    limit: int  # bytes of the largest message that it accepts
    name: str

    def encode(self) -> bytes:
        name = self.name.encode()
        lease = int(1000 * self.lease)
        return _PREFACE.pack(_MAGIC, WIRE_VERSION, self.session_id, lease, self.limit, len(name)) + name


def read_preface(data: memoryview) -> tuple[Preface, int] | None:
    """A preface at the start of what has arrived, and its length; None if more bytes are needed.

    Raises `Refused` if the other end has another version, `ValueError` if it uses another protocol.
    """
    beginning = bytes(data[: len(_MAGIC)])
    if beginning != _MAGIC[: len(beginning)]:
        raise ValueError("it uses another protocol")
    if len(data) < _PREFACE.size:
        return None
    _, version, session_id, lease, limit, length = _PREFACE.unpack_from(data)
    if len(data) < _PREFACE.size + length:
        return None
    name = bytes(data[_PREFACE.size : _PREFACE.size + length]).decode()  # UnicodeDecodeError is a ValueError
    if version != WIRE_VERSION:
        raise Refused(f"version {WIRE_VERSION} of the wire format is needed, not {version}", final=True)
    seconds = min(max(lease / 1000, _SHORTEST), _LONGEST)
    return Preface(session_id, seconds, limit, printable(name, 255)), _PREFACE.size + length


# --- Reading frames from the bytes of a connection.

_LENGTH = struct.Struct("<Q")
_RECORD = _LENGTH.size + HEADER_SIZE
_SCRATCH = 1 << 16  # bytes read at a time while no large payload is being received
_FIRST = 1 << 20  # bytes of a payload for which memory is allocated at once
_MALFORMED = 1 << 16  # bytes of a frame whose header cannot be read
_SKIPPED = 1 << 26  # bytes of oversized frames that are discarded; an honest node knows the limit, and sends none
# A node sends a ping in each quarter of its `silence`: with the shortest one, 240 in the ten minutes for which this
# process may have been stopped.
_PINGS, _PINGS_PER_SECOND = 300.0, 20.0


class FrameReader:
    """Provides the buffer for what arrives next, and reads it. A `ValueError` ends the connection."""

    def __init__(self, handler: Stream) -> None:
        self._handler = handler  # its `take_...` receive what was read
        self._has_preface = False
        self._scratch, self._kept = bytearray(_SCRATCH), 0
        self._body: bytearray | None = None
        self._header = FrameHeader(FrameKind.PING, 0, 0)  # of the payload that is arriving
        self._length = self._filled = 0
        self._skipping = self._skipped = 0
        self._pings = Bucket(_PINGS, _PINGS_PER_SECOND, time.monotonic)
        self.is_stopped = False

    @property
    def is_in_payload(self) -> bool:
        return self._body is not None

    def buffer(self) -> memoryview:
        """The buffer for what arrives next: a large payload is received without another copy."""
        if self._body is not None:
            if self._filled == len(self._body):
                self._body.extend(bytes(min(len(self._body), self._length - self._filled)))
            return memoryview(self._body)[self._filled :]
        return memoryview(self._scratch)[self._kept :]

    def received(self, count: int) -> None:
        if self._body is not None:
            self._filled += count
            if self._filled == self._length:
                self._deliver()
            return
        end, at = self._kept + count, 0
        view = memoryview(self._scratch)
        while at < end and not self.is_stopped:
            used = self._read(view[at:end])
            if not used:
                break
            at += used
        self._kept = end - at
        if at and self._kept:
            view[: self._kept] = bytes(view[at:end])

    def _read(self, data: memoryview) -> int:
        """Read one part of what has arrived; the number of bytes used, 0 if more are needed."""
        if self._skipping:
            used = min(len(data), self._skipping)
            self._skipping -= used
            return used
        if self._body is not None:  # the start of a payload whose rest is received into its own buffer
            used = min(len(data), self._length)
            self._body[:used] = data[:used]
            self._filled = used
            if used == self._length:
                self._deliver()
            return used
        if self._has_preface:
            return self._read_record(data)
        found = read_preface(data)
        if found is None:
            return 0
        self._has_preface = True
        self._handler.take_preface(found[0])
        return found[1]

    def _read_record(self, data: memoryview) -> int:
        if len(data) < _RECORD:
            return 0
        length = int(_LENGTH.unpack_from(data)[0])
        try:
            header = FrameHeader.decode(bytes(data[_LENGTH.size : _RECORD]))
        except ValueError as error:
            if length > _MALFORMED:
                raise ValueError("a malformed frame") from None
            self._skipping = length
            self._handler.take_malformed(str(error))  # whoever handles it counts it as a bad message
            return _RECORD
        most = 0 if header.kind in EMPTY else self._handler.largest(header.kind)
        if length > most:
            self._skipping = length
            self._skipped += length
            if self._skipped > _SKIPPED:
                self._skipping = 0
                self.is_stopped = True
            self._handler.take_oversized(header, length, most)
        elif header.kind is not FrameKind.PING:
            self._header, self._length = header, length
            self._body, self._filled = bytearray(min(length, _FIRST)), 0
            if not length:
                self._deliver()
        elif not self._pings.take():
            raise ValueError("too many pings")
        return _RECORD

    def _deliver(self) -> None:
        payload, self._body = bytes(self._body or b""), None
        self._handler.take_frame(self._header, payload)


# --- The inbox of a node: events in a queue for each sender, which are served in turn.


@dataclass(frozen=True, slots=True)
class Event:
    """What one sender has sent, or what has become of its links."""

    sender: str

    @property
    def size(self) -> int:
        return EACH


@dataclass(frozen=True, slots=True)
class ReceivedFrame(Event):
    """A frame as it arrived: its header is well-formed and its size accepted; nothing else has been checked."""

    header: FrameHeader
    payload: bytes
    at: float | None = None  # when it arrived; it may be handled much later

    @property
    def size(self) -> int:
        return HEADER_SIZE + len(self.payload) + EACH


@dataclass(frozen=True, slots=True)
class Malformed(Event):
    """A frame whose header is invalid: its content was discarded while it arrived."""

    why: str


@dataclass(frozen=True, slots=True)
class Oversized(Event):
    """A frame above the size limit: its content was discarded while it arrived."""

    header: FrameHeader
    length: int
    limit: int


@dataclass(frozen=True, slots=True)
class Presence(Event):
    """A session of a node has appeared or disappeared."""

    session_id: int
    here: bool


@dataclass(frozen=True, slots=True)
class Refusal(Event):
    """The other end does not accept this node; `final`: it will not accept it later either."""

    why: str
    final: bool


class Inbox:
    """Queues of events by sender. One thread puts, another one takes."""

    def __init__(self, senders: Iterable[str], room: int, has_room: Callable[[str], None]) -> None:
        """`room`: bytes of a sender that are read ahead; `has_room`: called when a full queue has room again."""
        self.room, self._has_room = room, has_room
        self._queues: dict[str, deque[Event]] = {name: deque() for name in senders}
        self._held = dict.fromkeys(self._queues, 0)
        self._full: set[str] = set()
        self._turns: deque[str] = deque()  # senders with something in their queue, the next to be served first
        self._lock = threading.Lock()
        self._is_waiting = False
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()  # faster than a condition

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
        return sender in self._full

    def qsize(self) -> int:
        with self._lock:
            return sum(map(len, self._queues.values()))
