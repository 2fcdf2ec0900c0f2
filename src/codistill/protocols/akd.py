"""AKD: a model goes around the ring of agents, and each learns from the predictions of the one before."""

from __future__ import annotations

from dataclasses import dataclass

from codistill.protocol import Ability, Agent, Protocol, setting
from codistill.protocols import parts
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
        before, after = parts.ring_neighbours(me)
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
            me.state["targets"] = parts.as_targets(me, g.predict(me.shard.x))  # ŷ_{t+1} = g_t(X)

    def alone(self) -> Alone:
        """Fitting on the agent's own labels, round after round."""
        return Alone(refit=True)
