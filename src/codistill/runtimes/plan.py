"""How many rounds a run has, and what is measured and saved when."""

from __future__ import annotations

from dataclasses import dataclass

from codistill.errors import RecipeError
from codistill.settings import Settings, check_settings, setting

EVALUATE_AGENTS = "who is evaluated: all agents, or those that took part in the round"
FEATURES_AT = "rounds after which the features of 200 common test samples are kept, for a map in the report"


@dataclass(frozen=True, kw_only=True)
class Plan(Settings):
    """How many rounds, and what is measured and saved when."""

    rounds: int = setting(10, "number of rounds", at_least=1)
    evaluate_every: int = setting(1, "rounds between evaluations; the last round is always evaluated", at_least=1)
    evaluate_samples: int | None = setting(
        None, "test samples per evaluation, the full test set in the last round; unset: all", at_least=1
    )
    evaluate_agents: str = setting("all", EVALUATE_AGENTS, choices=("all", "present"))
    baseline: bool = setting(True, "also train every agent alone, so that the gain is known")
    checkpoint_every: int = setting(1, "rounds between checkpoints; 0: never", at_least=0)
    features_at: tuple[int, ...] = setting((), FEATURES_AT, at_least=1)

    def __post_init__(self) -> None:
        check_settings(self)
        check_features_at(self.features_at, self.rounds)

    def is_evaluated(self, t: int) -> bool:
        """Whether round t (from 0) is evaluated."""
        return (t + 1) % self.evaluate_every == 0 or self.is_last(t)

    def is_last(self, t: int) -> bool:
        """Whether round t is the last."""
        return t + 1 == self.rounds

    def samples(self, t: int) -> int | None:
        """How many test samples round t is evaluated on; None for all."""
        return None if self.is_last(t) else self.evaluate_samples

    def has_checkpoint(self, done: int) -> bool:
        """Whether there is to be a checkpoint after so many rounds."""
        return bool(self.checkpoint_every) and (done % self.checkpoint_every == 0 or done == self.rounds)

    def keeps_features(self, t: int) -> bool:
        """Whether the features of the agents are kept after round t (from 0)."""
        return t + 1 in self.features_at

    def check_for_network(self) -> None:
        """Between machines nobody collects features, and every agent evaluates itself."""
        if self.evaluate_agents != "all":
            raise present_only(f"evaluate_agents = '{self.evaluate_agents}'")
        if self.features_at:
            raise features_stay(f"features_at = {list(self.features_at)}")

    def of_baseline(self) -> Plan:
        """The plan of the agents alone: one evaluation at the end, on the full test set."""
        return Plan(
            rounds=self.rounds,
            evaluate_every=self.rounds,
            baseline=False,
            checkpoint_every=self.checkpoint_every,
        )


def check_features_at(features_at: tuple[int, ...], rounds: int) -> None:
    """Features are kept after rounds that the run has."""
    late = [t for t in features_at if t > rounds]
    if late:
        raise RecipeError(
            f"features_at must name rounds of the run, which has {rounds}.",
            f"{late[0]}",
            "Remove it there, or run more rounds.",
        )


def present_only(found: str) -> RecipeError:
    """The error for an evaluation of those who took part, over the network."""
    return RecipeError(
        "In the network every agent evaluates itself.",
        found,
        "Evaluate all agents, or run in the runtime 'simulation' or 'processes'.",
    )


def features_stay(found: str) -> RecipeError:
    """The error for features that are asked for over the network."""
    return RecipeError(
        "In the network an agent's features on test samples stay with the agent.",
        found,
        "Remove features_at, or run in the runtime 'simulation' or 'processes'.",
    )
