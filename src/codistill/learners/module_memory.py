"""The memory of a module: which first values are kept, and how its tensors are freed and allocated again."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

# Layers whose `reset_parameters` sets all of these: their first values are never needed again.
_RESETTABLE = (
    nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.LayerNorm, nn.GroupNorm, nn.Embedding,
)  # fmt: skip
_RESET = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")


def initial_values(module: nn.Module) -> dict[str, Any]:
    """A copy of what a module's layers cannot reset by themselves."""
    known = {
        f"{prefix}.{name}" if prefix else name
        for prefix, part in module.named_modules(remove_duplicate=False)
        if type(part) in _RESETTABLE  # not a class derived from one, whose reset may do less
        for name in _RESET
    }
    return copy.deepcopy({name: value for name, value in module.state_dict().items() if name not in known})


@dataclass(frozen=True)
class FreedTensor:
    """A parameter or buffer without memory, and how it lay in memory."""

    tensor: torch.Tensor
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def allocate(self) -> None:
        """Memory of the same layout, with any values."""
        self.tensor.data = torch.empty_strided(
            self.size, self.stride, dtype=self.tensor.dtype, device=self.tensor.device
        )


def free(module: nn.Module) -> list[FreedTensor]:
    """Free the memory of what a module's state consists of; returns what is to be allocated again."""
    freed = []
    for tensor in _tensors_of(module):
        freed.append(FreedTensor(tensor, tuple(tensor.size()), tensor.stride()))
        tensor.grad = None
        tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return freed


def distinct_tensors(module: nn.Module) -> dict[str, Any]:
    """A module's state by name; a tensor that has several names (tied weights) under the first one alone."""
    found: dict[int, str] = {}
    state = module.state_dict(keep_vars=True)
    return {name: value for name, value in state.items() if found.setdefault(id(value), name) == name}


def first_names(module: nn.Module) -> dict[str, str]:
    """The other names of tensors that have several, and the first name of each."""
    state = module.state_dict(keep_vars=True)
    if len({id(value) for value in state.values()}) == len(state):
        return {}
    first = {id(value): name for name, value in distinct_tensors(module).items()}
    return {name: first[id(value)] for name, value in state.items() if first[id(value)] != name}


def bytes_of(module: nn.Module) -> int:
    """Bytes of what a module's state consists of."""
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors_of(module))


def _tensors_of(module: nn.Module) -> list[torch.Tensor]:
    return [value for value in distinct_tensors(module).values() if isinstance(value, torch.Tensor)]
