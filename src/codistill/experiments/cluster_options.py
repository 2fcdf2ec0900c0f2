"""What jobs of a sweep ask of the machine they run on: from a file of the site, and from the command line."""

from __future__ import annotations

import datetime
import math
import typing
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from codistill.errors import RecipeError
from codistill.experiments.sweep_jobs import LOCAL, RAY, SLURM
from codistill.runtimes.ray_cluster import ADDRESS_HELP
from codistill.settings import check_settings, from_table, setting
from codistill.text import parse_toml

# The options that each system takes; any other is refused.
TAKES = {
    LOCAL: ("at_once", "gpus", "setup"),
    SLURM: (
        "at_once", "partition", "account", "qos", "constraint", "time", "cpus", "memory", "gpus", "setup", "sbatch",
    ),
    RAY: ("at_once", "address", "cpus", "memory", "gpus", "resources"),
}  # fmt: skip
_RAYS_OWN = {"CPU": "cpus", "GPU": "gpus", "memory": "memory"}  # resources of Ray that have an option of their own


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """Options of jobs; `TAKES` says where they can be given."""

    at_once: int | None = setting(
        None, "jobs at once; unset: in Slurm and Ray as there is room, on this machine one per core", at_least=1
    )
    partition: str | None = setting(None, "Slurm's partition")
    account: str | None = setting(None, "the account that is charged")
    qos: str | None = setting(None, "the quality of service")
    constraint: str | None = setting(None, "features that a node must have")
    time: str | int | None = setting(None, 'time limit of a job: minutes, or as Slurm writes it, e.g. "1-12:00:00"')
    cpus: int | None = setting(None, "cores of a job; unset: as the site has it; in Ray one", at_least=1)
    memory: float | None = setting(None, "memory of a job in GB", above=0)
    gpus: int | float | None = setting(None, "GPUs of a job; in Ray also a part of one, e.g. 0.25", at_least=0)
    setup: tuple[str, ...] = setting((), 'shell commands before the job, e.g. ["module load python"]')
    sbatch: dict[str, str] = setting(factory=dict, help="further options of sbatch by their long names")
    address: str | None = setting(None, ADDRESS_HELP)
    resources: dict[str, float] = setting(factory=dict, help="custom resources of Ray that a job needs, by their names")

    def __post_init__(self) -> None:
        check_settings(self, "on-option")
        for name, amount in self.resources.items():
            if not (math.isfinite(amount) and amount > 0):
                raise RecipeError(
                    f"on-option.resources.{name} must be above 0.", f"{amount}", "Leave it out, or change it."
                )
            if name in _RAYS_OWN:
                raise RecipeError(
                    "on-option.resources holds the custom resources of a Ray cluster.",
                    f"'{name}'",
                    f"Use --on-option {_RAYS_OWN[name]}=... instead.",
                )

    def check_for(self, on: str) -> None:
        """Refuse what this system does not take: nothing that was asked for is left out silently."""
        unset = ClusterOptions()
        given = [field.name for field in fields(self) if getattr(self, field.name) != getattr(unset, field.name)]
        others = [name for name in given if name not in TAKES[on]]
        if others:
            where = " or ".join(f"--on {system}" for system in TAKES if others[0] in TAKES[system])
            raise RecipeError(
                f"--on {on} takes these options: {', '.join(sorted(TAKES[on]))}.",
                ", ".join(f"'{name}'" for name in others),
                f"Leave out '{others[0]}', or use it with {where}.",
            )
        if on != RAY and self.gpus is not None and self.gpus != int(self.gpus):
            raise RecipeError(f"--on {on} gives whole GPUs to a job.", f"gpus={self.gpus}", "Or use --on ray.")


def cluster_options(file: Path | None = None, changes: Sequence[str] = (), on: str | None = None) -> ClusterOptions:
    """Options from a TOML file, with those of the command line, KEY=VALUE, in their place; `on`: for this system."""
    table = {} if file is None else _read(file)
    for change in changes:
        key, equals, value = (part.strip() for part in change.partition("="))
        if not equals or not key:
            raise RecipeError("--on-option must have the form KEY=VALUE.", f"'{change}'", "Example: partition=gpu.")
        head, dot, name = key.partition(".")
        if dot and name and head in ("sbatch", "resources"):
            before = table.get(head)
            table[head] = {**(before if isinstance(before, dict) else {}), name: _number(head, value)}
        else:
            table[key] = [value] if key == "setup" else _number(key, value)
    made: ClusterOptions = from_table(ClusterOptions, table, "on-option")
    if on is not None:
        made.check_for(on)
    return made


def _read(file: Path) -> dict[str, Any]:
    try:
        table = parse_toml(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise RecipeError("--on-file must name a TOML file.", f"{file}: {error}"[:200], "Correct it.") from None
    if isinstance(table.get("time"), datetime.time):  # TOML has times of day, written as Slurm's limits
        table["time"] = str(table["time"])
    if isinstance(table.get("sbatch"), dict):
        table["sbatch"] = {key: str(value) for key, value in table["sbatch"].items()}
    return table


def _number(key: str, value: str) -> Any:
    """The value of a field that is a number as one; any other as it is, also where it looks like a number."""
    kinds = typing.get_args(typing.get_type_hints(ClusterOptions).get(key))  # of a table those of keys and values
    if key == "resources":
        kinds = kinds[1:]
    for kind in (int, float):
        if kind in kinds and str not in kinds:
            try:
                return kind(value)
            except ValueError:
                pass
    return value
