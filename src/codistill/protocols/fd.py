"""FD: learning from the others' mean outputs for each class, without public data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from codistill.protocol import Ability, Agent, Hub, Message, Protocol, setting
from codistill.protocols import parts


@dataclass(frozen=True, kw_only=True)
class FD(Protocol):
    """Jeong et al. Communication-Efficient On-Device Machine Learning: Federated Distillation and Augmentation
    under Non-IID Private Data. 2018. Algorithm 1, federated distillation.

    While it trains, an agent n sums its outputs f for each class c and sends their means F_n,c; the hub returns
    F̂_-n,c, the mean over all others who have samples of class c. From the next round on a sample of class c has the
    loss ℓ(f, y) + γ d(f, F̂_-n,c); a class that nobody else has has no target, and its samples only ℓ.

    Deviations: f are outputs before the softmax, where the paper averages softmax outputs; d is KL, which has the
    gradient of its cross-entropy. Berdoz et al. (representation sharing) use `distance` = "squared" with γ = 10.
    The paper divides by M - 1; here the mean is over those who have the class. A soft label counts for each class by
    its share, and its target is that of its largest one. An agent whose model diverges leaves d out for the round. A
    class of which fewer than `smallest_group` samples were used in a round is left out, and so named.
    """

    name = "fd"
    paper = "Jeong et al. 2018"
    exchanges = "mean outputs per class, to and from the hub"
    needs = Ability.GRADIENTS
    chosen_by_agents = ("smallest_group",)

    local_epochs: int = setting(1, "epochs of local training per round", at_least=0)
    local_steps: int | None = setting(None, "gradient steps per round, instead of epochs", at_least=0)
    batch_size: int = setting(32, "samples per gradient step", at_least=1)
    weight: float = setting(1.0, "γ, of the distance to the others' mean outputs", at_least=0)
    distance: str = setting("kl", "d, between outputs and their target", choices=("squared", "kl"))
    temperature: float = setting(1.0, "E, softens both sides of the distance 'kl'", above=0)
    aggregate: str = setting("mean", "how the others' outputs become one target", choices=parts.PLAIN_KINDS)
    trim: float = setting(0.2, parts.TRIM, at_least=0, at_most=0.49)
    smallest_group: int = setting(2, parts.SMALLEST, at_least=1)

    async def round(self, me: Agent, t: int) -> None:
        """Local training towards labels and targets; then this round's means for new targets."""
        sums, shares = np.zeros((me.shard.classes, me.shard.classes)), np.zeros(me.shard.classes)
        for x, y in me.shard.batches(t, self.batch_size, self.local_epochs, self.local_steps):
            f = me.learner(x)
            loss = me.learner.loss(f, y)
            rows, targets = parts.class_targets(me.state, y)
            if len(targets) and not me.diverged:
                loss = loss + self.weight * self._distance(parts.chosen(f, rows), targets)  # ℓ(f, y) + γ d(f, F̂_-n,c)
            me.learner.descend(loss)
            share = y.numpy().astype(np.float64)
            sums, shares = sums + share.T @ f.detach().numpy(), shares + share.sum(axis=0)
        if len(me.present) == 1:
            return  # nobody to learn from: the last targets stay
        sent = parts.large_classes(me, shares, self.smallest_group)
        means, seen = parts.class_means(sums, shares, sent)  # F_n,c
        reply = await me.ask_hub(means=means, seen=seen, expect={"means": means, "known": seen})
        if reply is not None:  # where it was lost, the last targets stay
            me.state |= {"told": reply["means"].astype(np.float32), "known": reply["known"].copy()}

    def _distance(self, f: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if self.distance == "kl":
            return parts.distillation(f, targets, self.temperature)
        return torch.nn.functional.mse_loss(f, targets)

    async def hub(self, me: Hub, t: int) -> None:
        """To each agent, for each class, the aggregate of the others who have it."""
        like = np.empty((me.classes, me.classes), np.float32)
        heard = await me.gather(expect={"means": like, "seen": np.empty(me.classes, bool)})
        if not heard:
            return await me.skip()
        # A squared distance depends on a constant per sample: no log-probabilities there.
        aggregation = parts.Aggregation(kind=self.aggregate, trim=self.trim, outputs=self.distance == "kl", hub=me)
        told = {name: np.zeros_like(like) for name in me.present}
        known = {name: np.zeros(len(like), dtype=bool) for name in me.present}
        for holders, classes in parts.classes_by_holders(heard):
            held = {name: heard[name]["means"][classes] for name in holders}
            # F̂_-n,c = mean of F_m,c over all m ≠ n who have c
            for name, targets in means_of_others(aggregation, held, me.present).items():
                told[name][classes], known[name][classes] = targets, True
        await me.scatter({name: Message.of(means=told[name], known=known[name]) for name in me.present})

    def message_bytes(self, classes: int, public: int) -> int:
        """A mean output for each class, and which classes there are."""
        return 4 * classes * classes + classes

    def check(self, agents: Sequence[Agent]) -> None:
        """There must be classes."""
        parts.check_classes(agents, self.name, softmax=self.distance == "kl")


def means_of_others(
    aggregation: parts.Aggregation, values: Mapping[str, np.ndarray], present: Sequence[str]
) -> dict[str, np.ndarray]:
    """For each agent that is present, the aggregate of the others' values; agents without others are left out."""
    if not values:
        return {}
    stacked = np.stack(list(values.values()))
    answers = dict.fromkeys(present, aggregation.of_all(stacked))
    if len(values) == 1:
        return {name: answer for name, answer in answers.items() if name not in values}
    return answers | dict(zip(values, aggregation.of_others(stacked), strict=True))
