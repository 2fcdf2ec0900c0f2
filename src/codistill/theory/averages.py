"""Protocols that average: AvgKD with the true labels, PKD with the current ones; and backfitting, which is exact.

With T_off the transfer without its diagonal blocks, (T_off u)_i = Σ_{j≠i} g^j(X_i) where g^j fits u_j.
"""

from __future__ import annotations

import numpy as np
import scipy.linalg

from codistill.errors import RecipeError
from codistill.theory.chains import more_than_one
from codistill.theory.iteration import Iteration
from codistill.theory.problem import Model, Problem


def others(problem: Problem) -> np.ndarray:
    """T_off."""
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
