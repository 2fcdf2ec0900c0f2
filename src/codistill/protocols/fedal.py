"""FedAL: federated distillation with a discriminator on the hub, and less-forgetting in both stages."""

from __future__ import annotations

from dataclasses import dataclass

from codistill.protocol import Agent, Foothold, Hub, setting
from codistill.protocols.adversarial import AdversarialSharing


@dataclass(frozen=True, kw_only=True)
class FedAL(AdversarialSharing):
    """Han, Shi, Huang. FedAL: Black-Box Federated Knowledge Distillation Enabled by Adversarial Learning. 2023.

    Algorithm 1. In each round t, τ local steps down V_loc = ℓ + r_loc (17). Then τ times, on a public batch P:
    every client sends f_n(P); the hub's discriminator h takes a step towards knowing whose outputs they are,
    and sends to each client the mean output f̄ and ∇_{f_n} U_n, where U_n = -CE(n, h(ψ(f_n, E))) (7); the
    client steps down V_glo = K(p̄_-n, p_n) + U_n + r_glo (18), U_n by the chain rule (21). r holds a model to
    what it was at the start of the stage (13), (14). A client never has the discriminator.

    `adversarial` = 0 is FedMD-LF, `less_forgetting` = 0 as well is FedMD, to the bit and in bytes.

    U_n has no lower bound. A client whose outputs go astray returns to where its round began, one whose loss does
    leaves out the step; it says so, and goes on without U_n until the next round. `clip` bounds the gradient of
    U_n per sample beforehand.

    Deviations: the discriminator's second layer has 256 neurons (the text's 265 looks like a slip). The mean
    leaves the client out, as (5) and unlike line 15. r_loc begins after the first transfer.
    """

    name = "fedal"
    paper = "Han, Shi, Huang 2023"
    exchanges = "outputs on public data to the hub; their mean and a gradient of outputs back"

    local_steps: int | None = setting(5, "τ, gradient steps per round, instead of epochs", at_least=0)
    transfer_steps: int | None = setting(5, "τ, public batches per round; absent: one pass over all", at_least=0)
    less_forgetting: float = setting(1.0, "weight of r, which holds a model to what it was before a stage", at_least=0)

    async def round(self, me: Agent, t: int) -> None:
        """Local training, then the game."""
        foothold = Foothold(me)
        self._train(me, t, foothold)
        await self._play(me, t, foothold)
        foothold.check()

    async def hub(self, me: Hub, t: int) -> None:
        """Average the outputs, and play the discriminator's part."""
        await self._referee(me, t)
