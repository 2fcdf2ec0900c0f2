"""Devices that take the same number of gradient steps in a round, at a common pace: no server, one clock."""

from __future__ import annotations

from dataclasses import dataclass

from codistill.protocol import Agent, Protocol, setting


@dataclass(frozen=True, kw_only=True)
class Stepping(Protocol):
    """The steps and step sizes η_t that d_distillation, d_sgd and silo_sgd have in common. Abstract."""

    topology = "ring"

    local_steps: int = setting(50, "iterations per round, equal on all devices", at_least=0)
    batch_size: int = setting(32, "private samples per iteration", at_least=1)
    rate: float | None = setting(None, "η, first step size of all devices; absent: each owner's own", above=0)
    schedule: str = setting(
        "constant", "how η_t goes on; summable: as Theorem 3 needs", choices=("constant", "decayed", "summable")
    )
    decay: float = setting(0.95, "factor per round of the schedule 'decayed'", above=0, at_most=1)

    def _factor(self, t: int, i: int) -> float:
        """η_t / η_0 in iteration i of round t."""
        if self.schedule == "decayed":
            return self.decay**t
        # Σ η_t = ∞ and Σ η_t² < ∞: exponents in (1/2, 1]
        return (1 + (t * self.local_steps + i) / 100) ** -0.75 if self.schedule == "summable" else 1.0

    def _pace(self, me: Agent, t: int, i: int) -> float:
        """Set the learner's step size for this iteration; returns the factor."""
        factor = self._factor(t, i)
        if self.rate is not None or factor != 1.0:
            me.learner.pace(factor, self.rate)
        return factor
