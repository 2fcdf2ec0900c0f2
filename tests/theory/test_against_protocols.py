"""The protocols themselves, run in the simulation with kernel learners, against their closed forms."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from direct_loops import off

import codistill as cd
from codistill import theory
from codistill.theory import Model, Problem

EXACT = 1e-8
KERNELS = (("rbf", {"gamma": 0.7}), ("laplacian", {"gamma": 0.4}), ("rbf", {"gamma": 0.3}))
SINGULAR = (("linear", {}), ("linear", {}), ("polynomial", {"degree": 2}))

# A protocol, and each agent's model after so many rounds (the first round is the paper's t = 0).
METHODS: dict[str, tuple[cd.Protocol, Callable[[Problem, int], list[Model]]]] = {
    "akd": (cd.AKD(), lambda p, r: [theory.akd(p, (r - 1) * p.agents + a) for a in range(p.agents)]),
    "akd at once": (cd.AKD(simultaneous=True), lambda p, r: theory.akd_chains(p, r - 1)),
    "avgkd": (cd.AvgKD(), lambda p, r: theory.avgkd(p, r - 1)),
    "avgkd own 0.5": (cd.AvgKD(own_weight=0.5), lambda p, r: theory.avgkd(p, r - 1, 0.5)),
    "pkd": (cd.PKD(), lambda p, r: theory.pkd(p, r - 1)),
    "ekd": (cd.EKD(half=False), lambda p, r: [theory.ekd(p, r - 1)] * p.agents),
    "ekd half": (cd.EKD(half=True), lambda p, r: [theory.ekd(p, r - 1, half=True)] * p.agents),
    "backfitting": (cd.Backfitting(), lambda p, r: [theory.backfitting(p, r)] * p.agents),
    "backfitting at once": (cd.Backfitting(simultaneous=True), lambda p, r: [theory.jacobi(p, r - 1)] * p.agents),
}
# Of each method a problem without regularisation, one with little, and one of three agents (seed 2).
PROBLEMS = [(method, c, seed) for method in METHODS for c, seed in ((0.0, 0), (1e-3, 1), (0.1, 2))]


def both(method: str, c: float, seed: int, kernels=KERNELS, features: int = 4) -> list[float]:
    """How far each agent of a run is from its closed form, at fresh inputs."""
    random = np.random.default_rng([seed, len(method), int(1000 * c)])
    count, rounds = (3 if seed == 2 else 2), int(random.integers(1, 6))
    xs = [random.normal(size=(n, features)) for n in random.integers(5, 12, count)]
    ys = [random.normal(size=(len(x), 1)) for x in xs]
    chosen = kernels[:count]
    problem = Problem(xs, ys, [theory.Kernel(name, **options) for name, options in chosen], c)
    agents = [
        cd.Agent(f"agent {i}", cd.KernelRidge(name, c, reveal_inputs=True, **options), x, y)
        for i, (x, y, (name, options)) in enumerate(zip(xs, ys, chosen, strict=True))
    ]
    protocol, closed = METHODS[method]
    result = cd.Federation(agents, protocol, seed=seed).run(
        rounds=rounds, runtime="simulation", alone=False, progress=False
    )
    z = random.normal(size=(6, features))
    return [off(a.answers(z), g(z)) for a, g in zip(result.agents.values(), closed(problem, rounds), strict=True)]


@pytest.mark.parametrize(("method", "c", "seed"), PROBLEMS)
def test_a_run_is_its_closed_form(method, c, seed) -> None:
    assert max(both(method, c, seed)) < EXACT


@pytest.mark.parametrize("method", METHODS)
def test_also_where_the_kernel_is_singular(method) -> None:
    """c = 0: both take the solution of minimum norm, of 9 features with 5 to 11 samples."""
    assert max(both(method, 0.0, 1, SINGULAR, features=9)) < EXACT


@pytest.mark.parametrize("method", ["ekd half", "backfitting"])
def test_a_run_finds_the_centralised_model(method) -> None:
    random = np.random.default_rng(5)
    count = 2 if method == "ekd half" else 3
    xs = [random.normal(size=(9, 3)) for _ in range(count)]
    ys = [random.normal(size=(9, 1)) for _ in range(count)]
    agents = [
        cd.Agent(f"agent {i}", cd.KernelRidge("rbf", 0.3, reveal_inputs=True), x, y)
        for i, (x, y) in enumerate(zip(xs, ys, strict=True))
    ]
    result = cd.Federation(agents, METHODS[method][0]).run(rounds=30, runtime="simulation", alone=False, progress=False)
    z = random.normal(size=(6, 3))
    expected = theory.centralised(Problem(xs, ys, "rbf", 0.3))(z)
    for agent in result.agents.values():
        assert off(agent.answers(z), expected) < 1e-6
