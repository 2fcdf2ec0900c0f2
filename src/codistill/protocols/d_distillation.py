"""Distributed Distillation: soft-decisions on reference data, agreed on with neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from codistill.learners.ability import Ability
from codistill.protocol import Agent, setting
from codistill.protocols.printed import check_printed
from codistill.protocols.simplex import check_classes, on_simplex, probabilities
from codistill.protocols.talking import Talking

_LOST = "the model's outputs are no longer finite; it goes on passing soft-decisions of others"


@dataclass(frozen=True, kw_only=True)
class DDistillation(Talking):
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
    its end on its labels and on z for λ M_n at most of the points it has met.

    Deviations of "mean": above. In `warm_up` rounds nobody communicates.
    """

    name = "d_distillation"
    paper = "Bistritz, Mann, Bambos, NeurIPS 2020"
    exchanges = "soft-decisions on public data, to and from neighbours"
    needs = Ability.PREDICT
    needs_public = True

    network_batch: int = setting(32, "b, reference points per communication", at_least=1)
    form: str = setting("mean", "scaling of (5) and (6); see the page of the protocol", choices=("mean", "printed"))
    weight: float = setting(2.0, "λ of the form 'mean', the pull of a model towards z", at_least=0)
    z_step: float = setting(0.25, "γ of the form 'mean', the pull of z towards the model", at_least=0, at_most=1)
    beta: float = setting(1.0, "β of the form 'printed'; it needs a rate", above=0)
    start: str = setting("own", "what z is at first", choices=("own", "uniform"))
    warm_up: int = setting(0, "rounds of local training before the first communication", at_least=0)

    async def begin(self, me: Agent) -> None:
        """Nothing is known of any point yet; a device without gradients is fitted."""
        me.state["z"] = np.full((len(me.public), me.shard.classes), 1 / me.shard.classes, dtype=np.float32)
        me.state["met"] = np.zeros(len(me.public), dtype=bool)
        if Ability.GRADIENTS not in me.learner.abilities:
            me.learner.fit(me.shard.x, me.shard.targets)

    async def round(self, me: Agent, t: int) -> None:
        """Iterations, some of which communicate."""
        if Ability.GRADIENTS in me.learner.abilities:
            await self._round_by_gradients(me, t)
        else:
            await self._round_by_fitting(me, t)

    async def _round_by_gradients(self, me: Agent, t: int) -> None:
        due = self._due(t) if t >= self.warm_up else range(0)
        talks = me.public.batches(t, self.network_batch, len(due))
        own, pull = self._weights(me)
        for i, (x, y) in enumerate(me.shard.batches(t, self.batch_size, steps=self.local_steps)):
            factor = self._pace(me, t, i)
            loss = own * me.learner.loss(me.learner(x), y)
            if i in due:
                ids, u = next(talks)
                s = torch.softmax(me.learner(u), dim=1)
                z = await self._agree(me, ids, s.detach().numpy(), factor)
                if z is not None:
                    loss = loss + pull * (s - torch.from_numpy(z)).square().sum(dim=1).mean()
            me.learner.descend(loss)

    async def _round_by_fitting(self, me: Agent, t: int) -> None:
        s = on_simplex(me.learner.predict(me.public.x))
        due = self._due(t) if t >= self.warm_up else range(0)
        for i, (ids, _) in zip(due, me.public.batches(t, self.network_batch, len(due)), strict=True):
            await self._agree(me, ids, s[ids], self._factor(t, i))
        own, pull = self._weights(me)
        met = np.flatnonzero(me.state["met"])
        # As many points beside the labels as their terms weigh in (5): pull / own to one.
        met = np.sort(me.rng("refit").permutation(met)[: round(pull / own * len(me.shard))])
        if len(met) and me.topology.sources(me.name):
            x = np.concatenate([me.shard.x, me.public.x[met]])
            me.learner.fit(x, np.concatenate([me.shard.targets, me.state["z"][met]]))

    def _weights(self, me: Agent) -> tuple[float, float]:
        """(5): M_n ℓ + (β Q / N) mean |s - z|², or ℓ + λ mean |s - z|²."""
        if self.form == "printed":
            return float(len(me.shard)), self.beta * len(me.public) / len(me.roster)
        return 1.0, self.weight

    async def _agree(self, me: Agent, ids: np.ndarray, s: np.ndarray, factor: float) -> np.ndarray | None:
        """Steps 1 and 3 on some points; returns the z of step 2, or None where nobody was heard."""
        z, met = me.state["z"], me.state["met"]
        if not np.isfinite(s).all():  # a model that is lost: its device passes on what others say
            s = z[ids]
            if _LOST not in me.remarks:
                me.remark(_LOST)
        if self.start == "own":
            z[ids[~met[ids]]] = s[~met[ids]]
        met[ids] = True
        mine = z[ids]
        heard = probabilities(me, await me.exchange(z=mine, expect={"z": mine}), "z")
        mixed = me.mix(mine, heard)
        if self.form == "printed":
            # (6): z ← Σ_m w_nm z^m - 2 β η_t (z^n - s)
            used, step = mine, 2 * self.beta * (self.rate or 0.0) * factor
        else:
            used, step = mixed, self.z_step
        z[ids] = on_simplex(mixed - step * (used - s))
        if heard:
            me.measure(me.name, consensus_error=float(np.square(mixed - mine).sum(axis=1).mean()))
        return used if heard or self.form == "printed" else None

    def check(self, agents: Sequence[Agent]) -> None:
        """The devices must be joined and tell classes apart; in print, (5) and (6) have conditions of their own."""
        agents[0].topology.check_mixing()
        check_classes(agents, self.name)
        if self.form == "printed":
            check_printed(agents, self.beta, self.rate)
