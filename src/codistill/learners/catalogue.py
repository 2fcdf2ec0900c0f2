"""Learners by name, for recipes: architectures of the zoo, and scikit-learn by alias or by full name."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import importlib.util
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sklearn.base import BaseEstimator, clone
from sklearn.pipeline import Pipeline, make_pipeline
from torch import nn

from codistill.core.errors import CodistillError, LearnerError, nearest, own_line
from codistill.core.settings import check_settings, from_table, setting
from codistill.learners import as_learner, zoo
from codistill.learners.ability import Learner
from codistill.learners.kernel_ridge import KernelRidge
from codistill.learners.torch import PRECISIONS, TorchLearner
from codistill.learners.trained_module import OPTIMISERS

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
_STEPS = (
    "sklearn.preprocessing", "sklearn.impute", "sklearn.decomposition", "sklearn.feature_selection",
    "sklearn.feature_extraction.text",
)  # fmt: skip
_LIBRARIES = ("sklearn", "xgboost", "lightgbm")


LoadOwn = Callable[[str], Any]  # what a name of the form "file.py:Name" stands for


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
    projection: int | None = setting(None, "features that a linear layer before the last one projects to", at_least=1)
    head: str | None = setting(None, "linear layer whose input is the features; unset: the one that gives the outputs")
    precision: str | None = setting(
        None, "mixed: outputs are computed in bfloat16 where the device can", choices=PRECISIONS
    )

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
    known = [Entry(name, "torch", zoo.describe(name)) for name in zoo.names()]
    known += [Entry(alias, path.split(".")[0], path.rpartition(".")[2]) for alias, path in ALIASES.items()]
    known.append(Entry("pipeline", "sklearn", 'Several estimators, e.g. steps = ["StandardScaler", "ridge"].'))
    known.append(Entry("kernel_ridge", "codistill", "Kernel ridge regression with the scaling of the kernel theory."))
    return known


def make_learner(
    kind: str, options: Mapping[str, Any], shape: tuple[int, ...], classes: int, own: LoadOwn | None = None
) -> Learner:
    """The learner of a recipe: options of a torch learner are those of training and of the architecture."""
    if own is not None and kind.rpartition(":")[0].endswith(".py"):
        return make_own(own(kind), kind, options, shape, classes)
    if kind == "pipeline":
        return as_learner(_pipeline(options, own))
    if kind in zoo.names():
        training = {key: value for key, value in options.items() if key in _TRAINING}
        from_table(Training, training, "learner")
        rest = {key: value for key, value in options.items() if key not in _TRAINING}
        unknown = [key for key in rest if key not in zoo.defaults(kind)]
        if unknown:
            known = {*_TRAINING, *zoo.defaults(kind)}
            raise LearnerError(f"Unknown option '{unknown[0]}' for {kind}.", "", nearest(unknown[0], known))
        try:
            module = zoo.build(kind, shape, classes, **rest)
        except (RuntimeError, TypeError, ValueError, OverflowError, MemoryError) as error:
            # torch refuses sizes that are no sizes, or too large for the memory, in its own way.
            raise LearnerError(
                f"'{kind}' cannot use the value of an option.",
                f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no memory'}"[:200],
                "Change the value, such as a smaller number of units.",
            ) from None
        return TorchLearner(module, **training)
    if kind == "kernel_ridge":
        return KernelRidge(**options)
    path = ALIASES.get(kind, kind)
    if path.split(".")[0] not in _LIBRARIES:
        names = {entry.name for entry in entries()}
        raise LearnerError(
            f"Unknown learner '{kind}'.",
            "",
            f"{nearest(kind, names)} See 'codistill learners'; others are named as sklearn.svm.SVC or 'file.py:Name'.",
        )
    return as_learner(_estimator(path, options))


def _pipeline(options: Mapping[str, Any], own: LoadOwn | None) -> Pipeline:
    """Transformers and, at the end, a model: each a name, or a table with kind and options."""
    steps = options.get("steps")
    wrong = [key for key in options if key != "steps"]
    if not isinstance(steps, list) or len(steps) < 2 or wrong:
        raise LearnerError(
            "A pipeline needs 'steps', a list of at least two, and nothing else.",
            f"'{wrong[0]}'" if wrong else f"{steps!r}"[:80],
            'Example: steps = ["StandardScaler", {kind = "logistic_regression", C = 1.0}].',
        )
    made = [_step(step, own) for step in steps]
    for step in made[:-1]:
        if not hasattr(step, "transform"):
            raise LearnerError(
                "All steps of a pipeline but the last must transform samples.",
                f"{type(step).__name__} at place {made.index(step) + 1} of {len(made)}",
                "Put it last, or leave it out.",
            )
    return make_pipeline(*made)


def _step(step: Any, own: LoadOwn | None) -> Any:
    kind = step.get("kind") if isinstance(step, dict) else step
    if not isinstance(kind, str):
        raise LearnerError(
            "A step of a pipeline must be a name, or a table that says its kind.",
            f"{step!r}"[:80],
            "Name an estimator.",
        )
    options = {key: value for key, value in step.items() if key != "kind"} if isinstance(step, dict) else {}
    if own is not None and kind.rpartition(":")[0].endswith(".py"):
        return call_own(own(kind), kind, options)
    known = {
        cls: f"{place}.{cls}" for place in _STEPS for cls in dir(importlib.import_module(place)) if cls[0].isupper()
    }
    path = known.get(kind, ALIASES.get(kind, kind))
    if path.split(".")[0] not in _LIBRARIES:
        raise LearnerError(
            "A step of a pipeline must be an estimator of scikit-learn, XGBoost or LightGBM.",
            f"'{kind}'",
            "Have it alone, without steps." if kind in zoo.names() else nearest(kind, {*known, *ALIASES}),
        )
    return _estimator(path, options)


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
    pairs = [name for name, each in inspect.signature(cls).parameters.items() if isinstance(each.default, tuple)]
    options = {key: tuple(v) if key in pairs and isinstance(v, list) else v for key, v in options.items()}  # as in TOML
    try:
        estimator = cls(**options)
    except TypeError as error:
        known = list(inspect.signature(cls).parameters)
        unknown = next((key for key in options if key not in known), None)
        if unknown is not None:
            raise LearnerError(f"Unknown option '{unknown}' for {name}.", "", nearest(unknown, known)) from None
        raise LearnerError(f"{name} cannot be made from these options.", str(error), "Check its options.") from None
    try:
        if hasattr(estimator, "_parameter_constraints"):
            estimator._validate_params()  # as its own fit would, but before the run
    except ValueError as error:
        raise LearnerError(f"{name} cannot use the value of an option.", str(error), "Change the value.") from None
    return estimator


# --- A model of a user's own file as a learner: a class or a function with options, or a model as it stands.

_SHAPE, _FEATURES = ("shape", "in_shape", "input_shape"), ("features", "in_features", "n_features")
_CLASSES = ("classes", "num_classes", "n_classes", "out_features")


def make_own(given: Any, name: str, options: Mapping[str, Any], shape: tuple[int, ...], classes: int) -> Learner:
    """The learner in a class, a function or a model of one's own.

    Arguments called shape, features or classes (or in_shape, in_features, num_classes, ...) are passed where the
    options do not say them. For a torch module, options that it does not take itself are those of training.
    """
    build = given if isinstance(given, type) or inspect.isroutine(given) else None
    parameters = inspect.signature(build).parameters if build is not None else {}
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    takes = {key for key, parameter in parameters.items() if parameter.kind in by_name}
    takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    task = {
        **dict.fromkeys(_SHAPE, shape),
        **dict.fromkeys(_FEATURES, math.prod(shape)),
        **dict.fromkeys(_CLASSES, classes),
    }
    own = {key: value for key, value in task.items() if key in takes}
    own |= {key: value for key, value in options.items() if key in takes or (takes_all and key not in _TRAINING)}
    rest = {key: value for key, value in options.items() if key not in own}
    if build is not None:
        model = call_own(build, name, own)
    else:  # every agent has a model of its own
        model = clone(given) if isinstance(given, BaseEstimator) else copy.deepcopy(given)
    training = _TRAINING if isinstance(model, nn.Module) else ()
    unknown = [key for key in rest if key not in training]
    if unknown:
        known = {*takes, *training}
        raise LearnerError(f"Unknown option '{unknown[0]}' for {name}.", "", nearest(unknown[0], known))
    if isinstance(model, nn.Module):
        return TorchLearner(model, **rest)
    try:
        return as_learner(model)
    except LearnerError as error:
        must = f"'{name}' must be a torch module, a scikit-learn estimator, a Learner, an object with fit and predict, "
        raise LearnerError(f"{must}or make one.", error.found, "Name such a class, function or model.") from None


def call_own(build: Callable[..., Any], name: str, options: Mapping[str, Any]) -> Any:
    """What a class or a function of one's own makes; an error says the line of the file."""
    try:
        return build(**options)
    except CodistillError:
        raise
    except Exception as error:  # the user's own code
        raise LearnerError(
            f"'{name}' must make a model from its options.",
            f"{type(error).__name__}: {error}"[:300] + (f", at {line}" if (line := own_line(error)) else ""),
            "Check its options, and run the file by itself.",
        ) from error
