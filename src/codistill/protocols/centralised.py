"""Centralised training: an upper baseline, on the pooled data of all agents."""

from __future__ import annotations

from dataclasses import dataclass

from codistill.protocol import Ability, Agent, Protocol, setting
from codistill.protocols import parts


@dataclass(frozen=True, kw_only=True)
class Centralised(Protocol):
    """Every agent's model is trained on the pooled data of all agents.

    It breaks the rule that data stays home, so it runs in simulation only. A learner without gradients is fitted once.
    """

    name = "centralised"
    paper = "baseline (pooled data)"
    exchanges = "all data: a baseline, in simulation only"
    needs = Ability.LABELS
    topology = "silent"
    is_baseline = True
    pools_data = True

    local_epochs: int = setting(1, "epochs of training per round", at_least=0)
    local_steps: int | None = setting(None, "gradient steps per round, instead of epochs", at_least=0)
    batch_size: int = setting(32, "samples per gradient step", at_least=1)
    refit: bool = setting(False, "fit every learner again in every round, as protocols that send models do")

    async def begin(self, me: Agent) -> None:
        """Fit learners without gradients; `me.shard` holds the data of all agents."""
        if Ability.GRADIENTS not in me.learner.abilities and not self.refit:
            me.learner.fit(me.shard.x, me.shard.targets)

    async def round(self, me: Agent, t: int) -> None:
        """Train learners with gradients."""
        if self.refit:
            me.learner.fit(me.shard.x, me.shard.targets)
        elif Ability.GRADIENTS in me.learner.abilities:
            parts.train_locally(me, me.shard.batches(t, self.batch_size, self.local_epochs, self.local_steps))
