"""FedDKD, Proposition 2 and Corollary 1: when the mean of weights is the mean in function space."""

from __future__ import annotations

import numpy as np
import torch

import codistill as cd
from codistill.protocols.feddkd import accepted_gradients, stepped
from codistill.protocols.parts import combined_weights

M, N = 3, 4  # outputs and inputs of Φ(x; (A, b)) = A x + b


def squared(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """div(u, v) = ‖u - v‖², the mean over samples."""
    return (student - teacher).square().sum(dim=1).mean()


def minimiser(models: list[np.ndarray], samples: list[np.ndarray], q: list[float]) -> np.ndarray:
    """argmin_W Σ_k q_k / n_k Σ_x ‖W_k x̃ - W x̃‖², W = (A, b), x̃ = (x, 1): W Σ q_k S_k = Σ q_k W_k S_k, S_k = E x̃ x̃ᵀ."""
    moments = []
    for x in samples:
        extended = np.column_stack([x, np.ones(len(x))])
        moments.append(extended.T @ extended / len(x))
    left = sum(share * moment for share, moment in zip(q, moments, strict=True))
    right = sum(share * model @ moment for share, model, moment in zip(q, models, moments, strict=True))
    return np.linalg.solve(left, right.T).T


def distilled(models: list[np.ndarray], samples: list[np.ndarray], q: list[int], steps: int, rate: float) -> np.ndarray:
    """The DKD steps of the library, on all samples of each agent, from the models' weighted mean plus an error."""
    learners = []
    for model in models:
        module = torch.nn.Linear(N, M).double()
        with torch.no_grad():
            module.weight.copy_(torch.from_numpy(model[:, :N]))
            module.bias.copy_(torch.from_numpy(model[:, N]))
        learners.append(cd.TorchLearner(module, loss="squared"))
    hub = cd.Hub()
    shares = {str(k): share for k, share in enumerate(q)}
    start = sum(share / sum(q) * model for share, model in zip(q, models, strict=True)) + 0.3
    w = {"weight": start[:, :N].copy(), "bias": start[:, N].copy()}
    for _ in range(steps):
        sent = {
            str(k): cd.Message(learner.gradient_at(w, torch.from_numpy(x), squared))
            for k, (learner, x) in enumerate(zip(learners, samples, strict=True))
        }
        gradients = accepted_gradients(hub, sent, w, shares)
        assert len(gradients) == len(models)
        w = stepped(w, combined_weights(gradients, "mean", 0.2, 1e9), rate)
    return np.column_stack([w["weight"], w["bias"]])


def models_and(samples: list[np.ndarray]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    rng = np.random.default_rng(2)
    return [rng.standard_normal((M, N + 1)) for _ in samples], samples


def test_on_homogeneous_data_the_minimiser_is_the_weighted_mean_of_the_parameters() -> None:
    x = np.random.default_rng(0).standard_normal((50, N))
    models, samples = models_and([x, x, x])
    mean = sum(share / 6 * model for share, model in zip((1, 2, 3), models, strict=True))
    np.testing.assert_allclose(minimiser(models, samples, [1 / 6, 2 / 6, 3 / 6]), mean, atol=1e-10)
    np.testing.assert_allclose(distilled(models, samples, [1, 2, 3], steps=400, rate=0.2), mean, atol=1e-6)


def test_on_heterogeneous_data_it_is_not_and_distillation_finds_it() -> None:
    rng = np.random.default_rng(1)
    spread = [rng.standard_normal((50, N)) * scale + shift for scale, shift in ((1, 0), (0.3, 1), (2, -1))]
    models, samples = models_and(spread)
    mean, best = sum(models) / 3, minimiser(models, samples, [1 / 3] * 3)
    assert np.abs(best - mean).max() > 0.5
    np.testing.assert_allclose(distilled(models, samples, [1, 1, 1], steps=1500, rate=0.1), best, atol=1e-6)

    def objective(w: np.ndarray) -> float:
        return float(
            sum(
                np.square((w - model) @ np.column_stack([x, np.ones(50)]).T).sum()
                for model, x in zip(models, samples, strict=True)
            )
        )

    assert objective(best) < 0.9 * objective(mean)
