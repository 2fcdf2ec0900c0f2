"""Signs of life between machines: one that has died, is frozen or cut off sends none, though no connection is closed.

A thread sends a byte to every other machine and reads theirs, on connections of their own: so also while this machine
computes, and however much waits to be sent on the links.
"""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress

_PER_LEASE = 6  # signs of life until a machine counts as dead
_LONGEST = 5.0  # seconds between two


class Heartbeat:
    """Tells which machines have been silent for longer than their lease."""

    def __init__(self, ends: Mapping[int, socket.socket], lease: float) -> None:
        self._ends, self._lease = dict(ends), lease
        self._every = min(lease / _PER_LEASE, _LONGEST)
        self._silent: frozenset[int] = frozenset()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        for end in self._ends.values():
            end.setblocking(False)
        self._thread.start()

    def silent(self) -> frozenset[int]:
        """The machines that count as dead."""
        return self._silent

    def close(self) -> None:
        """Send no more."""
        self._stopped.set()
        self._thread.join()
        for end in self._ends.values():
            end.close()

    def _beat(self) -> None:
        heard = dict.fromkeys(self._ends, time.monotonic())
        with selectors.DefaultSelector() as selector:
            for host, end in self._ends.items():
                selector.register(end, selectors.EVENT_READ, host)
            due = time.monotonic()
            while not self._stopped.is_set():
                now = time.monotonic()
                if now >= due:
                    if now - due > self._lease / 2:  # it was this machine that slept: what others sent is still unread
                        heard = dict.fromkeys(heard, now)
                    due = now + self._every
                    for end in self._ends.values():
                        with suppress(OSError):  # a closed connection is noticed on its link
                            end.send(b".")
                for key, _ in selector.select(min(self._every, 0.2)):
                    if _take(key.fileobj):  # type: ignore[arg-type]
                        heard[key.data] = time.monotonic()
                    else:
                        selector.unregister(key.fileobj)
                late = time.monotonic() - self._lease
                self._silent = frozenset(host for host, last in heard.items() if last < late)


def _take(end: socket.socket) -> bool:
    """Read what there is; False if the connection has ended."""
    try:
        return bool(end.recv(4096))
    except BlockingIOError:
        return True
    except OSError:
        return False
