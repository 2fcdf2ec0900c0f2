"""Sharing outputs on public data through a hub: what FedMD, FedAL and FedDF have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from codistill.learners.ability import Ability
from codistill.protocol import Agent, Foothold, Hub, Protocol, setting
from codistill.protocols.classes import check_classes
from codistill.protocols.combine import ask, combine
from codistill.protocols.discriminator import Discriminator
from codistill.protocols.parts.aggregation import KINDS, Aggregation
from codistill.protocols.parts.losses import distillation


@dataclass(frozen=True, kw_only=True)
class OutputSharing(Protocol):
    """Han, Shi, Huang. FedAL. Sections III-B and IV. Abstract: a protocol says what its round is made of.

    f_n: outputs of client n before the softmax ψ; E: temperature; P: a mini-batch of public data, the same
    on every client; τ: steps per stage; r: less-forgetting, (13)-(14).
    """

    needs = Ability.GRADIENTS
    needs_public = True

    local_epochs: int = setting(1, "epochs of local training per round", at_least=0)
    local_steps: int | None = setting(None, "τ, gradient steps per round, instead of epochs", at_least=0)
    batch_size: int = setting(32, "samples per gradient step, private and public", at_least=1)
    transfer_steps: int | None = setting(None, "τ, public batches per round; absent: one pass over all", at_least=0)
    temperature: float = setting(1.0, "E, softens the outputs in the distillation loss", above=0)
    less_forgetting: float = setting(0.0, "weight of r, which holds a model to what it was before a stage", at_least=0)
    aggregate: str = setting("mean", "how the others' outputs become one target", choices=KINDS)
    trim: float = setting(0.2, "share that 'trimmed' leaves out at each end", at_least=0, at_most=0.49)

    def _train(self, me: Agent, t: int, foothold: Foothold) -> None:
        """Lines 4-6: steps down V_loc = ℓ(y, f_n) + r_loc, (17)."""
        # (13): r_loc holds on to the end of the last transfer; before the first, there is nothing to forget.
        old = me.learner.snapshot(training=True) if self.less_forgetting and "taught" in me.state else None
        for x, y in me.shard.batches(t, self.batch_size, self.local_epochs, self.local_steps):
            f = foothold.outputs(x)
            loss = me.learner.loss(f, y)
            foothold.descend(loss if old is None else loss + self._forgetting(f, old(x)))

    async def _transfer(
        self, me: Agent, t: int, foothold: Foothold, adversary: float = 0.0, clip: float | None = None
    ) -> None:
        """Lines 8-18: steps down V_glo = K(p̄_-n, p_n) + U_n + r_glo, (18); `adversary` is the weight of U_n."""
        if len(me.present) == 1:
            return  # nobody to learn from: not even statistics of batch norm may change
        old = me.learner.snapshot(training=True) if self.less_forgetting else None  # (14): as local training left it
        for _, u in me.public.batches(t, self.batch_size, self.transfer_steps):
            f = foothold.outputs(u)
            told = await self._ask(me, f.detach().numpy(), rows=2 if adversary else 1)
            if told is None:
                continue
            loss = distillation(f, torch.from_numpy(told[0]), self.temperature)  # (4)
            if adversary and not foothold.astray:
                # (21), the chain rule: the hub has sent ∇U_n(x) with respect to f_n(x); line 18 is a mean over P.
                loss = loss + adversary * (f * torch.from_numpy(_bounded(told[1], clip))).sum() / len(f)
            foothold.descend(loss if old is None else loss + self._forgetting(f, old(u)))
            me.state["taught"] = True

    def _forgetting(self, f: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
        """(13), (14): K(p_n(x, θ before the stage), p_n(x, θ))."""
        return self.less_forgetting * distillation(f, old, self.temperature)

    async def _ask(self, me: Agent, f: np.ndarray, rows: int = 1) -> list[np.ndarray] | None:
        # How much of each class it has is said only where the aggregate is weighted by that.
        extra = {"coverage": me.shard.targets.mean(axis=0, dtype=np.float32)} if self.aggregate == "coverage" else {}
        return await ask(me, f, rows, **extra)

    def check(self, agents: Sequence[Agent]) -> None:
        """There must be classes: a softmax of real values says nothing."""
        check_classes(agents, self.name)

    async def _combine(self, me: Hub, t: int, discriminator: Discriminator | None = None) -> None:
        """The hub's side of a transfer stage."""
        batches = me.public.batches(t, self.batch_size, self.transfer_steps)
        way = Aggregation(kind=self.aggregate, trim=self.trim, temperature=self.temperature)
        await combine(me, batches, way, discriminator)


def _bounded(gradient: np.ndarray, clip: float | None) -> np.ndarray:
    """Each sample's gradient, no longer than `clip`."""
    if clip is None:
        return gradient.copy()
    norms = np.linalg.norm(gradient.astype(np.float64), axis=1, keepdims=True)
    bounded: np.ndarray = gradient * np.minimum(1, clip / np.maximum(norms, 1e-300)).astype(np.float32)
    return bounded
