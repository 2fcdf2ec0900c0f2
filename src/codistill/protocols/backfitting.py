"""Backfitting: agents in turn fit what the others' models leave unexplained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from codistill.protocol import Ability, Agent, LearnerError, Message, Protocol, setting
from codistill.protocols.alone import Alone


@dataclass(frozen=True, kw_only=True)
class Backfitting(Protocol):
    """What EKD is after, for any number of agents: the centralised solution from models that travel.

    In each round, agent after agent, agent i
      a. trains on (X^i, y^i - Σ_{j≠i} f_j(X^i)) to obtain its new f_i, with the newest f_j of all others;
      b. sends f_i to all others.
    Every agent predicts Σ_j f_j(x). This is the Gauss-Seidel iteration for the system
    (c I + K_ii) b_i + Σ_{j≠i} K_ij b_j = y_i, so for equal kernels it converges to the centralised
    solution at every x; eq. (32) of Afonin & Karimireddy (ICLR 2022), meant for that, does not for M > 2.

    `simultaneous` lets all agents train at once (Jacobi); that needs damping: the labels move only by
    `damping` towards the residual, 1.8/M unless given. Exact for kernels; it does not help neural networks.
    """

    name = "backfitting"
    paper = "in place of Afonin & Karimireddy, ICLR 2022, eq. (32)"
    exchanges = "models, between all pairs of agents"
    needs = Ability.PREDICT | Ability.PORTABLE
    topology = "complete"
    predicts_with = ("models",)

    simultaneous: bool = setting(False, "all agents at once instead of one after another")
    damping: float | None = setting(
        None, "step of the labels towards the residual; unset: 1, or 1.8/M if simultaneous", above=0, at_most=1
    )

    async def begin(self, me: Agent) -> None:
        """f_j = 0 for all j."""
        me.state["models"], me.state["targets"] = {}, None

    async def round(self, me: Agent, t: int) -> None:
        """Wait for the agents before, fit the residual, send the model to all."""
        place = me.present.index(me.name)
        earlier = () if self.simultaneous else me.present[:place]
        for name in earlier:
            await self._receive_model(me, name)
        mine = self._train(me)
        for name in me.neighbours:
            await me.send(name, mine)
        for name in me.present:
            if name not in (*earlier, me.name):
                await self._receive_model(me, name)

    def _train(self, me: Agent) -> Message:
        # a.  y - Σ_{j≠i} f_j(X)
        wanted = me.shard.targets - self._sum(me, me.shard.x, [name for name in me.roster if name != me.name])
        if me.state["targets"] is not None:
            wanted = (1 - self._step(me)) * me.state["targets"] + self._step(me) * wanted
        me.state["targets"] = wanted
        me.learner.fit(me.shard.x, wanted)
        model: Message = me.learner.export()
        me.state["models"][me.name] = model.encoded
        return model

    async def _receive_model(self, me: Agent, name: str) -> None:
        message = await me.receive(name)
        if message is not None and me.open_model(name, message) is not None:
            me.state["models"][name] = message.encoded

    def _step(self, me: Agent) -> float:
        if self.damping is not None:
            return self.damping
        return min(1.0, 1.8 / len(me.roster)) if self.simultaneous else 1.0

    def _sum(self, me: Agent, x: np.ndarray, names: Sequence[str]) -> np.ndarray:
        total = np.zeros((len(x), me.shard.classes))
        for name in names:
            if name in me.state["models"]:
                total += me.predict_with(name, me.state["models"][name], x)
        return total

    def predict(self, me: Agent, x: np.ndarray) -> np.ndarray:
        """Σ_j f_j(x)."""
        return self._sum(me, x, me.roster) if me.state.get("models") else super().predict(me, x)

    def check(self, agents: Sequence[Agent]) -> None:
        """A residual is negative as often as positive, which a classifier cannot be fitted to."""
        for agent in agents:
            if agent.learner.probabilistic:
                raise LearnerError(
                    "backfitting fits residuals, so every model must be fitted to real values.",
                    f"agent '{agent.name}' has {agent.learner.describe()}, which predicts probabilities",
                    'Use a kernel or another regressor; of a torch module, loss = "squared".',
                )

    def alone(self) -> Alone:
        """Fitting on the agent's own labels, round after round."""
        return Alone(refit=True)
