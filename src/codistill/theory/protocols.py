"""Every protocol of the paper is one affine iteration on labels; with its powers, limit and rate.

Protocols that average: AvgKD with the true labels, PKD with the current ones; and backfitting, which is exact. With
T_off the transfer without its diagonal blocks, (T_off u)_i = Σ_{j≠i} g^j(X_i) where g^j fits u_j. Models that are
passed around a ring: AKD, and EKD which sums them with alternating signs. And baselines.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import scipy.linalg

from codistill.core.errors import DataError, RecipeError
from codistill.theory.problem import Model, Problem, gram, solve

ON_CIRCLE = 1e-9  # eigenvalues this near to the unit circle count as on it
EQUAL = 1e-6  # eigenvalues this near to each other count as one: rounding splits a defective pair by 1e-8


@dataclass(frozen=True, eq=False)
class Iteration:
    """u_{t+1} = G u_t + h, from u_0: all agents' labels, one below the other."""

    operator: np.ndarray
    offset: np.ndarray
    start: np.ndarray

    def after(self, t: int) -> np.ndarray:
        """u_t = G^t u_0 + Σ_{i<t} G^i h, by repeated squaring of [[G, h], [0, I]]."""
        at_least(t, 0)
        return self._apply(np.linalg.matrix_power(self._affine, t))

    def steps(self) -> Iterator[np.ndarray]:
        """u_0, u_1, u_2, ... one by one; cheaper than `after` where all are wanted."""
        labels = self.start
        while True:
            yield labels
            labels = self.operator @ labels + self.offset

    def limit(self) -> np.ndarray | None:
        """u_∞, or None where u_t does not converge for these labels."""
        if self.rate < 1 - ON_CIRCLE:
            return np.asarray(scipy.linalg.solve(np.eye(len(self.operator)) - self.operator, self.offset))
        values = np.linalg.eigvals(self._affine)
        if (np.abs(values[np.abs(values - 1) >= EQUAL]) >= 1 - ON_CIRCLE).any():
            return None
        projector = eigenprojector(self._affine, 1.0)  # lim G^t: on what G leaves as it is
        return None if projector is None else self._apply(projector)

    @property
    def rate(self) -> float:
        """ρ(G): the factor per step by which the distance from the limit shrinks (or grows) in the end."""
        return float(np.abs(np.linalg.eigvals(self.operator)).max())

    @property
    def _affine(self) -> np.ndarray:
        offset = self.offset.reshape(len(self.offset), -1)
        outputs = offset.shape[1]
        return np.block([[self.operator, offset], [np.zeros((outputs, len(offset))), np.eye(outputs)]])

    def _apply(self, affine: np.ndarray) -> np.ndarray:
        start = self.start.reshape(len(self.start), -1)
        moved = affine @ np.concatenate([start, np.eye(start.shape[1])])
        return np.asarray(moved[: len(start)].reshape(self.start.shape))


def eigenprojector(matrix: np.ndarray, value: float) -> np.ndarray | None:
    """The projector on the eigenspace of a value along all others; None if the value is defective.

    With R and L the right and left eigenvectors, Π = R (LᵀR)⁻¹ Lᵀ.
    """
    shifted = matrix - value * np.eye(len(matrix))
    multiplicity = int((np.abs(np.linalg.eigvals(matrix) - value) < EQUAL).sum())
    if multiplicity == 0:
        return np.zeros_like(matrix)
    left, singular, right = np.linalg.svd(shifted)
    if singular[-multiplicity] > 1e-7 * max(1.0, singular[0]):
        return None
    r, l = right[-multiplicity:].T, left[:, -multiplicity:]  # noqa: E741
    if np.linalg.cond(l.T @ r) > 1e7:
        return None
    return np.asarray(r @ np.linalg.solve(l.T @ r, l.T))


def at_least(count: int, smallest: int) -> None:
    """Raise `RecipeError` unless a number of rounds is an integer of at least `smallest`."""
    if isinstance(count, bool) or not isinstance(count, int | np.integer) or count < smallest:
        raise RecipeError(f"Rounds must be an integer of at least {smallest}.", repr(count), "Choose another.")


# --- protocols that average, and backfitting


def others(problem: Problem) -> np.ndarray:
    more_than_one(problem)
    off = problem.transfer.copy()
    for block in problem.blocks:
        off[block, block] = 0
    return off


def avgkd_iteration(problem: Problem, own_weight: float | None = None) -> Iteration:
    """u_{t+1} = w y + (1 - w)/(M - 1) T_off u_t, from u_0 = y; w = 1/M unless given."""
    count = problem.agents
    w = 1 / count if own_weight is None else own_weight
    if not 0 <= w <= 1:
        raise RecipeError("The weight of the own labels must be from 0 to 1.", repr(w), "Leave it out for 1/M.")
    return Iteration((1 - w) / max(count - 1, 1) * others(problem), w * problem.labels, problem.labels)


def avgkd(problem: Problem, t: int, own_weight: float | None = None) -> list[Model]:
    """Proposition V for any number of agents: each agent's model g_t. Two agents: see `proposition_v`."""
    return problem.fit_all(avgkd_iteration(problem, own_weight).after(t))


def avgkd_limit(problem: Problem, own_weight: float | None = None) -> list[Model] | None:
    """What AvgKD tends to; None where it does not converge (two agents: ρ(B) ≥ 4)."""
    labels = avgkd_iteration(problem, own_weight).limit()
    return None if labels is None else problem.fit_all(labels)


def pkd_iteration(problem: Problem) -> Iteration:
    """u_{t+1} = (I + T_off) u_t / M, from u_0 = y: the algorithm, which averages the current *labels*."""
    operator = (np.eye(problem.samples) + others(problem)) / problem.agents
    return Iteration(operator, np.zeros_like(problem.labels), problem.labels)


def pkd(problem: Problem, t: int) -> list[Model]:
    """Appendix E as the algorithm has it: agent i's model of (I + T_off)^t y / M^t.

    Two corrections to the printed form: 1/2^t, not 1/(2t); and the own part of the average is the labels that
    an agent was trained on, not its predictions of them (eqs. 22 and 23), which differ at c > 0.
    """
    return problem.fit_all(pkd_iteration(problem).after(t))


def pkd_limit(problem: Problem) -> list[Model] | None:
    """Zero where all |1 ± √μ| < 2 for the eigenvalues μ of B; at c = 0 what all agents can represent; else None."""
    labels = pkd_iteration(problem).limit()
    return None if labels is None else problem.fit_all(labels)


def backfitting_iteration(problem: Problem) -> Iteration:
    """Gauss-Seidel sweeps from f = 0: agent after agent refits f_i on y_i - Σ_{j≠i} f_j(X_i), newest f_j first.

    With T_off = T_below + T_above:  (I + T_below) u_{t+1} = y - T_above u_t.
    """
    off = others(problem)
    below = np.zeros_like(off)
    for block in problem.blocks:
        below[block, : block.start] = off[block, : block.start]
    left = np.eye(problem.samples) + below
    operator = -scipy.linalg.solve(left, off - below)
    return Iteration(operator, scipy.linalg.solve(left, problem.labels), np.zeros_like(problem.labels))


def backfitting(problem: Problem, sweeps: int) -> Model:
    """The sum of all agents' models after this many sweeps: the centralised model in the limit, for any M."""
    return problem.ensemble(backfitting_iteration(problem).after(sweeps))


def jacobi_iteration(problem: Problem, damping: float | None = None) -> Iteration:
    """All agents refit at once: u_{t+1} = u_t + ω (y - T_off u_t - u_t), from u_0 = y, everybody's own labels.

    ω = 1 diverges from M = 3 on where agents agree (T_off has eigenvalues up to M - 1); ω = 1.8/M converges.
    """
    omega = 1.8 / problem.agents if damping is None else damping
    system = np.eye(problem.samples) + others(problem)
    return Iteration(np.eye(problem.samples) - omega * system, omega * problem.labels, problem.labels)


def jacobi(problem: Problem, t: int, damping: float | None = None) -> Model:
    """The sum of all agents' models after t simultaneous, damped refits; at t = 0 everybody's own fit."""
    return problem.ensemble(jacobi_iteration(problem, damping).after(t))


def backfitting_limit(problem: Problem) -> Model:
    """Σ_a k_a(x) b_a with (I + T_off) u = y: the system of Proposition VII with all blocks, for M agents.

    With one kernel it is the centralised model at every x.
    """
    system = np.eye(problem.samples) + others(problem)
    return problem.ensemble(np.asarray(scipy.linalg.lstsq(system, problem.labels)[0]))


# --- Models that are passed around a ring: AKD, and EKD which sums them with alternating signs.


def ring(problem: Problem) -> np.ndarray:
    """Z: the blocks of T from each agent to the next. An agent by itself is its own next: self-distillation."""
    z = np.zeros_like(problem.transfer)
    for agent, block in enumerate(problem.blocks):
        following = problem.blocks[(agent + 1) % problem.agents]
        z[following, block] = problem.transfer[following, block]
    return z


def akd_iteration(problem: Problem, start: int | None = None) -> Iteration:
    """u_{t+1} = Z u_t, from the labels of one agent; from those of all (M chains at once) if none is named."""
    labels = problem.labels.copy()
    if start is not None:
        block = problem.blocks[start]
        labels[: block.start], labels[block.stop :] = 0, 0
    return Iteration(ring(problem), np.zeros_like(labels), labels)


def akd(problem: Problem, t: int, start: int = 0) -> Model:
    """Proposition II: the model after t steps of the chain that starts at one agent, for any t and M.

    For two agents  g_{2t}(x) = l_xᵀ A1⁻¹ B^t y1,  g_{2t+1}(x) = m_xᵀ A2⁻¹ T21 B^t y1.
    It belongs to agent (start + t) mod M.
    """
    owner = (start + t) % problem.agents
    return problem.fit(owner, akd_iteration(problem, start).after(t)[problem.blocks[owner]])


def akd_chains(problem: Problem, t: int) -> list[Model]:
    """The models of all agents after step t of M simultaneous chains; agent a's comes from agent (a - t) mod M."""
    return problem.fit_all(akd_iteration(problem).after(t))


def akd_limit(problem: Problem, start: int = 0) -> Model | None:
    """What the first agent's models of a chain tend to, pass after pass; None where they do not converge.

    Proposition II says zero. True for one kernel at c > 0, where ρ(B) is the squared cosine of an angle; for
    different kernels ρ(B) can exceed 1. At c = 0 on a singular kernel it is, by Appendix C, the projection of
    the first model on what all agents can represent.
    """
    block = problem.blocks[start]
    lap = np.linalg.matrix_power(ring(problem), problem.agents)[block, block]
    labels = Iteration(lap, np.zeros_like(problem.targets[start]), problem.targets[start]).limit()
    return None if labels is None else problem.fit(start, labels)


def ekd_iteration(problem: Problem, *, half: bool = False) -> Iteration:
    """The partial sums U_t = Σ_{i≤t} (-Z)^i y obey U_{t+1} = y - Z U_t, from U_0 = y.

    With the last term halved, (U_t + U_{t-1}) / 2, the recursion is the same and starts from y / 2: that start
    has no error at all in the eigenvectors with Z = 1, where plain sums alternate for ever.
    """
    more_than_one(problem)
    return Iteration(-ring(problem), problem.labels, problem.labels / 2 if half else problem.labels)


def ekd(problem: Problem, t: int, *, half: bool = False) -> Model:
    """Eq. (9): Σ_{i≤t} (-1)^i (g_i^1 + g_i^2), the sign positive at i = 0; `half` halves the term i = t.

    For M > 2 agents this is eq. (32), which converges to a WRONG model: Z holds only the blocks between
    neighbours of the ring. Use `backfitting` there.
    """
    return problem.ensemble(ekd_iteration(problem, half=half).after(t))


def ekd_limit(problem: Problem, *, half: bool = False) -> Model | None:
    """Proposition VII in general: l_x b1 + m_x b2 with [A1 M12; L21 A2] b = y; None where sums do not converge.

    With one kernel this is the centralised model at every x. With different kernels it agrees with g^{1*} on
    the training inputs at c = 0 only. Plain sums converge iff ρ(Z) < 1 (two agents: ρ(B) < 1). The half-term
    also converges where eigenvalues of Z are exactly 1; those at -1 leave the sum of models as it is
    (two models of one kernel cancel), so with one kernel the pseudo-inverse on the rest is the limit.
    """
    iteration = ekd_iteration(problem, half=half)
    if iteration.rate < 1 - ON_CIRCLE:
        labels = iteration.limit()
        return None if labels is None else problem.ensemble(labels)
    values = np.linalg.eigvals(iteration.operator)
    outside = np.abs(values) >= 1 - ON_CIRCLE
    only_signs = np.minimum(np.abs(values - 1), np.abs(values + 1))[outside].max() < EQUAL
    if not (half and problem.same_kernel and problem.agents == 2 and only_signs):
        return None
    unseen = eigenprojector(iteration.operator, 1.0)
    if unseen is None:
        return None
    system = np.eye(len(unseen)) - iteration.operator + unseen
    labels = np.asarray(scipy.linalg.solve(system, problem.labels)) - unseen @ problem.labels
    return problem.ensemble(labels)


def self_distilled(problem: Problem, t: int, agent: int = 0) -> Model:
    """One agent that learns t times from itself: l_xᵀ A⁻¹ (L A⁻¹)^t y. At c = 0 nothing changes (Appendix C)."""
    own = problem.inputs[agent]
    c = problem.c * problem.samples / len(own)  # so that the smaller N of the agent by itself changes nothing
    return akd(Problem((own,), (problem.targets[agent],), (problem.kernels_of[agent],), c), t)


def more_than_one(problem: Problem) -> None:
    if problem.agents < 2:
        raise DataError("This protocol must have two agents or more.", f"{problem.agents}", "Add agents.")


# --- Baselines: each agent alone, and one model of the data of all agents.


def alone(problem: Problem, agent: int = 0) -> Model:
    """Proposition I for one agent's own data: g(x) = l_xᵀ (cI + L_aa)⁻¹ y_a."""
    return problem.fit(agent, problem.targets[agent])


def centralised(problem: Problem, agent: int = 0) -> Model:
    """Proposition I for the joint objective, eq. (5): g*(x) = k_xᵀ (cI + K)⁻¹ y on the data of all agents.

    Each agent has its own optimum g^{a*}, by its own kernel; with one kernel they are the same.
    """
    kernel, everything = problem.kernels_of[agent], problem.everything
    matrix = gram(kernel, everything, everything) / problem.samples + problem.c * np.eye(problem.samples)
    coefficients = solve(matrix, problem.labels, pseudo=problem.c == 0)
    return Model(((kernel, everything, coefficients),), problem.samples)


def baselines(problem: Problem) -> dict[str, Model]:
    return {
        "agent 1 alone": alone(problem, 0),
        "agent 2 alone": alone(problem, 1),
        "centralised": centralised(problem),
    }
