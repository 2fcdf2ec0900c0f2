"""scikit-learn models that travel: in the skops format, and only types that hold no training rows.

What arrives is checked before it is built (types, sizes, arrays of compiled parts: `archive_reading`) and before it is
used (whether its parts fit one another: `check_structure`). skops itself only writes.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from sklearn.base import BaseEstimator
from sklearn.compose import ColumnTransformer
from sklearn.ensemble._forest import BaseForest
from sklearn.ensemble._gb import BaseGradientBoosting
from sklearn.ensemble._hist_gradient_boosting.gradient_boosting import BaseHistGradientBoosting
from sklearn.exceptions import InconsistentVersionWarning
from sklearn.tree import BaseDecisionTree

from codistill.learners.portable.archive_reading import LOSSES, Rules, check_nodes, listed_classes, read_estimator
from codistill.learners.portable.models import BLOCK, Cost, CostOfRows, export_constant
from codistill.learners.portable.skops_archive import canonical, dump_estimator
from codistill.learners.portable.trees import as_trees, is_boosted
from codistill.wire.message import Message

if TYPE_CHECKING:
    from codistill.learners.sklearn import SklearnLearner

# Estimators that may be sent: what they hold after `fit` are parameters and thresholds, no rows. (Naive
# Bayes and discriminant analysis hold class means: the row itself, where a class has one sample.)
_LISTED = """
DecisionTreeClassifier DecisionTreeRegressor ExtraTreeClassifier ExtraTreeRegressor
RandomForestClassifier RandomForestRegressor ExtraTreesClassifier ExtraTreesRegressor
GradientBoostingClassifier GradientBoostingRegressor
HistGradientBoostingClassifier HistGradientBoostingRegressor
AdaBoostClassifier BaggingClassifier BaggingRegressor
LogisticRegression LinearRegression Ridge RidgeClassifier Lasso ElasticNet SGDClassifier Perceptron
LinearSVC MLPClassifier MLPRegressor MultiOutputRegressor
Pipeline StandardScaler MinMaxScaler MaxAbsScaler RobustScaler Normalizer PCA
"""
TRAVELLING = frozenset(_LISTED.split())

# Where scikit-learn has estimators that hold training rows, or means of them.
_KEEP_ROWS = frozenset({"neighbors", "svm", "kernel_ridge", "gaussian_process", "naive_bayes", "discriminant_analysis"})

# Parts of listed estimators that are no estimators to choose.
HELPERS = {
    "sklearn.preprocessing._label": "LabelBinarizer LabelEncoder",
    "sklearn.dummy": "DummyClassifier DummyRegressor",
    "sklearn.ensemble._hist_gradient_boosting.binning": "_BinMapper",
    "sklearn._loss.link": "HalfLogitLink IdentityLink Interval LogitLink LogLink MultinomialLogit",
    "sklearn._loss.loss": LOSSES,
}
_PACKAGES = "decomposition ensemble linear_model multioutput neural_network pipeline preprocessing svm tree"


@functools.cache
def _travelling() -> dict[str, type]:
    listed = dict.fromkeys((f"sklearn.{name}" for name in _PACKAGES.split()), _LISTED)
    return listed_classes(listed) | listed_classes(HELPERS)


_RULES = Rules(_travelling, saved=False)


def may_travel(estimator: Any) -> bool:
    """Whether an estimator, with all it is made of, holds no training rows, and can be opened safely."""
    return is_boosted(estimator) or all(_is_listed(part) for part in _parts(estimator))


def _is_listed(estimator: Any) -> bool:
    kind = type(estimator)
    # Boosting may start from any other estimator, and categories are values of the data.
    plain = all(isinstance(getattr(estimator, name, None), str | None) for name in ("init", "categorical_features"))
    return kind.__module__.split(".")[0] == "sklearn" and kind.__name__ in TRAVELLING and plain


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
    if name in TRAVELLING:
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
    if not is_boosted(learner.estimator):
        data = canonical(dump_estimator(learner.estimator))
        return Message({"model": np.frombuffer(data, dtype=np.uint8)}, {"kind": "skops", "classes": learner.columns})
    labels = learner.seen_classes if learner.classifies else np.arange(learner.columns)
    if learner.classifies and len(labels) == 1:
        return export_constant(np.eye(learner.columns, dtype=np.float32)[labels[0]])
    return as_trees(learner.estimator, labels.tolist(), learner.columns).message()


def open_estimator(message: Message, shape: tuple[int, ...], classes: int) -> tuple[SklearnLearner, CostOfRows]:
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
    learner.columns = classes
    learner.block, cost = estimator_cost(estimator, features)
    return learner, cost


# --- What the predictions of a received scikit-learn model compute and hold.

_WIDTH = 1 << 16  # numbers that a part may have for a row: features, hidden units, components
_CALL, _STEP, _NUMBER = 1_000_000, 100, 10  # operations: per call of a part, per node on a path, per parameter


def estimator_cost(model: Any, features: int) -> tuple[int, CostOfRows]:
    """The rows to predict at a time, and what predictions for some rows take; ValueError where a part is too wide.

    A row takes every parameter once, and at most every other node of a tree.
    """
    parts = list(inside(model))
    arrays = [array for part in parts if type(part).__name__ != "TreePredictor" for array in _arrays(vars(part))]
    width = max([features, *(max(shape) for shape in arrays)])
    if width > max(_WIDTH, features):
        raise ValueError(f"a model of {width} numbers for each row, above the limit of {max(_WIDTH, features)}")
    nodes = sum(_nodes(part) for part in parts)
    each = sum(map(math.prod, arrays)) * _NUMBER + nodes // 2 * _STEP
    block = max(1, BLOCK // width)
    called = sum(isinstance(part, BaseEstimator) for part in parts)

    def cost(rows: int) -> Cost:
        return Cost(rows, rows * each + math.ceil(rows / block) * called * _CALL, 8 * min(rows, block) * width)

    return block, cost


def _arrays(item: Any) -> Iterator[tuple[int, ...]]:
    """Shapes of the arrays of a part, and of lists of numbers in the place of arrays."""
    if isinstance(item, np.ndarray) and item.dtype != object and item.ndim:
        yield item.shape
    elif isinstance(item, dict):
        for value in item.values():
            yield from _arrays(value)
    elif isinstance(item, list | tuple):
        if item and isinstance(item[0], int | float | np.number):
            yield (len(item),)
        else:
            for value in item:
                yield from _arrays(value)


def _nodes(part: Any) -> int:
    tree = vars(part).get("tree_")
    if tree is not None:
        return int(tree.node_count)
    return len(part.nodes) if type(part).__name__ == "TreePredictor" else 0


# --- Whether the parts of a model of scikit-learn fit one another: checked before it is used for the first time.

_STARTS = {"DummyClassifier", "DummyRegressor"}
_KERNELS = ("linear", "poly", "rbf", "sigmoid")


def check_structure(model: Any, classes: int, travelling: bool) -> None:
    """Raise ValueError unless every index and count in a model is valid; set it to one thread, and silent.

    A `travelling` model holds less than a saved one: no categories, and boosting starts from constants.
    """
    parts = list(inside(model))
    for part in parts:
        own = vars(part)
        if "n_jobs" in own:
            part.n_jobs = None
        if "verbose" in own:
            part.verbose = 0  # it would write to the receiver's log
        for name in {"n_threads", "_n_threads"} & own.keys():
            setattr(part, name, 1)
        for name in ("n_classes_", "n_outputs_", "n_trees_per_iteration_"):
            counts = np.asarray(own.get(name, 1))
            if counts.dtype.kind not in "iu" or counts.min() < 1 or counts.max() > classes:
                raise ValueError(f"{name} = {own[name]!r}"[:100])
        if isinstance(part, BaseDecisionTree) and "tree_" in own:
            if getattr(part.tree_, "n_features", None) != _features(part):
                raise ValueError("a tree of the wrong size")
        elif isinstance(part, BaseForest) and "estimators_" in own:
            _check_same_features(part, part.estimators_)
        elif not travelling:
            _check_others(part, own)
    # These run what they hold inside, which has been checked by now: the innermost first.
    for part in reversed(parts):
        if isinstance(part, BaseGradientBoosting) and "estimators_" in vars(part):
            _check_boosting(part, travelling)
        elif isinstance(part, BaseHistGradientBoosting) and "_predictors" in vars(part):
            _check_hist_boosting(part, travelling)


def inside(model: Any) -> Iterator[Any]:
    """Everything of scikit-learn that a model is made of."""
    stack = [model]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            stack.extend(item.values())
        elif isinstance(item, list | tuple | set):
            stack.extend(item)
        elif isinstance(item, np.ndarray) and item.dtype == object:
            stack.extend(item.flat)
        elif type(item).__module__.startswith("sklearn.") and hasattr(item, "__dict__"):
            yield item
            stack.extend(vars(item).values())


def _features(part: Any) -> int:
    """The number of features that scikit-learn checks samples for, before compiled code reads them."""
    features = vars(part)["n_features_in_"]
    if type(features) is not int:
        raise ValueError("a model without a number of features")
    return features


def _check_same_features(ensemble: Any, trees: Any) -> None:
    for tree in trees:
        if not isinstance(tree, BaseDecisionTree) or _features(tree) != _features(ensemble):
            raise ValueError("trees for other features than those of their ensemble")


def _check_boosting(model: Any, travelling: bool) -> None:
    trees = model.estimators_
    if not isinstance(trees, np.ndarray) or trees.ndim != 2 or trees.shape[1] != model.n_trees_per_iteration_:
        raise ValueError("boosting with a wrong number of trees")
    _check_same_features(model, trees.flat)
    if travelling and model.init_ != "zero" and type(model.init_).__name__ not in _STARTS:
        raise ValueError("boosting from an unknown start")
    start = model._raw_predict_init(np.zeros((1, _features(model)), dtype=np.float32))
    if start.shape != (1, trees.shape[1]):
        raise ValueError("boosting from a start of the wrong shape")


def _check_hist_boosting(model: Any, travelling: bool) -> None:
    features, before = _features(model), model._preprocessor
    if vars(model).get("_in_fit", False) is not False or (travelling and before is not None):
        raise ValueError("boosting with categories, or in the middle of a fit")
    if before is not None:
        if type(before) is not ColumnTransformer:
            raise ValueError("boosting after an unknown step")
        if before.transform(np.zeros((2, features))).shape != (2, features):
            raise ValueError("boosting after a step that changes the number of features")
    categories = np.asarray(model._bin_mapper.is_categorical_)
    if categories.shape != (features,) or categories.dtype.kind not in "bu":
        raise ValueError("boosting for other features than it was fitted to")
    for tree in inside(model._predictors):
        nodes = tree.nodes
        chosen = nodes[nodes["is_categorical"] != 0]
        if travelling and len(chosen):
            raise ValueError("a tree without nodes, or with categories")
        left, right = nodes["left"].astype(np.int64), nodes["right"].astype(np.int64)
        check_nodes(left, right, nodes["feature_idx"], nodes["is_leaf"].astype(bool), features=features)
        split = chosen[chosen["is_leaf"] == 0]
        if len(split) and (
            split["bitset_idx"].max() >= len(tree.raw_left_cat_bitsets) or not categories[split["feature_idx"]].all()
        ):
            raise ValueError("a tree with a set of categories that does not exist")


# --- estimators that are saved, and do not travel ---------------------------------------------------------------


def _check_others(part: Any, own: dict[str, Any]) -> None:
    from sklearn.neighbors._base import NeighborsBase
    from sklearn.preprocessing import OneHotEncoder
    from sklearn.svm._base import BaseLibSVM

    if isinstance(part, BaseLibSVM) and "support_" in own:
        _check_support_vectors(part)
    elif isinstance(part, NeighborsBase) and "_fit_X" in own:
        _check_neighbours(part, own)
    elif isinstance(part, OneHotEncoder) and "categories_" in own:
        _check_one_hot(part)
    elif "cluster_centers_" in own and not _is_matrix(part.cluster_centers_, _features(part)):
        raise ValueError("clusters of other features")


def _is_matrix(array: Any, columns: int) -> bool:
    known = isinstance(array, np.ndarray) and array.ndim == 2 and array.dtype.kind == "f"
    return known and array.shape[1] == columns and len(array) > 0


def _check_support_vectors(part: Any) -> None:
    """libsvm reads as many vectors, coefficients and intercepts as the numbers of vectors per class say."""
    vectors, counts = part.support_vectors_, part._n_support
    if part._sparse is not False or part.kernel not in _KERNELS or not _is_matrix(vectors, _features(part)):
        raise ValueError("support vectors that are sparse, of an unknown kernel, or of other features")
    pairs = len(counts) * (len(counts) - 1) // 2
    wanted: dict[str, tuple[tuple[int, ...], type]] = {
        "support_": ((len(vectors),), np.int32),
        "_n_support": (counts.shape, np.int32),
        "_dual_coef_": ((len(counts) - 1, len(vectors)), np.float64),
        "_intercept_": ((pairs,), np.float64),
    }
    wanted |= {name: ((pairs,), np.float64) for name in ("_probA", "_probB") if np.size(getattr(part, name))}
    for name, (shape, kind) in wanted.items():
        array = getattr(part, name)
        if not isinstance(array, np.ndarray) or array.shape != shape or array.dtype != kind:
            raise ValueError(f"support vectors with {name} of another form")
    if part._impl in ("c_svc", "nu_svc"):
        if len(counts) < 2 or counts.min() < 0 or counts.sum() != len(vectors) or len(part.classes_) != len(counts):
            raise ValueError("support vectors of other classes than they say")
    elif len(counts) != 2:
        raise ValueError("support vectors of classes, in a regression")


def _check_neighbours(part: Any, own: dict[str, Any]) -> None:
    """Votes are counted by label, in as many columns as there are classes."""
    points, tree = part._fit_X, own.get("_tree")
    if not _is_matrix(points, _features(part)) or own.get("n_samples_fit_") != len(points):
        raise ValueError("neighbours of other features, or of another number")
    if tree is not None and np.shape(tree.data) != points.shape:
        raise ValueError("a tree of other neighbours")
    if "classes_" not in own or "_y" not in own:
        return
    labels = np.asarray(part._y)
    columns = labels.reshape(len(labels), -1).T
    known = part.classes_ if isinstance(part.classes_, list) else [part.classes_]
    if labels.dtype.kind not in "iu" or len(labels) != len(points) or len(columns) != len(known):
        raise ValueError("neighbours without a label each")
    if any(column.min() < 0 or column.max() >= len(names) for column, names in zip(columns, known, strict=True)):
        raise ValueError("neighbours of classes that do not exist")


def _check_one_hot(part: Any) -> None:
    """The places of the ones are written into a sparse matrix as wide as the encoder says."""
    names, count = part.categories_, _features(part)
    if len(names) != count or any(not isinstance(each, np.ndarray) or each.ndim != 1 for each in names):
        raise ValueError("categories that are no lists, or of other features")
    numbers = [each for each in names if each.dtype.kind in "biuf"]
    if not all(np.array_equal(each, np.unique(each), equal_nan=each.dtype.kind == "f") for each in numbers):
        raise ValueError("categories that are not in order")  # they are searched
    widths = [len(each) for each in names]
    if part._infrequent_enabled:
        for i, (rare, places) in enumerate(
            zip(part._infrequent_indices, part._default_to_infrequent_mappings, strict=True)
        ):
            if places is None and rare is None:
                continue
            grouped = widths[i] - rare.size + 1  # rare categories share one column
            sound = isinstance(places, np.ndarray) and places.shape == (widths[i],) and places.dtype.kind in "iu"
            if not sound or not widths[i] or places.min() < 0 or places.max() >= grouped:
                raise ValueError("rare categories outside of their columns")
            widths[i] = grouped
    drops = [None] * count if part._drop_idx_after_grouping is None else list(part._drop_idx_after_grouping)
    if len(drops) != count or not all(
        drop is None or 0 <= int(drop) < most for drop, most in zip(drops, widths, strict=True)
    ):
        raise ValueError("categories that are left out and do not exist")
    widths = [most - (drop is not None) for drop, most in zip(drops, widths, strict=True)]
    if type(part._n_features_outs) is not list or part._n_features_outs != widths:
        raise ValueError("categories that fill other columns than they say")
