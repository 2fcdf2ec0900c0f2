"""A Ray cluster for a run or a sweep: joining or starting one, and for how many hosts or jobs it has room."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import math
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from codistill.core.errors import CodistillError, NetworkError, RecipeError, RuntimeFault
from codistill.core.settings import Settings, check_settings, setting
from codistill.data.validation import digest
from codistill.learners.ability import Ability
from codistill.nodes.agent import Agent
from codistill.nodes.record import record_of
from codistill.protocol import code_digest
from codistill.runtimes.workers import usable_cores

CPU, GPU, MEMORY = "CPU", "GPU", "memory"  # Ray's names
_WORDS = {CPU: "core", GPU: "GPU"}
LOCAL, AUTO = "local", "auto"  # addresses that stand for a new cluster on this machine, and for the one that is there
ADDRESS_HELP = (
    'host:port of a Ray cluster; "auto": the one on this machine; "local": a new one on this machine; unset: '
    "RAY_ADDRESS, or else one that 'ray start' has started on this machine, or else a new one"
)
_CONNECT = 10.0  # seconds until nobody is taken to listen at an address
_LARGEST_PORT = 65535
_GB = 1 << 30
_KINDS = 5  # of nodes that an error names
_OWN = re.compile(r"node:|memory$|object_store_memory$|accelerator_type:")  # resources that Ray gives nodes itself


@dataclass(frozen=True, kw_only=True)
class RayCluster(Settings):
    """Settings of the runtime 'ray'. Agents are divided among hosts, each of them one process, an actor of Ray."""

    address: str | None = setting(None, ADDRESS_HELP)
    nodes: int | None = setting(None, "nodes that a run waits for before it starts; unset: none", at_least=1)
    cpus_per_host: float | None = setting(None, "cores of each host; unset: 1", above=0)
    gpus_per_host: float | None = setting(None, "GPUs of each host, or a fraction of one; unset: none", above=0)
    cpus_per_agent: float | None = setting(
        None, "cores of each agent, or a fraction of one; unset: agents share those of their host", above=0
    )
    gpus_per_agent: float | None = setting(
        None, "GPUs of each agent, or a fraction of one; unset: agents share those of their host", above=0
    )
    resources: dict[str, float] = setting(
        factory=dict, help="custom resources of each host, as nodes have them by 'ray start --resources'"
    )
    output: bool = setting(False, "show here what agents print on their nodes, and what Ray says of its nodes")
    patience: float = setting(
        300.0, "seconds that a run waits for nodes or for room, at its start and when a node was lost", above=0
    )

    def __post_init__(self) -> None:
        check_settings(self, "ray")
        for per_host, per_agent in (("cpus_per_host", "cpus_per_agent"), ("gpus_per_host", "gpus_per_agent")):
            if getattr(self, per_host) is not None and getattr(self, per_agent) is not None:
                raise RecipeError(f"[ray] takes {per_host} or {per_agent}, not both.", "both", f"Remove {per_host}.")
        for name, amount in self.resources.items():
            if name in (CPU, GPU) or _OWN.match(name) or not name or not 0 < amount < math.inf:
                raise RecipeError(
                    "[ray] resources must be amounts above 0 of custom resources.",
                    f"{name} = {amount}",
                    "Cores and GPUs are said by cpus_per_host, gpus_per_host, cpus_per_agent and gpus_per_agent.",
                )


@dataclass(frozen=True)
class Demand:
    """How many hosts of a run, or jobs of a sweep at once, and the resources of each, by Ray's names."""

    hosts: int
    each: Mapping[str, float]
    what: str = "host"

    @property
    def words(self) -> str:
        return f"{_count(self.hosts, self.what)} with {amounts(self.each)}{' each' * (self.hosts > 1)}"


def demand_of(options: RayCluster, agents: int, workers: int | None, nodes: Sequence[Mapping[str, float]]) -> Demand:
    """What a run with this number of agents asks for.

    A host computes its agents one after the other. So where an agent asks for a part of a core or of a GPU, as many
    agents share a host as share one; where it asks for more, it has a host of its own. Otherwise there is one host per
    core of the cluster.
    """
    shares = [share for share in (options.cpus_per_agent, options.gpus_per_agent) if share is not None]
    if workers is not None:
        hosts = min(workers, agents)
    elif shares:
        # 1e-9: 1 / (1 / 3) may be just below 3.
        hosts = math.ceil(agents / min(max(1, math.floor(1 / share + 1e-9)) for share in shares))
    else:
        hosts = max(1, min(agents, room(nodes, _of_a_host(options, 1))))
    return Demand(hosts, _of_a_host(options, math.ceil(agents / hosts)))


def _of_a_host(options: RayCluster, agents: int) -> dict[str, float]:
    cpus = options.cpus_per_host or 1.0
    gpus = options.gpus_per_host or 0.0
    if options.cpus_per_agent is not None:
        cpus = agents * options.cpus_per_agent
    if options.gpus_per_agent is not None:
        gpus = agents * options.gpus_per_agent
    # Ray has parts of one core or GPU, and whole ones beyond.
    asked = {CPU: cpus, GPU: gpus, **options.resources}
    return {name: amount if amount < 1 else float(math.ceil(amount - 1e-9)) for name, amount in asked.items() if amount}


def room(nodes: Sequence[Mapping[str, float]], each: Mapping[str, float]) -> int:
    """For how many hosts or jobs the nodes have room, if nothing else runs there; each is on one node."""
    return sum(min(math.floor(node.get(name, 0) / amount + 1e-9) for name, amount in each.items()) for node in nodes)


def amounts(resources: Mapping[str, float]) -> str:
    """Resources as a phrase: '2 cores, 1 GPU, 4 GB of memory'."""

    def words(name: str, amount: float) -> str:
        if name == MEMORY:
            return f"{amount / _GB:.4g} GB of memory"
        return _count(amount, _WORDS[name]) if name in _WORDS else f"{amount:g} {name}"

    return ", ".join(words(*each) for each in resources.items())


def _count(amount: float, what: str) -> str:
    return f"{amount:g} {what}{'' if amount == 1 else 's'}"


def alive_nodes(without: Collection[str] = ()) -> list[Mapping[str, float]]:
    """The resources of each node of the cluster, but for some, by their ids."""
    import ray

    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    return [node["Resources"] for node in nodes if node["Alive"] and node["NodeID"] not in without]


def less_demanding(
    options: RayCluster, agents: int, workers: int | None, nodes: Sequence[Mapping[str, float]]
) -> Demand:
    """The same with fewer hosts, if the nodes that are left have room for fewer only."""
    wanted = demand_of(options, agents, workers, nodes)
    for hosts in range(wanted.hosts, 0, -1):
        demand = Demand(hosts, _of_a_host(options, math.ceil(agents / hosts)))
        if room(nodes, demand.each) >= hosts:
            return demand
    return wanted


_ASK_LESS = (
    "Ask for less in [ray] (cpus_per_agent, gpus_per_agent, resources), use fewer runtime.workers, or add nodes by "
    "'ray start --address=...'. A run with a folder goes on from its last checkpoint."
)


def too_little(
    demand: Demand, nodes: Sequence[Mapping[str, float]], why: str = "", do: str = _ASK_LESS
) -> RuntimeFault:
    have = [amounts({name: node.get(name, 0) for name in demand.each}) for node in nodes]
    kinds = [f"{_count(have.count(words), 'node')} with {words}" for words in dict.fromkeys(have)]
    shown = "; ".join(kinds[:_KINDS]) + f"; and {len(kinds) - _KINDS} other kinds" * (len(kinds) > _KINDS)
    return RuntimeFault(
        f"The Ray cluster must have room for {_count(demand.hosts, demand.what)} at least.",
        f"asked: {demand.words}; there is room for {room(nodes, demand.each)}: {shown or 'no node'}{why}",
        do,
    )


@contextmanager
def joined(address: str | None = None, *, output: bool = False, store: int | None = None) -> Iterator[None]:
    """Connected to a cluster: the one that this process has joined already, or as `address` says; left at the end.

    `output`: show what tasks and actors print, and what Ray says. `store`: bytes of the object store of a new cluster;
    None: as Ray has it. Ray has a handler for SIGTERM: whoever has one of their own sets it inside.
    """
    check_installed()
    _set_environment()
    import ray

    if ray.is_initialized():
        _check_is_same(address, ray.get_runtime_context().gcs_address)
        yield
        return
    address, before = found_address(address), signal.getsignal(signal.SIGTERM)
    try:
        _connect(address, output, store)
        yield
    finally:
        ray.shutdown()
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def check_installed() -> None:
    if importlib.util.find_spec("ray") is None:
        raise RecipeError("Ray must be installed.", "no module 'ray'", "Install it: pip install 'codistill[ray]'.")


def _set_environment() -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent to Ray's makers
    named = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    if "ray" not in sys.modules and (os.environ.get("RAY_AUTH_TOKEN") or named.is_file()):
        # 'ray start' uses this user's token; 'ray.init' does so only if this is set before Ray is imported. If it is
        # set later, processes that Ray starts know of it, and this one does not.
        os.environ.setdefault("RAY_AUTH_MODE", "token")


def found_address(address: str | None) -> str:
    """The address host:port that is meant, where somebody listens; LOCAL: a new cluster is to be started."""
    if address is None:
        address = os.environ.get("RAY_ADDRESS") or _started_here() or LOCAL
    if address == AUTO:
        address = _started_here()
        if address is None:
            raise NetworkError(
                "With the address 'auto' a Ray cluster must run on this machine.",
                "none that 'ray start' has started and that answers",
                "Start one by 'ray start --head', join one by 'ray start --address=...', or leave the address out.",
            )
    if address != LOCAL:
        _check_address(address)
    return address


def _started_here() -> str | None:
    """The cluster that 'ray start' has started on this machine, or has joined it to; None: none that answers."""
    folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    with suppress(OSError, CodistillError):
        address = (Path(folder) / "ray" / "ray_current_cluster").read_text().strip()  # as the page of ray.init says
        _check_address(address)
        return address
    return None


def _check_address(address: str) -> None:
    """It must be that of a cluster, and somebody must listen there: Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal() or int(port) > _LARGEST_PORT:
        raise RecipeError(
            "The address of a Ray cluster must be host:port, as 'ray start' prints it.",
            f"'{address}'",
            f"Or use '{AUTO}': the cluster of this machine; or '{LOCAL}': a new one.",
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT).close()
    except OSError as error:
        raise _unreachable(address, error) from None


def _check_is_same(address: str | None, joined_to: str) -> None:
    """A process that has joined a cluster already stays there; another one must not be asked for."""
    if address in (None, AUTO, joined_to):
        return
    host, _, port = str(address).rpartition(":")
    with suppress(OSError):
        if f"{socket.gethostbyname(host)}:{port}" == joined_to:
            return
    raise RecipeError(
        "A process can be connected to one Ray cluster.",
        f"it is connected to {joined_to}, and the address is '{address}'",
        "Leave the address out, or call ray.shutdown() before.",
    )


def _unreachable(address: str, error: BaseException) -> NetworkError:
    return NetworkError(
        "The Ray cluster must be reachable from this machine, which must be one of its nodes.",
        f"'{address}': {' '.join(str(error).split())[:300]}",
        "Check the address ([ray] address, --on-option address=..., or RAY_ADDRESS). The command 'ray status' must "
        "work on this machine.",
    )


def cluster_line() -> str:
    """Which cluster this process is connected to, and what it has: '3 nodes, 12 cores, 2 GPUs'."""
    import ray

    nodes, total = alive_nodes(), {CPU: 0.0, GPU: 0.0}
    for node in nodes:
        for name, amount in node.items():
            if not _OWN.match(name):
                total[name] = total.get(name, 0.0) + amount
    address = ray.get_runtime_context().gcs_address
    return f"Ray cluster at {address}: {_count(len(nodes), 'node')}, {amounts(total)}"


def _connect(address: str, output: bool, store: int | None) -> None:
    import ray

    level = logging.INFO if output else logging.CRITICAL
    options: dict[str, Any] = {"logging_level": level, "log_to_driver": output, "include_dashboard": False}
    if address == LOCAL:
        options |= {"num_cpus": usable_cores(), "object_store_memory": store}
    try:
        ray.init(address, **options)
    except Exception as error:  # of several libraries: no such cluster, another version of Ray, no token
        raise _unreachable(address, error.__cause__ or error) from None


# --- What must be equal where agents are built anew, each under the name by which a person knows it.

# Of a learner: on which device it computes may differ between machines.
_OF_THE_MACHINE = ("assigned", "_place", "_placed_by")


def facts_of_agents(agents: Sequence[Agent]) -> dict[str, str]:
    """The data and the model of each agent, by a digest."""
    facts: dict[str, Any] = {}
    for agent in agents:
        y = agent.shard.targets if agent.shard.labels is None else agent.shard.labels
        facts[f"the data of '{agent.name}'"] = [_samples((agent.shard.x, y)), _samples(record_of(agent).test)]
        facts[f"the model of '{agent.name}'"] = _model(agent)
    return {what: hashlib.sha256(json.dumps(value).encode()).hexdigest() for what, value in facts.items()}


def _samples(pair: tuple[np.ndarray, np.ndarray] | None) -> list[str] | None:
    return None if pair is None else [digest(part) for part in pair]


def _model(agent: Agent) -> list[Any]:
    """Its class, code and settings, and its weights if it has some before it learns."""
    learner = agent.learner
    weights = learner.weights() if Ability.WEIGHTS in learner.abilities else {}
    inner = [each for each in map(vars(learner).get, ("module", "estimator", "model")) if each is not None]
    settings = {name: value for name, value in vars(learner).items() if name not in _OF_THE_MACHINE}
    options = [each.get_params() for each in inner if callable(getattr(each, "get_params", None))]
    return [
        learner.describe(),
        [code_digest(type(each)) for each in (learner, *inner)],
        [_plain(each) for each in (settings, *options, agent.choices)],
        {name: digest(array) for name, array in weights.items()},
    ]


def _plain(value: Any) -> Any:
    """Plain values as they are, of others the class: how an object is written may hold its place in memory."""
    if isinstance(value, dict):
        return [[str(key), _plain(each)] for key, each in value.items()]
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value if value is None or isinstance(value, str | int | float | bool) else type(value).__qualname__
