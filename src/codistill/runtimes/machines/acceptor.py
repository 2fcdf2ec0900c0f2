"""Where a machine of a run accepts the others: callers without the key are turned away before anything else is read."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from codistill.errors import CodistillError
from codistill.runtimes.machines.proof import TurnedAway, prove_as_listener, receive, send
from codistill.runtimes.network.descriptors import reserve_descriptors
from codistill.runtimes.network.listener import Listener
from codistill.text import printable

PURPOSES = LINK, HEARTBEAT = "link", "heartbeat"
_BACKLOG = 512
_LOOK = 0.02  # seconds between two looks at who has come


@dataclass(frozen=True)
class Caller:
    """Another machine that has proven to have the key, and what it said of itself."""

    connection: socket.socket
    rank: int
    purpose: str
    host: str  # its name
    address: str | None  # as it is seen from here; None: on this machine
    port: int  # where it listens itself
    facts: dict[str, str]

    @property
    def name(self) -> str:
        """As people know it."""
        return f"rank {self.rank} on {self.host}"

    @property
    def is_connected(self) -> bool:
        """Whether it has not hung up."""
        try:
            return self.connection.recv(1, socket.MSG_PEEK) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False


def listen_here(host: str | None, port: int) -> socket.socket:
    """A listening socket; host None: at all addresses of this machine; port 0: at one that is free."""
    if host is not None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    return socket.create_server(("", port), family=family, dualstack_ipv6=dual, backlog=_BACKLOG)


class Acceptor:
    """Accepts the connections of machines of higher rank."""

    def __init__(
        self, listening: socket.socket, key: bytes, ranks: range, check: Callable[[Caller], CodistillError | None]
    ) -> None:
        """`ranks`: who may come; `check`: the error for a caller that has the key and must not take part."""
        self._key, self._ranks, self._check = key, ranks, check
        self.callers: dict[tuple[int, str], Caller] = {}
        self.failure: CodistillError | None = None  # of a caller that must not take part
        most = reserve_descriptors(2 * len(ranks))
        self._listener = Listener(listening, most, self._admit, asyncio.get_running_loop())

    @property
    def turned_away(self) -> str:
        """How many callers were turned away and why, in words; empty if there were none."""
        counts = self._listener.turned_away.most_common(3)
        return ", ".join(f"{count} x {reason}" for reason, count in counts)

    @property
    def missing(self) -> list[int]:
        """The ranks that have not come with all their connections."""
        return [rank for rank in self._ranks if any((rank, purpose) not in self.callers for purpose in PURPOSES)]

    async def wait(self) -> None:
        """Until all have come; raises if one must not take part."""
        while self.missing:
            await asyncio.sleep(_LOOK)
            for place in [place for place, caller in self.callers.items() if not caller.is_connected]:
                self.callers.pop(place).connection.close()  # it may come again
            if self.failure is not None:
                raise self.failure

    def close(self) -> None:
        """Accept nobody any more; who has come stays connected."""
        self._listener.close()

    async def _admit(self, connection: socket.socket) -> None:
        await prove_as_listener(connection, self._key)
        caller = _caller(connection, await receive(connection))
        error = self._check(caller)
        if error is not None:
            self.failure = self.failure or error
            await self._refuse(connection, list(error.args))
        before = self.callers.get((caller.rank, caller.purpose))
        if caller.rank not in self._ranks or (before is not None and before.is_connected):
            found = f"rank {caller.rank} twice, here from {caller.host}"
            await self._refuse(connection, ["Every process must have a rank of its own.", found, "Check RANK."])
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await send(connection, welcome=True)
        self.callers[caller.rank, caller.purpose] = caller

    async def _refuse(self, connection: socket.socket, parts: list[str]) -> None:
        with suppress(OSError):
            await send(connection, refused=parts)
        raise TurnedAway(parts[1])


def _caller(connection: socket.socket, hello: dict[str, Any]) -> Caller:
    kinds = {"rank": int, "purpose": str, "host": str, "port": int, "facts": dict}
    if any(not isinstance(hello.get(key), kind) for key, kind in kinds.items()) or hello["purpose"] not in PURPOSES:
        raise TurnedAway("malformed words")
    host = printable(hello["host"], 100)
    return Caller(
        connection, hello["rank"], hello["purpose"], host, _address(connection), hello["port"], hello["facts"]
    )


def _address(connection: socket.socket) -> str | None:
    """The address of the other end; None if it is on this machine, which has another one for others."""
    address = ipaddress.ip_address(connection.getpeername()[0])
    mapped = getattr(address, "ipv4_mapped", None) or address
    return None if mapped.is_loopback else str(mapped)
