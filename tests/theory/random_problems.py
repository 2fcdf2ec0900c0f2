"""Random problems, as the theory has them and as plain machines."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import direct_loops as loops
import numpy as np

from codistill.theory import Kernel, Problem

# (the theory's kernel, the test's own formula of it)
RBF = (Kernel("rbf", gamma=0.7), loops.rbf(0.7))
WIDE = (Kernel("rbf", gamma=0.3), loops.rbf(0.3))
LAPLACIAN = (Kernel("laplacian", gamma=0.4), loops.laplacian(0.4))
SQUARE = (Kernel("polynomial", degree=2, gamma=0.5, coef0=1.5), loops.polynomial(0.5, 2, 1.5))
LINEAR = (Kernel("linear"), loops.linear)
OWN = (loops.laplacian(0.8), loops.laplacian(0.8))

# At c = 0 only kernels with positive definite, well-conditioned Gram matrices.
DEFINITE = [(RBF, LAPLACIAN), (LAPLACIAN, RBF), (RBF, RBF), (OWN, WIDE)]
ANY = [*DEFINITE, (LINEAR, RBF), (SQUARE, LINEAR), (LINEAR, LINEAR)]


@dataclass
class Case:
    problem: Problem
    machines: list[loops.Machine]
    xs: list[np.ndarray]
    ys: list[np.ndarray]
    z: np.ndarray  # fresh inputs

    @property
    def everywhere(self) -> np.ndarray:
        """Training inputs and fresh ones."""
        return np.concatenate([*self.xs, self.z])


def case(seed, kernels, c, sizes=None, outputs=None, features=4) -> Case:
    random = np.random.default_rng(seed)
    sizes = sizes or random.integers(5, 12, len(kernels))
    xs = [random.normal(size=(n, features)) for n in sizes]
    ys = [random.normal(size=(n, outputs) if outputs else n) for n in sizes]
    problem = Problem(xs, ys, [ours for ours, _ in kernels], c)
    return Case(problem, loops.machines(xs, [own for _, own in kernels], c), xs, ys, random.normal(size=(6, features)))


@cache
def cases(c):
    """Problems of two agents, one for each pair of kernels."""
    return [case(100 * i, pair, c) for i, pair in enumerate(DEFINITE if c == 0 else ANY)]


def crowd(c, agents=3, count=4, one_kernel=False):
    """Problems of several agents."""
    kinds = [RBF, LAPLACIAN, WIDE, OWN, RBF]
    return [case(1000 + j, [RBF] * agents if one_kernel else kinds[:agents], c) for j in range(count)]
