"""FedMAX: federated averaging with a maximum-entropy term in local training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from codistill.protocol import Ability, Agent, Hub, Message, Protocol, setting
from codistill.protocols import parts


@dataclass(frozen=True, kw_only=True)
class FedMAX(Protocol):
    """Chen, Bhardwaj, Marculescu. FedMAX: Mitigating Activation Divergence for Accurate and Communication-Efficient
    Federated Learning. ECML PKDD 2020; in the form of Li, Chen, Lu. FedDKD. Algorithm 3.

    As FedAvg, but the loss of local training is F(w; b) + β 1/B Σ_i KL(a_i ‖ U): a_i is the softmax of the features of
    sample i, the input of the head, and U the uniform distribution. With β = 0 it is FedAvg.

    Deviations: as in our FedAvg (`cap`, `aggregate`, when an agent gets the mean).
    """

    name = "fedmax"
    paper = "Chen, Bhardwaj, Marculescu, ECML PKDD 2020"
    exchanges = "weights, to and from the hub"
    needs = Ability.WEIGHTS | Ability.GRADIENTS | Ability.FEATURES
    take_over = parts.take_over

    local_epochs: int = setting(1, "epochs of local training per round", at_least=0)
    local_steps: int | None = setting(None, "gradient steps per round, instead of epochs", at_least=0)
    batch_size: int = setting(32, "samples per gradient step", at_least=1)
    lr_decay: float = setting(1.0, "factor on the learning rate per round", above=0, at_most=1)
    activation_weight: float = setting(10.0, "β, of the divergence of activations from uniform ones", at_least=0)
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
        """Train with activations of high entropy, send w_k with n_k, take over the mean."""
        parts.set_lr(me, self.lr_decay**t, None)
        for x, y in me.shard.batches(t, self.batch_size, self.local_epochs, self.local_steps):
            f, a = me.learner.with_features(x)
            loss = me.learner.loss(f, y)
            if self.activation_weight and len(me.roster) > 1:  # there are activations to agree on
                loss = loss + self.activation_weight * parts.activation_divergence(a)  # F + β 1/B Σ_i KL(a_i ‖ U)
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
