"""Federated kernel ridge regression: the data and the kernel of each agent."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import scipy.linalg
from scipy.spatial.distance import cdist

from codistill.core.errors import DataError, LearnerError, nearest


@dataclass(frozen=True, eq=False)
class Model:
    """f(x) = Σ k(x, X) b / N over its terms (k, X, b), with N the samples of the whole federation."""

    terms: tuple[tuple[KernelFunction, np.ndarray, np.ndarray], ...]
    samples: int

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """The predictions at any inputs, (n,) or (n, C) like the targets."""
        inputs = _inputs(x)
        return np.asarray(sum(gram(k, inputs, z) @ b for k, z, b in self.terms) / self.samples)


@dataclass(frozen=True, eq=False)
class Problem:
    """M agents, each with inputs, targets and a kernel; and one regularisation c ≥ 0.

    Agent a fits labels u by  A_a⁺ u  with  A_a = cI + K_a,  K_a[i, j] = k_a(x_i, x_j) / N,  and N the
    samples of *all* agents (eq. 5): with its own count instead, the ensemble misses the centralised model.
    At c = 0 the pseudo-inverse takes the solution of minimum norm. Agents are counted from 0.

    `kernels` is one kernel per agent or one for all: a name, a `Kernel`, or a function k(X, Z) -> matrix.
    Targets are (n,) or (n, C).
    """

    inputs: Sequence[np.ndarray]
    targets: Sequence[np.ndarray]
    kernels: Sequence[str | KernelFunction] | str | KernelFunction = "linear"
    c: float = 1e-3

    @classmethod
    def pair(
        cls,
        x1: np.ndarray,
        y1: np.ndarray,
        x2: np.ndarray,
        y2: np.ndarray,
        kernel1: str | KernelFunction = "linear",
        kernel2: str | KernelFunction | None = None,
        c: float = 1e-3,
    ) -> Problem:
        """The paper's two agents; without a second kernel both have the first."""
        return cls((x1, x2), (y1, y2), (kernel1, kernel1 if kernel2 is None else kernel2), c)

    def __post_init__(self) -> None:
        inputs = tuple(_inputs(x) for x in self.inputs)
        targets = tuple(np.asarray(y, dtype=np.float64) for y in self.targets)
        one = isinstance(self.kernels, str) or callable(self.kernels)
        kernels = [self.kernels] * len(inputs) if one else list(self.kernels)  # type: ignore[arg-type]
        given = {"inputs": inputs, "targets": targets, "kernels": tuple(map(as_kernel, kernels))}  # type: ignore[arg-type]
        for name, value in given.items():
            object.__setattr__(self, name, value)
        if not np.isfinite(self.c) or self.c < 0:
            raise LearnerError("c, the regularisation, must be at least 0.", repr(self.c), "Choose 0 for minimum norm.")
        counts = (len(self.inputs), len(self.targets), len(self.kernels_of))
        if len(set(counts)) > 1 or not self.inputs:
            raise DataError(
                "Every agent must have inputs, targets and a kernel.",
                "{} inputs, {} targets, {} kernels".format(*counts),
                "Give one of each per agent.",
            )
        for agent, (x, y) in enumerate(zip(self.inputs, self.targets, strict=True)):
            if len(x) == 0 or y.shape[:1] != (len(x),) or y.ndim not in (1, 2):
                raise DataError(
                    "Targets must be of shape (n,) or (n, C), one for each of n ≥ 1 inputs.",
                    f"agent {agent}: {len(x)} inputs, targets of shape {y.shape}",
                    "Check the arrays of this agent.",
                )
            if not (np.isfinite(x).all() and np.isfinite(y).all()):
                raise DataError("Inputs and targets must be finite.", f"agent {agent}: NaN or infinity", "Clean them.")
        if len({x.shape[1] for x in self.inputs}) > 1 or len({y.shape[1:] for y in self.targets}) > 1:
            raise DataError(
                "All agents must have the same features and outputs.",
                ", ".join(f"{x.shape} -> {y.shape}" for x, y in zip(self.inputs, self.targets, strict=True)),
                "Give all agents inputs and targets of one kind.",
            )

    @property
    def kernels_of(self) -> tuple[KernelFunction, ...]:
        return self.kernels  # type: ignore[return-value]

    @property
    def agents(self) -> int:
        return len(self.inputs)

    @property
    def samples(self) -> int:
        return sum(map(len, self.inputs))

    @property
    def same_kernel(self) -> bool:
        return all(kernel == self.kernels_of[0] for kernel in self.kernels_of)

    @property
    def blocks(self) -> list[slice]:
        ends = np.cumsum([0, *map(len, self.inputs)])
        return [slice(int(a), int(b)) for a, b in pairwise(ends)]

    @property
    def everything(self) -> np.ndarray:
        """X: the inputs of all agents, one below the other."""
        return np.concatenate(list(self.inputs))

    @property
    def labels(self) -> np.ndarray:
        """y: the targets of all agents, one below the other."""
        return np.concatenate(list(self.targets))

    def error(self, predictions: np.ndarray) -> float:
        """‖f(X) - y‖ / ‖y‖ over all training inputs."""
        return float(np.linalg.norm(predictions - self.labels) / (np.linalg.norm(self.labels) or 1.0))

    def gram(self, kernel_of: int, rows: int, columns: int) -> np.ndarray:
        """k_a(X_i, X_j) / N: the L_ij of agent 0's kernel, the M_ij of agent 1's."""
        return gram(self.kernels_of[kernel_of], self.inputs[rows], self.inputs[columns]) / self.samples

    def regularised(self, agent: int) -> np.ndarray:
        """A_a = cI + K_a."""
        return self.gram(agent, agent, agent) + self.c * np.eye(len(self.inputs[agent]))

    def solve(self, agent: int, wanted: np.ndarray) -> np.ndarray:
        """A_a⁻¹ u; A_a⁺ u at c = 0."""
        return solve(self.regularised(agent), wanted, pseudo=self.c == 0)

    @cached_property
    def transfer(self) -> np.ndarray:
        """T: block (b, a) takes labels on X_a to the predictions, on X_b, of agent a's model fitted to them.

        T_ba = k_a(X_b, X_a) A_a⁺ / N. All protocols of the paper are iterations with blocks of T.
        """
        agents = range(self.agents)
        return np.block([[self.solve(a, self.gram(a, a, b)).T for a in agents] for b in agents])

    def fit(self, agent: int, labels: np.ndarray) -> Model:
        """Agent a's model of labels on its own inputs."""
        return Model(((self.kernels_of[agent], self.inputs[agent], self.solve(agent, labels)),), self.samples)

    def fit_all(self, labels: np.ndarray) -> list[Model]:
        """Each agent's model of its part of the labels."""
        return [self.fit(agent, labels[block]) for agent, block in enumerate(self.blocks)]

    def ensemble(self, labels: np.ndarray) -> Model:
        """The sum of all agents' models of their parts of the labels."""
        return Model(tuple(term for model in self.fit_all(labels) for term in model.terms), self.samples)


def solve(matrix: np.ndarray, wanted: np.ndarray, *, pseudo: bool) -> np.ndarray:
    """A⁻¹ u by Cholesky; A⁺ u where asked for, or where A is not safely positive definite."""
    if not pseudo:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", scipy.linalg.LinAlgWarning)
                return np.asarray(scipy.linalg.solve(matrix, wanted, assume_a="pos"))
        except (scipy.linalg.LinAlgError, scipy.linalg.LinAlgWarning):
            pass
    return np.asarray(scipy.linalg.pinvh(matrix) @ wanted)


def _inputs(x: np.ndarray) -> np.ndarray:
    array = np.asarray(x, dtype=np.float64)
    return array.reshape(len(array), -1) if array.size else array.reshape(len(array), 0)


# --- Kernels by name, with the formulas and defaults of scikit-learn; or any function of one's own.

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
            raise LearnerError(f"Unknown kernel '{self.name}'.", "", nearest(self.name, OPTIONS))
        allowed = OPTIONS[self.name]
        given = {"gamma": self.gamma is not None, "degree": self.degree != 3, "coef0": self.coef0 != 1}
        for option, is_given in given.items():
            if is_given and option not in allowed:
                raise LearnerError(
                    f"Unknown option '{option}' for the {self.name} kernel.",
                    "",
                    f"Its options: {', '.join(allowed) or 'none'}.",
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
