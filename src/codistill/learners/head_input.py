"""The features of a torch module: the input of its last linear layer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from codistill.errors import LearnerError


def last_linear(module: nn.Module) -> nn.Linear | None:
    """The last linear layer of a module, if it has one."""
    linears = [part for part in module.modules() if isinstance(part, nn.Linear)]
    return linears[-1] if linears else None


def with_head_input(
    head: nn.Linear, run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, describe: Callable[[], str]
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `run` gives for x, and what the head got meanwhile; `describe`: the model, for an error."""
    caught: list[torch.Tensor] = []
    hook = head.register_forward_pre_hook(lambda _, inputs: caught.append(inputs[0]))
    try:
        outputs = run(x)
    finally:
        hook.remove()
    if not caught:
        raise LearnerError(
            "Features need a linear layer that every sample passes at the end.",
            f"{describe()} does not use its last one",
            "Remove that layer, or use it.",
        )
    return outputs, caught[0]
