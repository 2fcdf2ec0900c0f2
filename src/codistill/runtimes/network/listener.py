"""Accepts connections at an address: whoever has not said who it is costs little, and is not waited for long.

A connection is pending until its handshake is done: TLS and the preface, or the proof of a shared key. There is a bound
on pending connections, on the time of each, and on handshakes per second. Where there are too many, those of the
address with the most are closed first, the oldest of them first, so that one caller cannot keep out callers from
elsewhere.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from codistill.errors import NetworkError
from codistill.runtimes.network.addresses import split

_OPENING = 5.0  # seconds until a connection must have said who it is
_BURST = 50  # connections accepted at a time, before links that stand are served again
_TICK = 0.01  # seconds between two looks at pending connections
_PER_TICK = 3  # handshakes that are begun at each: 300 per second
_QUEUE = 512  # connections that the system holds until they are accepted
_PAUSE = 0.2  # seconds without accepting when there are no descriptors left

Handshake = Callable[[socket.socket], Awaitable[Any]]
Failed = Callable[[str, str], None]  # takes the address of a caller, and why its handshake has failed


@dataclass(eq=False)
class _Pending:
    connection: socket.socket
    host: str
    since: float
    has_sent: bool = False
    task: asyncio.Task[None] | None = None


class Listener:
    """The listening socket of a node and the connections that have not said who they are."""

    def __init__(
        self,
        listening: socket.socket,
        most: int,
        handshake: Handshake,
        loop: asyncio.AbstractEventLoop,
        failed: Failed | None = None,
    ) -> None:
        """`handshake`: ends when it is known who the other end is, or raises; `most`: pending connections."""
        self._most, self._handshake, self._loop, self._failed = most, handshake, loop, failed
        self._socket = listening
        listening.setblocking(False)
        self._pending: dict[_Pending, None] = {}  # the oldest first
        self._hosts: Counter[str] = Counter()  # pending connections by address
        self.turned_away: Counter[str] = Counter()  # since they were last told: why, and how many
        self._accepting = False
        self._accept_on(on=True)
        self._timer = loop.call_later(_TICK, self._look)

    def close(self) -> None:
        """Accept no more connections, and end those that are pending."""
        self._timer.cancel()
        self._accept_on(on=False)
        self._socket.close()
        for pending in list(self._pending):
            self._shed(pending, "")

    def _accept_on(self, *, on: bool) -> None:
        if on != self._accepting and self._socket.fileno() >= 0:
            self._accepting = on
            if on:
                self._loop.add_reader(self._socket, self._accept)
            else:
                self._loop.remove_reader(self._socket)

    def _accept(self) -> None:
        for _ in range(_BURST):
            try:
                connection, address = self._socket.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS):
                    self.turned_away["no descriptors left"] += 1
                    self._accept_on(on=False)
                    self._loop.call_later(_PAUSE, lambda: self._accept_on(on=True))
                    return
                continue  # the caller has gone already
            connection.setblocking(False)
            if len(self._pending) >= self._most:
                self._shed(self._of_busiest_host(), "too many at a time")
            pending = _Pending(connection, str(address[0]), self._loop.time())
            self._pending[pending] = None
            self._hosts[pending.host] += 1
            self._loop.add_reader(connection, self._sent_something, pending)

    def _of_busiest_host(self) -> _Pending:
        """The oldest pending connection of the host that has the most."""
        host = max(self._hosts, key=lambda each: self._hosts[each])
        return next(pending for pending in self._pending if pending.host == host)

    def _sent_something(self, pending: _Pending) -> None:
        """Only whoever has begun a handshake gets one: silent connections cost a descriptor and nothing else."""
        self._loop.remove_reader(pending.connection)
        pending.has_sent = True

    def _look(self) -> None:
        self._timer = self._loop.call_later(_TICK, self._look)
        now = self._loop.time()
        for pending in [each for each in self._pending if now - each.since > _OPENING]:
            self._shed(pending, "silent" if pending.task is None else "handshake not finished in time")
        begun: Counter[str] = Counter()
        for _ in range(_PER_TICK):
            ready = [each for each in self._pending if each.has_sent and each.task is None]
            if not ready:
                return
            chosen = min(ready, key=lambda each: (begun[each.host], each.since))  # hosts in turn, oldest first
            begun[chosen.host] += 1
            chosen.task = self._loop.create_task(self._open(chosen))

    async def _open(self, pending: _Pending) -> None:
        try:
            await self._handshake(pending.connection)
        except (OSError, EOFError, TimeoutError, NetworkError, RuntimeError) as error:  # SSLError is an OSError
            reason = getattr(error, "reason", None) or type(error).__name__
            why = str(reason).lower().replace("_", " ")[:60]
            self.turned_away[why] += 1
            if self._failed is not None:
                self._failed(pending.host, why)
            pending.connection.close()
        finally:
            self._forget(pending)

    def _shed(self, pending: _Pending, why: str) -> None:
        if why:
            self.turned_away[why] += 1
        self._forget(pending)
        if pending.task is None:
            self._loop.remove_reader(pending.connection)
            pending.connection.close()
        else:
            pending.task.cancel()

    def _forget(self, pending: _Pending) -> None:
        if pending in self._pending:
            del self._pending[pending]
            self._hosts[pending.host] -= 1
            if not self._hosts[pending.host]:
                del self._hosts[pending.host]


def listen(address: str) -> socket.socket:
    """A socket that listens at an address."""
    host, port = split(address)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, place = found[0]
        made = socket.socket(family, kind, protocol)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(place)
            made.listen(_QUEUE)
        except BaseException:
            made.close()
            raise
    except OSError as error:
        raise NetworkError(
            f"The address {address} must be free to listen at.",
            error.strerror or str(error),
            "Choose another address or port.",
        ) from None
    return made
