"""Forward passes of one sample through batch norm, which has no variance to divide by there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def forward(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Outputs of a module; a batch norm that gets a single value per channel uses its running statistics instead.

    That is a batch of one sample, where a layer before has left one value per channel. In a larger batch, and where
    one image has many positions per channel, nothing is different.
    """
    norms = [part for part in module.modules() if isinstance(part, _BatchNorm)] if len(x) == 1 else []
    if not norms or not module.training:
        outputs: torch.Tensor = module(x)
        return outputs
    with _running_statistics_for_single_values(norms):
        return torch.as_tensor(module(x))


@contextmanager
def _running_statistics_for_single_values(norms: list[_BatchNorm]) -> Iterator[None]:
    changed: list[_BatchNorm] = []

    def check(norm: nn.Module, inputs: tuple[Any, ...]) -> None:
        assert isinstance(norm, _BatchNorm)
        if norm.training and norm.running_mean is not None and inputs[0].numel() == inputs[0].shape[1]:
            changed.append(norm.eval())

    hooks = [norm.register_forward_pre_hook(check) for norm in norms]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for norm in changed:
            norm.train()
