"""The head of a torch module, the linear layer that gives its outputs; and the features, which are the head's input."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from codistill.core.errors import LearnerError, nearest

# Functions after which a tensor still holds the outputs of the same layer: in another shape or type, or normalised,
# which a softmax of them leaves as it is. Whatever else comes after a linear layer makes something new of its outputs.
_SAME = frozenset({
    "__get__", "__getitem__", "bfloat16", "clone", "contiguous", "cpu", "cuda", "detach", "double", "expand", "flatten",
    "float", "half", "log_softmax", "movedim", "permute", "ravel", "requires_grad_", "reshape", "select", "softmax",
    "special_log_softmax", "special_softmax", "squeeze", "squeeze_", "swapaxes", "t", "to", "transpose", "type",
    "type_as", "unflatten", "unsqueeze", "unsqueeze_", "view", "view_as",
})  # fmt: skip
_DROPOUTS = frozenset({"alpha_dropout", "dropout", "dropout1d", "dropout2d", "dropout3d", "feature_alpha_dropout"})
_UNCHANGING = (nn.Identity, nn.Flatten, nn.Unflatten, nn.Dropout, nn.Softmax, nn.LogSoftmax)
_ONE_OF_A_LIST = frozenset({"cat", "concat", "concatenate", "stack"})


class Head(NamedTuple):
    """A linear layer, by its name in the module, and which of its calls in a pass it is: -1, the last."""

    name: str
    call: int


def linear_layers(module: nn.Module) -> dict[str, nn.Linear]:
    return {name: part for name, part in module.named_modules() if isinstance(part, nn.Linear)}


def checked_head(module: nn.Module, name: str) -> str:
    """What its owner calls the head must be a linear layer of the module."""
    known = {each: part for each, part in module.named_modules(remove_duplicate=False) if isinstance(part, nn.Linear)}
    if name not in known:
        raise LearnerError("head must be the name of a linear layer of the module.", f"'{name}'", nearest(name, known))
    return next(each for each, part in linear_layers(module).items() if part is known[name])


def find_head(
    module: nn.Module,
    x: torch.Tensor,
    name: str | None = None,
    run: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> Head | None:
    """The linear layer whose output is the module's output, found in one forward pass; None if there is none.

    `name`: the layer that its owner has named, of which only the call is looked for; None if it is not used. `run`: how
    the module is called, in which precision. Nothing of the module changes, nor what is drawn next.
    """
    pass_ = _Pass()
    hooks = [part.register_forward_hook(partial(pass_.note, each)) for each, part in linear_layers(module).items()]
    devices = [x.device] if x.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=devices), torch.no_grad(), _left_as_it_is(module), pass_:
            outputs = (run or module)(x.clone())
    finally:
        for hook in hooks:
            hook.remove()
    call = pass_.known[id(outputs)][1] if id(outputs) in pass_.known else None
    if name is not None and (call is None or pass_.names[call] != name):
        call = max((i for i, each in enumerate(pass_.names) if each == name), default=None)
    if call is None:
        return None
    return Head(pass_.names[call], -pass_.names[call:].count(pass_.names[call]))


def head_in_sequence(module: nn.Module) -> str | None:
    """The head of layers one after another, which is known without samples; None: only a pass shows it."""
    if isinstance(module, nn.Linear):
        return ""
    if isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward:
        # Not `named_children`, which leaves out a layer's second place.
        children = [(name, part) for name, part in module.named_modules(remove_duplicate=False) if "." not in name]
        for name, part in reversed(children[1:]):  # the first is the module itself
            if type(part) in _UNCHANGING:
                continue
            head = head_in_sequence(part)
            return None if head is None else f"{name}.{head}" if head else name
    return None


def unused(described: str, name: str) -> LearnerError:
    """The error for a head that samples do not pass."""
    return LearnerError(
        "Features need a linear layer that every sample passes at the end.",
        f"{described} does not use '{name}'",
        "Remove that layer, or use it; or name another: TorchLearner(module, head=...).",
    )


class _Pass(TorchFunctionMode):
    """Follows the outputs of linear layers through the functions that a forward pass calls."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []  # of the layers that were called, in order
        self.known: dict[int, tuple[torch.Tensor, int]] = {}  # tensors that hold outputs, and of which call

    def note(self, name: str, _: nn.Module, inputs: Any, output: Any) -> None:
        """A hook of the layer of this name."""
        self.known[id(output)] = output, len(self.names)
        self.names.append(name)

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given, name = dict(kwargs or {}), getattr(func, "__name__", "")
        result = func(*args, **given)
        source = args[0] if args else given.get("input")
        if name in _DROPOUTS:
            training = given.get("training", given.get("train", args[2] if len(args) > 2 else name == "dropout"))
            if training is False:
                self._pass_on(source, result)
        elif name == "mean" and _is_over_places(args, given):
            self._pass_on(source, result, some=True)
        elif name in _SAME:
            self._pass_on(source, result)
        elif name in _ONE_OF_A_LIST and len(args[0]) == 1:
            self._pass_on(args[0][0], result)
        elif _writes(name) or result is source:
            self._forget(source)
        self._forget(given.get("out"))
        return result

    def _pass_on(self, source: Any, result: Any, *, some: bool = False) -> None:
        """The result holds the same outputs as its source: all of them, or `some`."""
        known = self.known.get(id(source))
        if known is not None and isinstance(result, torch.Tensor) and (some or result.numel() == source.numel()):
            self.known[id(result)] = result, known[1]

    def _forget(self, changed: Any) -> None:
        """Values were overwritten: neither the tensor nor its views hold a layer's outputs any more."""
        if isinstance(changed, torch.Tensor) and changed.layout is torch.strided:
            memory = changed.untyped_storage().data_ptr()
            gone = [key for key, (held, _) in self.known.items() if held.untyped_storage().data_ptr() == memory]
            for key in gone:
                del self.known[key]


def _writes(name: str) -> bool:
    """Whether a function of this name changes its first argument: add_, x[0] = 1, x += 1."""
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in ("__index__", "__int__", "__invert__"))
    return name.endswith("_")


def _is_over_places(args: Sequence[Any], given: Mapping[str, Any]) -> bool:
    """Whether a mean is neither over samples nor over outputs: of a linear layer that is used at many places."""
    dims = given.get("dim", args[1] if len(args) > 1 else None)
    dims = [dims] if isinstance(dims, int) else dims
    return bool(dims) and all(0 < dim % args[0].dim() < args[0].dim() - 1 for dim in dims)


@contextmanager
def _left_as_it_is(module: nn.Module) -> Iterator[None]:
    """In evaluation mode; afterwards each part is in its own mode, and buffers have their values."""
    modes = [(part, part.training) for part in module.modules()]
    before = [(buffer, buffer.clone()) for buffer in module.buffers()]
    module.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training
        for buffer, value in before:
            if not torch.equal(buffer, value):
                buffer.copy_(value)


# --- A linear projection of a module's features, so that models with other widths can share them.


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
