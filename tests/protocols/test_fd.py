"""FD against its formulas, on linear models small enough to follow by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers import softmax
from torch import nn

import codistill as cd
from codistill.core.errors import LearnerError
from codistill.protocols.alone import baseline_of

LR, CLASSES = 0.1, 3
ANY: dict[str, Any] = {"smallest_group": 1}  # also means of single samples, by which the formulas are followed here
WEIGHTS = [
    np.array([[1.0, 0.0], [0.0, 1.0], [0.5, 0.5]]),
    np.array([[0.5, 0.5], [-1.0, 0.0], [0.0, 0.3]]),
    np.array([[0.0, 2.0], [1.0, 1.0], [-0.5, 0.0]]),
]
# Class 0 is met by all, class 1 by c0 and c2, class 2 by c1 alone.
LABELS = [[0, 1, 1], [0, 2, 0], [1, 0, 0]]
SAMPLES = [np.array([[1.0, 2.0], [-1.0, 0.5], [0.3 * n, -1.0]]) for n in range(3)]


def _linear(weight: np.ndarray) -> cd.TorchLearner:
    module = nn.Linear(*weight.shape[::-1], bias=False)
    module.weight.data = torch.tensor(weight, dtype=torch.float32)
    return cd.TorchLearner(module, optimiser="sgd", lr=LR)


def _run(rounds: int, targets: list[Any] = LABELS, protocol: Any = None, **options: Any) -> list[cd.Agent]:
    """All clients of above, each with one batch per round."""
    agents = [
        cd.Agent(f"c{n}", _linear(w), x, y) for n, (w, x, y) in enumerate(zip(WEIGHTS, SAMPLES, targets, strict=False))
    ]
    federation = cd.Federation(agents, protocol or cd.FD(**ANY), classes=CLASSES, **options)
    federation.run(rounds, runtime="simulation", alone=False, progress=False)
    return agents


def _weight(agent: cd.Agent) -> np.ndarray:
    weight: np.ndarray = agent.learner.weights()["weight"]
    return weight


def _slope(f: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Of the mean cross-entropy, with respect to f."""
    return (softmax(f) - y) / len(f)


def _one_hot(labels: list[int]) -> np.ndarray:
    return np.eye(CLASSES)[labels]


def _class_mean(f: np.ndarray, labels: list[int], c: int) -> np.ndarray:
    return f[np.array(labels) == c].mean(axis=0)


OUTPUTS = [x @ w.T for x, w in zip(SAMPLES, WEIGHTS, strict=True)]
F = {(n, c): _class_mean(OUTPUTS[n], LABELS[n], c) for n in range(3) for c in set(LABELS[n])}
# What each is told after round 1: the mean of the others who have met the class.
TOLD = [
    {0: (F[1, 0] + F[2, 0]) / 2, 1: F[2, 1], 2: F[1, 2]},
    {0: (F[0, 0] + F[2, 0]) / 2, 1: (F[0, 1] + F[2, 1]) / 2},
    {0: (F[0, 0] + F[1, 0]) / 2, 1: F[0, 1], 2: F[1, 2]},
]


def test_each_is_told_the_mean_of_the_others_who_have_met_the_class() -> None:
    for agent, told in zip(_run(1), TOLD, strict=True):
        assert np.flatnonzero(agent.state["known"]).tolist() == sorted(told)
        for c, target in told.items():
            np.testing.assert_allclose(agent.state["told"][c], target, atol=1e-6)


def test_in_the_first_round_there_is_no_target() -> None:
    for n, agent in enumerate(_run(1)):
        expected = WEIGHTS[n] - LR * _slope(OUTPUTS[n], _one_hot(LABELS[n])).T @ SAMPLES[n]
        np.testing.assert_allclose(_weight(agent), expected, atol=1e-6)


@pytest.mark.parametrize(("distance", "temperature"), [("squared", 1.0), ("kl", 1.0), ("kl", 2.0)])
def test_from_the_second_round_on_outputs_are_pulled_to_the_target_of_their_class(
    distance: str, temperature: float
) -> None:
    """W ← W - lr (slope of ℓ + γ slope of d)ᵀ x, where d is a mean over the samples of known classes:

    2 (f - F̂_c) / (samples · columns) for the squared distance, (ψ(f, E) - ψ(F̂_c, E)) / (E samples) for KL.
    """
    protocol = cd.FD(weight=0.7, distance=distance, temperature=temperature, **ANY)
    for n, agent in enumerate(_run(2, protocol=protocol)):
        x, labels, told = SAMPLES[n], LABELS[n], TOLD[n]
        w = WEIGHTS[n] - LR * _slope(OUTPUTS[n], _one_hot(labels)).T @ x
        f = x @ w.T
        slope = _slope(f, _one_hot(labels))
        known = [i for i, c in enumerate(labels) if c in told]
        assert len(known) == [3, 2, 3][n]  # c1 is the only one with class 2, and gets no target for it
        for i in known:
            target = told[labels[i]]
            if distance == "squared":
                pull = 2 * (f[i] - target) / CLASSES
            else:
                pull = (softmax(f[i] / temperature) - softmax(target / temperature)) / temperature
            slope[i] += 0.7 * pull / len(known)
        np.testing.assert_allclose(_weight(agent), w - LR * slope.T @ x, atol=1e-6)


def test_a_soft_label_counts_for_every_class_by_its_share() -> None:
    """F_c = Σ y_c f / Σ y_c; the target of a sample is that of its largest class, for c1's first sample class 2."""
    soft = [np.array([[0.8, 0.2, 0.0], [0.0, 1.0, 0.0], [0.4, 0.6, 0.0]]), np.array([[0.3, 0.2, 0.5], [0.9, 0.0, 0.1]])]
    agents = [cd.Agent(f"c{n}", _linear(WEIGHTS[n]), SAMPLES[n][: len(y)], y) for n, y in enumerate(soft)]
    federation = cd.Federation(agents, cd.FD(weight=0.7, distance="squared", **ANY))
    federation.run(2, runtime="simulation", alone=False, progress=False)
    step = [WEIGHTS[n] - LR * _slope(OUTPUTS[n][: len(y)], y).T @ SAMPLES[n][: len(y)] for n, y in enumerate(soft)]
    told = soft[0].T @ OUTPUTS[0] / np.maximum(soft[0].sum(axis=0), 1e-9)[:, None]  # class 2 was met by c1 alone
    x = SAMPLES[1][:2]
    f = x @ step[1].T
    slope = _slope(f, soft[1])
    slope[1] += 0.7 * 2 * (f[1] - told[0]) / CLASSES
    np.testing.assert_allclose(_weight(agents[1]), step[1] - LR * slope.T @ x, atol=1e-6)
    assert agents[1].state["known"].tolist() == [True, True, False]


def test_the_median_stands_up_to_one_who_lies() -> None:
    """Four clients with one sample each; f are brought to log-probabilities before they are ranked."""
    weights = [np.eye(3, 2), 2 * np.eye(3, 2), -np.eye(3, 2), 1e6 * np.eye(3, 2)]
    agents = [cd.Agent(f"c{n}", _linear(w), [[1.0, -0.5]], [0]) for n, w in enumerate(weights)]
    federation = cd.Federation(agents, cd.FD(aggregate="median", **ANY), classes=CLASSES)
    federation.run(1, runtime="simulation", alone=False, progress=False)
    logs = [f - np.log(np.exp(f - f.max()).sum()) - f.max() for f in (w @ [1.0, -0.5] for w in weights)]
    np.testing.assert_allclose(agents[0].state["told"][0], np.median(logs[1:], axis=0), rtol=1e-5)
    np.testing.assert_allclose(agents[3].state["told"][0], np.median(logs[:3], axis=0), rtol=1e-5)


def test_one_whose_means_were_lost_is_told_the_mean_of_all_who_were_heard() -> None:
    agents = [cd.Agent(f"c{n}", _linear(WEIGHTS[n]), SAMPLES[n], LABELS[n]) for n in range(3)]
    federation = cd.Federation(agents, cd.FD(**ANY), classes=CLASSES, faults=[cd.Fault(kind="drop", rate=1.0)])
    federation.faults.strikes = lambda t, sender, *_: "drop" if sender == "c0" else None  # type: ignore[method-assign]
    federation.run(1, runtime="simulation", alone=False, progress=False)
    np.testing.assert_allclose(agents[0].state["told"][0], (F[1, 0] + F[2, 0]) / 2, atol=1e-6)
    np.testing.assert_allclose(agents[1].state["told"][0], F[2, 0], atol=1e-6)  # without c0, who was not heard
    assert agents[2].state["known"].tolist() == [True, False, True]


@pytest.mark.parametrize("direction", ["hub", "agents"])
def test_where_everything_is_lost_all_learn_as_if_alone(direction: str) -> None:
    agents = [cd.Agent(f"c{n}", _linear(WEIGHTS[n]), SAMPLES[n], LABELS[n]) for n in range(3)]
    federation = cd.Federation(agents, cd.FD(), classes=CLASSES, faults=[cd.Fault(kind="drop", rate=1.0)])
    federation.faults.strikes = (  # type: ignore[method-assign]
        lambda t, sender, *_: "drop" if (sender == "hub") == (direction == "hub") else None
    )
    federation.run(2, runtime="simulation", alone=False, progress=False)
    for agent, alone in zip(agents, _run(2, protocol=cd.Alone()), strict=True):
        np.testing.assert_array_equal(_weight(agent), _weight(alone))


def test_a_lone_agent_is_alone_to_the_bit() -> None:
    def weight(protocol: cd.Protocol) -> np.ndarray:
        return _weight(_run(3, LABELS[:1], protocol)[0])

    protocol = cd.FD(local_steps=2, batch_size=2)
    np.testing.assert_array_equal(weight(protocol), weight(baseline_of(protocol)))
    assert not np.array_equal(weight(protocol), weight(cd.FD()))


def test_bytes_up_and_down_are_a_square_of_classes_and_a_small_frame() -> None:
    agents = [cd.Agent(f"c{n}", nn.Linear(4, 10), np.ones((3, 4)), [0, 1, 2]) for n in range(3)]
    rows = cd.Federation(agents, cd.FD(), classes=10).run(1, runtime="simulation", alone=False, progress=False).rows
    for row in rows:
        assert 400 + 10 < row["sent"] <= 400 + 10 + 150
        assert 400 + 10 < row["received"] <= 400 + 10 + 150


@pytest.mark.parametrize("values", [[[-1.0, 1.0, 1.0]], [[0.5, 0.9, 0.9]]])
def test_real_values_have_no_classes(values: list[list[float]]) -> None:
    model = cd.TorchLearner(nn.Linear(SAMPLES[0].shape[1], CLASSES), loss="squared")
    agents = [cd.Agent("c0", model, SAMPLES[0], np.repeat(values, len(SAMPLES[0]), axis=0))]
    with pytest.raises(LearnerError, match=r"fd learns classes.*agent 'c0' has real values.*avgkd"):
        cd.Federation(agents, cd.FD(), classes=CLASSES)
