"""A torch module and its optimiser: on which device they are, and how their state is read, kept, freed and restored."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import nn

from codistill.devices import has_mixed_precision, resolved
from codistill.errors import LearnerError
from codistill.learners.ability import GradientLearner
from codistill.learners.frozen_copies import FrozenCopies
from codistill.learners.host_views import HostViews, renewed
from codistill.learners.module_memory import (
    FreedTensor,
    bytes_of,
    distinct_tensors,
    first_names,
    free,
    initial_values,
)
from codistill.learners.optimisers import MakeOptimiser, lay_out_alike, make_optimiser, moments_of
from codistill.learners.short_steps import ShortSteps
from codistill.learners.tensors import all_finite, moments_in
from codistill.on_device import HOST, OnDevice, in_host_memory


class TrainedModule(GradientLearner):
    """A module with its optimiser and device, below `TorchLearner`, which says what is computed with it."""

    def __init__(
        self,
        module: nn.Module,
        *,
        optimiser: str | MakeOptimiser,
        lr: float,
        weight_decay: float,
        momentum: float,
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
        self._make_optimiser = optimiser
        self._lr, self._weight_decay, self._momentum = lr, weight_decay, momentum
        self._optimiser: torch.optim.Optimizer | None = None
        self._short_steps: ShortSteps | None = None  # of the last optimiser
        self._views: HostViews | None = None  # of the weights
        self._views_of_moments: HostViews | None = None
        self._initial = initial_values(module)
        self._copies = FrozenCopies(module)
        self._freed: list[FreedTensor] = []
        self._channels_last = any(isinstance(part, nn.Conv2d) for part in module.modules())
        if self._channels_last:
            module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    # --- the device -----------------------------------------------------------------------------

    def place(self) -> None:
        """Move the module, and the optimiser's state, to the device: called in the process that trains it."""
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
        """While it is entered, torch computes in this thread where the module is."""
        return nullcontext() if self._place == HOST else OnDevice(self._place)

    def _uploaded(self, x: torch.Tensor) -> torch.Tensor:
        return x if self._place == HOST else x.to(self._place)

    def _copied(self, x: torch.Tensor) -> torch.Tensor:
        return x.clone() if self._place == HOST else x.to(self._place)

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
        """The optimiser, made when first needed."""
        if self._optimiser is None:
            self._optimiser = make_optimiser(
                self._make_optimiser,
                self.module.parameters(),
                lr=self._lr,
                weight_decay=self._weight_decay,
                momentum=self._momentum,
            )
        return self._optimiser

    def _short_steps_of(self, optimiser: torch.optim.Optimizer) -> ShortSteps | None:
        """A shorter way to take its steps, where there is one."""
        if self._place != HOST or not isinstance(self._make_optimiser, str):
            return None
        if self._short_steps is None or self._short_steps.optimiser is not optimiser:
            self._short_steps = ShortSteps(optimiser)
        return self._short_steps

    def set_lr(self, factor: float, lr: float | None = None) -> None:
        """Set the learning rate of all parameters; the owner's own is kept beside it."""
        for group in self.optimiser.param_groups:
            own = group.setdefault("own_lr", group["lr"])
            group["lr"] = factor * (own if lr is None else lr)

    def reset_optimiser(self) -> None:
        """An optimiser as it was made first, with the learning rate that was set last."""
        before, self._optimiser = self._optimiser, None
        if before is not None and len(before.param_groups) == len(self.optimiser.param_groups):
            for group, old in zip(self.optimiser.param_groups, before.param_groups, strict=True):
                group |= {name: old[name] for name in ("lr", "own_lr") if "own_lr" in old}

    # --- weights --------------------------------------------------------------------------------

    def reset(self) -> None:
        """Fresh parameters: every layer's own initialisation; what has none returns to its first value."""
        # Drawn in host memory: the same initial weights on every device.
        with in_host_memory():
            module = self.module_in_host_memory()
            if self._initial:
                module.load_state_dict(self._initial, strict=False)
            for part in module.modules():
                if hasattr(part, "reset_parameters"):
                    part.reset_parameters()  # type: ignore[operator]
            if module is not self.module:
                self.module.load_state_dict(module.state_dict())
        self._optimiser = None

    @cached_property
    def _tensors(self) -> dict[str, torch.Tensor]:
        return distinct_tensors(self.module)

    @cached_property
    def _first_names(self) -> dict[str, str]:
        return first_names(self.module)

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
        """Parameters and buffers."""
        views = self._weight_views()
        return all_finite(self._tensors.values()) if views is None else views.are_finite()

    def load(self, weights: dict[str, np.ndarray]) -> None:
        """Take over parameters and buffers; names left out keep their values."""
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
        """Weights and the optimiser's state."""
        memory = self._optimiser.state_dict() if self._optimiser else None
        return {"weights": dict(self.module.state_dict()), "optimiser": memory}

    def restore(self, state: dict[str, Any]) -> None:
        """Return to saved weights and optimiser state."""
        while self._freed:
            self._freed.pop().allocate()
        self.module.load_state_dict(state["weights"])
        self._restore_optimiser(state["optimiser"])

    def _restore_optimiser(self, memory: dict[str, Any] | None) -> None:
        self._optimiser = None
        if memory is not None:
            self.optimiser.load_state_dict(memory)
            lay_out_alike(self.optimiser)

    def kept(self) -> Callable[[], None]:
        """By copies of the tensors alone, without the tables of `state`: this is done in every round."""
        optimiser, weights, moments = self._optimiser, self._weight_views(), self._moment_views()
        if optimiser is None or weights is None or moments is None:
            return super().kept()
        tables = [(parameter, dict(table)) for parameter, table in optimiser.state.items()]
        if any(isinstance(item, dict | list) for _, table in tables for item in table.values()):
            return super().kept()  # of an optimiser that keeps more than tensors and numbers
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
            self._optimiser = optimiser

        return go_back

    def set_aside(self) -> None:
        """Free the memory of the weights and of the optimiser's state."""
        self._optimiser = self._short_steps = self._views = self._views_of_moments = None
        self._copies.forget()
        if not self._freed:
            self._freed = free(self.module)

    def memory(self) -> tuple[int, int]:
        """Bytes of the weights, and of the moments of its optimiser."""
        weights = bytes_of(self.module)
        return weights, moments_of(self._make_optimiser, self._momentum) * weights
