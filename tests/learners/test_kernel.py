"""Kernel ridge regression: scikit-learn's with alpha = c N, minimum norm at c = 0, and its errors."""

import warnings

import numpy as np
import pytest
import sklearn.kernel_ridge
from sklearn.metrics.pairwise import pairwise_kernels, rbf_kernel

from codistill.core.errors import LearnerError
from codistill.learners.ability import Ability
from codistill.learners.kernel_ridge import KernelRidge
from codistill.wire.state import pack, unpack


def toy(n=12, d=3, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, d)), rng.normal(size=(n, 2))


@pytest.mark.parametrize(
    ("kernel", "options"),
    [("rbf", {"gamma": 0.3}), ("laplacian", {}), ("polynomial", {"degree": 2, "coef0": 1.0}), ("linear", {})],
)
def test_it_is_kernel_ridge_with_alpha_c_times_n(kernel, options):
    x, y = toy()
    ours = KernelRidge(kernel, 0.01, **options)
    ours.join(30)  # 12 samples here, 18 elsewhere
    ours.fit(x, y)
    theirs = sklearn.kernel_ridge.KernelRidge(alpha=0.01 * 30, kernel=kernel, **options).fit(x, y)
    u = toy(seed=1)[0]
    np.testing.assert_allclose(ours.predict(u), theirs.predict(u), atol=1e-10)


def test_two_agents_share_the_scale_of_the_federation():
    """Agents that refit by turns on what the other leaves over add up to the centralised model, if each uses
    c (N₁ + N₂); with c N of its own they do not.
    """
    x, y = toy(n=10)
    parts = [slice(0, 4), slice(4, 10)]
    u = toy(seed=1)[0]
    centralised = sklearn.kernel_ridge.KernelRidge(alpha=0.1 * 10, kernel="rbf", gamma=0.5).fit(x, y).predict(u)

    def ensemble(samples):
        agents = [KernelRidge("rbf", 0.1, gamma=0.5, samples=n) for n in samples]
        for agent, part in zip(agents, parts, strict=True):
            agent.join(10)
            agent.fit(x[part], np.zeros_like(y[part]))
        for _ in range(200):
            for own, other, part in zip(agents, reversed(agents), parts, strict=True):
                own.fit(x[part], y[part] - other.predict(x[part]))
        return sum(agent.predict(u) for agent in agents)

    np.testing.assert_allclose(ensemble([None, None]), centralised, atol=1e-9)
    assert np.abs(ensemble([4, 6]) - centralised).max() > 0.01


def test_alone_n_is_the_agents_own_count():
    x, y = toy()
    alone, told = KernelRidge("rbf", 0.1), KernelRidge("rbf", 0.1, samples=12)
    told.join(99)  # what was given at construction stands
    for model in (alone, told):
        model.fit(x, y)
    assert np.array_equal(alone.predict(x), told.predict(x))


def test_without_regularisation_it_interpolates():
    x, y = toy()
    model = KernelRidge("rbf", 0.0)
    model.fit(x, y)
    np.testing.assert_allclose(model.predict(x), y, atol=1e-6)


def test_without_regularisation_a_singular_kernel_gets_the_minimum_norm():
    """Duplicate rows with different targets: K⁺y, the least-squares solution of the smallest norm."""
    x, y = toy(n=6)
    x = np.concatenate([x, x[:3]])
    y = np.concatenate([y, y[:3] + 1])
    model = KernelRidge("rbf", 0.0, gamma=0.5)
    model.fit(x, y)
    gram = rbf_kernel(x, gamma=0.5)
    assert np.linalg.matrix_rank(gram) == 6
    expected = np.linalg.pinv(gram, rcond=1e-10, hermitian=True) @ y
    np.testing.assert_allclose(model.state()["coefficients"], expected, atol=1e-8)
    np.testing.assert_allclose(model.predict(x[:3]), y[:3] + 0.5, atol=1e-8)


@pytest.mark.parametrize(("kernel", "c"), [("sigmoid", 1e-3), ("linear", 1e-18), ("rbf", 1e-18)])
def test_what_is_not_positive_definite_is_solved_all_the_same(kernel, c):
    x, y = toy(n=6)
    x = np.concatenate([x, x])
    y = np.concatenate([y, y])
    model = KernelRidge(kernel, c)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model.fit(x, y)
    assert not said
    matrix = pairwise_kernels(x, metric=kernel) + 12 * c * np.eye(12)
    found = model.state()["coefficients"]
    # normal equations: what is left over has no component that the matrix could reach
    np.testing.assert_allclose(matrix @ (matrix @ found - y), 0, atol=1e-7)


def test_what_is_hardly_positive_definite_does_not_warn():
    x = np.diag([1e6, 1.0, 1e-3])  # eigenvalues 10¹², 1 and 10⁻⁶: the last one is beyond double precision
    model = KernelRidge("linear", 1e-18)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model.fit(x, np.ones((3, 1)))
    assert not said
    np.testing.assert_allclose(model.state()["coefficients"], [[1e-12], [1], [0]], atol=1e-12)


def test_a_kernel_of_ones_own_and_images():
    x, y = toy(n=8, d=4)
    model = KernelRidge(lambda a, b: float(a @ b) + 1, 0.1)
    model.fit(x.reshape(8, 1, 2, 2), y)
    expected = sklearn.kernel_ridge.KernelRidge(alpha=0.8, kernel=lambda a, b: float(a @ b) + 1).fit(x, y)
    np.testing.assert_allclose(model.predict(x.reshape(8, 2, 2)), expected.predict(x), atol=1e-10)
    assert model.describe() == "kernel ridge (own kernel)"


def test_its_state_returns_to_the_bit():
    x, y = toy()
    one, two = KernelRidge("rbf", 0.1), KernelRidge("rbf", 0.1)
    assert not one.ready
    two.restore(unpack(pack(one.state())))
    assert not two.ready
    one.join(40)
    one.fit(x, y)
    two.restore(unpack(pack(one.state())))
    assert two.ready
    assert np.array_equal(one.predict(x), two.predict(x))
    for model in (one, two):
        model.fit(x, y * 2)
    assert np.array_equal(one.predict(x), two.predict(x))


def test_it_travels_only_if_its_owner_agrees():
    assert KernelRidge().abilities == Ability.PREDICT
    assert KernelRidge(reveal_inputs=True).abilities == Ability.PREDICT | Ability.PORTABLE
    assert "reveal_inputs" in KernelRidge().advice(Ability.PORTABLE)
    assert "torch" in KernelRidge().advice(Ability.GRADIENTS)
    assert KernelRidge().describe() == "kernel ridge (rbf)"


@pytest.mark.parametrize(("kernel", "options"), [("wavelet", {}), ("rbf", {"sigma": 1.0}), ("rbf", {"gamma": "wide"})])
def test_an_unknown_kernel_is_an_error_before_the_first_round(kernel, options):
    x, y = toy()
    model = KernelRidge(kernel, **options)
    for act in (lambda: model.check(x, y, "Ann"), lambda: model.fit(x, y)):
        with pytest.raises(LearnerError, match=r"The kernel and its options must be known.*Choose rbf"):
            act()
    KernelRidge().check(x, y, "Ann")


def test_other_errors():
    with pytest.raises(LearnerError, match=r"must be a number of at least 0.*-0\.1.*Choose 0 for minimum norm"):
        KernelRidge("rbf", -0.1)
    with pytest.raises(LearnerError, match="must be fitted before it predicts"):
        KernelRidge().predict(toy()[0])
