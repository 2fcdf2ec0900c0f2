"""Models that are passed around a ring: AKD, and EKD which sums them with alternating signs.

In step t the agent that holds a chain's model passes it to the next, which fits the model's predictions on its
own inputs. With Z the ring's part of the transfer T (Z_ba = T_ba where b follows a), the labels that all
agents fit in step t are u_t = Z^t u_0. For two agents Z = [0 T12; T21 0], and Z² = diag(B, B') with
B = T12 T21, B' = T21 T12: after two steps a chain is back, multiplied by B.
"""

from __future__ import annotations

import numpy as np
import scipy.linalg

from codistill.errors import DataError
from codistill.theory.iteration import EQUAL, ON_CIRCLE, Iteration, eigenprojector
from codistill.theory.problem import Model, Problem


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
    """Raise `DataError` if there is only one agent."""
    if problem.agents < 2:
        raise DataError("This protocol must have two agents or more.", f"{problem.agents}", "Add agents.")
