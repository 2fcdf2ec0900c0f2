"""What is printed is off by so much, what is corrected is not."""

from __future__ import annotations

import direct_loops as loops
import errata
import numpy as np
import pytest
from direct_loops import off

from codistill import theory


@pytest.fixture(scope="module")
def table():
    return errata.table()


def test_every_corrected_form_is_exact(table) -> None:
    assert max(corrected for _, _, corrected in table) < 1e-8


def test_the_printed_forms_are_not(table) -> None:
    late = ("round 5", "round 20")  # by then both sums of Prop. V have nearly converged, to the right limit
    printed = {name: error for name, error, _ in table if not name.endswith(late)}
    assert len(printed) == len(table) - 4
    assert min(printed.values()) > 0.01, printed
    assert printed["scaling by an agent's own 1/N_a: EKD against centralised, c = 0.01"] > 0.05
    assert printed["(32), 3 agents; backfitting"] > 0.05
    assert printed["(9): odd steps positive"] == pytest.approx(2)


def test_akd_can_diverge_where_kernels_differ() -> None:
    """Prop. II says that g_t tends to 0; with ρ(B) > 1 the plain loop grows by ρ(B) every two rounds."""
    found = errata.divergent()
    assert 5 < len(found) < 200  # of 1000
    worst = max(found, key=theory.rho)
    rho = theory.rho(worst)
    machines = loops.machines(worst.inputs, worst.kernels, worst.c)
    sizes = [np.linalg.norm(loops.chain(machines, worst.targets[0], t)(worst.inputs[0])) for t in (200, 202, 400)]
    assert sizes[1] / sizes[0] == pytest.approx(rho, rel=1e-6)
    assert sizes[2] > 10 * sizes[0]
    assert theory.akd_limit(worst) is None
    assert theory.ekd_limit(worst) is None
    outlook = theory.forecast_of(worst)
    assert outlook["AKD"].diverges
    assert outlook["EKD half-term"].diverges
    assert not outlook["AvgKD"].diverges  # ρ(B) < 4


def test_with_one_kernel_akd_never_diverges() -> None:
    random = np.random.default_rng(3)
    for _ in range(60):
        problem = errata.random_pair(random)
        one = theory.Problem(problem.inputs, problem.targets, problem.kernels_of[0], problem.c)
        assert theory.rho(one) < 1


@pytest.mark.parametrize("rho", [0.9, 1.1, 3.5, 4.5])
def test_akd_pkd_and_ekd_need_rho_below_1_and_avgkd_below_4(rho) -> None:
    """One sample each, at 1 and at ρ: T21 = (1ρ)²/(1·1)² = ρ² of k1 = (xz)², T12 = 1ρ/ρ² = 1/ρ of k2 = xz; B = ρ."""
    square = theory.Kernel("polynomial", degree=2, gamma=1.0, coef0=0.0)
    problem = theory.Problem([[[1.0]], [[rho]]], [[1.0], [1.0]], [square, "linear"], 0)
    assert theory.rho(problem) == pytest.approx(rho)
    z = np.array([[0.7]])
    machines = loops.machines(problem.inputs, problem.kernels, 0)
    late = loops.averaging(machines, problem.targets, 400)[0](z)
    limit = theory.avgkd_limit(problem)
    assert (limit is not None) == (rho < 4)
    if limit is None:
        assert abs(late[0]) > 1e6
    else:
        assert off(limit[0](z), late) < 1e-8
    outlook = theory.forecast_of(problem)
    for method in ("AKD", "PKD", "EKD", "EKD half-term"):
        assert outlook[method].diverges == (rho > 1)
    assert outlook["AvgKD"].diverges == (rho > 4)
    assert outlook["AvgKD"].rate == pytest.approx(rho**0.5 / 2)
    assert outlook["PKD"].rate == pytest.approx((1 + rho**0.5) / 2)
    sums = [abs(float(theory.ekd(problem, t)(z)[0])) for t in (400, 401)]
    assert (max(sums) > 10) == (rho > 1)


def test_the_bound_of_appendix_b_holds_in_the_norm_of_g_and_not_in_the_euclidean_one() -> None:
    """P1 and P2 are orthogonal projections in the scalar product of G = cI + D, so ‖(P2 P1)^t v‖_G ≤ cos^(2t-1) ‖v‖_G
    (Aronszajn). The paper takes ‖v‖ = 1 for the columns of V1, which is the Euclidean norm: from ‖x‖² λmin ≤ ‖x‖_G² ≤
    λmax ‖x‖² there the bound holds with a factor √(λmax / λmin), and without it it fails in a third of the cases."""
    euclidean, in_g, with_factor = errata.speed().T
    assert in_g.max() <= 1 + 1e-9
    assert with_factor.max() <= 1 + 1e-9
    assert 150 < (euclidean > 1 + 1e-9).sum() < 300  # of 600
    assert euclidean.max() > 3


def test_the_ranges_of_p1_and_p2_are_orthogonal_and_those_of_their_transposes_are_not() -> None:
    """Range P_i = span V_i, and V1ᵀ V2 = 0. Range P_iᵀ = G span V_i, and V1ᵀ G² V2 is not 0."""
    of_transposes, of_projections = errata.ranges().T
    assert of_projections.max() < 1e-12
    assert of_transposes.max() > 0.999
    assert np.median(of_transposes) > 0.9


def test_the_kernel_difference_bullet_is_vacuous() -> None:
    """Prop. VIII: 'smaller eigenvalues of V1 Ṽ1ᵀ'; its singular values are 0 and 1 whatever the kernels."""
    for seed in range(5):
        one = errata.two(seed, 0.1)
        values = np.linalg.svd(theory.operators(one.problem).c1, compute_uv=False)
        assert np.minimum(np.abs(values), np.abs(values - 1)).max() < 1e-10


def test_more_regularisation_and_more_distance_degrade_faster() -> None:
    """The two bullets of Prop. IV that hold."""
    for seed in range(5):
        one = errata.two(seed, 0.1, one_kernel=True)
        by_c = [theory.rho(theory.Problem(one.xs, one.ys, one.problem.kernels, c)) for c in (1e-3, 1e-2, 0.1, 1)]
        assert by_c == sorted(by_c, reverse=True)
        by_shift = [
            theory.rho(theory.Problem([one.xs[0], one.xs[1] + shift], one.ys, one.problem.kernels, 0.01))
            for shift in (0, 2, 3, 4)  # a small one may bring them nearer by chance
        ]
        assert by_shift == sorted(by_shift, reverse=True)
