"""Links between the hosts of a run: what they carry, and frames of bytes over socket pairs; sending never blocks."""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from codistill.errors import RuntimeFault
from codistill.runtimes.carrier import Frame, Waiting
from codistill.runtimes.deadlock import DeadlockDetection
from codistill.runtimes.remote_errors import rebuild_error
from codistill.runtimes.shared_memory import SharedMemory
from codistill.wire.state import pack, unpack

MESSAGE, LOST, END, CONTROL, _SHARED = range(5)  # kinds of frames
_HEADER = struct.Struct("<BiIIQ")  # kind, phase, sender, number of receivers, length of the payload
_PLACE = struct.Struct("<QQ")  # of a message in shared memory: where it starts, and its length
_STALL = 1.0  # seconds without a frame after which a host reports that it is blocked
_READ = 1 << 16


class Links(ABC):
    """All links of one host. Host 0 is the owner of the run; control messages go to and from it."""

    def __init__(self, me: int, others: Iterable[int], places: Mapping[str, int]) -> None:
        """`others`: the hosts at the other ends; `places`: the host of each node."""
        self.me, self._others = me, set(others)
        self._places = dict(places)
        self._names = list(places)
        self._numbers = {name: number for number, name in enumerate(self._names)}
        self._frames: list[Frame] = []
        self._control: deque[tuple[int, dict[str, Any]]] = deque()
        self._sent = self._received = 0
        self._deadlocks = DeadlockDetection()  # used by the owner of the run

    # --- what a carrier of bytes does ---------------------------------------------------------

    @abstractmethod
    def _queue(self, host: int, kind: int, phase: int, sender: int, receivers: list[int], data: bytes) -> None:
        """Queue a frame for a host, from one node to some of its nodes."""

    @abstractmethod
    def _pump(self, timeout: float) -> None:
        """Move what can be moved, and wait up to `timeout` seconds if nothing has arrived."""

    @abstractmethod
    def flush(self) -> None:
        """Send as much as the other side accepts now; the rest is sent while waiting."""

    @abstractmethod
    def drain(self) -> None:
        """Send all that is queued, reading meanwhile so that no host blocks on sending to this one."""

    @abstractmethod
    def _fault(self, host: int, told_by: int) -> RuntimeFault:
        """The error for a host that was lost, and the host that says so."""

    # --- frames of nodes ----------------------------------------------------------------------

    def post(self, phase: int, sender: str, receivers: Sequence[str], data: bytes | None) -> None:
        """Queue a message for nodes of other hosts; once per host, however many of its nodes receive it."""
        by_host: dict[int, list[int]] = {}
        for receiver in receivers:
            by_host.setdefault(self._places[receiver], []).append(self._numbers[receiver])
        self._post({host: by_host[host] for host in by_host if host in self._others}, phase, sender, data)

    def _post(self, by_host: Mapping[int, list[int]], phase: int, sender: str, data: bytes | None) -> None:
        for host, numbers in by_host.items():
            self._queue(host, LOST if data is None else MESSAGE, phase, self._numbers[sender], numbers, data or b"")

    def post_end(self, phase: int, sender: str, listeners: Iterable[str]) -> None:
        """Tell the hosts of those who may wait for a node that it will send no more in this phase."""
        for host in {self._places[name] for name in listeners} & self._others:
            self._queue(host, END, phase, self._numbers[sender], [], b"")

    def wait(self, host: Waiting) -> list[Frame]:
        """Frames that have arrived; waits for the next if there is none."""
        self.flush()
        quiet = time.monotonic()
        while not self._frames:
            self._pump(_STALL)
            if not self._frames:
                quiet = self._check_stall(quiet, host.waits)
        return self.arrived()

    def arrived(self) -> list[Frame]:
        """Frames that have arrived, without waiting."""
        frames, self._frames = self._frames, []
        return frames

    def _take(self, host: int, kind: int, phase: int, sender: int, receivers: Iterable[int], payload: bytes) -> None:
        """A frame that has arrived from another host."""
        if kind == CONTROL:
            self._take_control(host, unpack(payload))
            return
        self._received += 1
        names = [self._names[number] for number in receivers]
        self._frames.append(Frame(phase, self._names[sender], names, payload, lost=kind == LOST, is_end=kind == END))

    # --- control ------------------------------------------------------------------------------

    def command(self, *hosts: int, **content: Any) -> None:
        """Send a control message, and with it whatever else is queued for these hosts."""
        data = pack(content)
        for host in hosts:
            self._queue(host, CONTROL, 0, 0, [], data)
        self.flush()

    def next_control(self) -> tuple[int, dict[str, Any]]:
        """The next control message and the host that sent it."""
        quiet = time.monotonic()
        while not self._control:
            self._pump(_STALL)
            if not self._control:
                quiet = self._check_stall(quiet, dict)
        return self._control.popleft()

    def _take_control(self, host: int, content: dict[str, Any]) -> None:
        if "blocked" in content:
            self._deadlocks.add(host, content)
        elif "error" in content:
            raise rebuild_error(content["error"])
        elif "lost" in content:
            raise self._fault(content["lost"], host)
        else:
            self._control.append((host, content))

    # --- a deadlock ---------------------------------------------------------------------------

    def _check_stall(self, since: float, waits: Callable[[], dict[str, list[str]]]) -> float:
        """After a while without a frame report that this host is blocked; such reports are not frames."""
        if time.monotonic() - since < _STALL:
            return since
        self._report_blocked(waits())
        return time.monotonic()

    def _report_blocked(self, waits: dict[str, list[str]]) -> None:
        content = {"blocked": waits, "sent": self._sent, "received": self._received}
        if self.me != 0:
            self.command(0, **content)
            return
        self._deadlocks.add(0, content)
        self._deadlocks.check(hosts=len(self._others) + 1)


class _Peer:
    """One end of a link: bytes still to send, and received bytes of an incomplete frame."""

    def __init__(self, name: int, end: socket.socket) -> None:
        self.name, self.socket = name, end
        self.outgoing: deque[memoryview] = deque()
        self.incoming = bytearray()
        self.missing = 0  # bytes until the current frame is complete


class SocketLinks(Links):
    """Links over socket pairs, between processes of this machine; large messages through shared memory."""

    def __init__(
        self,
        me: int,
        ends: Mapping[int, socket.socket],
        places: Mapping[str, int],
        *,
        memory: Sequence[SharedMemory] = (),
        waiting: AbstractContextManager[None] | None = None,
    ) -> None:
        """`memory`: what each host writes its large messages to; `waiting` is entered while this host waits."""
        super().__init__(me, ends, places)
        self._memory, self._waiting = memory, waiting or nullcontext()
        self._peers = {host: _Peer(host, end) for host, end in ends.items()}
        self._selector = selectors.DefaultSelector()
        for peer in self._peers.values():
            peer.socket.setblocking(False)
            self._selector.register(peer.socket, selectors.EVENT_READ, peer)

    def _post(self, by_host: Mapping[int, list[int]], phase: int, sender: str, data: bytes | None) -> None:
        kind, payload, large = LOST if data is None else MESSAGE, data or b"", len(data or b"") > _READ
        if large and self._memory:
            start = self._memory[self.me].write(payload, by_host)
            if start is not None:
                kind, payload, large = _SHARED, _PLACE.pack(start, len(payload)), False
        for host, numbers in by_host.items():
            self._queue(host, kind, phase, self._numbers[sender], numbers, payload)
            if large:  # sent at once: it is read while others still compute
                self._write(self._peers[host])

    def flush(self) -> None:
        """Send as much as the other side accepts now; the rest is sent while waiting."""
        for peer in tuple(self._peers.values()):
            self._write(peer)

    def drain(self) -> None:
        """Send all that is queued, reading meanwhile so that no host blocks on sending to this one."""
        while any(peer.outgoing for peer in self._peers.values()):
            self._pump(_STALL)

    def flush_quietly(self) -> None:
        """Send what can be sent to hosts that still run."""
        with contextlib.suppress(RuntimeFault):
            self.flush()

    def close(self) -> None:
        """Close all links."""
        self._selector.close()
        for peer in self._peers.values():
            peer.socket.close()

    def _queue(self, host: int, kind: int, phase: int, sender: int, receivers: list[int], data: bytes) -> None:
        if kind != CONTROL:
            self._sent += 1
        peer = self._peers[host]
        header = _HEADER.pack(kind, phase, sender, len(receivers), len(data))
        peer.outgoing.append(memoryview(header + struct.pack(f"<{len(receivers)}I", *receivers)))
        if data:
            peer.outgoing.append(memoryview(data))

    def _write(self, peer: _Peer) -> None:
        try:
            while peer.outgoing:
                # Up to 64 pieces in one call: a burst of small messages is one packet.
                pieces = [peer.outgoing[i] for i in range(min(64, len(peer.outgoing)))]
                written = peer.socket.sendmsg(pieces)
                while written:
                    first = peer.outgoing[0]
                    if written < len(first):
                        peer.outgoing[0] = first[written:]
                        break
                    written -= len(first)
                    peer.outgoing.popleft()
        except BlockingIOError:
            pass
        except OSError:
            self._lose(peer)
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.outgoing else 0)
        if self._selector.get_key(peer.socket).events != wanted:
            self._selector.modify(peer.socket, wanted, peer)

    def _pump(self, timeout: float) -> None:
        events = self._selector.select(0)
        if not events:
            with self._waiting:
                events = self._selector.select(timeout)
        for key, mask in events:
            if mask & selectors.EVENT_WRITE:
                self._write(key.data)
            if mask & selectors.EVENT_READ and key.data.name in self._peers:
                self._read(key.data)

    def _read(self, peer: _Peer) -> None:
        try:
            while True:
                if peer.missing > _READ:
                    self._read_large(peer)
                chunk = peer.socket.recv(_READ)
                if not chunk:
                    raise ConnectionResetError
                peer.incoming += chunk
                peer.missing = max(0, peer.missing - len(chunk))
                if not peer.missing:
                    self._split(peer)
        except BlockingIOError:
            pass
        except OSError:
            self._lose(peer)

    def _read_large(self, peer: _Peer) -> None:
        """Read the rest of a large frame into its place, without growing the buffer step by step."""
        have, missing = len(peer.incoming), peer.missing
        whole = bytearray(have + missing)
        whole[:have] = peer.incoming
        try:
            while missing:
                count = peer.socket.recv_into(memoryview(whole)[len(whole) - missing :], missing)
                if not count:
                    raise ConnectionResetError
                missing -= count
        finally:
            del whole[len(whole) - missing :]
            peer.incoming, peer.missing = whole, missing
        self._split(peer)

    def _split(self, peer: _Peer) -> None:
        buffer, start = peer.incoming, 0
        while len(buffer) - start >= _HEADER.size:
            kind, phase, sender, count, length = _HEADER.unpack_from(buffer, start)
            body = start + _HEADER.size + 4 * count
            if len(buffer) < body + length:
                peer.missing = body + length - len(buffer)
                break
            numbers = struct.unpack_from(f"<{count}I", buffer, start + _HEADER.size)
            payload = bytes(memoryview(buffer)[body : body + length])
            start = body + length
            if kind == _SHARED:
                kind, payload = MESSAGE, self._memory[peer.name].read(self.me, *_PLACE.unpack(payload))
            self._take(peer.name, kind, phase, sender, numbers, payload)
        del buffer[:start]

    def _lose(self, peer: _Peer) -> None:
        """A link broke. Between the owner and another host that ends the run; between two others the owner is told."""
        if 0 in (self.me, peer.name):
            raise self._fault(peer.name, self.me)
        self._selector.unregister(peer.socket)
        peer.socket.close()
        del self._peers[peer.name]
        self._others.discard(peer.name)
        self.command(0, lost=peer.name)

    def _fault(self, host: int, told_by: int) -> RuntimeFault:
        return RuntimeFault(
            "Every worker process must stay alive until the run ends.",
            f"worker {host} ended unexpectedly" if host else "the process that owns the run has ended",
            "It may have run out of memory: use fewer workers. The results so far are in the last checkpoint.",
        )
