"""A run on a Ray cluster: each actor of Ray is a host of some agents; the hub lives with the owner of the run.

Ray places the actors, connects them and notices when one has ended. What they do is what hosts do everywhere: see
`service`. When a node is lost, all actors are started anew on what is left, and the run goes back to its last
checkpoint. This is the owner's side; the actors and their links are in `ray_host`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import zip_longest
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from codistill.core import versions
from codistill.core.errors import RecipeError, RuntimeFault
from codistill.engine.description import RunDescription
from codistill.engine.exchange import Report
from codistill.engine.host import BEGIN
from codistill.engine.placement import IdleStates, offload
from codistill.engine.runtime import ShouldStop, Stopped, load_nodes, never, save_nodes, warm_up
from codistill.engine.store import Saved, StoredState, packed
from codistill.nodes.agent import Agent
from codistill.nodes.node import Node
from codistill.protocol import Protocol
from codistill.results.records import RoundEnded
from codistill.runtimes.ray_cluster import (
    CPU,
    GPU,
    Demand,
    RayCluster,
    alive_nodes,
    cluster_line,
    demand_of,
    facts_of_agents,
    less_demanding,
    room,
    too_little,
)
from codistill.runtimes.ray_host import NAMED, SWAPS, Given, HostActor, HostLost, HostProcess, OwnerLinks
from codistill.runtimes.service import STOP, DistributedRuntime, places_of, rebuild_error

_BATCH = 32 << 20  # bytes of agents or states that are sent or fetched at a time
_AHEAD = 2  # parts of agents that are sent at a time
_LOSSES = 3  # in a row, without a round between them, after which a run gives up
_REMOVAL = 30.0  # seconds in which hosts remove states from the disks of their nodes at the end of a run
_LOOK = 5.0  # seconds between two checks of a cluster that has no room yet
_T = TypeVar("_T")


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
        self._hosts: list[HostActor] = []
        self._losses = 0  # in a row
        self._cut_off: dict[str, str] = {}  # nodes that another host could not reach: human-readable, by their ids
        self.devices: dict[str, str] = {}
        self.news: list[str] = []  # for the log of the run

    def __enter__(self) -> RayHosts:
        return self

    def __exit__(self, *_: object) -> None:
        self._end(_REMOVAL)

    def round_ended(self, record: RoundEnded) -> None:
        self._losses = 0

    def survive(self, attempt: Callable[[], _T]) -> _T:
        """Try until no host is lost; each attempt continues from the last checkpoint."""
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
        """Place the actors, and let them build their agents."""
        demand, self._group = self._place()
        without = f"; without node {', '.join(self._cut_off.values())}" * bool(self._cut_off)
        print(f"note: {cluster_line()}; {demand.words}{without}.", file=sys.stderr)
        agents = self._description.agents
        self._shares: list[list[Node]] = [[*agents[i :: demand.hosts]] for i in range(demand.hosts)]
        self._shares.insert(0, [node for node in self._description.nodes if not isinstance(node, Agent)])
        load_nodes(self._shares[0], self._hub)  # as it was before an attempt that was lost
        given = self._given(demand)
        remote: Any = ray.remote
        # Threads of their own: for frames that arrive while a host computes, and for the owner's calls that wait.
        kind = remote(concurrency_groups={"deliver": 1, "swap": SWAPS})(HostProcess)
        for i in range(demand.hosts):
            place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=i)
            custom = {name: amount for name, amount in demand.each.items() if name not in (CPU, GPU)}
            actor = kind.options(
                num_cpus=demand.each[CPU], num_gpus=demand.each.get(GPU, 0), resources=custom, scheduling_strategy=place
            ).remote()
            self._hosts.append(HostActor(i + 1, actor, tuple(node.name for node in self._shares[i + 1])))
        if self._description.build is None:
            self._send_agents(given)
        places, actors = places_of(self._description, self._shares), [host.actor for host in self._hosts]
        opened = [
            host.actor.open.remote(host.number, actors, places, mine)
            for host, mine in zip(self._hosts, given, strict=True)
        ]
        warm_up(agents)  # here as well, at the same time
        self._check([_started(host, answer) for host, answer in zip(self._hosts, opened, strict=True)])
        self.links = OwnerLinks(self._hosts, places)

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

    def _given(self, demand: Demand) -> list[Given]:
        run = self._description
        bare = replace(run, agents=(), hub=None, public=None, test=None, build=None, reported=run.names)
        if run.build is not None:  # a protocol of a user's own file is read there again, as the agents are
            bare = replace(bare, protocol=Protocol())
        shared = [_put(part, "what the agents share") for part in (bare, run.public, run.test)]
        gpus = demand.each.get(GPU, 0)
        sharing = round(1 / gpus) if 0 < gpus < 1 else 1
        given = []
        for share in self._shares[1:]:
            names = tuple(node.name for node in share)
            # On a GPU agents are placed by the sizes of their models, so all models must be in memory.
            rests = self._on_disk and not gpus
            given.append(Given(shared[0], names, shared[1], shared[2], run.build, self._device, sharing, rests))
        return given

    def _send_agents(self, given: Sequence[Given]) -> None:
        """Send each host its agents, some at a time: an object store may not hold all of them."""
        agents = [[node for node in share if isinstance(node, Agent)] for share in self._shares[1:]]
        waiting: dict[Any, HostActor] = {}
        for parts in zip_longest(*map(_parts, agents), fillvalue=()):
            for host, mine, part in zip(self._hosts, given, parts, strict=True):
                if self._should_stop():
                    raise Stopped
                if len(waiting) >= _AHEAD:
                    self._wait_for_one(waiting)
                if part:
                    waiting[host.actor.take_agents.remote(mine, [_sendable(part, ray.put)])] = host
        while waiting:
            self._wait_for_one(waiting)

    @staticmethod
    def _wait_for_one(waiting: dict[Any, HostActor]) -> None:
        """Until one of the hosts has taken its part."""
        (ended,), _ = ray.wait(list(waiting), num_returns=1)
        _started(waiting.pop(ended), ended)

    def _check(self, opened: Sequence[dict[str, Any]]) -> None:
        self._hosts = [
            replace(host, node=answer["node"], node_id=answer["node_id"])
            for host, answer in zip(self._hosts, opened, strict=True)
        ]
        here, agents = versions(), {agent.name: agent for agent in self._description.agents}
        told: dict[str, str] = {}
        for host, answer in zip(self._hosts, opened, strict=True):
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
                    f"{host.words} differs in: {'; '.join(differing[:NAMED])}",
                    "Install the same versions there, and copy the same data to its data folder.",
                )
            told |= answer["devices"]
        self.devices = {name: told[name] for name in agents}

    def runtime(self, description: RunDescription, idle: IdleStates | None, *, baseline: bool = False) -> RayRuntime:
        """The run, or the baseline before it, on these hosts."""
        nodes = {node.name: node for node in description.nodes}
        shares = [[nodes[node.name] for node in share if node.name in nodes] for share in self._shares]
        return RayRuntime(self, description, idle, shares, baseline=baseline)

    def _end(self, patience: float = 2) -> None:
        """End all actors, which may need some seconds to remove their files, and release the reserved resources."""
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
            f"Ray must be able to send {what} to another machine.",
            f"{type(error).__name__}: {error}"[:300],
            "Remove what is bound to this process, such as open files, locks and connections.",
        ) from None


def _started(host: HostActor, answer: Any) -> dict[str, Any]:
    """What a host answers before round 1; raises the error in it, if there is one."""
    try:
        told: dict[str, Any] = ray.get(answer)
    except RayError as error:
        raise HostLost(
            "Every host must be able to start.",
            f"{host.words} ended before round 1 ({type(error).__name__})",
            "It may have run out of memory, or its node was lost. See 'ray status' and the logs of Ray on that node.",
        ) from None
    if "error" in told:
        wrong = rebuild_error(told["error"])
        wrong.add_note(f"This happened at {host.words} before round 1.")
        raise wrong
    return told


def _parts(agents: Sequence[Agent]) -> Iterator[Sequence[Agent]]:
    """Agents in parts of some tens of MB.

    What agents share, such as a data set of which each has some samples, is sent with each part: parts are long enough
    for at least half of the bytes to be the agents' own.
    """
    count = len(agents) or 1
    if count > 2:
        one, two = (_sendable(agents[:number], _bytes_of) for number in (1, 2))
        own = max(1, two - one)
        count = max(_BATCH, one - own) // own + 1
    for start in range(0, len(agents), count):
        yield agents[start : start + count]


def _bytes_of(agents: list[Agent]) -> int:
    """About the bytes that Ray sends to hosts of the user's own cluster: sizes only, nothing is loaded here."""
    arrays: list[int] = []
    pickle: Any = ray.cloudpickle
    pickled = pickle.dumps(agents, protocol=5, buffer_callback=lambda each: arrays.append(each.raw().nbytes))
    return len(pickled) + sum(arrays)


def _sendable(agents: Sequence[Agent], put: Callable[[list[Agent]], _T]) -> _T:
    """Agents without the public data, which each node gets once; an agent that cannot be sent is named."""
    public = [agent.public for agent in agents]
    try:
        for agent in agents:
            agent.public = None  # type: ignore[assignment]
        try:
            return put(list(agents))
        except TypeError:
            for agent in agents:
                _put(agent, f"agent '{agent.name}'")
            raise
    finally:
        for agent, data in zip(agents, public, strict=True):
            agent.public = data


class RayRuntime(DistributedRuntime):
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
        super().__init__(description, hosts.links, shares, hosts.links, idle)
        self._ray_hosts, self._phase = hosts, BEGIN
        if idle is not None and (baseline or description.build is not None):
            offload(description.agents)  # the hosts have them
        hosts.links.serve(baseline=baseline, idle=idle is not None)

    def run(self, phase: int, present: tuple[str, ...]) -> Report:
        self._phase = phase
        report = super().run(phase, present)
        report.events += self._ray_hosts.news
        self._ray_hosts.news = []
        return report

    def save(self) -> dict[str, bytes | StoredState]:
        """What every host has packed; of states on the disks of nodes, only those that have changed."""
        if self._idle is None:
            return super().save()
        self._tell("unsaved")
        for host, answer in enumerate(self._answers(), 1):
            for names in _batches(answer["unsaved"]):
                self._hosts.command(host, do="fetch", names=names)
                for name, body in self._hosts.next_control()[1]["fetched"].items():
                    self._idle.keep(name, self._phase, body)
        return {**save_nodes(self._shares[0]), **self._idle.save(self.description.agents)}

    def load(self, saved: Saved) -> None:
        """Send every host what is its nodes'; a part at a time where states are on disk."""
        if self._idle is None:
            return super().load(saved)
        load_nodes(self._shares[0], saved)
        for host, share in enumerate(self._shares[1:], 1):
            states = {node.name: saved[node.name] for node in share}
            sizes = {name: len(each) if isinstance(each, bytes) else each.size for name, each in states.items()}
            for names in _batches(sizes):
                self._hosts.command(host, do="restore", states={name: packed(saved[name]) for name in names})
                self._hosts.next_control()
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
            self._tell(STOP)
        super().close()


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
