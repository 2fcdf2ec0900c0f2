"""Memory that processes forked from one another share: a large message is written there once, and read from there.

Through a socket the kernel would copy it twice for each receiver. Only where the bytes are goes through the socket, in
the order of all frames, so that nothing else changes; a message for which there is no room goes there as a whole.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Iterable

import numpy as np

ROOM = 64 << 20  # bytes that a host may have written and others not read yet; memory is taken as it is written to


def shared_by(hosts: int) -> list[SharedMemory]:
    """Memory that each of so many hosts writes to; none where the system has not that much to give."""
    try:
        return [SharedMemory(hosts) for _ in range(hosts)]
    except OSError:
        return []


class SharedMemory:
    """Written by one host and read by the others. To be made before the processes are forked."""

    def __init__(self, hosts: int, room: int = ROOM) -> None:
        self._bytes = memoryview(mmap.mmap(-1, room))
        # How many messages each host has read. Only that host changes its number, and only after it has read.
        self._read = np.frombuffer(mmap.mmap(-1, 8 * hosts), dtype=np.int64)
        self._written = [0] * hosts  # how many were written for each host
        self._used: deque[tuple[int, dict[int, int]]] = deque()  # starts of messages; and the number of each for a host
        self._next = 0  # the first byte after the last message

    def write(self, data: bytes, readers: Iterable[int]) -> int | None:
        """Where a message now starts, for some hosts; None if there is no room until they have read more."""
        while self._used and all(self._read[reader] >= number for reader, number in self._used[0][1].items()):
            self._used.popleft()
        start = self._place(len(data))
        if start is None:
            return None
        self._bytes[start : start + len(data)] = data
        numbers = {}
        for reader in readers:
            self._written[reader] += 1
            numbers[reader] = self._written[reader]
        self._used.append((start, numbers))
        self._next = start + len(data)
        return start

    def read(self, me: int, start: int, size: int) -> bytes:
        """A copy of a message; its place is free once all of its readers have one."""
        data = bytes(self._bytes[start : start + size])
        self._read[me] += 1
        return data

    def _place(self, size: int) -> int | None:
        """Behind the last message, or else at the front; at the front in any case where all have been read."""
        if not self._used:
            return 0 if size <= len(self._bytes) else None
        first = self._used[0][0]
        if self._next <= first:  # free is what lies between the last message and the first
            return self._next if self._next + size <= first else None
        if self._next + size <= len(self._bytes):
            return self._next
        return 0 if size <= first else None
