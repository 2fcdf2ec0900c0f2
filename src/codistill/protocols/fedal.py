"""FedAL: federated distillation with a discriminator on the hub, and less-forgetting in both stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from codistill.protocol import Ability, Agent, Hub, Protocol, setting
from codistill.protocols import parts


@dataclass(frozen=True, kw_only=True)
class FedAL(Protocol):
    """Han, Shi, Huang. FedAL: Black-Box Federated Knowledge Distillation Enabled by Adversarial Learning. 2023.

    Algorithm 1. f_n: outputs of agent n before the softmax ψ; E: temperature. In each round t, τ local steps down
    V_loc = ℓ + r_loc (17). Then τ times, on a public batch P: every agent sends f_n(P); the hub's discriminator h takes
    a step towards knowing whose outputs they are, and the hub sends to each agent the mean output f̄ and ∇_{f_n} U_n,
    where U_n = -CE(n, h(ψ(f_n, E))) (7); the agent steps down V_glo = K(p̄_-n, p_n) + U_n + r_glo (18), U_n by the
    chain rule (21). r holds a model to what it was at the start of the stage (13), (14). No agent has h.

    `adversarial` = 0 is FedMD-LF, `less_forgetting` = 0 as well is FedMD, to the bit and in bytes.

    U_n has no lower bound: an agent whose model diverges leaves U_n out for the rest of the round. `clip` bounds the
    gradient of U_n per sample beforehand.

    Deviations: the discriminator's second layer has 256 neurons (the text's 265 looks like a misprint). The mean
    leaves the agent out, as (5) and unlike line 15. r_loc begins after the first transfer.
    """

    name = "fedal"
    paper = "Han, Shi, Huang 2023"
    exchanges = "outputs on public data to the hub; their mean and a gradient of outputs back"
    needs = Ability.GRADIENTS
    needs_public = True
    message_bytes = parts.output_bytes

    local_epochs: int = setting(1, "epochs of local training per round", at_least=0)
    local_steps: int | None = setting(5, "τ, gradient steps per round, instead of epochs", at_least=0)
    batch_size: int = setting(32, "samples per gradient step, private and public", at_least=1)
    transfer_steps: int | None = setting(5, "τ, public batches per round; unset: one pass over all", at_least=0)
    temperature: float = setting(1.0, "E, softens the outputs in the distillation loss", above=0)
    less_forgetting: float = setting(1.0, "weight of r, which holds a model to itself before a stage", at_least=0)
    aggregate: str = setting("mean", "how the others' outputs become one target", choices=parts.KINDS)
    trim: float = setting(0.2, parts.TRIM, at_least=0, at_most=0.49)
    adversarial: float = setting(1.0, "weight of U_n, the adversarial loss; 0: without a discriminator", at_least=0)
    clip: float | None = setting(None, "longest gradient of U_n for a sample; unset: unbounded", above=0)
    discriminator_lr: float = setting(1e-4, "η_d, learning rate of the discriminator", above=0)
    discriminator_temperature: float = setting(2.0, "E, softens the discriminator's input", above=0)
    discriminator_hidden: tuple[int, ...] = setting(
        (32, 256), "neurons in the discriminator's hidden layers", at_least=1
    )

    async def round(self, me: Agent, t: int) -> None:
        """Lines 4-6: local training; lines 8-18: knowledge transfer."""
        # (13): r_loc holds on to the end of the last transfer; before the first there is nothing to forget.
        old = me.learner.snapshot(training=True) if self.less_forgetting and "taught" in me.state else None
        for x, y in me.shard.batches(t, self.batch_size, self.local_epochs, self.local_steps):
            f = me.learner(x)
            loss = me.learner.loss(f, y)
            if old is not None:
                loss = loss + self.less_forgetting * parts.distillation(f, old(x), self.temperature)
            me.learner.descend(loss)  # (17)
        if len(me.present) > 1:  # alone, not even the statistics of batch norm may change
            await self._transfer(me, t)

    async def _transfer(self, me: Agent, t: int) -> None:
        old = me.learner.snapshot(training=True) if self.less_forgetting else None  # (14): after local training
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
            if self.adversarial and not me.diverged:
                # (21), the chain rule: ∇_θ U_n = ∇_{f_n} U_n · ∇_θ f_n; line 18 is a mean over P
                gradient = torch.from_numpy(parts.clip_rows(reply["told"][1], self.clip))
                loss = loss + self.adversarial * (f * gradient).sum() / len(f)
            if old is not None:
                loss = loss + self.less_forgetting * parts.distillation(f, old(u), self.temperature)
            me.learner.descend(loss)  # (18)
            me.state["taught"] = True

    async def hub(self, me: Hub, t: int) -> None:
        """Lines 12-16, over the agents that answered: a step of the discriminator, the mean output, and ∇_{f_n} U_n."""
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
            mean, gradients, figures = aggregation.of_all(f, shares), None, {}  # f̄
            if self.adversarial:  # lines 13 and 16
                gradients, figures["discriminator_accuracy"] = discriminator.step(me, list(heard), f)
            await me.scatter(parts.replies(me.present, list(heard), f, mean, aggregation, shares, gradients))
            me.measure(heard, **figures, disagreement=parts.disagreement(f, mean))
        if self.adversarial:
            discriminator.save(me)

    def check(self, agents: Sequence[Agent]) -> None:
        """There must be classes: a softmax of real values means nothing."""
        parts.check_classes(agents, self.name)
