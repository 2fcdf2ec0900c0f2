"""Processes that are forked from this one: the runtime 'processes', and nodes of the network in processes of their own.

A worker has the agents without any copying, computes with one thread, and ends with the process that has forked it.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import multiprocessing
import os
import selectors
import signal
import socket
import struct
import sys
import threading
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from types import FrameType
from typing import Any

import numpy as np
import torch

from codistill.core.devices import bound_memory, shares_of
from codistill.core.errors import CodistillError, RuntimeFault
from codistill.engine.description import RunDescription
from codistill.engine.placement import IdleStates, devices_of, offload
from codistill.engine.runtime import ShouldStop, never, warm_up
from codistill.nodes.node import Node
from codistill.runtimes.service import (
    CONTROL,
    LOST,
    MESSAGE,
    STALL,
    STOP,
    Content,
    DistributedRuntime,
    Links,
    NodeService,
    describe_error,
    places_of,
    rebuild_error,
    serve,
)
from codistill.runtimes.simulation import LocalRuntime
from codistill.wire.state import pack, unpack

_BUFFER = 4 << 20  # bytes a link holds: the weights of several small models
_LOOK = 0.1  # seconds between two looks whether to stop
_GRACE = 5.0  # seconds for a process to end by itself
_FAILED = 4  # exit code of a process that has sent its error


def default_workers(agents: int) -> int:
    """One worker per usable core, and no more than there are agents."""
    return max(1, min(usable_cores(), agents))


def usable_cores() -> int:
    """The cores that this process may use, which may be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Processes(DistributedRuntime):
    """Worker processes that are forked from this one, so they have the agents without any copying."""

    def __init__(self, description: RunDescription, workers: int | None = None, idle: IdleStates | None = None) -> None:
        check_can_fork()
        agents = description.agents
        count = min(workers or default_workers(len(agents)), len(agents))
        devices = devices_of(agents)
        parts = shares_of(devices, count)
        shares: list[list[Node]] = [[node for node in description.nodes if node not in agents]]
        shares.extend([agents[i] for i in part] for part in parts)
        used = [[devices[i] for i in part] for part in parts]
        places = places_of(description, shares)
        warm_up(agents)  # once here, instead of in every worker
        ends, memory = _socket_pairs(count + 1), shared_by(count + 1)

        def work(worker: int) -> None:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the owner of the run
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            gc.freeze()  # inherited objects are not collected here, so their pages stay shared
            torch.set_num_threads(1)
            bound_memory(used[worker - 1], used)
            if idle is not None:
                offload([agent for agent in agents if places[agent.name] != worker])
            _close_others(ends, worker)
            links = SocketLinks(worker, ends[worker], places, memory=memory)
            runtime = LocalRuntime(description, idle, shares[worker], links)
            with suppress(RuntimeFault):  # the owner of the run has ended
                serve(NodeService(runtime, idle), links.next_command, links.answer)

        self._processes = [_forked(f"codistill-{worker}", partial(work, worker)) for worker in range(1, count + 1)]
        if idle is not None:  # their states are with the workers
            offload(agents)
        _close_others(ends, 0)
        self._links = SocketLinks(0, ends[0], places, memory=memory)
        super().__init__(description, self._links, shares, self._links, idle)

    def close(self) -> None:
        """Stop the workers; kill one that does not respond."""
        with suppress(RuntimeFault):  # a worker may have ended already; the others see the links close
            self._tell(STOP)
        with suppress(RuntimeFault):
            self._links.flush()
        for process in self._processes:
            process.join(timeout=2)
            if process.is_alive():
                process.kill()
                process.join()
        self._links.close()
        super().close()


def _socket_pairs(hosts: int) -> list[dict[int, socket.socket]]:
    """A socket for every pair of hosts: ends[a][b] is a's end of the link to b."""
    ends: list[dict[int, socket.socket]] = [{} for _ in range(hosts)]
    for a in range(hosts):
        for b in range(a + 1, hosts):
            ends[a][b], ends[b][a] = socket.socketpair()
            for end in (ends[a][b], ends[b][a]):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
    return ends


def _close_others(ends: list[dict[int, socket.socket]], me: int) -> None:
    """Close the ends of other hosts: a link breaks visibly only if nobody else holds its end."""
    for host, others in enumerate(ends):
        if host != me:
            for end in others.values():
                end.close()


# --- Links over socket pairs, between processes of this machine; large messages through shared memory.

_SHARED = 4  # a kind of frame, beside those of all links: its payload is in shared memory
_HEADER = struct.Struct("<BiIIQ")  # kind, phase, sender, number of receivers, length of the payload
_PLACE = struct.Struct("<QQ")  # of a message in shared memory: where it starts, and its length
_READ = 1 << 16


class _Peer:
    """One end of a link: bytes still to send, and received bytes of an incomplete frame."""

    def __init__(self, name: int, end: socket.socket) -> None:
        self.name, self.socket = name, end
        self.outgoing: deque[memoryview] = deque()
        self.incoming = bytearray()
        self.missing = 0  # bytes until the current frame is complete


class SocketLinks(Links):
    """The links of one process."""

    def __init__(
        self,
        me: int,
        ends: Mapping[int, socket.socket],
        places: Mapping[str, int],
        *,
        memory: Sequence[SharedMemory],
    ) -> None:
        """`memory`: what each host writes its large messages to."""
        super().__init__(me, ends, places)
        self._memory = memory
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
        for peer in tuple(self._peers.values()):
            self._write(peer)

    def drain(self) -> None:
        while any(peer.outgoing for peer in self._peers.values()):
            self._pump(STALL)

    def close(self) -> None:
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
        for key, mask in self._selector.select(timeout):
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
        """A link to the owner that breaks ends the run; one between two other hosts is reported to the owner."""
        if 0 in (self.me, peer.name):
            raise self._fault(peer.name, self.me)
        self._selector.unregister(peer.socket)
        peer.socket.close()
        del self._peers[peer.name]
        self._others.discard(peer.name)
        self.command(0, lost=peer.name)

    def _fault(self, host: int, told_by: int) -> RuntimeFault:
        return RuntimeFault(
            "Every worker process must run until the run ends.",
            f"worker {host} ended unexpectedly" if host else "the process that owns the run has ended",
            "It may have run out of memory: use fewer workers, and resume from the last checkpoint.",
        )


# --- Memory shared by forked processes: a large message is written once, and read by each receiver.

ROOM = 64 << 20  # bytes of unread messages of a host; the system allocates pages when they are first written


def shared_by(hosts: int) -> list[SharedMemory]:
    """Memory for each of some hosts to write to; empty if the system cannot provide it."""
    try:
        return [SharedMemory(hosts) for _ in range(hosts)]
    except OSError:
        return []


class SharedMemory:
    """Written by one host and read by the others. Create it before the processes are forked."""

    def __init__(self, hosts: int, room: int = ROOM) -> None:
        self._bytes = memoryview(mmap.mmap(-1, room))
        # How many messages each host has read. Only that host changes its number, and only after it has read.
        self._read = np.frombuffer(mmap.mmap(-1, 8 * hosts), dtype=np.int64)
        self._written = [0] * hosts  # how many were written for each host
        self._used: deque[tuple[int, dict[int, int]]] = deque()  # starts of messages; and the number of each for a host
        self._next = 0  # the first byte after the last message

    def write(self, data: bytes, readers: Iterable[int]) -> int | None:
        """Write a message for some hosts; its start, or None if there is no room until they have read more."""
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
        """A copy of a message; its memory is free once all of its readers have one."""
        data = bytes(self._bytes[start : start + size])
        self._read[me] += 1
        return data

    def _place(self, size: int) -> int | None:
        """After the last message, or at the front if there is no room; at the front if all have been read."""
        if not self._used:
            return 0 if size <= len(self._bytes) else None
        first = self._used[0][0]
        if self._next <= first:  # the free part is between the last message and the first
            return self._next if self._next + size <= first else None
        if self._next + size <= len(self._bytes):
            return self._next
        return 0 if size <= first else None


# --- A function in a process of its own, with a pipe for its results and for commands to it.


class Channel:
    """One end of a pipe for packed messages: arrays and plain values, nothing that is executed."""

    def __init__(self, connection: Connection) -> None:
        self.end = connection

    def send(self, **content: Any) -> None:
        self.end.send_bytes(pack(content))

    def receive(self) -> Content:
        """The next message; raises EOFError when the other end is closed."""
        content: Content = unpack(self.end.recv_bytes())
        return content

    def poll(self, timeout: float | None) -> bool:
        """Whether a message arrives within `timeout` seconds (None: wait for one), or the other end is closed."""
        return self.end.poll(timeout)


class ForkedProcess:
    """Runs one function in a process of its own; SIGTERM asks it to stop gently."""

    def __init__(self, name: str, work: Callable[[Channel, ShouldStop], None]) -> None:
        check_can_fork()
        self.name = name
        near, far = multiprocessing.Pipe()
        self.channel = Channel(near)
        self._process = _forked(f"codistill-{name}", lambda: _work(work, near, far))
        far.close()

    def receive(self) -> Content | None:
        """The next message, or None if the process was killed; raises the error of a process that has failed."""
        try:
            content = self.channel.receive()
        except (EOFError, OSError):
            return None
        if "error" in content:
            error = rebuild_error(content["error"])
            error.add_note(f"This happened at '{self.name}'.")
            raise error
        return content

    def killed(self) -> RuntimeFault:
        return RuntimeFault(
            "Every node must run until the run ends.",
            f"'{self.name}' ended unexpectedly",
            "It may have run out of memory, or it was killed. Resume the run from its last checkpoint.",
        )

    def stop(self) -> None:
        if self._process.is_alive():
            self._process.terminate()

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    def end(self, grace: float = _GRACE) -> None:
        """Wait `grace` seconds for the process to end, then kill it."""
        self._process.join(timeout=grace)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self.channel.end.close()


def _work(work: Callable[[Channel, ShouldStop], None], near: Connection, far: Connection) -> None:
    near.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the parent, which asks this process to stop
    torch.set_num_threads(1)
    channel, code = Channel(far), 0
    try:
        with GentleInterrupt(quiet=True, signals=(signal.SIGTERM,)) as interrupt:
            work(channel, lambda: interrupt.asked)
    except (KeyboardInterrupt, BrokenPipeError):
        code = 1
    except Exception as error:  # a user's mistake or a defect: raised again by the parent
        trace = "" if isinstance(error, CodistillError) else traceback.format_exc()
        with suppress(OSError):
            channel.send(error=describe_error(error, trace))
        code = _FAILED
    os._exit(code)  # at once: threads of links need not be waited for


class Pipes:
    """Commands to forked processes, over their pipes; asked to stop, it asks them to stop, once."""

    def __init__(self, processes: Sequence[ForkedProcess]) -> None:
        self._processes = dict(enumerate(processes, 1))
        self.should_stop: ShouldStop = never
        self._asked = False

    def command(self, *hosts: int, **content: Any) -> None:
        for host in hosts:
            with suppress(OSError):  # it has ended: `next_control` says why
                self._processes[host].channel.send(**content)

    def next_control(self) -> tuple[int, Content]:
        """The next answer, and the host that it comes from; raises the error in it, or of a process that has ended."""
        ends = {process.channel.end: host for host, process in self._processes.items()}
        while not (ready := wait(ends, _LOOK)):
            if not self._asked and self.should_stop():
                self._asked = True
                for process in self._processes.values():
                    process.stop()
        host = next(host for end, host in ends.items() if end in ready)
        content = self._processes[host].receive()
        if content is None:
            raise self._processes[host].killed()
        return host, content


# --- Forking; a process ends at once with the one that has forked it, so that nothing holds its folder or ports.

_PDEATHSIG = 1  # PR_SET_PDEATHSIG of Linux
_LOOK_FOR_PARENT = 0.2  # seconds between two checks, where the kernel does not notify


def check_can_fork() -> None:
    if sys.platform == "win32" or "fork" not in multiprocessing.get_all_start_methods():
        raise RuntimeFault(
            "The runtimes 'processes' and 'network' need a system that can fork.",
            sys.platform,
            'Use runtime="simulation": the result is the same to the bit.',
        )


def _forked(name: str, work: Callable[[], None]) -> multiprocessing.process.BaseProcess:
    """A process that does some work, and ends when this one does."""
    parent = Parent.here()

    def start() -> None:
        parent.end_with()
        work()

    process = multiprocessing.get_context("fork").Process(target=start, name=name, daemon=True)
    with warnings.catch_warnings():
        # Python warns that a fork copies only one thread; the new process uses none of the others.
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    return process


@dataclass(frozen=True)
class Parent:
    """The process that is about to fork another one."""

    pid: int
    by_main_thread: bool

    @classmethod
    def here(cls) -> Parent:
        """This process and thread."""
        return cls(os.getpid(), threading.current_thread() is threading.main_thread())

    def end_with(self) -> None:
        """In the forked process: end when the parent ends, even if it is killed."""
        # Linux sends the signal when the *thread* that forked ends; only the main thread lives as long as its process.
        if not (self.by_main_thread and _ask_kernel()):
            threading.Thread(target=self._watch, name="parent", daemon=True).start()
        if os.getppid() != self.pid:  # it ended before the kernel was asked
            os._exit(1)

    def _watch(self) -> None:
        while os.getppid() == self.pid:
            time.sleep(_LOOK_FOR_PARENT)
        os._exit(1)


def _ask_kernel() -> bool:
    """Whether the kernel will kill this process when its parent ends."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        return int(ctypes.CDLL(None).prctl(_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)) == 0
    except (OSError, AttributeError):
        return False


# --- Ctrl-C: the first stops the run at the end of the round, the second at once.


class GentleInterrupt:
    """While active, the first SIGINT or SIGTERM only asks; a second one raises KeyboardInterrupt."""

    def __init__(self, *, quiet: bool = False, signals: Sequence[int] = (signal.SIGINT, signal.SIGTERM)) -> None:
        self.asked = False
        self._quiet, self._signals = quiet, signals
        self._before: dict[int, Any] = {}

    def __enter__(self) -> GentleInterrupt:
        if threading.current_thread() is threading.main_thread():
            for number in self._signals:
                self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        if self._quiet:
            return
        # The signal may interrupt a write to the same stream, which then cannot be written to.
        with suppress(RuntimeError, OSError, ValueError):
            print("\nStopping at the end of this round (again: at once) ...", file=sys.stderr, flush=True)
