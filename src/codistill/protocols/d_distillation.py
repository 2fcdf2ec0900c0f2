"""Distributed Distillation: soft-decisions on reference data, agreed on with neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from codistill.learners.ability import Ability
from codistill.protocol import Agent, LearnerError, setting
from codistill.protocols.simplex import on_simplex, probabilities
from codistill.protocols.stepping import Stepping


@dataclass(frozen=True, kw_only=True)
class DDistillation(Stepping):
    """Bistritz, Mann, Bambos. Distributed Distillation for On-Device Learning. NeurIPS 2020. Algorithm 1.

    No server. z^n(x): network soft-decision of device n on a reference point x; s(θ^n, x) = ψ(f_n(x)): its own;
    W: communication matrix; Q: reference points; N: devices; M_n: private samples. In iteration t, on the common
    random reference batch S_t (b points, from the seed, no message) each device
    1. sends z^n(x) to its neighbours and hears theirs,
    2. steps down M_n ℓ + (β Q / N) mean |s - z|², (5),
    3. takes z^n ← Σ_m w_nm z^m - 2 β η_t (z^n - s), (6).

    `form` = "printed" is that. "mean", the default, is what works in practice: ℓ + λ mean |s - z|² with z after the
    consensus step, and z ← z - γ (z - s); there λ = β Q / (N M_n) and γ = 2 β η_t are fields of their own, since
    printed scaling hardly moves z (γ of 2e-4). `start`: z begins as the device's own soft-decision when a point is
    first met, or uniform. A device without gradients keeps s from the start of the round, and is fitted anew at
    its end on its labels and on z for the points it has met.

    Deviations of "mean": above; and in `warm_up` rounds nobody communicates.
    """

    name = "d_distillation"
    paper = "Bistritz, Mann, Bambos, NeurIPS 2020"
    exchanges = "soft-decisions on public data, to and from neighbours"
    needs = Ability.PREDICT
    needs_public = True

    every: int = setting(1, "τ, iterations between communications", at_least=1)
    network_batch: int = setting(32, "b, reference points per communication", at_least=1)
    form: str = setting("mean", "scaling of (5) and (6): see above", choices=("mean", "printed"))
    weight: float = setting(2.0, "λ of the form 'mean', the pull of a model towards z", at_least=0)
    z_step: float = setting(0.25, "γ of the form 'mean', the pull of z towards the model", at_least=0, at_most=1)
    beta: float = setting(1.0, "β of the form 'printed'; it needs a rate", above=0)
    start: str = setting("own", "what z is at first", choices=("own", "uniform"))
    warm_up: int = setting(0, "rounds of local training before the first communication", at_least=0)

    async def begin(self, me: Agent) -> None:
        """A device without gradients has to be fitted before it can say anything."""
        me.state["z"] = np.full((len(me.public), me.shard.classes), 1 / me.shard.classes, dtype=np.float32)
        me.state["met"] = np.full(len(me.public), self.start == "uniform")
        if Ability.GRADIENTS not in me.learner.abilities:
            me.learner.fit(me.shard.x, me.shard.targets)

    async def round(self, me: Agent, t: int) -> None:
        """Iterations, some of which communicate."""
        if Ability.GRADIENTS in me.learner.abilities:
            await self._round_by_gradients(me, t)
        else:
            await self._round_by_fitting(me, t)

    async def _round_by_gradients(self, me: Agent, t: int) -> None:
        talks = me.public.batches(t, self.network_batch, -(-self.local_steps // self.every))
        # (5): M_n ℓ + (β Q / N) mean |s - z|², or ℓ + λ mean |s - z|²
        own, pull = 1.0, self.weight
        if self.form == "printed":
            own, pull = float(len(me.shard)), self.beta * len(me.public) / len(me.roster)
        for i, (x, y) in enumerate(me.shard.batches(t, self.batch_size, steps=self.local_steps)):
            factor = self._pace(me, t, i)
            loss = me.learner.loss(me.learner(x), y)
            loss = own * loss if self.form == "printed" else loss
            if t >= self.warm_up and i % self.every == 0:
                ids, u = next(talks)
                s = torch.softmax(me.learner(u), dim=1)
                z = await self._agree(me, ids, s.detach().numpy(), factor)
                if z is not None:
                    loss = loss + pull * (s - torch.from_numpy(z)).square().sum(dim=1).mean()
            me.learner.descend(loss)

    async def _round_by_fitting(self, me: Agent, t: int) -> None:
        s = me.learner.predict(me.public.x)
        if t >= self.warm_up:
            talks = me.public.batches(t, self.network_batch, -(-self.local_steps // self.every))
            for i, (ids, _) in enumerate(talks):
                await self._agree(me, ids, s[ids], self._factor(t, i * self.every))
        met = me.state["met"]
        if met.any() and me.topology.sources(me.name):
            x = np.concatenate([me.shard.x, me.public.x[met]])
            me.learner.fit(x, np.concatenate([me.shard.targets, me.state["z"][met]]))

    async def _agree(self, me: Agent, ids: np.ndarray, s: np.ndarray, factor: float) -> np.ndarray | None:
        """Steps 1 and 3 on some points; returns the z of step 2, or None where nobody was heard."""
        z, new = me.state["z"], ~me.state["met"][ids]
        z[ids[new]], me.state["met"][ids] = s[new], True
        mine = z[ids]
        heard = await me.exchange(z=mine, expect={"z": mine})
        mixed = me.mix(mine, probabilities(me, heard, "z"))
        if self.form == "printed":
            # (6): z ← Σ_m w_nm z^m - 2 β η_t (z^n - s)
            used, step = mine, 2 * self.beta * (self.rate or 0.0) * factor
        else:
            used, step = mixed, self.z_step
        z[ids] = on_simplex(mixed - step * (used - s))
        me.measure(me.name, consensus_error=float(np.square(mixed - mine).sum(axis=1).mean()))
        return used if heard else None

    def check(self, agents: Sequence[Agent]) -> None:
        """The devices must be joined; in print, (6) keeps z a probability only while 2 β η <= w_nn."""
        agents[0].topology.check_mixing()
        if self.form != "printed":
            return
        if self.rate is None:
            raise LearnerError("The form 'printed' needs a rate.", "none", "Set rate, the step size η of all devices.")
        for agent in agents:
            diagonal = 1 - sum(agent.topology.weights(agent.name).values())
            if 2 * self.beta * self.rate > diagonal + 1e-9:
                raise LearnerError(
                    "(6) keeps soft-decisions probabilities only while 2 beta rate is at most w_nn.",
                    f"2 x {self.beta:g} x {self.rate:g} at agent '{agent.name}', whose w_nn is {diagonal:.3g}",
                    "Lower beta or rate, or use a graph with fewer links.",
                )
