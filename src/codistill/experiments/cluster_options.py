"""What jobs of a sweep ask of the machine they run on: from a file of the site, and from the command line."""

from __future__ import annotations

import datetime
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from codistill.errors import RecipeError
from codistill.settings import check_settings, from_table, setting
from codistill.text import parse_toml


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """Options of jobs. On this machine (`local`) at_once and gpus count, the others are for Slurm."""

    at_once: int | None = setting(
        None, "jobs at once; unset: in Slurm as it has room, on this machine one per core", at_least=1
    )
    partition: str | None = setting(None, "Slurm's partition")
    account: str | None = setting(None, "the account that is charged")
    qos: str | None = setting(None, "the quality of service")
    constraint: str | None = setting(None, "features that a node must have")
    time: str | int | None = setting(None, 'time limit of a job: minutes, or as Slurm writes it, e.g. "1-12:00:00"')
    cpus: int | None = setting(None, "cores of a job", at_least=1)
    memory: float | None = setting(None, "memory of a job in GB", above=0)
    gpus: int | None = setting(None, "GPUs of a job", at_least=0)
    setup: tuple[str, ...] = setting((), 'shell commands before the job, e.g. ["module load python"]')
    sbatch: dict[str, str] = setting(factory=dict, help="further options of sbatch by their long names")

    def __post_init__(self) -> None:
        check_settings(self, "on-option")


def cluster_options(file: Path | None = None, changes: Sequence[str] = ()) -> ClusterOptions:
    """Options from a TOML file, with those of the command line, KEY=VALUE, in their place."""
    table = {} if file is None else _read(file)
    for change in changes:
        key, equals, value = (part.strip() for part in change.partition("="))
        if not equals or not key:
            raise RecipeError("--on-option must have the form KEY=VALUE.", f"'{change}'", "Example: partition=gpu.")
        if key.startswith("sbatch."):
            table.setdefault("sbatch", {})[key.removeprefix("sbatch.")] = value
        else:
            table[key] = [value] if key == "setup" else _number(key, value)
    made: ClusterOptions = from_table(ClusterOptions, table, "on-option")
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
    kinds = typing.get_args(typing.get_type_hints(ClusterOptions).get(key))
    for kind in (int, float):
        if kind in kinds and str not in kinds:
            try:
                return kind(value)
            except ValueError:
                pass
    return value
