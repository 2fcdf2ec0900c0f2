"""A linear projection of a module's features, so that models with other widths can share them."""

from __future__ import annotations

from torch import nn

from codistill.errors import LearnerError
from codistill.learners.head_input import linear_layers


def with_projection(module: nn.Module, width: int, head: str | None = None) -> tuple[nn.Module, str]:
    """The module with a linear layer to `width` features before its head, both newly initialised; and its new head.

    `head`: the linear layer that gives the outputs; unset: the last one, which is checked as soon as there are samples
    to see it by. The module is changed; where it is itself the last layer, a new one is returned. It is no longer a
    registered architecture, so it travels as ONNX.
    """
    linears = linear_layers(module)
    if not linears or isinstance(width, bool) or not isinstance(width, int) or width < 1:
        raise LearnerError(
            "A projection needs a module with a linear layer at the end, and a width of at least 1.",
            f"{type(module).__name__}, width {width!r}",
            "Add an nn.Linear, or leave the projection out.",
        )
    name = [*linears][-1] if head is None else head
    layer = linears[name]
    made = nn.Sequential(
        nn.Linear(layer.in_features, width), nn.Linear(width, layer.out_features, bias=layer.bias is not None)
    )
    if not name:
        return made, "1"
    parent, _, attribute = name.rpartition(".")
    setattr(module.get_submodule(parent), attribute, made)
    if hasattr(module, "architecture"):
        del module.architecture
    return module, f"{name}.1"
