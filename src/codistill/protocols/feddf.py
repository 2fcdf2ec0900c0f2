"""FedDF: weights are averaged among equal architectures, outputs across them; with a discriminator, FedDF-AL."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from codistill.protocol import Ability, Agent, Hub, Message, Protocol, setting
from codistill.protocols import parts

AL_TAU, AL_WEIGHT = ("adversarial", 15), ("adversarial", 1.0)  # defaults of FedDF-AL


@dataclass(frozen=True, kw_only=True)
class FedDF(Protocol):
    """Lin, Kong, Stich, Jaggi. Ensemble Distillation for Robust Model Fusion in Federated Learning. NeurIPS 2020;
    in the form of Han, Shi, Huang. FedAL. Section VI-A, "shareable models".

    A round is τ local steps; then every agent sends its weights, and gets the mean over all agents of its own
    architecture (equal names and shapes of weights), weighted by samples; then τ steps of knowledge transfer on public
    data, as in FedMD: so knowledge crosses from one architecture to another. `adversarial` = 1 is FedDF-AL: FedAL with
    its discriminator and less-forgetting, τ = 15 unless set. Symbols and equation numbers are those of FedAL.

    Deviations from Lin et al.: the students are the agents and not the hub, which therefore needs no architecture, and
    the teachers are the averaged models of all others, among them equal ones of its own group.
    """

    name = "feddf"
    paper = "Lin et al., NeurIPS 2020; Han, Shi, Huang 2023, sec. VI-A"
    exchanges = "weights, and outputs on public data, to and from the hub"
    needs = Ability.WEIGHTS | Ability.GRADIENTS
    needs_public = True

    local_epochs: int = setting(1, "epochs of local training per round", at_least=0)
    local_steps: int | None = setting(10, "τ, local steps (FedDF-AL: 15); unset: epochs", at_least=0, with_other=AL_TAU)
    batch_size: int = setting(32, "samples per gradient step, private and public", at_least=1)
    transfer_steps: int | None = setting(10, "τ, transfer (FedDF-AL: 15); unset: all", at_least=0, with_other=AL_TAU)
    temperature: float = setting(1.0, "E, softens the outputs in the distillation loss", above=0)
    less_forgetting: float = setting(0.0, "weight of r of (13), (14) (FedDF-AL: 1)", at_least=0, with_other=AL_WEIGHT)
    aggregate: str = setting("mean", "how the others' outputs become one target", choices=parts.KINDS)
    trim: float = setting(0.2, parts.TRIM, at_least=0, at_most=0.49)
    adversarial: float = setting(0.0, "weight of U_n, the adversarial loss; 0: without a discriminator", at_least=0)
    clip: float | None = setting(None, "longest gradient of U_n for a sample; unset: unbounded", above=0)
    discriminator_lr: float = setting(1e-4, "η_d, learning rate of the discriminator", above=0)
    discriminator_temperature: float = setting(2.0, "E, softens the discriminator's input", above=0)
    discriminator_hidden: tuple[int, ...] = setting((32, 256), "neurons of its hidden layers", at_least=1)
    aggregate_weights: str = setting("mean", "how the weights of a group become one", choices=parts.PLAIN_KINDS)
    cap: float = setting(10.0, "largest n_k in the mean of weights, in medians of all n_k", at_least=1)
    optimiser_state: str = setting("fresh", "its moments, where weights are replaced", choices=parts.OPTIMISER_STATES)
    synchronise: bool = setting(True, "start agents of equal architecture from the same initial weights")

    async def begin(self, me: Agent) -> None:
        """Equal initial weights for equal architectures, if `synchronise`."""
        if self.synchronise:
            parts.same_initial_weights(me)

    async def round(self, me: Agent, t: int) -> None:
        """Train, take over the mean weights of one's group, learn from the outputs of all others."""
        old = me.learner.snapshot(training=True) if self.less_forgetting and "taught" in me.state else None
        for x, y in me.shard.batches(t, self.batch_size, self.local_epochs, self.local_steps):
            f = me.learner(x)
            loss = me.learner.loss(f, y)
            if old is not None:  # (13)
                loss = loss + self.less_forgetting * parts.distillation(f, old(x), self.temperature)
            me.learner.descend(loss)
        weights = me.learner.weights()
        mean = await me.ask_hub(Message(weights, {"samples": len(me.shard)}), expect=weights)
        parts.take_over(self, me, mean, t)
        if len(me.present) > 1:  # alone, not even the statistics of batch norm may change
            await self._transfer(me, t)

    async def _transfer(self, me: Agent, t: int) -> None:
        old = me.learner.snapshot(training=True) if self.less_forgetting else None
        rows = 2 if self.adversarial else 1  # of the reply: f̄, and ∇_{f_n} U_n
        for _, u in me.public.batches(t, self.batch_size, self.transfer_steps):
            f = me.learner(u)
            sent = f.detach().numpy()
            expect = parts.expected_reply(sent, rows)
            reply = await me.ask_hub(f=sent, **parts.coverage(me, self.aggregate), expect=expect)
            others = parts.leave_one_out(reply, sent)  # (5): f_-n
            if reply is None or others is None:
                continue
            loss = parts.distillation(f, torch.from_numpy(others), self.temperature)  # (4)
            if self.adversarial and not me.diverged:  # (21)
                gradient = torch.from_numpy(parts.clip_rows(reply["told"][1], self.clip))
                loss = loss + self.adversarial * (f * gradient).sum() / len(f)
            if old is not None:  # (14)
                loss = loss + self.less_forgetting * parts.distillation(f, old(u), self.temperature)
            me.learner.descend(loss)
            me.state["taught"] = True

    async def hub(self, me: Hub, t: int) -> None:
        """Average weights group by group, then outputs across groups."""
        await self._average_weights(me)
        aggregation = parts.Aggregation(kind=self.aggregate, trim=self.trim, temperature=self.temperature, hub=me)
        discriminator = parts.Discriminator(
            lr=self.discriminator_lr, temperature=self.discriminator_temperature, hidden=self.discriminator_hidden
        )
        for ids, _ in me.public.batches(t, self.batch_size, self.transfer_steps) if len(me.present) > 1 else ():
            heard = await me.gather(expect=parts.expected_outputs(me, len(ids), self.aggregate))
            if not heard:
                await me.skip()
                continue
            f, shares = parts.stacked(heard)
            mean, gradients = aggregation.of_all(f, shares), None  # f̄
            if self.adversarial:
                gradients, recognised = discriminator.step(me, list(heard), f)
                me.measure(heard, discriminator_accuracy=recognised)
            await me.scatter(parts.replies(me.present, list(heard), f, mean, aggregation, shares, gradients))
            me.measure(heard, disagreement=parts.disagreement(f, mean))
        discriminator.save(me)

    async def _average_weights(self, me: Hub) -> None:
        heard = parts.accepted_weights(me, await me.gather())
        # An agent whose weights were lost gets an empty reply, and keeps its own.
        answers = dict.fromkeys(me.present, Message())
        for names, group in parts.groups_alike(me, heard, "weights", "frozen"):
            # w ← Σ_k n_k / n · w_k, over the agents k of one architecture
            mean = parts.combined_weights(group, self.aggregate_weights, self.trim, self.cap, me)
            parts.watch_growth(me, [(names, mean)])
            answers |= dict.fromkeys(group, Message(mean))
        await me.scatter(answers)

    def check(self, agents: Sequence[Agent]) -> None:
        """There must be classes: a softmax of real values means nothing."""
        parts.check_classes(agents, self.name)
