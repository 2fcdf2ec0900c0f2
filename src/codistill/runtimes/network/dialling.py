"""Connections from this node to another one: tried again and again, for as long as the node runs."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from codistill.errors import NetworkError
from codistill.runtimes.network.addresses import split
from codistill.runtimes.network.tls_handshake import secured

if TYPE_CHECKING:
    from codistill.certs.credentials import Credentials
    from codistill.runtimes.network.stream import Stream

_AGAIN, _SLOWER, _AT_MOST = 0.2, 1.5, 1.0  # seconds between two attempts to connect: at first, factor, at most
_CONNECTING = 10.0  # seconds that an attempt to connect may take


async def keep_connected(
    address: str,
    credentials: Credentials | None,
    loop: asyncio.AbstractEventLoop,
    open_stream: Callable[[socket.socket], Stream],
) -> None:
    """Connect to a node, and again whenever the connection has ended."""
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
