"""Accepts connections at an address, so that unknown callers cost little and are not waited for long.

A connection is pending until its handshake is done: TLS and the preface. It passes through stages: it is silent; it has
sent something, perhaps with the mark of this federation; its handshake has begun; it has shown a certificate that is
admitted. There are bounds on pending connections, on handshakes at a time and per second, and on the time in each
stage. What costs a stranger nothing, such as sending more bytes, is no progress.

If there are too many connections, those of the address with the most are closed first; of one address those that have
sent nothing, then those whose handshake has not begun, the oldest first. A handshake that has begun, which costs this
node a signature, is not closed for others before its caller had time to answer: faster connections wait. Addresses take
turns, and of one address the newest connection is first: if not all can be served, the newest are answered in time.

A mark is a digest of the authority's certificate in a caller's first bytes. It admits nobody, and anyone who has seen
that certificate can send it; but callers that know nothing of the federation are served after those with the mark.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import re
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import takewhile
from typing import Any

from codistill.core.errors import NetworkError

_OPENING = 5.0  # seconds that a connection may spend in each stage
_HELLO = 0.5  # seconds within which a caller sends something, if others wait for its place
_ANSWER = 0.5  # seconds within which a caller answers in its handshake, if others wait for its place
_HANDSHAKES = 96  # that have begun and are not done, at a time: each holds what TLS needs
_BURST = 200  # connections accepted at a time, before established links are served again
_TICK = 0.01  # seconds between two checks of pending connections
_LATE = 1.0  # seconds by which a check may be late
_PER_SECOND, _AT_ONCE = 300.0, 15  # handshakes begun: on average, and at one check on a busy machine
_STRANGERS = 3  # handshakes begun at one check without the mark
_PEEK = 2048  # bytes in which the mark is looked for
_QUEUE = 512  # connections that the system holds until they are accepted
_PAUSE = 0.2  # seconds without accepting when there are no descriptors left

Handshake = Callable[[socket.socket], Awaitable[Any]]
Failed = Callable[[str, str], None]  # takes the address of a caller, and why its handshake has failed


class _Stage(IntEnum):
    SILENT = 0
    HAS_SENT = 1
    MARKED = 2
    BEGUN = 3
    KNOWN = 4


_WAITING = (_Stage.HAS_SENT, _Stage.MARKED)  # for their handshake
_LATE_IN = {
    _Stage.SILENT: "silent",
    **dict.fromkeys(_WAITING, "handshake not begun in time"),
    **dict.fromkeys((_Stage.BEGUN, _Stage.KNOWN), "handshake not finished in time"),
}


def _stages() -> list[dict[_Pending, None]]:
    return [{} for _ in _Stage]


@dataclass(eq=False)
class _Caller:
    """An address, with its pending connections by stage, in the order in which they reached it."""

    network: str
    stages: list[dict[_Pending, None]] = field(default_factory=_stages)
    size: int = 0


@dataclass(eq=False)
class _Pending:
    connection: socket.socket
    host: str
    caller: _Caller
    since: float  # when it reached its stage
    stage: _Stage = _Stage.SILENT
    is_marked: bool = False
    task: asyncio.Task[None] | None = None


class Listener:
    """The listening socket of a node, and its pending connections."""

    def __init__(
        self,
        listening: socket.socket,
        most: int,
        handshake: Handshake,
        loop: asyncio.AbstractEventLoop,
        failed: Failed,
        marks: Callable[[], Sequence[bytes]],
    ) -> None:
        """`handshake`: returns when the other end is identified, or raises; `most`: pending connections."""
        self._most, self._handshake, self._loop, self._failed, self._marks = most, handshake, loop, failed, marks
        self._handshakes = min(_HANDSHAKES, max(1, 3 * most // 4))
        self._socket = listening
        listening.setblocking(False)
        self._pending: dict[socket.socket, _Pending] = {}
        self._stages = _stages()  # of all callers
        self._callers: dict[str, _Caller] = {}
        self._by_size: dict[int, dict[_Caller, None]] = {}  # callers by the number of their pending connections
        self._largest = 0  # of these numbers
        # Callers with a handshake to begin, in turn.
        self._turns: dict[_Stage, dict[_Caller, None]] = {stage: {} for stage in _WAITING}
        self.turned_away: Counter[str] = Counter()  # since they were last logged: why, and how many
        self._accepting = False
        self._accept_on(on=True)
        self._due = loop.time() + _TICK
        self._timer = loop.call_later(_TICK, self._look)

    def close(self) -> None:
        self._timer.cancel()
        self._accept_on(on=False)
        self._socket.close()
        for pending in list(self._pending.values()):
            self._shed(pending, "")

    def is_known(self, connection: socket.socket) -> None:
        """The other end has shown a certificate that is admitted: it is not closed to make room for strangers."""
        pending = self._pending.get(connection)
        if pending is not None:
            self._move(pending, _Stage.KNOWN)

    # --- accepting --------------------------------------------------------------------------------

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
                continue  # the caller has disconnected already
            connection.setblocking(False)
            self._take(connection, str(address[0]))

    def _take(self, connection: socket.socket, host: str) -> None:
        network = network_of(host)
        caller = self._callers.get(network) or _Caller(network)
        if len(self._pending) >= self._most:
            victim = self._to_shed(caller)
            if victim is None:
                self.turned_away["too many at a time"] += 1
                connection.close()
                return
            self._shed(victim, "too many at a time")
        pending = self._pending[connection] = _Pending(connection, host, caller, self._loop.time())
        self._callers[network] = caller
        self._resize(caller, 1)
        self._add(pending)
        self._read(pending)

    def _to_shed(self, newcomer: _Caller) -> _Pending | None:
        """The connection to close for a new one; None: the new one is closed."""
        if self._largest > newcomer.size + 1:
            stages = next(iter(self._by_size[self._largest])).stages
            order = (_Stage.SILENT, _Stage.HAS_SENT, _Stage.BEGUN, _Stage.MARKED)
            return next((oldest for oldest in (_first(stages[stage]) for stage in order) if oldest is not None), None)
        # No caller has more than the newcomer would have. If the newcomer has none yet, all others have one each.
        stages = newcomer.stages if newcomer.size else self._stages
        oldest = _first(stages[_Stage.SILENT])
        if oldest is not None and self._loop.time() - oldest.since > _HELLO:
            return oldest
        sent = _first(stages[_Stage.HAS_SENT]) or self._unanswered(stages[_Stage.BEGUN])
        return sent or _first(stages[_Stage.MARKED])

    def _unanswered(self, begun: dict[_Pending, None], newcomer: _Pending | None = None) -> _Pending | None:
        """The oldest unanswered handshake of the caller with the most of them, if that caller had time to answer.

        `newcomer`: the connection whose handshake is to begin. A caller with more handshakes, or without the mark that
        the newcomer has, need not have had time.
        """
        now = self._loop.time()

        def held(pending: _Pending) -> int:
            return len(pending.caller.stages[_Stage.BEGUN])

        def yields(each: _Pending) -> bool:
            if now - each.since > _ANSWER:
                return True
            if newcomer is None or each.is_marked > newcomer.is_marked:
                return False
            return newcomer.is_marked > each.is_marked or held(each) > held(newcomer) + 1

        return max(filter(yields, begun), key=lambda each: (not each.is_marked, held(each)), default=None)

    def _read(self, pending: _Pending) -> None:
        """See whether a caller has sent something: silent connections cost only a descriptor."""
        try:
            data = pending.connection.recv(_PEEK, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            self._loop.add_reader(pending.connection, self._read, pending)
            return
        except OSError:
            data = b""
        self._loop.remove_reader(pending.connection)
        if not data:
            self._shed(pending, "gone")
            return
        pending.is_marked = any(mark in data for mark in self._marks())
        self._move(pending, _Stage.MARKED if pending.is_marked else _Stage.HAS_SENT)

    # --- handshakes -------------------------------------------------------------------------------

    def _look(self) -> None:
        now = self._loop.time()
        late, self._due = now - self._due, now + _TICK
        begin = min(_AT_ONCE, round(_PER_SECOND * (_TICK + late)))
        self._timer = self._loop.call_later(_TICK, self._look)
        if late > _LATE:  # this process was stopped, which is not the callers' fault
            for pending in self._pending.values():
                pending.since = min(now, pending.since + late)
        for stage, members in zip(_Stage, self._stages, strict=True):
            for pending in list(takewhile(lambda each: now - each.since > _OPENING, members)):
                self._shed(pending, _LATE_IN[stage])
        for stage, most in ((_Stage.HAS_SENT, _STRANGERS), (_Stage.MARKED, _AT_ONCE)):
            for _ in range(min(most, begin)):
                if not self._turns[stage]:
                    break
                caller = next(iter(self._turns[stage]))
                self._turns[stage][caller] = self._turns[stage].pop(caller)  # after the others
                self._begin(caller, stage)

    def _begin(self, caller: _Caller, stage: _Stage) -> None:
        """Begin the handshake of the newest connection, if there is room or an unanswered one can be closed."""
        chosen = next(reversed(caller.stages[stage]))
        begun, known = self._stages[_Stage.BEGUN], self._stages[_Stage.KNOWN]
        if len(begun) + len(known) >= self._handshakes:
            victim = self._unanswered(begun, chosen) or self._unanswered(known)
            if victim is None:
                return
            self._shed(victim, "handshake not finished in time")
        self._move(chosen, _Stage.BEGUN)
        chosen.task = self._loop.create_task(self._open(chosen))
        # A task that is cancelled before its first step does not close the connection itself.
        chosen.task.add_done_callback(lambda task: chosen.connection.close() if task.cancelled() else None)

    async def _open(self, pending: _Pending) -> None:
        try:
            await self._handshake(pending.connection)
        except (OSError, EOFError, TimeoutError, NetworkError, RuntimeError) as error:  # SSLError is an OSError
            reason = getattr(error, "reason", None) or type(error).__name__
            why = str(reason).lower().replace("_", " ")[:60]
            self.turned_away[why] += 1
            self._failed(pending.host, why)
            pending.connection.close()
        finally:
            self._forget(pending)

    # --- who is pending ---------------------------------------------------------------------------

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
        if self._pending.pop(pending.connection, None) is not None:
            self._leave(pending)
            self._resize(pending.caller, -1)

    def _move(self, pending: _Pending, stage: _Stage) -> None:
        self._leave(pending)
        pending.stage, pending.since = stage, self._loop.time()
        self._add(pending)

    def _add(self, pending: _Pending) -> None:
        self._stages[pending.stage][pending] = pending.caller.stages[pending.stage][pending] = None
        if pending.stage in _WAITING:
            self._turns[pending.stage].setdefault(pending.caller)

    def _leave(self, pending: _Pending) -> None:
        caller, stage = pending.caller, pending.stage
        del self._stages[stage][pending], caller.stages[stage][pending]
        if stage in _WAITING and not caller.stages[stage]:
            del self._turns[stage][caller]

    def _resize(self, caller: _Caller, change: int) -> None:
        if caller.size:
            self._by_size[caller.size].pop(caller)
            if not self._by_size[caller.size]:
                del self._by_size[caller.size]
        caller.size += change
        if caller.size:
            self._by_size.setdefault(caller.size, {})[caller] = None
        else:
            del self._callers[caller.network]
        # It changes by one at a time, so the largest number is the one before, one more, or one less.
        self._largest = next(size for size in range(self._largest + 1, -1, -1) if size in self._by_size or not size)


def _first(members: dict[_Pending, None]) -> _Pending | None:
    return next(iter(members), None)


def network_of(host: str) -> str:
    """What counts as one address: the first half of an IPv6 address, because a machine may own the other half."""
    if ":" not in host:
        return host
    address = ipaddress.IPv6Address(host.partition("%")[0])
    return str(address.ipv4_mapped or address.packed[:8].hex())


def listen(address: str) -> socket.socket:
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


# --- Addresses of the form HOST:PORT.


def split(address: str) -> tuple[str, int]:
    """Host and port of HOST:PORT or [IPv6]:PORT."""
    found = re.fullmatch(r"(?:\[([0-9a-fA-F:.]+)\]|([^\s:/\[\]]+)):(\d{1,5})", address)
    if not found or not 0 < int(found[3]) < 65536:
        raise NetworkError(
            "An address must have the form HOST:PORT.", f"'{address}'", "Write for example hub.example.org:7447."
        )
    return found[1] or found[2], int(found[3])


def is_loopback(address: str) -> bool:
    host = split(address)[0]
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_privacy(addresses: list[str], *, certs: bool, insecure: bool) -> None:
    """Without certificates allow only addresses of this machine, unless `insecure` is set."""
    public = [address for address in addresses if not is_loopback(address)]
    if public and not certs and not insecure:
        raise NetworkError(
            "Between machines a federation must use certificates.",
            f"none for {public[0]}",
            "Make them by 'codistill certs', and pass --certs DIR; or --insecure, if anyone may read, join and forge.",
        )
