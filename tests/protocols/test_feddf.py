"""FedDF: weights averaged inside groups of equal architecture, outputs across them; numbers derived here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers import softmax
from torch import nn

import codistill as cd

LR = 0.5
U = np.array([1.0, -2.0])
# Two linear models without a bias with 1 and 3 samples, one with a bias: two groups.
WEIGHTS = [np.array([[1.0, 0.0], [0.0, 1.0]]), np.array([[0.5, 0.5], [-1.0, 0.0]]), np.array([[0.0, 2.0], [1.0, 1.0]])]
SAMPLES = [1, 3, 2]
MEAN = 0.25 * WEIGHTS[0] + 0.75 * WEIGHTS[1]


def _federation(protocol: cd.Protocol, **options: Any) -> cd.Federation:
    agents = []
    for n, weight in enumerate(WEIGHTS):
        module = nn.Linear(2, 2, bias=n == 2)
        module.weight.data = torch.tensor(weight, dtype=torch.float32)
        if n == 2:
            nn.init.zeros_(module.bias)
        learner = cd.TorchLearner(module, optimiser="sgd", lr=LR)
        agents.append(cd.Agent(f"c{n}", learner, np.zeros((SAMPLES[n], 2)), np.zeros(SAMPLES[n], dtype=int)))
    return cd.Federation(agents, protocol, public=U[None], classes=2, **options)


def _weights(federation: cd.Federation) -> list[np.ndarray]:
    result = federation.run(1, runtime="simulation", alone=False, progress=False)
    return [agent.learner.weights()["weight"] for agent in result.agents.values()]


def test_weights_are_averaged_by_samples_among_equal_architectures_only() -> None:
    found = _weights(_federation(cd.FedDF(local_steps=0, transfer_steps=0, synchronise=False)))
    for mine, expected in zip(found, (MEAN, MEAN, WEIGHTS[2]), strict=True):
        np.testing.assert_allclose(mine, expected, atol=1e-6)


def test_transfer_starts_from_the_averaged_weights_and_crosses_groups() -> None:
    """f_0 = f_1 = MEAN u, f_2 = W_2 u; each steps down KL to the mean of the two others."""
    found = _weights(_federation(cd.FedDF(local_steps=0, transfer_steps=1, synchronise=False)))
    start = [MEAN, MEAN, WEIGHTS[2]]
    f = [w @ U for w in start]
    for n, mine in enumerate(found):
        others = np.mean([each for m, each in enumerate(f) if m != n], axis=0)
        expected = start[n] - LR * np.outer(softmax(f[n]) - softmax(others), U)
        np.testing.assert_allclose(mine, expected, atol=1e-6)


@pytest.mark.parametrize("lost", ["c0", "c2"])
def test_whose_weights_were_lost_keeps_its_own_and_goes_on(lost: str) -> None:
    protocol = cd.FedDF(local_steps=0, transfer_steps=1, synchronise=False)
    federation = _federation(protocol, faults=[cd.Fault(kind="drop", rate=1.0)])
    # The first message of the round only, which holds the weights.
    federation.faults.strikes = lambda t, sender, _, number: (  # type: ignore[method-assign]
        "drop" if sender == lost and number == 1 else None
    )
    start = [WEIGHTS[0], WEIGHTS[1], WEIGHTS[2]] if lost == "c0" else [MEAN, MEAN, WEIGHTS[2]]
    f = [w @ U for w in start]
    for n, mine in enumerate(_weights(federation)):
        others = np.mean([each for m, each in enumerate(f) if m != n], axis=0)
        np.testing.assert_allclose(mine, start[n] - LR * np.outer(softmax(f[n]) - softmax(others), U), atol=1e-6)


def test_equal_architectures_start_from_equal_weights() -> None:
    found = _weights(_federation(cd.FedDF(local_steps=0, transfer_steps=0)))
    np.testing.assert_array_equal(found[0], found[1])
    assert not np.allclose(found[0], MEAN)


def test_with_a_discriminator_it_is_feddf_al_with_less_forgetting_and_15_steps() -> None:
    """Section VI-A: FedDF-AL is extended FedAL, with its less-forgetting, at τ = 15; FedDF has τ = 10."""
    plain, adversarial = cd.FedDF(), cd.FedDF(adversarial=1.0)
    assert (plain.local_steps, plain.transfer_steps, plain.less_forgetting) == (10, 10, 0.0)
    assert (adversarial.local_steps, adversarial.transfer_steps, adversarial.less_forgetting) == (15, 15, 1.0)
    assert adversarial.less_forgetting == cd.FedAL().less_forgetting
    # What is given stays, and so does everything in a copy.
    given = cd.FedDF(adversarial=1.0, local_steps=10, less_forgetting=0.0)
    assert (given.local_steps, given.transfer_steps, given.less_forgetting) == (10, 15, 0.0)
    assert replace(given, adversarial=2.0) == cd.FedDF(adversarial=2.0, local_steps=10, less_forgetting=0.0)
    assert cd.FedDF(adversarial=0.0) == plain


def test_less_forgetting_holds_the_model_to_the_averaged_one() -> None:
    """(14): in the second step of a transfer the loss has λ KL(ψ(f_0) ‖ ψ(f)), f_0 of the averaged model.

    One public sample, so that f_-n of step i is known; in the first step the term has no gradient.
    """
    protocol = cd.FedDF(local_steps=0, transfer_steps=2, less_forgetting=0.7, synchronise=False)
    start, w, bias = [MEAN, MEAN, WEIGHTS[2]], [MEAN, MEAN, WEIGHTS[2]], np.zeros(2)  # the third model has a bias
    for _ in range(2):
        f = [w[0] @ U, w[1] @ U, w[2] @ U + bias]
        others = [np.mean([each for m, each in enumerate(f) if m != n], axis=0) for n in range(3)]
        gradients = [
            softmax(f[n]) - softmax(others[n]) + 0.7 * (softmax(f[n]) - softmax(start[n] @ U)) for n in range(3)
        ]
        w = [each - LR * np.outer(gradient, U) for each, gradient in zip(w, gradients, strict=True)]
        bias = bias - LR * gradients[2]
    for mine, expected in zip(_weights(_federation(protocol)), w, strict=True):
        np.testing.assert_allclose(mine, expected, atol=1e-5)


def test_with_a_discriminator_it_is_another_protocol_and_tells_how_often_it_was_right() -> None:
    plain, adversarial = (
        _federation(cd.FedDF(transfer_steps=3, adversarial=weight, discriminator_lr=0.1)) for weight in (0.0, 5.0)
    )
    one, other = _weights(plain), _weights(adversarial)
    assert any((a != b).any() for a, b in zip(one, other, strict=True))
