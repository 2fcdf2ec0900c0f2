"""What each end of a connection says first: who it is, how long it may be silent, and how much it accepts.

"codistil" | version u16 | session u64 | lease u32 (ms) | limit u64 (bytes) | length u8 | name (UTF-8)
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from codistill.runtimes.network.options import WIRE_VERSION
from codistill.text import printable

_LAYOUT = struct.Struct("<8sHQIQB")
_MAGIC = b"codistil"
_SHORTEST, _LONGEST = 0.5, 600.0  # seconds of a lease: a silent node is never waited for longer


class Refused(Exception):
    """The other end is not admitted; `final`: nor will it be later."""

    def __init__(self, why: str, *, final: bool) -> None:
        super().__init__(why)
        self.final = final


@dataclass(frozen=True)
class Preface:
    """The first words of a node."""

    session_id: int
    lease: float  # seconds of silence after which the other end may close the link
    limit: int  # bytes of the largest message that it accepts
    name: str

    def encode(self) -> bytes:
        """As bytes."""
        name = self.name.encode()
        lease = int(1000 * self.lease)
        return _LAYOUT.pack(_MAGIC, WIRE_VERSION, self.session_id, lease, self.limit, len(name)) + name


def read_preface(data: memoryview) -> tuple[Preface, int] | None:
    """A preface at the beginning of what has arrived, and its length; None if more is needed.

    `Refused` if the other end has another version; `ValueError` if it speaks another protocol.
    """
    beginning = bytes(data[: len(_MAGIC)])
    if beginning != _MAGIC[: len(beginning)]:
        raise ValueError("it speaks another protocol")
    if len(data) < _LAYOUT.size:
        return None
    _, version, session_id, lease, limit, length = _LAYOUT.unpack_from(data)
    if len(data) < _LAYOUT.size + length:
        return None
    name = bytes(data[_LAYOUT.size : _LAYOUT.size + length]).decode()  # UnicodeDecodeError is a ValueError
    if version != WIRE_VERSION:
        raise Refused(f"version {WIRE_VERSION} of the wire format is needed, not {version}", final=True)
    seconds = min(max(lease / 1000, _SHORTEST), _LONGEST)
    return Preface(session_id, seconds, limit, printable(name, 255)), _LAYOUT.size + length
