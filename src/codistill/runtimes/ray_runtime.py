"""A run on a Ray cluster: each actor of Ray is a host of some agents; the hub lives with the owner of the run.

Ray places the actors, connects them and notices when one has ended. What they do is what hosts do everywhere: see
`several_hosts`. When a node is lost, all actors are started anew on what is left, and the run goes back to its last
checkpoint.
"""

from __future__ import annotations

import copy
import os
import platform
import queue
import re
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, TypeVar

import numpy as np
import ray
from ray import method
from ray.exceptions import ActorUnavailableError, OutOfMemoryError, RayError, RaySystemError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from codistill.agent import Agent
from codistill.base_node import Node
from codistill.errors import RecipeError, RuntimeFault
from codistill.learners.ability import Ability
from codistill.protocol import Protocol
from codistill.results.records import RoundEnded
from codistill.runtimes.agent_facts import facts_of_agents
from codistill.runtimes.description import RunDescription
from codistill.runtimes.host import BEGIN
from codistill.runtimes.idle import IdleStates, remove_left_behind, return_memory, set_aside
from codistill.runtimes.links import CONTROL, LOST, MESSAGE, Links
from codistill.runtimes.placement import devices_by_name, place_agents
from codistill.runtimes.ray_cluster import (
    CPU,
    GPU,
    Demand,
    RayCluster,
    alive_nodes,
    cluster_line,
    demand_of,
    less_demanding,
    room,
    too_little,
)
from codistill.runtimes.remote_errors import describe_error, rebuild_error
from codistill.runtimes.round_report import Report
from codistill.runtimes.runtime import ShouldStop, Stopped, load_nodes, never, one_thread, save_nodes, warm_up
from codistill.runtimes.several_hosts import SeveralHosts, places_of, serve_host
from codistill.runtimes.stored_state import Saved, StoredState, packed
from codistill.version import versions

_LARGE = 100_000  # bytes from which on Ray keeps an argument in its object store: once per node
_BATCH = 32 << 20  # bytes of agents or of their states that are sent or fetched at a time
_AHEAD = 2  # parts of agents that are on their way at a time
_SWAPS = 2  # calls of the owner that may wait for a host's frames at a time
_APART = 50_000  # bytes of a payload from which on it is not copied into what is pickled around it
_CALLS = 100  # of other hosts after which a host looks whether they have failed; and whenever it waits for long
_LOSSES = 3  # in a row, without a round between them, after which a run gives up
_REMOVAL = 30.0  # seconds in which hosts remove states from the disks of their nodes at the end of a run
_LOOK = 5.0  # seconds between two looks at a cluster that has no room yet
_NAMED = 5  # agents of a host that an error names
_T = TypeVar("_T")

_BATCH_HEADER = struct.Struct("<IQI")  # sender, number, number of frames
_FRAME_HEADER = struct.Struct("<BiIIQi")  # kind, phase, sender, number of receivers, length, place of a large payload

# kind, phase, sender, receivers, and the payload or a reference to it
_Frame = tuple[int, int, int, list[int], Any]


class HostLost(RuntimeFault):
    """A host has ended, or cannot be reached any more."""

    cut_off: _Host | None = None  # alive, as far as Ray knows; another host cannot reach it


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


def _packed(sender: int, number: int, frames: Sequence[_Frame]) -> tuple[bytes, list[bytes], list[Any]]:
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


def _unpacked(head: bytes, apart: Sequence[Any]) -> tuple[int, int, list[_Frame]]:
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
    head, large, stored = _packed(me, number, frames)
    return method.remote(head, *([_views(large)] if large else ()), *stored)


def _views(payloads: Sequence[bytes]) -> list[np.ndarray]:
    """Arrays: Ray copies them as they are, and does not pickle them."""
    return [np.frombuffer(payload, np.uint8) for payload in payloads]


def _failure(calls: Sequence[Any]) -> RayError | None:
    """Why one of some calls that have ended has failed; None if none has."""
    try:
        ray.get(calls)
    except RayError as error:
        return error
    return None


class _HostLinks(_RayLinks):
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


class _OwnerLinks(_RayLinks):
    """The links of the owner of the run to all actors."""

    def __init__(self, hosts: Sequence[_Host], places: Mapping[str, int]) -> None:
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
        if list(self._calls.values()).count(host) < _SWAPS:
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
                self._take_batch(*_unpacked(head, large))

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


class HostProcess:
    """An actor: some agents of a run, and the mail that reaches it while it computes."""

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
        """A batch of frames has arrived: in bytes, with large payloads in a list, or each as an argument."""
        self._take(head, apart)

    def _take(self, head: bytes, apart: Sequence[Any]) -> None:
        payloads = [part for each in apart for part in (each if isinstance(each, list) else [each])]
        self._inbox.put(_unpacked(head, payloads))

    @method(concurrency_group="swap")
    def swap(self, head: bytes = b"", *apart: Any) -> Any:
        """A batch of the owner has arrived, or none; batches for the owner, when there are some."""
        if head:
            self._take(head, apart)
        batches = [self._outbox.get()]
        with suppress(queue.Empty):
            while True:
                batches.append(self._outbox.get_nowait())
        packed = [_packed(me, number, frames)[:2] for me, number, frames in batches]
        if len(packed) == 1 and not packed[0][1]:
            return packed[0][0]
        return [(head, _views(large)) for head, large in packed]

    def _shared(self, given: _Given) -> RunDescription:
        """What all agents share, once for all of them."""
        if self._run is None:
            self._run = given.shared()
        return self._run

    def take_agents(self, given: _Given, sent: Sequence[Any]) -> dict[str, Any]:
        """Some agents that the owner has made, as references; the error, if there is one.

        Where states are to be on disk they are so at once: the host never has all of them in memory.
        """
        try:
            (agents,) = copy.deepcopy(_fetched(sent))  # as the run's other parts: see there
            replace(self._shared(given), agents=tuple(agents)).introduce()
            if given.rests and self._resting is None:
                self._resting = _states_of(given.names)
            for agent in agents:
                self._agents[agent.name] = agent
                if self._resting is not None:
                    self._resting.rest(agent, BEGIN)
            return_memory()
            return {}
        except Exception as error:
            return {"error": describe_error(error, "")}

    def open(self, me: int, actors: Sequence[Any], places: Mapping[str, int], given: _Given) -> dict[str, Any]:
        """Make the agents that were not sent; what the owner compares, or the error."""
        if not ray.get_runtime_context().get_accelerator_ids().get(GPU):
            # Ray leaves all GPUs of its node visible to an actor that has asked for none.
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
        self._links = _HostLinks(me, actors, places, self._inbox, self._outbox)
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
        """Do as the owner says until it says stop."""
        description = self._description.baseline() if baseline else self._description
        assert description is not None  # the owner has the same
        for agent in description.agents if not baseline else ():
            agent.learned = True
        if on_disk:
            resting = None if baseline else self._resting
            self._idle = resting or _states_of([agent.name for agent in description.agents])
            for agent in description.agents:
                if agent.recall is None:  # its state is in memory
                    self._idle.rest(agent, BEGIN)
        with one_thread():
            serve_host(self._links, description.agents, description, self._idle)
        self._remove_states()
        self._idle = None

    @method(concurrency_group="deliver")
    def end(self) -> None:
        """Remove what is on the node's disk, while the agents may be at work; it is removed when this returns."""
        self._remove_states()
        if self._resting is not None:
            self._resting.close()

    def _remove_states(self) -> None:
        with self._removing:  # else the owner ends this process while another thread still removes thousands of files
            if self._idle is not None:
                self._idle.close()


def _states_of(names: Sequence[str]) -> IdleStates:
    """Where states of agents are on this node, if not in memory."""
    remove_left_behind()
    return IdleStates(None, names)


def _fetched(references: Sequence[Any]) -> list[Any]:
    """What is in the object store; an error that names a module which is not on this node."""
    try:
        return list(ray.get(references))
    except RaySystemError as error:
        missing = re.search(r"ModuleNotFoundError: No module named '([^']+)'", str(error))
        if missing is None:
            raise
        raise RecipeError(
            "What agents and protocols are made of must be importable on every node.",
            f"no module '{missing[1]}' on {platform.node()}",
            "Install it there; or keep it in the folder of the script, on a file system that all nodes see; or call "
            'ray.init(runtime_env={"working_dir": "."}) before the run, which copies this folder to the nodes.',
        ) from None


@dataclass(frozen=True)
class _Given:
    """What a host makes its agents from. Parts in the object store are fetched where they are used, once per node."""

    run: Any  # a reference to a description without agents and shared data
    names: tuple[str, ...]  # of its agents, which are sent beside this, or built in place
    public: Any
    test: Any
    build: Callable[[Sequence[str]], tuple[Protocol, list[Agent]]] | None
    device: str
    sharing: int  # hosts that share one GPU
    rests: bool  # whether agents that were sent have their states on disk from the beginning

    def shared(self) -> RunDescription:
        """The run without its agents."""
        run, public, test = _fetched([self.run, self.public, self.test])
        # Arrays in the object store cannot be written to, and a model or a protocol may well write to its own.
        without: RunDescription = replace(copy.deepcopy(run), public=public, test=test)
        return without

    def built(self, run: RunDescription) -> RunDescription:
        """The run with agents that are built in place."""
        assert self.build is not None
        protocol, agents = self.build(self.names)
        run = replace(run, protocol=protocol, agents=tuple(agents)).introduce()
        for agent in agents:
            # As where the recipe was read: a pass of samples shows a model what they look like.
            agent.learner.check(agent.shard.x, agent.shard.targets, agent.name)
            if Ability.PORTABLE in run.protocol.needs:
                agent.learner.check_travel(agent.shard.x, agent.name)
        return run


@dataclass(frozen=True)
class _Host:
    """An actor, its agents, and its node."""

    number: int
    actor: Any
    agents: tuple[str, ...]
    node: str = ""
    node_id: str = ""  # by which Ray knows it

    @property
    def words(self) -> str:
        """Which host it is, for a person."""
        more = f" and {len(self.agents) - _NAMED} more" * (len(self.agents) > _NAMED)
        where = f" on {self.node}" if self.node else ""
        return f"host {self.number}{where} with {', '.join(self.agents[:_NAMED])}{more}"


class RayHosts:
    """The actors of a run. An observer, too: it sees how far the run has come."""

    def __init__(
        self,
        description: RunDescription,
        options: RayCluster,
        *,
        workers: int | None = None,
        device: str = "cpu",
        on_disk: bool = False,
        should_stop: ShouldStop = never,
    ) -> None:
        """`on_disk`: whether states of agents that are not at work will be on the disks of nodes."""
        self._on_disk = on_disk
        self._description, self._options, self._workers, self._device = description, options, workers, device
        self._should_stop = should_stop
        self._hub = save_nodes([node for node in description.nodes if not isinstance(node, Agent)])
        self._group: PlacementGroup | None = None
        self._hosts: list[_Host] = []
        self._losses = 0  # in a row
        self._cut_off: dict[str, str] = {}  # nodes that another host could not reach, by their ids, for a person
        self.devices: dict[str, str] = {}
        self.news: list[str] = []  # for the log of the run

    def __enter__(self) -> RayHosts:
        return self

    def __exit__(self, *_: object) -> None:
        self._end(_REMOVAL)

    def round_ended(self, record: RoundEnded) -> None:
        """A round was done since the last loss."""
        self._losses = 0

    def survive(self, attempt: Callable[[], _T]) -> _T:
        """Try until no host is lost on the way; each attempt goes on from the last checkpoint."""
        while True:
            try:
                if not self._hosts:
                    self.open()
                return attempt()
            except HostLost as lost:
                self._end()
                self._losses += 1
                if self._losses >= _LOSSES:
                    raise
                if lost.cut_off is not None:
                    self._cut_off[lost.cut_off.node_id] = lost.cut_off.node
                self.news.append(f"{lost.found}; the run goes back to its last checkpoint")
                print(f"note: {self.news[-1]}.", file=sys.stderr)

    def open(self) -> None:
        """Place the actors, and have them make their agents."""
        demand, self._group = self._place()
        without = f"; without node {', '.join(self._cut_off.values())}" * bool(self._cut_off)
        print(f"note: {cluster_line()}; {demand.words}{without}.", file=sys.stderr)
        agents = self._description.agents
        self._shares: list[list[Node]] = [[*agents[i :: demand.hosts]] for i in range(demand.hosts)]
        self._shares.insert(0, [node for node in self._description.nodes if not isinstance(node, Agent)])
        load_nodes(self._shares[0], self._hub)  # as it was before an attempt that was lost
        given = self._given(demand)
        remote: Any = ray.remote
        # Threads of their own: for the mail that arrives while a host computes, and for the owner's calls that wait.
        kind = remote(concurrency_groups={"deliver": 1, "swap": _SWAPS})(HostProcess)
        for i in range(demand.hosts):
            place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=i)
            custom = {name: amount for name, amount in demand.each.items() if name not in (CPU, GPU)}
            actor = kind.options(
                num_cpus=demand.each[CPU], num_gpus=demand.each.get(GPU, 0), resources=custom, scheduling_strategy=place
            ).remote()
            self._hosts.append(_Host(i + 1, actor, tuple(node.name for node in self._shares[i + 1])))
        if self._description.build is None:
            self._send_agents(given)
        places, actors = places_of(self._description, self._shares), [host.actor for host in self._hosts]
        opened = [
            host.actor.open.remote(host.number, actors, places, mine)
            for host, mine in zip(self._hosts, given, strict=True)
        ]
        warm_up(agents)  # here as well, at the same time
        self._check(_started(opened))
        self.links = _OwnerLinks(self._hosts, places)

    def _place(self) -> tuple[Demand, PlacementGroup]:
        """Reserve the resources of all hosts, spread over the nodes; waits for a while if they are not free."""
        until, said = time.monotonic() + self._options.patience, False
        agents, wanted = len(self._description.agents), self._options.nodes or 0
        while True:
            nodes = self._nodes()
            choose = less_demanding if self._losses else demand_of
            demand = choose(self._options, agents, self._workers, nodes)
            complete = len(nodes) >= wanted or self._losses > 0
            fits = room(nodes, demand.each) >= demand.hosts
            if complete and not fits and not self._losses:
                raise too_little(demand, nodes)
            if complete and fits:
                where = (
                    [{"ray.io/node-id": f"!in({','.join(self._cut_off)})"}] * demand.hosts if self._cut_off else None
                )
                group = placement_group(
                    [dict(demand.each)] * demand.hosts, strategy="SPREAD", bundle_label_selector=where
                )
                if group.wait(timeout_seconds=_LOOK):
                    return demand, group
                remove_placement_group(group)
                self._cut_off = {}  # others use the rest
            what = demand.words if complete else f"{wanted} nodes, of which {len(nodes)} are there"
            if time.monotonic() > until:
                raise too_little(demand, nodes, "; others use them" if complete and fits else f"; waited for: {what}")
            if self._should_stop():
                raise Stopped
            if not said:
                print(f"note: waiting for room in the Ray cluster: {what}.", file=sys.stderr)
                said = True
            if not (complete and fits):
                time.sleep(1)

    def _nodes(self) -> list[Mapping[str, float]]:
        """The nodes for hosts: without those that another host could not reach, if there is room on the others."""
        others = alive_nodes(without=self._cut_off)
        if self._cut_off:
            demand = less_demanding(self._options, len(self._description.agents), self._workers, others)
            if room(others, demand.each) < demand.hosts:
                self._cut_off = {}
                return alive_nodes()
        return others

    def _given(self, demand: Demand) -> list[_Given]:
        """What each host makes its agents from."""
        run = self._description
        bare = replace(run, agents=(), hub=None, public=None, test=None, build=None, reported=run.names)
        if run.build is not None:  # a protocol in a file of one's own is read anew, as the agents are
            bare = replace(bare, protocol=Protocol())
        shared = [_put(part, "What the agents share") for part in (bare, run.public, run.test)]
        gpus = demand.each.get(GPU, 0)
        sharing = round(1 / gpus) if 0 < gpus < 1 else 1
        given = []
        for share in self._shares[1:]:
            names = tuple(node.name for node in share)
            # On a GPU agents are placed by the memory of their models, so all of these must be there.
            rests = self._on_disk and not gpus
            given.append(_Given(shared[0], names, shared[1], shared[2], run.build, self._device, sharing, rests))
        return given

    def _send_agents(self, given: Sequence[_Given]) -> None:
        """Send each host its agents, some at a time: all at once they may be more than an object store holds."""
        agents = [[node for node in share if isinstance(node, Agent)] for share in self._shares[1:]]
        waiting: dict[Any, _Host] = {}
        for parts in zip_longest(*map(_parts, agents), fillvalue=()):
            for host, mine, part in zip(self._hosts, given, parts, strict=True):
                if self._should_stop():
                    raise Stopped
                if len(waiting) >= _AHEAD:
                    self._wait_for_one(waiting)
                if part:
                    waiting[host.actor.take_agents.remote(mine, [_put_agents(part)])] = host
        while waiting:
            self._wait_for_one(waiting)

    @staticmethod
    def _wait_for_one(waiting: dict[Any, _Host]) -> None:
        """Until one of the hosts has taken its part."""
        (ended,), _ = ray.wait(list(waiting), num_returns=1)
        _raise_error(waiting.pop(ended), *_started([ended]))

    def _check(self, opened: Sequence[dict[str, Any]]) -> None:
        """Every host must have the versions that are here and, where it has built its agents, the same ones."""
        self._hosts = [
            replace(host, node=answer.get("node", ""), node_id=answer.get("node_id", ""))
            for host, answer in zip(self._hosts, opened, strict=True)
        ]
        here, agents = versions(), {agent.name: agent for agent in self._description.agents}
        told: dict[str, str] = {}
        for host, answer in zip(self._hosts, opened, strict=True):
            _raise_error(host, answer)
            theirs = answer["versions"]
            differing = [
                f"{name} {theirs[name]} instead of {here[name]}" for name in here if theirs[name] != here[name]
            ]
            if answer["facts"]:
                facts = facts_of_agents([agents[name] for name in host.agents])
                differing += [what for what in facts if facts[what] != answer["facts"][what]]
            if differing:
                raise RecipeError(
                    "All nodes of the cluster must have the same versions and data as this machine.",
                    f"{host.words} differs in: {'; '.join(differing[:_NAMED])}",
                    "Install the same versions there, and put the same data into its data folder.",
                )
            told |= answer["devices"]
        self.devices = {name: told[name] for name in agents}

    def runtime(self, description: RunDescription, idle: IdleStates | None, *, baseline: bool = False) -> RayRuntime:
        """The run, or the baseline before it, on these hosts."""
        return RayRuntime(self, description, idle, self._shares_of(description), baseline=baseline)

    def _shares_of(self, description: RunDescription) -> list[list[Node]]:
        nodes = {node.name: node for node in description.nodes}
        return [[nodes[node.name] for node in share if node.name in nodes] for share in self._shares]

    def _end(self, patience: float = 2) -> None:
        """End all actors, which may take some seconds to remove their files, and give back what was reserved."""
        ended = [host.actor.end.remote() for host in self._hosts]
        with suppress(RayError):
            ray.wait(ended, num_returns=len(ended), timeout=patience) if ended else None
        for host in self._hosts:
            with suppress(RayError):
                ray.kill(host.actor)
        if self._group is not None:
            with suppress(RayError):
                remove_placement_group(self._group)
        self._hosts, self._group = [], None


def _put(part: Any, what: str) -> Any:
    try:
        return ray.put(part)
    except TypeError as error:
        raise RecipeError(
            f"{what} must be something that Ray can send to another machine.",
            f"{type(error).__name__}: {error}"[:300],
            "Leave out what is bound to this process, such as open files, locks and connections.",
        ) from None


def _started(answers: Sequence[Any]) -> list[dict[str, Any]]:
    """What hosts answer before round 1."""
    try:
        return list(ray.get(answers))
    except RayError as error:
        raise HostLost(
            "Every host must be able to start.", f"{type(error).__name__}: {error}"[:600], "See Ray's logs."
        ) from None


def _raise_error(host: _Host, answer: Mapping[str, Any]) -> None:
    """Raise the error in a host's answer, if there is one."""
    if "error" in answer:
        error = rebuild_error(answer["error"])
        error.add_note(f"This happened at {host.words} before round 1.")
        raise error


def _parts(agents: Sequence[Agent]) -> Iterator[Sequence[Agent]]:
    """Agents in parts that are some tens of MB for Ray.

    What agents share, such as a data set of which each has some samples, is sent with each part: parts are so long that
    at least half of what is sent is the agents' own.
    """
    count = len(agents) or 1
    if count > 2:
        one, two = (_sendable(agents[:number], _bytes_of) for number in (1, 2))
        own = max(1, two - one)
        count = max(_BATCH, one - own) // own + 1
    for start in range(0, len(agents), count):
        yield agents[start : start + count]


def _bytes_of(agents: list[Agent]) -> int:
    """About as many as Ray sends."""
    arrays: list[int] = []
    pickle: Any = ray.cloudpickle
    pickled = pickle.dumps(agents, protocol=5, buffer_callback=lambda each: arrays.append(each.raw().nbytes))
    return len(pickled) + sum(arrays)


def _put_agents(agents: Sequence[Agent]) -> Any:
    """Agents as Ray sends them."""
    return _sendable(agents, ray.put)


def _sendable(agents: Sequence[Agent], put: Callable[[list[Agent]], _T]) -> _T:
    """Agents without the public data, which go to each node once; one that cannot be sent is named."""
    public = [agent.public for agent in agents]
    try:
        for agent in agents:
            agent.public = None  # type: ignore[assignment]
        try:
            return put(list(agents))
        except TypeError:
            for agent in agents:
                _put(agent, f"Agent '{agent.name}'")
            raise
    finally:
        for agent, data in zip(agents, public, strict=True):
            agent.public = data


class RayRuntime(SeveralHosts):
    """The owner's side of a run on actors."""

    def __init__(
        self,
        hosts: RayHosts,
        description: RunDescription,
        idle: IdleStates | None,
        shares: Sequence[Sequence[Node]],
        *,
        baseline: bool,
    ) -> None:
        super().__init__(description, hosts.links, shares, idle)
        self._ray_hosts, self._phase = hosts, BEGIN
        if idle is not None and (baseline or description.build is not None):
            set_aside(description.agents)  # the hosts have them
        hosts.links.serve(baseline=baseline, idle=idle is not None)

    def run(self, phase: int, present: tuple[str, ...]) -> Report:
        """Let all hosts run their nodes through the phase."""
        self._phase = phase
        report = super().run(phase, present)
        report.events += self._ray_hosts.news
        self._ray_hosts.news = []
        return report

    def save(self) -> dict[str, bytes | StoredState]:
        """What every host has packed; of states on the disks of nodes, those that have changed since the last time."""
        if self._idle is None:
            return super().save()
        self._tell(do="unsaved")
        for host, answer in enumerate(self._answers(), 1):
            for names in _batches(answer["unsaved"]):
                self._links.command(host, do="fetch", names=names)
                for name, body in self._links.next_control()[1]["fetched"].items():
                    self._idle.keep(name, self._phase, body)
        return {**save_nodes(self._shares[0]), **self._idle.save(self.description.agents)}

    def load(self, saved: Saved) -> None:
        """Send every host what is its nodes'; a part at a time where states are on disk."""
        if self._idle is None:
            return super().load(saved)
        for node in self._shares[0]:
            load_nodes([node], {node.name: packed(saved[node.name])})
        for host, share in enumerate(self._shares[1:], 1):
            sizes = {node.name: _size(saved[node.name]) for node in share}
            for names in _batches(sizes):
                self._links.command(host, do="keep", states={name: packed(saved[name]) for name in names})
                self._links.next_control()
        for agent in self.description.agents:
            state = saved[agent.name]
            if isinstance(state, StoredState):
                self._idle.stored[agent.name] = state
            else:  # of a checkpoint that was written without states on disk
                self._idle.keep(agent.name, BEGIN, state)
        return None

    def close(self) -> None:
        """Let the hosts wait for what comes next."""
        with suppress(RuntimeFault, RayError):
            self._tell(do="stop")
        super().close()


def _size(state: bytes | StoredState) -> int:
    return len(state) if isinstance(state, bytes) else state.size


def _batches(sizes: Mapping[str, int]) -> Iterable[list[str]]:
    """Names in groups whose states are not too many bytes together."""
    batch: list[str] = []
    total = 0
    for name, size in sizes.items():
        if batch and total + size > _BATCH:
            yield batch
            batch, total = [], 0
        batch.append(name)
        total += size
    if batch:
        yield batch
