"""Frozen copies of a module: one that is no longer used takes the next weights, faster than a new one is made."""

from __future__ import annotations

import copy

import torch
from torch import nn

# Modules whose tensors are all that changes in training. What a user's own keeps besides, only a copy takes over.
_KNOWN = ("torch.nn.modules.", "codistill.learners.zoo.")


class FrozenCopy:
    """A copy of a module, without gradients; with the last reference to it, its module is free for the next copy."""

    def __init__(self, module: nn.Module, spare: list[nn.Module]) -> None:
        self.module, self._spare = module, spare

    def __del__(self) -> None:
        self._spare.append(self.module)


class FrozenCopies:
    """Makes copies of a module as it is now."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self._spare = module, list[nn.Module]()
        self._plain = all(type(part).__module__.startswith(_KNOWN) for part in module.modules())

    def take(self, *, training: bool) -> FrozenCopy:
        """A copy; in training mode its batch norm sees a batch as the module itself does."""
        if not self._plain or not self._spare:
            frozen = copy.deepcopy(self._module).train(training).requires_grad_(False)
            return FrozenCopy(frozen, self._spare if self._plain else [])
        frozen = self._spare.pop()
        with torch.no_grad():
            torch._foreach_copy_(_tensors(frozen), _tensors(self._module))
        return FrozenCopy(frozen if frozen.training == training else frozen.train(training), self._spare)

    def forget(self) -> None:
        """Free the memory of copies that are not used."""
        self._spare = []


def _tensors(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]
