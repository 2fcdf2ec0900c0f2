"""Checks of the structure of a received scikit-learn model before it is used.

Compiled code follows the indices of trees without bounds checks, so each of them is checked here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from sklearn.ensemble import (
    ExtraTreesClassifier,
    ExtraTreesRegressor,
    GradientBoostingClassifier,
    GradientBoostingRegressor,
    HistGradientBoostingClassifier,
    HistGradientBoostingRegressor,
    RandomForestClassifier,
    RandomForestRegressor,
)
from sklearn.tree import BaseDecisionTree

# Parts of listed estimators that are no estimators to choose.
HELPERS = {"LabelBinarizer", "LabelEncoder", "DummyClassifier", "DummyRegressor", "TreePredictor", "_BinMapper"}

_FORESTS = (RandomForestClassifier, RandomForestRegressor, ExtraTreesClassifier, ExtraTreesRegressor)
_BOOSTING = (GradientBoostingClassifier, GradientBoostingRegressor)
_HIST_BOOSTING = (HistGradientBoostingClassifier, HistGradientBoostingRegressor)


def check_structure(model: Any, classes: int) -> None:
    """Raise ValueError unless every index and count in a model is valid; set it to one thread, and silent."""
    for part in inside(model):
        own = vars(part)
        if "n_jobs" in own:
            part.n_jobs = None
        if "verbose" in own:
            part.verbose = 0  # it would write to the receiver's log
        for name in ("n_classes_", "n_outputs_", "n_trees_per_iteration_"):
            counts = np.asarray(own.get(name, 1))
            if counts.dtype.kind not in "iu" or counts.min() < 1 or counts.max() > classes:
                raise ValueError(f"{name} = {own[name]!r}"[:100])
        if isinstance(part, BaseDecisionTree) and "tree_" in own:
            _check_tree(part.tree_, _features(part), classes)
        elif isinstance(part, _FORESTS) and "estimators_" in own:
            _check_same_features(part, part.estimators_)
        elif isinstance(part, _BOOSTING) and "estimators_" in own:
            _check_boosting(part)
        elif isinstance(part, _HIST_BOOSTING) and "_predictors" in own:
            _check_hist_boosting(part)


def inside(model: Any) -> Iterator[Any]:
    """Everything of scikit-learn that a model is made of."""
    stack = [model]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            stack.extend(item.values())
        elif isinstance(item, list | tuple):
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


def _check_tree(tree: Any, features: int, classes: int) -> None:
    if not 1 <= tree.node_count == tree.capacity or tree.n_features != features:
        raise ValueError("a tree of the wrong size")
    if tree.max_n_classes > classes:
        raise ValueError(f"a tree of {tree.max_n_classes} classes")
    _check_nodes(tree.children_left, tree.children_right, tree.feature, tree.children_left == -1, features)


def _check_boosting(model: Any) -> None:
    trees = model.estimators_
    if not isinstance(trees, np.ndarray) or trees.ndim != 2 or trees.shape[1] != model.n_trees_per_iteration_:
        raise ValueError("boosting with a wrong number of trees")
    _check_same_features(model, trees.flat)
    if model.init_ != "zero" and type(model.init_).__name__ not in HELPERS:
        raise ValueError("boosting from an unknown start")
    start = model._raw_predict_init(np.zeros((1, _features(model)), dtype=np.float32))
    if start.shape != (1, trees.shape[1]):
        raise ValueError("boosting from a start of the wrong shape")


def _check_hist_boosting(model: Any) -> None:
    features = _features(model)
    if model._preprocessor is not None or vars(model).get("_in_fit", False) is not False:
        raise ValueError("boosting with categories, or in the middle of a fit")
    for tree in inside(model._predictors):
        nodes = tree.nodes
        if nodes.ndim != 1 or len(nodes) == 0 or nodes["is_categorical"].any():
            raise ValueError("a tree without nodes, or with categories")
        left, right = nodes["left"].astype(np.int64), nodes["right"].astype(np.int64)
        _check_nodes(left, right, nodes["feature_idx"], nodes["is_leaf"].astype(bool), features)


def _check_nodes(left: np.ndarray, right: np.ndarray, feature: np.ndarray, leaf: np.ndarray, features: int) -> None:
    own = np.arange(len(left))[~leaf]
    for child in (left[~leaf], right[~leaf]):
        # Children stand after their parent, so every walk ends.
        if not ((child > own) & (child < len(left))).all():
            raise ValueError("a tree whose nodes point outside of it")
    if not ((feature[~leaf] >= 0) & (feature[~leaf] < features)).all():
        raise ValueError("a tree that splits on features that do not exist")
