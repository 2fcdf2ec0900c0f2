"""Optimisers of a torch module, by name, and how their state lies in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

MakeOptimiser = Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]
OPTIMISERS = ("adam", "adamw", "sgd")


def make_optimiser(
    chosen: str | MakeOptimiser,
    parameters: Iterator[nn.Parameter],
    *,
    lr: float,
    weight_decay: float,
    momentum: float,
) -> torch.optim.Optimizer:
    """The optimiser that was chosen by name, or by a function of the parameters; only "sgd" has a momentum."""
    if callable(chosen):
        return chosen(parameters)
    match chosen:
        case "adam":
            return torch.optim.Adam(parameters, lr, weight_decay=weight_decay, fused=True)
        case "adamw":
            return torch.optim.AdamW(parameters, lr, weight_decay=weight_decay, fused=True)
    return torch.optim.SGD(parameters, lr, momentum=momentum, weight_decay=weight_decay, fused=True)


def lay_out_alike(optimiser: torch.optim.Optimizer) -> None:
    """Fused steps walk through memory: moments must lie there as their parameter does (channels last)."""
    for parameter, memory in optimiser.state.items():
        for name, value in memory.items():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                memory[name] = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)


def moments_of(chosen: str | MakeOptimiser, momentum: float) -> int:
    """How many values an optimiser keeps for each weight; of one that is unknown as many as Adam."""
    return int(momentum > 0) if chosen == "sgd" else 2
