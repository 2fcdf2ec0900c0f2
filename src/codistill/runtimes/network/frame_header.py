"""The head of a frame: what it is, whose life it belongs to, its number, and the turn it is for.

A head travels beside its payload, so that the payload is the encoded message and nothing else.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

_LAYOUT = struct.Struct("<BQQiH")  # kind, life, number, phase, attempt


class FrameKind(IntEnum):
    """What a frame is."""

    MESSAGE = 0  # of a protocol
    LOST = 1  # in place of a message that an injected fault has hit
    END = 2  # the sender's part of a turn is over
    CONTROL = 3  # of the runtime itself: commands and answers
    HELLO = 4  # the first word of a life, and after a link is back


_KINDS = tuple(FrameKind)  # faster to look up than FrameKind(number), which is done for every frame


class Turn(NamedTuple):
    """A phase, and the how-manieth attempt at it: later turns are larger."""

    phase: int
    attempt: int = 0


class FrameHeader(NamedTuple):
    """What stands before a payload."""

    kind: FrameKind
    life: int  # drawn at random when a process starts: frames of a life that is over do not count
    number: int  # grows by one with each frame from a sender to a receiver: nothing counts twice
    turn: Turn = Turn(0)

    def encode(self) -> bytes:
        """As bytes."""
        return _LAYOUT.pack(self.kind, self.life, self.number, *self.turn)

    @classmethod
    def decode(cls, data: bytes) -> FrameHeader:
        """From bytes; a `ValueError` if they are no head."""
        if len(data) != _LAYOUT.size:
            raise ValueError(f"a head of {len(data)} bytes instead of {_LAYOUT.size}")
        kind, life, number, phase, attempt = _LAYOUT.unpack(data)
        if kind >= len(_KINDS):
            raise ValueError(f"an unknown kind of frame, {kind}")
        return cls(_KINDS[kind], life, number, Turn(phase, attempt))
