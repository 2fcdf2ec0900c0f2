"""How the machines of a run meet: all others call rank 0, which compares what they are; then each calls those below it.

Between any two there are two connections: a link for frames, and one for signs of life. When all stand, nobody listens
any more: during the run there is no port to connect to.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from codistill.errors import CodistillError, NetworkError
from codistill.runtimes.machines.acceptor import HEARTBEAT, LINK, Acceptor, Caller, listen_here
from codistill.runtimes.machines.place import Place
from codistill.runtimes.machines.proof import NotProven, prove_as_caller, receive, send
from codistill.runtimes.machines.shared_key import VARIABLE, SharedKey
from codistill.runtimes.network.dialling import connect
from codistill.runtimes.runtime import ShouldStop, Stopped
from codistill.text import printable

_ATTEMPT = 5.0  # seconds of an attempt to connect and to prove oneself
_AGAIN = 0.2  # seconds between two attempts
_REFUSED = 10.0  # seconds for which a key of the environment may be refused: another run may listen at a port before
_LINKING = 60.0  # seconds for the links among the others, when all have come
_LOOK = 0.1  # seconds between two looks at whether somebody asks to stop
_IDLE = 60  # seconds after which an idle link is probed, so that no firewall on the way forgets it
_SHOWN = 5  # differences of a machine, in an error

T = TypeVar("T")


@dataclass(frozen=True)
class Met:
    """The connections to all other machines by rank, and the names of all."""

    links: dict[int, socket.socket]
    heartbeats: dict[int, socket.socket]
    names: dict[int, str]


def meet(place: Place, key: SharedKey, facts: Mapping[str, str], patience: float, should_stop: ShouldStop) -> Met:
    """Meet the other machines; `facts`: what must be equal on all of them, by what it is called."""
    return asyncio.run(_unless_stopped(_Meeting(place, key, facts, patience).meet(), should_stop))


async def _unless_stopped(work: Awaitable[T], should_stop: ShouldStop) -> T:
    task = asyncio.ensure_future(work)
    while not task.done():
        if should_stop():
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            raise Stopped
        await asyncio.wait([task], timeout=_LOOK)
    return task.result()


class _Meeting:
    def __init__(self, place: Place, key: SharedKey, facts: Mapping[str, str], patience: float) -> None:
        self._place, self._key, self._facts, self._patience = place, key, dict(facts), patience
        self._me = f"rank {place.rank} on {socket.gethostname()}"
        self._opened: list[socket.socket] = []
        self._proven = b""  # the key by which rank 0 was met

    async def meet(self) -> Met:
        """All connections; if it fails, none is left."""
        with ExitStack() as stack:
            stack.callback(self._close_all)
            met = await (self._gather(stack) if self._place.rank == 0 else self._join(stack))
            self._opened = []  # they are the caller's now
        for link in met.links.values():
            link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if hasattr(socket, "TCP_KEEPIDLE"):
                link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE)
        return met

    def _close_all(self) -> None:
        for connection in self._opened:
            connection.close()

    # --- rank 0 -----------------------------------------------------------------------------------

    async def _gather(self, stack: ExitStack) -> Met:
        key = self._key.read()
        assert key is not None  # rank 0 has written it, if it is not given
        acceptor = Acceptor(self._listen(), key, range(1, self._place.world), self._check)
        stack.callback(acceptor.close)
        try:
            await self._all_of(acceptor)
            met = self._met(acceptor)
            callers = [acceptor.callers[rank, LINK] for rank in met.links]
            others = {caller.rank: [caller.address, caller.port] for caller in callers}
            for caller in callers:
                await _say(caller.connection, caller.name, others=others, names=met.names)
            for caller in callers:
                await _hear(caller.connection, caller.name, 2 * _LINKING)
            for caller in callers:
                await _say(caller.connection, caller.name, go=True)
        except CodistillError as error:
            for caller in acceptor.callers.values():
                if caller.purpose == LINK:
                    with suppress(CodistillError):
                        await _say(caller.connection, caller.name, refused=list(error.args))
            raise
        finally:
            self._opened += [caller.connection for caller in acceptor.callers.values()]
        return met

    def _listen(self) -> socket.socket:
        local = self._place.address if self._place.address in ("localhost", "127.0.0.1", "::1") else None
        for port in self._place.ports:
            with suppress(OSError):
                return listen_here("127.0.0.1" if local == "localhost" else local, port)
        raise NetworkError(
            f"Rank 0 must have a port to listen at, one of {_ports(self._place.ports)}.",
            "none is free",
            "Choose another MASTER_PORT, or a free one by machines.port.",
        )

    async def _all_of(self, acceptor: Acceptor) -> None:
        try:
            async with asyncio.timeout(self._patience):
                await acceptor.wait()
        except TimeoutError:
            away = f"; turned away: {acceptor.turned_away}" if acceptor.turned_away else ""
            raise NetworkError(
                f"All {self._place.world} machines must come within {self._patience:g} s (machines.patience).",
                f"no {_ranks(acceptor.missing)}{away}",
                "Check that they run, that they reach MASTER_ADDR, and that they have the same key.",
            ) from None

    def _check(self, caller: Caller) -> CodistillError | None:
        """The error for a machine that is not what this one is."""
        if caller.purpose == HEARTBEAT:
            return None
        different = sorted(
            what for what in {*self._facts, *caller.facts} if self._facts.get(what) != caller.facts.get(what)
        )
        if not different:
            return None
        shown = [self._difference(what, caller.facts.get(what)) for what in different[:_SHOWN]]
        shown += [f"and {len(different) - _SHOWN} more"] if len(different) > _SHOWN else []
        return NetworkError(
            "All machines must have the same recipe, data and versions.",
            f"{caller.name} differs from {self._me} in: {'; '.join(shown)}",
            "Give the same recipe and data to all of them, and install the same versions.",
        )

    def _difference(self, what: str, theirs: Any) -> str:
        ours = self._facts.get(what)
        if what.startswith("version"):
            return f"{what} ({printable(str(theirs), 40)} instead of {ours})"
        return printable(what, 100)

    def _met(self, acceptor: Acceptor) -> Met:
        callers = [acceptor.callers[place] for place in sorted(acceptor.callers)]
        links = {caller.rank: caller.connection for caller in callers if caller.purpose == LINK}
        heartbeats = {caller.rank: caller.connection for caller in callers if caller.purpose == HEARTBEAT}
        return Met(links, heartbeats, {0: self._me} | {caller.rank: caller.name for caller in callers})

    # --- the others -------------------------------------------------------------------------------

    async def _join(self, stack: ExitStack) -> Met:
        rank, world = self._place.rank, self._place.world
        listening = listen_here(None, 0)
        stack.callback(listening.close)
        port = listening.getsockname()[1]
        where = [(self._place.address, each) for each in self._place.ports]
        links = {0: await self._call("rank 0", where, LINK, port, self._patience)}
        first = links[0].getpeername()
        heartbeats = {0: await self._call("rank 0", [first[:2]], HEARTBEAT, port, _LINKING)}
        told = await _hear(links[0], "rank 0", self._patience + _LINKING)
        names: dict[int, str] = told["names"]
        acceptor = Acceptor(listening, self._proven, range(rank + 1, world), lambda _: None)
        stack.callback(acceptor.close)
        try:
            for lower in range(1, rank):
                address, lower_port = told["others"][lower]
                place = [(address or first[0], lower_port)]  # no address: on the machine of rank 0
                links[lower] = await self._call(names[lower], place, LINK, port, _LINKING)
                heartbeats[lower] = await self._call(names[lower], place, HEARTBEAT, port, _LINKING)
            async with asyncio.timeout(_LINKING):
                await acceptor.wait()
        except TimeoutError:
            found = f"{self._me} was not called by {_ranks(acceptor.missing)}"
            error = NetworkError("Every machine must reach every other one.", found, "Open the ports between them.")
            await self._give_up(links[0], error)
        except CodistillError as raised:
            await self._give_up(links[0], raised)
        finally:
            self._opened += [caller.connection for caller in acceptor.callers.values()]
        await _say(links[0], "rank 0", linked=True)
        await _hear(links[0], "rank 0", 3 * _LINKING)
        above = self._met(acceptor)
        return Met(links | above.links, heartbeats | above.heartbeats, names)

    async def _give_up(self, link: socket.socket, error: CodistillError) -> None:
        with suppress(CodistillError):
            await _say(link, "rank 0", refused=list(error.args))
        raise error

    async def _call(
        self, whom: str, where: Sequence[tuple[str, int]], purpose: str, port: int, patience: float
    ) -> socket.socket:
        """A connection to another machine, which has proven to have the key and has welcomed this one."""
        loop = asyncio.get_running_loop()
        end, refused, last = loop.time() + patience, 0.0, "no answer"
        facts = self._facts if purpose == LINK and whom == "rank 0" else {}
        hello = {
            "rank": self._place.rank,
            "purpose": purpose,
            "host": socket.gethostname(),
            "port": port,
            "facts": facts,
        }
        while True:
            for host, number in where:
                key = self._key.read()
                if key is None:
                    last = f"no key: neither {VARIABLE} is set nor is there {self._key.source}"
                    break
                try:
                    async with asyncio.timeout(_ATTEMPT):
                        connection = await connect(host, number, None, loop)
                        self._opened.append(connection)
                        await prove_as_caller(connection, key)
                        await send(connection, **hello)
                        _unless_refused(await receive(connection))
                    self._proven = key
                    return connection
                except NotProven:
                    refused = refused or loop.time()
                    last = f"at {host}:{number} the key from {self._key.source} is refused, or another run listens"
                except (OSError, TimeoutError) as error:
                    why = os.strerror(error.errno) if error.errno else str(error) or type(error).__name__
                    last = last if refused else f"{host}:{number}: {why}"
            tired = refused and self._key.given and loop.time() - refused > _REFUSED
            if tired or loop.time() > end:
                raise NetworkError(
                    f"{self._me} must reach {whom}.",
                    last,
                    f"Check that it runs, its address and port ({_ports([port for _, port in where])}), and that all "
                    "machines have the same key.",
                )
            await asyncio.sleep(_AGAIN)


async def _say(connection: socket.socket, to: str, **content: Any) -> None:
    """Send values to a machine that has been welcomed."""
    try:
        await send(connection, **content)
    except OSError:
        raise _gone(to) from None


async def _hear(connection: socket.socket, by: str, patience: float) -> dict[str, Any]:
    """What a machine says next; raises its error, if it gives up."""
    try:
        async with asyncio.timeout(patience):
            return _unless_refused(await receive(connection))
    except (OSError, TimeoutError):
        raise _gone(by) from None


def _unless_refused(content: dict[str, Any]) -> dict[str, Any]:
    if "refused" in content:
        raise NetworkError(*(printable(str(part), 1000) for part in content["refused"][:3]))
    return content


def _gone(machine: str) -> NetworkError:
    return NetworkError(
        "All machines must stay until they have met.", f"{machine} has gone again", "See the output of that machine."
    )


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:20])) + (" and more" if len(ranks) > 20 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def _ports(ports: Sequence[int]) -> str:
    return f"{ports[0]} to {ports[-1]}" if len(ports) > 1 else str(ports[0])
