"""How many rounds a run has, and what is measured and saved when."""

from __future__ import annotations

from dataclasses import dataclass

from codistill.settings import Settings, check_settings, setting


@dataclass(frozen=True, kw_only=True)
class Plan(Settings):
    """How many rounds, and what is measured and saved when."""

    rounds: int = setting(10, "number of rounds", at_least=1)
    evaluate_every: int = setting(1, "rounds between evaluations; the last round is always evaluated", at_least=1)
    evaluate_samples: int | None = setting(
        None, "test samples per evaluation, the full test set in the last round; unset: all", at_least=1
    )
    baseline: bool = setting(True, "also train every agent alone, so that the gain is known")
    checkpoint_every: int = setting(1, "rounds between checkpoints; 0: never", at_least=0)

    def __post_init__(self) -> None:
        check_settings(self)

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

    def of_baseline(self) -> Plan:
        """The plan of the agents alone: one evaluation at the end, on the full test set."""
        return Plan(
            rounds=self.rounds,
            evaluate_every=self.rounds,
            baseline=False,
            checkpoint_every=self.checkpoint_every,
        )
