"""One connection between two nodes: a preface, then frames, in both directions.

    preface  "codistil" | version u16 | session u64 | lease u32 (ms) | limit u64 (bytes) | length u8 | name (UTF-8)
    frame    length of the payload u64 | header (`frame_header`) | payload

The length of a payload is compared with the limit before any of it is kept, and memory grows with what has arrived, not
with what was announced. Everything here runs in the transport's thread and never blocks: what cannot be sent now waits.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast

from codistill.runtimes.network.frame_header import EMPTY, HEADER_SIZE, FrameHeader, FrameKind
from codistill.runtimes.network.inbox import Event, Oversized, ReceivedFrame, Refusal
from codistill.runtimes.network.options import WIRE_VERSION
from codistill.text import printable

_PREFACE = struct.Struct("<8sHQIQB")
_MAGIC = b"codistil"
_LENGTH = struct.Struct("<Q")
_RECORD = _LENGTH.size + HEADER_SIZE
_SCRATCH = 1 << 16  # bytes read at a time while no large payload is being received
_PIECE = 1 << 18  # bytes given to TLS at a time: encrypting more at once would delay other links
_FIRST = 1 << 20  # bytes of a payload for which memory is taken at once
_BACKLOG = 1 << 26  # bytes that may wait for a receiver, besides some messages of the largest size
_MESSAGES = 8
CONTROL_LIMIT = 1 << 23  # bytes of a command or an answer
HELLO_LIMIT = 1 << 18  # bytes of a join request
_REASON = 300


@dataclass(frozen=True)
class Preface:
    """What each end says first."""

    session_id: int
    lease: float  # seconds of silence after which the other end may close the link
    limit: int  # bytes of the largest message that it accepts
    name: str

    def encode(self) -> bytes:
        """As bytes."""
        name = self.name.encode()
        lease = int(1000 * self.lease)
        return _PREFACE.pack(_MAGIC, WIRE_VERSION, self.session_id, lease, self.limit, len(name)) + name


class Owner(Protocol):
    """What a stream needs of the transport that it belongs to; all of it is called in the transport's thread."""

    preface: Preface
    loop: asyncio.AbstractEventLoop

    def identify(self, stream: Stream, certificate: bytes | None) -> str | None:
        """The name in the certificate of the other end; None without certificates. Raises if it is not admitted."""
        ...

    def opened(self, stream: Stream) -> None:
        """The other end has said its preface: it may send frames. Raises if it is not admitted."""
        ...

    def largest(self, stream: Stream, kind: FrameKind) -> int:
        """Bytes of the largest payload of this kind that is accepted from the other end."""
        ...

    def arrived(self, stream: Stream, event: Event) -> bool:
        """Something for the inbox; False if no more should be read for now."""
        ...

    def closed(self, stream: Stream, why: str) -> None:
        """The connection has ended."""
        ...


class Refused(Exception):
    """The other end is not admitted; `final`: nor will it be later."""

    def __init__(self, why: str, *, final: bool) -> None:
        super().__init__(why)
        self.final = final


class Stream(asyncio.BufferedProtocol):
    """Both directions of a connection, as asyncio's callbacks."""

    def __init__(self, owner: Owner, expected: str | None = None) -> None:
        """`expected`: the node that was dialled; None: the other end has dialled this node."""
        self._owner, self.expected = owner, expected
        self.name: str | None = None  # of the other end, once it is known
        self.certificate: bytes | None = None
        self.theirs: Preface | None = None
        now = owner.loop.time()
        self.heard = self.said = self.progress = now  # when something was last received, sent, and taken by the link
        self.is_closed = False
        self.is_reading = True
        self._transport: asyncio.Transport | None = None
        self._scratch, self._kept = bytearray(_SCRATCH), 0
        self._body: bytearray | None = None
        self._header, self._length, self._filled, self._skipping = b"", 0, 0, 0
        self._outgoing: deque[bytes | memoryview] = deque()
        self.waiting = 0  # bytes in it
        self._is_full = False
        self._why = ""
        self.opening: asyncio.Future[bool] = owner.loop.create_future()  # whether it was admitted
        self.ended: asyncio.Future[None] = owner.loop.create_future()

    # --- opening and closing --------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """TLS has verified the certificates of both ends."""
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=2 * _PIECE)
        secure = transport.get_extra_info("ssl_object")
        self.certificate = secure.getpeercert(binary_form=True) if secure is not None else None
        self._write(self._owner.preface.encode())
        self._guarded(self._identify)

    def _identify(self) -> None:
        self.name = self._owner.identify(self, self.certificate)

    def _open(self, theirs: Preface) -> None:
        if self.name is not None and theirs.name != self.name:
            raise Refused(f"the name '{theirs.name}' in a connection of '{self.name}'", final=True)
        self.theirs, self.name = theirs, theirs.name
        self._owner.opened(self)
        self.opening.set_result(True)

    def _guarded(self, step: Callable[..., None], *given: Any) -> None:
        """A step of opening: whoever is not admitted is told why, and the connection is closed."""
        try:
            step(*given)
        except Refused as refused:
            self.refuse(str(refused), final=refused.final)

    def refuse(self, why: str, *, final: bool) -> None:
        """Tell the other end why it is not admitted, and close the connection."""
        if not self.is_closed:
            text = json.dumps({"why": why[:_REASON], "final": final}).encode()
            self._outgoing.clear()
            self.waiting = 0
            self.send(FrameHeader(FrameKind.REFUSED, self._owner.preface.session_id, 0).encode(), text)
            self.close(why)

    def close(self, why: str, *, at_once: bool = False) -> None:
        """Close the connection: what TLS has already accepted is still sent, for a short while."""
        if not self.is_closed and self._transport is not None:
            self.is_closed, self._why = True, why
            self._outgoing.clear()
            self.waiting = 0
            if at_once or self._is_full:
                self._transport.abort()
            else:
                self._transport.close()
                self._owner.loop.call_later(1.0, self._transport.abort)

    def connection_lost(self, error: Exception | None) -> None:
        """The connection has ended, by whichever end."""
        self.is_closed = True
        if isinstance(error, ssl.SSLError):
            self._why = self._why or str(error.reason or error).lower().replace("_", " ")
        self._owner.closed(self, self._why or (str(error) if error else "closed by the other end"))
        if not self.opening.done():
            self.opening.set_result(False)
        if not self.ended.done():
            self.ended.set_result(None)

    # --- sending --------------------------------------------------------------------------------

    def send(self, header: bytes, payload: bytes = b"") -> None:
        """Queue a frame; a receiver that takes none for long is disconnected, so that the queue stays bounded."""
        if self.is_closed:
            return
        limit = self.theirs.limit if self.theirs else 0
        if self.waiting > _BACKLOG + _MESSAGES * limit:
            self.close("it does not take what is sent to it", at_once=True)
            return
        if not self.waiting:
            self.progress = self._owner.loop.time()
        first = _LENGTH.pack(len(payload)) + header
        whole = first + payload if len(payload) < _SCRATCH else first
        pieces: list[bytes | memoryview] = [whole]
        if whole is first and payload:
            view = memoryview(payload)
            pieces += [view[at : at + _PIECE] for at in range(0, len(payload), _PIECE)]
        self._outgoing.extend(pieces)
        self.waiting += sum(map(len, pieces))
        self._flush()

    def _flush(self) -> None:
        while self._outgoing and not self._is_full:
            piece = self._outgoing.popleft()
            self.waiting -= len(piece)
            self._write(piece)

    def _write(self, data: bytes | memoryview) -> None:
        assert self._transport is not None
        self.said = self._owner.loop.time()
        self._transport.write(data)

    def pause_writing(self) -> None:
        """The link takes no more for now."""
        self._is_full = True

    def resume_writing(self) -> None:
        """The link has taken what it was given."""
        self._is_full, self.progress = False, self._owner.loop.time()
        if not self.is_closed:
            self._flush()

    @property
    def is_stuck(self) -> bool:
        """Whether the link takes no more for now."""
        return self._is_full

    # --- receiving ------------------------------------------------------------------------------

    def read_on(self, *, on: bool) -> None:
        """Read, or leave what arrives to the network until there is room."""
        if self._transport is not None and not self.is_closed and on != self.is_reading:
            self.is_reading = on
            self.heard = self._owner.loop.time()  # silence while nothing was read does not count
            (self._transport.resume_reading if on else self._transport.pause_reading)()

    def get_buffer(self, hint: int) -> memoryview:
        """Where to put what arrives next: a large payload is received in its place."""
        if self._body is not None:
            if self._filled == len(self._body):
                self._body.extend(bytes(min(len(self._body), self._length - self._filled)))
            return memoryview(self._body)[self._filled :]
        return memoryview(self._scratch)[self._kept :]

    def buffer_updated(self, count: int) -> None:
        """Read what has arrived."""
        self.heard = self._owner.loop.time()
        if self.is_closed:
            return
        if self._body is not None:
            self._filled += count
            if self._filled == self._length:
                self._deliver(bytes(self._body))
            return
        end, at = self._kept + count, 0
        view = memoryview(self._scratch)
        while at < end and not self.is_closed:
            used = self._read(view[at:end])
            if not used:
                break
            at += used
        self._kept = end - at
        if at and self._kept:
            view[: self._kept] = bytes(view[at:end])

    def _read(self, data: memoryview) -> int:
        """Read one part of what has arrived; how many bytes of it were used, 0 if more are needed."""
        if self._skipping:
            used = min(len(data), self._skipping)
            self._skipping -= used
            return used
        if self._body is not None:  # the beginning of a payload whose rest is received in its place
            used = min(len(data), len(self._body), self._length)
            self._body[:used] = data[:used]
            self._filled = used
            if used == self._length:
                self._deliver(bytes(self._body))
            return used
        return self._read_preface(data) if self.theirs is None else self._read_record(data)

    def _read_preface(self, data: memoryview) -> int:
        beginning = bytes(data[: len(_MAGIC)])
        if beginning != _MAGIC[: len(beginning)]:
            self.close("it speaks another protocol", at_once=True)
            return 0
        if len(data) < _PREFACE.size:
            return 0
        _, version, session_id, lease, limit, length = _PREFACE.unpack_from(data)
        if len(data) < _PREFACE.size + length:
            return 0
        try:
            name = bytes(data[_PREFACE.size : _PREFACE.size + length]).decode()
        except UnicodeDecodeError:
            self.close("a name that is no text", at_once=True)
            return 0
        if version != WIRE_VERSION:
            self.refuse(f"version {WIRE_VERSION} of the wire format is needed, not {version}", final=True)
            return 0
        # Within bounds, whatever the other end says: a node is never waited for longer than 600 s.
        lease_seconds = min(max(lease / 1000, 0.5), 600.0)
        self._guarded(self._open, Preface(session_id, lease_seconds, limit, printable(name, 255)))
        return _PREFACE.size + int(length)

    def _read_record(self, data: memoryview) -> int:
        if len(data) < _RECORD:
            return 0
        length = int(_LENGTH.unpack_from(data)[0])
        self._header, self._length = bytes(data[_LENGTH.size : _RECORD]), length
        try:
            header = FrameHeader.decode(self._header)
        except ValueError:
            kind, most = None, HELLO_LIMIT  # handed on as it is: whoever handles it counts it as a bad message
        else:
            kind = header.kind
            most = 0 if kind in EMPTY else self._owner.largest(self, kind)
        if length > most:
            self._skipping = length
            if kind is not None:
                self._hand(Oversized(self.name or "", header, length, most))
        elif kind is not FrameKind.PING:
            self._body, self._filled = bytearray(min(length, _FIRST)), 0
            if not length:
                self._deliver(b"")
        return _RECORD

    def _deliver(self, payload: bytes) -> None:
        self._body = None
        if self._header[0] == FrameKind.REFUSED:
            self._hand_refusal(payload)
        else:
            self._hand(ReceivedFrame(self.name or "", self._header, payload))

    def _hand_refusal(self, payload: bytes) -> None:
        try:
            told = json.loads(payload)
            why, final = printable(str(told["why"]), _REASON), told["final"] is True
        except (ValueError, KeyError, TypeError, RecursionError):
            why, final = "no reason given", False
        self._hand(Refusal(self.name or "", why, final))
        self.close(f"refused: {why}")

    def _hand(self, event: Event) -> None:
        if not self._owner.arrived(self, event):
            self.read_on(on=False)
