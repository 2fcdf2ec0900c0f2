"""FedProx: federated averaging with a proximal term in local training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from codistill.protocol import Ability, Agent, Hub, Message, Protocol, setting
from codistill.protocols import parts


@dataclass(frozen=True, kw_only=True)
class FedProx(Protocol):
    """Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith. Federated Optimization in Heterogeneous Networks. MLSys 2020.
    Algorithm 2.

    As FedAvg, but an agent trains on h_k(w; w^t) = F_k(w) + μ/2 ‖w - w^t‖², where w^t are the weights at the start of
    its local training: those that all agents share. With μ = 0 it is FedAvg.

    Deviations: every agent takes as many steps as the others, not fewer where it is slow (γ-inexact solutions), and
    n_k weights the mean, as in FedAvg, where the paper draws agents with probability n_k / n. `cap`, `aggregate` and
    when an agent gets the mean: as in our FedAvg.
    """

    name = "fedprox"
    paper = "Li et al., MLSys 2020"
    exchanges = "weights, to and from the hub"
    needs = Ability.WEIGHTS | Ability.GRADIENTS
    take_over = parts.take_over

    local_epochs: int = setting(1, "epochs of local training per round", at_least=0)
    local_steps: int | None = setting(None, "gradient steps per round, instead of epochs", at_least=0)
    batch_size: int = setting(32, "samples per gradient step", at_least=1)
    lr_decay: float = setting(1.0, "factor on the learning rate per round", above=0, at_most=1)
    proximal_weight: float = setting(0.01, "μ, of the squared distance to the common weights", at_least=0)
    aggregate: str = setting("mean", "how the weights of all become one", choices=parts.PLAIN_KINDS)
    trim: float = setting(0.2, parts.TRIM, at_least=0, at_most=0.49)
    cap: float = setting(10.0, "largest n_k in the mean, in medians of all n_k", at_least=1)
    optimiser_state: str = setting("fresh", "its moments, where weights are replaced", choices=parts.OPTIMISER_STATES)
    synchronise: bool = setting(True, "start all agents from the same initial weights")

    async def begin(self, me: Agent) -> None:
        """Equal initial weights, if `synchronise`."""
        if self.synchronise:
            parts.same_initial_weights(me)

    async def round(self, me: Agent, t: int) -> None:
        """Train near the common weights w^t, send w_k with n_k, take over the mean."""
        parts.set_lr(me, self.lr_decay**t, None)
        start = parameters_of(me, me.learner.weights())  # w^t
        for x, y in me.shard.batches(t, self.batch_size, self.local_epochs, self.local_steps):
            loss = me.learner.loss(me.learner(x), y)
            if self.proximal_weight and len(me.roster) > 1:  # there are others to stay near to
                loss = loss + self.proximal_weight / 2 * proximal(me, start)  # F_k(w) + μ/2 ‖w - w^t‖²
            me.learner.descend(loss)
        weights = me.learner.weights()
        mean = await me.ask_hub(Message(weights, {"samples": len(me.shard)}), expect=weights)
        self.take_over(me, mean, t)

    async def hub(self, me: Hub, t: int) -> None:
        """Average the weights that arrived; if agents joined with different architectures, each separately."""
        heard = parts.accepted_weights(me, await me.gather())
        means = parts.group_means(me, heard, self.aggregate, self.trim, self.cap)  # w ← Σ_k n_k / n · w_k
        await me.scatter(parts.to_groups(me, means, t))

    def check(self, agents: Sequence[Agent]) -> None:
        """All agents must have the same weights by name and shape."""
        parts.check_equal_weights(agents, self.name)


def parameters_of(me: Agent, weights: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """Those of the weights that are trainable parameters, as tensors."""
    return {name: torch.as_tensor(weights[name]) for name in me.learner.parameters()}


def proximal(me: Agent, start: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """‖w - w^t‖² over all trainable parameters."""
    terms = [(w - start[name]).square().sum() for name, w in me.learner.parameters().items()]
    return torch.stack(terms).sum()
