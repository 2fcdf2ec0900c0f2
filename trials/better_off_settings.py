"""Settings in which every agent has test data of its own: made by (seed), small enough for many seeds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits, load_wine
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier, RandomForestRegressor
from sklearn.linear_model import LogisticRegression, Ridge
from torch import nn

import codistill as cd
from codistill.data.datasets import load
from codistill.data.validation import Dataset
from codistill.experiments.building import build
from codistill.experiments.recipe import read_recipe

RECIPES = Path(__file__).parent.parent / "recipes" / "heart"
BLACK_BOX = ("avgkd", "akd", "pkd", "fedmd", "d_distillation")
_PORTABLE = (*BLACK_BOX, "ekd")


@dataclass(frozen=True)
class Setting:
    """Agents with their own test data, and the protocols that they try."""

    make: Callable[[int, str], tuple[list[cd.Agent], Any]]  # (seed, data folder) -> agents, public samples
    protocols: tuple[str, ...] = BLACK_BOX
    rounds: int = 5
    seeds: int = 6
    options: Mapping[str, Any] = field(default_factory=dict)  # of the protocol


def _models(kind: str, seed: int) -> list[Any]:
    """A forest, boosting and two regressions; or regressions only."""
    regressions = [LogisticRegression(max_iter=1000) for _ in range(4)]
    if kind == "regressions":
        return regressions
    if kind == "modules":  # the same, by gradient steps; the learning rate was chosen on a quarter of the training rows
        torch.manual_seed(seed)
        return [cd.TorchLearner(nn.Linear(10, 2), lr=1e-3) for _ in range(4)]
    forest = RandomForestClassifier(30, random_state=seed)
    return [forest, HistGradientBoostingClassifier(random_state=seed), *regressions[2:]]


def hospitals(kind: str, seed: int, folder: str) -> tuple[list[cd.Agent], Any]:
    """The four hospitals of recipes/heart, split by the seed; public rows are made up: standard normal."""
    recipe = read_recipe(RECIPES / "logistic-regression.toml", [f"seed={seed}", "safeguard=false"])
    federation, _ = build(recipe, folder)
    agents = [
        cd.Agent(each.name, model, each.shard.x, each.shard.labels, test=each.test)
        for each, model in zip(federation.agents, _models(kind, seed), strict=True)
    ]
    width = federation.agents[0].shard.x.shape[1]
    return agents, np.random.default_rng(seed).standard_normal((400, width))


def _parts(seed: int, rows: np.ndarray, groups: np.ndarray, share: float) -> list[tuple[np.ndarray, np.ndarray]]:
    """Of each group its training and its test rows."""
    rng, parts = np.random.default_rng(seed), []
    for group in np.unique(groups):
        mine = rng.permutation(rows[groups == group])
        cut = round(share * len(mine))
        parts.append((mine[cut:], mine[:cut]))
    return parts


def by_feature(name: str, agents: int, seed: int, folder: str) -> tuple[list[cd.Agent], Any]:
    """Covariate shift: agents hold the quantiles of one feature, which the seed chooses among the five most varied."""
    x, y = {"breast_cancer": load_breast_cancer, "wine": load_wine, "diabetes": load_diabetes}[name](return_X_y=True)
    x = (x - x.mean(0)) / x.std(0)
    feature = x[:, seed % 5]
    groups = np.searchsorted(np.quantile(feature, np.linspace(0, 1, agents + 1)[1:-1]), feature)
    public, rows = np.split(np.random.default_rng(seed).permutation(len(x)), [len(x) // 6])
    made = []
    for number, (train, test) in enumerate(_parts(seed, rows, groups[rows], 0.3)):
        if name == "diabetes":
            model: Any = [Ridge(), RandomForestRegressor(50, random_state=seed)][number % 2]
            made.append(cd.Agent(f"a{number}", model, x[train], y[train, None], test=(x[test], y[test, None])))
        else:
            model = _models("mixed", seed)[number % 4]
            made.append(cd.Agent(f"a{number}", model, x[train], y[train], test=(x[test], y[test])))
    return made, x[public]


def disjoint_digits(seed: int, folder: str) -> tuple[list[cd.Agent], Any]:
    """Five agents with two digits each."""
    x, y = load_digits(return_X_y=True)
    x = x / 16
    public, rows = np.split(np.random.default_rng(seed).permutation(len(x)), [300])
    parts = _parts(seed, rows, (y[rows] + seed) % 10 // 2, 0.3)
    models = _models("mixed", seed) + _models("regressions", seed)
    return [
        cd.Agent(f"a{number}", models[number], x[train], y[train], test=(x[test], y[test]))
        for number, (train, test) in enumerate(parts)
    ], x[public]


def _net(shape: tuple[int, ...], seed: int) -> cd.TorchLearner:
    torch.manual_seed(seed)
    layers: list[nn.Module] = [nn.Flatten(), nn.Linear(int(np.prod(shape)), 64), nn.ReLU(), nn.Linear(64, 10)]
    if len(shape) == 3 and shape[0] == 3:
        convolutions = [nn.Conv2d(3, 16, 5, 2), nn.ReLU(), nn.Conv2d(16, 32, 3, 2), nn.ReLU()]
        layers = [*convolutions, nn.Flatten(), nn.Linear(1152, 10)]
    return cd.TorchLearner(nn.Sequential(*layers), lr=2e-3)


def _with_nets(data: Dataset, parts: list[tuple[np.ndarray, np.ndarray]], seed: int) -> list[cd.Agent]:
    x, y = data.x, data.y
    return [
        cd.Agent(f"a{number}", _net(x.shape[1:], seed), x[train], y[train], test=(x[test], y[test]))
        for number, (train, test) in enumerate(parts)
    ]


def writers(seed: int, folder: str) -> tuple[list[cd.Agent], Any]:
    """Eight writers of MNIST digits, with about 100 images each; half of them are for testing."""
    data = load("mnist", data_dir=folder)
    names, counts = np.unique(data.ids["writer"], return_counts=True)
    rng = np.random.default_rng(seed)
    chosen = rng.choice(names[counts >= 80], 8, replace=False)
    public = data.x[rng.choice(np.flatnonzero(~np.isin(data.ids["writer"], chosen)), 300, replace=False)]
    rows = np.flatnonzero(np.isin(data.ids["writer"], chosen))
    return _with_nets(data, _parts(seed, rows, data.ids["writer"][rows], 0.5), seed), public


def skewed_images(seed: int, folder: str) -> tuple[list[cd.Agent], Any]:
    """CIFAR-10 among five agents, class shares by a Dirichlet distribution of 0.1."""
    data = load("cifar10", data_dir=folder, samples=3500, seed=seed)
    rng = np.random.default_rng(seed)
    public, rows = np.split(rng.permutation(len(data.x)), [500])
    owner = np.zeros(len(data.x), dtype=int)
    for label in range(10):
        mine = rows[data.y[rows] == label]
        owner[mine] = rng.choice(5, len(mine), p=rng.dirichlet(np.full(5, 0.1)))
    parts = [part for part in _parts(seed, rows, owner[rows], 0.3) if len(part[1]) > 10]
    return _with_nets(data, parts, seed), data.x[public]


SETTINGS = {
    "heart-regressions": Setting(lambda s, f: hospitals("regressions", s, f), _PORTABLE, seeds=20),
    "heart-mixed": Setting(lambda s, f: hospitals("mixed", s, f), ("avgkd", "fedmd", "akd", "pkd", "ekd"), seeds=20),
    "heart-pooled": Setting(lambda s, f: hospitals("regressions", s, f), ("centralised",), seeds=20),
    "heart-fedavg": Setting(
        lambda s, f: hospitals("modules", s, f), ("fedavg",), rounds=30, seeds=20, options={"local_epochs": 5}
    ),
    "breast-cancer-by-feature": Setting(lambda s, f: by_feature("breast_cancer", 4, s, f), ("avgkd", "pkd", "fedmd")),
    "wine-by-feature": Setting(lambda s, f: by_feature("wine", 4, s, f), ("avgkd", "pkd", "fedmd")),
    "diabetes-by-feature": Setting(lambda s, f: by_feature("diabetes", 4, s, f), ("avgkd", "pkd", "ekd")),
    "digits-disjoint": Setting(disjoint_digits, ("avgkd", "pkd", "fedmd"), rounds=3, seeds=5),
    "mnist-by-writer": Setting(writers, ("fedmd", "fedavg", "avgkd"), rounds=10, seeds=5),
    "cifar10-alpha-0.1": Setting(skewed_images, ("fedmd", "fedavg", "avgkd"), rounds=10, seeds=3),
}
