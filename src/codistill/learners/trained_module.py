"""A torch module and its optimiser: on which device they are, and how their state is read, kept, freed and restored."""

from __future__ import annotations

import copy
import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from math import isfinite
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from codistill.core.devices import HOST, OnDevice, has_mixed_precision, in_host_memory, resolved
from codistill.core.errors import LearnerError
from codistill.learners.ability import GradientLearner

MakeOptimiser = Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]
OPTIMISERS = ("adam", "adamw", "sgd")


class TrainedModule(GradientLearner):
    """A module with its optimiser and device, below `TorchLearner`, which says what is computed with it."""

    def __init__(
        self,
        module: nn.Module,
        optimiser: str | MakeOptimiser,
        options: dict[str, float],  # of `make_optimiser`
        device: str | None,
        precision: str,
    ) -> None:
        first = next(module.parameters(), torch.empty(0))
        if first.device.type not in ("cpu", "meta"):  # its owner has chosen; until it trains, it waits in host memory
            device, module = device or str(first.device), module.to(HOST)
        self.module = module
        self.device = device  # as its owner says; None: as the run says
        self.assigned: str | None = None  # the device that a run has chosen for it
        self.precision = precision
        self._place = HOST  # where the module is
        self._placed_by: tuple[str | None, str | None] | None = None  # by what that was said
        self._make_optimiser, self._optimiser_options = optimiser, options
        self._optimiser: torch.optim.Optimizer | None = None
        self._short_steps: ShortSteps | None = None  # of the last optimiser
        self._views: HostViews | None = None  # of the weights
        self._views_of_moments: HostViews | None = None
        self._initial = initial_values(module)
        self._loaded = loaded_values(module)
        self._copies = FrozenCopies(module)
        self._freed: list[tuple[torch.Tensor, tuple[int, ...], tuple[int, ...]]] = []  # without memory, and its layout
        self._channels_last = any(isinstance(part, nn.Conv2d) for part in module.modules())
        if self._channels_last:
            module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    # --- the device -----------------------------------------------------------------------------

    def place(self) -> None:
        said = self.assigned, self.device
        if said == self._placed_by:
            return
        target, self._placed_by = resolved(self.assigned or self.device), said
        if target == self._place:
            return
        memory = self._optimiser.state_dict() if self._optimiser else None
        with in_host_memory():
            self.module.to(target)
            self._place = target
            self.__dict__.pop("_tensors", None)
            self._views = self._views_of_moments = None
            self._copies.forget()
            self._restore_optimiser(memory)

    def computing(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._place == HOST else OnDevice(self._place)

    def _uploaded(self, x: torch.Tensor) -> torch.Tensor:
        return x if self._place == HOST else x.to(self._place)

    def module_in_host_memory(self) -> nn.Module:
        """The module or, where it is on a device, a copy."""
        return self.module if self._place == HOST else copy.deepcopy(self.module).to(HOST)

    def _outputs(self, run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """What a module gives, in the precision that was chosen; float32 in any case."""
        if self.precision == "full" or not has_mixed_precision(self._place):
            return run(x)
        with torch.autocast(self._place.type, dtype=torch.bfloat16):
            return run(x).float()

    # --- the optimiser --------------------------------------------------------------------------

    @property
    def optimiser(self) -> torch.optim.Optimizer:
        if self._optimiser is None:
            parameters = (each for each in self.module.parameters() if each.requires_grad)
            self._optimiser = make_optimiser(self._make_optimiser, parameters, **self._optimiser_options)
        return self._optimiser

    def set_lr(self, factor: float, lr: float | None = None) -> None:
        """Set the learning rate of all parameters; the owner's own is kept beside it."""
        for group in self.optimiser.param_groups:
            own = group.setdefault("own_lr", group["lr"])
            group["lr"] = factor * (own if lr is None else lr)

    def reset_optimiser(self) -> None:
        """An optimiser as it was made first, with the learning rate that was set last."""
        if isinstance(self._make_optimiser, str):  # faster than a new one, which would have the same options
            if self._optimiser is not None:
                self._optimiser.state.clear()
            return
        before, self._optimiser = self._optimiser, None
        if before is not None and len(before.param_groups) == len(self.optimiser.param_groups):
            for group, old in zip(self.optimiser.param_groups, before.param_groups, strict=True):
                group |= {name: old[name] for name in ("lr", "own_lr") if "own_lr" in old}

    # --- weights --------------------------------------------------------------------------------

    def reset(self) -> None:
        """Fresh parameters: every layer's own initialisation; what has none returns to its first value.

        Frozen parameters keep their values, and those that transformers has read from a file return to them.
        """
        # Drawn in host memory: the same initial weights on every device.
        with in_host_memory():
            module = self.module_in_host_memory()
            kept = copied({**frozen_tensors(module), **self._loaded})
            if self._initial:
                module.load_state_dict(self._initial, strict=False)
            reset_layers(module)
            if kept:
                module.load_state_dict(kept, strict=False)
            if module is not self.module:
                self.module.load_state_dict(module.state_dict())
        self._optimiser = None

    @cached_property
    def _tensors(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers, without frozen ones: those never change, so they are not sent."""
        frozen = frozen_tensors(self.module)
        return {name: tensor for name, tensor in distinct_tensors(self.module).items() if name not in frozen}

    @cached_property
    def frozen(self) -> str | None:
        return tensors_digest(frozen_tensors(self.module))

    @cached_property
    def _first_names(self) -> dict[str, str]:
        """The other names of tensors that have several (tied weights), and the first name of each."""
        first, state = dict[int, str](), self.module.state_dict(keep_vars=True)
        return {name: first[id(value)] for name, value in state.items() if first.setdefault(id(value), name) != name}

    def _weight_views(self) -> HostViews | None:
        self._views = renewed(self._views, [*self._tensors.values()]) if self._place == HOST else None
        return self._views

    def _moment_views(self) -> HostViews | None:
        moments = [*moments_in(self._optimiser)]
        self._views_of_moments = renewed(self._views_of_moments, moments) if self._place == HOST else None
        return self._views_of_moments

    def weights(self) -> dict[str, np.ndarray]:
        """A copy of all parameters and buffers; those that layers share, once."""
        views = self._weight_views()
        if views is None:
            return {name: tensor.detach().cpu().numpy().copy() for name, tensor in self._tensors.items()}
        return {name: array.copy() for name, array in zip(self._tensors, views.arrays, strict=True)}

    def is_finite(self) -> bool:
        """Parameters, buffers and moments."""
        views = self._moment_views()
        finite = all_finite(moments_in(self._optimiser)) if views is None else views.are_finite()
        return finite and self.has_finite_weights()

    def has_finite_weights(self) -> bool:
        views = self._weight_views()
        return all_finite(self._tensors.values()) if views is None else views.are_finite()

    def load(self, weights: dict[str, np.ndarray]) -> None:
        own = self._tensors
        if self._first_names:
            weights = {self._first_names.get(name, name): value for name, value in weights.items()}
        for name, value in weights.items():
            if name not in own or tuple(own[name].shape) != np.shape(value):
                raise LearnerError(
                    f"Weights must fit {self.describe()} by name and shape.",
                    f"'{name}' of shape {np.shape(value)}",
                    "Give every agent the same architecture.",
                )
        views = self._weight_views()
        if views is None:
            with torch.no_grad(), in_host_memory():
                for name, value in weights.items():
                    own[name].copy_(torch.tensor(value))
            return
        for name, array in zip(own, views.arrays, strict=True):
            if name in weights:
                np.copyto(array, weights[name], casting="unsafe")  # means of counters are floats, the counters are not

    # --- state ----------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        memory = self._optimiser.state_dict() if self._optimiser else None
        return {"weights": dict(self.module.state_dict()), "optimiser": memory}

    def restore(self, state: dict[str, Any]) -> None:
        for tensor, size, stride in self._freed:
            tensor.data = torch.empty_strided(size, stride, dtype=tensor.dtype, device=tensor.device)
        self._freed = []
        self.module.load_state_dict(state["weights"])
        self._restore_optimiser(state["optimiser"])

    def _restore_optimiser(self, memory: dict[str, Any] | None) -> None:
        self._optimiser = None
        if memory is not None:
            self.optimiser.load_state_dict(memory)
            # Fused steps walk through memory: moments must lie there as their parameter does (channels last).
            for parameter, table in self.optimiser.state.items():
                for name, value in table.items():
                    if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                        table[name] = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)

    def kept(self) -> Callable[[], None]:
        """By copies of the tensors alone, without the tables of `state`: this is done in every round."""
        optimiser, weights, moments = self._optimiser, self._weight_views(), self._moment_views()
        tables = [] if optimiser is None else [(key, dict(table)) for key, table in optimiser.state.items()]
        nested = any(isinstance(item, dict | list) for _, table in tables for item in table.values())
        if optimiser is None or weights is None or moments is None or nested:  # it keeps more than tensors and numbers
            state = copied(self.state())
            return lambda: self.restore(copied(state))  # a copy, since an optimiser updates its state in place
        kept_weights, kept_moments = weights.copies(), moments.copies()
        groups = [{name: item for name, item in group.items() if name != "params"} for group in optimiser.param_groups]

        def go_back() -> None:
            now = self._weight_views()
            assert now is not None  # a learner stays on its device within a round
            now.fill(kept_weights)
            moments.fill(kept_moments)
            optimiser.state.clear()
            optimiser.state.update((parameter, dict(table)) for parameter, table in tables)
            for group, before in zip(optimiser.param_groups, groups, strict=True):
                group.update(before)
            self._optimiser, self._short_steps = optimiser, None

        return go_back

    def offload(self) -> None:
        self._optimiser = self._short_steps = self._views = self._views_of_moments = None
        self._copies.forget()
        if self._freed:
            return
        for tensor in tensors_of(self.module):
            self._freed.append((tensor, tuple(tensor.size()), tensor.stride()))
            tensor.grad = None
            tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)

    def memory(self) -> tuple[int, int]:
        weights = sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(self.module))
        # As many values for each weight as the optimiser keeps; of one that is unknown as many as Adam.
        kept = int(self._optimiser_options["momentum"] > 0) if self._make_optimiser == "sgd" else 2
        return weights, kept * weights


# --- Frozen copies of a module: one that is no longer used takes the next weights, faster than a new one is made.

# Modules whose tensors are all that changes in training. What a user's own keeps besides, only a copy takes over.
_KNOWN = ("torch.nn.modules.", "codistill.learners.zoo")


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
            for own, new in zip(_tensors(frozen), _tensors(self._module), strict=True):
                own.copy_(new)
        return FrozenCopy(frozen if frozen.training == training else frozen.train(training), self._spare)

    def forget(self) -> None:
        self._spare = []


def _tensors(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


# --- Optimisers by name, and their steps.


def make_optimiser(
    chosen: str | MakeOptimiser, parameters: Iterator[nn.Parameter], *, lr: float, weight_decay: float, momentum: float
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


class ShortSteps:
    """Steps of an optimiser that `make_optimiser` has made: Adam, AdamW or SGD, fused, with one group.

    They call torch's functions `adam`, `adamw` and `sgd`, as `optimizer.step()` does, with tensors that are looked up
    once instead of in every step.
    """

    def __init__(self, optimiser: torch.optim.Optimizer) -> None:
        self.optimiser = optimiser
        self._parameters: list[torch.Tensor] = self._group["params"]
        self._state: list[list[Any]] = []  # of each kind, one tensor for each parameter

    def descend(self, loss: torch.Tensor) -> None:
        for parameter in self._parameters:
            parameter.grad = None
        loss.backward()  # type: ignore[no-untyped-call]
        gradients = [parameter.grad for parameter in self._parameters]
        if any(gradient is None for gradient in gradients) or not self._has_state():
            self.optimiser.step()
            return
        with torch.no_grad():
            self._step(gradients)  # type: ignore[arg-type]

    @property
    def _group(self) -> dict[str, Any]:
        (group,) = self.optimiser.param_groups  # another one, once a state was loaded
        return group

    def _has_state(self) -> bool:
        """Look up the optimiser's tensors, unless they are those of the last step; False: only some parameters have."""
        tables = self.optimiser.state
        kinds: tuple[str, ...] = ("exp_avg", "exp_avg_sq", "step")
        if isinstance(self.optimiser, torch.optim.SGD):
            kinds = ("momentum_buffer",) if self._group["momentum"] else ()
        first = tables[self._parameters[0]] if kinds else {}
        if self._state and all(first.get(kind) is mine[0] for kind, mine in zip(kinds, self._state, strict=True)):
            return True
        memory = [tables[parameter] for parameter in self._parameters] if kinds else []
        if "step" in kinds and not any(memory):  # as torch makes them before its first step
            for parameter, table in zip(self._parameters, memory, strict=True):
                table["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                table["exp_avg"] = torch.zeros_like(parameter)
                table["exp_avg_sq"] = torch.zeros_like(parameter)
        if any(memory) and not all(memory):
            return False
        self._state = [[table.get(kind) for table in memory] for kind in kinds]  # None: SGD's first step makes them
        return True

    def _step(self, gradients: list[torch.Tensor]) -> None:
        group = self._group
        if isinstance(self.optimiser, torch.optim.SGD):
            buffers = self._state[0] if self._state else []
            is_first = bool(buffers) and buffers[0] is None
            sgd(
                self._parameters, gradients, buffers, fused=True,
                lr=group["lr"], momentum=group["momentum"], weight_decay=group["weight_decay"],
                dampening=0.0, nesterov=False, maximize=False,
            )  # fmt: skip
            if is_first:
                for parameter, buffer in zip(self._parameters, buffers, strict=True):
                    self.optimiser.state[parameter]["momentum_buffer"] = buffer
            return
        function = adamw if isinstance(self.optimiser, torch.optim.AdamW) else adam
        first, second, counts = self._state
        function(
            self._parameters, gradients, first, second, [], counts, fused=True,
            lr=group["lr"], beta1=group["betas"][0], beta2=group["betas"][1], eps=group["eps"],
            weight_decay=group["weight_decay"], amsgrad=False, maximize=False,
        )  # fmt: skip


# --- Copies of nested tables of tensors, and whether tensors are finite.


def copied(tree: Any) -> Any:
    """Nested tables with copies of their tensors and arrays: a tenth of the time of a deep copy."""
    if isinstance(tree, torch.Tensor):
        return tree.detach().clone()
    if isinstance(tree, dict):
        return {name: copied(item) for name, item in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(copied(item) for item in tree)
    return tree.copy() if isinstance(tree, np.ndarray) else tree


def moments_in(optimiser: torch.optim.Optimizer | None) -> Iterator[torch.Tensor]:
    for table in optimiser.state.values() if optimiser is not None else ():
        yield from (value for value in table.values() if isinstance(value, torch.Tensor))


def all_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether all floating-point numbers are finite, and not huge."""
    # A norm is finite if all entries are, and not huge.
    floating = [tensor for tensor in tensors if tensor.is_floating_point()]
    if not floating:  # a new optimiser has kept nothing yet
        return True
    with torch.no_grad():
        norms = torch.stack([torch.linalg.vector_norm(tensor) for tensor in floating])
        return isfinite(norms.max())  # NaN, where one is


# --- The state of a module: which first values are kept, and which tensors it consists of.

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


def distinct_tensors(module: nn.Module) -> dict[str, Any]:
    """A module's state by name; a tensor that has several names (tied weights) under the first one alone."""
    found: dict[int, str] = {}
    state = module.state_dict(keep_vars=True)
    return {name: value for name, value in state.items() if found.setdefault(id(value), name) == name}


def frozen_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters that are not trained, by name."""
    found = distinct_tensors(module)
    return {name: each for name, each in found.items() if isinstance(each, nn.Parameter) and not each.requires_grad}


def tensors_digest(tensors: Mapping[str, torch.Tensor]) -> str | None:
    """The SHA-256 of tensors by name, equal on any machine; None if there are none."""
    digested = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digested.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digested.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digested.hexdigest() if tensors else None


# Modules of transformers initialise their layers in a way of their own, and mark what they have read from a file; LoRA
# layers of peft start without an effect.


def loaded_values(module: nn.Module) -> dict[str, torch.Tensor]:
    """A copy of the trainable weights that transformers has read from a file."""
    return {
        name: each.detach().clone()
        for name, each in distinct_tensors(module).items()
        if each.requires_grad and getattr(each, "_is_hf_initialized", False)
    }


def reset_layers(module: nn.Module) -> None:
    """Initialise each layer as its library does."""
    pretrained = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", ())
    library: dict[nn.Module, Any] = {}  # by layer, the innermost module of transformers around it
    for root in module.modules():
        library |= dict.fromkeys(root.modules(), root) if isinstance(root, pretrained) else {}
    for each in module.parameters():
        vars(each).pop("_is_hf_initialized", None)  # copies have lost these marks, and must draw the same
    for part in module.modules():
        if part in library:
            library[part]._init_weights(part)
        elif hasattr(part, "reset_parameters"):
            part.reset_parameters()  # type: ignore[operator]
    for part in module.modules():
        if hasattr(part, "reset_lora_parameters"):
            for adapter in part.r:  # type: ignore[union-attr]
                part.reset_lora_parameters(adapter, True)  # type: ignore[operator]


def tensors_of(module: nn.Module) -> list[torch.Tensor]:
    """What a module's state consists of, each tensor once."""
    return [value for value in distinct_tensors(module).values() if isinstance(value, torch.Tensor)]


# --- Tensors in host memory as numpy arrays over the same memory.


class HostViews:
    """Arrays over the memory of some tensors; valid as long as `show` says so."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tuple(tensors)
        self._addresses = [tensor.data_ptr() for tensor in tensors]
        self.arrays = [tensor.detach().numpy() for tensor in tensors]
        self._flat = [_flat(array) for array in self.arrays]
        self._numbers = [array for array in self._flat if array.dtype.kind == "f"]
        if any(array.dtype.itemsize < 4 for array in self._numbers):
            raise TypeError("A sum of squares needs more than half precision.")

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """None in place of a copy: that would be arrays of their own, twice as many bytes as the tensors."""
        return type(None), ()

    def show(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether these are the tensors, and still where they were."""
        return len(tensors) == len(self._tensors) and all(
            tensor is mine and tensor.data_ptr() == address
            for tensor, mine, address in zip(tensors, self._tensors, self._addresses, strict=True)
        )

    def are_finite(self) -> bool:
        """Whether all floating-point numbers are finite, and not huge: so that their sum of squares is finite, too."""
        with np.errstate(over="ignore", invalid="ignore"):
            return all(isfinite(np.dot(numbers, numbers)) for numbers in self._numbers)

    def copies(self) -> list[np.ndarray]:
        """The values as they are now, for `fill`."""
        return [array.copy() for array in self._flat]

    def fill(self, copies: Sequence[np.ndarray]) -> None:
        """Give the tensors values that were copied before."""
        for array, kept in zip(self._flat, copies, strict=True):
            array[...] = kept


def renewed(views: HostViews | None, tensors: Sequence[torch.Tensor]) -> HostViews | None:
    """Views of tensors, those given where they are still valid; None where numpy has no view of one of them."""
    if views is not None and views.show(tensors):
        return views
    try:
        return HostViews(tensors)
    except (TypeError, ValueError, RuntimeError):  # on a device, of a type that numpy has not, or not dense in memory
        return None


def _flat(array: np.ndarray) -> np.ndarray:
    """All values of an array as a line, in the order in which they lie in memory."""
    axes = sorted(range(array.ndim), key=lambda axis: -array.strides[axis])
    line = array.transpose(axes).reshape(-1)
    if array.size and line.ctypes.data != array.ctypes.data:
        raise ValueError("The values lie apart from one another in memory.")
    return line
