"""scikit-learn models that travel: in the skops format, and only types that hold no training rows.

What arrives is checked before it is built (types, sizes, arrays of compiled parts: `archive_reading`) and before it is
used (whether its parts fit one another: `estimator_structure`). skops itself only writes.
"""

from __future__ import annotations

import functools
import importlib
import math
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from sklearn.exceptions import InconsistentVersionWarning

from codistill.learners.portable.archive_reading import Rules, named_classes, read_estimator
from codistill.learners.portable.boosted_models import as_trees, is_boosted
from codistill.learners.portable.constant_models import ConstantModel, export_constant
from codistill.learners.portable.estimator_costs import estimator_cost
from codistill.learners.portable.estimator_state import dump_estimator
from codistill.learners.portable.estimator_structure import check_structure
from codistill.learners.portable.model_limits import Cost
from codistill.learners.portable.skops_archive import canonical
from codistill.message import Message

if TYPE_CHECKING:
    from codistill.learners.sklearn import SklearnLearner

# Estimators that may be sent: what they hold after `fit` are parameters and thresholds, no rows. (Naive
# Bayes and discriminant analysis hold class means: the row itself, where a class has one sample.)
TRAVELLING = frozenset(
    {
        "DecisionTreeClassifier DecisionTreeRegressor ExtraTreeClassifier ExtraTreeRegressor",
        "RandomForestClassifier RandomForestRegressor ExtraTreesClassifier ExtraTreesRegressor",
        "GradientBoostingClassifier GradientBoostingRegressor",
        "HistGradientBoostingClassifier HistGradientBoostingRegressor",
        "AdaBoostClassifier BaggingClassifier BaggingRegressor",
        "LogisticRegression LinearRegression Ridge RidgeClassifier Lasso ElasticNet SGDClassifier Perceptron",
        "LinearSVC MLPClassifier MLPRegressor MultiOutputRegressor",
        "Pipeline StandardScaler MinMaxScaler MaxAbsScaler RobustScaler Normalizer PCA",
    }
)
_TRAVELLING_NAMES = frozenset(name for line in TRAVELLING for name in line.split())

# Where scikit-learn has estimators that hold training rows, or means of them.
_KEEP_ROWS = frozenset({"neighbors", "svm", "kernel_ridge", "gaussian_process", "naive_bayes", "discriminant_analysis"})

# Parts of listed estimators that are no estimators to choose.
_HELPERS = {
    "sklearn.preprocessing._label": "LabelBinarizer LabelEncoder",
    "sklearn.dummy": "DummyClassifier DummyRegressor",
    "sklearn.ensemble._hist_gradient_boosting.binning": "_BinMapper",
    "sklearn._loss.link": "HalfLogitLink IdentityLink Interval LogitLink LogLink MultinomialLogit",
    "sklearn._loss.loss": "AbsoluteError ExponentialLoss HalfBinomialLoss HalfGammaLoss HalfMultinomialLoss "
    "HalfPoissonLoss HalfSquaredError HalfTweedieLoss HalfTweedieLossIdentity HuberLoss PinballLoss",
}
_PACKAGES = "decomposition ensemble linear_model multioutput neural_network pipeline preprocessing svm tree"


@functools.cache
def helpers() -> dict[str, type]:
    """What listed estimators hold inside, by full name."""
    found = [(importlib.import_module(module), names.split()) for module, names in _HELPERS.items()]
    return named_classes(getattr(module, name) for module, names in found for name in names if hasattr(module, name))


@functools.cache
def _travelling() -> dict[str, type]:
    packages = [importlib.import_module(f"sklearn.{name}") for name in _PACKAGES.split()]
    listed = named_classes(
        getattr(package, name) for name in sorted(_TRAVELLING_NAMES) for package in packages if name in dir(package)
    )
    return listed | helpers()


_RULES = Rules(_travelling, saved=False, refusal="which may not travel")


def may_travel(estimator: Any) -> bool:
    """Whether an estimator, with all it is made of, holds no training rows, and can be opened safely."""
    return is_boosted(estimator) or all(_is_listed(part) for part in _parts(estimator))


def _is_listed(estimator: Any) -> bool:
    kind = type(estimator)
    # Boosting may start from any other estimator, and categories are values of the data.
    plain = all(isinstance(getattr(estimator, name, None), str | None) for name in ("init", "categorical_features"))
    return kind.__module__.split(".")[0] == "sklearn" and kind.__name__ in _TRAVELLING_NAMES and plain


def _parts(estimator: Any) -> Iterator[Any]:
    yield estimator
    if hasattr(estimator, "get_params"):
        yield from (value for value in estimator.get_params().values() if hasattr(value, "get_params"))


def why_not_to_travel(estimator: Any) -> str:
    """What hinders an estimator from being sent, and what to use instead."""
    hinders = [estimator, *(part for part in _parts(estimator) if not _is_listed(part))][-1]
    name, package = type(hinders).__name__, type(hinders).__module__.split(".")[0]
    otherwise = "use a tree, forest, boosting or linear model, or a protocol in which predictions travel (fedmd)"
    if package in ("lightgbm", "xgboost"):
        return f"{name} travels by itself, or in a MultiOutputRegressor: take it out of {type(estimator).__name__}."
    if package != "sklearn":
        return f"{name} is a class of your own, which others do not have: {otherwise}."
    if name in _TRAVELLING_NAMES:
        return f"Some options of {name} (init, categorical_features) hold more than plain parameters: unset them."
    if hinders is not estimator and not hasattr(hinders, "predict"):
        steps = "StandardScaler, MinMaxScaler, MaxAbsScaler, RobustScaler, Normalizer, PCA"
        return f"Of the steps of a pipeline {name} does not travel: use {steps}, or transform the data beforehand."
    if type(hinders).__module__.split(".")[1] not in _KEEP_ROWS or name.startswith("Linear"):
        return f"{name} is not among the estimators that travel: {otherwise}."
    return (
        "Models that keep training rows inside (neighbours, support vectors, kernels, class means) must not "
        f"travel: {otherwise}."
    )


def export_estimator(learner: SklearnLearner) -> Message:
    """The fitted estimator in the skops format, equal bytes for equal models; boosting of other libraries as trees."""
    if is_boosted(learner.estimator):
        return _export_boosted(learner)
    data = canonical(dump_estimator(learner.estimator))
    return Message({"model": np.frombuffer(data, dtype=np.uint8)}, {"kind": "skops", "classes": learner.columns})


def _export_boosted(learner: SklearnLearner) -> Message:
    labels = learner.seen_classes if learner.classifies else np.arange(learner.columns)
    if learner.classifies and len(labels) == 1:
        return export_constant(ConstantModel(np.eye(learner.columns, dtype=np.float32)[labels[0]]))
    return as_trees(learner.estimator, labels.tolist(), learner.columns).message()


def open_estimator(
    message: Message, shape: tuple[int, ...], classes: int
) -> tuple[SklearnLearner, Callable[[int], Cost]]:
    """The estimator in a message, and what its predictions take; anything unsound raises, in whatever way."""
    from codistill.learners.sklearn import SklearnLearner

    if message.plain.get("classes") != classes:
        raise ValueError(f"a model for {message.plain.get('classes')} classes")
    with warnings.catch_warnings():
        warnings.simplefilter("error", InconsistentVersionWarning)
        estimator = read_estimator(message.arrays["model"].tobytes(), _RULES, classes)
    if is_boosted(estimator) or not may_travel(estimator):
        raise ValueError(f"a {type(estimator).__name__}, which is not on the list of models that may travel")
    features = math.prod(shape)
    if getattr(estimator, "n_features_in_", features) != features:
        raise ValueError(f"a model for {estimator.n_features_in_} features")
    check_structure(estimator, classes, travelling=True)
    learner = SklearnLearner(estimator)
    learner._columns = classes
    learner.block, cost = estimator_cost(estimator, features)
    return learner, cost
