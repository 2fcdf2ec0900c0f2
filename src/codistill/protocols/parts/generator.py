"""The generator of FedGen: features of a class, made up so that the agents' last layers recognise them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy, one_hot

from codistill.protocol import Agent, Hub, LearnerError, Message
from codistill.protocols.parts.classes import check_classes
from codistill.protocols.parts.weights import is_far_beyond, size_of

PREFIX = "generator "  # of its arrays in a message: no weight of a module has a space in its name


@dataclass(frozen=True, kw_only=True)
class Generator:
    """G_w(y, ε): a label and noise to features, by one hidden layer with batch norm.

    The hub keeps its weights and Adam's state in its own state; an agent gets the weights with the mean.
    """

    noise: int = 32
    hidden: int = 256
    lr: float = 1e-4
    weight_decay: float = 1e-2
    diversity: float = 1.0  # weight of the diversity loss

    def module(self, classes: int, features: int) -> nn.Sequential:
        """A new generator."""
        return nn.Sequential(
            nn.Linear(self.noise + classes, self.hidden), nn.BatchNorm1d(self.hidden), nn.ReLU(),
            nn.Linear(self.hidden, features),
        )  # fmt: skip

    def like(self, me: Agent) -> dict[str, np.ndarray]:
        """Arrays as those of the generator in a message, to know one by."""
        if "generator like" not in me.memo:
            with torch.random.fork_rng(devices=()):  # initial weights must not change what is drawn next
                me.memo["generator like"] = _arrays(self.module(me.classes, me.learner.head.in_features))
        known: dict[str, np.ndarray] = me.memo["generator like"]
        return known

    def received(self, me: Agent) -> nn.Module | None:
        """The generator that an agent received last, in evaluation mode; None before it has received one."""
        arrays = me.state.get("generator")
        if arrays is None:
            return None
        with torch.random.fork_rng(devices=()):
            module = self.module(me.classes, me.learner.head.in_features)
        module.load_state_dict({name.removeprefix(PREFIX): torch.tensor(array) for name, array in arrays.items()})
        return module.eval().requires_grad_(False)

    def draw(self, module: nn.Module, y: torch.Tensor, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
        """G(y, ε) for labels y, and the noise ε, uniform in [0, 1)."""
        noise = torch.rand(len(y), self.noise)
        return module(torch.cat([noise, one_hot(y, classes).float()], dim=1)), noise

    def train(
        self,
        me: Hub,
        features: int,
        heads: Sequence[tuple[np.ndarray, np.ndarray]],
        shares: np.ndarray,
        *,
        steps: int,
        batch_size: int,
        lr_factor: float,
    ) -> dict[str, np.ndarray]:
        """`steps` steps of Adam for the agents' heads, with `shares` α_k(y) (K, C); returns its weights."""
        module, optimiser = self._module(me, features)
        if not heads:
            return _arrays(module)
        optimiser.param_groups[0]["lr"], before = self.lr * lr_factor, size_of(_arrays(module))
        matrices, biases = (torch.from_numpy(np.stack(each)) for each in zip(*heads, strict=True))
        alpha, known = torch.from_numpy(shares.astype(np.float32)), torch.from_numpy(np.flatnonzero(shares.sum(axis=0)))
        for _ in range(steps if len(known) else 0):
            y = known[torch.randint(len(known), (batch_size,))]
            z, noise = self.draw(module.train(), y, me.classes)
            logits = torch.einsum("bd,kcd->kbc", z, matrices) + biases[:, None]
            each = cross_entropy(logits.flatten(0, 1), y.repeat(len(heads)), reduction="none").view(len(heads), -1)
            # E_{y, ε} Σ_k α_k(y) ℓ(h_k(G(y, ε)), y) + η L_div
            loss = (alpha[:, y] * each).sum(dim=0).mean() + self.diversity * diversity_loss(noise, z)
            optimiser.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
        arrays = _arrays(module)
        if is_far_beyond(size_of(arrays), before, arrays):
            me.memo.pop(("generator", features))
            me.state.get("generators", {}).pop(str(features), None)
            me.remark("the generator diverged; it is initialised anew.")
            return _arrays(self._module(me, features)[0])
        kept: dict[str, Any] = {"weights": module.state_dict(), "memory": optimiser.state_dict()}
        me.state.setdefault("generators", {})[str(features)] = kept
        return arrays

    def _module(self, me: Hub, features: int) -> tuple[nn.Sequential, torch.optim.Optimizer]:
        """The module and its optimiser: in memory, or restored from the hub's state, or new."""
        if ("generator", features) not in me.memo:
            with torch.random.fork_rng(devices=()):
                me.seed_alike("generator")
                module = self.module(me.classes, features)
            optimiser = torch.optim.Adam(module.parameters(), self.lr, weight_decay=self.weight_decay)
            kept = me.state.get("generators", {}).get(str(features))
            if kept is not None:
                module.load_state_dict(kept["weights"])
                optimiser.load_state_dict(kept["memory"])
            me.memo["generator", features] = module, optimiser
        known: tuple[nn.Sequential, torch.optim.Optimizer] = me.memo["generator", features]
        return known


def _arrays(module: nn.Module) -> dict[str, np.ndarray]:
    return {PREFIX + name: tensor.detach().numpy().copy() for name, tensor in module.state_dict().items()}


def diversity_loss(noise: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """exp(- mean over pairs of |ε_i - ε_j|² |z_i - z_j|₁, norms as means): small where features follow the noise."""
    apart = (noise[:, None] - noise[None]).square().mean(dim=2)
    return torch.exp(-(apart * (z[:, None] - z[None]).abs().mean(dim=2)).mean())


def head_name(me: Agent) -> str:
    """The name of the head's matrix among an agent's weights; after a space that of its bias, if of another layer.

    A matrix that layers share is sent under the name of the first of them; no name has a space, and "-" is no bias.
    """
    head, layer = me.learner.head, f"{me.learner.head_name}.".removeprefix(".")
    names = {id(each): name for name, each in me.learner.parameters().items()}
    matrix, bias = names.get(id(head.weight), f"{layer}weight"), "-"
    beside = matrix.removesuffix("weight") + "bias"
    if head.bias is not None:
        bias = names.get(id(head.bias), f"{layer}bias")
    elif beside not in names.values():
        bias = beside
    return matrix if bias == beside else f"{matrix} {bias}"


def check_head(agents: Sequence[Agent], protocol: str, *, is_sent: bool = False) -> None:
    """There must be classes, and the head a linear map from all features to them: it gets features of others.

    `is_sent`: and its matrix one of the weights, not computed from other ones (`torch.nn.utils.parametrizations`).
    """
    check_classes(agents, protocol)
    for agent in agents:
        head, x = agent.learner.head, agent.shard.x[:1]
        width, wanted = agent.learner.evaluated_features(x).shape[1], (head.in_features, head.out_features)
        if wanted != (width, agent.shard.classes) or (
            is_sent and head_name(agent).split()[0] not in agent.learner.weights()
        ):
            raise LearnerError(
                f"{protocol} applies the head to features of others, so it must be a plain linear layer from all "
                f"features to all classes: {width} to {agent.shard.classes}.",
                f"agent '{agent.name}' has {agent.learner.describe()} with the head '{agent.learner.head_name}', "
                f"{wanted[0]} to {wanted[1]}",
                "End the module with one nn.Linear that gets each sample once, without a parametrization.",
            )


def accepted_heads(
    me: Hub, heard: Mapping[str, Message], told: Mapping[str, Message]
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Matrix (C, d) and bias of each agent's last layer, by the name that it told as "head"; others are refused."""
    heads = {}
    for name, message in heard.items():
        head, _, beside = told[name]["head"].partition(" ")
        matrix, bias = (message.arrays.get(each) for each in (head, beside or head.removesuffix("weight") + "bias"))
        if bias is None:
            bias = np.zeros(me.classes, np.float32)
        found = Message({} if matrix is None else {"matrix": matrix, "bias": bias})
        shape = me.classes, me.hellos[name].features or 0
        like = {"matrix": np.empty(shape, np.float32), "bias": np.empty(me.classes, np.float32)}
        if me.accepts(name, found, like):
            heads[name] = found["matrix"], found["bias"]
    return heads


def class_weights(held: Sequence[np.ndarray]) -> np.ndarray:
    """α_k(y) = what agent k holds of class y, of all that is held (K, C); 0 where nobody has the class."""
    shares = np.clip(np.asarray(held, np.float64), 0, 1)
    total = shares.sum(axis=0)
    weights: np.ndarray = shares / np.where(total > 0, total, 1)
    return weights
