"""Every closed form against the algorithm as a plain loop, on many problems, at training and fresh inputs."""

from __future__ import annotations

import direct_loops as loops
import numpy as np
import pytest
from direct_loops import off
from random_problems import DEFINITE, LAPLACIAN, RBF, case, cases, crowd
from sklearn.metrics.pairwise import pairwise_kernels

import codistill
from codistill import theory

CS = [0, 1e-3, 0.1, 1]
EXACT = 1e-8
ROUNDS = [0, 1, 2, 5, 10]


@pytest.mark.parametrize("c", CS)
def test_akd_is_proposition_ii_for_even_and_odd_rounds_from_either_agent(c) -> None:
    for one in cases(c):
        for t in ROUNDS:
            for start in (0, 1):
                expected = loops.chain(one.machines, one.ys[start], t, start)(one.everywhere)
                assert off(theory.akd(one.problem, t, start)(one.everywhere), expected) < EXACT
                turned = one.problem if start == 0 else swapped(one.problem)
                assert off(theory.proposition_ii(turned, t)(one.everywhere), expected) < EXACT


@pytest.mark.parametrize("c", CS)
def test_avgkd_is_the_corrected_proposition_v_for_both_agents(c) -> None:
    for one in cases(c):
        for t in [*ROUNDS, 20]:
            first, second = loops.averaging(one.machines, one.ys, t)
            for found in (theory.avgkd(one.problem, t)[0], theory.proposition_v(one.problem, t)):
                assert off(found(one.everywhere), first(one.everywhere)) < EXACT
            for found in (theory.avgkd(one.problem, t)[1], theory.proposition_v(swapped(one.problem), t)):
                assert off(found(one.everywhere), second(one.everywhere)) < EXACT


@pytest.mark.parametrize("c", CS)
def test_the_limit_of_avgkd_is_reached(c) -> None:
    for one in cases(c):
        assert theory.rho(one.problem) < 4
        late = loops.averaging(one.machines, one.ys, 150)
        limits = theory.avgkd_limit(one.problem)
        assert limits is not None
        for found, expected in zip(limits, late, strict=True):
            assert off(found(one.everywhere), expected(one.everywhere)) < EXACT
        assert off(theory.proposition_v_limit(one.problem)(one.everywhere), late[0](one.everywhere)) < EXACT


@pytest.mark.parametrize("c", CS)
def test_proposition_vi_gives_the_limits_of_avgkd_and_equations_20_and_21(c) -> None:
    for one in cases(c):
        b1, b2 = theory.proposition_vi(one.problem)
        g1, g2 = loops.averaging(one.machines, one.ys, 150)
        k1, k2 = (m.kernel for m in one.machines)
        n = one.problem.samples
        assert off(k1(one.z, one.xs[0]) @ b1 / n / 2, g1(one.z)) < EXACT
        assert off(-k2(one.z, one.xs[1]) @ b2 / n / 2, g2(one.z)) < EXACT
        assert off(2 * g1(one.xs[0]) - g2(one.xs[0]), one.ys[0] - c * b1) < EXACT  # (20)
        assert off(2 * g2(one.xs[1]) - g1(one.xs[1]), one.ys[1] + c * b2) < EXACT  # (21)


@pytest.mark.parametrize("c", CS)
def test_pkd_averages_current_labels(c) -> None:
    for one in cases(c):
        for t in ROUNDS:
            expected = loops.averaging(one.machines, one.ys, t, current=True)
            for found, model in zip(theory.pkd(one.problem, t), expected, strict=True):
                assert off(found(one.everywhere), model(one.everywhere)) < EXACT


@pytest.mark.parametrize("c", CS)
def test_pkd_and_akd_go_to_zero_where_the_eigenvalues_say_so(c) -> None:
    for one in cases(c):
        forecast = theory.forecast_of(one.problem)
        late = int(min(1e5, 40 / abs(np.log(forecast["PKD"].rate))))
        for method, limit, model in (
            ("AKD", theory.akd_limit(one.problem), theory.akd(one.problem, 2 * late)),
            ("PKD", _first(theory.pkd_limit(one.problem)), theory.pkd(one.problem, late)[0]),
        ):
            if theory.rho(one.problem) < 1:
                assert forecast[method].limit == "zero"
                assert limit is not None
                assert np.abs(limit(one.z)).max() == 0
                assert np.abs(model(one.z)).max() < 1e-6
            else:
                assert forecast[method].diverges
                assert limit is None
                assert np.abs(model(one.z)).max() > 1e6


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("c", CS)
def test_ekd_is_the_sum_with_signs(c, half) -> None:
    for one in cases(c):
        for t in ROUNDS:
            expected = loops.ensemble(one.machines, one.ys, t, one.everywhere, half)
            assert off(theory.ekd(one.problem, t, half=half)(one.everywhere), expected) < EXACT


@pytest.mark.parametrize("c", CS)
def test_ekd_tends_to_the_system_of_proposition_vii(c) -> None:
    for one in cases(c):
        limit = theory.ekd_limit(one.problem)
        assert (limit is not None) == (theory.rho(one.problem) < 1)
        if limit is None:
            continue
        b1, b2 = theory.proposition_vii(one.problem)
        k1, k2 = (m.kernel for m in one.machines)
        solved = (k1(one.z, one.xs[0]) @ b1 + k2(one.z, one.xs[1]) @ b2) / one.problem.samples
        assert off(limit(one.z), solved) < EXACT
        enough = int(np.log(1e-10) / np.log(np.sqrt(theory.rho(one.problem)))) + 2
        if enough < 4000:
            assert off(theory.ekd(one.problem, enough)(one.z), solved) < 1e-6


@pytest.mark.parametrize("c", [0, 1e-3, 0.1, 1])
def test_with_one_kernel_ekd_is_the_centralised_model_everywhere(c) -> None:
    for seed in range(2):
        one = case(seed, (RBF, RBF), c)
        limit = theory.ekd_limit(one.problem)
        assert limit is not None
        pooled = loops.pooled(one.xs, one.ys, one.machines[0].kernel, c)
        assert off(limit(one.everywhere), pooled(one.everywhere)) < EXACT
        assert off(theory.centralised(one.problem)(one.everywhere), pooled(one.everywhere)) < EXACT


def test_with_two_kernels_ekd_is_exact_on_training_inputs_without_regularisation_only() -> None:
    for kernels in (DEFINITE[0], DEFINITE[1]):
        training, fresh, regularised = [], [], []
        for seed in range(5):
            for c in (0, 0.1):
                one = case(seed, kernels, c)
                limit = theory.ekd_limit(one.problem)
                assert limit is not None
                pooled = loops.pooled(one.xs, one.ys, one.machines[0].kernel, c)
                (training if c == 0 else regularised).append(
                    off(limit(np.concatenate(one.xs)), pooled(np.concatenate(one.xs)))
                )
                if c == 0:
                    fresh.append(off(limit(one.z), pooled(one.z)))
        assert max(training) < EXACT
        assert min(fresh) > 0.01
        assert min(regularised) > 0.01


@pytest.mark.parametrize("c", CS)
def test_each_agent_has_its_own_optimum(c) -> None:
    for one in cases(c):
        for agent in (0, 1):
            pooled = loops.pooled(one.xs, one.ys, one.machines[agent].kernel, c)
            assert off(theory.centralised(one.problem, agent)(one.z), pooled(one.z)) < EXACT
            alone = one.machines[agent].fit(one.ys[agent])
            assert off(theory.alone(one.problem, agent)(one.z), alone(one.z)) < EXACT


@pytest.mark.parametrize("outputs", [1, 3])
def test_several_outputs_are_several_problems(outputs) -> None:
    one = case(5, (RBF, LAPLACIAN), 0.1, outputs=outputs)
    columns = [case(5, (RBF, LAPLACIAN), 0.1, outputs=outputs) for _ in range(outputs)]
    for k, column in enumerate(columns):
        column.problem = theory.Problem(column.xs, [y[:, k] for y in column.ys], column.problem.kernels, 0.1)
    forms = {
        "akd": lambda p: theory.akd(p, 3),
        "avgkd": lambda p: theory.avgkd(p, 3)[1],
        "avgkd limit": lambda p: theory.avgkd_limit(p)[0],
        "v": lambda p: theory.proposition_v(p, 3),
        "pkd": lambda p: theory.pkd(p, 3)[0],
        "ekd": lambda p: theory.ekd(p, 3, half=True),
        "ekd limit": theory.ekd_limit,
        "backfitting": lambda p: theory.backfitting(p, 3),
    }
    for name, form in forms.items():
        found = form(one.problem)(one.z)
        assert found.shape == (len(one.z), outputs), name
        expected = np.stack([form(column.problem)(one.z) for column in columns], axis=1)
        assert off(found, expected) < EXACT, name


@pytest.mark.parametrize(
    ("name", "options"),
    [("linear", {}), ("rbf", {}), ("rbf", {"gamma": 2.0}), ("laplacian", {}), ("laplacian", {"gamma": 0.2}),
     ("polynomial", {}), ("polynomial", {"degree": 2, "gamma": 0.3, "coef0": 0.5})],
)  # fmt: skip
def test_kernels_are_those_of_the_learner(name, options) -> None:
    random = np.random.default_rng(0)
    x, z = random.normal(size=(7, 3)), random.normal(size=(5, 3))
    kernel = theory.Kernel(name, **options)
    assert off(kernel(x, z), pairwise_kernels(x, z, metric=name, **options)) < 1e-13
    y = random.normal(size=(7, 1))
    learner = codistill.KernelRidge(name, 0.05, samples=12, **options)
    learner.fit(x, y)
    problem = theory.Problem([x, random.normal(size=(5, 3))], [y, random.normal(size=(5, 1))], kernel, 0.05)
    assert off(theory.alone(problem)(z), learner.predict(z)) < 1e-10


def _first(models):
    return None if models is None else models[0]


def swapped(problem):
    """The agents in the other order: a proposition about agent 1 becomes one about agent 2."""
    return theory.Problem(problem.inputs[::-1], problem.targets[::-1], problem.kernels_of[::-1], problem.c)


# --- more than two agents ---------------------------------------------------------------------------


@pytest.mark.parametrize(("c", "agents"), [*((c, 3) for c in CS), (0.1, 5)])
def test_every_protocol_of_many_agents(c, agents) -> None:
    for one in crowd(c, agents, 1):
        z, ms, ys, p = one.everywhere, one.machines, one.ys, one.problem
        for t in (0, 1, 2, agents, 2 * agents + 1):
            for start in (0, agents - 1):
                assert off(theory.akd(p, t, start)(z), loops.chain(ms, ys[start], t, start)(z)) < EXACT
            for agent, model in enumerate(theory.akd_chains(p, t)):
                start = (agent - t) % agents
                assert off(model(z), loops.chain(ms, ys[start], t, start)(z)) < EXACT
            for w in (None, 0.5):
                expected = loops.averaging(ms, ys, t, w)
                for model, other in zip(theory.avgkd(p, t, w), expected, strict=True):
                    assert off(model(z), other(z)) < EXACT
            for model, other in zip(theory.pkd(p, t), loops.averaging(ms, ys, t, current=True), strict=True):
                assert off(model(z), other(z)) < EXACT
            for half in (False, True):
                assert off(theory.ekd(p, t, half=half)(z), loops.ensemble(ms, ys, t, z, half)) < EXACT
            assert off(theory.backfitting(p, t)(z), loops.backfit(ms, ys, t, z)) < EXACT
            assert off(theory.jacobi(p, t)(z), loops.backfit(ms, ys, t, z, 1.8 / agents)) < EXACT


@pytest.mark.parametrize("agents", [3, 5])
def test_backfitting_is_exact_for_many_agents_and_ekd_is_wrong(agents) -> None:
    """Eq. (32) sums chains around a ring; the centralised system has a block for every pair of agents."""
    for one in crowd(1e-2, agents, 2, one_kernel=True):
        z = one.everywhere
        pooled = loops.pooled(one.xs, one.ys, one.machines[0].kernel, 1e-2)(z)
        limit = theory.ekd_limit(one.problem)
        assert limit is not None
        assert off(theory.ekd(one.problem, 3000)(z), limit(z)) < 1e-6
        assert off(limit(z), pooled) > 0.02
        assert off(theory.backfitting_limit(one.problem)(z), pooled) < EXACT
        assert off(theory.backfitting(one.problem, 3000)(z), pooled) < EXACT
        assert off(theory.jacobi(one.problem, 6000)(z), pooled) < EXACT


def test_jacobi_needs_its_damping() -> None:
    one = crowd(1e-3, 5, 1, one_kernel=True)[0]
    close = theory.Problem([x * 0.1 for x in one.xs], one.ys, one.problem.kernels, 1e-3)
    pooled = theory.centralised(close)(one.z)
    assert off(theory.jacobi(close, 200, damping=1.0)(one.z), pooled) > 1e6
    assert off(theory.jacobi(close, 200_000)(one.z), pooled) < 1e-5
