"""FedGen: federated averaging, with a generator of features on the hub that regularises local training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from codistill.protocol import Ability, Agent, Hub, Message, Protocol, setting
from codistill.protocols import parts

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
    class_shares: str = setting("seen", "what α_k(y) follows", choices=("seen", "coverage"))
    aggregate: str = setting("mean", "how the weights of all become one", choices=parts.PLAIN_KINDS)
    trim: float = setting(0.2, parts.TRIM, at_least=0, at_most=0.49)
    cap: float = setting(10.0, "largest n_k in the mean, in medians of all n_k", at_least=1)
    optimiser_state: str = setting("fresh", "its moments, where weights are replaced", choices=parts.OPTIMISER_STATES)
    synchronise: bool = setting(True, "start all agents from the same initial weights")

    async def begin(self, me: Agent) -> None:
        """Equal initial weights, unless told otherwise."""
        if self.synchronise:
            parts.same_initial_weights(me)

    async def round(self, me: Agent, t: int) -> None:
        """Train with generated features, send w_k, take over the mean and the generator."""
        if me.sampled and t > 0:  # who missed the last round first gets its common weights
            expect = me.learner.weights() | self._generator.like(me)
            self._take_over(me, await me.catch_up(holds=parts.round_held(me), expect=expect), t - 1)
        self._train(me, t)
        weights, held = me.learner.weights(), me.shard.targets.mean(axis=0, dtype=np.float32)
        beside = {HELD: held if self.class_shares == "coverage" else held > 0}
        message = Message(weights | beside, {"samples": len(me.shard), "head": parts.head_name(me)})
        self._take_over(me, await me.ask_hub(message, expect=weights | self._generator.like(me)), t)

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
    def _generator(self) -> parts.Generator:
        return parts.Generator(
            noise=self.generator_noise, hidden=self.generator_hidden, lr=self.generator_lr,
            weight_decay=self.generator_weight_decay, diversity=self.diversity,
        )  # fmt: skip

    def _take_over(self, me: Agent, reply: Message | None, t: int) -> None:
        if reply is not None:  # it was not lost, nor does the agent have the newest already
            parts.take_over(me, {name: reply[name] for name in me.learner.weights()}, t, self.optimiser_state)
            if len(me.roster) > 1:  # a lone agent does not learn from its own past
                me.state["generator"] = {name: reply[name] for name in self._generator.like(me)}

    async def hub(self, me: Hub, t: int) -> None:
        """Average the weights, and train the generator for the agents' last layers."""
        if me.sampled and t > 0:
            await me.scatter(parts.newest_weights(me, await me.gather(expect={"holds": int})))
        like = np.empty(me.classes, np.float32 if self.class_shares == "coverage" else bool)
        told, arrived = parts.split_message(me, await me.gather(), {HELD: like, "head": str})
        heard = parts.accepted_weights(me, arrived)
        heads = parts.accepted_heads(me, heard, told)
        means = []
        for names, w in parts.group_means(me, heard, self.aggregate, self.trim, self.cap):  # w ← Σ_k n_k / n · w_k
            group = [name for name in names if name in heads]
            shares = parts.class_weights([told[name][HELD] for name in group])  # α_k(y)
            generator = self._generator.train(
                me, me.hellos[names[0]].features or 0, [heads[name] for name in group], shares,
                steps=self.generator_steps, batch_size=self.batch_size, lr_factor=self.generated_decay**t,
            )  # fmt: skip
            means.append((names, {**w, **generator}))
        parts.keep_newest(me, means, t)
        await me.scatter(parts.to_groups(me, means))

    def check(self, agents: Sequence[Agent]) -> None:
        """All agents must have the same weights by name and shape; there must be classes, and a head to give them."""
        parts.check_equal_weights(agents, self.name)
        parts.check_head(agents, self.name, is_sent=True)
