"""The toy of Figure 3 and Appendix A: linear regression A x* = b, divided between two agents."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from codistill.theory.averages import avgkd_iteration, pkd_iteration
from codistill.theory.baselines import alone, centralised
from codistill.theory.chains import akd_iteration, ekd_iteration
from codistill.theory.iteration import Iteration, at_least
from codistill.theory.problem import Problem

DIMENSION, SAMPLES, SHARE = 100, 150, 0.6  # d, n = 1.5 d, and agent 1's part
BASELINES = ("agent 1 alone", "agent 2 alone", "centralised")


@dataclass(frozen=True)
class Setting:
    """One panel of the figure. The paper does not give c: these values reproduce its pictures."""

    title: str
    c: float
    sort: bool  # by b, before the data are divided


SETTINGS = (
    Setting("same data", 0.01, False),
    Setting("different data", 0.01, True),
    Setting("strong regularisation", 1.0, False),
)


@dataclass(frozen=True, eq=False)
class Toy:
    """The error of every method in rounds 0, 1, ..., as ‖f(A) - b‖ / ‖b‖ over *all* training inputs.

    The paper does not name its measure. With this one AKD climbs to 1 (a model that says 0) and EKD comes down
    to the centralised error, as in the figure; AvgKD, agent 1's, is worse than agent 1 alone, but at c = 0.01
    not worse than agent 2 alone.
    """

    setting: Setting
    problem: Problem
    errors: dict[str, np.ndarray]

    def first_within(self, method: str, share: float = 0.01) -> int | None:
        """The first round from which on a method stays within this share of the centralised error."""
        goal = self.errors["centralised"][0]
        outside = np.flatnonzero(np.abs(self.errors[method] - goal) > share * goal)
        first = 0 if len(outside) == 0 else int(outside[-1]) + 1
        return first if first < len(self.errors[method]) else None


def toy_problem(setting: Setting, seed: int = 0) -> Problem:
    """A and x* standard normal, b = A x*; the first 60 % of the rows are agent 1's."""
    random = np.random.default_rng(seed)
    a = random.standard_normal((SAMPLES, DIMENSION))
    b = a @ random.standard_normal(DIMENSION)
    order = np.argsort(b) if setting.sort else random.permutation(SAMPLES)
    mine, yours = np.split(order, [round(SHARE * SAMPLES)])
    return Problem.pair(a[mine], b[mine], a[yours], b[yours], "linear", c=setting.c)


def run_toy(setting: Setting, rounds: int = 250, seed: int = 0) -> Toy:
    """Every method's error in rounds 0 to `rounds`. A round of AKD is one hand-over, as in the paper."""
    at_least(rounds, 0)
    problem = toy_problem(setting, seed)
    everything, b = np.concatenate(list(problem.inputs)), problem.labels
    baselines = (alone(problem, 0), alone(problem, 1), centralised(problem))
    errors = {
        name: np.full(rounds + 1, _error(model(everything), b))
        for name, model in zip(BASELINES, baselines, strict=True)
    }
    first = problem.transfer[:, problem.blocks[0]]

    def everyone(labels: np.ndarray) -> np.ndarray:
        return np.asarray(problem.transfer @ labels)  # the sum of the models; of one chain, its only model

    def agent_1(labels: np.ndarray) -> np.ndarray:
        return np.asarray(first @ labels[problem.blocks[0]])

    methods: dict[str, tuple[Iteration, Callable[[np.ndarray], np.ndarray]]] = {
        "AKD": (akd_iteration(problem, 0), everyone),
        "AvgKD": (avgkd_iteration(problem), agent_1),
        "PKD": (pkd_iteration(problem), agent_1),
        "EKD": (ekd_iteration(problem), everyone),
        "EKD half-term": (ekd_iteration(problem, half=True), everyone),
    }
    for name, (iteration, predict) in methods.items():
        steps: Iterator[np.ndarray] = islice(iteration.steps(), rounds + 1)
        errors[name] = np.array([_error(predict(labels), b) for labels in steps])
    return Toy(setting, problem, errors)


def _error(predictions: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(predictions - b) / np.linalg.norm(b))
