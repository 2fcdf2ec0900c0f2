"""FedProto against its formulas, on models f(x) = V h(x) with features h(x) = W x."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import codistill as cd
from codistill.core.errors import LearnerError, RecipeError
from codistill.protocols.alone import baseline_of

LR, CLASSES, WIDTH = 0.1, 3, 2
ANY: dict[str, Any] = {"smallest_group": 1}  # also means of single samples, by which the formulas are followed here
RNG = np.random.default_rng(0)
W = [RNG.normal(size=(WIDTH, 2)) for _ in range(3)]
V = [RNG.normal(size=(CLASSES, WIDTH)) for _ in range(3)]
SAMPLES = [RNG.normal(size=(3, 2)) for _ in range(3)]
# Class 0 is held by all, class 1 by c0 and c2, class 2 by c1 alone.
LABELS = [[0, 1, 1], [0, 2, 0], [1, 0, 0]]
PUBLIC = RNG.normal(size=(4, 2))


def _model(w: np.ndarray, v: np.ndarray) -> cd.TorchLearner:
    module = nn.Sequential(nn.Linear(2, len(w), bias=False), nn.Linear(len(w), CLASSES, bias=False))
    for layer, weight in zip(module, (w, v), strict=True):
        layer.weight.data = torch.tensor(weight, dtype=torch.float32)
    return cd.TorchLearner(module, optimiser="sgd", lr=LR)


def _agents(count: int = 3) -> list[cd.Agent]:
    return [cd.Agent(f"c{n}", _model(W[n], V[n]), SAMPLES[n], LABELS[n]) for n in range(count)]


def _run(rounds: int, protocol: cd.Protocol, agents: list[cd.Agent] | None = None, **options: Any) -> list[cd.Agent]:
    agents = agents or _agents()
    federation = cd.Federation(agents, protocol, public=PUBLIC, classes=CLASSES, **options)
    federation.run(rounds, runtime="simulation", alone=False, progress=False)
    return agents


def _weights(agent: cd.Agent) -> list[np.ndarray]:
    return list(agent.learner.weights().values())


def _step(
    w: np.ndarray, v: np.ndarray, x: np.ndarray, labels: list[int], pull: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """One step of SGD down the mean cross-entropy plus a term whose slope with respect to h is `pull`."""
    h = x @ w.T
    powers = np.exp(h @ v.T)
    g = (powers / powers.sum(axis=1, keepdims=True) - np.eye(CLASSES)[labels]) / len(x)
    return w - LR * (g @ v + (0 if pull is None else pull)).T @ x, v - LR * g.T @ h


FIRST = [_step(W[n], V[n], SAMPLES[n], LABELS[n]) for n in range(3)]  # after the first round
# C_n,c: mean features by the model after training; C̄_c: their mean over all who hold c
OWN = {
    (n, c): (SAMPLES[n] @ FIRST[n][0].T)[np.array(LABELS[n]) == c].mean(axis=0)
    for n in range(3)
    for c in set(LABELS[n])
}
GLOBAL = np.stack([(OWN[0, 0] + OWN[1, 0] + OWN[2, 0]) / 3, (OWN[0, 1] + OWN[2, 1]) / 2, OWN[1, 2]])


def test_in_the_first_round_all_learn_alone_and_then_get_the_mean_prototypes() -> None:
    for agent, expected in zip(_run(1, cd.FedProto(**ANY)), FIRST, strict=True):
        np.testing.assert_allclose(_weights(agent)[0], expected[0], atol=1e-6)
        np.testing.assert_allclose(_weights(agent)[1], expected[1], atol=1e-6)
        np.testing.assert_allclose(agent.state["told"], GLOBAL, atol=1e-6)
        assert agent.state["known"].all()


def test_in_the_second_round_features_are_pulled_to_the_prototype_of_their_class() -> None:
    """The slope of λ mean |h - C̄_c|² with respect to h is 2 λ (h - C̄_c) / (samples · features)."""
    for n, agent in enumerate(_run(2, cd.FedProto(weight=0.7, **ANY))):
        w, v = FIRST[n]
        pull = 0.7 * 2 * (SAMPLES[n] @ w.T - GLOBAL[LABELS[n]]) / (3 * WIDTH)
        expected = _step(w, v, SAMPLES[n], LABELS[n], pull)
        np.testing.assert_allclose(_weights(agent)[0], expected[0], atol=1e-6)
        np.testing.assert_allclose(_weights(agent)[1], expected[1], atol=1e-6)


def test_a_class_whose_only_holder_was_not_heard_has_no_prototype() -> None:
    """c1 is the only one with class 2: without it, its sample of class 2 is not pulled, least of all to zero."""
    agents = _agents()
    federation = cd.Federation(agents, cd.FedProto(**ANY), classes=CLASSES, faults=[cd.Fault(kind="drop", rate=1.0)])
    federation.faults.strikes = lambda t, sender, *_: "drop" if sender == "c1" else None  # type: ignore[method-assign]
    federation.run(2, runtime="simulation", alone=False, progress=False)
    w, v = FIRST[1]
    pull = np.zeros((3, WIDTH))
    for i in (0, 2):  # its samples of class 0
        pull[i] = 2 * (SAMPLES[1][i] @ w.T - (OWN[0, 0] + OWN[2, 0]) / 2) / (2 * WIDTH)
    np.testing.assert_allclose(_weights(agents[1])[0], _step(w, v, SAMPLES[1], LABELS[1], pull)[0], atol=1e-6)
    assert agents[1].state["known"].tolist() == [True, True, False]


def test_the_median_is_taken_of_the_features_as_they_are() -> None:
    agents = _run(1, cd.FedProto(aggregate="median", **ANY))
    expected = np.median([OWN[n, 0] for n in range(3)], axis=0)
    np.testing.assert_allclose(agents[0].state["told"][0], expected, atol=1e-6)


def test_prototypes_are_taken_in_evaluation_mode() -> None:
    """Dropout of everything: in training mode all features are zero, in evaluation mode none."""
    agents = [
        cd.Agent(f"c{n}", nn.Sequential(nn.Linear(2, 4), nn.Dropout(1.0), nn.Linear(4, 3)), SAMPLES[n], LABELS[n])
        for n in range(2)
    ]
    assert _run(1, cd.FedProto(**ANY), agents)[0].state["told"].all()


@pytest.mark.parametrize("aggregate", ["mean", "median"])
def test_one_public_step_goes_towards_the_others_features(aggregate: str) -> None:
    """W ← W - lr λ 2 (h_n - h_-n)ᵀ u / (samples · features); the head V has no part in it, and stays."""
    protocol = cd.FedProto(form="public", local_epochs=0, transfer_steps=1, weight=0.7, aggregate=aggregate)
    features = [PUBLIC @ w.T for w in W]
    for n, agent in enumerate(_run(1, protocol)):
        others = np.mean([h for m, h in enumerate(features) if m != n], axis=0)  # of two also the median
        pull = 0.7 * 2 * (features[n] - others) / (len(PUBLIC) * WIDTH)
        np.testing.assert_allclose(_weights(agent)[0], W[n] - LR * pull.T @ PUBLIC, atol=1e-6)
        np.testing.assert_array_equal(_weights(agent)[1], V[n].astype(np.float32))


def test_who_is_the_only_one_heard_takes_no_public_step_and_the_others_learn_from_it() -> None:
    agents = _agents(2)
    protocol = cd.FedProto(form="public", local_epochs=0, transfer_steps=2, batch_size=4)
    faults = [cd.Fault(kind="drop", rate=1.0)]
    federation = cd.Federation(agents, protocol, public=PUBLIC, classes=CLASSES, faults=faults)
    federation.faults.strikes = lambda t, sender, *_: "drop" if sender == "c0" else None  # type: ignore[method-assign]
    federation.run(1, runtime="simulation", alone=False, progress=False)
    np.testing.assert_array_equal(_weights(agents[1])[0], W[1].astype(np.float32))
    w = W[0]
    for _ in range(2):
        w = w - LR * 2 * (PUBLIC @ (w - W[1]).T).T @ PUBLIC / (len(PUBLIC) * WIDTH)
    np.testing.assert_allclose(_weights(agents[0])[0], w, atol=1e-6)


@pytest.mark.parametrize("form", ["classes", "public"])
def test_where_everything_is_lost_all_learn_as_if_alone(form: str) -> None:
    agents = _run(2, cd.FedProto(form=form), faults=[cd.Fault(kind="drop", rate=1.0)])
    for agent, alone in zip(agents, _run(2, cd.Alone()), strict=True):
        np.testing.assert_array_equal(_weights(agent)[0], _weights(alone)[0])


@pytest.mark.parametrize("form", ["classes", "public"])
def test_a_lone_agent_is_alone_to_the_bit(form: str) -> None:
    """With batch norm and dropout: a pass over public data, or over the shard, must not leave a trace."""

    def state(protocol: cd.Protocol) -> np.ndarray:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, CLASSES))
        (agent,) = _run(3, protocol, [cd.Agent("c0", module, SAMPLES[0], LABELS[0])])
        return np.concatenate([weights.ravel() for weights in _weights(agent)])

    protocol = cd.FedProto(form=form, local_steps=2, batch_size=2)
    np.testing.assert_array_equal(state(protocol), state(baseline_of(protocol)))


def test_bytes_are_prototypes_or_features_and_a_small_frame() -> None:
    def rows(protocol: cd.Protocol) -> Any:
        agents = [
            cd.Agent(f"c{n}", nn.Sequential(nn.Linear(4, 20), nn.Linear(20, 10)), np.ones((3, 4)), [0, 1, 2])
            for n in range(3)
        ]
        federation = cd.Federation(agents, protocol, public=np.ones((64, 4)), classes=10)
        return federation.run(1, runtime="simulation", alone=False, progress=False).rows

    for row in rows(cd.FedProto()):
        for key in ("sent", "received"):
            assert 10 * 20 * 4 + 10 < row[key] <= 10 * 20 * 4 + 10 + 160
    for row in rows(cd.FedProto(form="public", transfer_steps=5)):
        for key in ("sent", "received"):
            assert 5 * 32 * 20 * 4 < row[key] <= 5 * (32 * 20 * 4 + 160)


def test_features_of_other_dimensions_are_named_before_the_first_round() -> None:
    agents = [*_agents(2), cd.Agent("wide", _model(np.ones((5, 2)), np.ones((3, 5))), SAMPLES[2], LABELS[2])]
    with pytest.raises(LearnerError) as caught:
        cd.Federation(agents, cd.FedProto(), classes=CLASSES)
    sentence = str(caught.value)
    assert "agent 'wide' has Sequential with 5 features, agent 'c0' has Sequential with 2" in sentence
    assert "fd, fedmd" in sentence


def test_samples_themselves_are_not_sent_as_features() -> None:
    agents = [cd.Agent(f"c{n}", nn.Linear(2, CLASSES), SAMPLES[n], LABELS[n]) for n in range(2)]
    with pytest.raises(LearnerError, match=r"Data stays home.*agent 'c0' has Linear, whose features are its input"):
        cd.Federation(agents, cd.FedProto(), classes=CLASSES)
    assert cd.Federation(agents, cd.FedProto(form="public"), public=PUBLIC, classes=CLASSES)


def test_only_the_public_form_needs_public_data() -> None:
    assert cd.Federation(_agents(), cd.FedProto(), classes=CLASSES)
    with pytest.raises(RecipeError, match="fedproto needs unlabelled public data"):
        cd.Federation(_agents(), cd.FedProto(form="public"), classes=CLASSES)


def test_real_values_have_no_prototypes() -> None:
    model = cd.TorchLearner(_model(W[0], V[0]).module, loss="squared")
    agents = [cd.Agent("c0", model, SAMPLES[0], -np.ones((3, 3)))]
    with pytest.raises(LearnerError, match="fedproto learns classes"):
        cd.Federation(agents, cd.FedProto(), classes=CLASSES)
    assert cd.Federation(agents, cd.FedProto(form="public"), public=PUBLIC, classes=CLASSES)
