"""AvgKD: models travel, and every agent learns from the average of its labels and the others' predictions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from codistill.protocol import Ability, Agent, Protocol, setting
from codistill.protocols import parts
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

    own_weight: float | None = setting(None, "weight of the agent's own labels; unset: 1/M", at_least=0, at_most=1)

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
            w = 1 / (1 + len(others)) if self.own_weight is None else self.own_weight
            # b.  ŷ_{t+1} = w y + (1 - w) mean_j g_t^j(X), with w = 1/M as printed
            average = w * me.shard.targets.astype(np.float64) + (1 - w) * np.mean(others, axis=0, dtype=np.float64)
            me.state["targets"] = parts.as_targets(me, average)

    def alone(self) -> Alone:
        """Fitting on the agent's own labels, round after round."""
        return Alone(refit=True)
