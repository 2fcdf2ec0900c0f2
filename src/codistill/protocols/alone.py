"""Independent learning: the baseline that every protocol must beat."""

from __future__ import annotations

from dataclasses import dataclass

from codistill.protocol import Ability, Agent, Protocol, setting
from codistill.protocols import parts


@dataclass(frozen=True, kw_only=True)
class Alone(Protocol):
    """Every agent trains on its own shard and communicates with nobody.

    A learner with gradients takes `local_epochs` or `local_steps` per round; one that only fits is fitted once, since
    fitting it again on the same data teaches it nothing.
    """

    name = "alone"
    paper = "baseline (independent learning)"
    exchanges = "nothing"
    needs = Ability.LABELS
    topology = "silent"
    is_baseline = True
    asynchronous = True

    local_epochs: int = setting(1, "epochs of local training per round", at_least=0)
    local_steps: int | None = setting(None, "gradient steps per round, instead of epochs", at_least=0)
    batch_size: int = setting(32, "samples per gradient step", at_least=1)
    lr_decay: float = setting(1.0, "factor on the learning rate per round", above=0, at_most=1)
    refit: bool = setting(False, "fit every learner again in every round, as protocols that send models do")

    def message_bytes(self, classes: int, public: int) -> int:
        """Nothing is sent."""
        return 0

    async def begin(self, me: Agent) -> None:
        """Fit learners without gradients."""
        if Ability.GRADIENTS not in me.learner.abilities and not self.refit:
            me.learner.fit(me.shard.x, me.shard.targets)

    async def round(self, me: Agent, t: int) -> None:
        """Train learners with gradients."""
        if self.refit:
            me.learner.fit(me.shard.x, me.shard.targets)
        elif Ability.GRADIENTS in me.learner.abilities:
            parts.set_lr(me, self.lr_decay**t, None)
            parts.train_locally(me, me.shard.batches(t, self.batch_size, self.local_epochs, self.local_steps))


def baseline_of(protocol: Protocol) -> Protocol | None:
    """What the agents of a protocol would do without one another; None where it is a baseline itself."""
    return None if protocol.is_baseline else protocol.alone() or protocol.settings_for(Alone)
