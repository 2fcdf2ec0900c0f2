"""An Ethernet switch that holds every frame for a while, and loses some: for kernels without `tc netem`.

It works on frames, so TCP, its retransmissions and ping meet the delay and the loss as on a long line.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import selectors
import socket
import time
from collections import deque

_ALL = 0x0003  # ETH_P_ALL: frames of every kind
_SOL_PACKET, _VNET_HDR, _IGNORE_OUTGOING = 263, 15, 23  # of linux/if_packet.h
_SO_RCVBUFFORCE = 33
_HEADER = 10  # bytes before each frame: what the kernel has left to do for it (checksum, segments)
_LARGEST = 1 << 17
_ROOM = 1 << 24  # bytes that may wait at a port until they are read


def port(name: str) -> socket.socket:
    """All frames that come in at an interface; what is sent goes out there."""
    opened = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    # The kernel's header goes along, so frames with open checksums, or larger than the link, stay as they are.
    opened.setsockopt(_SOL_PACKET, _VNET_HDR, 1)
    opened.setsockopt(_SOL_PACKET, _IGNORE_OUTGOING, 1)
    opened.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _ROOM)
    opened.bind((name, _ALL))
    opened.setblocking(False)
    return opened


class SlowSwitch:
    """Passes frames on to where their receiver was last heard, or else to everybody."""

    def __init__(self, ports: list[socket.socket], delay: float, loss: float) -> None:
        self._ports, self._delay, self._loss = ports, delay, loss
        self._where: dict[bytes, socket.socket] = {}  # by address, at which port it was heard
        self._held: deque[tuple[float, socket.socket, bytes]] = (
            deque()
        )  # the delay is the same for all: first in, first out
        self._rng = random.Random(0)

    def run(self) -> None:
        """Until somebody ends the process."""
        ready = selectors.DefaultSelector()
        for one in self._ports:
            ready.register(one, selectors.EVENT_READ)
        while True:
            wait = max(0.0, self._held[0][0] - time.monotonic()) if self._held else None
            for key, _ in ready.select(wait):
                self._take(key.fileobj)  # type: ignore[arg-type]
            now = time.monotonic()
            while self._held and self._held[0][0] <= now:
                self._pass_on(*self._held.popleft()[1:])

    def _take(self, came: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                frame = came.recv(_LARGEST)
                self._where[frame[_HEADER + 6 : _HEADER + 12]] = came
                if self._rng.random() >= self._loss:
                    self._held.append((time.monotonic() + self._delay, came, frame))

    def _pass_on(self, came: socket.socket, frame: bytes) -> None:
        known = self._where.get(frame[_HEADER : _HEADER + 6])
        for target in self._ports if known is None else [known]:
            if target is not came:
                with contextlib.suppress(OSError):  # a full queue loses frames, as it does in any switch
                    target.send(frame)


def main() -> None:
    """Join interfaces of this network namespace."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("interfaces", nargs="+")
    parser.add_argument("--delay", type=float, required=True, help="seconds that each frame is held")
    parser.add_argument("--loss", type=float, default=0.0, help="share of frames that are lost")
    options = parser.parse_args()
    with contextlib.suppress(OSError):
        os.nice(-10)  # a line does not become slower because its ends compute
    ports = [port(name) for name in options.interfaces]
    print("ready", flush=True)
    SlowSwitch(ports, options.delay, options.loss).run()


if __name__ == "__main__":
    main()
