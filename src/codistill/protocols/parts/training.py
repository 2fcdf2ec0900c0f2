"""Local training."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from codistill.protocol import Agent


def train_locally(me: Agent, batches: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """A gradient step down the owner's loss ℓ(f(x), y) for each batch."""
    for x, y in batches:
        me.learner.descend(me.learner.loss(me.learner(x), y))
