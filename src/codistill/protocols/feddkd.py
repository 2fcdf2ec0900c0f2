"""FedDKD: averaging models by what they compute; with FedMAX or FedBN, FedDKD_MAX and FedDKD_BN."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, log

import numpy as np
import torch
from scipy.special import log_softmax

from codistill.protocol import Ability, Agent, Hub, Message, Protocol, setting
from codistill.protocols import parts


@dataclass(frozen=True, kw_only=True)
class FedDKD(Protocol):
    """Li, Chen, Lu. FedDKD: Federated Learning with Decentralized Knowledge Distillation. 2022. Algorithms 1 to 5.

    Φ(x; w): outputs before the softmax; w_k: weights of agent k after local training; w̄_{t,j}: the global model in
    round t after j steps of distillation (DKD). A DKD round is local training and the mean of weights, as in FedAvg;
    then J times every agent sends the gradient of L_CE(Φ(x; w_k), Φ(x; w̄)) by w̄ on a batch of its own samples, and
    gets w̄ after a step down the mean of these. That is 1 + J communication rounds. With J = 0 it is FedAvg.

    `local` = "max" is FedDKD_MAX (Algorithm 3: local training as in FedMAX); `average` = "except batch norm" is
    FedDKD_BN (Algorithms 4, 5: parameters and statistics of batch norm stay with their agent, as in FedBN).

    Deviations: q_k is inside the sum of line 10. In DKD batch norm uses the statistics of the batch in both models,
    dropout leaves nothing out, and a step far beyond all w_k is not taken; the paper does not say. Others: as FedAvg's.
    """

    name = "feddkd"
    paper = "Li, Chen, Lu 2022"
    exchanges = "weights, and gradients of a distillation loss, to and from the hub"
    needs = Ability.WEIGHTS | Ability.GRADIENTS
    take_over = parts.take_over

    local_epochs: int = setting(1, "epochs of local training per round", at_least=0)
    local_steps: int | None = setting(None, "gradient steps per round, instead of epochs", at_least=0)
    batch_size: int = setting(32, "samples per gradient step", at_least=1)
    lr_decay: float = setting(1.0, "factor on the learning rate per round", above=0, at_most=1)
    local: str = setting("plain", "local training; max: as in FedMAX", choices=("plain", "max"))
    activation_weight: float = setting(10.0, "β, of the divergence of activations, for local 'max'", at_least=0)
    average: str = setting("all", "which weights are shared", choices=("all", "except batch norm"))
    dkd_steps: int = setting(10, "J, steps of distillation per round", at_least=0)
    dkd_lr: float = setting(0.2, "γ, learning rate of these steps", above=0)
    dkd_lr_decay: float = setting(1.0, "factor on γ per round", above=0, at_most=1)
    dkd_lr_step_decay: float = setting(1.0, "factor on γ per step in a round", above=0, at_most=1)
    dkd_batch_size: int = setting(64, "B̃, samples of each agent per step of distillation", at_least=1)
    dkd_shares: str = setting("equal", "q_k, of an agent's gradient: equal, or by n_k", choices=("equal", "samples"))
    warm_up: int = setting(0, "rounds without distillation at the start", at_least=0)
    aggregate: str = setting("mean", "how the weights of all become one", choices=parts.PLAIN_KINDS)
    trim: float = setting(0.2, parts.TRIM, at_least=0, at_most=0.49)
    cap: float = setting(10.0, "largest n_k in the mean, in medians of all n_k", at_least=1)
    optimiser_state: str = setting("fresh", "its moments, where weights are replaced", choices=parts.OPTIMISER_STATES)
    synchronise: bool = setting(True, "start all agents from the same initial weights")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.local == "max":
            object.__setattr__(self, "needs", type(self).needs | Ability.FEATURES)

    async def begin(self, me: Agent) -> None:
        """Equal initial weights, if `synchronise`."""
        if self.synchronise:
            parts.same_initial_weights(me)

    async def round(self, me: Agent, t: int) -> None:
        """Algorithm 1, for one client k."""
        self._train(me, t)  # line 5: w_k ← Client-LocalTrain(k, w*_{t-1})
        own = self.common(me)
        reply = await me.ask_hub(Message(own, {"samples": len(me.shard)}), expect=own)
        w = mean = None if reply is None else reply.arrays  # w̄_{t,0}; None: it was lost
        # Lines 7 to 11. Of the agent's own model, the teacher, nothing changes here.
        for batch in me.shard.batches(t, self.dkd_batch_size, steps=self._steps(me, t), purpose="distillation"):
            gradient = {} if w is None else dkd_gradient(me, w, batch[0])  # ∇d_k,j
            reply = await me.ask_hub(Message(gradient), expect=floats(own))
            w = w if reply is None else {**(w or own), **reply.arrays}  # w̄_{t,j}
        if self._steps(me, t):
            note_effect(me, mean, w, batch)
        self.take_over(me, w, t)  # line 12: w*_t = w̄_{t,J}

    def common(self, me: Agent) -> dict[str, np.ndarray]:
        """w̄: all weights, or those that are not of batch norm."""
        return parts.shared_weights(me, self.average)

    def _train(self, me: Agent, t: int) -> None:
        """Client-LocalTrain; with `local` = "max", Algorithm 3."""
        parts.set_lr(me, self.lr_decay**t, None)
        for x, y in me.shard.batches(t, self.batch_size, self.local_epochs, self.local_steps):
            if self.local == "plain" or len(me.roster) == 1:
                loss = me.learner.loss(me.learner(x), y)
            else:
                f, a = me.learner.with_features(x)
                # g(w; b) = F(w; b) + β 1/B Σ_i KL(a_i ‖ U)
                loss = me.learner.loss(f, y) + self.activation_weight * parts.activation_divergence(a)
            me.learner.descend(loss)

    def _steps(self, me: Agent | Hub, t: int) -> int:
        return self.dkd_steps if t >= self.warm_up and len(me.present) > 1 else 0

    async def hub(self, me: Hub, t: int) -> None:
        """Algorithm 1, SERVER; if agents joined with different architectures, each separately."""
        heard = parts.accepted_weights(me, await me.gather(), self.average)
        shares = {name: message["samples"] if self.dkd_shares == "samples" else 1 for name, message in heard.items()}
        # line 6: w̄_{t,0} = Σ_k n_k / Σ_i n_i · w_k
        models = means = parts.group_means(me, heard, self.aggregate, self.trim, self.cap, self.average)
        await me.scatter(parts.to_groups(me, models, t))
        for j in range(self._steps(me, t)):
            sent = await me.gather()
            models = [
                (names, self._step(me, {k: sent[k] for k in names if k in sent}, shares, w, t, j))
                for names, w in models
            ]
            models = unless_diverged(me, models, means, heard)
            await me.scatter(parts.to_groups(me, [(names, floats(w)) for names, w in models], t))

    def _step(
        self, me: Hub, sent: dict[str, Message], shares: dict[str, int], w: dict[str, np.ndarray], t: int, j: int
    ) -> dict[str, np.ndarray]:
        gradients = accepted_gradients(me, sent, w, shares)
        if not gradients:
            return w
        gradient = parts.combined_weights(gradients, self.aggregate, self.trim, self.cap, me)  # Σ_k q_k ∇d_k,j
        rate = self.dkd_lr * self.dkd_lr_decay**t * self.dkd_lr_step_decay**j  # γ
        return stepped(w, gradient, rate)  # line 10: w̄_{t,j} = w̄_{t,j-1} - γ Σ_k q_k ∇d_k,j

    def check(self, agents: Sequence[Agent]) -> None:
        """All agents must have the same weights by name and shape; and there must be classes, for a softmax."""
        parts.check_equal_weights(agents, self.name)
        parts.check_classes(agents, self.name)


def dkd_gradient(me: Agent, w: dict[str, np.ndarray], x: torch.Tensor) -> dict[str, np.ndarray]:
    """Algorithm 2, DKDSGD: 1/B̃ ∂ Σ_x L_CE(Φ(x; w_k), Φ(x; w)) / ∂w, where w_k are the agent's own weights.

    L_CE is the cross-entropy of the student's softmax against the teacher's, which has the gradient of their KL. Empty
    where it is not finite: then w is far beyond any model.
    """
    gradient = me.learner.gradient_at(w, x, parts.distillation)
    return gradient if all(np.isfinite(array).all() for array in gradient.values()) else {}


def accepted_gradients(
    me: Hub, heard: Mapping[str, Message], w: Mapping[str, np.ndarray], shares: Mapping[str, int]
) -> dict[str, Message]:
    """The gradients by w of those who have a share q_k, with it; an agent that had no w sends an empty message."""
    expected = floats(w)
    return {
        name: Message(message.arrays, {"samples": shares[name]})
        for name, message in heard.items()
        if name in shares and message and me.accepts(name, message, expected)
    }


def stepped(w: Mapping[str, np.ndarray], gradient: Mapping[str, np.ndarray], rate: float) -> dict[str, np.ndarray]:
    """w - γ ∇, for the weights that have a gradient; finite, whatever was sent."""
    with np.errstate(over="ignore"):
        moved = {name: array - np.asarray(rate, array.dtype) * gradient[name] for name, array in floats(w).items()}
    return dict(w) | {name: array if np.isfinite(array).all() else w[name] for name, array in moved.items()}


def floats(weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The weights that have a gradient, or could have: all but counters and masks."""
    return {name: array for name, array in weights.items() if array.dtype.kind == "f"}


def unless_diverged(
    me: Hub,
    models: list[tuple[list[str], dict[str, np.ndarray]]],
    means: list[tuple[list[str], dict[str, np.ndarray]]],
    heard: Mapping[str, Message],
) -> list[tuple[list[str], dict[str, np.ndarray]]]:
    """The distilled models; their means of weights for the rest of the round, once a step has led far beyond all w_k.

    Distillation moves the mean towards what the models w_k compute: weights ten times as large as the
    largest of them cannot come from that: γ is too large.
    """
    if me.diverged:
        return means
    for (_, w), (_, mean) in zip(models, means, strict=True):
        size = parts.size_of(w)
        if size <= parts.GROWTH * parts.size_of(mean):
            continue
        largest = max(parts.size_of(message.arrays) for message in heard.values())
        if not size <= parts.GROWTH * largest:
            me.diverged = True
            me.remark(
                f"diverged: distillation made weights {size / max(largest, 1e-9):.3g} times as large as those sent; "
                "this round ends with their mean. Its learning rate may be too large."
            )
            return means
    return models


def note_effect(
    me: Agent,
    mean: dict[str, np.ndarray] | None,
    w: dict[str, np.ndarray] | None,
    batch: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """Measure what distillation has made of the mean of weights: accuracy and loss on a batch of the agent's own.

    Remarks on a loss that is twice that of the mean, and beyond that of a guess. None: these weights were lost.
    """
    if mean is None or w is None:
        return
    (x, y), figures = batch, {}
    labels = y.numpy()
    with np.errstate(over="ignore", invalid="ignore"):  # weights that were received may be anything finite
        for when, weights in (("before", mean), ("after", w)):
            log_p = log_softmax(me.learner.outputs_at(weights, x), axis=1)
            figures[f"accuracy_{when}_dkd"] = float((log_p.argmax(axis=1) == labels.argmax(axis=1)).mean())
            figures[f"loss_{when}_dkd"] = float(-(labels * log_p).sum(axis=1, dtype=np.float64).mean())
    me.measure(me.name, **{name: value for name, value in figures.items() if isfinite(value)})
    before, after = figures["loss_before_dkd"], figures["loss_after_dkd"]
    if not after <= max(2 * before, log(y.shape[1])):
        me.remark(f"distillation raised the loss on its own samples from {before:.3g} to {after:.3g}.")
