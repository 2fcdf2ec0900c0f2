"""Silo-SGD: every device by itself, at the pace of the protocols that it is compared with."""

from __future__ import annotations

from dataclasses import dataclass

from codistill.learners.ability import Ability
from codistill.protocol import Agent
from codistill.protocols.stepping import Stepping


@dataclass(frozen=True, kw_only=True)
class SiloSGD(Stepping):
    """Bistritz, Mann, Bambos. Distributed Distillation for On-Device Learning. NeurIPS 2020. Section 5, baseline.

    The same private batches and step sizes as d_distillation and d_sgd, and no communication. A device without
    gradients is fitted once.
    """

    name = "silo_sgd"
    paper = "Bistritz, Mann, Bambos, NeurIPS 2020, sec. 5"
    exchanges = "nothing"
    needs = Ability.LABELS
    topology = "silent"

    async def begin(self, me: Agent) -> None:
        """Fit those who learn by fitting."""
        if Ability.GRADIENTS not in me.learner.abilities:
            me.learner.fit(me.shard.x, me.shard.targets)

    async def round(self, me: Agent, t: int) -> None:
        """Steps on the private shard."""
        if Ability.GRADIENTS not in me.learner.abilities:
            return
        for i, (x, y) in enumerate(me.shard.batches(t, self.batch_size, steps=self.local_steps)):
            self._pace(me, t, i)
            me.learner.descend(me.learner.loss(me.learner(x), y))

    def alone(self) -> None:
        """It is its own yardstick."""
