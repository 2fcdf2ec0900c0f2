"""FedGen: federated averaging, with a generator of features on the hub that regularises local training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy, one_hot

from codistill.protocol import Ability, Agent, Hub, Message, Protocol, setting
from codistill.protocols import parts

PREFIX = "generator "  # of its arrays in a message
HELD = "classes held"  # no weight of a module has a space in its name


@dataclass(frozen=True, kw_only=True)
class FedGen(Protocol):
    """Zhu, Hong, Zhou. Data-Free Knowledge Distillation for Heterogeneous Federated Learning. ICML 2021. Algorithm 1.

    h_k: the head of agent k, its last layer; G(y, ε): a generator of features, from a label and noise. The hub averages
    the weights, as in FedAvg, and trains G so that the agents' last layers recognise what it makes up for a class:
    min_G E_{y, ε} Σ_k α_k(y) ℓ(h_k(G(y, ε)), y) + η L_div. From round 1 on an agent trains on

        ℓ(f(x), y) + α E_{ŷ, ε} ℓ(h_k(G(ŷ, ε)), ŷ) + β KL(ψ(h_k(G(y, ε))) ‖ ψ(f(x))),

    ŷ uniform over all classes: so its last layer does not forget classes of which it has no samples.

    Deviations: the objective is as in the authors' code (the sum of the agents' losses, a diversity loss, the term
    with β), where the paper prints the loss of their mean output and the term with α. α_k(y) is equal for all who have
    class y; "coverage": its share of each class, as the authors' counts. Others: as in our FedAvg.
    """

    name = "fedgen"
    paper = "Zhu, Hong, Zhou, ICML 2021"
    exchanges = "weights and which classes an agent has, to the hub; mean weights and a generator of features, from it"
    needs = Ability.WEIGHTS | Ability.GRADIENTS | Ability.FEATURES

    local_epochs: int = setting(1, "epochs of local training per round", at_least=0)
    local_steps: int | None = setting(None, "gradient steps per round, instead of epochs", at_least=0)
    batch_size: int = setting(32, "samples per gradient step, private and generated", at_least=1)
    lr_decay: float = setting(1.0, "factor on the learning rate per round", above=0, at_most=1)
    generated_weight: float = setting(10.0, "α, of the loss of h_k on generated features", at_least=0)
    distillation_weight: float = setting(1.0, "β, of the divergence from outputs of generated features", at_least=0)
    generated_decay: float = setting(
        0.98, "factor on α, β and the generator's learning rate per round", above=0, at_most=1
    )
    generator_steps: int = setting(50, "steps of the generator per round", at_least=0)
    generator_lr: float = setting(1e-4, "its learning rate, by Adam", above=0)
    generator_weight_decay: float = setting(1e-2, "its weight decay", at_least=0)
    generator_hidden: int = setting(256, "neurons of its hidden layer", at_least=1)
    generator_noise: int = setting(32, "entries of ε", at_least=1)
    diversity: float = setting(1.0, "η, of the diversity loss", at_least=0)
    class_shares: str = setting("seen", "how the class weights α_k(y) are computed", choices=("seen", "coverage"))
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
        """Train with generated features, send w_k, take over the mean and the generator."""
        self._train(me, t)
        weights, held = me.learner.weights(), me.shard.targets.mean(axis=0, dtype=np.float32)
        beside = {HELD: held if self.class_shares == "coverage" else held > 0}
        message = Message(weights | beside, {"samples": len(me.shard), "head": parts.head_name(me)})
        self.take_over(me, await me.ask_hub(message, expect=weights | self._generator.like(me)), t)

    def _train(self, me: Agent, t: int) -> None:
        parts.set_lr(me, self.lr_decay**t, None)
        generator, decay = self._generator.received(me), self.generated_decay**t
        for x, y in me.shard.batches(t, self.batch_size, self.local_epochs, self.local_steps):
            f = me.learner(x)
            loss = me.learner.loss(f, y)
            if generator is not None and not me.diverged:
                # α E ℓ(h_k(G(ŷ, ε)), ŷ)
                labels = torch.randint(me.classes, (self.batch_size,))
                z, _ = self._generator.draw(generator, labels, me.classes)
                loss = loss + decay * self.generated_weight * cross_entropy(me.learner.head(z), labels)
                # β KL(ψ(h_k(G(y, ε))) ‖ ψ(f(x))), the first side without a gradient
                z, _ = self._generator.draw(generator, y.argmax(dim=1), me.classes)
                loss = loss + decay * self.distillation_weight * parts.distillation(f, me.learner.head(z).detach())
            me.learner.descend(loss)

    @property
    def _generator(self) -> Generator:
        return Generator(
            noise=self.generator_noise, hidden=self.generator_hidden, lr=self.generator_lr,
            weight_decay=self.generator_weight_decay, diversity=self.diversity,
        )  # fmt: skip

    def common(self, me: Agent) -> dict[str, np.ndarray]:
        """The mean weights, and the generator."""
        return me.learner.weights() | self._generator.like(me)

    def take_over(self, me: Agent, weights: Message | None, t: int) -> None:
        """Load the mean weights, and keep the generator; where the reply was lost, the last ones stay."""
        if weights is not None:
            parts.take_over(self, me, {name: weights[name] for name in me.learner.weights()}, t)
            if len(me.roster) > 1:  # a lone agent does not learn from its own past
                me.state["generator"] = {name: weights[name] for name in self._generator.like(me)}

    async def hub(self, me: Hub, t: int) -> None:
        """Average the weights, and train the generator for the agents' last layers."""
        like = np.empty(me.classes, np.float32 if self.class_shares == "coverage" else bool)
        told, arrived = parts.split_message(me, await me.gather(), {HELD: like, "head": str})
        heard = parts.accepted_weights(me, arrived)
        heads = accepted_heads(me, heard, told)
        means = []
        for names, w in parts.group_means(me, heard, self.aggregate, self.trim, self.cap):  # w ← Σ_k n_k / n · w_k
            group = [name for name in names if name in heads]
            shares = class_weights([told[name][HELD] for name in group])  # α_k(y)
            generator = self._generator.train(
                me, me.joined[names[0]].features or 0, [heads[name] for name in group], shares,
                steps=self.generator_steps, batch_size=self.batch_size, lr_factor=self.generated_decay**t,
            )  # fmt: skip
            means.append((names, {**w, **generator}))
        await me.scatter(parts.to_groups(me, means, t))

    def check(self, agents: Sequence[Agent]) -> None:
        """All agents must have the same weights by name and shape; there must be classes, and a head to give them."""
        parts.check_equal_weights(agents, self.name)
        parts.check_head(agents, self.name, is_sent=True)


def accepted_heads(
    me: Hub, heard: Mapping[str, Message], told: Mapping[str, Message]
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Matrix (C, d) and bias of each agent's last layer, by the name that it sent as "head"; others are refused."""
    heads = {}
    for name, message in heard.items():
        head, _, beside = told[name]["head"].partition(" ")
        matrix, bias = (message.arrays.get(each) for each in (head, beside or head.removesuffix("weight") + "bias"))
        if bias is None:
            bias = np.zeros(me.classes, np.float32)
        found = Message({} if matrix is None else {"matrix": matrix, "bias": bias})
        shape = me.classes, me.joined[name].features or 0
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
        optimiser.param_groups[0]["lr"], before = self.lr * lr_factor, parts.size_of(_arrays(module))
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
        if parts.is_far_beyond(parts.size_of(arrays), before, arrays):
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
