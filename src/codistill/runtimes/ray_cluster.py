"""A Ray cluster for a run: joining or starting one, and how many hosts with which resources it has room for."""

from __future__ import annotations

import importlib.util
import logging
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from codistill.errors import RecipeError, RuntimeFault
from codistill.settings import Settings, check_settings, setting

CPU, GPU = "CPU", "GPU"  # Ray's names
LOCAL = "local"  # the address that stands for a new cluster on this machine
_OWN = re.compile(r"node:|memory$|object_store_memory$|accelerator_type:")  # resources that Ray gives nodes itself


@dataclass(frozen=True, kw_only=True)
class RayCluster(Settings):
    """Settings of the runtime 'ray'. Agents are divided among hosts, each of them one process, an actor of Ray."""

    address: str | None = setting(
        None,
        'address of a cluster, or "local": a new one on this machine; unset: RAY_ADDRESS, or else a cluster that was '
        "started on this machine, or else a new one",
    )
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
                raise RecipeError(f"[ray] must say {per_host} or {per_agent}, not both.", "both", f"Remove {per_host}.")
        for name, amount in self.resources.items():
            if name in (CPU, GPU) or _OWN.match(name) or not name or not 0 < amount < math.inf:
                raise RecipeError(
                    "[ray] resources must be amounts above 0 of custom resources.",
                    f"{name} = {amount}",
                    "Cores and GPUs are said by cpus_per_host, gpus_per_host, cpus_per_agent and gpus_per_agent.",
                )


@dataclass(frozen=True)
class Demand:
    """How many hosts, and the resources of each, by Ray's names."""

    hosts: int
    each: Mapping[str, float]

    @property
    def words(self) -> str:
        """What is asked for, as a phrase."""
        return f"{_count(self.hosts, 'host')} with {amounts(self.each)} each"


def demand_of(options: RayCluster, agents: int, workers: int | None, nodes: Sequence[Mapping[str, float]]) -> Demand:
    """What a run of so many agents asks for.

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
    """How many hosts the nodes have room for, if nothing else runs there."""
    return sum(min(math.floor(node.get(name, 0) / amount + 1e-9) for name, amount in each.items()) for node in nodes)


def amounts(resources: Mapping[str, float]) -> str:
    """Resources as a phrase: '2 cores, 1 GPU'."""
    known = {CPU: "core", GPU: "GPU"}
    return ", ".join(
        _count(amount, known[name]) if name in known else f"{amount:g} {name}" for name, amount in resources.items()
    )


def _count(amount: float, what: str) -> str:
    return f"{amount:g} {what}{'' if amount == 1 else 's'}"


def alive_nodes() -> list[Mapping[str, float]]:
    """The resources of each node of the cluster."""
    import ray

    return [node["Resources"] for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]


def inventory(nodes: Sequence[Mapping[str, float]]) -> str:
    """What a cluster has: '3 nodes, 12 cores, 2 GPUs'."""
    total = {CPU: 0.0, GPU: 0.0}
    for node in nodes:
        for name, amount in node.items():
            if not _OWN.match(name):
                total[name] = total.get(name, 0.0) + amount
    return f"{_count(len(nodes), 'node')}, {amounts(total)}"


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


def too_little(demand: Demand, nodes: Sequence[Mapping[str, float]], why: str = "") -> RuntimeFault:
    """The error for a cluster without enough room."""
    return RuntimeFault(
        "The Ray cluster must have room for all hosts of the run.",
        f"asked: {demand.words}; there are: {inventory(nodes)}, which have room for {room(nodes, demand.each)}{why}",
        "Ask for less in [ray] (cpus_per_agent, gpus_per_agent, resources), use fewer runtime.workers, or add nodes by "
        "'ray start --address=...'. A run with a folder goes on from its last checkpoint.",
    )


@contextmanager
def joined(address: str | None = None, *, output: bool = False) -> Iterator[None]:
    """Connected to a cluster: the one that this process has joined already, or as `address` says; left at the end.

    Ray starts a handler for SIGTERM: whoever has one of their own sets it inside.
    """
    if importlib.util.find_spec("ray") is None:
        raise RecipeError("Ray must be installed.", "no module 'ray'", "Install it: pip install 'codistill[ray]'.")
    if "ray" not in sys.modules and has_token():
        os.environ.setdefault("RAY_AUTH_MODE", "token")  # or a cluster that 'ray start' has protected refuses us
    import ray

    before = ray.is_initialized()
    if before and address is not None and ray.get_runtime_context().gcs_address != address:
        raise RecipeError(
            "A process can be connected to one Ray cluster.",
            f"it is connected to {ray.get_runtime_context().gcs_address}, and address is '{address}'",
            "Remove address from [ray], or call ray.shutdown() before.",
        )
    if not before:
        _connect(address, output)
    try:
        yield
    finally:
        if not before:
            ray.shutdown()


def has_token() -> bool:
    """Whether this user has a token by which Ray knows whoever joins a cluster."""
    named = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    return bool(os.environ.get("RAY_AUTH_TOKEN")) or named.is_file()


def cluster_line() -> str:
    """Which cluster this process is connected to, and what it has."""
    import ray

    return f"Ray cluster at {ray.get_runtime_context().gcs_address}: {inventory(alive_nodes())}"


def _connect(address: str | None, output: bool) -> None:
    import ray

    level = logging.INFO if output else logging.CRITICAL
    options: dict[str, Any] = {"logging_level": level, "log_to_driver": output, "include_dashboard": False}
    try:
        ray.init(address=address, **options)
    except Exception as error:  # of several libraries: a wrong address, no such cluster, another version of Ray
        raise RuntimeFault(
            "The Ray cluster must be reachable from this machine.",
            f"{address or 'the address of the environment'}: {type(error).__name__}: {error}"[:400],
            "Check the address, and that this machine is a node of the cluster: 'ray status' shows it. Without an "
            "address and without RAY_ADDRESS a cluster is started on this machine.",
        ) from None
