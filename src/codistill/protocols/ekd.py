"""EKD: the models of all alternating chains, summed with alternating signs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from codistill.data.validation import digest
from codistill.protocol import Ability, Agent, Message, MessageError, Protocol, setting
from codistill.protocols import parts
from codistill.protocols.alone import Alone

_INPUTS = 4  # sets of inputs (test set, own samples, ...) whose sums are cached


@dataclass(frozen=True, kw_only=True)
class EKD(Protocol):
    """Afonin, Karimireddy. Towards Model Agnostic Federated Learning Using Knowledge Distillation.
    ICLR 2022. Section 5.2, eq. (9), and Appendix G, eq. (32): ensembled knowledge distillation.

    M chains of AKD run at once, one from each agent; g_t^i is the model of chain i after t distillations.
    Every agent keeps all of them and predicts
      f_t(x) = Σ_{s<t} (-1)^s Σ_i g_s^i(x) + h (-1)^t Σ_i g_t^i(x),
    h = 1 as printed, h = 1/2 with `half` (the default): plain partial sums oscillate around the limit, and half
    of the last term removes most of the oscillation.

    Deviations: the sign is (-1)^t with t from 0, as in (9); the text below it says the opposite. For two
    agents with equal kernels f_t tends to the centralised solution. For M > 2 agents eq. (32) does not:
    see `backfitting`.

    `single` also fits the agent's own model to f_t, on its own samples and on public ones if there are
    any, and predicts with that model instead: one model in place of M t.
    """

    name = "ekd"
    paper = "Afonin & Karimireddy, ICLR 2022, sec. 5.2"
    exchanges = "models, between all pairs of agents"
    needs = Ability.PREDICT | Ability.PORTABLE
    topology = "complete"
    predicts_with = ("ensemble",)

    half: bool = setting(True, "halve the newest term of the sum")
    single: bool = setting(False, "predict with one own model that is fitted to the ensemble in every round")

    async def begin(self, me: Agent) -> None:
        """ŷ_0 = y, distilled 0 times."""
        me.state["targets"], me.state["age"] = me.shard.targets.copy(), 0

    async def round(self, me: Agent, t: int) -> None:
        """Train on ŷ_t, share the model with all, go on with the labels of the agent before."""
        if len(me.present) == 1:
            if me.roster == me.present:  # nobody to learn from, ever
                me.learner.fit(me.shard.x, me.shard.targets)
            return
        mine = self._train(me)
        heard = {me.name: mine, **await me.exchange(mine)}
        models = {name: heard[name] for name in me.present if name in heard and _has_age(me, name, heard[name], t)}
        opened = {name: me.open_model(name, message) for name, message in models.items()}
        term = [(1 - 2 * (models[name]["age"] % 2), models[name], name) for name, g in opened.items() if g is not None]
        if term:
            Ensemble(me).append(term)
        before, _ = parts.ring_neighbours(me)
        g = opened.get(before)
        # A chain whose model was lost ends here: to train on its labels twice would count a term twice.
        me.state["age"] = -1 if g is None else int(models[before]["age"]) + 1
        if g is not None:
            me.state["targets"] = parts.as_targets(me, g.predict(me.shard.x))
        if self.single and len(Ensemble(me)):
            self._distil(me)

    def _train(self, me: Agent) -> Message:
        if me.state["age"] < 0:
            return Message.of(ended=True)
        me.learner.fit(me.shard.x, me.state["targets"])
        model = me.learner.export()
        return Message(model.arrays, {**model.plain, "age": me.state["age"]})

    def _distil(self, me: Agent) -> None:
        x = me.shard.x if me.public is None else np.concatenate([me.shard.x, me.public.x])
        me.learner.fit(x, parts.as_targets(me, self._ensemble(me, x)))

    def _ensemble(self, me: Agent, x: np.ndarray) -> np.ndarray:
        return Ensemble(me).predict(x, last=0.5 if self.half else 1.0)

    def predict(self, me: Agent, x: np.ndarray) -> np.ndarray:
        """f_t(x); with `single`, or before the first models have arrived, the agent's own model."""
        if self.single or not len(Ensemble(me)):
            return super().predict(me, x)
        return self._ensemble(me, x)

    def alone(self) -> Alone:
        """Fitting on the agent's own labels, round after round."""
        return Alone(refit=True)


def _has_age(me: Agent, sender: str, message: Message, t: int) -> bool:
    """Whether a message holds a model that was distilled at most t times; anything else is refused by name."""
    age = message.get("age")
    if type(age) is int and 0 <= age <= t:
        return True
    if "ended" not in message:
        found = f"{age!r}"[:80]
        me.refuse(
            sender, MessageError(f"A model's age must be a number from 0 to {t}.", found, "Use the same protocol.")
        )
    return False


class Ensemble:
    """A series of terms, each a weighted sum of models: f(x) = Σ_t Σ_i w_ti g_ti(x).

    The models are kept in the agent's state as the bytes they were sent in, so a checkpoint holds them. The
    sum over earlier terms is cached for inputs that come again: a growing ensemble is evaluated in
    every round at the cost of its newest term. Terms are added one by one from the left, so a cached
    sum equals a fresh one to the bit.
    """

    def __init__(self, me: Agent) -> None:
        self._me = me
        self._terms: list[list[list[Any]]] = me.state.setdefault("ensemble", [])
        self._known: dict[str, tuple[int, np.ndarray, np.ndarray]] = me.memo.setdefault("ensemble", {})

    def __len__(self) -> int:
        return len(self._terms)

    def append(self, term: Sequence[tuple[float, Message, str]]) -> None:
        """Add the next term: valid models with their weights and senders."""
        self._terms.append([[float(weight), message.encoded, sender] for weight, message, sender in term])

    def predict(self, x: np.ndarray, *, last: float = 1.0) -> np.ndarray:
        """The sum of all terms at x, the newest one scaled by `last`."""
        key, newest = digest(x), len(self._terms) - 1
        index, before, term = self._known.pop(key, (0, np.zeros((len(x), self._me.shard.classes)), None))
        if term is None:
            term = self._answer(0, x)
        while index < newest:
            before, index = before + term, index + 1
            term = self._answer(index, x)
        self._known[key] = index, before, term
        while len(self._known) > _INPUTS:
            del self._known[next(iter(self._known))]
        return before + last * term

    def _answer(self, index: int, x: np.ndarray) -> np.ndarray:
        total = np.zeros((len(x), self._me.shard.classes))
        for weight, data, sender in self._terms[index]:
            total += weight * self._me.predict_with(sender, data, x)
        return total
