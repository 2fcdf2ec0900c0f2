"""Data as they are in life give the same figures in every runtime: augmentation, one class, empty cells."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from torch import nn
from torch.utils.data import DataLoader, Dataset

import codistill as cd

RNG = np.random.default_rng(0)
X = RNG.normal(size=(120, 4)).astype(np.float32)
Y = np.where(X[:, 0] + X[:, 1] > 0, "ill", "well")
HOLES = np.where(RNG.random(X.shape) < 0.2, np.nan, X)


class Noisy(Dataset):
    """Items that differ whenever they are read."""

    def __init__(self, first: int) -> None:
        self.first = first

    def __len__(self) -> int:
        return 20

    def __getitem__(self, i: int) -> tuple[torch.Tensor, str]:
        return torch.from_numpy(X[self.first + i]) + 0.1 * torch.randn(4), str(Y[self.first + i])


def module() -> cd.TorchLearner:
    torch.manual_seed(0)
    return cd.TorchLearner(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2)), lr=0.05)


def augmented() -> cd.Federation:
    data = {"a": Noisy(0), "b": DataLoader(Noisy(20), batch_size=7, shuffle=True)}
    agents = [cd.Agent(name, module(), each) for name, each in data.items()]
    return cd.Federation(agents, cd.FedAvg(batch_size=19), test=(X[60:], Y[60:]))  # a batch of 19, and one of 1


def with_holes() -> cd.Federation:
    """A site with one class, one whose third column is empty, and a model that takes no missing values."""
    ill, empty = np.flatnonzero(Y[:40] == "ill"), HOLES.copy()
    empty[:, 2] = np.nan
    agents = [
        cd.Agent("one", LogisticRegression(), HOLES[ill], Y[ill]),
        cd.Agent("empty", HistGradientBoostingClassifier(max_iter=3, min_samples_leaf=3), empty[40:70], Y[40:70]),
        cd.Agent("forest", RandomForestClassifier(n_estimators=3), HOLES[70:90], Y[70:90]),
    ]
    return cd.Federation(agents, cd.AvgKD(), test=(HOLES[90:], Y[90:]), scores=["accuracy", "log_loss"])


@cache
def outcome(case: str, runtime: str) -> list[object]:
    made = {"augmented": augmented, "with_holes": with_holes}[case]()
    result = made.run(2, runtime=runtime, progress=False)
    x = HOLES[:9] if case == "with_holes" else X[:9]
    answers = [agent.decision_function(x) for agent in result.agents.values()]
    return [result.rows, result.alone_rows, result.events, np.stack(answers).tolist()]


@pytest.mark.parametrize("runtime", ["processes", "network"])
@pytest.mark.parametrize("case", ["augmented", "with_holes"])
def test_the_same_figures_answers_and_remarks(case: str, runtime: str) -> None:
    assert outcome(case, runtime) == outcome(case, "simulation")


def test_a_site_with_one_class_learns_the_other() -> None:
    rows, alone, events, _ = outcome("with_holes", "simulation")
    assert "'one': its labels hold too few classes" in events[0]
    assert rows[-3]["log_loss"] < alone[-3]["log_loss"]
