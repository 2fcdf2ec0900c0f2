"""FedMD against equations (2)-(6), on models small enough to follow by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers import softmax
from torch import nn

import codistill as cd


def _linear(weight: np.ndarray) -> cd.TorchLearner:
    module = nn.Linear(*weight.shape[::-1], bias=False)
    module.weight.data = torch.tensor(weight, dtype=torch.float32)
    return cd.TorchLearner(module, optimiser="sgd", lr=0.5)


class Fixed:
    """A black box that always gives the same probabilities, and remembers what it was taught."""

    def __init__(self, answer: list[float]) -> None:
        self.answer = answer
        self.taught: list[Any] = []

    def fit(self, x: np.ndarray, targets: np.ndarray) -> None:
        self.taught.append((x.copy(), targets.copy()))

    def predict(self, x: np.ndarray) -> np.ndarray:
        return np.tile(self.answer, (len(x), 1))


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_one_transfer_step_follows_the_mean_of_the_others(temperature: float) -> None:
    """Three linear clients f_n(u) = W_n u, one public sample u, no local training, one SGD step.

    d KL(p̄_-n ‖ p_n) / d f_n = (p_n - p̄_-n) / E, so W_n ← W_n - lr (p_n - p̄_-n) uᵀ / E
    with p_n = ψ(W_n u, E) and p̄_-n = ψ(mean of the others' W_m u, E).
    """
    u = np.array([1.0, -2.0])
    weights = [
        np.array([[1.0, 0.0], [0.0, 1.0]]),
        np.array([[0.5, 0.5], [-1.0, 0.0]]),
        np.array([[0.0, 2.0], [1.0, 1.0]]),
    ]
    agents = [cd.Agent(f"c{n}", _linear(w), [[0.0, 0.0]], [0]) for n, w in enumerate(weights)]
    protocol = cd.FedMD(local_epochs=0, transfer_steps=1, temperature=temperature)
    federation = cd.Federation(agents, protocol, public=u[None], classes=2)
    result = federation.run(1, runtime="simulation", alone=False, progress=False)
    outputs = [w @ u for w in weights]
    for n, agent in enumerate(result.agents.values()):
        others = np.mean([f for m, f in enumerate(outputs) if m != n], axis=0)
        slope = (softmax(outputs[n] / temperature) - softmax(others / temperature)) / temperature
        expected = weights[n] - 0.5 * np.outer(slope, u)
        np.testing.assert_allclose(agent.learner.module.weight.detach().numpy(), expected, atol=1e-6)


def test_a_black_box_learns_its_labels_and_the_others_mean() -> None:
    """Two black boxes: each is fitted on its own labels, then also on the other's floored probabilities."""
    boxes = [Fixed([0.0, 1.0]), Fixed([0.25, 0.75])]
    agents = [cd.Agent(f"c{n}", box, [[float(n)]], [n]) for n, box in enumerate(boxes)]
    federation = cd.Federation(agents, cd.FedMD(floor=0.01), public=[[5.0], [6.0]], classes=2)
    federation.run(1, runtime="simulation", alone=False, progress=False)
    first, second = boxes[0].taught
    np.testing.assert_array_equal(first[1], [[1.0, 0.0]])
    np.testing.assert_array_equal(second[0], [[0.0], [5.0], [6.0]])
    np.testing.assert_allclose(second[1], [[1.0, 0.0], [0.25, 0.75], [0.25, 0.75]], atol=1e-6)
    floored = np.array([0.01, 1.0]) / 1.01
    np.testing.assert_allclose(boxes[1].taught[1][1][1:], np.tile(floored, (2, 1)), atol=1e-6)


def test_a_client_whose_outputs_were_lost_is_not_removed_from_the_mean() -> None:
    """c0's outputs never reach the hub: the mean is that of c1 alone, and c0 must learn exactly that."""
    boxes = [Fixed([0.5, 0.5]), Fixed([0.2, 0.8])]
    agents = [cd.Agent(f"c{n}", box, [[float(n)]], [n]) for n, box in enumerate(boxes)]

    # Hit every message of c0, in the one direction only: strikes() is asked for (sender, receiver).
    federation = cd.Federation(
        agents, cd.FedMD(transfer_steps=1), public=[[5.0]], classes=2, faults=[cd.Fault(kind="drop", rate=1.0)]
    )
    federation.faults.strikes = lambda t, sender, *_: "drop" if sender == "c0" else None  # type: ignore[method-assign]
    federation.run(1, runtime="simulation", alone=False, progress=False)
    np.testing.assert_allclose(boxes[0].taught[1][1][1], [0.2, 0.8], atol=1e-6)
    assert len(boxes[1].taught) == 1  # nobody else was heard: nothing to learn


def test_bytes_up_and_down_are_outputs_and_a_small_frame() -> None:
    agents = [cd.Agent(f"c{n}", nn.Linear(4, 10), np.ones((3, 4)), [0, 1, 2]) for n in range(3)]
    federation = cd.Federation(agents, cd.FedMD(transfer_steps=5), public=np.ones((64, 4)), classes=10)
    rows = federation.run(1, runtime="simulation", alone=False, progress=False).rows
    floats = 5 * 32 * 10 * 4
    for row in rows:
        assert floats < row["sent"] <= floats + 5 * 150
        assert floats < row["received"] <= floats + 5 * 150


def _target(kind: str, f: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """What a client should learn from the outputs f (others, K) of those who hold the shares of classes."""
    log_p = np.log([softmax(each) for each in f])
    match kind:
        case "trimmed":
            return np.asarray(np.sort(log_p, axis=0)[1:-1].mean(axis=0))
        case "median":
            return np.asarray(np.median(log_p, axis=0))
        case "probabilities":
            return np.asarray(np.log(np.exp(log_p).mean(axis=0)))
        case "confidence":
            certainty = 1 + (np.exp(log_p) * log_p).sum(axis=1) / np.log(f.shape[1])
            return np.asarray((certainty[:, None] * log_p).sum(axis=0) / certainty.sum())
    weights = np.maximum(shares, 1e-3)
    return np.asarray((weights * log_p).sum(axis=0) / weights.sum(axis=0))


@pytest.mark.parametrize("lost", [None, 0])
@pytest.mark.parametrize("kind", ["trimmed", "median", "probabilities", "confidence", "coverage"])
def test_each_client_learns_from_the_aggregate_of_the_others(kind: str, lost: int | None) -> None:
    """Five linear clients with 1 to 5 samples of class 0 out of 6, three classes, one public sample, one SGD step.

    Where the outputs of one client are lost on the way, it learns from all the others, and they without it.
    """
    rng = np.random.default_rng(4)
    u, weights = np.array([1.0, -0.5]), rng.normal(size=(5, 3, 2))
    labels = [[0] * (n + 1) + [1] * (5 - n) for n in range(5)]
    agents = [cd.Agent(f"c{n}", _linear(weights[n]), np.zeros((6, 2)), labels[n]) for n in range(5)]
    protocol = cd.FedMD(local_steps=0, transfer_steps=1, aggregate=kind, trim=0.34)
    federation = cd.Federation(agents, protocol, public=u[None], classes=3, faults=[cd.Fault(kind="drop", rate=1.0)])
    federation.faults.strikes = lambda t, sender, *_: (  # type: ignore[method-assign]
        "drop" if sender == f"c{lost}" else None
    )
    result = federation.run(1, runtime="simulation", alone=False, progress=False)
    f = weights @ u
    shares = np.array([np.bincount(y, minlength=3) / 6 for y in labels])
    for n, agent in enumerate(result.agents.values()):
        rest = [m for m in range(5) if m not in (n, lost)]
        slope = softmax(f[n]) - softmax(_target(kind, f[rest], shares[rest]))
        found = agent.learner.module.weight.detach().numpy()
        np.testing.assert_allclose(found, weights[n] - 0.5 * np.outer(slope, u), atol=1e-6)


def test_the_number_of_local_steps_is_kept() -> None:
    """Two batches of one sample each, of two steps down the cross-entropy: W ← W - lr (p - e_y) xᵀ, twice."""
    w = np.array([[1.0], [0.0]])
    agents = [cd.Agent(f"c{n}", _linear(w), [[1.0]] * 7, [0] * 7) for n in range(2)]
    federation = cd.Federation(
        agents, cd.FedMD(local_steps=2, transfer_steps=0, batch_size=1), public=[[0.0]], classes=2
    )
    result = federation.run(1, runtime="simulation", alone=False, progress=False)
    for _ in range(2):
        w = w - 0.5 * (softmax(w[:, 0]) - np.array([1.0, 0.0]))[:, None]
    np.testing.assert_allclose(result.agents["c0"].learner.module.weight.detach().numpy(), w, atol=1e-6)


@pytest.mark.parametrize("kind", ["probabilities", "median"])
def test_other_aggregates_are_of_the_others_too(kind: str) -> None:
    """As above; p̄_-n is the mean of ψ(f_m, E), or ψ of the median of log ψ(f_m, 1), over the other m."""
    u = np.array([1.0, -2.0])
    weights = [
        np.array(w)
        for w in (
            [[1.0, 0.0], [0.0, 1.0]],
            [[0.5, 0.5], [-1.0, 0.0]],
            [[0.0, 2.0], [1.0, 1.0]],
            [[0.0, 1.0], [1.0, 0.0]],
        )
    ]
    agents = [cd.Agent(f"c{n}", _linear(w), [[0.0, 0.0]], [0]) for n, w in enumerate(weights)]
    protocol = cd.FedMD(local_epochs=0, transfer_steps=1, temperature=2.0, aggregate=kind)
    federation = cd.Federation(agents, protocol, public=u[None], classes=2)
    result = federation.run(1, runtime="simulation", alone=False, progress=False)
    outputs = np.stack([w @ u for w in weights])
    for n, agent in enumerate(result.agents.values()):
        others = np.delete(outputs, n, axis=0)
        if kind == "probabilities":
            target = softmax(others / 2).mean(axis=0)
        else:
            target = softmax(np.median(np.log(softmax(others)), axis=0) / 2)
        expected = weights[n] - 0.5 * np.outer((softmax(outputs[n] / 2) - target) / 2, u)
        np.testing.assert_allclose(agent.learner.module.weight.detach().numpy(), expected, atol=1e-6)


def test_a_black_box_keeps_what_it_was_taught_in_earlier_rounds() -> None:
    boxes = [Fixed([0.2, 0.8]), Fixed([0.4, 0.6])]
    agents = [cd.Agent(f"c{n}", box, [[float(n)]], [n]) for n, box in enumerate(boxes)]
    protocol = cd.FedMD(transfer_steps=1, batch_size=2)
    federation = cd.Federation(agents, protocol, public=np.arange(8.0)[:, None], classes=2)
    federation.run(2, runtime="simulation", alone=False, progress=False)
    first, second = (set(next(federation.public.batches(t, 2, 1)).ids.tolist()) for t in (0, 1))
    assert first != second
    assert set(boxes[0].taught[-1][0][1:, 0].tolist()) == first | second
