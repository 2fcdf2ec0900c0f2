"""Frames between the hosts of a run on Ray: calls of actors carry them, in batches, and say when a host is lost."""

from __future__ import annotations

import queue
import struct
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
from ray.exceptions import ActorUnavailableError, OutOfMemoryError, RayError

from codistill.errors import RuntimeFault
from codistill.runtimes.links import CONTROL, LOST, MESSAGE, Links

_LARGE = 100_000  # bytes from which on Ray keeps an argument in its object store: once per node
SWAPS = 2  # calls of the owner that may wait for a host's frames at a time
_APART = 50_000  # bytes of a payload from which on it is not copied into what is pickled around it
_CALLS = 100  # of other hosts after which a host looks whether they have failed; and whenever it waits for long
NAMED = 5  # agents of a host that an error names

_BATCH_HEADER = struct.Struct("<IQI")  # sender, number, number of frames
_FRAME_HEADER = struct.Struct("<BiIIQi")  # kind, phase, sender, number of receivers, length, place of a large payload

# kind, phase, sender, receivers, and the payload or a reference to it
_Frame = tuple[int, int, int, list[int], Any]


@dataclass(frozen=True)
class HostActor:
    """An actor, its agents, and its node."""

    number: int
    actor: Any
    agents: tuple[str, ...]
    node: str = ""
    node_id: str = ""  # by which Ray knows it

    @property
    def words(self) -> str:
        """The host with its node and agents, human-readable."""
        more = f" and {len(self.agents) - NAMED} more" * (len(self.agents) > NAMED)
        where = f" on {self.node}" if self.node else ""
        return f"host {self.number}{where} with {', '.join(self.agents[:NAMED])}{more}"


class HostLost(RuntimeFault):
    """A host has ended, or cannot be reached any more."""

    cut_off: HostActor | None = None  # alive, as far as Ray knows; another host cannot reach it


class _RayLinks(Links):
    """Frames in batches. Ray may start calls in another order than they were made in, so batches are numbered."""

    def __init__(self, me: int, others: Iterable[int], places: Mapping[str, int]) -> None:
        super().__init__(me, others, places)
        self._outgoing: dict[int, list[_Frame]] = {}
        self._sent_batches: dict[int, int] = {}
        self._taken_batches: dict[int, int] = {}
        self._early: dict[tuple[int, int], list[_Frame]] = {}

    def _post(self, by_host: Mapping[int, list[int]], phase: int, sender: str, data: bytes | None) -> None:
        payload = ray.put(data) if data is not None and len(data) > _LARGE and len(by_host) > 1 else data or b""
        for host, numbers in by_host.items():
            # Host 0 is no actor: what it gets is returned to it.
            frame = data or b"" if host == 0 else payload
            self._queue(host, LOST if data is None else MESSAGE, phase, self._numbers[sender], numbers, frame)

    def _queue(self, host: int, kind: int, phase: int, sender: int, receivers: list[int], data: Any) -> None:
        if kind != CONTROL:
            self._sent += 1
        self._outgoing.setdefault(host, []).append((kind, phase, sender, receivers, data))

    def flush(self) -> None:
        """Send all that is queued: a call for each host."""
        outgoing, self._outgoing = self._outgoing, {}
        for host, frames in outgoing.items():
            number = self._sent_batches[host] = self._sent_batches.get(host, 0) + 1
            self._send(host, number, frames)

    def drain(self) -> None:
        """Send all that is queued; Ray keeps it until it has arrived."""
        self.flush()

    def _send(self, host: int, number: int, frames: list[_Frame]) -> None:
        raise NotImplementedError

    def _take_batch(self, host: int, number: int, frames: list[_Frame]) -> None:
        """Take the frames of a batch when all batches before it have been taken."""
        self._early[host, number] = frames
        expected = self._taken_batches.get(host, 0) + 1
        while (host, expected) in self._early:
            self._taken_batches[host] = expected
            for frame in self._early.pop((host, expected)):
                self._take(host, *frame)
            expected += 1


# --- a batch as Ray carries it fastest: in bytes, and large payloads beside them, which Ray copies from where they are


def pack_batch(sender: int, number: int, frames: Sequence[_Frame]) -> tuple[bytes, list[bytes], list[Any]]:
    """A batch in bytes, its large payloads, and references to those in the object store."""
    payloads = {id(frame[4]): frame[4] for frame in frames}
    large = {key: each for key, each in payloads.items() if isinstance(each, bytes) and len(each) > _APART}
    stored = {key: each for key, each in payloads.items() if not isinstance(each, bytes)}
    places = {key: place for place, key in enumerate([*large, *stored])}
    parts = [_BATCH_HEADER.pack(sender, number, len(frames))]
    for kind, phase, source, receivers, payload in frames:
        place = places.get(id(payload), -1)
        inside = b"" if place >= 0 else payload
        parts.append(_FRAME_HEADER.pack(kind, phase, source, len(receivers), len(inside), place))
        parts += [struct.pack(f"<{len(receivers)}I", *receivers), inside]
    return b"".join(parts), list(large.values()), list(stored.values())


def unpack_batch(head: bytes, apart: Sequence[Any]) -> tuple[int, int, list[_Frame]]:
    """The sender, the number and the frames of a batch.

    Payloads are copied from the object store, where they would stay as long as somebody holds a view of them.
    """
    sender, number, count = _BATCH_HEADER.unpack_from(head)
    at, frames = _BATCH_HEADER.size, list[_Frame]()
    for _ in range(count):
        kind, phase, source, receivers, length, place = _FRAME_HEADER.unpack_from(head, at)
        at += _FRAME_HEADER.size
        names = list(struct.unpack_from(f"<{receivers}I", head, at))
        at += 4 * receivers
        payload = head[at : at + length] if place < 0 else bytes(apart[place])
        at += length
        frames.append((kind, phase, source, names, payload))
    return sender, number, frames


def _call(method: Any, me: int, number: int, frames: list[_Frame]) -> Any:
    """Deliver a batch by a method of an actor."""
    head, large, stored = pack_batch(me, number, frames)
    return method.remote(head, *([as_arrays(large)] if large else ()), *stored)


def as_arrays(payloads: Sequence[bytes]) -> list[np.ndarray]:
    """Arrays: Ray copies them as they are, and does not pickle them."""
    return [np.frombuffer(payload, np.uint8) for payload in payloads]


def _failure(calls: Sequence[Any]) -> RayError | None:
    """Why one of some calls that have ended has failed; None if none has."""
    try:
        ray.get(calls)
    except RayError as error:
        return error
    return None


class HostLinks(_RayLinks):
    """The links of an actor: to other actors by calls of theirs, to the owner by what its calls return."""

    def __init__(self, me: int, actors: Sequence[Any], places: Mapping[str, int], inbox: Any, outbox: Any) -> None:
        super().__init__(me, [host for host in range(len(actors) + 1) if host != me], places)
        self._actors, self._inbox, self._outbox = actors, inbox, outbox
        self._calls: dict[Any, int] = {}  # by reference, the host that was called

    def _send(self, host: int, number: int, frames: list[_Frame]) -> None:
        if host == 0:
            self._outbox.put((self.me, number, frames))
        else:
            self._calls[_call(self._actors[host - 1].deliver, self.me, number, frames)] = host

    def _pump(self, timeout: float) -> None:
        try:
            self._take_batch(*self._inbox.get(timeout=timeout))
        except queue.Empty:
            self._check_calls()
        with suppress(queue.Empty):
            while True:
                self._take_batch(*self._inbox.get_nowait())
        if len(self._calls) > _CALLS:
            self._check_calls()

    def _check_calls(self) -> None:
        """Tell the owner of a host that was called and cannot be reached; otherwise everybody would wait."""
        if not self._calls:
            return
        ended, _ = ray.wait(list(self._calls), num_returns=len(self._calls), timeout=0, fetch_local=False)
        hosts = {call: self._calls.pop(call) for call in ended}
        if _failure(ended) is None:  # mostly; to ask once takes much less time than to ask for each call
            return
        for call, host in hosts.items():
            failure = _failure([call])
            if isinstance(failure, ActorUnavailableError):  # Ray has not said that it is dead
                self.command(0, cut_off=host)
            elif failure is not None:
                self.command(0, lost=host)

    def _fault(self, host: int, told_by: int) -> RuntimeFault:
        return RuntimeFault("Every host must be reachable.", f"host {host} is not", "See the owner's output.")


class OwnerLinks(_RayLinks):
    """The links of the owner of the run to all actors."""

    def __init__(self, hosts: Sequence[HostActor], places: Mapping[str, int]) -> None:
        super().__init__(0, range(1, len(hosts) + 1), places)
        self._hosts = hosts
        self._calls: dict[Any, int] = {}  # by reference, the host whose frames it waits for
        self._serving: dict[int, Any] = {}

    def serve(self, *, baseline: bool, idle: bool) -> None:
        """Let all hosts serve. A call whose reference nobody holds is not told to fail."""
        for host in self._others:
            self._serving[host] = self._hosts[host - 1].actor.serve.remote(baseline=baseline, on_disk=idle)

    def _send(self, host: int, number: int, frames: list[_Frame]) -> None:
        actor = self._hosts[host - 1].actor
        if list(self._calls.values()).count(host) < SWAPS:
            # One call there and back: mostly it is the answer that is waited for next.
            self._calls[_call(actor.swap, 0, number, frames)] = host
        else:
            _call(actor.deliver, 0, number, frames)

    def _pump(self, timeout: float) -> None:
        for host in self._others - set(self._calls.values()):
            self._calls[self._hosts[host - 1].actor.swap.remote()] = host
        # One at a time: asked for all that have ended, Ray takes a tenth of a millisecond to say that others have not.
        ended, _ = ray.wait(list(self._calls), num_returns=1, timeout=timeout, fetch_local=False)
        if not ended:
            self._check_serving()
        for call in ended:
            host = self._calls.pop(call)
            returned = self._returned(call, host)
            for head, large in [(returned, ())] if isinstance(returned, bytes) else returned:
                self._take_batch(*unpack_batch(head, large))

    def _returned(self, call: Any, host: int) -> Any:
        try:
            return ray.get(call)
        except RayError as error:
            raise self._loss(host, error) from None

    def _check_serving(self) -> None:
        """Raise what has ended a host, if it has not been told to stop."""
        calls = {call: host for host, call in self._serving.items()}
        for call in ray.wait(list(calls), num_returns=len(calls), timeout=0, fetch_local=False)[0] if calls else ():
            self._returned(call, calls[call])
            del self._serving[calls[call]]

    def _take_control(self, host: int, content: dict[str, Any]) -> None:
        if "cut_off" in content:
            fault = self._fault(content["cut_off"], host)
            if isinstance(fault, HostLost):
                fault.cut_off = self._hosts[content["cut_off"] - 1]
            raise fault
        super()._take_control(host, content)

    def _fault(self, host: int, told_by: int) -> RuntimeFault:
        return self._loss(host, None, f", says {self._hosts[told_by - 1].words}")

    def _loss(self, host: int, error: RayError | None, by: str = "") -> RuntimeFault:
        lost = self._hosts[host - 1]
        if isinstance(error, OutOfMemoryError):  # it would be so again
            return RuntimeFault(
                "Every host must have the memory that its agents need.",
                f"{lost.words} ran out of memory",
                "Divide the agents among more hosts (runtime.workers), ask for a larger share of a node ([ray] "
                "cpus_per_agent), or keep agents that are not at work on disk (runtime.idle). The same command, or "
                "resume, goes on from the last checkpoint.",
            )
        return HostLost(
            "Every host must stay until the run ends.",
            f"{lost.words} ended, or cannot be reached{by}",
            "It may have run out of memory. See 'ray status' and the logs of Ray on that node. The same command, or "
            "resume, goes on from the last checkpoint.",
        )
