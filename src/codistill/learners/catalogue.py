"""Learners by name, for recipes: architectures of the zoo, and scikit-learn by alias or by full name."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sklearn.base import BaseEstimator

from codistill.errors import LearnerError, nearest
from codistill.learners import as_learner, zoo
from codistill.learners.ability import Learner
from codistill.learners.kernel_ridge import KernelRidge
from codistill.learners.torch import OPTIMISERS, TorchLearner
from codistill.settings import check_settings, from_table, setting

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


@dataclass(frozen=True, kw_only=True)
class Training:
    """How a recipe has a torch learner trained; unset fields have the defaults of `TorchLearner`."""

    loss: str | None = setting(None, "what training minimises", choices=("cross_entropy", "squared"))
    optimiser: str | None = setting(None, "the optimiser", choices=OPTIMISERS)
    lr: float | None = setting(None, "learning rate", above=0)
    weight_decay: float | None = setting(None, "weight decay (L2)", at_least=0)
    momentum: float | None = setting(None, "momentum of sgd", at_least=0)
    epochs: int | None = setting(None, "passes over the data where a protocol fits the model", at_least=0)
    batch_size: int | None = setting(None, "samples per step where a protocol fits the model", at_least=1)
    warm: bool | None = setting(None, "continue from the current weights when fitted again")

    def __post_init__(self) -> None:
        check_settings(self, "learner")


_TRAINING = tuple(field.name for field in dataclasses.fields(Training))


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
        from_table(Training, training, "learner")
        rest = {key: value for key, value in options.items() if key not in _TRAINING}
        unknown = [key for key in rest if key not in zoo.defaults(kind)]
        if unknown:
            known = {*_TRAINING, *zoo.defaults(kind)}
            raise LearnerError(f"'{kind}' must be given options it has.", f"'{unknown[0]}'", nearest(unknown[0], known))
        return TorchLearner(zoo.build(kind, shape, classes, **rest), **training)
    if kind == "kernel_ridge":
        c = options.get("c", 0)
        if isinstance(c, bool) or not isinstance(c, int | float):
            raise LearnerError("c of kernel_ridge must be a number of at least 0.", repr(c), "Change it.")
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
    place, _, name = path.rpartition(".")
    library = path.split(".")[0]
    try:
        module = importlib.import_module(place or path)
    except ImportError as error:
        missing = importlib.util.find_spec(library) is None
        do = f"Install {library}: pip install 'codistill[boosting]'." if missing else "Check the spelling."
        raise LearnerError(f"'{path}' must be importable.", f"{error}", do) from None
    if not place or not hasattr(module, name):
        raise LearnerError(
            f"'{path}' must be an estimator's full name.",
            f"no '{name}' in {module.__name__}",
            nearest(name, [each for each in dir(module) if each[0].isupper()]),
        )
    cls = getattr(module, name)
    if not (isinstance(cls, type) and issubclass(cls, BaseEstimator)):
        raise LearnerError(f"'{path}' must be an estimator.", f"{cls!r}"[:80], "Name a class with fit and predict.")
    try:
        estimator = cls(**options)
    except TypeError as error:
        known = list(inspect.signature(cls).parameters)
        unknown = next((key for key in options if key not in known), None)
        found, do = (str(error), "Check its options.") if unknown is None else (f"'{unknown}'", nearest(unknown, known))
        raise LearnerError(f"{name} must be given options it has.", found, do) from None
    try:
        if hasattr(estimator, "_parameter_constraints"):
            estimator._validate_params()  # as its own fit would, but before the run
    except ValueError as error:
        raise LearnerError(f"{name} must be given options it can use.", str(error), "Change the value.") from None
    return estimator
