"""The forecast: right about limits and rates; and mistakes are told in sentences."""

from __future__ import annotations

import numpy as np
import pytest
from random_problems import LAPLACIAN, RBF, case

from codistill import theory
from codistill.core.errors import CodistillError, DataError, LearnerError, RecipeError
from codistill.theory.protocols import akd_iteration, avgkd_iteration, ekd_iteration, pkd_iteration


def test_rates_are_spectral_radii_of_what_a_round_does() -> None:
    for kernels in ((RBF, RBF), (RBF, LAPLACIAN)):
        for seed in range(5):
            one = case(seed, kernels, 0.05)
            outlook = theory.forecast_of(one.problem)
            assert outlook["AKD"].rate == pytest.approx(akd_iteration(one.problem).rate, rel=1e-6)
            assert outlook["AvgKD"].rate == pytest.approx(avgkd_iteration(one.problem).rate, rel=1e-6)
            assert outlook["PKD"].rate == pytest.approx(pkd_iteration(one.problem).rate, rel=1e-6)
            assert outlook["EKD"].rate == pytest.approx(ekd_iteration(one.problem).rate, rel=1e-6)
            assert outlook.rho == pytest.approx(theory.rho(one.problem))


def test_a_rate_is_how_fast_it_goes() -> None:
    """Late in a run the distance from the limit shrinks by the rate in every round, and halves when it says."""
    one = case(2, (RBF, RBF), 1e-3)
    outlook = theory.forecast_of(one.problem)
    sizes = [np.linalg.norm(theory.akd(one.problem, t)(one.z)) for t in (400, 402)]
    assert sizes[1] / sizes[0] == pytest.approx(outlook["AKD"].rate ** 2, rel=1e-3)
    halving = outlook["PKD"].halving
    assert halving is not None
    assert outlook["PKD"].rate ** halving == pytest.approx(0.5)


def test_labels_are_optional_and_tell_the_errors_of_the_limits() -> None:
    one = case(2, (RBF, RBF), 0.05)
    without = theory.forecast(*one.xs, one.problem.kernels[0], c=0.05)
    labelled = theory.forecast(*one.xs, one.problem.kernels[0], c=0.05, y1=one.ys[0], y2=one.ys[1])
    assert without.errors is None
    assert without["EKD"].error is None
    assert [line.limit for line in without.outlooks] == [line.limit for line in labelled.outlooks]
    assert labelled.errors is not None
    assert labelled["EKD"].error == pytest.approx(labelled.errors["centralised"])
    assert labelled["AKD"].error == 1


def test_it_prints_as_a_table() -> None:
    one = case(2, (RBF, LAPLACIAN), 0.05)
    text = str(theory.forecast_of(one.problem))
    for word in ("two kernels", "rho(B)", "EKD half-term", "halves in", "zero", "closed form", "agent 1 alone"):
        assert word in text
    assert "agent 1 alone" not in str(theory.forecast(*one.xs))


def test_agents_with_nothing_in_common_learn_nothing_from_each_other() -> None:
    """Orthogonal inputs: T21 = 0, so whatever one agent knows is lost on the other at once."""
    outlook = theory.forecast(np.eye(4)[:2], np.eye(4)[2:], c=0.1)
    assert outlook.rho == 0
    assert outlook["AKD"].rate == 0
    assert outlook["AKD"].halving == 0
    assert outlook.cosine == pytest.approx(0, abs=1e-12)


X, Y = np.zeros((3, 2)), np.zeros(3)
MISTAKES = {
    "c": (lambda: theory.Problem([X], [Y], "rbf", -1), LearnerError, "at least 0"),
    "c not a number": (lambda: theory.Problem([X], [Y], "rbf", np.nan), LearnerError, "at least 0"),
    "kernel": (lambda: theory.Problem([X], [Y], "rfb"), LearnerError, "Did you mean 'rbf'"),
    "not a kernel": (lambda: theory.Problem([X], [Y], [3]), LearnerError, "a name or a function"),
    "option": (lambda: theory.Kernel("linear", gamma=2.0), LearnerError, "Unknown option 'gamma'"),
    "gamma": (lambda: theory.Kernel("rbf", gamma=-2.0), LearnerError, "above 0"),
    "kernel's shape": (
        lambda: theory.alone(theory.Problem([X], [Y], lambda x, z: np.zeros(2))),
        LearnerError,
        "3 x 3",
    ),
    "kernel's values": (
        lambda: theory.alone(theory.Problem([X], [Y], lambda x, z: np.full((len(x), len(z)), np.nan))),
        LearnerError,
        "not finite",
    ),
    "count": (lambda: theory.Problem([X], [Y, Y]), DataError, "1 inputs, 2 targets"),
    "targets": (lambda: theory.Problem([X], [Y[:2]]), DataError, "agent 0: 3 inputs"),
    "empty": (lambda: theory.Problem([X, X[:0]], [Y, Y[:0]]), DataError, "agent 1: 0 inputs"),
    "not finite": (lambda: theory.Problem([X], [Y * np.nan]), DataError, "finite"),
    "features": (lambda: theory.Problem([X, X[:, :1]], [Y, Y]), DataError, "same features"),
    "outputs": (lambda: theory.Problem([X, X], [Y, Y[:, None]]), DataError, "same features and outputs"),
    "rounds": (lambda: theory.akd(theory.Problem([X, X], [Y, Y]), -1), RecipeError, "at least 0"),
    "half a round": (lambda: theory.pkd(theory.Problem([X, X], [Y, Y]), 1.5), RecipeError, "must be an integer"),
    "weight": (lambda: theory.avgkd(theory.Problem([X, X], [Y, Y]), 1, 2), RecipeError, "from 0 to 1"),
    "alone": (lambda: theory.ekd(theory.Problem([X], [Y]), 1), DataError, "two agents or more"),
    "three": (lambda: theory.rho(theory.Problem([X] * 3, [Y] * 3)), DataError, "two agents"),
    "one label": (lambda: theory.forecast(X, X, y1=Y), DataError, "both agents or"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_told(mistake) -> None:
    do, kind, said = MISTAKES[mistake]
    with pytest.raises(CodistillError, match=said) as caught:
        do()
    assert type(caught.value) is kind
