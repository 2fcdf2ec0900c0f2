"""Learners by name, for recipes: architectures of the zoo, and scikit-learn by alias or by full name."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sklearn.base import BaseEstimator

from codistill.errors import LearnerError, nearest
from codistill.learners import as_learner, zoo
from codistill.learners.ability import Learner
from codistill.learners.kernel import KernelRidge
from codistill.learners.torch import TorchLearner

# Short names for what people use most; any other estimator by its full name.
ALIASES = {
    "decision_tree": "sklearn.tree.DecisionTreeClassifier",
    "extra_trees": "sklearn.ensemble.ExtraTreesClassifier",
    "gradient_boosting": "sklearn.ensemble.HistGradientBoostingClassifier",
    "lightgbm": "lightgbm.LGBMClassifier",
    "logistic_regression": "sklearn.linear_model.LogisticRegression",
    "naive_bayes": "sklearn.naive_bayes.GaussianNB",
    "nearest_neighbours": "sklearn.neighbors.KNeighborsRegressor",
    "random_forest": "sklearn.ensemble.RandomForestClassifier",
    "random_forest_regressor": "sklearn.ensemble.RandomForestRegressor",
    "ridge": "sklearn.linear_model.Ridge",
    "support_vectors": "sklearn.svm.SVC",
    "xgboost": "xgboost.XGBClassifier",
}
_LIBRARIES = ("sklearn", "xgboost", "lightgbm")
_TRAINING = tuple(inspect.signature(TorchLearner.__init__).parameters)[2:]


@dataclass(frozen=True)
class Entry:
    """A learner's name and what it is."""

    name: str
    library: str
    description: str


def entries() -> list[Entry]:
    """All names that a recipe may use."""
    known = [Entry(name, "torch", zoo.describe(name)) for name in zoo.names()]
    known += [Entry(alias, path.split(".")[0], path.rpartition(".")[2]) for alias, path in ALIASES.items()]
    known.append(Entry("kernel_ridge", "codistill", "Kernel ridge regression with the scaling of the kernel theory."))
    return known


def make_learner(kind: str, options: Mapping[str, Any], shape: tuple[int, ...], classes: int) -> Learner:
    """The learner of a recipe: options of a torch learner are those of training and of the architecture."""
    if kind in zoo.names():
        training = {key: value for key, value in options.items() if key in _TRAINING}
        rest = {key: value for key, value in options.items() if key not in _TRAINING}
        unknown = [key for key in rest if key not in zoo.defaults(kind)]
        if unknown:
            known = {*_TRAINING, *zoo.defaults(kind)}
            raise LearnerError(f"'{kind}' must be given options it has.", f"'{unknown[0]}'", nearest(unknown[0], known))
        return TorchLearner(zoo.build(kind, shape, classes, **rest), **training)
    if kind == "kernel_ridge":
        return KernelRidge(**options)
    path = ALIASES.get(kind, kind)
    if path.split(".")[0] not in _LIBRARIES:
        names = {entry.name for entry in entries()}
        raise LearnerError(
            "A learner must be on the list of 'codistill learners', or a full name such as sklearn.svm.SVC.",
            f"'{kind}'",
            nearest(kind, names),
        )
    return as_learner(_estimator(path, options))


def _estimator(path: str, options: Mapping[str, Any]) -> Any:
    module, _, name = path.rpartition(".")
    try:
        cls = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        library = path.split(".")[0]
        raise LearnerError(
            f"'{path}' must be importable.", f"{error}", f"Install it: pip install 'codistill[boosting]' for {library}."
        ) from None
    except (AttributeError, ValueError):
        raise LearnerError(
            f"'{path}' must be an estimator's full name.", "no such name", "Check the spelling."
        ) from None
    if not (isinstance(cls, type) and issubclass(cls, BaseEstimator)):
        raise LearnerError(f"'{path}' must be an estimator.", f"{cls!r}"[:80], "Name a class with fit and predict.")
    try:
        return cls(**options)
    except TypeError:
        known = list(inspect.signature(cls).parameters)
        unknown = next((key for key in options if key not in known), "its options")
        raise LearnerError(f"{name} must be given options it has.", f"'{unknown}'", nearest(unknown, known)) from None
