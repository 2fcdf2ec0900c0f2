"""Baselines: each agent alone, and one model of the data of all agents."""

from __future__ import annotations

import numpy as np

from codistill.theory.kernels import gram
from codistill.theory.problem import Model, Problem, solve


def alone(problem: Problem, agent: int = 0) -> Model:
    """Proposition I for one agent's own data: g(x) = l_xᵀ (cI + L_aa)⁻¹ y_a."""
    return problem.fit(agent, problem.targets[agent])


def centralised(problem: Problem, agent: int = 0) -> Model:
    """Proposition I for the joint objective, eq. (5): g*(x) = k_xᵀ (cI + K)⁻¹ y on the data of all agents.

    Each agent has its own optimum g^{a*}, by its own kernel; with one kernel they are the same.
    """
    kernel = problem.kernels_of[agent]
    everything = np.concatenate(list(problem.inputs))
    matrix = gram(kernel, everything, everything) / problem.samples + problem.c * np.eye(problem.samples)
    coefficients = solve(matrix, problem.labels, pseudo=problem.c == 0)
    return Model(((kernel, everything, coefficients),), problem.samples)
