"""Two agents: AKD as alternating oblique projections, the angle between agents, and the paper's propositions.

With the forecast, what these predict before a run: limits, rates, divergence.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import scipy.linalg

from codistill.core.errors import DataError
from codistill.theory.problem import KernelFunction, Model, Problem, solve
from codistill.theory.protocols import (
    EQUAL,
    ON_CIRCLE,
    akd_limit,
    at_least,
    avgkd_limit,
    baselines,
    ekd_limit,
    pkd_limit,
)

if TYPE_CHECKING:
    from rich.table import Table

# --- Proposition III and Appendix B: AKD as alternating oblique projections.


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


# --- The paper's propositions for two agents, formula by formula, with the corrections that were found.


def transfers(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """T12 and T21."""
    if problem.agents != 2:
        raise DataError(
            "The propositions must have two agents.", f"{problem.agents}", "Use akd, avgkd, pkd, ekd for more."
        )
    first, second = problem.blocks
    return problem.transfer[first, second], problem.transfer[second, first]


def two_rounds(problem: Problem) -> np.ndarray:
    """B = T12 T21: what two rounds of AKD do to agent 1's labels."""
    t12, t21 = transfers(problem)
    return np.asarray(t12 @ t21)


def spectrum(problem: Problem) -> np.ndarray:
    """The eigenvalues μ of B; those of B' are the same but for zeros, so the smaller of the two is taken."""
    t12, t21 = transfers(problem)
    return np.asarray(np.linalg.eigvals(t12 @ t21 if len(t12) <= len(t21) else t21 @ t12))


def rho(problem: Problem) -> float:
    """ρ(B). AKD and EKD converge iff it is below 1, AvgKD iff it is below 4."""
    return float(np.abs(spectrum(problem)).max())


def proposition_ii(problem: Problem, t: int) -> Model:
    """g_{2t}(x) = F B^t y1 (agent 1's),  g_{2t+1}(x) = m_xᵀ A2⁻¹ T21 B^t y1 (agent 2's); `t` counts rounds."""
    at_least(t, 0)
    labels = np.linalg.matrix_power(two_rounds(problem), t // 2) @ problem.targets[0]
    return problem.fit(1, transfers(problem)[1] @ labels) if t % 2 else problem.fit(0, labels)


def proposition_v(problem: Problem, t: int) -> Model:
    """Agent 1's model in round t of AvgKD, corrected: both printed versions have the wrong sums.

    g_t = F { ½ Σ_{i < ⌈t/2⌉} (B/4)^i y1 + ¼ T12 Σ_{i < ⌊t/2⌋} (B'/4)^i y2 + r },
    r = (B/4)^{t/2} y1 for even t,  r = ½ T12 (B'/4)^{(t-1)/2} y2 for odd t.
    """
    at_least(t, 0)
    t12, t21 = transfers(problem)
    y1, y2 = problem.targets
    b, b_prime = t12 @ t21 / 4, t21 @ t12 / 4
    labels = _geometric(b, -(-t // 2), y1) / 2 + t12 @ _geometric(b_prime, t // 2, y2) / 4
    if t % 2:
        rest = t12 @ np.linalg.matrix_power(b_prime, (t - 1) // 2) @ y2 / 2
    else:
        rest = np.linalg.matrix_power(b, t // 2) @ y1
    return problem.fit(0, labels + rest)


def proposition_v_limit(problem: Problem) -> Model:
    """F { ½ (I - B/4)⁻¹ y1 + ¼ T12 (I - B'/4)⁻¹ y2 }; AvgKD reaches it where ρ(B) < 4."""
    t12, t21 = transfers(problem)
    y1, y2 = problem.targets
    own = scipy.linalg.solve(np.eye(len(y1)) - t12 @ t21 / 4, y1) / 2
    return problem.fit(0, own + t12 @ scipy.linalg.solve(np.eye(len(y2)) - t21 @ t12 / 4, y2) / 4)


def proposition_vi(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """β1, β2 of system (19): [A1 M12/2; L21/2 A2] β = (y1, -y2).

    AvgKD's limits are g1(x) = l_xᵀ β1 / 2 and g2(x) = -m_xᵀ β2 / 2, and with them (20) and (21):
    2 g1(X1) - g2(X1) = y1 - c β1  and  2 g2(X2) - g1(X2) = y2 + c β2.
    """
    off = problem.gram(1, 0, 1) / 2, problem.gram(0, 1, 0) / 2
    system = np.block([[problem.regularised(0), off[0]], [off[1], problem.regularised(1)]])
    labels = np.concatenate([problem.targets[0], -problem.targets[1]])
    beta = np.asarray(scipy.linalg.lstsq(system, labels)[0] if problem.c == 0 else scipy.linalg.solve(system, labels))
    return beta[problem.blocks[0]], beta[problem.blocks[1]]


def proposition_vii(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """b1, b2 of [A1 M12; L21 A2] b = y: EKD's limit is l_xᵀ b1 + m_xᵀ b2 where it converges."""
    system = np.block(
        [[problem.regularised(0), problem.gram(1, 0, 1)], [problem.gram(0, 1, 0), problem.regularised(1)]]
    )
    b = np.asarray(scipy.linalg.lstsq(system, problem.labels)[0])
    return b[problem.blocks[0]], b[problem.blocks[1]]


def _geometric(matrix: np.ndarray, count: int, vector: np.ndarray) -> np.ndarray:
    """Σ_{i < count} M^i v, by Horner's rule."""
    total = np.zeros_like(vector)
    for _ in range(count):
        total = vector + matrix @ total
    return total


# --- What the theory predicts for two agents before a run: limits, rates, divergence.

ZERO, CLOSED, CENTRAL, NONE = "zero", "closed form", "the centralised model", "none"
COMMON, AGREED = "what both agents can represent", "centralised, where labels agree"


@dataclass(frozen=True)
class Outlook:
    """The predicted limit and rate of one method. A round is one fit of every chain (AKD, EKD) or of every agent."""

    method: str
    limit: str
    rate: float  # the factor per round on the distance from the limit, in the end
    needs: str  # what the limit depends on
    diverges: bool
    error: float | None = None  # of the limit, if labels were given

    @property
    def halving(self) -> float | None:
        """Rounds in which the distance from the limit halves; None where it does not shrink."""
        if self.rate <= 0:
            return 0.0
        return math.log(0.5) / math.log(self.rate) if self.rate < 1 else None


@dataclass(frozen=True)
class Forecast:
    """The prediction for two agents; printed as a table."""

    samples: tuple[int, int]
    c: float
    one_kernel: bool
    rho: float  # of B, what two rounds of AKD do
    cosine: float  # of the minimal angle, in agent 1's kernel
    outlooks: tuple[Outlook, ...]
    errors: dict[str, float] | None = None  # of each agent alone and the centralised model, if labels were given

    def __getitem__(self, method: str) -> Outlook:
        return {outlook.method: outlook for outlook in self.outlooks}[method]

    def table(self) -> Table:
        from rich.table import Table

        angle = math.degrees(math.acos(min(self.cosine, 1.0)))
        table = Table(
            title=f"{self.samples[0]} + {self.samples[1]} samples, c = {self.c:g}, "
            f"{'one kernel' if self.one_kernel else 'two kernels'}: "
            f"rho(B) = {self.rho:.4g}, minimal angle {angle:.1f}° (cosine {self.cosine:.4g})",
            title_justify="left",
        )
        known = self.errors is not None
        for heading in ("method", "limit", "needs"):
            table.add_column(heading)
        for heading in ("per round", "halves in", *(("error of the limit",) if known else ())):
            table.add_column(heading, justify="right")
        for each in self.outlooks:
            error = ["-" if each.error is None else f"{each.error:.4g}"] if known else []
            limit = "none: it diverges" if each.diverges else each.limit
            halving = "never" if each.halving is None else f"{math.ceil(each.halving):,} rounds"
            if each.halving is not None and each.halving <= 1:
                halving = "1 round"
            table.add_row(each.method, limit, each.needs, f"x {each.rate:.4g}", halving, *error)
        table.caption = "a round: one fit of every chain or agent; μ: the eigenvalues of B"
        if self.errors:
            said = ", ".join(f"{name} {error:.4g}" for name, error in self.errors.items())
            table.caption += f"\nrelative errors on all training inputs: {said}"
        table.caption_justify = "left"
        return table

    def __str__(self) -> str:
        from io import StringIO

        from rich.console import Console

        out = StringIO()
        Console(file=out, width=110).print(self.table())
        return out.getvalue().rstrip()


def forecast(
    x1: np.ndarray,
    x2: np.ndarray,
    kernel1: str | KernelFunction = "linear",
    kernel2: str | KernelFunction | None = None,
    c: float = 1e-3,
    y1: np.ndarray | None = None,
    y2: np.ndarray | None = None,
) -> Forecast:
    """The limits of AKD, AvgKD, PKD and EKD, and how fast they converge, for two agents with these inputs.

    For agents that are not kernel machines, give the features of their trained models in place of inputs,
    with the linear kernel. With labels, the errors of the limits are given too. The time grows with the
    cube of the samples: a few thousand are enough to see the angle.
    """
    if (y1 is None) != (y2 is None):
        raise DataError("Labels must be given for both agents or for neither.", "one agent's", "Give y1 and y2.")
    labelled = y1 is not None and y2 is not None
    y1, y2 = (y1, y2) if labelled else (np.zeros(len(x1)), np.zeros(len(x2)))
    return forecast_of(Problem.pair(x1, y1, x2, y2, kernel1, kernel2, c), labelled=labelled)  # type: ignore[arg-type]


def forecast_of(problem: Problem, *, labelled: bool = True) -> Forecast:
    root = np.sqrt(spectrum(problem).astype(complex))
    if problem.same_kernel:
        root = np.clip(root.real, 0, 1)  # they are cosines of angles; rounding must not say otherwise
    # At c = 0 with one kernel, what both agents can represent has μ = 1: AKD and PKD keep it.
    fixed = (np.abs(root**2 - 1) < EQUAL) & (problem.c == 0 and problem.same_kernel)
    moving, common = root[~fixed], bool(fixed.any())
    kept = COMMON if common else ZERO
    summed = AGREED if common else CENTRAL if problem.same_kernel else CLOSED
    chain = _largest(moving)
    parallel = _largest(np.concatenate([1 + moving, 1 - moving])) / 2  # eigenvalues of (I + T_off)/2
    lines: tuple[tuple[str, str, float, str, Callable[[], Model | None]], ...] = (
        ("AKD", kept, chain, "rho(B) < 1", lambda: akd_limit(problem)),
        ("AvgKD", CLOSED, _largest(root) / 2, "rho(B) < 4", lambda: _first(avgkd_limit(problem))),
        ("PKD", kept, parallel, "|1 ± √μ| < 2", lambda: _first(pkd_limit(problem))),
        ("EKD", summed, _largest(root), "rho(B) < 1", lambda: ekd_limit(problem)),
        ("EKD half-term", summed, chain, "rho(B) < 1", lambda: ekd_limit(problem, half=True)),
    )
    outlooks = []
    for method, limit, rate, needs, find in lines:
        converges = rate < 1 - (ON_CIRCLE if problem.c == 0 else 0)
        model = find() if labelled and converges else None
        error = None if model is None else problem.error(model(problem.everything))
        outlooks.append(Outlook(method, limit if converges else NONE, rate, needs, rate > 1 + ON_CIRCLE, error))
    errors = None
    if labelled:
        errors = {name: problem.error(g(problem.everything)) for name, g in baselines(problem).items()}
    return Forecast(
        (len(problem.inputs[0]), len(problem.inputs[1])),
        problem.c,
        problem.same_kernel,
        _largest(root) ** 2,
        angle_cosine(problem),
        tuple(outlooks),
        errors,
    )


def _largest(values: np.ndarray) -> float:
    return float(np.abs(values).max()) if len(values) else 0.0


def _first(models: list[Model] | None) -> Model | None:
    return models[0] if models else None
