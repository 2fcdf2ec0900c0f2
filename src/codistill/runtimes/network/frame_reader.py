"""Frames out of the bytes of a connection: first the preface of the other end, then

    length of the payload u64 | header (`frame_header`) | payload

The length of a payload is compared with the limit before any of it is kept, and memory grows with what has arrived, not
with what was announced.
"""

from __future__ import annotations

import struct
import time
from typing import Protocol

from codistill.runtimes.network.allowance import Bucket
from codistill.runtimes.network.frame_header import EMPTY, HEADER_SIZE, FrameHeader, FrameKind
from codistill.runtimes.network.preface import Preface, read_preface

_LENGTH = struct.Struct("<Q")
_RECORD = _LENGTH.size + HEADER_SIZE
_SCRATCH = 1 << 16  # bytes read at a time while no large payload is being received
_FIRST = 1 << 20  # bytes of a payload for which memory is taken at once
_MALFORMED = 1 << 16  # bytes of a frame whose header cannot be read
_SKIPPED = 1 << 26  # bytes that are read and discarded; an honest node knows the limit, and sends nothing above it
# A node sends a ping in each quarter of its `silence`: with the shortest, 240 in the ten minutes for which this one may
# have been stopped.
_PINGS, _PINGS_PER_SECOND = 300.0, 20.0


class Handler(Protocol):
    """Takes what was read."""

    def take_preface(self, preface: Preface) -> None:
        """The other end has said who it is."""
        ...

    def largest(self, kind: FrameKind) -> int:
        """Bytes of the largest payload of this kind that is accepted."""
        ...

    def take_frame(self, header: bytes, payload: bytes) -> None:
        """A frame has arrived."""
        ...

    def take_oversized(self, header: FrameHeader, length: int, limit: int) -> None:
        """A frame above the limit has begun to arrive, and is discarded."""
        ...


class FrameReader:
    """Where to put what arrives next, and what was in it. A `ValueError` ends the connection."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._has_preface = False
        self._scratch, self._kept = bytearray(_SCRATCH), 0
        self._body: bytearray | None = None
        self._header, self._length, self._filled = b"", 0, 0
        self._skipping = self._skipped = 0
        self._pings = Bucket(_PINGS, _PINGS_PER_SECOND, time.monotonic)
        self.is_stopped = False

    @property
    def is_in_payload(self) -> bool:
        """Whether a payload has begun to arrive."""
        return self._body is not None

    @property
    def held(self) -> int:
        """Bytes of memory for a payload that has begun to arrive."""
        return 0 if self._body is None else len(self._body)

    def buffer(self) -> memoryview:
        """Where to put what arrives next: a large payload is received in its place."""
        if self._body is not None:
            if self._filled == len(self._body):
                self._body.extend(bytes(min(len(self._body), self._length - self._filled)))
            return memoryview(self._body)[self._filled :]
        return memoryview(self._scratch)[self._kept :]

    def received(self, count: int) -> None:
        """Take what was put into the buffer."""
        if self._body is not None:
            self._filled += count
            if self._filled == self._length:
                self._deliver()
            return
        end, at = self._kept + count, 0
        view = memoryview(self._scratch)
        while at < end and not self.is_stopped:
            used = self._read(view[at:end])
            if not used:
                break
            at += used
        self._kept = end - at
        if at and self._kept:
            view[: self._kept] = bytes(view[at:end])

    def _read(self, data: memoryview) -> int:
        """Read one part of what has arrived; how many bytes of it were used, 0 if more are needed."""
        if self._skipping:
            used = min(len(data), self._skipping)
            self._skipping -= used
            return used
        if self._body is not None:  # the beginning of a payload whose rest is received in its place
            used = min(len(data), self._length)
            self._body[:used] = data[:used]
            self._filled = used
            if used == self._length:
                self._deliver()
            return used
        return self._read_record(data) if self._has_preface else self._read_preface(data)

    def _read_preface(self, data: memoryview) -> int:
        found = read_preface(data)
        if found is None:
            return 0
        self._has_preface = True
        self._handler.take_preface(found[0])
        return found[1]

    def _read_record(self, data: memoryview) -> int:
        if len(data) < _RECORD:
            return 0
        length = int(_LENGTH.unpack_from(data)[0])
        self._header, self._length = bytes(data[_LENGTH.size : _RECORD]), length
        try:
            header = FrameHeader.decode(self._header)
        except ValueError:
            if length > _MALFORMED:
                raise ValueError("a malformed frame") from None
            self._begin()  # handed on as it is: whoever handles it counts it as a bad message
            return _RECORD
        most = 0 if header.kind in EMPTY else self._handler.largest(header.kind)
        if length > most:
            self._skip(length)
            self._handler.take_oversized(header, length, most)
        elif header.kind is not FrameKind.PING:
            self._begin()
        elif not self._pings.take():
            raise ValueError("too many signs of life")
        return _RECORD

    def _begin(self) -> None:
        self._body, self._filled = bytearray(min(self._length, _FIRST)), 0
        if not self._length:
            self._deliver()

    def _skip(self, length: int) -> None:
        self._skipping = length
        self._skipped += length
        if self._skipped > _SKIPPED:
            self._skipping = 0
            self.is_stopped = True

    def _deliver(self) -> None:
        payload, self._body = bytes(self._body or b""), None
        self._handler.take_frame(self._header, payload)
