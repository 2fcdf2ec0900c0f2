"""One connection between two nodes, after its TLS handshake: a preface, then frames, in both directions.

Everything here runs in the transport's thread and never blocks: what cannot be sent now waits, and what is not wanted
yet stays with the network.
"""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import struct
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

from codistill.runtimes.network.frame_header import FrameHeader, FrameKind
from codistill.runtimes.network.frame_reader import FrameReader
from codistill.runtimes.network.inbox import Event, Oversized, ReceivedFrame, Refusal
from codistill.runtimes.network.preface import Preface, Refused
from codistill.text import printable

_LENGTH = struct.Struct("<Q")
_SMALL = 1 << 16  # bytes of a payload that is sent in one piece with its header
_PIECE = 1 << 18  # bytes given to TLS at a time: encrypting more at once would delay other links
_TURN = 16  # reads or writes in a row, before other links are served again
_LAST_WORDS = 1.0  # seconds that the other end has to read why it was refused
_LATER = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
_BACKLOG = 1 << 26  # bytes that may wait for a receiver, besides some messages of the largest size
_MESSAGES = 8
CONTROL_LIMIT = 1 << 23  # bytes of a command or an answer
HELLO_LIMIT = 1 << 18  # bytes of a join request
_REASON = 300
_ASK = 30  # seconds at most between two questions of the system whether the other machine is there
_QUESTIONS = 100  # at most, without an answer
# The first fields of Linux's tcp_info: how often something was sent again, and asked without an answer (bytes 2 and 3);
# the last four here are milliseconds since data were sent, an answer was sent, data came, an answer came.
_TCP_INFO = struct.Struct("=8B13I")


class Owner(Protocol):
    """What a stream needs of the transport that it belongs to; all of it is called in the transport's thread."""

    preface: Preface
    lease: float  # seconds after which a machine that does not answer is given up
    loop: asyncio.AbstractEventLoop

    def identify(self, stream: Stream, certificate: bytes | None) -> str | None:
        """The name in the certificate of the other end; None without certificates. Raises if it is not admitted."""
        ...

    def opened(self, stream: Stream) -> None:
        """The other end has said its preface: it may send frames. Raises if it is not admitted."""
        ...

    def largest(self, kind: FrameKind) -> int:
        """Bytes of the largest payload of this kind that is accepted."""
        ...

    def arrived(self, stream: Stream, event: Event) -> bool:
        """Something for the inbox; False if no more should be read for now."""
        ...

    def refused(self, stream: Stream, why: str) -> None:
        """The other end is not admitted."""
        ...

    def closed(self, stream: Stream, why: str) -> None:
        """The connection has ended."""
        ...


class Stream:
    """Both directions of a connection whose TLS handshake is done."""

    def __init__(self, owner: Owner, connection: socket.socket, expected: str | None = None) -> None:
        """`expected`: the node that was dialled; None: the other end has dialled this node."""
        self._owner, self._socket, self.expected = owner, connection, expected
        self.name: str | None = None  # of the other end, once it is known
        self.certificate: bytes | None = None
        self.theirs: Preface | None = None
        now = owner.loop.time()
        self.heard = self.said = self.progress = now  # when something was last received, sent, and taken by the link
        self._answered = now  # when the system of the other machine last answered this one's
        self.is_closed = False
        self.is_reading = False
        self.reader = FrameReader(self)
        self._outgoing: deque[bytes | memoryview] = deque()
        self.waiting = 0  # bytes in it
        self.is_stuck = False  # the link takes no more for now
        self._why = ""
        self._discarded = 0  # bytes received after it was closed
        self.opening: asyncio.Future[bool] = owner.loop.create_future()  # whether it was admitted
        self.ended: asyncio.Future[None] = owner.loop.create_future()

    # --- opening and closing --------------------------------------------------------------------

    def start(self) -> None:
        """Say who this is, and check who the other end is."""
        secure = self._socket
        keep_alive(secure, self._owner.lease)
        self.certificate = secure.getpeercert(binary_form=True) if isinstance(secure, ssl.SSLSocket) else None
        self._queue([self._owner.preface.encode()])
        self.read_on(on=True)
        self._guarded(self._identify)

    def _identify(self) -> None:
        self.name = self._owner.identify(self, self.certificate)

    def take_preface(self, preface: Preface) -> None:
        """The other end has said who it is: the same as in its certificate."""
        self._guarded(self._open, preface)

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
            self._owner.refused(self, str(refused))
            self.refuse(str(refused), final=refused.final)

    @property
    def address(self) -> str:
        """Where the other end is, without its port."""
        with suppress(OSError):
            return str(self._socket.getpeername()[0])
        return "an unknown address"

    def refuse(self, why: str, *, final: bool) -> None:
        """Tell the other end why it is not admitted, and close the connection."""
        if not self.is_closed:
            text = json.dumps({"why": why[:_REASON], "final": final}).encode()
            self.send(FrameHeader(FrameKind.REFUSED, self._owner.preface.session_id, 0).encode(), text)
            self.close(why)

    def close(self, why: str, *, at_once: bool = False) -> None:
        """Close the connection: what the link has already taken is still sent, for a short while."""
        if self.is_closed:
            return
        self.is_closed, self._why = True, why
        self.reader.is_stopped = True
        self._leave_loop()
        if at_once or self.is_stuck:
            self.end()
            return
        # What was received and not read would make the system discard what was sent: so it is read, and discarded.
        with suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_WR)
        self._owner.loop.add_reader(self._socket, self._discard)
        self._owner.loop.call_later(_LAST_WORDS, self.end)

    def _discard(self) -> None:
        try:
            received = len(socket.socket.recv(self._socket, _SMALL))
            self._discarded += received
            if not received or self._discarded > _PIECE:  # whoever sends on and on does not read either
                self.end()
        except _LATER:
            pass
        except OSError:
            self.end()

    def _lose(self, error: Exception | None) -> None:
        """The connection has ended, by the other end or the network."""
        if not self.is_closed:
            self.is_closed = True
            reason = getattr(error, "reason", None) or error or "closed by the other end"
            self._why = str(reason).lower().replace("_", " ")
        self.end()

    def _leave_loop(self) -> None:
        self._outgoing.clear()
        self.waiting = 0
        self._owner.loop.remove_reader(self._socket)
        self._owner.loop.remove_writer(self._socket)

    def end(self) -> None:
        """End the connection now, whatever is still to be said."""
        if self.ended.done():
            return
        self.is_closed = True
        self._leave_loop()
        self._socket.close()
        self.ended.set_result(None)
        if not self.opening.done():
            self.opening.set_result(False)
        self._owner.closed(self, self._why)

    # --- whether the other machine is there -------------------------------------------------------

    def answered_at(self, now: float) -> float:
        """When this system last did not wait for an answer of the other machine's.

        A process that holds Python's lock says nothing, but its system confirms what arrives; also that there is no
        room for it, when the process has not read for long. How long ago its last answer came says nothing: a process
        that does not read is asked at longer and longer intervals.
        """
        if not waits_for_answer(self._socket):
            self._answered = now
        return self._answered

    def excuse(self, late: float) -> None:
        """This process was stopped for a while, and has read nothing."""
        now = self._owner.loop.time()
        self.heard, self.progress = min(now, self.heard + late), min(now, self.progress + late)
        self._answered = now

    # --- sending --------------------------------------------------------------------------------

    def send(self, header: bytes, payload: bytes = b"") -> None:
        """Queue a frame; a receiver that takes none for long is disconnected, so that the queue stays bounded."""
        if self.is_closed:
            return
        # What the other end says that it accepts is only its word: it must not decide how much is kept for it here.
        limit = min(self.theirs.limit, self._owner.largest(FrameKind.MESSAGE)) if self.theirs else 0
        if self.waiting > _BACKLOG + _MESSAGES * limit:
            self.close("it does not take what is sent to it", at_once=True)
            return
        first = _LENGTH.pack(len(payload)) + header
        if len(payload) < _SMALL:
            self._queue([first + payload])
        else:
            view = memoryview(payload)
            self._queue([first, *(view[at : at + _PIECE] for at in range(0, len(payload), _PIECE))])

    def _queue(self, pieces: list[bytes | memoryview]) -> None:
        if not self._outgoing:
            self.progress = self._owner.loop.time()
        self._outgoing.extend(pieces)
        self.waiting += sum(map(len, pieces))
        if not self.is_stuck:
            self._flush()

    def _flush(self) -> None:
        """Send as much as the link takes now; the rest when it takes more."""
        try:
            for _ in range(_TURN):
                if not self._outgoing:
                    break
                piece = self._outgoing[0]
                sent = self._socket.send(piece)
                self.waiting -= sent
                self.said = self.progress = self._owner.loop.time()
                if sent < len(piece):
                    self._outgoing[0] = memoryview(piece)[sent:]
                else:
                    self._outgoing.popleft()
        except _LATER:
            pass
        except (OSError, ValueError) as error:
            self._outgoing.clear()
            self._owner.loop.call_soon(self._lose, error)  # not now: the caller may be looking at its links
        if bool(self._outgoing) != self.is_stuck:
            self.is_stuck = bool(self._outgoing)
            if self.is_stuck:
                self._owner.loop.add_writer(self._socket, self._flush)
            else:
                self._owner.loop.remove_writer(self._socket)

    # --- receiving ------------------------------------------------------------------------------

    def read_on(self, *, on: bool) -> None:
        """Read, or leave what arrives to the network until there is room."""
        if not self.is_closed and on != self.is_reading:
            self.is_reading = on
            self.heard = self._owner.loop.time()  # silence while nothing was read does not count
            if on:
                self._owner.loop.add_reader(self._socket, self._receive)
                self._owner.loop.call_soon(self._receive)  # TLS may hold something that was received before
            else:
                self._owner.loop.remove_reader(self._socket)

    def _receive(self) -> None:
        """Read what has arrived, in turns with other links."""
        try:
            for _ in range(_TURN):
                if self.is_closed or not self.is_reading:
                    return
                count = self._socket.recv_into(self.reader.buffer())
                if not count:
                    self._lose(None)
                    return
                self.heard = self._owner.loop.time()
                self._guarded(self.reader.received, count)
                if not self.reader.is_in_payload and not self._holds_more():
                    return  # the system tells when there is more
        except _LATER:
            return
        except (OSError, ValueError) as error:
            self._lose(error)
            return
        self._owner.loop.call_soon(self._receive)

    def _holds_more(self) -> bool:
        """Whether TLS holds something that it has received, of which the system knows nothing any more."""
        return not self.is_closed and isinstance(self._socket, ssl.SSLSocket) and self._socket.pending() > 0

    # --- what was read --------------------------------------------------------------------------

    def largest(self, kind: FrameKind) -> int:
        """Bytes of the largest payload of this kind that is accepted."""
        return self._owner.largest(kind)

    def take_frame(self, header: bytes, payload: bytes) -> None:
        """A frame has arrived."""
        if header[0] == FrameKind.REFUSED:
            self._hand_refusal(payload)
        else:
            self._hand(ReceivedFrame(self.name or "", header, payload, self.heard))

    def take_oversized(self, header: FrameHeader, length: int, limit: int) -> None:
        """A frame above the limit has begun to arrive, and is discarded."""
        self._hand(Oversized(self.name or "", header, length, limit))
        if self.reader.is_stopped:
            self.close("it sends more than is accepted", at_once=True)

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


def keep_alive(connection: socket.socket, lease: float) -> None:
    """Let the system ask the other machine's whether it is there while nothing is sent, and end the connection if not.

    Not by TCP_USER_TIMEOUT: it also ends a connection whose other end answers and does not read for as long.
    """
    every = min(_ASK, max(1, round(lease / 5)))
    idle = min(_ASK, max(1, round(lease - 3 * every)))
    count = min(_QUESTIONS, max(3, round((lease - idle) / every)))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", idle), ("TCP_KEEPINTVL", every), ("TCP_KEEPCNT", count)):
        if hasattr(socket, name):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def waits_for_answer(connection: socket.socket) -> bool:
    """Whether this system has asked the other machine's, or has sent something again, and has had no answer since."""
    if sys.platform != "linux":
        return False  # the system gives up by itself, later
    try:
        told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
        _, _, sent_again, asked, *_, since_sent, _, _, since_answer = _TCP_INFO.unpack(told)
    except (OSError, struct.error):
        return False
    return bool(asked or (sent_again and since_answer > since_sent))
