"""Local training, and the terms that weight-sharing protocols add to its loss."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import log

import numpy as np
import torch

from codistill.protocol import Agent


def train_locally(me: Agent, batches: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """A gradient step down the owner's loss ℓ(f(x), y) for each batch."""
    for x, y in batches:
        me.learner.descend(me.learner.loss(me.learner(x), y))


def proximal(me: Agent, start: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """‖w - w^t‖² over all trainable parameters."""
    terms = [(w - start[name]).square().sum() for name, w in me.learner.parameters().items()]
    return torch.stack(terms).sum()


def parameters_of(me: Agent, weights: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """Those of the weights that are trainable parameters, as tensors."""
    return {name: torch.as_tensor(weights[name]) for name in me.learner.parameters()}


def activation_divergence(features: torch.Tensor) -> torch.Tensor:
    """1/B Σ_i KL(a_i ‖ U), a = softmax of the features and U uniform: Σ_j a_j log a_j + log d."""
    log_a = torch.log_softmax(features, dim=1)
    return (log_a.exp() * log_a).sum(dim=1).mean() + log(features.shape[1])
