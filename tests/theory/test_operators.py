"""Proposition III and Appendix B: the identities, and that they say the same as Proposition II."""

from __future__ import annotations

import numpy as np
import pytest
from direct_loops import off
from random_problems import RBF, case, cases

from codistill import theory

EXACT = 1e-8


@pytest.mark.parametrize("c", [0, 1e-3, 0.1, 1])
def test_the_identities_of_appendix_b(c) -> None:
    for one in cases(c):
        p, o = one.problem, theory.operators(one.problem)
        everything = np.eye(2 * p.samples)
        v = np.concatenate([o.v1, o.v2, o.v1_tilde, o.v2_tilde], axis=1)
        assert off(v.T @ v, everything) < EXACT  # V is orthogonal
        d = np.diag(o.d)
        for i, vi in enumerate((o.v1, o.v2)):
            for j, vj in enumerate((o.v1, o.v2)):
                assert off(vi.T @ d @ vj, p.gram(0, i, j)) < EXACT  # L_ij = V_iᵀ D V_j
        for i, vi in enumerate((o.v1_tilde, o.v2_tilde)):
            for j, vj in enumerate((o.v1_tilde, o.v2_tilde)):
                assert off(vi.T @ d @ vj, p.gram(1, i, j)) < EXACT
        for projection, basis in ((o.p1, o.v1), (o.p2, o.v2_tilde)):
            assert off(projection @ projection, projection) < EXACT  # P² = P
            if c > 0:
                assert off(projection @ basis, basis) < EXACT  # it leaves its subspace as it is
            weighted = o.geometry @ projection
            assert off(weighted, weighted.T) < EXACT  # orthogonal in the scalar product of G
        for contraction in (o.c1, o.c2):
            assert np.linalg.norm(contraction, 2) < 1 + 1e-12
        # (11): what agent 1 says of agent 2's inputs
        assert off(o.v2.T @ o.p1.T @ o.v1 @ one.ys[0], theory.alone(p)(one.xs[1])) < EXACT


@pytest.mark.parametrize("c", [0, 1e-3, 0.1, 1])
def test_proposition_iii_is_proposition_ii(c) -> None:
    for one in cases(c):
        for t in (0, 1, 2, 5):
            expected = theory.proposition_ii(one.problem, 2 * t)(one.everywhere)
            assert off(theory.proposition_iii(one.problem, t)(one.everywhere), expected) < EXACT
            if one.problem.same_kernel:
                plain = theory.proposition_iii(one.problem, t, one_kernel=True)
                assert off(plain(one.everywhere), expected) < EXACT


@pytest.mark.parametrize("c", [0, 1e-3, 0.1, 1])
def test_rho_is_the_squared_cosine_of_the_minimal_angle_with_one_kernel(c) -> None:
    for seed in range(10):
        one = case(seed, (RBF, RBF), c)
        cosine = theory.angle_cosine(one.problem)
        assert theory.rho(one.problem) == pytest.approx(cosine**2, rel=1e-8)
        # Aronszajn's bound on what is left after t pairs of rounds, in the norm of G
        o = theory.operators(one.problem, one_kernel=True)
        root = np.sqrt(o.geometry)
        for t in (1, 2, 5):
            left = root @ np.linalg.matrix_power(o.p2 @ o.p1, t) @ np.linalg.inv(root)
            assert np.linalg.norm(left, 2) <= cosine ** (2 * t - 1) * (1 + 1e-8)


def test_the_cosine_is_attained_by_two_functions() -> None:
    """No pair of random combinations of the agents' samples makes a smaller angle."""
    one = case(3, (RBF, RBF), 0.05)
    l12 = one.problem.gram(0, 0, 1)
    a1, a2 = one.problem.regularised(0), one.problem.regularised(1)
    random = np.random.default_rng(0)
    best = 0.0
    for _ in range(3000):
        a, b = random.normal(size=len(a1)), random.normal(size=len(a2))
        best = max(best, abs(a @ l12 @ b) / np.sqrt((a @ a1 @ a) * (b @ a2 @ b)))
    assert 0.3 * theory.angle_cosine(one.problem) < best <= theory.angle_cosine(one.problem)


# --- Appendix C: no regularisation -----------------------------------------------------------------------


@pytest.fixture
def singular():
    """10 features; row spaces of 7 and 6 dimensions, which meet in 3."""
    random = np.random.default_rng(1)
    xs = [random.normal(size=(n, 10)) for n in (7, 6)]
    w = random.normal(size=10)
    return theory.Problem(xs, [x @ w for x in xs], "linear", 0), random.normal(size=(5, 10)), w


def test_self_distillation_without_regularisation_changes_nothing(singular) -> None:
    problem, z, _ = singular
    for t in (1, 5):
        assert off(theory.self_distilled(problem, t)(z), theory.alone(problem)(z)) < EXACT
    strong = theory.Problem(problem.inputs, problem.targets, "linear", 0.1)
    assert off(theory.self_distilled(strong, 0)(z), theory.alone(strong)(z)) < EXACT
    assert off(theory.self_distilled(strong, 3)(z), theory.alone(strong)(z)) > 0.1


def test_akd_and_pkd_tend_to_the_projection_on_the_intersection(singular) -> None:
    problem, z, w = singular
    bases = [np.linalg.qr(x.T)[0] for x in problem.inputs]
    outside = [np.eye(10) - q @ q.T for q in bases]
    values, vectors = np.linalg.eigh(outside[0] + outside[1])
    common = vectors[:, values < 1e-10]
    assert common.shape == (10, 3)
    expected = z @ common @ common.T @ bases[0] @ bases[0].T @ w  # of the first agent's weights
    akd, pkd = theory.akd_limit(problem), theory.pkd_limit(problem)
    assert akd is not None
    assert pkd is not None
    for model in (akd, pkd[0], pkd[1], theory.akd(problem, 3000), theory.pkd(problem, 6000)[0]):
        assert off(model(z), expected) < 1e-7
    assert np.linalg.norm(expected) > 0.1
    assert theory.forecast_of(problem)["AKD"].limit == "what both agents can represent"


def test_plain_ekd_alternates_there_and_the_half_term_finds_the_centralised_model(singular) -> None:
    problem, z, _ = singular
    late = [theory.ekd(problem, t)(z) for t in (2000, 2001, 2002)]
    assert off(late[0], late[1]) > 0.1
    assert off(late[0], late[2]) < 1e-6
    assert theory.ekd_limit(problem) is None
    limit = theory.ekd_limit(problem, half=True)
    assert limit is not None
    assert off(limit(z), theory.ekd(problem, 2000, half=True)(z)) < 1e-7
    assert off(limit(z), theory.centralised(problem)(z)) < 1e-7
    outlook = theory.forecast_of(problem)
    assert outlook["EKD"].limit == "none"
    assert not outlook["EKD"].diverges
    assert outlook["EKD half-term"].limit == "centralised, where labels agree"


def test_the_half_term_converges_where_labels_disagree_too(singular) -> None:
    problem, z, _ = singular
    random = np.random.default_rng(4)
    other = theory.Problem(problem.inputs, [random.normal(size=len(x)) for x in problem.inputs], "linear", 0)
    limit = theory.ekd_limit(other, half=True)
    assert limit is not None
    assert off(limit(z), theory.ekd(other, 2000, half=True)(z)) < 1e-6
