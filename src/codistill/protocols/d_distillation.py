"""Distributed Distillation: soft-decisions on public data, agreed on with neighbours."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from codistill.protocol import Ability, Agent, LearnerError, Message, MessageError, Protocol, RecipeError, setting
from codistill.protocols import parts
from codistill.protocols.silo_sgd import SiloSGD

_TOLERANCE = 0.05  # how far from probabilities what arrives may be: compression rounds


@dataclass(frozen=True, kw_only=True)
class DDistillation(Protocol):
    """Bistritz, Mann, Bambos. Distributed Distillation for On-Device Learning. NeurIPS 2020. Algorithm 1.

    No server. z^n(x): network soft-decision of agent n on a public point x; s(θ^n, x) = ψ(f_n(x)): its own;
    W: communication matrix; Q: public points; N: agents; M_n: private samples. In iteration t, on the common
    random public batch S_t (b points, from the seed, no message) each agent
    1. sends z^n(x) to its neighbours and hears theirs,
    2. steps down M_n ℓ + (β Q / N) mean |s - z|², (5); this minimises (2) with ρ = β / (N - 1), see (7),
    3. takes z^n ← Σ_m w_nm z^m - 2 β η_t (z^n - s), (6).

    `form` = "printed" is that. "mean", the default, is what works in practice: ℓ + λ mean |s - z|² with z after the
    consensus step, and z ← z - γ (z - s); there λ = β Q / (N M_n) and γ = 2 β η_t are fields of their own, since
    printed scaling hardly moves z (γ of 2e-4). `start`: z begins as the agent's own soft-decision when a point is
    first met, or uniform. `between`: in iterations without communication a model is pulled towards the z agreed on
    lately; "step" is the paper's reading (as in what it cites for τ), steps 2 and 3 with W = I. A learner without
    gradients keeps s from the start of the round, and is fitted anew at its end on its labels and on z for λ M_n at
    most of the points it has met. Deviations of "mean" and "pull": above. In `warm_up` rounds nobody communicates.

    For targets of one real value s and z are predictions, without softmax and simplex; in the form "mean" only.
    """

    name = "d_distillation"
    paper = "Bistritz, Mann, Bambos, NeurIPS 2020"
    exchanges = "soft-decisions on public data, to and from neighbours"
    needs = Ability.PREDICT
    needs_public = True
    topology = "ring"

    local_steps: int = setting(50, "iterations per round, equal for all agents", at_least=0)
    batch_size: int = setting(32, "private samples per iteration", at_least=1)
    lr: float | None = setting(None, "η, initial step size of all agents; unset: each owner's own", above=0)
    schedule: str = setting("constant", "how η_t continues; summable: as Theorem 3 needs", choices=parts.SCHEDULES)
    decay: float = setting(0.95, "factor per round of the schedule 'decayed'", above=0, at_most=1)
    every: int = setting(1, "τ, iterations between communications, counted over all rounds", at_least=1)
    between: str = setting(
        "pull", "iterations between communications: pull towards z, step without neighbours, or nothing",
        choices=("pull", "step", "nothing"),
    )  # fmt: skip
    network_batch: int = setting(32, "b, public points per communication", at_least=1)
    form: str = setting("mean", "scaling of (5) and (6); see the page of the protocol", choices=("mean", "printed"))
    weight: float = setting(2.0, "λ of the form 'mean', the pull of a model towards z", at_least=0)
    z_step: float = setting(0.25, "γ of the form 'mean', the pull of z towards the model", at_least=0, at_most=1)
    beta: float = setting(1.0, "β of the form 'printed'; it needs lr", above=0)
    start: str = setting("own", "initial z", choices=("own", "uniform"))
    warm_up: int = setting(0, "rounds of local training before the first communication", at_least=0)

    async def begin(self, me: Agent) -> None:
        """No point has been met yet; a learner without gradients is fitted."""
        me.state["z"] = np.full((len(me.public), me.shard.classes), 1 / me.shard.classes, dtype=np.float32)
        me.state["met"] = np.zeros(len(me.public), dtype=bool)
        me.state["recent"] = np.zeros(0, dtype=np.int64)  # points of the last τ communications, newest last
        if Ability.GRADIENTS not in me.learner.abilities:
            me.learner.fit(me.shard.x, me.shard.targets)

    async def round(self, me: Agent, t: int) -> None:
        """Iterations, some of which communicate."""
        due = parts.communication_steps(t, self.local_steps, self.every) if t >= self.warm_up else range(0)
        # The iterations that have a batch S_t
        steps = range(self.local_steps) if self.between == "step" and t >= self.warm_up else due
        points = me.public.batches(t, self.network_batch, len(steps))
        if Ability.GRADIENTS not in me.learner.abilities:
            return await self._round_by_fitting(me, t, due, zip(steps, points, strict=True))
        own, pull = self._weights(me)
        draw = me.rng("between")
        for i, (x, y) in enumerate(me.shard.batches(t, self.batch_size, steps=self.local_steps)):
            factor = self._lr_factor(t, i)
            parts.set_lr(me, factor, self.lr)
            loss = own * me.learner.loss(me.learner(x), y)
            if i in steps:
                ids, u = next(points)
                s = decision(me.learner(u))
                z = await self._agree(me, ids, s.detach().numpy(), factor, i in due)
            elif len(recent := me.state["recent"]) and self.between == "pull" and t >= self.warm_up:
                ids, u = me.public.batch(draw.permutation(recent)[: self.network_batch])
                s, z = decision(me.learner(u)), me.state["z"][ids]
            else:
                z = None
            if z is not None:
                loss = loss + pull * (s - torch.from_numpy(z)).square().sum(dim=1).mean()
            me.learner.descend(loss)  # (5)

    async def _round_by_fitting(self, me: Agent, t: int, due: range, points: Iterable[Any]) -> None:
        s = on_simplex(me.learner.predict(me.public.x))
        for i, (ids, _) in points:
            await self._agree(me, ids, s[ids], self._lr_factor(t, i), i in due)
        own, pull = self._weights(me)
        met = np.flatnonzero(me.state["met"])
        # As many points beside the labels as their terms weigh in (5): pull / own to one.
        met = np.sort(me.rng("refit").permutation(met)[: round(pull / own * len(me.shard))])
        if len(met) and me.topology.sources(me.name):
            x = np.concatenate([me.shard.x, me.public.x[met]])
            me.learner.fit(x, np.concatenate([me.shard.targets, me.state["z"][met]]))

    async def _agree(self, me: Agent, ids: np.ndarray, s: np.ndarray, factor: float, due: bool) -> np.ndarray | None:
        """Steps 1 (if `due`) and 3 on some points; returns the z of step 2, or None where nobody was heard."""
        z, met = me.state["z"], me.state["met"]
        s = np.where(np.isfinite(s), s, z[ids])  # a model that has diverged passes on what others say
        if self.start == "own":
            z[ids[~met[ids]]] = s[~met[ids]]
        met[ids] = True
        mixed: np.ndarray = z[ids]
        mine, heard = mixed, {}
        if due:
            heard = accepted_probabilities(me, await me.exchange(z=mine, expect={"z": mine}), "z")
            mixed = me.mix(mine, heard)  # Σ_m w_nm z^m
        if self.form == "printed":
            used, step = mine, 2 * self.beta * (self.lr or 0.0) * factor
        else:
            used, step = mixed, self.z_step
        # (6): z ← Σ_m w_nm z^m - 2 β η_t (z^n - s); in the form "mean", with γ and z after the consensus step
        z[ids] = on_simplex(mixed - step * (used - s))
        if heard:
            off = mixed - mine if me.classes > 1 else mixed.astype(np.float64) - mine  # real values may be huge
            me.measure(me.name, consensus_error=float(np.square(off).sum(axis=1).mean()))
        if not heard and due and self.form == "mean":
            return None
        before = me.state["recent"]
        recent = np.concatenate([before[~np.isin(before, ids)], ids])
        me.state["recent"] = recent[-self.every * self.network_batch :]
        return used

    def _weights(self, me: Agent) -> tuple[float, float]:
        """(5): M_n ℓ + (β Q / N) mean |s - z|², or ℓ + λ mean |s - z|²."""
        if self.form == "printed":
            return float(len(me.shard)), self.beta * len(me.public) / len(me.roster)
        return 1.0, self.weight

    def _lr_factor(self, t: int, i: int) -> float:
        """η_t / η_0 in iteration i of round t."""
        return parts.lr_factor(self.schedule, self.decay, t, t * self.local_steps + i)

    def message_bytes(self, classes: int, public: int) -> int:
        """z of a batch of public points."""
        return 4 * min(self.network_batch, public) * classes

    def check(self, agents: Sequence[Agent]) -> None:
        """The agents must be connected and have classes; the form "printed" has more conditions."""
        agents[0].topology.check_mixing()
        if not parts.are_real_values(agents):
            parts.check_classes(agents, self.name)
        elif (self.form, self.start) != ("mean", "own"):
            name, fitting = ("form", "mean") if self.form != "mean" else ("start", "own")
            raise RecipeError(
                f"d_distillation.{name} must be '{fitting}' for real values, which are no probabilities.",
                f"'{getattr(self, name)}'",
                "Remove it.",
            )
        if self.form == "printed":
            self._check_printed(agents)

    def _check_printed(self, agents: Sequence[Agent]) -> None:
        """A common step size η, plain gradient steps, and 2 β η <= w_nn, which keeps z on the simplex in (6)."""
        if self.lr is None:
            raise LearnerError("The form 'printed' needs lr.", "none", "Set lr, the step size η of all agents.")
        for agent in agents:
            diagonal = 1 - sum(agent.topology.weights(agent.name).values())
            if 2 * self.beta * self.lr > diagonal + 1e-9:
                raise LearnerError(
                    "(6) keeps soft-decisions on the simplex only while 2 beta lr is at most w_nn.",
                    f"2 x {self.beta:g} x {self.lr:g} at agent '{agent.name}', whose w_nn is {diagonal:.3g}",
                    "Lower beta or lr, or use a graph with fewer links.",
                )
            optimiser = getattr(agent.learner, "optimiser", None)
            momentum = isinstance(optimiser, torch.optim.SGD) and bool(optimiser.defaults["momentum"])
            if optimiser is not None and (momentum or not isinstance(optimiser, torch.optim.SGD)):
                raise LearnerError(
                    "The form 'printed' takes plain gradient steps (5).",
                    f"agent '{agent.name}' steps by {type(optimiser).__name__}{' with momentum' if momentum else ''}",
                    "Give it optimiser = \"sgd\" without momentum, or use the form 'mean'.",
                )

    def alone(self) -> SiloSGD:
        """The same steps without one another."""
        return self.settings_for(SiloSGD)


def decision(f: torch.Tensor) -> torch.Tensor:
    """s = ψ(f); of one output, which is a real value, itself."""
    return f if f.shape[1] == 1 else torch.softmax(f, dim=1)


def accepted_probabilities(me: Agent, heard: Mapping[str, Message], array: str) -> dict[str, np.ndarray]:
    """An array of every message, by sender; a message with other rows than probabilities is refused by name.

    Of one column, which is of real values, anything finite.
    """
    accepted = {}
    for sender, message in heard.items():
        p = message[array]
        if p.shape[1] == 1 and np.isfinite(p).all():
            accepted[sender] = p
            continue
        with np.errstate(over="ignore"):
            sums = p.sum(axis=1)
        if p.min(initial=0) >= -_TOLERANCE and np.abs(sums - 1).max(initial=0) <= _TOLERANCE:
            accepted[sender] = p
            continue
        found = f"sums from {sums.min():.3g} to {sums.max():.3g}, smallest entry {p.min():.3g}"
        me.refuse(sender, MessageError(f"'{array}' must be probabilities.", found, "Look at what the sender does."))
    return accepted


def on_simplex(p: np.ndarray) -> np.ndarray:
    """Rows that are probabilities: negative entries become 0, and each row is divided by its sum.

    A row without a positive entry, as a regressor may predict, becomes uniform. Real values, one each, stay.
    """
    if p.shape[1] == 1:
        return p
    p = np.maximum(p, 0)
    sums = p.sum(axis=1, keepdims=True)
    answer: np.ndarray = np.where(sums > 0, p, 1) / np.where(sums > 0, sums, p.shape[1])
    return answer.astype(p.dtype, copy=False)
