"""FedDistill+: federated averaging, with distillation towards mean outputs per class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from codistill.protocol import Ability, Agent, Hub, Message, Protocol, setting
from codistill.protocols import parts

MEANS, SEEN = "class means", "classes seen"  # no weight of a module has a space in its name


@dataclass(frozen=True, kw_only=True)
class FedDistill(Protocol):
    """Seo, Park, Oh, Bennis, Kim. Federated Knowledge Distillation. 2020; with shared weights, as FedDistill+ in Zhu,
    Hong, Zhou. Data-Free Knowledge Distillation for Heterogeneous Federated Learning. ICML 2021.

    FedAvg and FD at once. While it trains, an agent sums its outputs f for each class c and sends their means F_k,c
    with its weights; the hub returns the mean of weights, and F̂_c, the mean over agents that have samples of class c.
    From the next round on a sample of class c has the loss ℓ(f, y) + γ KL(ψ(F̂_c) ‖ ψ(f)). With γ = 0 it is FedAvg
    with more bytes.

    Deviations: F̂_c is the mean over those who have the class, where Zhu et al. count the others as zeros. An agent
    whose model diverges leaves the distillation out for the round. `cap`, `aggregate` and when an agent gets the mean:
    as in our FedAvg.
    """

    name = "feddistill"
    paper = "Seo et al. 2020; Zhu, Hong, Zhou, ICML 2021"
    exchanges = "weights, and mean outputs per class, to and from the hub"
    needs = Ability.WEIGHTS | Ability.GRADIENTS
    chosen_by_agents = ("smallest_group",)

    local_epochs: int = setting(1, "epochs of local training per round", at_least=0)
    local_steps: int | None = setting(None, "gradient steps per round, instead of epochs", at_least=0)
    batch_size: int = setting(32, "samples per gradient step", at_least=1)
    lr_decay: float = setting(1.0, "factor on the learning rate per round", above=0, at_most=1)
    weight: float = setting(1.0, "γ, of the distance to the mean outputs of all", at_least=0)
    aggregate: str = setting("mean", "how the weights of all become one", choices=parts.PLAIN_KINDS)
    trim: float = setting(0.2, parts.TRIM, at_least=0, at_most=0.49)
    cap: float = setting(10.0, "largest n_k in the mean, in medians of all n_k", at_least=1)
    optimiser_state: str = setting("fresh", "its moments, where weights are replaced", choices=parts.OPTIMISER_STATES)
    smallest_group: int = setting(2, parts.SMALLEST, at_least=1)
    synchronise: bool = setting(True, "start all agents from the same initial weights")

    async def begin(self, me: Agent) -> None:
        """Equal initial weights, if `synchronise`."""
        if self.synchronise:
            parts.same_initial_weights(me)

    async def round(self, me: Agent, t: int) -> None:
        """Train towards labels and F̂, send w_k and F_k, take over the means of both."""
        parts.set_lr(me, self.lr_decay**t, None)
        sums, shares = np.zeros((me.shard.classes, me.shard.classes)), np.zeros(me.shard.classes)
        for x, y in me.shard.batches(t, self.batch_size, self.local_epochs, self.local_steps):
            f = me.learner(x)
            loss = me.learner.loss(f, y)
            rows, targets = parts.class_targets(me.state, y)
            if self.weight and len(targets) and not me.diverged:
                # ℓ(f, y) + γ KL(ψ(F̂_c) ‖ ψ(f)), the mean over the batch
                known = len(targets) / len(y)
                loss = loss + self.weight * known * parts.distillation(parts.chosen(f, rows), targets)
            me.learner.descend(loss)
            share = y.numpy().astype(np.float64)
            sums, shares = sums + share.T @ f.detach().numpy(), shares + share.sum(axis=0)
        weights = me.learner.weights()
        means, seen = parts.class_means(sums, shares, parts.large_classes(me, shares, self.smallest_group))  # F_k,c
        sent = {**weights, MEANS: means, SEEN: seen}
        self.take_over(me, await me.ask_hub(Message(sent, {"samples": len(me.shard)}), expect=sent), t)

    def common(self, me: Agent) -> dict[str, np.ndarray]:
        """The mean weights, and F̂."""
        return me.learner.weights() | self._like(me)

    def take_over(self, me: Agent, weights: Message | None, t: int) -> None:
        """Load the mean weights, and keep F̂; where the reply was lost, the last ones stay."""
        if weights is not None:
            parts.take_over(self, me, {name: weights[name] for name in me.learner.weights()}, t)
            if len(me.roster) > 1:  # a lone agent does not learn from its own past
                me.state |= {"told": weights[MEANS].astype(np.float32), "known": weights[SEEN].copy()}

    def _like(self, me: Agent | Hub) -> dict[str, np.ndarray]:
        return {MEANS: np.empty((me.classes,) * 2, np.float32), SEEN: np.empty(me.classes, bool)}

    async def hub(self, me: Hub, t: int) -> None:
        """Average weights, and outputs class by class."""
        outputs, arrived = parts.split_message(me, await me.gather(), self._like(me))
        heard = parts.accepted_weights(me, arrived)
        told = self._mean_outputs(me, [outputs[name] for name in heard])
        # w ← Σ_k n_k / n · w_k
        groups = parts.group_means(me, heard, self.aggregate, self.trim, self.cap)
        means = [(names, w | told) for names, w in groups]
        await me.scatter(parts.to_groups(me, means, t))

    def _mean_outputs(self, me: Hub, outputs: list[Message]) -> dict[str, np.ndarray]:
        aggregation = parts.Aggregation(kind=self.aggregate, trim=self.trim, outputs=False, hub=me)
        told, known = np.zeros((me.classes,) * 2, np.float32), np.zeros(me.classes, dtype=bool)
        for c in range(me.classes):
            held = [message[MEANS][[c]] for message in outputs if message[SEEN][c]]
            if held:
                told[c], known[c] = aggregation.of_all(np.stack(held)), True  # F̂_c
        return {MEANS: told, SEEN: known}

    def check(self, agents: Sequence[Agent]) -> None:
        """All agents must have the same weights by name and shape; and there must be classes."""
        parts.check_equal_weights(agents, self.name)
        parts.check_classes(agents, self.name)
