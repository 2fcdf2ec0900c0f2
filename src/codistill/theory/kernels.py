"""Kernels by name, with the formulas and defaults of scikit-learn; or any function of one's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.spatial.distance import cdist

from codistill.errors import LearnerError, nearest

KernelFunction = Callable[[np.ndarray, np.ndarray], np.ndarray]

# Which options each kernel has; γ of None is 1 / number of features.
OPTIONS: dict[str, tuple[str, ...]] = {
    "linear": (),
    "rbf": ("gamma",),
    "laplacian": ("gamma",),
    "polynomial": ("degree", "gamma", "coef0"),
}


@dataclass(frozen=True)
class Kernel:
    """A kernel by name: `Kernel("rbf", gamma=2.0)(X, Z)` is the matrix of k(x_i, z_j).

    linear      xᵀz
    rbf         exp(-γ ‖x - z‖²)
    laplacian   exp(-γ ‖x - z‖₁)
    polynomial  (γ xᵀz + coef0)^degree

    The learner `KernelRidge` with the same name and options has the same Gram matrix.
    """

    name: str = "linear"
    gamma: float | None = None
    degree: float = 3
    coef0: float = 1.0

    def __post_init__(self) -> None:
        if self.name not in OPTIONS:
            raise LearnerError("A kernel must be known, or a function.", f"'{self.name}'", nearest(self.name, OPTIONS))
        allowed = OPTIONS[self.name]
        given = {"gamma": self.gamma is not None, "degree": self.degree != 3, "coef0": self.coef0 != 1}
        for option, is_given in given.items():
            if is_given and option not in allowed:
                raise LearnerError(
                    f"The {self.name} kernel must get only the options that it has ({', '.join(allowed) or 'none'}).",
                    option,
                    "Leave it out.",
                )
        if self.gamma is not None and not self.gamma > 0:
            raise LearnerError("gamma must be above 0.", repr(self.gamma), "Leave it out for 1 / number of features.")

    def __call__(self, x: np.ndarray, z: np.ndarray) -> np.ndarray:
        """The matrix of k(x_i, z_j)."""
        gamma = 1.0 / x.shape[1] if self.gamma is None else self.gamma
        if self.name == "linear":
            return np.asarray(x @ z.T)
        if self.name == "polynomial":
            return np.asarray((gamma * (x @ z.T) + self.coef0) ** self.degree)
        distance = cdist(x, z, "sqeuclidean" if self.name == "rbf" else "cityblock")
        return np.asarray(np.exp(-gamma * distance))


def as_kernel(kernel: str | KernelFunction) -> KernelFunction:
    """A kernel's name as a kernel with default options; a function as it is."""
    if isinstance(kernel, str):
        return Kernel(kernel)
    if not callable(kernel):
        raise LearnerError("A kernel must be a name or a function k(X, Z).", repr(kernel), "Try 'rbf'.")
    return kernel


def gram(kernel: KernelFunction, x: np.ndarray, z: np.ndarray) -> np.ndarray:
    """k(X, Z), checked: a kernel of one's own may return anything."""
    matrix = np.asarray(kernel(x, z), dtype=np.float64)
    if matrix.shape != (len(x), len(z)) or not np.isfinite(matrix).all():
        raise LearnerError(
            f"A kernel must return a matrix of {len(x)} x {len(z)} finite numbers for as many samples.",
            f"shape {matrix.shape}" if matrix.shape != (len(x), len(z)) else "numbers that are not finite",
            "Check k(X, Z), and that the samples are finite.",
        )
    return matrix
