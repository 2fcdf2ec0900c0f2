"""Devices that step at a common pace and, every so many steps, speak to their neighbours."""

from __future__ import annotations

from dataclasses import dataclass, fields

from codistill.protocol import setting
from codistill.protocols.silo_sgd import SiloSGD
from codistill.protocols.stepping import Stepping


@dataclass(frozen=True, kw_only=True)
class Talking(Stepping):
    """What d_distillation and d_sgd have in common beside their steps. Abstract."""

    every: int = setting(1, "τ, iterations between communications, counted over all rounds", at_least=1)

    def alone(self) -> SiloSGD:
        """The same steps without one another."""
        return SiloSGD(**{field.name: getattr(self, field.name) for field in fields(Stepping)})

    def _due(self, t: int, first: int = 0) -> range:
        """Of the steps `first`, ... of round t those before which devices communicate: each τ-th of all rounds."""
        start = first + -(t * self.local_steps + first) % self.every
        return range(start, first + self.local_steps, self.every)
