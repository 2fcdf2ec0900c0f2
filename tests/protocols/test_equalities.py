"""That two algorithms agree where their papers say so: held by equality to the bit, not by inheritance."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import codistill as cd

RNG = np.random.default_rng(3)
X = RNG.normal(size=(60, 4)).astype(np.float32)
Y = (X[:, 0] > 0).astype(int) + (X[:, 1] > 0.5)


def outcome(protocol: cd.Protocol, rounds: int = 3, **options: Any) -> tuple[list[dict[str, Any]], list[np.ndarray]]:
    """Rows (scores and bytes) and final weights of three agents."""
    torch.manual_seed(0)
    models = [cd.TorchLearner(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)), epochs=2) for _ in range(3)]
    agents = [cd.Agent(f"a{n}", model, X[20 * n :][:20], Y[20 * n :][:20]) for n, model in enumerate(models)]
    federation = cd.Federation(agents, protocol, public=X[:40], test=(X, Y), seed=5, classes=3, **options)
    result = federation.run(rounds, runtime="simulation", alone=False, progress=False)
    return result.rows, [weight for agent in agents for weight in agent.learner.weights().values()]


def assert_equal(left: Any, right: Any) -> None:
    assert left[0] == right[0]
    for mine, other in zip(left[1], right[1], strict=True):
        np.testing.assert_array_equal(mine, other)


COMMON: dict[str, Any] = {"local_steps": 4, "transfer_steps": 3, "batch_size": 8, "temperature": 2.0}


@pytest.mark.parametrize("less_forgetting", [0.0, 1.0], ids=["FedMD", "FedMD-LF"])
@pytest.mark.parametrize("aggregate", ["mean", "trimmed", "coverage"])
def test_fedal_without_its_discriminator_is_fedmd(less_forgetting: float, aggregate: str) -> None:
    options = COMMON | {"less_forgetting": less_forgetting, "aggregate": aggregate}
    assert_equal(outcome(cd.FedAL(adversarial=0.0, **options)), outcome(cd.FedMD(**options)))
    with_it = outcome(cd.FedAL(adversarial=1.0, **options))
    assert with_it[0] != outcome(cd.FedMD(**options))[0]


def test_pkd_differs_from_avgkd_in_the_labels_that_it_averages_alone() -> None:
    """ŷ_t in place of y: the same in the first round, where ŷ_0 = y, and wherever own labels have no weight."""
    half = {"own_weight": 0.5}  # which single and double precision hold alike
    assert_equal(outcome(cd.PKD(**half), rounds=2), outcome(cd.AvgKD(**half), rounds=2))  # ŷ_1 is of ŷ_0 = y
    assert_equal(outcome(cd.PKD(own_weight=0.0)), outcome(cd.AvgKD(own_weight=0.0)))
    differ = [outcome(protocol, rounds=4)[1] for protocol in (cd.PKD(), cd.AvgKD())]
    assert any((mine != other).any() for mine, other in zip(*differ, strict=True))


def test_simultaneous_akd_is_pkd_without_weight_on_own_labels_for_two_agents() -> None:
    """ŷ_{t+1} = g_t of the other agent, in both."""
    gone = [cd.Fault(kind="gone", agent="a2")]
    left = outcome(cd.AKD(simultaneous=True), faults=gone)
    right = outcome(cd.PKD(own_weight=0.0), faults=gone)
    assert_equal(left, right)


@pytest.mark.parametrize("protocol", [cd.DSGD, cd.DDistillation])
def test_peers_that_never_communicate_are_silos(protocol: type[Any]) -> None:
    """τ beyond the last step; D-SGD must keep its own initial weights for it, and the first step communicates in τ."""
    options: dict[str, Any] = {"local_steps": 5, "batch_size": 8, "lr": 0.01}
    start = {"synchronise": False} if protocol is cd.DSGD else {"warm_up": 9}
    silos = outcome(cd.SiloSGD(**options))
    apart = outcome(protocol(every=1000, **start, **options))
    for mine, other in zip(apart[1], silos[1], strict=True):
        np.testing.assert_array_equal(mine, other)


def test_a_lone_agent_is_centralised() -> None:
    """Pooling the data of one agent pools nothing."""
    results = []
    for protocol in (cd.Alone(local_steps=4), cd.Centralised(local_steps=4)):
        torch.manual_seed(0)
        agent = cd.Agent("a", nn.Linear(4, 3), X, Y)
        cd.Federation([agent], protocol, classes=3).run(2, runtime="simulation", progress=False)
        results.append(agent.learner.weights()["weight"])
    np.testing.assert_array_equal(*results)
