"""Optimiser steps on the CPU without what torch does around their kernel.

Sorting tensors by device and dtype, marks for profilers, checks for graphs of a GPU, and a count of steps for each
tensor by itself take longer than the kernel does for a small model. Kernel and numbers are the same, so are the bits.
"""

from __future__ import annotations

from typing import Any

import torch

# What torch.optim itself calls. The names are torch's own affair: where they are others, torch takes the steps.
_HAS_KERNELS = all(hasattr(torch, name) for name in ("_fused_adam_", "_fused_adamw_", "_fused_sgd_"))


class ShortSteps:
    """Steps of an optimiser that `make_optimiser` has made: Adam, AdamW or SGD, fused, with one group."""

    def __init__(self, optimiser: torch.optim.Optimizer) -> None:
        self.optimiser = optimiser
        self._parameters: list[torch.Tensor] = self._group["params"]
        first = self._parameters[0]
        self._alike = _HAS_KERNELS and all(p.device.type == "cpu" and p.dtype == first.dtype for p in self._parameters)
        self._moments: list[list[torch.Tensor]] = []  # of each kind, one for each parameter
        self._count = torch.empty(0)  # of steps, for each parameter; Adam's
        self._counts: list[Any] = []  # the same, a view for each
        self._is_first = False  # whether moments have just been made

    def descend(self, loss: torch.Tensor) -> None:
        """One step down the gradient of the loss."""
        for parameter in self._parameters:
            parameter.grad = None
        loss.backward()  # type: ignore[no-untyped-call]
        gradients = [parameter.grad for parameter in self._parameters]
        if not self._alike or any(gradient is None for gradient in gradients) or not self._has_moments():
            self.optimiser.step()
            return
        with torch.no_grad():
            self._step(gradients)  # type: ignore[arg-type]

    @property
    def _group(self) -> dict[str, Any]:
        (group,) = self.optimiser.param_groups  # another one, once a state was loaded
        return group

    def _kinds(self) -> tuple[str, ...]:
        if isinstance(self.optimiser, torch.optim.SGD):
            return ("momentum_buffer",) if self._group["momentum"] else ()
        return "exp_avg", "exp_avg_sq"

    def _has_moments(self) -> bool:
        """Look up the optimiser's tensors, unless they are those of the last step."""
        kinds = self._kinds()
        if not kinds:
            return True
        tables = self.optimiser.state
        first = tables[self._parameters[0]]
        if self._moments and first.get(kinds[0]) is self._moments[0][0] and first.get("step") is self._counts[0]:
            return True
        memory = [tables[parameter] for parameter in self._parameters]
        self._is_first = not any(memory)
        if self._is_first:  # as torch makes them before its first step
            for parameter, table in zip(self._parameters, memory, strict=True):
                if "exp_avg" in kinds:
                    table["step"] = torch.zeros((), dtype=torch.float32)
                table.update({kind: torch.zeros_like(parameter.detach()) for kind in kinds})
        if not all(memory):
            return False
        self._moments = [[table[kind] for table in memory] for kind in kinds]
        self._counts = [table.get("step") for table in memory]
        if self._counts[0] is not None:
            # All counts next to one another: then one addition counts a step of all of them.
            self._count = torch.stack(self._counts)
            self._counts = list(self._count)
            for table, count in zip(memory, self._counts, strict=True):
                table["step"] = count
        return True

    def _step(self, gradients: list[torch.Tensor]) -> None:
        group = self._group
        if isinstance(self.optimiser, torch.optim.SGD):
            torch._fused_sgd_(
                self._parameters, gradients, self._moments[0] if self._moments else [],
                lr=group["lr"], momentum=group["momentum"], weight_decay=group["weight_decay"],
                dampening=0.0, nesterov=False, maximize=False, is_first_step=self._is_first,
            )  # fmt: skip
            self._is_first = False
            return
        self._count.add_(1)
        kernel = torch._fused_adamw_ if isinstance(self.optimiser, torch.optim.AdamW) else torch._fused_adam_
        first, second = self._moments
        kernel(
            self._parameters, gradients, first, second, [], self._counts,
            lr=group["lr"], beta1=group["betas"][0], beta2=group["betas"][1], eps=group["eps"],
            weight_decay=group["weight_decay"], amsgrad=False, maximize=False,
        )  # fmt: skip
