"""The TLS handshake of a connection, without blocking others."""

from __future__ import annotations

import asyncio
import socket
import ssl
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from codistill.certs.credentials import Credentials

_ALERT = 0.05  # seconds that the other end has to read why TLS did not admit it


async def secured(
    plain: socket.socket, credentials: Credentials | None, loop: asyncio.AbstractEventLoop, *, server: bool
) -> socket.socket:
    """The same connection after the handshake, as it is without credentials; closed if the handshake fails."""
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

    Who calls sends its mark in the place of the server's name, as host names are not compared here: see `listener`.
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
            # TLS has told the other end what is wrong: let it read that before the connection ends.
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
