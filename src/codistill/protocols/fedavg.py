"""FedAvg: federated averaging of weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from codistill.protocol import Ability, Agent, Hub, Message, Protocol, setting
from codistill.protocols import parts


@dataclass(frozen=True, kw_only=True)
class FedAvg(Protocol):
    """McMahan et al. Communication-Efficient Learning of Deep Networks from Decentralized Data. AISTATS 2017.

    In each round every agent trains the common model on its shard and sends the weights w_k; the hub
    returns their mean, weighted by the number of samples n_k. All agents need the same architecture.

    Deviations: n_k counts for at most `cap` times the median of all. `aggregate` = "median" or "trimmed" takes, of each
    weight, the median or trimmed mean (Yin et al., ICML 2018) instead, in which every agent counts alike. Agents get
    the mean at the end of a round; where only a share takes part in each, one that missed it gets it before it trains.
    """

    name = "fedavg"
    paper = "McMahan et al., AISTATS 2017"
    exchanges = "weights, to and from the hub"
    needs = Ability.WEIGHTS | Ability.GRADIENTS
    take_over = parts.take_over

    local_epochs: int = setting(1, "epochs of local training per round", at_least=0)
    local_steps: int | None = setting(None, "gradient steps per round, instead of epochs", at_least=0)
    batch_size: int = setting(32, "samples per gradient step", at_least=1)
    lr_decay: float = setting(1.0, "factor on the learning rate per round", above=0, at_most=1)
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
        """Train, send w_k with n_k, take over the mean."""
        parts.set_lr(me, self.lr_decay**t, None)
        parts.train_locally(me, me.shard.batches(t, self.batch_size, self.local_epochs, self.local_steps))
        weights = me.learner.weights()
        mean = await me.ask_hub(Message(weights, {"samples": len(me.shard)}), expect=weights)
        self.take_over(me, mean, t)

    async def hub(self, me: Hub, t: int) -> None:
        """Average the weights that arrived; if agents joined with different architectures, each separately."""
        heard = parts.accepted_weights(me, await me.gather())
        means = [(names, self._mean(me, w)) for names, w in parts.architectures(me, heard)]
        parts.watch_growth(me, means)
        await me.scatter(parts.to_groups(me, means, t))

    def _mean(self, me: Hub, w: dict[str, Message]) -> dict[str, np.ndarray]:
        if self.aggregate != "mean":
            return parts.robust_weights(w, self.aggregate, self.trim, me)
        n_k = parts.capped_samples(w, self.cap)
        n = sum(n_k.values())
        # w ← Σ_k n_k / n · w_k
        return parts.weighted_sum({k: n_k[k] / n for k in w}, w)

    def check(self, agents: Sequence[Agent]) -> None:
        """All agents must have the same weights by name and shape."""
        parts.check_equal_weights(agents, self.name)
