"""A host of a run on Ray: an actor that builds its agents, or is sent them, and serves the owner of the run."""

from __future__ import annotations

import copy
import os
import platform
import queue
import re
import struct
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import ray
from ray import method
from ray.exceptions import ActorUnavailableError, OutOfMemoryError, RayError, RaySystemError

from codistill.core import versions
from codistill.core.errors import RecipeError, RuntimeFault
from codistill.engine.description import RunDescription
from codistill.engine.host import BEGIN
from codistill.engine.placement import IdleStates, devices_by_name, place_agents, remove_left_behind, return_memory
from codistill.engine.runtime import warm_up
from codistill.engine.store import packed
from codistill.learners.ability import Ability
from codistill.nodes.agent import Agent
from codistill.nodes.record import record_of
from codistill.protocol import Protocol
from codistill.runtimes.ray_cluster import GPU, facts_of_agents
from codistill.runtimes.service import CONTROL, LOST, MESSAGE, Content, Links, NodeService, describe_error, serve
from codistill.runtimes.simulation import LocalRuntime


class HostProcess:
    """An actor: some agents of a run, and queues for frames that arrive while it computes."""

    def __init__(self) -> None:
        self._inbox: Any = queue.SimpleQueue()
        self._outbox: Any = queue.SimpleQueue()
        self._idle: IdleStates | None = None  # of the agents of the run, or of the baseline
        self._resting: IdleStates | None = None  # of the agents of the run, which have rested since they came
        self._removing = threading.Lock()
        self._run: RunDescription | None = None  # without agents
        self._agents: dict[str, Agent] = {}  # those that were sent

    @method(concurrency_group="deliver")
    def deliver(self, head: bytes, *apart: Any) -> None:
        """Take a batch of frames: bytes, and large payloads in a list or as arguments of their own."""
        payloads = [part for each in apart for part in (each if isinstance(each, list) else [each])]
        self._inbox.put(unpack_batch(head, payloads))

    @method(concurrency_group="swap")
    def swap(self, head: bytes = b"", *apart: Any) -> Any:
        """Take a batch of the owner, if there is one; wait for batches for the owner, and return them."""
        if head:
            self.deliver(head, *apart)
        batches = [self._outbox.get()]
        with suppress(queue.Empty):
            while True:
                batches.append(self._outbox.get_nowait())
        packed = [pack_batch(me, number, frames)[:2] for me, number, frames in batches]
        if len(packed) == 1 and not packed[0][1]:
            return packed[0][0]
        return [(head, as_arrays(large)) for head, large in packed]

    def _shared(self, given: Given) -> RunDescription:
        """What all agents share; fetched once."""
        if self._run is None:
            run, public, test = _fetched([given.run, given.public, given.test])
            # Arrays in the object store are read-only, and a model or a protocol may write to its own.
            self._run = replace(copy.deepcopy(run), public=public, test=test)
        return self._run

    def take_agents(self, given: Given, sent: Sequence[Any]) -> dict[str, Any]:
        """Take some agents that the owner has built, as references; the error, if there is one.

        States that are kept on disk are written at once, so that the host never has all of them in memory.
        """
        try:
            (agents,) = copy.deepcopy(_fetched(sent))  # as the run's other parts: see `_shared`
            replace(self._shared(given), agents=tuple(agents)).bind_nodes()
            if given.rests and self._resting is None:
                self._resting = _states_of(given.names)
            for agent in agents:
                self._agents[agent.name] = agent
                if self._resting is not None:
                    self._resting.offload(agent, BEGIN)
            return_memory()
            return {}
        except Exception as error:
            return {"error": describe_error(error, "")}

    def open(self, me: int, actors: Sequence[Any], places: Mapping[str, int], given: Given) -> dict[str, Any]:
        """Build the agents that were not sent; facts that the owner compares, or the error."""
        if not ray.get_runtime_context().get_accelerator_ids().get(GPU):
            # Ray leaves all GPUs of its node visible to an actor that has requested none.
            os.environ |= dict.fromkeys(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"), "")
        try:
            run = self._shared(given)
            if given.build is None:
                self._description = replace(run, agents=tuple(self._agents[name] for name in given.names))
            else:
                self._description = given.built(run)
            place_agents(self._description, given.device, 1, given.sharing)
        except Exception as error:
            return {"error": describe_error(error, "")}
        self._links = HostLinks(me, actors, places, self._inbox, self._outbox)
        agents = self._description.agents
        warm_up(agents)
        return {
            "versions": versions(),
            "facts": facts_of_agents(agents) if given.build is not None else {},
            "devices": devices_by_name(agents),
            "node": f"{platform.node()} ({ray.util.get_node_ip_address()})",  # type: ignore[no-untyped-call]
            "node_id": ray.get_runtime_context().get_node_id(),
        }

    def serve(self, *, baseline: bool, on_disk: bool) -> None:
        """Execute commands of the owner until it says stop."""
        description = self._description.baseline() if baseline else self._description
        assert description is not None  # the owner has the same
        for agent in description.agents if not baseline else ():
            record_of(agent).learned = True
        if on_disk:
            resting = None if baseline else self._resting
            self._idle = resting or _states_of([agent.name for agent in description.agents])
            for agent in description.agents:
                if record_of(agent).reload is None:  # its state is in memory
                    self._idle.offload(agent, BEGIN)
        runtime = LocalRuntime(description, self._idle, description.agents, self._links)
        serve(_RayService(runtime, self._idle), self._links.next_command, self._links.answer)
        runtime.close()
        self._remove_states()
        self._idle = None

    @method(concurrency_group="deliver")
    def end(self) -> None:
        """Remove all states on the node's disk, also while agents are at work."""
        self._remove_states()
        if self._resting is not None:
            self._resting.close()

    def _remove_states(self) -> None:
        with self._removing:  # otherwise the owner may end this process while another thread removes files
            if self._idle is not None:
                self._idle.close()


class _RayService(NodeService):
    """The nodes of an actor, and their states on its node's disk, which the owner does not see."""

    def unsaved(self) -> Content:
        assert self._idle is not None
        return {"unsaved": {name: self._idle.stored[name].size for name in sorted(self._idle.unsaved)}}

    def fetch(self, names: Sequence[str]) -> Content:
        assert self._idle is not None
        self._idle.unsaved -= set(names)
        return {"fetched": {name: packed(self._idle.stored[name]) for name in names}}

    def restore(self, states: Mapping[str, bytes]) -> Content:
        assert self._idle is not None
        for agent in self._runtime.description.agents:
            if agent.name in states:
                self._idle.take(agent, states[agent.name])
        return {}


def _states_of(names: Sequence[str]) -> IdleStates:
    """A folder of this node for the states of agents."""
    remove_left_behind()
    return IdleStates(None, names)


def _fetched(references: Sequence[Any]) -> list[Any]:
    """Fetch from the object store; a module that is missing on this node is named."""
    try:
        return list(ray.get(references))
    except RaySystemError as error:
        missing = re.search(r"ModuleNotFoundError: No module named '([^']+)'", str(error))
        if missing is None:
            raise
        raise RecipeError(
            "The modules of agents and protocols must be importable on every node.",
            f"no module '{missing[1]}' on {platform.node()}",
            "Install it there; or keep it in the folder of the script, on a file system that all nodes see; or call "
            'ray.init(runtime_env={"working_dir": "."}) before the run, which copies this folder to the nodes.',
        ) from None


@dataclass(frozen=True)
class Given:
    """What a host builds its agents from. References are fetched where they are used, once per node."""

    run: Any  # a reference to a description without agents and shared data
    names: tuple[str, ...]  # of its agents, which are sent beside this, or built in place
    public: Any
    test: Any
    build: Callable[[Sequence[str]], tuple[Protocol, list[Agent]]] | None
    device: str
    sharing: int  # hosts that share one GPU
    rests: bool  # whether agents that were sent have their states on disk from the start

    def built(self, run: RunDescription) -> RunDescription:
        assert self.build is not None
        protocol, agents = self.build(self.names)
        run = replace(run, protocol=protocol, agents=tuple(agents)).bind_nodes()
        for agent in agents:
            # As where the recipe was read: the first pass initialises models that infer shapes from samples.
            agent.learner.check(agent.shard.x, agent.shard.targets, agent.name)
            if Ability.PORTABLE in run.protocol.needs:
                agent.learner.check_travel(agent.shard.x, agent.name)
        return run


# --- Links on Ray: actor calls carry frames, in batches, and fail when a host is lost.

_LARGE = 100_000  # bytes above which Ray keeps an argument in its object store, once per node
SWAPS = 2  # calls of the owner that may wait for a host's frames at a time
_APART = 50_000  # bytes above which a payload is sent beside the batch, and not copied into it
_CALLS = 100  # to other hosts after which a host checks whether they failed; also whenever it waits for long
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
        more = f" and {len(self.agents) - NAMED} more" * (len(self.agents) > NAMED)
        where = f" on {self.node}" if self.node else ""
        return f"host {self.number}{where} with {', '.join(self.agents[:NAMED])}{more}"


class HostLost(RuntimeFault):
    """A host ended, or cannot be reached."""

    cut_off: HostActor | None = None  # alive, as far as Ray knows; another host cannot reach it


class _RayLinks(Links):
    """Frames in batches, which are numbered because Ray may start calls in another order."""

    def __init__(self, me: int, others: Iterable[int], places: Mapping[str, int]) -> None:
        super().__init__(me, others, places)
        self._outgoing: dict[int, list[_Frame]] = {}
        self._sent_batches: dict[int, int] = {}
        self._taken_batches: dict[int, int] = {}
        self._early: dict[tuple[int, int], list[_Frame]] = {}

    def _post(self, by_host: Mapping[int, list[int]], phase: int, sender: str, data: bytes | None) -> None:
        payload = ray.put(data) if data is not None and len(data) > _LARGE and len(by_host) > 1 else data or b""
        for host, numbers in by_host.items():
            # Host 0 is not an actor: its frames are returned by its own calls.
            frame = data or b"" if host == 0 else payload
            self._queue(host, LOST if data is None else MESSAGE, phase, self._numbers[sender], numbers, frame)

    def _queue(self, host: int, kind: int, phase: int, sender: int, receivers: list[int], data: Any) -> None:
        if kind != CONTROL:
            self._sent += 1
        self._outgoing.setdefault(host, []).append((kind, phase, sender, receivers, data))

    def flush(self) -> None:
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


# --- a batch in the form that Ray sends fastest: bytes, and large payloads beside them as arrays


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

    Payloads are copied: a view would keep them in the object store.
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
    head, large, stored = pack_batch(me, number, frames)
    return method.remote(head, *([as_arrays(large)] if large else ()), *stored)


def as_arrays(payloads: Sequence[bytes]) -> list[np.ndarray]:
    """Payloads as arrays, which Ray does not pickle."""
    return [np.frombuffer(payload, np.uint8) for payload in payloads]


def _failure(calls: Sequence[Any]) -> RayError | None:
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
        """Report hosts that cannot be reached to the owner; otherwise everybody would wait."""
        if not self._calls:
            return
        ended, _ = ray.wait(list(self._calls), num_returns=len(self._calls), timeout=0, fetch_local=False)
        hosts = {call: self._calls.pop(call) for call in ended}
        if _failure(ended) is None:  # one check for all calls, which is faster than one for each
            return
        for call, host in hosts.items():
            failure = _failure([call])
            if isinstance(failure, ActorUnavailableError):  # it may still be alive
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
        """Let all hosts serve; the references are kept, because Ray drops the errors of other calls."""
        for host in self._others:
            self._serving[host] = self._hosts[host - 1].actor.serve.remote(baseline=baseline, on_disk=idle)

    def _send(self, host: int, number: int, frames: list[_Frame]) -> None:
        actor = self._hosts[host - 1].actor
        if list(self._calls.values()).count(host) < SWAPS:
            # One call both ways: the answer is mostly what is waited for next.
            self._calls[_call(actor.swap, 0, number, frames)] = host
        else:
            _call(actor.deliver, 0, number, frames)

    def _pump(self, timeout: float) -> None:
        for host in self._others - set(self._calls.values()):
            self._calls[self._hosts[host - 1].actor.swap.remote()] = host
        # One at a time: to report all that have ended, Ray waits 0.1 ms for the others.
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
        """Raise the error of a host that ended before it was told to stop."""
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
        if isinstance(error, OutOfMemoryError):  # it would happen again
            return RuntimeFault(
                "Every host must have the memory that its agents need.",
                f"{lost.words} ran out of memory",
                "Divide the agents among more hosts (runtime.workers), ask for a larger share of a node ([ray] "
                "cpus_per_agent), or keep states of idle agents on disk (runtime.idle). Run the same command again, or "
                "resume, to continue from the last checkpoint.",
            )
        return HostLost(
            "Every host must run until the run ends.",
            f"{lost.words} ended, or cannot be reached{by}",
            "It may have run out of memory: see 'ray status' and the logs of Ray on that node. Run the same command "
            "again, or resume, to continue from the last checkpoint.",
        )
