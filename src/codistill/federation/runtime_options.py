"""Where the rounds of a run are computed: the options that say so, and the runtime that they name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from codistill.devices import CPU, DEVICE_HELP, check_fork, check_name
from codistill.errors import RecipeError
from codistill.runtimes.asynchronous import AsynchronousSimulation
from codistill.runtimes.description import RunDescription
from codistill.runtimes.idle import IdleStates
from codistill.runtimes.placement import devices_of
from codistill.runtimes.processes import Processes, default_workers
from codistill.runtimes.runtime import Runtime
from codistill.runtimes.simulation import Simulation
from codistill.settings import Settings, check_settings, setting

if TYPE_CHECKING:
    from codistill.runtimes.network.options import Network
    from codistill.runtimes.ray_runtime import RayHosts


@dataclass(frozen=True, kw_only=True)
class RuntimeOptions(Settings):
    """Where the rounds are computed, and how often what was reached is saved."""

    kind: str = setting(
        "processes",
        "worker processes; all in this one; one process per node, over the network of this machine; or processes on "
        "the nodes of a Ray cluster",
        choices=("processes", "simulation", "network", "ray"),
    )
    workers: int | None = setting(None, "worker processes, or hosts in a Ray cluster; unset: one per core", at_least=1)
    device: str = setting(CPU, DEVICE_HELP + "; for agents that do not say it themselves")
    idle: str = setting(
        "memory",
        "where states of agents are kept that are not at work; not over the network",
        choices=("memory", "disk"),
    )
    checkpoint_every: int = setting(1, "rounds between checkpoints; 0: never", at_least=0)

    def __post_init__(self) -> None:
        check_settings(self, "runtime")
        check_name(self.device)


def process_count(options: RuntimeOptions, agents: int) -> int:
    """How many processes compute on this machine."""
    match options.kind:
        case "simulation":
            return 1
        case "network":
            return agents
    return min(options.workers or default_workers(agents), agents)


def make_runtime(
    description: RunDescription,
    options: RuntimeOptions,
    folder: Path | None = None,
    network: Network | None = None,
    node_logs: str | None = None,
    hosts: RayHosts | None = None,
    *,
    baseline: bool = False,
) -> Runtime:
    """The runtime of a run; its folder; of the network its timeouts and logs.

    `hosts`: in a Ray cluster; `baseline`: whether this is the run of agents alone.
    """
    idle = _idle_states(description, options, folder)
    if hosts is not None:
        return hosts.runtime(description, idle, baseline=baseline)
    if description.asynchronous and options.kind == "simulation":
        return AsynchronousSimulation(description)
    # Pooling data is for a baseline, and never leaves this process.
    if options.kind == "simulation" or description.protocol.pools_data:
        return Simulation(description, idle)
    check_fork(devices_of(description.agents), options.kind)
    if options.kind == "processes":
        return Processes(description, options.workers, idle)
    from codistill.runtimes.network.local import LocalNetwork

    return LocalNetwork(description, folder=folder, network=network, logs=node_logs)


def _idle_states(description: RunDescription, options: RuntimeOptions, folder: Path | None) -> IdleStates | None:
    """Where states of agents are kept that are not at work; None: in memory."""
    if options.idle == "memory":
        return None
    if options.kind not in ("simulation", "processes", "ray") or description.asynchronous:
        raise RecipeError(
            "idle = \"disk\" is for the rounds of the runtimes 'simulation', 'processes' and 'ray'.",
            "a run without rounds" if description.asynchronous else f"the runtime '{options.kind}'",
            'Remove idle, or choose runtime.kind = "processes".',
        )
    return IdleStates(folder, description.topology.names)
