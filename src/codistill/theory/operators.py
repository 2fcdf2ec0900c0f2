"""Proposition III and Appendix B: AKD as alternating oblique projections, and the angle between agents."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import scipy.linalg

from codistill.theory.iteration import at_least
from codistill.theory.problem import Model, Problem, solve
from codistill.theory.propositions import transfers


@dataclass(frozen=True, eq=False)
class Operators:
    """Of K = diag(L, M) = Vᵀ D V, with V = (V1 V2 Ṽ1 Ṽ2); tildes belong to agent 2's kernel.

    L_ij = V_iᵀ D V_j and M_ij = Ṽ_iᵀ D Ṽ_j. Of one kernel for both, K = L, the tildes fall away and C = I.
    """

    d: np.ndarray  # the diagonal of D
    v1: np.ndarray
    v2: np.ndarray
    v1_tilde: np.ndarray
    v2_tilde: np.ndarray
    c: float
    one_kernel: bool

    @property
    def geometry(self) -> np.ndarray:
        """G = cI + D, the scalar product in which the projections are orthogonal."""
        return np.diag(self.c + self.d)

    @property
    def p1(self) -> np.ndarray:
        """P1 = V1 (V1ᵀ G V1)⁻¹ V1ᵀ G, the oblique projection on span V1."""
        return self._projection(self.v1)

    @property
    def p2(self) -> np.ndarray:
        """P̃2 = Ṽ2 (Ṽ2ᵀ G Ṽ2)⁻¹ Ṽ2ᵀ G, the oblique projection on span Ṽ2."""
        return self._projection(self.v2_tilde)

    @property
    def c1(self) -> np.ndarray:
        """C1 = V1 Ṽ1ᵀ, from agent 2's coordinates back to agent 1's; its singular values are 0 and 1."""
        return np.eye(len(self.d)) if self.one_kernel else self.v1 @ self.v1_tilde.T

    @property
    def c2(self) -> np.ndarray:
        """C̃2 = Ṽ2 V2ᵀ, from agent 1's coordinates to agent 2's."""
        return np.eye(len(self.d)) if self.one_kernel else self.v2_tilde @ self.v2.T

    @property
    def two_rounds(self) -> np.ndarray:
        """C1 P̃2ᵀ C̃2 P1ᵀ: two rounds of AKD; with one kernel P2ᵀ P1ᵀ, plain alternating projections."""
        return np.asarray(self.c1 @ self.p2.T @ self.c2 @ self.p1.T)

    def _projection(self, basis: np.ndarray) -> np.ndarray:
        inner = basis.T @ self.geometry @ basis
        # Symmetric up to rounding; at c = 0 the pseudo-inverse makes it the P̂ of Appendix C.
        return np.asarray(basis @ solve((inner + inner.T) / 2, basis.T @ self.geometry, pseudo=self.c == 0))


def operators(problem: Problem, *, one_kernel: bool = False) -> Operators:
    """The matrices of Appendix B for two agents; `one_kernel` uses agent 1's kernel for both, without tildes."""
    transfers(problem)  # refuses more than two agents
    first, second = problem.blocks
    n = problem.samples
    grams = [_joint_gram(problem, agent) for agent in ((0,) if one_kernel else (0, 1))]
    d, q = np.linalg.eigh(scipy.linalg.block_diag(*grams))
    v = q.T
    at = 0 if one_kernel else n  # where agent 2's kernel begins
    return Operators(
        np.maximum(d, 0),  # a kernel has no negative eigenvalues but by rounding
        v[:, first],
        v[:, second],
        v[:, at : at + first.stop],
        v[:, at + second.start : at + second.stop],
        problem.c,
        one_kernel,
    )


def proposition_iii(problem: Problem, t: int, *, one_kernel: bool = False) -> Model:
    """g_{2t}(x) = l_xᵀ A1⁻¹ V1ᵀ (C1 P2ᵀ C2 P1ᵀ)^t V1 y1, which equals Proposition II; `t` counts pairs of rounds."""
    at_least(t, 0)
    o = operators(problem, one_kernel=one_kernel)
    return problem.fit(0, o.v1.T @ np.linalg.matrix_power(o.two_rounds, t) @ o.v1 @ problem.targets[0])


def angle_cosine(problem: Problem, agent: int = 0) -> float:
    """cos φ of the minimal angle between the agents' subspaces, in one agent's kernel.

    max |v1ᵀ D v2| / √((v1ᵀ G v1)(v2ᵀ G v2)) is the largest singular value of A1^-½ L12 A2^-½. With one kernel
    for both, ρ(B) = cos² φ: each pair of rounds of AKD keeps at most this share of what was learned.
    """
    transfers(problem)
    full = _joint_gram(problem, agent) + problem.c * np.eye(problem.samples)
    first, second = problem.blocks
    whitened = _inverse_root(full[first, first]) @ full[first, second] @ _inverse_root(full[second, second])
    return float(np.linalg.norm(whitened, 2))


def _joint_gram(problem: Problem, agent: int) -> np.ndarray:
    return np.block([[problem.gram(agent, i, j) for j in (0, 1)] for i in (0, 1)])


def _inverse_root(matrix: np.ndarray) -> np.ndarray:
    """A^-½, on the range of A."""
    values, vectors = np.linalg.eigh(matrix)
    kept = values > len(values) * np.finfo(float).eps * values.max()
    return np.asarray(vectors[:, kept] / np.sqrt(values[kept]) @ vectors[:, kept].T)
