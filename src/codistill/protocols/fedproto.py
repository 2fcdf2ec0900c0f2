"""FedProto: learning features that are alike, by class prototypes or on public data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.functional import mse_loss

from codistill.protocol import Ability, Agent, Hub, Message, Protocol, setting
from codistill.protocols import parts


@dataclass(frozen=True, kw_only=True)
class FedProto(Protocol):
    """Tan et al. FedProto: Federated Prototype Learning across Heterogeneous Clients. AAAI 2022. Algorithm 1; and
    in the form for unlabelled public data of Han, Shi, Huang. FedAL. Section VI-A.

    h_n(x): features of agent n, the input of its head, of the same dimension for all agents.
    "classes": an agent sends C_n,c, the mean of h_n over its samples of class c, and gets C̄_c, the mean over all
    agents who have class c, itself among them. From the next round on a sample of class c has the loss
    ℓ(f, y) + λ |h_n(x) - C̄_c|². "public": after local training, for each mini-batch P of public data, an agent sends
    h_n(P), gets the mean h_-n(P) of all others, and takes a step down λ |h_n(P) - h_-n(P)|².

    Deviations: in print the regulariser is between prototypes, and C̄_c is weighted by samples; here, as in the
    authors' code, it is between samples and prototypes, a mean over features, and C̄_c is a plain mean. C_n,c is taken
    after training, in evaluation mode, over all samples or those of the `local_steps`. An agent predicts by its own
    head, not by the nearest prototype. An agent whose model diverges leaves the regulariser out until the next round.
    A class of fewer than `smallest_group` samples is left out, and so named.
    """

    name = "fedproto"
    paper = "Tan et al., AAAI 2022; Han, Shi, Huang 2023, sec. VI-A"
    exchanges = "mean features per class, or features on public data, to and from the hub"
    needs = Ability.GRADIENTS | Ability.FEATURES
    chosen_by_agents = ("smallest_group",)

    form: str = setting("classes", "what is sent: means of classes, or of public data", choices=("classes", "public"))
    local_epochs: int = setting(1, "epochs of local training per round", at_least=0)
    local_steps: int | None = setting(None, "gradient steps per round, instead of epochs", at_least=0)
    batch_size: int = setting(32, "samples per gradient step, private and public", at_least=1)
    transfer_steps: int | None = setting(None, "public batches per round; unset: one pass over all", at_least=0)
    weight: float = setting(1.0, "λ, of the distance between features", at_least=0)
    aggregate: str = setting("mean", "how the features of many become one target", choices=parts.PLAIN_KINDS)
    trim: float = setting(0.2, parts.TRIM, at_least=0, at_most=0.49)
    smallest_group: int = setting(2, parts.SMALLEST, at_least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        # The class says what its default form needs, an instance what its own does.
        object.__setattr__(self, "needs_public", self.form == "public")

    async def round(self, me: Agent, t: int) -> None:
        """Local training, then one of the two ways to share features."""
        for x, y in me.shard.batches(t, self.batch_size, self.local_epochs, self.local_steps):
            f, h = me.learner.with_features(x)
            loss = me.learner.loss(f, y)
            rows, prototypes = parts.class_targets(me.state, y)
            if len(prototypes) and not me.diverged:
                loss = loss + self.weight * mse_loss(parts.chosen(h, rows), prototypes)  # ℓ(f, y) + λ |h_n(x) - C̄_c|²
            me.learner.descend(loss)
        if len(me.present) > 1:  # alone, an agent does not learn from its own past
            await (self._share_prototypes(me, t) if self.form == "classes" else self._transfer(me, t))

    async def _share_prototypes(self, me: Agent, t: int) -> None:
        x, targets = me.shard.x, me.shard.targets
        if self.local_steps:  # after a few steps, the samples of these steps are enough
            used = list(me.shard.batches(t, self.batch_size, steps=self.local_steps))
            x, targets = (np.concatenate(each) for each in zip(*used, strict=True))
        y, h = targets.astype(np.float64), me.learner.evaluated_features(x)
        sent = parts.large_classes(me, y.sum(axis=0), self.smallest_group)
        prototypes, seen = parts.class_means(y.T @ h, y.sum(axis=0), sent)  # C_n,c
        message = Message.of(prototypes=prototypes, seen=seen)
        reply = await me.ask_hub(message, expect={"prototypes": prototypes, "known": seen})
        if reply is not None:  # where it was lost, the last prototypes stay
            me.state |= {"told": reply["prototypes"].astype(np.float32), "known": reply["known"].copy()}

    async def _transfer(self, me: Agent, t: int) -> None:
        for _, u in me.public.batches(t, self.batch_size, self.transfer_steps):
            _, h = me.learner.with_features(u)
            sent = h.detach().numpy()
            others = parts.leave_one_out(await me.ask_hub(f=sent, expect=parts.expected_reply(sent)), sent)
            if others is not None:
                me.learner.descend(self.weight * mse_loss(h, torch.from_numpy(others)))  # λ |h_n(P) - h_-n(P)|²

    async def hub(self, me: Hub, t: int) -> None:
        """The mean over the agents that answered: of prototypes with the receiver's own, of public features without."""
        aggregation = parts.Aggregation(kind=self.aggregate, trim=self.trim, outputs=False, hub=me)
        if self.form == "classes":
            return await self._mean_prototypes(me, aggregation)
        for ids, _ in me.public.batches(t, self.batch_size, self.transfer_steps) if len(me.present) > 1 else ():
            heard = await me.gather(expect=expected_features(me, "f", len(ids)))
            answers = dict.fromkeys(me.present, Message())
            for names, group in parts.groups_alike(me, heard, "features"):
                h, _ = parts.stacked(group)
                answers |= parts.replies(names, list(group), h, aggregation.of_all(h), aggregation)
            await me.scatter(answers)

    async def _mean_prototypes(self, me: Hub, aggregation: parts.Aggregation) -> None:
        like = {"seen": np.empty(me.classes, bool)}
        heard = await me.gather(expect=expected_features(me, "prototypes", me.classes, **like))
        answers = dict.fromkeys(me.present, Message())
        for names, group in parts.groups_alike(me, heard, "features"):
            told = np.zeros_like(next(iter(group.values()))["prototypes"])
            known = np.zeros(len(told), dtype=bool)
            for holders, classes in parts.classes_by_holders(group):
                held = np.stack([group[name]["prototypes"][classes] for name in holders])
                told[classes], known[classes] = aggregation.of_all(held), True  # C̄_c
            answers |= dict.fromkeys(names, Message.of(prototypes=told, known=known))
        await me.scatter(answers)

    def check(self, agents: Sequence[Agent]) -> None:
        """All features must have one dimension, and the mean of a class may not be a mean of private samples."""
        parts.check_features(agents, self.name, by_class=self.form == "classes")
        if self.form == "classes":
            parts.check_classes(agents, self.name, softmax=False)


def expected_features(me: Hub, array: str, rows: int, **others: Any) -> Callable[[str], dict[str, Any]]:
    """What the hub expects of an agent: `rows` rows, of as many features as it joined with, and `others`."""

    def of(name: str) -> dict[str, Any]:
        said = me.joined.get(name)
        features = (rows, None) if said is None else np.empty((rows, said.features or 0), np.float32)
        return {array: features, **others}

    return of
