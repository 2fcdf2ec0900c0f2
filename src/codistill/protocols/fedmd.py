"""FedMD: learning from the mean of the others' outputs on public data."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from codistill.learners.ability import Ability
from codistill.losses import distillation
from codistill.protocol import Agent, Hub, Message, Protocol, setting


@dataclass(frozen=True, kw_only=True)
class FedMD(Protocol):
    """Li, Wang. FedMD: Heterogenous Federated Learning via Model Distillation. 2019; in the form of
    Han, Shi, Huang. FedAL. Section III-B, eqs. (2)-(6).

    A round is local training on the private shard, then `transfer_steps` mini-batches P of public data.
    For each, every client n sends its outputs f_n(P) and gets their mean; with itself removed that is
    f_-n, and the client takes a step down KL(ψ(f_-n, E) ‖ ψ(f_n, E)).

    Black-box form, for learners that only fit and predict: f_n = log p_n, which differs from a logit by a
    constant per sample that cancels in the softmax, so both kinds mix in one federation. Such a client
    remembers ψ(f_-n, E) for the public samples it has seen, and at the end of the round is fitted anew on
    its labels and on those soft labels together.

    Deviations: a batch of the last pass over public data may be smaller than the rest.
    """

    name = "fedmd"
    paper = "Li & Wang 2019; Han, Shi, Huang 2023, sec. III-B"
    exchanges = "outputs on public data, to and from the hub"
    needs = Ability.PREDICT
    needs_public = True

    local_epochs: int = setting(1, "epochs of local training per round", at_least=0)
    batch_size: int = setting(32, "samples per gradient step, private and public", at_least=1)
    transfer_steps: int | None = setting(None, "public batches per round; absent: one pass over all", at_least=0)
    temperature: float = setting(1.0, "E, softens the outputs in the distillation loss", above=0)
    floor: float = setting(1e-3, "smallest probability that a black-box client states", above=0, at_most=0.1)

    async def begin(self, me: Agent) -> None:
        """A black-box client has to be fitted before it can say anything."""
        if Ability.GRADIENTS not in me.learner.abilities:
            me.learner.fit(me.shard.x, me.shard.targets)

    async def round(self, me: Agent, t: int) -> None:
        """Local training, then knowledge transfer."""
        if Ability.GRADIENTS in me.learner.abilities:
            await self._round_by_gradients(me, t)
        else:
            await self._round_by_fitting(me, t)

    async def _round_by_gradients(self, me: Agent, t: int) -> None:
        for x, y in me.shard.batches(t, self.batch_size, self.local_epochs):
            me.learner.descend(me.learner.loss(me.learner(x), y))
        for _, u in me.public.batches(t, self.batch_size, self.transfer_steps):
            f = me.learner(u)
            others = await self._mean_of_others(me, f.detach().numpy())
            if others is not None:
                # (4): min KL(p_-n, p_n)
                me.learner.descend(distillation(f, torch.from_numpy(others), self.temperature))

    async def _round_by_fitting(self, me: Agent, t: int) -> None:
        f = np.log(np.maximum(me.learner.predict(me.public.x), self.floor))
        # ψ(f_-n, E) of each public sample; a row of zeros has not been taught yet
        soft = me.state.setdefault("soft", np.zeros_like(f))
        for ids, _ in me.public.batches(t, self.batch_size, self.transfer_steps):
            others = await self._mean_of_others(me, f[ids])
            if others is not None:
                soft[ids] = torch.softmax(torch.from_numpy(others) / self.temperature, dim=1).numpy()  # (6)
        taught = soft.any(axis=1)
        if taught.any():
            x = np.concatenate([me.shard.x, me.public.x[taught]])
            me.learner.fit(x, np.concatenate([me.shard.targets, soft[taught]]))

    async def _mean_of_others(self, me: Agent, f: np.ndarray) -> np.ndarray | None:
        reply = await me.ask_hub(f=f, expect={"mean": f.shape})
        if reply is None or reply["clients"] <= reply["own"]:
            return None
        # (5): f_-n = (N f̄ - f_n) / (N - 1), where f̄ is the mean over all N clients
        others: np.ndarray = (reply["clients"] * reply["mean"] - reply["own"] * f) / (reply["clients"] - reply["own"])
        return others.astype(np.float32)

    async def hub(self, me: Hub, t: int) -> None:
        """Average the outputs of whoever answered, batch by batch."""
        for ids, _ in me.public.batches(t, self.batch_size, self.transfer_steps):
            heard = await me.gather(expect={"f": (len(ids), None)}, alike=True)
            if not heard:
                return  # everything was lost: nobody waits for a hub that has ended its round
            mean = np.mean([message["f"] for message in heard.values()], axis=0, dtype=np.float32)
            # A client whose outputs were lost on the way is not in the mean, and must not be removed from it.
            told = {own: Message.of(mean=mean, clients=len(heard), own=own) for own in (0, 1)}
            await me.scatter({name: told[int(name in heard)] for name in me.present})
