"""Where the rounds of a run are computed: the options that say so, and the runtime that they name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from codistill.errors import RecipeError
from codistill.runtimes.asynchronous import AsynchronousSimulation
from codistill.runtimes.description import RunDescription
from codistill.runtimes.idle import IdleStates
from codistill.runtimes.processes import Processes
from codistill.runtimes.runtime import Runtime
from codistill.runtimes.simulation import Simulation
from codistill.settings import Settings, check_settings, setting

if TYPE_CHECKING:
    from codistill.runtimes.network.options import Network


@dataclass(frozen=True, kw_only=True)
class RuntimeOptions(Settings):
    """Where the rounds are computed, and how often what was reached is saved."""

    kind: str = setting(
        "processes",
        "worker processes; all in this one; or one process per node, over the network of this machine",
        choices=("processes", "simulation", "network"),
    )
    workers: int | None = setting(None, "worker processes; unset: one per core", at_least=1)
    idle: str = setting(
        "memory",
        "where models and states of agents are kept that are not at work; not over the network",
        choices=("memory", "disk"),
    )
    checkpoint_every: int = setting(1, "rounds between checkpoints; 0: never", at_least=0)

    def __post_init__(self) -> None:
        check_settings(self, "runtime")


def make_runtime(
    description: RunDescription,
    options: RuntimeOptions,
    folder: Path | None = None,
    network: Network | None = None,
    node_logs: str | None = None,
) -> Runtime:
    """The runtime of a run on this machine; its folder; of the network its timeouts and logs."""
    idle = _idle_states(description, options, folder)
    if description.asynchronous and options.kind == "simulation":
        return AsynchronousSimulation(description)
    # Pooling data is for a baseline, and never leaves this process.
    if options.kind == "simulation" or description.protocol.pools_data:
        return Simulation(description, idle)
    if options.kind == "processes":
        return Processes(description, options.workers, idle)
    from codistill.runtimes.network.local import LocalNetwork

    return LocalNetwork(description, folder=folder, network=network, logs=node_logs)


def _idle_states(description: RunDescription, options: RuntimeOptions, folder: Path | None) -> IdleStates | None:
    """Where states of agents are kept that are not at work; None: in memory."""
    if options.idle == "memory":
        return None
    if options.kind == "network" or description.asynchronous:
        raise RecipeError(
            "idle = \"disk\" is for the rounds of the runtimes 'simulation' and 'processes'.",
            "a run without rounds" if description.asynchronous else "the runtime 'network'",
            'Remove idle, or choose runtime.kind = "processes".',
        )
    return IdleStates(folder, description.topology.names)
