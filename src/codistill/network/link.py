"""One connection between two nodes, after its TLS handshake: a preface, then frames, in both directions.

Everything here runs in the transport's thread and never blocks: what cannot be sent now is queued, and while the inbox
is full nothing is read.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import ssl
import struct
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from codistill.core.errors import NetworkError
from codistill.core.text import printable
from codistill.network.frames import (
    Event,
    FrameHeader,
    FrameKind,
    FrameReader,
    Malformed,
    Oversized,
    Preface,
    ReceivedFrame,
    Refusal,
    Refused,
)
from codistill.network.listener import split

if TYPE_CHECKING:
    from codistill.certs.credentials import Credentials
    from codistill.network.transport import Transport

_LENGTH = struct.Struct("<Q")
_SMALL = 1 << 16  # bytes of a payload that is sent in one piece with its header
_PIECE = 1 << 18  # bytes given to TLS at a time: encrypting more at once would delay other links
_TURN = 16  # reads or writes in a row, before other links are served again
_LAST_WORDS = 1.0  # seconds for the other end to read why it was refused
_LATER = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
_BACKLOG = 1 << 26  # bytes that may be queued for a receiver, besides some messages of the largest size
_MESSAGES = 8
CONTROL_LIMIT = 1 << 23  # bytes of a command or an answer
HELLO_LIMIT = 1 << 18  # bytes of a join request
_REASON = 300
_ASK = 30  # seconds at most between two keep-alive probes of the system
_QUESTIONS = 100  # probes without an answer, at most
# The first fields of Linux's tcp_info: retransmissions and unanswered probes (bytes 2 and 3); the last four are
# milliseconds since data were sent, an ACK was sent, data were received, an ACK was received.
_TCP_INFO = struct.Struct("=8B13I")


class Stream:
    """Both directions of a connection whose TLS handshake is done."""

    def __init__(self, owner: Transport, connection: socket.socket, expected: str | None = None) -> None:
        """`owner`: called in its own thread; `expected`: the node that was dialled, None: the other end has dialled."""
        self._owner, self._socket, self.expected = owner, connection, expected
        self.largest = owner.largest
        self.name: str | None = None  # of the other end, once it is known
        self.certificate: bytes | None = None
        self.theirs: Preface | None = None
        now = owner.loop.time()
        self.heard = self.said = self.progress = now  # when something was last received, sent, and taken by the link
        self._answered = now  # when the system of the other machine last answered
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
        secure = self._socket
        keep_alive(secure, self._owner.lease)
        self.certificate = secure.getpeercert(binary_form=True) if isinstance(secure, ssl.SSLSocket) else None
        self._queue([self._owner.preface.encode()])
        self.read_on(on=True)
        self._guarded(self._owner.identify, self)

    def take_preface(self, preface: Preface) -> None:
        """The other end has sent its preface: raises `Refused` unless its name is that of its certificate."""
        if self.name is not None and preface.name != self.name:
            raise Refused(f"the name '{preface.name}' in a connection of '{self.name}'", final=True)
        self.theirs, self.name = preface, preface.name
        self._owner.opened(self)
        self.opening.set_result(True)

    def _guarded(self, step: Callable[..., None], *given: Any) -> None:
        """A step of opening; if the other end is refused, it is told why and the connection is closed."""
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
        # Unread data would make the system reset the connection and discard what was sent: read and discard them.
        with suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_WR)
        self._owner.loop.add_reader(self._socket, self._discard)
        self._owner.loop.call_later(_LAST_WORDS, self.end)

    def _discard(self) -> None:
        try:
            received = len(socket.socket.recv(self._socket, _SMALL))
            self._discarded += received
            if not received or self._discarded > _PIECE:  # a node that keeps sending does not read either
                self.end()
        except _LATER:
            pass
        except OSError:
            self.end()

    def _lose(self, error: Exception | None) -> None:
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
        """End the connection now; what is queued is discarded."""
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
        """When this system last did not wait for an answer of the other machine.

        A process that holds the GIL sends nothing, but its system still acknowledges what arrives, or that its buffer
        is full. The time of the last answer alone says nothing: a process that does not read is probed at longer and
        longer intervals.
        """
        if not waits_for_answer(self._socket):
            self._answered = now
        return self._answered

    def excuse(self, late: float) -> None:
        """This process was stopped for `late` seconds, and has read nothing."""
        now = self._owner.loop.time()
        self.heard, self.progress = min(now, self.heard + late), min(now, self.progress + late)
        self._answered = now

    # --- sending --------------------------------------------------------------------------------

    def send(self, header: bytes, payload: bytes = b"") -> None:
        """Queue a frame; a receiver whose queue is too long is disconnected."""
        if self.is_closed:
            return
        # The limit that the other end claims must not decide how much is queued for it here.
        limit = min(self.theirs.limit, self._owner.largest(FrameKind.MESSAGE)) if self.theirs else 0
        if self.waiting > _BACKLOG + _MESSAGES * limit:
            self.close("it does not read what is sent to it", at_once=True)
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
            self._owner.loop.call_soon(self._lose, error)  # not now: the caller may be iterating over its links
        if bool(self._outgoing) != self.is_stuck:
            self.is_stuck = bool(self._outgoing)
            if self.is_stuck:
                self._owner.loop.add_writer(self._socket, self._flush)
            else:
                self._owner.loop.remove_writer(self._socket)

    # --- receiving ------------------------------------------------------------------------------

    def read_on(self, *, on: bool) -> None:
        """Read, or stop reading until there is room."""
        if not self.is_closed and on != self.is_reading:
            self.is_reading = on
            self.heard = self._owner.loop.time()  # silence while nothing was read does not count
            if on:
                self._owner.loop.add_reader(self._socket, self._receive)
                self._owner.loop.call_soon(self._receive)  # TLS may hold something that was received before
            else:
                self._owner.loop.remove_reader(self._socket)

    def _receive(self) -> None:
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
                in_tls = self._socket.pending() if isinstance(self._socket, ssl.SSLSocket) and not self.is_closed else 0
                if not self.reader.is_in_payload and not in_tls:
                    return  # the event loop calls again when there is more
        except _LATER:
            return
        except (OSError, ValueError) as error:
            self._lose(error)
            return
        self._owner.loop.call_soon(self._receive)

    # --- what was read --------------------------------------------------------------------------

    def take_frame(self, header: FrameHeader, payload: bytes) -> None:
        if header.kind is not FrameKind.REFUSED:
            self._hand(ReceivedFrame(self.name or "", header, payload, self.heard))
            return
        try:
            told = json.loads(payload)
            why, final = printable(str(told["why"]), _REASON), told["final"] is True
        except (ValueError, KeyError, TypeError, RecursionError):
            why, final = "no reason given", False
        self._hand(Refusal(self.name or "", why, final))
        self.close(f"refused: {why}")

    def take_malformed(self, why: str) -> None:
        """A frame whose header is invalid has begun to arrive, and is discarded."""
        self._hand(Malformed(self.name or "", why))

    def take_oversized(self, header: FrameHeader, length: int, limit: int) -> None:
        """A frame above the limit has begun to arrive, and is discarded."""
        self._hand(Oversized(self.name or "", header, length, limit))
        if self.reader.is_stopped:
            self.close("it sends more than is accepted", at_once=True)

    def _hand(self, event: Event) -> None:
        if not self._owner.arrived(self, event):
            self.read_on(on=False)


def keep_alive(connection: socket.socket, lease: float) -> None:
    """Let the system probe the other machine while nothing is sent, and end the connection if it does not answer.

    Not by TCP_USER_TIMEOUT: it also ends a connection whose other end answers but does not read for that long.
    """
    every = min(_ASK, max(1, round(lease / 5)))
    idle = min(_ASK, max(1, round(lease - 3 * every)))
    count = min(_QUESTIONS, max(3, round((lease - idle) / every)))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", idle), ("TCP_KEEPINTVL", every), ("TCP_KEEPCNT", count)):
        if hasattr(socket, name):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def waits_for_answer(connection: socket.socket) -> bool:
    """Whether this system has probed the other machine or retransmitted data, without an answer since."""
    if sys.platform != "linux":
        return False  # the system itself gives up, later
    try:
        told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
        _, _, sent_again, asked, *_, since_sent, _, _, since_answer = _TCP_INFO.unpack(told)
    except (OSError, struct.error):
        return False
    return bool(asked or (sent_again and since_answer > since_sent))


# --- The TLS handshake, without blocking other connections.

_ALERT = 0.05  # seconds for the other end to read the alert of TLS


async def secured(
    plain: socket.socket, credentials: Credentials | None, loop: asyncio.AbstractEventLoop, *, server: bool
) -> socket.socket:
    """The connection after its TLS handshake, or as it is without credentials; closed if the handshake fails."""
    plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # frames are complete when they are sent
    if credentials is None:
        return plain
    connection = wrapped(plain, credentials, server=server)
    try:
        await _shake_hands(connection, loop)
    except BaseException:
        connection.close()
        raise
    return connection


def wrapped(plain: socket.socket, credentials: Credentials, *, server: bool = False) -> ssl.SSLSocket:
    """A connection whose handshake is still to be done.

    The client sends its mark in the place of the server's name, because host names are not compared: see `listener`.
    """
    context = credentials.tls_context(server=server)
    mark = None if server else credentials.marks()[0].decode()
    return context.wrap_socket(plain, server_side=server, do_handshake_on_connect=False, server_hostname=mark)


async def _shake_hands(connection: ssl.SSLSocket, loop: asyncio.AbstractEventLoop) -> None:
    while True:
        ready: asyncio.Future[None] = loop.create_future()
        try:
            connection.do_handshake()
            return
        except ssl.SSLWantReadError:
            loop.add_reader(connection, _set, ready)
        except ssl.SSLWantWriteError:
            loop.add_writer(connection, _set, ready)
        except ssl.SSLError:
            # Let the other end read the alert of TLS before the connection ends.
            with suppress(OSError):
                socket.socket.shutdown(connection, socket.SHUT_WR)
                await asyncio.sleep(_ALERT)
            raise
        try:
            await ready
        finally:
            loop.remove_reader(connection)
            loop.remove_writer(connection)


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


# --- Connecting to another node, again and again for as long as this one runs.

_AGAIN, _SLOWER, _AT_MOST = 0.2, 1.5, 1.0  # seconds between two attempts to connect: at first, factor, at most
_CONNECTING = 10.0  # seconds that an attempt to connect may take


async def keep_connected(
    address: str,
    credentials: Credentials | None,
    loop: asyncio.AbstractEventLoop,
    open_stream: Callable[[socket.socket], Stream],
) -> None:
    """Connect to a node, and reconnect whenever the connection has ended."""
    host, port = split(address)
    pause = _AGAIN
    while True:
        with suppress(OSError, EOFError, TimeoutError, NetworkError):
            async with asyncio.timeout(_CONNECTING):
                stream = open_stream(await connect(host, port, credentials, loop))
            try:
                stream.start()
                async with asyncio.timeout(_CONNECTING):
                    pause = _AGAIN if await asyncio.shield(stream.opening) else pause
                await asyncio.shield(stream.ended)
            finally:
                stream.close("not open in time", at_once=True)
        await asyncio.sleep(pause * random.uniform(0.7, 1.0))
        pause = min(_AT_MOST, _SLOWER * pause)


async def connect(
    host: str, port: int, credentials: Credentials | None, loop: asyncio.AbstractEventLoop
) -> socket.socket:
    """A connection to the first of the host's addresses that can be reached; with TLS, if there are credentials."""
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    error: OSError = OSError("no address")
    for family, kind, protocol, _, place in found:
        plain = socket.socket(family, kind, protocol)
        plain.setblocking(False)
        try:
            await loop.sock_connect(plain, place)
            return await secured(plain, credentials, loop, server=False)
        except OSError as raised:
            plain.close()
            error = raised
        except BaseException:
            plain.close()
            raise
    raise error
