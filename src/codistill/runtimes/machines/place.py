"""Which of the machines of a run this process is, by the environment variables of torchrun or of Slurm's srun."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from codistill.devices import LocalRank
from codistill.errors import RecipeError

_TRIED = 8  # ports after MASTER_PORT, where torchrun itself may listen
_MOST = 4096  # host processes: each has a link to each other
_FIRST, _RANGE = 20000, 20000  # ports of Slurm's jobs, if there is no MASTER_PORT


@dataclass(frozen=True)
class Place:
    """The rank of this process, how many there are, and where rank 0 listens."""

    rank: int
    world: int
    address: str = ""
    ports: tuple[int, ...] = ()  # rank 0 listens at the first that is free, others try one after the other
    local: LocalRank | None = None  # None: no other process of the run is known to be on this machine

    @property
    def meeting(self) -> str:
        """By this the processes of one start know one another from those of another one with the same key."""
        return f"{self.address} {self.ports}"


def place_here(port: int | None = None, environment: Mapping[str, str] | None = None) -> Place:
    """The place of this process; `port`: where rank 0 listens, if it is not left to the environment."""
    given = os.environ if environment is None else environment
    by_slurm = not ("RANK" in given and "WORLD_SIZE" in given)  # torchrun under srun sets both
    if by_slurm and "SLURM_PROCID" not in given:
        raise RecipeError(
            "The runtime 'machines' needs one process per machine, each with its rank.",
            "neither RANK and WORLD_SIZE nor SLURM_PROCID in the environment",
            "Start it by torchrun or srun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. On one machine: "
            "RANK=0 WORLD_SIZE=1.",
        )
    world_by_slurm = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in given else "SLURM_NTASKS"
    world = _number(given, world_by_slurm if by_slurm else "WORLD_SIZE", 1, _MOST)
    rank = _number(given, "SLURM_PROCID" if by_slurm else "RANK", 0, world - 1)
    if world == 1:
        return Place(0, 1)
    address = given.get("MASTER_ADDR") or (_first_node(given) if by_slurm else "")
    if not address:
        raise RecipeError(
            "Every machine must know the address of rank 0.", "no MASTER_ADDR in the environment", "Set MASTER_ADDR."
        )
    ports = (port,) if port else _ports(given, by_slurm=by_slurm)
    return Place(rank, world, address, ports, _local_rank(given, by_slurm=by_slurm))


def _local_rank(given: Mapping[str, str], *, by_slurm: bool) -> LocalRank | None:
    """By LOCAL_RANK or SLURM_LOCALID; a process that is alone on its machine may use all GPUs there."""
    name = "SLURM_LOCALID" if by_slurm else "LOCAL_RANK"
    if name not in given:
        return None
    if by_slurm:
        tasks = given.get("SLURM_STEP_TASKS_PER_NODE") or given.get("SLURM_TASKS_PER_NODE") or ""
        # As in '2(x3),1': three nodes with two tasks each, and one with one.
        counted = [int(count) for count in re.findall(r"(?:^|,)(\d{1,4})(?=$|,|\()", tasks)]
        world = max(counted, default=None)
    else:
        world = _number(given, "LOCAL_WORLD_SIZE", 1, _MOST) if "LOCAL_WORLD_SIZE" in given else None
    rank = _number(given, name, 0, (world or _MOST) - 1)
    return None if world == 1 else LocalRank(rank, world or rank + 1)


def _ports(given: Mapping[str, str], *, by_slurm: bool) -> tuple[int, ...]:
    if by_slurm and "MASTER_PORT" not in given:
        base = _FIRST + _number(given, "SLURM_JOB_ID", 0, 1 << 62) % _RANGE
    else:
        base = _number(given, "MASTER_PORT", 1, 65535 - _TRIED)
    return tuple(range(base + 1, base + 1 + _TRIED))


def _number(given: Mapping[str, str], name: str, least: int, most: int) -> int:
    text = given.get(name, "")
    if not re.fullmatch(r"\d{1,18}", text) or not least <= int(text) <= most:
        raise RecipeError(
            f"The environment must hold {name}, an integer from {least} to {most}.",
            f"{text!r}"[:80] if name in given else f"no {name}",
            "torchrun and srun set it; if you start the processes yourself, set it too.",
        )
    return int(text)


def _first_node(given: Mapping[str, str]) -> str:
    """Where rank 0 runs: the first node of Slurm's list, as in 'node[01-03,07],gpu5'."""
    nodes = given.get("SLURM_STEP_NODELIST") or given.get("SLURM_JOB_NODELIST") or ""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0]) if first else ""
