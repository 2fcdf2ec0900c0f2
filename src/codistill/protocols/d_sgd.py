"""D-SGD: weights, mixed among neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from codistill.protocol import Ability, Agent, Message, Protocol, setting
from codistill.protocols import parts
from codistill.protocols.silo_sgd import SiloSGD


@dataclass(frozen=True, kw_only=True)
class DSGD(Protocol):
    """Distributed SGD, as in Bistritz, Mann, Bambos. Distributed Distillation for On-Device Learning. NeurIPS 2020.
    Section 3.1; Jiang et al. Collaborative Deep Learning in Fixed Topology Networks. NeurIPS 2017.

    After every `every` gradient steps an agent n sends its weights θ^n to its neighbours and takes the mean of its own
    and theirs by the communication matrix W: θ^n ← Σ_m w_nm θ^m. A neighbour that is missing leaves its weight to
    the agent's own. All agents need one architecture, and start from the same weights if `synchronise`.

    In a topology of separate groups each group needs one architecture, and learns separately.
    """

    name = "d_sgd"
    paper = "Jiang et al., NeurIPS 2017; Bistritz, Mann, Bambos, NeurIPS 2020, sec. 3.1"
    exchanges = "weights, to and from neighbours"
    needs = Ability.WEIGHTS | Ability.GRADIENTS
    topology = "ring"

    local_steps: int = setting(50, "iterations per round, equal for all agents", at_least=0)
    batch_size: int = setting(32, "private samples per iteration", at_least=1)
    lr: float | None = setting(None, "η, initial step size of all agents; unset: each owner's own", above=0)
    schedule: str = setting("constant", "how η_t continues; summable: as Theorem 3 needs", choices=parts.SCHEDULES)
    decay: float = setting(0.95, "factor per round of the schedule 'decayed'", above=0, at_most=1)
    every: int = setting(1, "τ, iterations between communications, counted over all rounds", at_least=1)
    synchronise: bool = setting(True, "start all agents from the same initial weights")

    async def begin(self, me: Agent) -> None:
        """Equal initial weights, if `synchronise`."""
        if self.synchronise:
            parts.same_initial_weights(me)

    async def round(self, me: Agent, t: int) -> None:
        """Steps on the private shard, mixed with the neighbours' weights."""
        mixing = parts.communication_steps(t, self.local_steps, self.every, first=1)
        for i, (x, y) in enumerate(me.shard.batches(t, self.batch_size, steps=self.local_steps)):
            parts.set_lr(me, parts.lr_factor(self.schedule, self.decay, t, t * self.local_steps + i), self.lr)
            me.learner.descend(me.learner.loss(me.learner(x), y))
            if i + 1 not in mixing:
                continue
            theta = me.learner.weights()
            heard = await me.exchange(Message(theta), expect=theta)
            if heard:
                # θ^n ← Σ_m w_nm θ^m
                me.learner.load({k: me.mix(own, {m: heard[m][k] for m in heard}) for k, own in theta.items()})

    def check(self, agents: Sequence[Agent]) -> None:
        """Agents that mix must have the same weights by name and shape, and be connected."""
        by_name = {agent.name: agent for agent in agents}
        for names in agents[0].topology.groups:
            parts.check_equal_weights([by_name[name] for name in names if name in by_name], self.name)
        agents[0].topology.check_mixing()

    def alone(self) -> SiloSGD:
        """The same steps without one another."""
        return self.settings_for(SiloSGD)
