"""FedTGP, written by following the tutorial: the hub trains class prototypes that keep a margin between classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

import codistill as cd
from codistill.protocols import parts


@dataclass(frozen=True, kw_only=True)
class FedTGP(cd.Protocol):
    """Zhang et al. FedTGP: Trainable Global Prototypes with Adaptive-Margin-Enhanced Contrastive Learning. AAAI 2024.

    P_i^c: the mean of agent i's features over its samples of class c, sent after local training; φ: the Euclidean
    distance. The hub has a vector for each class, from which a small network makes the global prototype P̂^c. They take
    steps down -log [e^-(φ(P_i^c, P̂^c) + δ) / (e^-(φ(P_i^c, P̂^c) + δ) + Σ_{c' ≠ c} e^-φ(P_i^c, P̂^c'))], with the margin
    δ = min(max_{c ≠ c'} φ(Q^c, Q^c'), τ) of the mean prototypes Q^c = mean_i P_i^c. From the next round on a sample
    of class c has the loss ℓ(f, y) + λ |h_i(x) - P̂^c|², as in FedProto. Classes of fewer than `smallest_group` samples
    are left out; the margin of a single class is τ.
    """

    name = "fedtgp"
    exchanges = "mean features per class to the hub, trained prototypes back"
    needs = cd.Ability.GRADIENTS | cd.Ability.FEATURES

    local_epochs: int = cd.setting(5, "epochs of local training per round", at_least=0)
    batch_size: int = cd.setting(32, "samples per gradient step", at_least=1)
    weight: float = cd.setting(0.1, "λ, of the distance between features", at_least=0)
    hub_steps: int = cd.setting(100, "S, gradient steps on the hub per round, each on all prototypes", at_least=1)
    hub_lr: float = cd.setting(0.01, "η_S, their learning rate", above=0)
    margin: float = cd.setting(100.0, "τ, the largest margin", at_least=0)
    smallest_group: int = cd.setting(2, parts.SMALLEST, at_least=1)

    async def round(self, me: cd.Agent, t: int) -> None:
        for x, y in me.shard.batches(t, self.batch_size, self.local_epochs):
            f, h = me.learner.with_features(x)
            loss = me.learner.loss(f, y)
            rows, prototypes = parts.class_targets(me.state, y)
            if len(prototypes) and not me.diverged:
                loss = loss + self.weight * nn.functional.mse_loss(parts.chosen(h, rows), prototypes)
            me.learner.descend(loss)
        if len(me.present) == 1:  # an agent does not learn from its own past
            return
        y, h = me.shard.targets.astype(np.float64), me.learner.evaluated_features(me.shard.x)
        sent = parts.large_classes(me, y.sum(axis=0), self.smallest_group)
        prototypes, seen = parts.class_means(y.T @ h, y.sum(axis=0), sent)  # P_i^c
        reply = await me.ask_hub(p=prototypes, seen=seen, expect={"p": prototypes, "known": seen})
        if reply is not None:
            me.state |= {"told": reply["p"].astype(np.float32), "known": reply["known"].copy()}

    async def hub(self, me: cd.Hub, t: int) -> None:
        heard = await me.gather(expect={"p": (me.classes, None), "seen": np.empty(me.classes, bool)})
        # P_i^c of all agents, below one another, and the c of each row
        held = [(message["p"][message["seen"]], np.flatnonzero(message["seen"])) for message in heard.values()]
        if len({p.shape[1] for p, _ in held}) != 1 or not sum(len(p) for p, _ in held):
            await me.skip()
            return
        p, c = (torch.from_numpy(np.concatenate(each)) for each in zip(*held, strict=True))
        made = self._trained(me, p.float(), c)
        known = np.isin(np.arange(me.classes), c.numpy())
        await me.broadcast(p=made.numpy() * known[:, None], known=known)

    def _trained(self, me: cd.Hub, p: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        """P̂ for all classes, after S steps; the weights go on from the last round's."""
        me.seed_alike("prototypes")
        model = TrainablePrototypes(me.classes, p.shape[1])
        if "prototypes" in me.state:
            model.load_state_dict(me.state["prototypes"])
        optimiser = torch.optim.SGD(model.parameters(), self.hub_lr)
        delta = margin_of(p, c, self.margin)
        for _ in range(self.hub_steps):
            loss = contrast(p, c, model(), delta)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        me.state["prototypes"] = model.state_dict()
        me.measure(me.present, margin=np.full(len(me.present), float(delta)))
        return model().detach()

    def check(self, agents: Sequence[cd.Agent]) -> None:
        parts.check_classes(agents, self.name)
        parts.check_features(agents, self.name, by_class=True)


class TrainablePrototypes(nn.Module):
    """P̂ = F(P̌): a vector for each class, through a network of one hidden layer that all classes share."""

    def __init__(self, classes: int, width: int) -> None:
        super().__init__()
        self.vectors = nn.Parameter(torch.randn(classes, width))
        self.network = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))

    def forward(self) -> torch.Tensor:
        return self.network(self.vectors)


def margin_of(p: torch.Tensor, c: torch.Tensor, largest: float) -> torch.Tensor:
    """δ = min(max_{c ≠ c'} φ(Q^c, Q^c'), τ), where Q^c is the mean prototype of class c."""
    q = torch.stack([p[c == each].mean(dim=0) for each in c.unique()])
    return torch.cdist(q, q).max().clamp_max(largest) if len(q) > 1 else torch.tensor(float(largest))


def contrast(p: torch.Tensor, c: torch.Tensor, made: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """The mean over all P_i^c of the cross-entropy of -(φ(P_i^c, P̂^c') + δ [c' = c]) over c'."""
    classes = torch.arange(len(made))
    distances = torch.linalg.vector_norm(p[:, None] - made, dim=2) + delta * (c[:, None] == classes)
    return nn.functional.cross_entropy(-distances, c)


def main() -> None:
    x, y = load_digits(return_X_y=True)
    x = (x / 16).astype(np.float32)
    torch.manual_seed(0)
    agents = []
    for number, hidden in enumerate((16, 32, 64, 128)):  # four architectures with features of one width
        mine = np.arange(60 * number, 60 * number + 60)
        layers = nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 24), nn.ReLU(), nn.Linear(24, 10)
        agents.append(cd.Agent(f"agent {number}", cd.TorchLearner(nn.Sequential(*layers), lr=0.005), x[mine], y[mine]))
    federation = cd.Federation(agents, FedTGP(), test=(x[1300:], y[1300:]))
    result = federation.run(rounds=8, progress=False)
    print(result)
    gain = np.mean([line.gain for line in result.summary().lines()])
    assert gain > 0, f"the agents should learn from the prototypes, but the mean gain is {gain:.3f}"


if __name__ == "__main__":
    main()
