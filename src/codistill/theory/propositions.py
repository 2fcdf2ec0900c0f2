"""The paper's propositions for two agents, formula by formula, with the corrections that were found.

Afonin, Karimireddy. Towards Model Agnostic Federated Learning Using Knowledge Distillation. ICLR 2022.

    A1 = cI + L11   A2 = cI + M22   T21 = L21 A1⁻¹   T12 = M12 A2⁻¹   B = T12 T21   B' = T21 T12
    F = l_xᵀ A1⁻¹: agent 1's model of the labels to its right.
"""

from __future__ import annotations

import numpy as np
import scipy.linalg

from codistill.errors import DataError
from codistill.theory.iteration import at_least
from codistill.theory.problem import Model, Problem


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
