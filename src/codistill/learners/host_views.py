"""Tensors in host memory as numpy arrays over the same memory.

What is done with all tensors of a model in every round (to copy them, to ask whether they are finite) takes a fraction
of the time that torch needs for as many calls on small tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

import numpy as np
import torch


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
        for array, copy in zip(self._flat, copies, strict=True):
            array[...] = copy


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
