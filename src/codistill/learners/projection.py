"""A linear projection of a module's features, so that models with other widths can share them."""

from __future__ import annotations

from torch import nn

from codistill.errors import LearnerError


def with_projection(module: nn.Module, width: int) -> nn.Module:
    """The module with a linear layer to `width` features before its last linear layer, both newly initialised.

    The module is changed; where it is itself the last layer, a new one is returned. It is no longer a registered
    architecture, so it travels as ONNX.
    """
    linears = [(name, part) for name, part in module.named_modules() if isinstance(part, nn.Linear)]
    if not linears or isinstance(width, bool) or not isinstance(width, int) or width < 1:
        raise LearnerError(
            "A projection needs a module with a linear layer at the end, and a width of at least 1.",
            f"{type(module).__name__}, width {width!r}",
            "Add an nn.Linear, or leave the projection out.",
        )
    name, head = linears[-1]
    made = nn.Sequential(
        nn.Linear(head.in_features, width), nn.Linear(width, head.out_features, bias=head.bias is not None)
    )
    if not name:
        return made
    parent, _, attribute = name.rpartition(".")
    setattr(module.get_submodule(parent), attribute, made)
    if hasattr(module, "architecture"):
        del module.architecture
    return module
