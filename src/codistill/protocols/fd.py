"""FD: learning from the others' mean outputs for each class, without public data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from codistill.aggregation import PLAIN_KINDS, Aggregation
from codistill.learners.ability import Ability
from codistill.losses import distillation
from codistill.protocol import Agent, Hub, LearnerError, Message, Protocol, setting


@dataclass(frozen=True, kw_only=True)
class FD(Protocol):
    """Jeong et al. Communication-Efficient On-Device Machine Learning: Federated Distillation and Augmentation
    under Non-IID Private Data. 2018. Algorithm 1, federated distillation.

    While it trains, an agent n sums its outputs f for each class c and sends their means F_n,c; the hub returns
    F̂_-n,c, the mean over all others who have met class c. From the next round on a sample of class c has the loss
    ℓ(f, y) + γ d(f, F̂_-n,c); a class that nobody else has met has no target, and its samples only ℓ.

    Deviations: f are outputs before the softmax, where the paper averages softmax outputs; d is KL, which has the
    gradient of its cross-entropy. Berdoz et al. (representation sharing) use `distance` = "squared" with γ = 10.
    The paper divides by M - 1; here the mean is over those who have met the class. A
    soft label counts for each class by its share, and its target is that of its largest one.
    """

    name = "fd"
    paper = "Jeong et al. 2018"
    exchanges = "mean outputs per class, to and from the hub"
    needs = Ability.GRADIENTS

    local_epochs: int = setting(1, "epochs of local training per round", at_least=0)
    local_steps: int | None = setting(None, "gradient steps per round, instead of epochs", at_least=0)
    batch_size: int = setting(32, "samples per gradient step", at_least=1)
    weight: float = setting(1.0, "γ, of the distance to the others' mean outputs", at_least=0)
    distance: str = setting("kl", "d, between outputs and their target", choices=("squared", "kl"))
    temperature: float = setting(1.0, "E, softens both sides of the distance 'kl'", above=0)
    aggregate: str = setting("mean", "how the others' outputs become one target", choices=PLAIN_KINDS)
    trim: float = setting(0.2, "share that 'trimmed' leaves out at each end", at_least=0, at_most=0.49)

    async def round(self, me: Agent, t: int) -> None:
        """Local training towards labels and targets; then this round's means for new targets."""
        sums, counts = np.zeros((me.shard.classes, me.shard.classes)), np.zeros(me.shard.classes)
        for x, y in me.shard.batches(t, self.batch_size, self.local_epochs, self.local_steps):
            f = me.learner(x)
            me.learner.descend(self._loss(me, f, y))
            shares = y.numpy().astype(np.float64)
            sums, counts = sums + shares.T @ f.detach().numpy(), counts + shares.sum(axis=0)
        means, seen = class_means(sums, counts)
        reply = await me.ask_hub(means=means, seen=seen, expect={"means": means.shape, "known": seen})
        if reply is not None:  # where it was lost, the last targets stay
            me.state |= {"told": reply["means"].astype(np.float32), "known": reply["known"].copy()}

    def _loss(self, me: Agent, f: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = me.learner.loss(f, y)
        rows, targets = of_known_classes(me.state, y)
        # ℓ(f, y) + γ d(f, F̂_-n,c)
        return loss + self.weight * self._distance(f[rows], targets) if rows.any() else loss

    def _distance(self, f: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if self.distance == "kl":
            return distillation(f, targets, self.temperature)
        return torch.nn.functional.mse_loss(f, targets)

    async def hub(self, me: Hub, t: int) -> None:
        """To each agent, for each class, the aggregate of the others who have met it."""
        heard = await me.gather(expect={"means": (None, None), "seen": (None,)}, alike=True)
        if not heard:
            return
        like = next(iter(heard.values()))["means"]
        told = {name: np.zeros_like(like) for name in me.present}
        known = {name: np.zeros(len(like), dtype=bool) for name in me.present}
        for c in range(len(like)):
            met = {name: message["means"][[c]] for name, message in heard.items() if message["seen"][c : c + 1].any()}
            # F̂_-n,c = mean of F_m,c over all m ≠ n who have met c
            for name, target in of_others(Aggregation(kind=self.aggregate, trim=self.trim), met, me.present).items():
                told[name][c], known[name][c] = target, True
        await me.scatter({name: Message.of(means=told[name], known=known[name]) for name in me.present})

    def check(self, agents: Sequence[Agent]) -> None:
        """There must be classes."""
        check_classes(agents, self.name)


def class_means(sums: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """F_c = Σ y_c f / Σ y_c for each class that occurred, and which ones did."""
    seen = counts > 0
    return (sums / np.where(seen, counts, 1)[:, None]).astype(np.float32), seen


def of_known_classes(state: Mapping[str, np.ndarray], y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Which samples of a batch are of a class with a target, and the target of each of these."""
    if "told" not in state:  # before the first exchange
        return torch.zeros(len(y), dtype=torch.bool), y[:0]
    label = y.argmax(dim=1)
    rows = torch.from_numpy(state["known"])[label]
    return rows, torch.from_numpy(state["told"])[label[rows]]


def of_others(rule: Aggregation, values: Mapping[str, np.ndarray], present: Sequence[str]) -> dict[str, np.ndarray]:
    """For each who is present, the aggregate of the others' values; who has no others is left out."""
    if not values:
        return {}
    stacked = np.stack(list(values.values()))
    answers = dict.fromkeys(present, rule.of_all(stacked))
    if len(values) == 1:
        return {name: answer for name, answer in answers.items() if name not in values}
    return answers | dict(zip(values, rule.of_others(stacked), strict=True))


def check_classes(agents: Sequence[Agent], protocol: str) -> None:
    """Every target must be a label, or shares of classes."""
    for agent in agents:
        y = agent.shard.targets
        if agent.shard.labels is None and (y.min() < 0 or not np.allclose(y.sum(axis=1), 1, atol=1e-3)):
            raise LearnerError(
                f"{protocol} takes means over classes, so targets must be labels, or shares of classes that sum to 1.",
                f"agent '{agent.name}' has real values",
                "Give labels, or use a protocol for real values: avgkd, ekd.",
            )
