"""FedAvg against its formula, on models small enough to follow by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import codistill as cd
from codistill.core.errors import LearnerError


def _linear(weight: float) -> cd.TorchLearner:
    module = nn.Linear(1, 1, bias=False)
    nn.init.constant_(module.weight, weight)
    return cd.TorchLearner(module, loss="squared", optimiser="sgd", lr=0.1)


def test_one_round_is_the_weighted_mean_of_one_step_each() -> None:
    """Squared loss of w x against y; one step of rate 0.1 over all samples, then w = Σ n_k w_k / n.

    Agent a: x = (1, 2), y = (1, 1), w = 1:  gradient = mean 2 (w x - y) x = mean (0, 4) = 2
    Agent b: x = (3), y = (0), w = -1:       gradient = 2 (w x - y) x = -18
    """
    agents = [
        cd.Agent("a", _linear(1.0), [[1.0], [2.0]], [[1.0], [1.0]]),
        cd.Agent("b", _linear(-1.0), [[3.0]], [[0.0]]),
    ]
    protocol = cd.FedAvg(synchronise=False)
    result = cd.Federation(agents, protocol).run(1, runtime="simulation", alone=False, progress=False)
    a, b = 1.0 - 0.1 * 2, -1.0 - 0.1 * -18
    expected = 2 / 3 * a + 1 / 3 * b
    for name in ("a", "b"):
        assert result.agents[name].learner.module.weight.item() == pytest.approx(expected, abs=1e-6)


def test_agents_start_from_equal_weights_without_a_message() -> None:
    torch.manual_seed(0)
    agents = [cd.Agent(name, nn.Linear(2, 2), np.eye(2), [0, 1]) for name in "abc"]
    before = [agent.learner.module.weight.clone() for agent in agents]
    federation = cd.Federation(agents, cd.FedAvg(local_epochs=0))
    result = federation.run(1, runtime="simulation", alone=False, progress=False)
    after = [agent.learner.module.weight for agent in result.agents.values()]
    assert not torch.equal(before[0], before[1])
    # Averaging equal weights returns them up to rounding of the shares.
    torch.testing.assert_close(after[0], after[1])
    assert all(row["sent"] > 0 for row in result.rows)


def test_batch_norm_counters_are_rounded_back_to_integers() -> None:
    def net() -> nn.Module:
        return nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))

    agents = [
        cd.Agent("a", net(), np.arange(32)[:, None], np.arange(32) % 2),
        cd.Agent("b", net(), np.arange(8)[:, None], np.arange(8) % 2),
    ]
    result = cd.Federation(agents, cd.FedAvg(batch_size=8)).run(1, runtime="simulation", alone=False, progress=False)
    # Four batches and one: 32/40 * 4 + 8/40 * 1 = 3.4, rounded 3
    assert [agent.learner.module[1].num_batches_tracked.item() for agent in result.agents.values()] == [3, 3]


def test_bytes_are_those_of_the_weights_and_a_small_frame() -> None:
    agents = [cd.Agent(name, nn.Linear(50, 10), np.ones((4, 50)), [0, 1, 2, 3]) for name in "ab"]
    result = cd.Federation(agents, cd.FedAvg(), classes=10).run(1, runtime="simulation", alone=False, progress=False)
    floats = 4 * (50 * 10 + 10)
    for row in result.rows:
        assert floats < row["sent"] <= floats + 250
        assert floats < row["received"] <= floats + 250


def test_two_architectures_are_refused_by_name() -> None:
    agents = [
        cd.Agent("a", nn.Linear(2, 2), np.eye(2), [0, 1]),
        cd.Agent("b", nn.Linear(2, 2, bias=False), np.eye(2), [0, 1]),
    ]
    with pytest.raises(LearnerError, match="same architecture.*'b'"):
        cd.Federation(agents, cd.FedAvg())
