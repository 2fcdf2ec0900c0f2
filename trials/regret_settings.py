"""The settings in which `codistill advise` is judged: data sets, partitions, sizes, models, public data or none.

Every agent has training and test samples of its own, from its own part of the data.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from codistill.core.rng import generator, seed_libraries
from codistill.data.datasets import load
from codistill.data.partition import KINDS
from codistill.experiments.advice_prior import Setting
from codistill.experiments.advice_probe import Part
from codistill.learners.catalogue import make_learner
from codistill.nodes.agent import Agent
from codistill.nodes.record import record_of

ROUNDS = 5
BUNDLED = ("breast_cancer", "digits", "linear", "wine")
TESTED = 200  # test samples of the average agent, where there are as many
_EPOCHS = 25  # of a network in a whole run, and where a protocol fits it to the end
_FOREST = {"kind": "random_forest", "n_estimators": 10}
_BOOSTING = {"kind": "gradient_boosting", "max_iter": 12, "max_leaf_nodes": 8, "min_samples_leaf": 5}
_EXTRA_TREES = {"kind": "extra_trees", "n_estimators": 10}
_LINEAR = {"kind": "logistic_regression", "max_iter": 50}
_MLP = {"kind": "mlp", "lr": 3e-3, "epochs": _EPOCHS}
_CNN = {"kind": "cnn", "lr": 3e-3, "epochs": _EPOCHS}
MODELS: dict[str, list[dict[str, Any]]] = {
    "linear": [_LINEAR],
    "trees": [_FOREST, _BOOSTING, _EXTRA_TREES],
    "forest": [_FOREST],
    "mixed": [_LINEAR, _FOREST, _BOOSTING, _MLP],
    "linear+forest": [_LINEAR, _FOREST],
    "mlp": [_MLP],
    "mlp+cnn": [_MLP, _CNN],
    "mlp+linear": [_MLP, _LINEAR],
    "regressors": [{"kind": "ridge"}, {"kind": "random_forest_regressor", "n_estimators": 10}],
    "ridge": [{"kind": "ridge"}],
    "kernel+mlp": [{"kind": "kernel_ridge", "c": 1e-3, "reveal_inputs": True}, {**_MLP, "loss": "squared"}],
}


@dataclass(frozen=True)
class Case:
    """One setting, by name."""

    data: str
    partition: str  # iid, dirichlet 0.1, labels, by writer, feature
    agents: int
    samples: int  # of the average agent, for training
    models: str
    public: int
    seed: int = 0

    @property
    def name(self) -> str:
        """All that it is."""
        return (
            f"{self.data} | {self.partition} | {self.agents} x {self.samples} | {self.models} | "
            f"public {self.public} | seed {self.seed}"
        )


def cases() -> list[Case]:
    """All settings; those of one data set are spread over the list, so that any beginning of it has all of them."""
    by_data = {data: [Case(data, *each) for each in found] for data, found in _CASES.items()}
    longest = max(len(found) for found in by_data.values())
    return [found[i] for i in range(longest) for found in by_data.values() if i < len(found)]


_CASES: dict[str, list[tuple[str, int, int, str, int]]] = {
    "digits": [
        ("iid", 4, 60, "mixed", 150),
        ("dirichlet 0.3", 4, 100, "mlp", 150),
        ("labels", 3, 100, "mlp", 0),
        ("dirichlet 0.1", 4, 80, "linear+forest", 100),
        ("iid", 4, 30, "mlp", 0),
        ("feature", 4, 100, "trees", 0),
        ("iid", 3, 300, "mlp+linear", 200),
        ("labels", 2, 60, "linear", 100),
    ],
    "wine": [
        ("iid", 3, 20, "linear+forest", 0),
        ("feature", 3, 30, "linear", 30),
        ("dirichlet 0.5", 3, 25, "trees", 30),
        ("labels", 3, 30, "mlp", 0),
        ("iid", 3, 20, "mlp", 30),
        ("feature", 2, 40, "mixed", 0),
    ],
    "breast_cancer": [
        ("feature", 4, 70, "mixed", 0),
        ("iid", 4, 25, "linear+forest", 60),
        ("dirichlet 0.5", 4, 60, "mlp", 80),
        ("feature", 4, 80, "linear", 80),
        ("iid", 3, 100, "trees", 0),
        ("labels", 2, 80, "forest", 80),
        ("dirichlet 0.2", 3, 50, "mixed", 80),
    ],
    "linear": [
        ("iid", 2, 60, "ridge", 0),
        ("iid", 3, 40, "regressors", 0),
        ("unequal", 3, 40, "kernel+mlp", 0),
        ("feature", 2, 60, "regressors", 0),
        ("iid", 4, 25, "ridge", 0),
        ("feature", 3, 100, "kernel+mlp", 0),
    ],
    "mnist": [
        ("by writer", 4, 100, "mixed", 150),
        ("dirichlet 0.1", 4, 200, "mlp", 200),
        ("iid", 4, 40, "linear+forest", 150),
        ("labels", 3, 150, "mlp+cnn", 150),
        ("by writer", 4, 60, "mlp", 0),
        ("dirichlet 0.5", 3, 300, "trees", 100),
        ("iid", 4, 100, "mlp", 200),
        ("by writer", 4, 200, "linear", 150),
    ],
    "emnist_letters": [
        ("dirichlet 0.5", 4, 150, "mlp", 200),
        ("iid", 4, 150, "linear+forest", 150),
        ("labels", 4, 150, "mlp", 200),
        ("dirichlet 0.1", 3, 200, "mlp", 0),
        ("iid", 3, 300, "mlp+linear", 0),
        ("feature", 3, 150, "forest", 150),
    ],
    "usps": [
        ("dirichlet 0.5", 4, 80, "linear+forest", 150),
        ("iid", 4, 50, "mlp", 150),
        ("feature", 3, 150, "mixed", 150),
        ("labels", 2, 150, "mlp", 0),
        ("dirichlet 0.2", 4, 150, "mlp+linear", 200),
        ("iid", 3, 400, "forest", 0),
        ("unequal", 4, 100, "mlp+cnn", 200),
    ],
    "cifar10": [
        ("dirichlet 0.1", 4, 150, "mlp", 200),
        ("iid", 3, 150, "forest", 150),
        ("dirichlet 0.5", 3, 200, "mlp+cnn", 200),
        ("iid", 4, 100, "mlp+linear", 0),
        ("labels", 2, 200, "linear+forest", 150),
        ("feature", 3, 150, "mlp", 150),
    ],
    "heart": [
        ("by hospital", 4, 0, "mixed", 0),
        ("by hospital", 4, 0, "linear", 100),
        ("by hospital", 4, 0, "mlp", 100),
        ("iid", 4, 50, "linear+forest", 0),
        ("dirichlet 0.5", 4, 80, "mixed", 100),
        ("feature", 3, 100, "linear", 0),
        ("by hospital", 4, 0, "linear+forest", 100),
        ("iid", 6, 25, "mlp", 100),
        ("by hospital", 4, 0, "trees", 100),
    ],
    "mnist_m": [
        ("iid", 3, 150, "forest", 150),
        ("dirichlet 0.3", 3, 200, "mlp", 0),
        ("iid", 3, 150, "mlp+linear", 150),
    ],
}  # fmt: skip


def build(case: Case) -> tuple[Setting, dict[str, Part]]:
    """The agents with all their samples, and which of these each trains on and is tested on."""
    rng = generator(case.seed, case.name)
    x, y, ids, classes = _pool(case, rng)
    public = None
    if case.public:
        order = rng.permutation(len(x))
        public, rest = x[order[: case.public]], np.sort(order[case.public :])
        x, y, ids = x[rest], y[rest], {key: value[rest] for key, value in ids.items()}
    agents, parts = [], {}
    share = case.samples * case.agents / len(x) if case.samples else 2 / 3  # of an agent's samples, for training
    for number, rows in enumerate(_partition(case, x, y, ids, rng)):
        model = MODELS[case.models][number % len(MODELS[case.models])]
        if model is _BOOSTING and x.ndim == 4:
            model = _EXTRA_TREES  # boosting takes a tree per class and iteration: too slow for so many features
        options = {key: value for key, value in model.items() if key != "kind"}
        name = f"agent-{number + 1}"
        seed_libraries(case.seed, name, "model")
        agent = Agent(name, make_learner(model["kind"], options, x.shape[1:], classes), x[rows], y[rows])
        record_of(agent).encode_labels(classes)
        agents.append(agent)
        parts[name] = _train_and_test(y[rows], share, rng)
    return Setting(agents=tuple(agents), classes=classes, rounds=ROUNDS, seed=case.seed, public=public), parts


def _pool(case: Case, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray], int]:
    x, y, ids, classes = _load(case.data)
    wanted = case.public + case.agents * (case.samples + TESTED) if case.samples else len(x)
    if case.partition == "by writer":  # few writers, with all that they wrote
        writers, counts = np.unique(ids["writer"], return_counts=True)
        order = rng.permutation(len(writers))
        enough = int((counts[order].cumsum() < wanted).sum()) + 1
        rows = np.flatnonzero(np.isin(ids["writer"], writers[order[:enough]]))
    else:
        rows = np.sort(rng.permutation(len(x))[:wanted])
    return x[rows], y[rows], {key: value[rows] for key, value in ids.items()}, classes


@cache
def _load(data: str) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray], int]:
    if data == "heart":
        return _heart()
    found = load(data, samples=None if data in (*BUNDLED, "mnist") else 7000, seed=0)
    if data not in BUNDLED:
        return _smaller(found.x), found.y, found.ids, found.classes
    if data == "linear":
        rows = slice(0, 400)
        rng = np.random.default_rng(0)
        noisy = found.y_test[rows] + 0.5 * rng.standard_normal(found.y_test[rows].shape)
        return found.x_test[rows, :30], noisy, {}, 1
    return np.concatenate([found.x, found.x_test]), np.concatenate([found.y, found.y_test]), {}, found.classes


def _smaller(x: np.ndarray) -> np.ndarray:
    """Images of at most 14 x 14 pixels, by means of 2 x 2: a setting is to take seconds."""
    while x.shape[-1] > 14:
        x = x.reshape(*x.shape[:2], x.shape[2] // 2, 2, x.shape[3] // 2, 2).mean(axis=(3, 5))
    return x


def _heart() -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray], int]:
    import pandas as pd

    table = pd.read_csv(Path(os.environ["CODISTILL_DATA"]) / "heart.csv").drop(columns=["slope", "ca", "thal"]).dropna()
    hospital = table.pop("hospital").to_numpy()
    y = (table.pop("num").to_numpy() > 0).astype(np.int64)
    x = table.to_numpy(dtype=np.float64)
    return ((x - x.mean(0)) / x.std(0)).astype(np.float32), y, {"hospital": hospital}, 2


def _partition(
    case: Case, x: np.ndarray, y: np.ndarray, ids: dict[str, np.ndarray], rng: np.random.Generator
) -> Sequence[np.ndarray]:
    kind, _, option = case.partition.partition(" ")
    if kind == "feature":  # covariate shift: agents hold consecutive ranges of one feature
        flat = x.reshape(len(x), -1)
        feature = flat.mean(axis=1) if x.ndim == 4 else flat[:, 0]
        return np.array_split(np.argsort(feature, kind="stable"), case.agents)
    options: dict[str, Any] = {}
    if kind == "dirichlet":
        options = {"alpha": float(option), "min_size": 30}
    elif kind == "unequal":
        options = {"spread": 0.8}
    elif kind == "by":
        options = {"id": option}
    return KINDS[kind](**options).split(y, case.agents, rng, ids)


def _train_and_test(y: np.ndarray, share: float, rng: np.random.Generator) -> Part:
    """Samples of every class for training and for tests; a class of one sample is trained on."""
    order = rng.permutation(len(y))
    if y.ndim == 1:
        order = order[np.argsort(y[order], kind="stable")]
    # The n-th sample is for training where the whole part of n * share grows.
    trained = np.diff(np.floor(np.arange(len(y) + 1) * share + rng.random())) > 0
    train = np.zeros(len(y), dtype=bool)
    train[order[trained]] = True
    if y.ndim == 1:
        train[np.bincount(y)[y] == 1] = True
    return np.flatnonzero(train), np.flatnonzero(~train)
