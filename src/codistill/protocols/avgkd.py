"""AvgKD and PKD: models travel, and everyone learns from the average of labels and the others' predictions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from codistill.learners.ability import Ability
from codistill.protocol import Agent, Protocol, setting
from codistill.protocols.akd import as_targets
from codistill.protocols.alone import Alone


@dataclass(frozen=True, kw_only=True)
class AvgKD(Protocol):
    """Afonin, Karimireddy. Towards Model Agnostic Federated Learning Using Knowledge Distillation.
    ICLR 2022. Section 5.1 and Appendix G, for M agents.

    Starting from ŷ_0^i = y^i, in each round t:
      a. agent i trains on (X^i, ŷ_t^i) to obtain g_t^i;
      b. it receives the models g_t^j of all others and sets ŷ_{t+1}^i = (y^i + Σ_{j≠i} g_t^j(X^i)) / M.

    `own_weight` replaces the printed weight 1/M of the own labels, which shrinks as M grows: 0.5 gives
    (y + mean of the others) / 2, the same for M = 2. M counts the models that arrived.
    """

    name = "avgkd"
    paper = "Afonin & Karimireddy, ICLR 2022, sec. 5.1"
    exchanges = "models, between all pairs of agents"
    needs = Ability.PREDICT | Ability.PORTABLE
    topology = "complete"

    own_weight: float | None = setting(None, "weight of the own labels; absent: 1/M", at_least=0, at_most=1)

    async def begin(self, me: Agent) -> None:
        """ŷ_0 = y."""
        me.state["targets"] = me.shard.targets.copy()

    async def round(self, me: Agent, t: int) -> None:
        """Train on ŷ_t, exchange models, average their predictions into ŷ_{t+1}."""
        me.learner.fit(me.shard.x, me.state["targets"])  # a.
        heard = await me.exchange(me.learner.export())
        models = [me.open_model(sender, message) for sender, message in heard.items()]
        others = [g.predict(me.shard.x) for g in models if g is not None]
        if others:
            own = 1 / (1 + len(others)) if self.own_weight is None else self.own_weight
            # b.  ŷ_{t+1} = w y + (1 - w) mean_j g_t^j(X), with w = 1/M as printed
            average = own * self.anchor(me) + (1 - own) * np.mean(others, axis=0, dtype=np.float64)
            me.state["targets"] = as_targets(me, average)

    def anchor(self, me: Agent) -> np.ndarray:
        """The own part of the average: the labels."""
        return me.shard.targets.astype(np.float64)

    def alone(self) -> Alone:
        """Fitting on the own labels, round after round."""
        return Alone(refit=True)


@dataclass(frozen=True, kw_only=True)
class PKD(AvgKD):
    """Parallel knowledge distillation: Afonin, Karimireddy. ICLR 2022. Appendices E and G.

    AvgKD with the current labels in place of the true ones: ŷ_{t+1}^i = (ŷ_t^i + Σ_{j≠i} g_t^j(X^i)) / M.
    The true labels enter once, at t = 0, and are forgotten step by step.

    Deviations: eqs. (22) and (23) average predictions where the algorithm averages labels; this is the
    algorithm.
    """

    name = "pkd"
    paper = "Afonin & Karimireddy, ICLR 2022, app. E"

    def anchor(self, me: Agent) -> np.ndarray:
        """The own part of the average: what it was trained on in this round."""
        current: np.ndarray = me.state["targets"]
        return current
