"""D-SGD: weights, mixed among neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from codistill.learners.ability import Ability
from codistill.protocol import Agent, Message, setting
from codistill.protocols.fedavg import check_equal_weights
from codistill.protocols.talking import Talking


@dataclass(frozen=True, kw_only=True)
class DSGD(Talking):
    """Distributed SGD, as in Bistritz, Mann, Bambos. Distributed Distillation for On-Device Learning. NeurIPS 2020.
    Section 3.1; Jiang et al. Collaborative Deep Learning in Fixed Topology Networks. NeurIPS 2017.

    After every `every` gradient steps a device sends its weights to its neighbours and takes the mean of its own
    and theirs by the communication matrix: θ^n ← Σ_m w_nm θ^m. A neighbour that is missing leaves its weight to
    the device's own. All devices need one architecture, and start from the same weights unless told otherwise.

    On islands (a topology of separate groups) each group needs one architecture, and learns by itself.
    """

    name = "d_sgd"
    paper = "Jiang et al., NeurIPS 2017; Bistritz, Mann, Bambos, NeurIPS 2020, sec. 3.1"
    exchanges = "weights, to and from neighbours"
    needs = Ability.WEIGHTS | Ability.GRADIENTS

    synchronise: bool = setting(True, "start all devices from the same initial weights")

    async def begin(self, me: Agent) -> None:
        """Equal initial weights need no message: they derive from the common seed."""
        if self.synchronise and len(me.roster) > 1:
            me.seed_alike("initial weights")
            me.learner.reset()

    async def round(self, me: Agent, t: int) -> None:
        """Steps on the private shard, mixed with the neighbours' weights."""
        ends = self._due(t, 1)
        for i, (x, y) in enumerate(me.shard.batches(t, self.batch_size, steps=self.local_steps)):
            self._pace(me, t, i)
            me.learner.descend(me.learner.loss(me.learner(x), y))
            if i + 1 in ends:
                weights = me.learner.weights()
                heard = await me.exchange(Message(weights), expect=weights)
                if heard:
                    # θ^n ← Σ_m w_nm θ^m
                    me.learner.load(
                        {
                            k: me.mix(w, {name: message[k] for name, message in heard.items()})
                            for k, w in weights.items()
                        }
                    )

    def check(self, agents: Sequence[Agent]) -> None:
        """Devices that mix must have the same weights by name and shape, and be joined."""
        by_name = {agent.name: agent for agent in agents}
        for names in agents[0].topology.groups:
            check_equal_weights([by_name[name] for name in names if name in by_name], self.name)
        agents[0].topology.check_mixing()
