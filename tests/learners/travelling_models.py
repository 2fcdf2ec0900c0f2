"""One table of models that travel: in messages of which kind, for which samples, and how each is made."""

from __future__ import annotations

import functools
import hashlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from lightgbm import LGBMClassifier, LGBMRegressor
from sklearn.decomposition import PCA
from sklearn.ensemble import (
    AdaBoostClassifier,
    BaggingClassifier,
    BaggingRegressor,
    ExtraTreesClassifier,
    ExtraTreesRegressor,
    GradientBoostingClassifier,
    GradientBoostingRegressor,
    HistGradientBoostingClassifier,
    HistGradientBoostingRegressor,
    RandomForestClassifier,
    RandomForestRegressor,
)
from sklearn.linear_model import (
    ElasticNet,
    Lasso,
    LinearRegression,
    LogisticRegression,
    Perceptron,
    Ridge,
    RidgeClassifier,
    SGDClassifier,
)
from sklearn.multioutput import MultiOutputRegressor
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MaxAbsScaler, MinMaxScaler, Normalizer, RobustScaler, StandardScaler
from sklearn.svm import LinearSVC
from sklearn.tree import DecisionTreeClassifier, DecisionTreeRegressor, ExtraTreeClassifier, ExtraTreeRegressor
from torch import nn

from codistill.learners import as_learner, zoo
from codistill.learners.ability import Ability
from codistill.learners.kernel_ridge import KernelRidge
from codistill.learners.torch import TorchLearner
from codistill.wire.message import Message

N, D, CLASSES = 37, 5, 3

ESTIMATORS: dict[str, Callable[[], Any]] = {
    "tree": lambda: DecisionTreeClassifier(max_depth=3, random_state=0),
    "regression tree": lambda: DecisionTreeRegressor(max_depth=3, random_state=0),
    "extra tree": lambda: ExtraTreeClassifier(max_depth=3, random_state=0),
    "extra regression tree": lambda: ExtraTreeRegressor(max_depth=3, random_state=0),
    "forest": lambda: RandomForestClassifier(3, random_state=0),
    "forest with votes": lambda: RandomForestClassifier(8, oob_score=True, random_state=0),
    "regression forest": lambda: RandomForestRegressor(8, oob_score=True, random_state=0),
    "extra trees": lambda: ExtraTreesClassifier(3, random_state=0),
    "extra regression trees": lambda: ExtraTreesRegressor(3, random_state=0),
    "boosting": lambda: GradientBoostingClassifier(n_estimators=2, random_state=0),
    "boosting from zero": lambda: GradientBoostingClassifier(
        n_estimators=2, init="zero", subsample=0.5, random_state=0
    ),
    "boosting columns": lambda: MultiOutputRegressor(
        GradientBoostingRegressor(n_estimators=2, loss="huber", random_state=0)
    ),
    "hist boosting": lambda: HistGradientBoostingClassifier(max_iter=2, min_samples_leaf=3, random_state=0),
    "hist boosting stopped": lambda: HistGradientBoostingClassifier(max_iter=3, early_stopping=True, random_state=0),
    "hist boosting columns": lambda: MultiOutputRegressor(
        HistGradientBoostingRegressor(max_iter=2, min_samples_leaf=3, random_state=0)
    ),
    "adaboost": lambda: AdaBoostClassifier(n_estimators=2, random_state=0),
    "bagging": lambda: BaggingClassifier(n_estimators=2, max_features=0.6, random_state=0),
    "bagging columns": lambda: BaggingRegressor(n_estimators=2, random_state=0),
    "logistic": lambda: LogisticRegression(),
    "linear": lambda: LinearRegression(),
    "ridge": lambda: Ridge(),
    "ridge classifier": lambda: RidgeClassifier(),
    "lasso": lambda: Lasso(0.01),
    "elastic net": lambda: ElasticNet(0.01),
    "sgd": lambda: SGDClassifier(loss="log_loss", average=True, random_state=0),
    "perceptron": lambda: Perceptron(random_state=0),
    "linear svm": lambda: LinearSVC(random_state=0),
    "mlp": lambda: MLPClassifier(4, max_iter=30, tol=1, n_iter_no_change=2, random_state=0),
    "mlp stopped": lambda: MLPClassifier(
        4, max_iter=30, tol=1, early_stopping=True, n_iter_no_change=2, random_state=0
    ),
    "mlp columns": lambda: MLPRegressor(hidden_layer_sizes=4, solver="lbfgs", tol=1, random_state=0),
    "scaled": lambda: make_pipeline(StandardScaler(), RobustScaler(), LogisticRegression()),
    "scaled otherwise": lambda: make_pipeline(MinMaxScaler(), MaxAbsScaler(), Normalizer(), Ridge()),
    "components": lambda: make_pipeline(PCA(2, random_state=0), RandomForestClassifier(2, random_state=0)),
}


class Recurrent(nn.Module):
    """An LSTM."""

    def __init__(self):
        super().__init__()
        self.lstm, self.last = nn.LSTM(4, 6, batch_first=True), nn.Linear(6, CLASSES)

    def forward(self, x):
        return self.last(self.lstm(x)[0][:, -1])


class Attentive(nn.Module):
    """Patches, a learned token expanded over the batch, attention written out, layer norm."""

    def __init__(self):
        super().__init__()
        self.cut, self.token = nn.Conv2d(1, 8, 4, 4), nn.Parameter(torch.randn(1, 1, 8))
        self.ask, self.norm, self.last = nn.Linear(8, 24), nn.LayerNorm(8), nn.Linear(8, CLASSES)

    def forward(self, x):
        patches = self.cut(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(x.shape[0], -1, -1), patches], 1)
        q, k, v = self.ask(self.norm(tokens)).chunk(3, -1)
        return self.last((torch.softmax(q @ k.transpose(1, 2) / 8**0.5, -1) @ v)[:, 0])


def norm_and_dropout() -> nn.Module:
    """Layers that differ between training and evaluation."""
    return nn.Sequential(nn.Linear(D, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Dropout(), nn.Linear(8, CLASSES))


def convolutions() -> nn.Module:
    """Convolutions and pooling."""
    return nn.Sequential(
        *(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.SiLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 3)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, CLASSES)),
    )


@dataclass(frozen=True)
class Case:
    """A model, the kind of its message, and the shape of its samples."""

    kind: str
    make: Callable[[], Any]
    shape: tuple[int, ...] = (D,)
    loss: str = "cross_entropy"


def registered(name: str, shape: tuple[int, ...], loss: str = "cross_entropy", **options: Any) -> Case:
    """A torch model of a registered architecture."""
    return Case("torch", lambda: zoo.build(name, shape, CLASSES, **options), shape, loss)


CASES: dict[str, Case] = {
    **{name: Case("skops", make) for name, make in ESTIMATORS.items()},
    "forest of images": Case("skops", lambda: RandomForestClassifier(2, random_state=0), (1, 1, D)),
    "lightgbm": Case("trees", lambda: LGBMClassifier(n_estimators=2, min_child_samples=3)),
    "lightgbm columns": Case("trees", lambda: MultiOutputRegressor(LGBMRegressor(n_estimators=2, num_leaves=4))),
    "registered mlp": registered("mlp", (D,), hidden=[4, 3]),
    "registered mlp, defaults": registered("mlp", (D,), "squared"),
    "registered logistic": registered("logistic", (1, 2, 2), "squared"),
    "registered cnn": registered("cnn", (1, 8, 8), width=2),
    "registered resnet8": registered("resnet8", (3, 8, 8), "squared"),
    "rbf kernel": Case("kernel", lambda: KernelRidge("rbf", 0.1, reveal_inputs=True, gamma=0.3)),
    "polynomial kernel": Case(
        "kernel", lambda: KernelRidge("polynomial", 0.1, reveal_inputs=True, degree=2, coef0=1.0)
    ),
    "module linear": Case("onnx", lambda: nn.Linear(D, CLASSES), loss="squared"),
    "module with norm and dropout": Case("onnx", norm_and_dropout),
    "module of convolutions": Case("onnx", convolutions, (1, 8, 8)),
    "module recurrent": Case("onnx", Recurrent, (7, 4)),
    "module attentive": Case("onnx", Attentive, (1, 8, 8), "squared"),
    # Of the zoo, but no longer registered: blocks that add their input.
    "module residual": Case("onnx", lambda: nn.Sequential(*zoo.build("resnet8", (3, 8, 8), CLASSES)), (3, 8, 8)),
}


def toy(hard: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Samples (N, D) and targets, soft ones unless `hard`; one class has a single sample."""
    rng = np.random.default_rng(0)
    labels = np.arange(N) % (CLASSES - 1)
    labels[5] = CLASSES - 1
    x = (rng.normal(size=(N, D)) + labels[:, None]).astype(np.float32)
    onehot = np.eye(CLASSES)[labels]
    return x, onehot if hard else 0.7 * onehot + 0.3 * rng.dirichlet(np.ones(CLASSES), size=N)


def samples(shape: tuple[int, ...], n: int = N) -> np.ndarray:
    """Samples of any shape; tables are those of `toy`."""
    if np.prod(shape) == D and n == N:
        return toy()[0].reshape(N, *shape)
    return np.random.default_rng(0).normal(size=(n, *shape)).astype(np.float32)


def learner(name: str) -> Any:
    """A model of the table, not yet fitted."""
    case = CASES[name]
    torch.manual_seed(0)
    model = case.make()
    if isinstance(model, nn.Module):
        return TorchLearner(model, loss=case.loss, epochs=1, batch_size=16)
    return as_learner(model)


def fit_anew(name: str) -> Any:
    """A model of the table, fitted."""
    made = learner(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # too few trees, too few iterations
        made.fit(samples(CASES[name].shape), toy(hard=Ability.PREDICT not in made.abilities)[1])
    return made


fitted = functools.cache(fit_anew)


@functools.cache
def exported(name: str) -> bytes:
    """A fitted model of the table, as the bytes of its message."""
    return fitted(name).export().encoded


def message(name: str) -> Message:
    """A fitted model of the table, as it arrives."""
    return Message.decode(exported(name))


def digests(names: list[str]) -> dict[str, str]:
    """A digest of the message of each model."""
    return {name: hashlib.sha256(exported(name)).hexdigest() for name in names}
