"""FedMD: learning from the mean of the others' outputs on public data; with less-forgetting, FedMD-LF."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from codistill.protocol import Ability, Agent, Hub, Message, MessageError, Protocol, RecipeError, setting
from codistill.protocols import parts


@dataclass(frozen=True, kw_only=True)
class FedMD(Protocol):
    """Li, Wang. FedMD: Heterogenous Federated Learning via Model Distillation. 2019; in the form of
    Han, Shi, Huang. FedAL. Section III-B, eqs. (2)-(6).

    f_n: outputs of agent n before the softmax ψ; E: temperature; P: a mini-batch of public data, the same for all.
    A round is local training, then `transfer_steps` batches P. For each, agent n sends f_n(P) and gets the mean f̄ of
    all; with itself removed that is f_-n, and it takes a step down KL(ψ(f_-n, E) ‖ ψ(f_n, E)). With `less_forgetting`
    = 1 this is FedMD-LF: each stage also holds the model to what it was before the stage, (13) and (14).

    It can do without rounds: the hub then keeps the latest f of each agent for each public sample, and f_-n is the mean
    of those of the others; samples for which nobody else has sent any are left out of (4).

    Black-box form, for learners that only fit and predict: f_n = log p_n, a logit up to a constant that cancels in ψ,
    so both kinds mix. Such an agent keeps ψ(f_-n, E) of public samples that it has seen, and is fitted anew at the end
    of a round, on its labels and these. Deviations: outputs of training mode, as in the next step; no (13) in round 1.

    For targets of one real value f_n is the prediction, and (f_-n - f_n)² takes the place of the divergence.
    """

    name = "fedmd"
    paper = "Li & Wang 2019; Han, Shi, Huang 2023, sec. III-B"
    exchanges = "outputs on public data, to and from the hub"
    needs = Ability.PREDICT
    needs_public = True
    asynchronous = True
    message_bytes = parts.output_bytes

    local_epochs: int = setting(1, "epochs of local training per round", at_least=0)
    local_steps: int | None = setting(None, "τ, gradient steps per round, instead of epochs", at_least=0)
    batch_size: int = setting(32, "samples per gradient step, private and public", at_least=1)
    transfer_steps: int | None = setting(None, "τ, public batches per round; unset: one pass over all", at_least=0)
    temperature: float = setting(1.0, "E, softens the outputs in the distillation loss", above=0)
    less_forgetting: float = setting(0.0, "weight of the loss that holds a model to itself before a stage", at_least=0)
    aggregate: str = setting("mean", "how the others' outputs become one target", choices=parts.KINDS)
    trim: float = setting(0.2, parts.TRIM, at_least=0, at_most=0.49)
    floor: float = setting(1e-3, "smallest probability that a black-box agent sends", above=0, at_most=0.1)

    async def begin(self, me: Agent) -> None:
        """A black box has to be fitted before it can predict."""
        if Ability.GRADIENTS not in me.learner.abilities:
            me.learner.fit(me.shard.x, me.shard.targets)

    async def round(self, me: Agent, t: int) -> None:
        """Local training, then knowledge transfer."""
        if Ability.GRADIENTS not in me.learner.abilities:
            return await self._transfer_by_fitting(me, t)
        old = me.learner.snapshot(training=True) if self.less_forgetting and "taught" in me.state else None
        for x, y in me.shard.batches(t, self.batch_size, self.local_epochs, self.local_steps):
            f = me.learner(x)
            loss = me.learner.loss(f, y)
            if old is not None:  # (13)
                loss = loss + self.less_forgetting * parts.distillation(f, old(x), self.temperature)
            me.learner.descend(loss)
        if len(me.present) > 1:  # alone, not even the statistics of batch norm may change
            await self._transfer(me, t)

    async def _transfer(self, me: Agent, t: int) -> None:
        old = me.learner.snapshot(training=True) if self.less_forgetting else None
        for ids, u in me.public.batches(t, self.batch_size, self.transfer_steps):
            f = me.learner(u)
            others, known = await self._outputs_of_others(me, ids, f.detach().numpy())
            if others is None:
                continue
            loss = parts.distillation(f[known], torch.from_numpy(others[known]), self.temperature)  # (4)
            if old is not None:  # (14)
                loss = loss + self.less_forgetting * parts.distillation(f, old(u), self.temperature)
            me.learner.descend(loss)
            me.state["taught"] = True

    async def _transfer_by_fitting(self, me: Agent, t: int) -> None:
        p, real = me.learner.predict(me.public.x), me.classes == 1
        f = (p if real else np.log(np.maximum(p, self.floor))).astype(np.float32)
        # ψ(f_-n, E), or f_-n of real values; 0, or NaN, where a sample has not been seen yet
        soft = me.state.setdefault("soft", np.full_like(f, np.nan if real else 0))
        for ids, _ in me.public.batches(t, self.batch_size, self.transfer_steps):
            others, known = await self._outputs_of_others(me, ids, f[ids])
            if others is not None and real:
                soft[ids[known]] = others[known]
            elif others is not None:
                soft[ids[known]] = torch.softmax(
                    torch.from_numpy(others[known]) / self.temperature, dim=1
                ).numpy()  # (6)
        seen = np.isfinite(soft[:, 0]) if real else soft.any(axis=1)
        if seen.any():
            x = np.concatenate([me.shard.x, me.public.x[seen]])
            me.learner.fit(x, np.concatenate([me.shard.targets, soft[seen]]))

    async def _outputs_of_others(
        self, me: Agent, ids: np.ndarray, f: np.ndarray
    ) -> tuple[np.ndarray | None, slice | np.ndarray]:
        """f_-n for a public batch, if anybody was heard, and for which of its samples."""
        shares = parts.coverage(me, self.aggregate)
        if me.asynchronous:
            reply = await me.ask_hub(f=f, ids=ids.astype(np.int32), **shares, expect=expected_latest(f))
            return (None, slice(0)) if reply is None else (reply["told"], np.flatnonzero(reply["known"]))
        reply = await me.ask_hub(f=f, **shares, expect=parts.expected_reply(f))
        return parts.leave_one_out(reply, f), slice(None)  # (5)

    def _aggregation(self, me: Hub) -> parts.Aggregation:
        outputs = me.classes > 1  # before a softmax
        return parts.Aggregation(
            kind=self.aggregate, trim=self.trim, temperature=self.temperature, outputs=outputs, hub=me
        )

    def _measure(self, me: Hub, heard: Sequence[str], f: np.ndarray, mean: np.ndarray) -> None:
        if me.classes > 1:
            me.measure(heard, disagreement=parts.disagreement(f, mean))
        else:
            me.measure(heard, deviation=np.sqrt(np.square(f.astype(np.float64) - mean).mean(axis=(1, 2))))

    def serve(self, me: Hub, sender: str, message: Message) -> Message:
        """Without rounds: keep an agent's outputs, and answer with the aggregate of the others' latest ones."""
        if not keep_latest(me, sender, message, self.batch_size + 1, self.aggregate):
            return Message()
        told, known = latest_of_others(me, sender, message["ids"], self._aggregation(me))
        if not known.any():
            return Message()
        self._measure(me, [sender], message["f"][None, known], told[known])
        return Message.of(told=told, known=known)

    async def hub(self, me: Hub, t: int) -> None:
        """With rounds: aggregate the outputs that arrived, batch by batch."""
        aggregation = self._aggregation(me)
        for ids, _ in me.public.batches(t, self.batch_size, self.transfer_steps) if len(me.present) > 1 else ():
            heard = await me.gather(expect=parts.expected_outputs(me, len(ids), self.aggregate))
            if not heard:
                await me.skip()
                continue
            f, shares = parts.stacked(heard)
            mean = aggregation.of_all(f, shares)  # f̄
            await me.scatter(parts.replies(me.present, list(heard), f, mean, aggregation, shares))
            self._measure(me, list(heard), f, mean)

    def check(self, agents: Sequence[Agent]) -> None:
        """There must be classes, or one real value per sample, for which some settings mean nothing."""
        if not parts.are_real_values(agents):
            parts.check_classes(agents, self.name)
            return
        default = FedMD()
        idle = [name for name in ("temperature", "floor") if getattr(self, name) != getattr(default, name)]
        if self.aggregate not in parts.PLAIN_KINDS:
            idle.append("aggregate")
        if idle:
            raise RecipeError(
                f"fedmd.{idle[0]} is for classes, and the targets are real values.",
                f"{getattr(self, idle[0])}",
                "Remove it." if idle[0] != "aggregate" else f"Use one of {', '.join(parts.PLAIN_KINDS)}.",
            )


# Without rounds, the hub keeps the latest outputs of each agent for each public sample. An agent sends f_n (|P|, K) as
# "f" and the row numbers of these samples as "ids". The reply is "told", the aggregate of the latest outputs of those
# others that have sent any for a sample, and "known", for which samples there are such others.


def expected_latest(f: np.ndarray) -> dict[str, np.ndarray]:
    """What an agent that sent f expects of the relay's reply."""
    return {"told": np.empty(f.shape, np.float32), "known": np.empty(len(f), bool)}


def keep_latest(me: Hub, sender: str, message: Message, most: int, aggregate: str) -> bool:
    """Keep an agent's outputs for some public samples, in place of those before; False: they are refused."""
    shares: dict[str, Any] = {"coverage": np.empty(me.classes, np.float32)} if aggregate == "coverage" else {}
    f, ids = np.empty((0, me.classes), np.float32), np.empty(0, np.int32)
    rows = {"f": (None, me.classes), "ids": (None,)}
    if not me.accepts(sender, message, {**rows, **shares}):
        return False
    sent, about = message["f"], message["ids"]
    if (sent.dtype, about.dtype) != (f.dtype, ids.dtype) or len(sent) != len(about) or not _is_within(about, me, most):
        must = f"Outputs must be float32, for at most {most} public samples, whose places are given as int32."
        found = f"{len(sent)} outputs as {sent.dtype}, {len(about)} places as {about.dtype}"
        me.refuse(sender, MessageError(must, found, "The sender must run the same protocol on the same public data."))
        return False
    nothing = {"f": np.zeros((len(me.public), me.classes), np.float32), "known": np.zeros(len(me.public), bool)}
    kept = me.state.setdefault("latest", {}).setdefault(sender, nothing)
    kept["f"][about], kept["known"][about] = sent, True
    if shares:
        kept["coverage"] = np.clip(message["coverage"], 0, 1)
    return True


def _is_within(ids: np.ndarray, me: Hub, most: int) -> bool:
    return 0 < len(ids) <= most and bool(ids.min() >= 0) and bool(ids.max() < len(me.public))


def latest_of_others(
    me: Hub, sender: str, ids: np.ndarray, aggregation: parts.Aggregation
) -> tuple[np.ndarray, np.ndarray]:
    """(|P|, K): the aggregate of the others' latest outputs for some samples; (|P|,): for which there are any."""
    others = [kept for name, kept in me.state["latest"].items() if name != sender]
    told = np.zeros((len(ids), me.classes), np.float32)
    if not others:
        return told, np.zeros(len(ids), bool)
    f, known = (np.stack([kept[key][ids] for kept in others]) for key in ("f", "known"))
    shares = np.stack([kept["coverage"] for kept in others]) if "coverage" in others[0] else None
    # Samples for which the same agents have outputs are aggregated together.
    groups, group = np.unique(known, axis=1, return_inverse=True)
    for number, who in enumerate(groups.T):
        rows = group.ravel() == number
        if who.any():
            told[rows] = aggregation.of_all(f[who][:, rows], None if shares is None else shares[who])
    return told, np.asarray(known.any(axis=0))
