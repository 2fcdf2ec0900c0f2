"""The first bytes of a connection between two machines of a run: each end proves that it has the shared key.

    caller    "codistill machines 1\\n" | nonce a (32)
    listener  nonce b (32)
    caller    HMAC-SHA256(key, "caller" a b)
    listener  1 | HMAC-SHA256(key, "listener" a b), or 0: refused

The lengths are fixed, so a stranger can make the listener read 85 bytes and no more, and is told nothing that depends
on the key. Then both send values packed as in checkpoints, with their length first; nothing of them is executed.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
import struct
from typing import Any

from codistill.errors import CheckpointError
from codistill.wire.state import pack, unpack

_MAGIC = b"codistill machines 1\n"
_NONCE = _MAC = 32
_LENGTH = struct.Struct("<I")
_MOST = 64 << 20  # bytes of what an end with the key says: a few hundred for each agent


class TurnedAway(ConnectionError):
    """A caller is not admitted; `reason` is counted."""

    @property
    def reason(self) -> str:
        """Why."""
        return str(self)


class NotProven(TurnedAway):
    """The other end has another key, or is of another run; or it speaks another protocol."""


async def prove_as_caller(connection: socket.socket, key: bytes) -> None:
    """Prove to the listener that this end has the key; raises if either end is refused."""
    loop, nonce = asyncio.get_running_loop(), secrets.token_bytes(_NONCE)
    await loop.sock_sendall(connection, _MAGIC + nonce)
    nonces = nonce + await _read(connection, _NONCE)
    await loop.sock_sendall(connection, _mac(key, b"caller", nonces))
    if await _read(connection, 1) != b"\1":
        raise NotProven("it refuses the key of this process")
    if not hmac.compare_digest(await _read(connection, _MAC), _mac(key, b"listener", nonces)):
        raise NotProven("it has another key")


async def prove_as_listener(connection: socket.socket, key: bytes) -> None:
    """Let the caller prove that it has the key, and prove the same to it."""
    loop, nonce = asyncio.get_running_loop(), secrets.token_bytes(_NONCE)
    said = await _read(connection, len(_MAGIC) + _NONCE)
    if not said.startswith(_MAGIC):
        raise NotProven("another protocol")
    nonces = said[len(_MAGIC) :] + nonce
    await loop.sock_sendall(connection, nonce)
    if not hmac.compare_digest(await _read(connection, _MAC), _mac(key, b"caller", nonces)):
        await loop.sock_sendall(connection, b"\0")
        raise NotProven("another key, or another run")
    await loop.sock_sendall(connection, b"\1" + _mac(key, b"listener", nonces))


async def send(connection: socket.socket, **content: Any) -> None:
    """Send values to an end that has proven itself."""
    data = pack(content)
    await asyncio.get_running_loop().sock_sendall(connection, _LENGTH.pack(len(data)) + data)


async def receive(connection: socket.socket) -> dict[str, Any]:
    """The next values from an end that has proven itself."""
    (length,) = _LENGTH.unpack(await _read(connection, _LENGTH.size))
    if length > _MOST:
        raise ConnectionError("too long")
    try:
        content = unpack(await _read(connection, length))
    except CheckpointError as error:
        raise ConnectionError(error.found) from None
    if not isinstance(content, dict):
        raise ConnectionError("no table")
    return content


async def _read(connection: socket.socket, length: int) -> bytes:
    loop, data = asyncio.get_running_loop(), bytearray()
    while len(data) < length:
        chunk = await loop.sock_recv(connection, min(length - len(data), 1 << 16))
        if not chunk:
            raise ConnectionResetError("closed")
        data += chunk
    return bytes(data)


def _mac(key: bytes, end: bytes, nonces: bytes) -> bytes:
    return hmac.digest(key, end + nonces, "sha256")
