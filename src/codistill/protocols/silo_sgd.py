"""Silo-SGD: every agent by itself, with the steps of the protocols that it is compared with."""

from __future__ import annotations

from dataclasses import dataclass

from codistill.protocol import Ability, Agent, Protocol, setting
from codistill.protocols import parts


@dataclass(frozen=True, kw_only=True)
class SiloSGD(Protocol):
    """Bistritz, Mann, Bambos. Distributed Distillation for On-Device Learning. NeurIPS 2020. Section 5, baseline.

    The same private batches and step sizes η_t as d_distillation and d_sgd, and no communication. A learner without
    gradients is fitted once.
    """

    name = "silo_sgd"
    paper = "Bistritz, Mann, Bambos, NeurIPS 2020, sec. 5"
    exchanges = "nothing"
    needs = Ability.LABELS
    topology = "silent"
    is_baseline = True

    local_steps: int = setting(50, "iterations per round, equal for all agents", at_least=0)
    batch_size: int = setting(32, "private samples per iteration", at_least=1)
    lr: float | None = setting(None, "η, initial step size of all agents; unset: each owner's own", above=0)
    schedule: str = setting("constant", "how η_t continues; summable: as Theorem 3 needs", choices=parts.SCHEDULES)
    decay: float = setting(0.95, "factor per round of the schedule 'decayed'", above=0, at_most=1)

    def message_bytes(self, classes: int, public: int) -> int:
        """Nothing is sent."""
        return 0

    async def begin(self, me: Agent) -> None:
        """Fit learners without gradients."""
        if Ability.GRADIENTS not in me.learner.abilities:
            me.learner.fit(me.shard.x, me.shard.targets)

    async def round(self, me: Agent, t: int) -> None:
        """Steps on the private shard."""
        if Ability.GRADIENTS not in me.learner.abilities:
            return
        for i, (x, y) in enumerate(me.shard.batches(t, self.batch_size, steps=self.local_steps)):
            parts.set_lr(me, parts.lr_factor(self.schedule, self.decay, t, t * self.local_steps + i), self.lr)
            me.learner.descend(me.learner.loss(me.learner(x), y))
