"""How a run is run: each option is one field of `RunSpec`, with its default, its help, its bounds and its places.

The arguments of `Federation.run` and of `serve`, the tables of a recipe (and so `--set`), what a hub tells its agents,
and the tables of the documentation are derived from these fields: a new option is one field and what it does.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
from typing import Any

from codistill.core.devices import CPU, DEVICE_HELP, check_name
from codistill.core.errors import RecipeError
from codistill.core.settings import Settings, check_settings, setting


def option(
    default: Any,
    help: str,
    *,
    recipe: str | None = None,
    in_recipe: Any = dataclasses.MISSING,
    told: bool = False,
    by_hub: bool = True,
    **bounds: Any,
) -> Any:
    """Declare an option of a run, as `setting` does.

    `recipe`: its place in a recipe, by default its name in [runtime]; `in_recipe`: its default there, if that is
    another. `told`: a hub tells it its agents. `by_hub`: it can be given to a hub whose agents hold their data.
    """
    places = {"recipe": recipe, "in_recipe": default if in_recipe is dataclasses.MISSING else in_recipe}
    metadata = {**setting(default, help, **bounds).metadata, **places, "told": told, "by_hub": by_hub}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class RunSpec(Settings):
    """Where a run is computed, how many rounds it has, and what is measured and saved when."""

    rounds: int = option(10, "number of rounds", at_least=1, recipe="protocol.rounds", told=True)
    runtime: str = option(
        "processes",
        "worker processes; all in this one; one process per node, over the network of this machine; or processes on "
        "the nodes of a Ray cluster",
        choices=("processes", "simulation", "network", "ray"),
        recipe="runtime.kind",
        by_hub=False,
    )
    workers: int | None = option(
        None, "worker processes, or hosts in a Ray cluster; unset: one per core", at_least=1, by_hub=False
    )
    device: str = option(CPU, DEVICE_HELP + "; for agents that do not say it themselves", by_hub=False)
    idle: str = option(
        "memory",
        "where states of agents are kept that are not at work; not over the network",
        choices=("memory", "disk"),
        by_hub=False,
    )
    max_minutes: float | None = option(
        None, "minutes after which no further round begins; such a run can be resumed; unset: no limit", above=0
    )
    checkpoint_every: int = option(1, "rounds between checkpoints; 0: never", at_least=0)
    evaluate_every: int = option(
        1, "rounds between evaluations; the last round is always evaluated", at_least=1, recipe="evaluation.every"
    )
    evaluate_samples: int | None = option(
        None,
        "test samples per evaluation, the full test set in the last round; 0: always all",
        at_least=0,
        recipe="evaluation.samples",
        in_recipe=2000,
    )
    evaluate_agents: str = option(
        "all",
        "who is evaluated: all agents, or those that took part in the round",
        choices=("all", "present"),
        recipe="evaluation.agents",
        by_hub=False,
    )
    alone: bool = option(True, "also train every agent alone, so that the gain is known", recipe="evaluation.alone")
    features_at: tuple[int, ...] = option(
        (),
        "rounds after which the features of 200 common test samples are kept, for a map in the report",
        at_least=1,
        recipe="evaluation.features_at",
        by_hub=False,
    )

    def __post_init__(self) -> None:
        if not isinstance(self.alone, bool):
            raise RecipeError(
                "alone must be true or false.",
                f"{self.alone!r}"[:80],
                "What agents do alone is said by the protocol: define alone() in it.",
            )
        check_settings(self)
        object.__setattr__(self, "evaluate_samples", self.evaluate_samples or None)
        check_name(self.device)
        late = [t for t in self.features_at if t > self.rounds]
        if late:
            raise RecipeError(
                f"features_at must name rounds of the run, which has {self.rounds}.",
                f"{late[0]}",
                "Remove it there, or run more rounds.",
            )

    def is_evaluated(self, t: int) -> bool:
        """Whether round t (from 0) is evaluated."""
        return (t + 1) % self.evaluate_every == 0 or self.is_last(t)

    def is_last(self, t: int) -> bool:
        return t + 1 == self.rounds

    def samples(self, t: int) -> int | None:
        """How many test samples round t is evaluated on; None for all."""
        return None if self.is_last(t) else self.evaluate_samples

    def has_checkpoint(self, done: int) -> bool:
        """Whether a checkpoint is written after `done` rounds."""
        return bool(self.checkpoint_every) and (done % self.checkpoint_every == 0 or done == self.rounds)

    def keeps_features(self, t: int) -> bool:
        """Whether the features of the agents are kept after round t (from 0)."""
        return t + 1 in self.features_at

    def of_baseline(self) -> RunSpec:
        """The options of the run of the agents alone: all rounds, one evaluation at the end, on the full test set."""
        return replace(
            self, evaluate_every=self.rounds, evaluate_agents="all", alone=False, features_at=(), max_minutes=None
        )


OPTIONS = {field.name: field for field in dataclasses.fields(RunSpec)}
TOLD = tuple(name for name, field in OPTIONS.items() if field.metadata["told"])
NOT_BY_HUB = tuple(name for name, field in OPTIONS.items() if not field.metadata["by_hub"])


def present_only(found: str) -> RecipeError:
    return RecipeError(
        "In the network every agent evaluates itself.",
        found,
        "Evaluate all agents, or run in the runtime 'simulation' or 'processes'.",
    )


def features_stay(found: str) -> RecipeError:
    return RecipeError(
        "In the network an agent's features on test samples stay with the agent.",
        found,
        "Remove features_at, or run in the runtime 'simulation' or 'processes'.",
    )
