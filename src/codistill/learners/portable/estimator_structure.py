"""Whether the parts of a model of scikit-learn fit one another: checked before it is used for the first time.

Compiled code reads as many columns, rows and labels as another part says, without bounds checks. That each tree is
sound by itself, `archive_reading` has checked before it was built.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from sklearn.compose import ColumnTransformer
from sklearn.ensemble import (
    GradientBoostingClassifier,
    GradientBoostingRegressor,
    HistGradientBoostingClassifier,
    HistGradientBoostingRegressor,
)
from sklearn.ensemble._forest import BaseForest
from sklearn.tree import BaseDecisionTree

from codistill.learners.portable.archive_reading import check_nodes

_BOOSTING = (GradientBoostingClassifier, GradientBoostingRegressor)
_HIST_BOOSTING = (HistGradientBoostingClassifier, HistGradientBoostingRegressor)
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
            _check_tree(part)
        elif isinstance(part, BaseForest) and "estimators_" in own:
            _check_same_features(part, part.estimators_)
        elif not travelling:
            _check_others(part, own)
    # These run what they hold inside, which has been checked by now: the innermost first.
    for part in reversed(parts):
        if isinstance(part, _BOOSTING) and "estimators_" in vars(part):
            _check_boosting(part, travelling)
        elif isinstance(part, _HIST_BOOSTING) and "_predictors" in vars(part):
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


def _check_tree(part: BaseDecisionTree) -> None:
    if getattr(part.tree_, "n_features", None) != _features(part):
        raise ValueError("a tree of the wrong size")


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
    elif "cluster_centers_" in own and not _is_matrix(part.cluster_centers_, None, _features(part)):
        raise ValueError("clusters of other features")


def _is_matrix(array: Any, rows: int | None, columns: int) -> bool:
    known = isinstance(array, np.ndarray) and array.ndim == 2 and array.dtype.kind == "f"
    return known and len(array) in (rows or len(array),) and array.shape[1] == columns and len(array) > 0


def _check_support_vectors(part: Any) -> None:
    """libsvm reads as many vectors, coefficients and intercepts as the numbers of vectors per class say."""
    vectors, counts = part.support_vectors_, part._n_support
    if part._sparse is not False or part.kernel not in _KERNELS or not _is_matrix(vectors, None, _features(part)):
        raise ValueError("support vectors that are sparse, of an unknown kernel, or of other features")
    wanted: dict[str, tuple[tuple[int, ...], type]] = {
        "support_": ((len(vectors),), np.int32),
        "_n_support": (counts.shape, np.int32),
    }
    pairs = len(counts) * (len(counts) - 1) // 2
    wanted |= {"_dual_coef_": ((len(counts) - 1, len(vectors)), np.float64), "_intercept_": ((pairs,), np.float64)}
    for name in ("_probA", "_probB"):
        if np.size(getattr(part, name)):
            wanted[name] = ((pairs,), np.float64)
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
    if not _is_matrix(points, None, _features(part)) or own.get("n_samples_fit_") != len(points):
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
            grouped = widths[i] - rare.size + 1
            _check_places(places, widths[i], grouped)
            widths[i] = grouped
    drops = [None] * count if part._drop_idx_after_grouping is None else list(part._drop_idx_after_grouping)
    if len(drops) != count or not all(
        drop is None or 0 <= int(drop) < most for drop, most in zip(drops, widths, strict=True)
    ):
        raise ValueError("categories that are left out and do not exist")
    widths = [most - (drop is not None) for drop, most in zip(drops, widths, strict=True)]
    if type(part._n_features_outs) is not list or part._n_features_outs != widths:
        raise ValueError("categories that fill other columns than they say")


def _check_places(places: Any, count: int, most: int) -> None:
    """Rare categories share one column."""
    sound = isinstance(places, np.ndarray) and places.shape == (count,) and places.dtype.kind in "iu" and count
    if not sound or places.min() < 0 or places.max() >= most:
        raise ValueError("rare categories outside of their columns")
