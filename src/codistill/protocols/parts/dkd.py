"""Decentralized knowledge distillation (Li, Chen, Lu. FedDKD): averaging models by what they compute."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite, log

import numpy as np
import torch
from scipy.special import log_softmax

from codistill.protocol import Agent, Hub, Message
from codistill.protocols.parts.losses import distillation
from codistill.protocols.parts.weights import GROWTH, size_of


def dkd_gradient(me: Agent, w: dict[str, np.ndarray], x: torch.Tensor) -> dict[str, np.ndarray]:
    """Algorithm 2, DKDSGD: 1/B̃ ∂ Σ_x L_CE(Φ(x; w_k), Φ(x; w)) / ∂w, where w_k are the agent's own weights.

    L_CE is the cross-entropy of the student's softmax against the teacher's, which has the gradient of their KL. Empty
    where it is not finite: then w is far beyond any model.
    """
    gradient = me.learner.gradient_at(w, x, distillation)
    return gradient if all(np.isfinite(array).all() for array in gradient.values()) else {}


def unless_diverged(
    me: Hub,
    models: list[tuple[list[str], dict[str, np.ndarray]]],
    means: list[tuple[list[str], dict[str, np.ndarray]]],
    heard: Mapping[str, Message],
) -> list[tuple[list[str], dict[str, np.ndarray]]]:
    """The distilled models; their means of weights for the rest of the round, once a step has led far beyond all w_k.

    Distillation moves the mean towards what the models w_k compute: whatever is ten times as large as the largest of
    them is no such model, and γ too large.
    """
    if me.diverged:
        return means
    for (_, w), (_, mean) in zip(models, means, strict=True):
        size = size_of(w)
        if size <= GROWTH * size_of(mean):
            continue
        largest = max(size_of(message.arrays) for message in heard.values())
        if not size <= GROWTH * largest:
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


def floats(weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The weights that have a gradient, or could have: all but counters and masks."""
    return {name: array for name, array in weights.items() if array.dtype.kind == "f"}


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
