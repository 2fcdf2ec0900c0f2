"""The adversarial part of FedAL, as fields: FedAL and FedDF have it in common."""

from __future__ import annotations

from dataclasses import dataclass

from codistill.protocol import Agent, Foothold, Hub, setting
from codistill.protocols.discriminator import Discriminator
from codistill.protocols.sharing import OutputSharing


@dataclass(frozen=True, kw_only=True)
class AdversarialSharing(OutputSharing):
    """Han, Shi, Huang. FedAL. Section IV-B: the hub's discriminator in the transfer stage. Abstract."""

    adversarial: float = setting(1.0, "weight of U_n, the adversarial loss; 0: without a discriminator", at_least=0)
    clip: float | None = setting(None, "longest gradient of U_n for a sample; absent: unbounded", above=0)
    discriminator_rate: float = setting(1e-4, "η_d, step size of the discriminator", above=0)
    discriminator_temperature: float = setting(2.0, "E, softens what the discriminator sees", above=0)
    discriminator_hidden: tuple[int, ...] = setting(
        (32, 256), "neurons in the discriminator's hidden layers", at_least=1
    )

    async def _play(self, me: Agent, t: int, foothold: Foothold) -> None:
        """A client's transfer stage, with U_n unless its weight is 0."""
        await self._transfer(me, t, foothold, self.adversarial, self.clip)

    async def _referee(self, me: Hub, t: int) -> None:
        """The hub's transfer stage, with the discriminator's part unless its weight is 0."""
        discriminator = Discriminator(
            rate=self.discriminator_rate,
            temperature=self.discriminator_temperature,
            hidden=self.discriminator_hidden,
        )
        await self._combine(me, t, discriminator if self.adversarial else None)
