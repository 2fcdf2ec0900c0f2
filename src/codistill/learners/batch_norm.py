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
    if len(x) != 1:
        return module(x)  # type: ignore[no-any-return]
    with single_values_allowed(module, x):
        return module(x)  # type: ignore[no-any-return]


def names_of_batch_norm(module: nn.Module) -> frozenset[str]:
    """Names, in the module's state, of what belongs to batch norm: parameters, running statistics, counters."""
    norms = {name: part for name, part in module.named_modules() if isinstance(part, _BatchNorm)}
    return frozenset(f"{name}.{key}" if name else key for name, norm in norms.items() for key in norm.state_dict())


@contextmanager
def single_values_allowed(module: nn.Module, x: torch.Tensor) -> Iterator[None]:
    """While it passes, batch norm that would see a single value per channel uses its running statistics."""
    norms = [part for part in module.modules() if isinstance(part, _BatchNorm)] if len(x) == 1 else []
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
