"""The header of a frame: its kind, the sender's session, its number, and the turn it belongs to.

A header is sent beside its payload, so that the payload is the encoded message and nothing else.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

_LAYOUT = struct.Struct("<BQQiH")  # kind, session, number, phase, attempt
HEADER_SIZE = _LAYOUT.size


class FrameKind(IntEnum):
    """What a frame is."""

    MESSAGE = 0  # of a protocol
    LOST = 1  # in place of a message that an injected fault has dropped
    END = 2  # the sender's part of a turn is over
    CONTROL = 3  # of the runtime itself: commands and answers
    HELLO = 4  # the first frame of a session, sent again after a reconnection
    PING = 5  # nothing: this end of the link is alive
    REFUSED = 6  # this node does not accept the other one, and closes the link
    ASK = 7  # a message whose sender waits for the answer; in a run without rounds


MESSAGES = frozenset({FrameKind.MESSAGE, FrameKind.ASK})  # kinds with a message of the protocol
EMPTY = frozenset({FrameKind.LOST, FrameKind.END, FrameKind.PING})  # kinds without content
_KINDS = tuple(FrameKind)  # faster to index than FrameKind(number), which is done for every frame


class Turn(NamedTuple):
    """A phase and the number of the attempt at it: later turns are larger."""

    phase: int
    attempt: int = 0


class FrameHeader(NamedTuple):
    """What is sent beside a payload."""

    kind: FrameKind
    session_id: int  # drawn at random when a process starts: frames of an earlier session are ignored
    number: int  # grows by one with each frame from a sender to a receiver: a replayed frame is noticed
    turn: Turn = Turn(0)

    def encode(self) -> bytes:
        """As bytes."""
        return _LAYOUT.pack(self.kind, self.session_id, self.number, *self.turn)

    @classmethod
    def decode(cls, data: bytes) -> FrameHeader:
        """From bytes; a `ValueError` if they are not a header."""
        if len(data) != _LAYOUT.size:
            raise ValueError(f"a header of {len(data)} bytes instead of {_LAYOUT.size}")
        kind, session_id, number, phase, attempt = _LAYOUT.unpack(data)
        if kind >= len(_KINDS):
            raise ValueError(f"unknown frame kind {kind}")
        return cls(_KINDS[kind], session_id, number, Turn(phase, attempt))
