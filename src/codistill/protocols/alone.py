"""Independent learning: the yardstick that every protocol must beat."""

from __future__ import annotations

from dataclasses import dataclass

from codistill.learners.ability import Ability
from codistill.protocol import Agent, Protocol, setting


@dataclass(frozen=True, kw_only=True)
class Alone(Protocol):
    """Every agent trains on its own shard and talks to nobody.

    A learner with gradients takes `local_epochs` or `local_steps` per round; one that only fits is fitted once, since
    fitting it again on the same data teaches it nothing.
    """

    name = "alone"
    paper = "baseline (independent learning)"
    exchanges = "nothing"
    needs = Ability.LABELS
    topology = "silent"

    local_epochs: int = setting(1, "epochs of local training per round", at_least=0)
    local_steps: int | None = setting(None, "gradient steps per round, instead of epochs", at_least=0)
    batch_size: int = setting(32, "samples per gradient step", at_least=1)
    refit: bool = setting(False, "fit everyone anew in every round, as protocols do whose models travel")

    async def begin(self, me: Agent) -> None:
        """Fit those who learn by fitting."""
        if Ability.GRADIENTS not in me.learner.abilities and not self.refit:
            me.learner.fit(me.shard.x, me.shard.targets)

    async def round(self, me: Agent, t: int) -> None:
        """Train those who learn by gradients."""
        if self.refit:
            me.learner.fit(me.shard.x, me.shard.targets)
        elif Ability.GRADIENTS in me.learner.abilities:
            for x, y in me.shard.batches(t, self.batch_size, self.local_epochs, self.local_steps):
                me.learner.descend(me.learner.loss(me.learner(x), y))

    def alone(self) -> None:
        """It is its own yardstick."""


@dataclass(frozen=True, kw_only=True)
class Centralised(Alone):
    """Every agent's model trained on the pooled data of all: an upper yardstick, not a protocol.

    It breaks the rule that data stays home, so it runs in simulation only.
    """

    name = "centralised"
    paper = "baseline (pooled data)"
    exchanges = "all data: a yardstick, in simulation only"
    pools_data = True
