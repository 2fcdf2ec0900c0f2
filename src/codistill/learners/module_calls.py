"""How a torch module is called: what it takes and returns, as its owner has written it, and batches of one sample."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from codistill.core.errors import LearnerError

Part = tuple[str, int | list[int], bool]  # an argument: its name, its columns, whether they hold whole numbers


@dataclass(frozen=True)
class ModuleCall:
    """How a module is called with a batch of samples: as one tensor, or each argument with its columns of them."""

    whole: bool = False  # whether the tensor holds whole numbers
    parts: tuple[Part, ...] = ()

    def arguments(self, x: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
        """The arguments of forward, by position and by name."""
        if self.parts:
            return (), {name: x[:, part].long() if whole else x[:, part] for name, part, whole in self.parts}
        return (x.long() if self.whole else x,), {}

    def as_plain(self) -> dict[str, Any]:
        """What `from_plain` needs."""
        return {"whole": self.whole, "parts": [list(part) for part in self.parts]}

    @classmethod
    def from_plain(cls, saved: Mapping[str, Any]) -> ModuleCall:
        """The call that was saved; a `ValueError` if it is none."""
        parts = []
        for name, columns, whole in saved["parts"]:
            places = columns if isinstance(columns, list) else [columns]
            if not isinstance(name, str) or not all(type(place) is int and place >= 0 for place in places):
                raise ValueError(f"no argument of a module: {name!r:.40}, {columns!r:.40}")
            parts.append((name, columns, whole is True))
        return cls(saved["whole"] is True, tuple(parts))

    def __call__(self, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if self.parts or self.whole:
            values, named = self.arguments(x)
            return logits(module(*values, **named))
        return logits(module(x))


class CalledModule(nn.Module):
    """A module that takes samples as one tensor and returns logits, whatever the one in it takes and returns."""

    def __init__(self, call: ModuleCall, module: nn.Module) -> None:
        super().__init__()
        self.call, self.module = call, module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(self.module, x)


def logits(outputs: Any) -> torch.Tensor:
    """The outputs of a module, which may return more than them."""
    if isinstance(outputs, torch.Tensor):
        return outputs
    found = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", None)
    if found is None and isinstance(outputs, tuple | list) and outputs:
        found = outputs[0]
    if not isinstance(found, torch.Tensor):
        raise LearnerError(
            "forward must return a tensor, a table or an object with 'logits', or a tuple with the logits first.",
            f"a {type(outputs).__name__}",
            "Change what it returns.",
        )
    return found


# --- Forward passes of one sample through batch norm, which has no variance to divide by there.


def forward(call: ModuleCall, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Outputs of a module; a batch norm that gets a single value per channel uses its running statistics instead.

    That is a batch of one sample, where a layer before has left one value per channel. In a larger batch, and where
    one image has many positions per channel, nothing is different.
    """
    if len(x) != 1:
        return call(module, x)
    with single_values_allowed(module, x):
        return call(module, x)


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
