"""The contrastive loss against a double loop in float64, and where naive logarithms would not be finite."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from codistill.protocols.crs import contrast, log_complement


def _softmax(z: np.ndarray) -> np.ndarray:
    e = np.exp(z - z.max())
    return e / e.sum()


def _loop(z: np.ndarray, labels: np.ndarray, tau: np.ndarray, known: np.ndarray, *, mean: bool) -> float:
    """(7), pair by pair, with naive logarithms."""
    total = 0.0
    for i, y in enumerate(labels):
        pairs = 0.0
        for c in range(tau.shape[1]):
            if not known[i, c]:
                continue
            h = float(_softmax(z[i]) @ _softmax(tau[i, c]))
            pairs += -math.log(h) if c == y else -math.log(1 - h)
        total += pairs / max(1, known[i].sum()) if mean else pairs
    return total / len(labels)


def _ours(z: torch.Tensor, labels: np.ndarray, tau: torch.Tensor, known: np.ndarray, *, mean: bool) -> torch.Tensor:
    log_p, log_q = torch.log_softmax(z, dim=1), torch.log_softmax(tau, dim=2)
    return contrast(log_p, torch.from_numpy(labels), log_q, torch.from_numpy(known), mean=mean)


@pytest.mark.parametrize("mean", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_loss_and_gradients_equal_a_double_loop(seed: int, mean: bool) -> None:
    rng = np.random.default_rng(seed)
    samples, classes = 6, 5
    z, tau = rng.normal(0, 3, (samples, classes)), rng.normal(0, 3, (samples, classes, classes))
    labels, known = rng.integers(classes, size=samples), rng.random((samples, classes)) < 0.8
    zs, taus = (torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in (z, tau))
    loss = _ours(zs, labels, taus, known, mean=mean)
    assert loss.item() == pytest.approx(_loop(z, labels, tau, known, mean=mean), abs=1e-10)
    loss.backward()
    step = 1e-6
    for tensor, value in ((zs, z), (taus, tau)):
        for place in [tuple(rng.integers(size) for size in value.shape) for _ in range(8)]:
            sides = []
            for sign in (1, -1):
                moved = value.copy()
                moved[place] += sign * step
                both = (moved, tau) if value is z else (z, moved)
                sides.append(_loop(both[0], labels, both[1], known, mean=mean))
            # Central differences are exact to about 1e-9 here; the loss itself is compared to 1e-10 above.
            assert tensor.grad is not None
            assert tensor.grad[place].item() == pytest.approx((sides[0] - sides[1]) / (2 * step), abs=1e-7)


def test_gradients_equal_those_of_the_formula_in_float64() -> None:
    """The same by automatic differentiation of the naive formula, where that is accurate: to 1e-10."""
    rng = np.random.default_rng(7)
    z, tau = (torch.tensor(rng.normal(0, 1, shape), requires_grad=True) for shape in ((4, 3), (4, 3, 3)))
    labels, known = rng.integers(3, size=4), np.ones((4, 3), bool)
    ours = torch.autograd.grad(_ours(z, labels, tau, known, mean=True), (z, tau))
    h = (torch.softmax(z, 1)[:, None] * torch.softmax(tau, 2)).sum(dim=2)
    same = torch.from_numpy(np.eye(3, dtype=bool)[labels])
    naive = torch.autograd.grad(-torch.where(same, h.log(), (1 - h).log()).mean(dim=1).mean(), (z, tau))
    for mine, theirs in zip(ours, naive, strict=True):
        assert torch.allclose(mine, theirs, atol=1e-10, rtol=0)


@pytest.mark.parametrize("gap", [20.0, 100.0, 1000.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_loss_and_gradients_are_finite_at_any_gap_of_logits(gap: float, dtype: Any) -> None:
    """One class far ahead, the same on both sides or another: h rounds to 1 or to 0."""
    for other in (0, 1):
        z, tau = torch.zeros(1, 3, dtype=dtype), torch.zeros(1, 3, 3, dtype=dtype)
        z[0, 0], tau[0, :, other] = gap, gap
        z.requires_grad_(), tau.requires_grad_()
        loss = _ours(z, np.array([0]), tau, np.ones((1, 3), bool), mean=False)
        loss.backward()
        assert torch.isfinite(loss)
        for tensor in (z, tau):
            assert tensor.grad is not None
            assert torch.isfinite(tensor.grad).all()
        # By hand, to the leading term: h is 1 - 4 exp(-gap) or 2 exp(-gap).
        if gap == 100.0 and other == 0:
            assert loss.item() == pytest.approx(2 * (gap - math.log(4)), rel=1e-6)
        if gap == 100.0 and other == 1:
            assert loss.item() == pytest.approx(gap - math.log(2), rel=1e-6)


def test_the_complement_of_probabilities() -> None:
    log_q = torch.log_softmax(torch.tensor([[2.0, 1.0, -3.0], [0.0, 0.0, 0.0]], dtype=torch.float64), dim=1)
    np.testing.assert_allclose(log_complement(log_q).exp(), 1 - log_q.exp(), atol=1e-14)
