"""AKD: a model goes around the ring of agents, and each learns from the predictions of the one before."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from codistill.learners.ability import Ability
from codistill.protocol import Agent, Protocol, setting
from codistill.protocols.alone import Alone


@dataclass(frozen=True, kw_only=True)
class AKD(Protocol):
    """Afonin, Karimireddy. Towards Model Agnostic Federated Learning Using Knowledge Distillation.
    ICLR 2022. Section 4 and Appendix G: alternating knowledge distillation, for M agents.

    Starting from ŷ_0 = y^1 at agent 1, for t = 0, 1, 2, ...:
      a. agent (t mod M) + 1 trains on (X, ŷ_t) to obtain g_t;
      b. the next agent on the ring receives g_t and predicts ŷ_{t+1} = g_t(X) on its own samples.

    A round of a run is one pass around the ring, M steps t: every agent trains once and sends one model.
    With `simultaneous`, M chains start at once, one from each agent with its own labels; a round is then
    one step t of all chains: again every agent trains once and sends one model.

    The labels are never seen again: with regularisation, or with different data, g_t decays to 0 (and where
    kernels differ it may grow without bound). An agent whose model did not arrive trains on the labels it
    had; the ring closes over agents that are absent.
    """

    name = "akd"
    paper = "Afonin & Karimireddy, ICLR 2022, sec. 4"
    exchanges = "models, each to the next agent on the ring"
    needs = Ability.PREDICT | Ability.PORTABLE
    topology = "complete"

    simultaneous: bool = setting(False, "M chains at once, one from each agent, instead of one from the first")

    async def begin(self, me: Agent) -> None:
        """ŷ_0 = y."""
        me.state["targets"] = me.shard.targets.copy()

    async def round(self, me: Agent, t: int) -> None:
        """Train on ŷ_t, hand the model on, predict ŷ_{t+1} with the model of the agent before."""
        before, after = neighbours_on_ring(me)
        starts = self.simultaneous or me.name == me.present[0]
        if not starts:
            await self._learn_labels(me, before)  # b.
        me.learner.fit(me.shard.x, me.state["targets"])  # a.
        if after != me.name:
            await me.send(after, me.learner.export())
            if starts:
                await self._learn_labels(me, before)  # b.

    async def _learn_labels(self, me: Agent, before: str) -> None:
        message = await me.receive(before)
        g = None if message is None else me.open_model(before, message)
        if g is not None:
            me.state["targets"] = as_targets(me, g.predict(me.shard.x))

    def alone(self) -> Alone:
        """Fitting on the own labels, round after round."""
        return Alone(refit=True)


def as_targets(me: Agent, predictions: np.ndarray) -> np.ndarray:
    """Predictions as labels for one's own model.

    A model that predicts probabilities can only be fitted to such: of a teacher's real values it learns what
    is positive, scaled to 1.
    """
    targets = np.asarray(predictions, dtype=np.float64)
    if not me.learner.probabilistic or targets.min(initial=0.0) >= 0:
        return targets
    positive = np.maximum(targets, 0) + 1e-12
    return np.asarray(positive / positive.sum(axis=1, keepdims=True))


def neighbours_on_ring(me: Agent) -> tuple[str, str]:
    """The agents before and after on the ring of those who are present; oneself if there is nobody else."""
    ring, place = me.present, me.present.index(me.name)
    return ring[place - 1], ring[(place + 1) % len(ring)]
