"""What is compared where agents are built anew: each difference is found, and has a name that a person knows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.tree import DecisionTreeClassifier
from torch import nn

import codistill as cd
from codistill.runtimes.ray_cluster import facts_of_agents

X = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32)
Y = np.where(X[:, 0] > 0, "ill", "well")


def facts(
    *, lr: float = 0.1, first: int = 0, depth: int = 2, x: np.ndarray = X, wide: int = 4, public: np.ndarray = X[:5],
    protocol: Callable[..., Any] = cd.FedMD, assigned: str | None = None, **options: Any,
) -> dict[str, str]:  # fmt: skip
    torch.manual_seed(first)
    module = nn.Sequential(nn.Linear(4, wide), nn.ReLU(), nn.Linear(wide, 2))
    agents = [
        cd.Agent("net", cd.TorchLearner(module, lr=lr), x[:20], Y[:20]),
        cd.Agent("tree", DecisionTreeClassifier(max_depth=depth), X[20:40], Y[20:40]),
    ]
    federation = cd.Federation(agents, protocol(), public=public, test=(X[40:], Y[40:]), **options)
    agents[0].learner.assigned = assigned  # type: ignore[attr-defined]
    return facts_of_agents(federation.agents)


def test_the_same_script_gives_the_same_facts() -> None:
    assert facts() == facts()
    assert len(facts()) == 4  # the data and the model of each


def test_machines_may_compute_on_different_devices() -> None:
    assert facts(assigned="cuda:0") == facts(assigned="cuda:1") == facts()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"lr": 0.2}, {"the model of 'net'"}),
        ({"first": 1}, {"the model of 'net'"}),  # other initial weights
        ({"wide": 5}, {"the model of 'net'"}),
        ({"depth": 3}, {"the model of 'tree'"}),
        ({"x": X + 1}, {"the data of 'net'"}),
        ({"safeguard": True}, {"the data of 'net'", "the data of 'tree'"}),  # some are held out
    ],
    ids=lambda value: " and ".join(sorted(value)),
)
def test_each_difference_has_a_name(change: dict[str, Any], named: set[str]) -> None:
    ours, theirs = facts(), facts(**change)
    assert {what for what in ours | theirs if ours.get(what) != theirs.get(what)} == named
