"""FedBN: federated averaging of all weights but those of batch norm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from codistill.protocol import Ability, Agent, Hub, Message, Protocol, setting
from codistill.protocols import parts


@dataclass(frozen=True, kw_only=True)
class FedBN(Protocol):
    """Li, Jiang, Zhang, Kamp, Dou. FedBN: Federated Learning on Non-IID Features via Local Batch Normalization. ICLR
    2021. Algorithm 1.

    As FedAvg, but what belongs to batch norm stays with its agent: scale and shift, running mean and variance, and the
    counter of batches. So every agent has a model of its own, for features that are distributed differently (another
    scanner, another hand). Of a model without batch norm it is FedAvg.

    Deviations: n_k weights the mean, where the paper's is of equal weights. `cap`, `aggregate` and when an agent gets
    the mean: as in our FedAvg.
    """

    name = "fedbn"
    paper = "Li et al., ICLR 2021"
    exchanges = "weights but those of batch norm, to and from the hub"
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
        """Train, send all of w_k but batch norm, take over the mean of these."""
        parts.set_lr(me, self.lr_decay**t, None)
        parts.train_locally(me, me.shard.batches(t, self.batch_size, self.local_epochs, self.local_steps))
        body = self.common(me)
        mean = await me.ask_hub(Message(body, {"samples": len(me.shard)}), expect=body)
        self.take_over(me, mean, t)

    def common(self, me: Agent) -> dict[str, np.ndarray]:
        """All weights but those of batch norm."""
        return parts.shared_weights(me, "except batch norm")

    async def hub(self, me: Hub, t: int) -> None:
        """Average the weights that arrived; if agents joined with different architectures, each separately."""
        heard = parts.accepted_weights(me, await me.gather(), "except batch norm")
        # w^(l) ← Σ_k n_k / n · w_k^(l), for each layer l that is not batch norm
        means = parts.group_means(me, heard, self.aggregate, self.trim, self.cap, "except batch norm")
        await me.scatter(parts.to_groups(me, means, t))

    def check(self, agents: Sequence[Agent]) -> None:
        """All agents must have the same weights by name and shape."""
        parts.check_equal_weights(agents, self.name)
