"""FedMD: learning from the mean of the others' outputs on public data; with less-forgetting, FedMD-LF."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from codistill.learners.ability import Ability
from codistill.protocol import Agent, Foothold, Hub, setting
from codistill.protocols.sharing import OutputSharing


@dataclass(frozen=True, kw_only=True)
class FedMD(OutputSharing):
    """Li, Wang. FedMD: Heterogenous Federated Learning via Model Distillation. 2019; in the form of
    Han, Shi, Huang. FedAL. Section III-B, eqs. (2)-(6).

    A round is local training on the private shard, then `transfer_steps` mini-batches P of public data.
    For each, every client n sends its outputs f_n(P) and gets their mean; with itself removed that is
    f_-n, and the client takes a step down KL(ψ(f_-n, E) ‖ ψ(f_n, E)). With `less_forgetting` = 1 this is
    FedMD-LF, the paper's FedAL without its discriminator.

    Black-box form, for learners that only fit and predict: f_n = log p_n, which differs from a logit by a
    constant per sample that cancels in the softmax, so both kinds mix in one federation. Such a client
    remembers ψ(f_-n, E) for the public samples it has seen, and at the end of the round is fitted anew on
    its labels and on those soft labels together.

    Deviations: outputs are those of training mode (batch norm, dropout), as in the step that follows. A batch of
    the last pass over public data may be smaller than the rest. Less-forgetting in local training begins after the
    first transfer: before, there is nothing to forget.
    """

    name = "fedmd"
    paper = "Li & Wang 2019; Han, Shi, Huang 2023, sec. III-B"
    exchanges = "outputs on public data, to and from the hub"
    needs = Ability.PREDICT

    floor: float = setting(1e-3, "smallest probability that a black-box client states", above=0, at_most=0.1)

    async def begin(self, me: Agent) -> None:
        """A black-box client has to be fitted before it can say anything."""
        if Ability.GRADIENTS not in me.learner.abilities:
            me.learner.fit(me.shard.x, me.shard.targets)

    async def round(self, me: Agent, t: int) -> None:
        """Local training, then knowledge transfer."""
        if Ability.GRADIENTS in me.learner.abilities:
            foothold = Foothold(me)
            self._train(me, t, foothold)
            await self._transfer(me, t, foothold)
            foothold.check()
        else:
            await self._round_by_fitting(me, t)

    async def hub(self, me: Hub, t: int) -> None:
        """Average the outputs of whoever answered, batch by batch."""
        await self._combine(me, t)

    async def _round_by_fitting(self, me: Agent, t: int) -> None:
        f = np.log(np.maximum(me.learner.predict(me.public.x), self.floor)).astype(np.float32)
        # ψ(f_-n, E) of each public sample; a row of zeros has not been taught yet
        soft = me.state.setdefault("soft", np.zeros_like(f))
        for ids, _ in me.public.batches(t, self.batch_size, self.transfer_steps):
            told = await self._ask(me, f[ids])
            if told is not None:
                soft[ids] = torch.softmax(torch.from_numpy(told[0]) / self.temperature, dim=1).numpy()  # (6)
        taught = soft.any(axis=1)
        if taught.any():
            x = np.concatenate([me.shard.x, me.public.x[taught]])
            me.learner.fit(x, np.concatenate([me.shard.targets, soft[taught]]))
