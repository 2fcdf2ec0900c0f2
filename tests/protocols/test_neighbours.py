"""Protocols of the literature that stand in examples/: their figures, derived from the papers' formulas."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from examples.ds_fl import DSFL, reduced_entropy
from examples.fedgkt import FedGKT
from examples.fedtgp import FedTGP, contrast, margin_of
from examples.kt_pfl import KTpFL

import codistill as cd

QUIET: dict[str, Any] = {"runtime": "simulation", "progress": False, "alone": False}


def federation(protocol: cd.Protocol, digits: Any, watch: Any = None) -> cd.Federation:
    """Two networks with equal initial weights, so that their features mean the same."""
    x, y = digits
    members = []
    for number in range(2):
        torch.manual_seed(0)
        layers = torch.nn.Linear(64, 12), torch.nn.ReLU(), torch.nn.Linear(12, 10)
        rows = slice(50 * number, 50 * number + 50)
        module = torch.nn.Sequential(torch.nn.Flatten(), *layers)
        members.append(cd.Agent(f"agent-{number}", cd.TorchLearner(module, lr=0.01), x[rows], y[rows]))
    public = x[1000:1030] if protocol.needs_public else None
    return cd.Federation(members, protocol, public=public, test=(x[1200:1260], y[1200:1260]), watchers=watch or [])


def messages_of(protocol: cd.Protocol, digits: Any, rounds: int = 1) -> tuple[Any, dict[str, Any]]:
    """The result of a run, and its last message from each sender to each receiver."""
    seen: dict[str, Any] = {}

    def watch(sender: str, receiver: str, data: bytes) -> None:
        seen[f"{sender} > {receiver}"] = cd.Message.decode(data)

    return federation(protocol, digits, [watch]).run(rounds, **QUIET), seen


def test_ds_fl_sends_back_the_softmax_of_the_mean_over_a_temperature(digits: Any) -> None:
    """softmax((0.6, 0.4) / 0.1) = (1, e^-2) / (1 + e^-2) by hand; and of what two agents have sent."""
    expected = np.array([[1.0, np.exp(-2.0)]]) / (1 + np.exp(-2.0))
    np.testing.assert_allclose(reduced_entropy(np.array([[0.6, 0.4]]), 0.1), expected, rtol=1e-12)
    _, seen = messages_of(DSFL(temperature=0.5, queries=20), digits)
    mean = (seen["agent-0 > hub"]["t"].astype(np.float64) + seen["agent-1 > hub"]["t"]) / 2
    era = np.exp(mean / 0.5) / np.exp(mean / 0.5).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(seen["hub > agent-0"]["t"], era, atol=1e-6)
    _, seen = messages_of(DSFL(aggregate="mean", queries=20), digits)
    mean = (seen["agent-0 > hub"]["t"].astype(np.float64) + seen["agent-1 > hub"]["t"]) / 2
    np.testing.assert_allclose(seen["hub > agent-0"]["t"], mean, atol=1e-6)


def test_ds_fl_measures_less_entropy_at_a_lower_temperature(digits: Any) -> None:
    entropies = [
        messages_of(DSFL(temperature=temperature, queries=20), digits)[0].rows[0]["entropy"]
        for temperature in (0.05, 0.5)
    ]
    assert entropies[0] < entropies[1] < np.log(10)


def test_fedtgp_margin_and_contrast_are_those_of_the_paper() -> None:
    """Against the formulas written with loops, for three prototypes of two agents."""
    p = torch.tensor([[0.0, 0.0], [3.0, 4.0], [0.0, 2.0]])
    c = torch.tensor([0, 1, 0])
    # Q^0 = (0, 1), Q^1 = (3, 4): a distance of √18
    assert float(margin_of(p, c, 100.0)) == pytest.approx(np.sqrt(18))
    assert float(margin_of(p, c, 2.5)) == 2.5
    assert float(margin_of(p[:1], c[:1], 7.0)) == 7.0
    made, delta = torch.tensor([[1.0, 0.0], [0.0, 4.0], [5.0, 5.0]]), 1.5
    expected = 0.0
    for own, mine in zip(p, c, strict=True):
        phi = [float(np.linalg.norm(own - each)) for each in made]
        top = np.exp(-(phi[mine] + delta))
        others = sum(np.exp(-phi[other]) for other in range(3) if other != mine)
        expected -= np.log(top / (top + others)) / len(p)
    assert float(contrast(p, c, made, torch.tensor(delta))) == pytest.approx(expected, rel=1e-6)


def test_fedtgp_hub_brings_each_prototype_nearest_to_its_own_class(digits: Any) -> None:
    """Of classes that some agent has; and the same prototypes for all."""
    result, seen = messages_of(FedTGP(hub_steps=400, hub_lr=0.3), digits, rounds=2)
    told, known = seen["hub > agent-0"]["p"], seen["hub > agent-0"]["known"]
    np.testing.assert_array_equal(told, seen["hub > agent-1"]["p"])
    assert not told[~known].any()
    for sender in ("agent-0", "agent-1"):
        own = seen[f"{sender} > hub"]
        held = np.flatnonzero(own["seen"])
        distances = np.linalg.norm(own["p"][held][:, None] - told[known][None], axis=2)
        nearest = np.flatnonzero(known)[distances.argmin(axis=1)]
        assert (nearest == held).mean() >= 0.9
    assert all(row["margin"] > 0 for row in result.rows)


def test_kt_pfl_weights_take_the_step_of_the_paper(digits: Any) -> None:
    """From 1/N: c_m - η mean_i Σ_k p_m,ik (log(Σ_j c_j p_j,ik / p_n,ik) + 1), made to sum to 1; ρ adds nothing yet."""
    result, seen = messages_of(KTpFL(lr_c=0.3), digits)
    p = [seen[f"agent-{n} > agent-{1 - n}"]["p"].astype(np.float64) for n in range(2)]
    for own in range(2):
        mixed = (p[0] + p[1]) / 2
        inner = np.log(mixed / np.maximum(p[own], 1e-6)) + 1
        gradient = np.array([(each * inner).sum(axis=1).mean() for each in p])
        c = np.maximum(0.5 - 0.3 * gradient, 0)
        row = next(row for row in result.rows if row["agent"] == f"agent-{own}")
        assert row["own_weight"] == pytest.approx(c[own] / c.sum(), abs=1e-4)
        assert abs(row["own_weight"] - 0.5) > 1e-4  # a step was taken


def test_fedgkt_agents_answer_by_the_model_of_the_hub(digits: Any) -> None:
    """softmax of ReLU layers, computed here from the weights in the hub's last message, on the agent's own features."""
    seen: dict[str, Any] = {}
    watch = [lambda sender, receiver, data: seen.update({f"{sender} > {receiver}": cd.Message.decode(data)})]
    made = federation(FedGKT(local_epochs=2, hub_epochs=2), digits, watch)
    result = made.run(2, **QUIET)
    x, agent = digits[0][1200:1220], made.agents[0]
    told = seen["hub > agent-0"]
    h = np.maximum(agent.learner.evaluated_features(x) @ told["0.weight"].T + told["0.bias"], 0)
    f = h @ told["2.weight"].T + told["2.bias"]
    expected = np.exp(f - f.max(axis=1, keepdims=True))
    expected /= expected.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(result.agents["agent-0"].decision_function(x), expected, atol=1e-5)
