"""XGBoost and LightGBM models as trees that travel: read from their own JSON and text form, at the sender.

Neither form is sent: LightGBM's holds the smallest and largest value of every feature, which is the owner's data.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from sklearn.multioutput import MultiOutputRegressor

from codistill.errors import LearnerError
from codistill.learners.portable.tree_ensemble import LEAF, NODE, TreeEnsemble

_TYPES = {
    ("lightgbm", "LGBMClassifier"),
    ("lightgbm", "LGBMRegressor"),
    ("xgboost", "XGBClassifier"),
    ("xgboost", "XGBRegressor"),
    ("xgboost", "XGBRFClassifier"),
    ("xgboost", "XGBRFRegressor"),
}
_LINKS = {
    **dict.fromkeys(("binary", "multiclassova", "cross_entropy", "binary:logistic", "reg:logistic"), "logistic"),
    **dict.fromkeys(("multiclass", "multi:softprob", "multi:softmax"), "softmax"),
    **dict.fromkeys(("regression", "regression_l1", "huber", "fair", "quantile", "mape"), "identity"),
    **dict.fromkeys(("reg:squarederror", "reg:absoluteerror", "reg:pseudohubererror", "reg:quantileerror"), "identity"),
    **dict.fromkeys(("poisson", "gamma", "tweedie", "count:poisson", "reg:gamma", "reg:tweedie"), "exponential"),
}


def is_boosted(estimator: Any) -> bool:
    """Whether an estimator is one of XGBoost or LightGBM, itself or once per output; not a sub-class of one's own."""
    if type(estimator) is MultiOutputRegressor:
        return is_boosted(estimator.estimator) and not hasattr(estimator.estimator, "predict_proba")
    return (type(estimator).__module__.split(".")[0], type(estimator).__name__) in _TYPES


def as_trees(estimator: Any, labels: Sequence[int], classes: int) -> TreeEnsemble:
    """The trees of a fitted estimator, for these classes or outputs; a `LearnerError` where trees do not say it all."""
    if type(estimator) is MultiOutputRegressor:
        return _side_by_side([as_trees(each, [0], 1) for each in estimator.estimators_], classes)
    try:
        library = type(estimator).__module__.split(".")[0]
        trees, outputs, start, link, single = (_xgboost if library == "xgboost" else _lightgbm)(estimator)
    except _NotTrees as error:
        raise LearnerError(
            "travels as plain trees: numerical splits, one value per leaf, a known objective.",
            str(error),
            "Change that option, or choose a protocol in which predictions are exchanged instead of models.",
        ) from None
    roots = np.cumsum([0, *(len(tree) for tree in trees[:-1])])
    for root, tree in zip(roots, trees, strict=True):
        for side in ("left", "right"):
            tree[side] += np.where(tree["feature"] != LEAF, root, 0).astype(np.int32)
    nodes = np.concatenate(trees)
    return TreeEnsemble(nodes, roots, np.asarray(outputs), tuple(start), link, tuple(labels), classes, single)


class _NotTrees(ValueError):
    """What a model has that plain trees do not."""


_Parts = tuple[list[np.ndarray], list[int], list[float], str, bool]


def _side_by_side(parts: list[TreeEnsemble], classes: int) -> TreeEnsemble:
    """Models of one output each as one model."""
    first, shift, nodes, roots = parts[0], 0, [], []
    for part in parts:
        own, inside = part.nodes.copy(), part.nodes["feature"] != LEAF
        own["left"][inside] += shift
        own["right"][inside] += shift
        nodes.append(own)
        roots.append(part.roots + shift)
        shift += len(own)
    outputs = np.repeat(np.arange(len(parts)), [len(part.roots) for part in parts])
    start = tuple(part.start[0] for part in parts)
    return TreeEnsemble(
        np.concatenate(nodes),
        np.concatenate(roots),
        outputs,
        start,
        first.link,
        tuple(range(len(parts))),
        classes,
        first.single_precision,
    )


def _nodes(
    feature: Any, threshold: Any, left: Any, right: Any, missing_left: Any, value: Any, leaves: np.ndarray
) -> np.ndarray:
    """One tree, its nodes from the root downwards and from left to right, so that children stand after parents."""
    level, order = [0], [0]
    left, right = np.asarray(left), np.asarray(right)
    while level:
        level = [int(child) for node in level if not leaves[node] for child in (left[node], right[node])]
        order += level
    place = np.zeros(len(leaves), dtype=np.int32)
    place[order] = np.arange(len(order))
    tree = np.zeros(len(order), dtype=NODE)
    inside = ~leaves[order]
    tree["feature"] = np.where(inside, np.asarray(feature)[order], LEAF)
    for name, given in (("threshold", threshold), ("missing_left", missing_left)):
        tree[name] = np.where(inside, np.asarray(given)[order], 0)
    tree["left"], tree["right"] = (np.where(inside, place[side[order]], 0) for side in (left, right))
    tree["value"] = np.where(inside, 0, np.asarray(value)[order])
    return tree


# --- XGBoost --------------------------------------------------------------------------------------


def _xgboost(estimator: Any) -> _Parts:
    if not math.isnan(estimator.missing):
        raise _NotTrees(f"missing = {estimator.missing}")
    learner = json.loads(bytes(estimator.get_booster().save_raw("json")))["learner"]
    booster, objective = learner["gradient_booster"], learner["objective"]["name"]
    if booster["name"] != "gbtree":
        raise _NotTrees(f"booster = '{booster['name']}'")
    link = _link(objective)
    model, shared = booster["model"], learner["learner_model_param"]
    outputs = max(int(shared["num_class"]), int(shared.get("num_target", 1)), 1)
    start = [float(number) for number in shared["base_score"].strip("[]").split(",")]
    start = [_margin(number, link) for number in (start * outputs if len(start) == 1 else start)]
    used = len(model["trees"])
    if "best_iteration" in learner["attributes"]:  # what predict uses after early stopping
        per_round = outputs * int(model["gbtree_model_param"]["num_parallel_tree"])
        used = min(used, per_round * (int(learner["attributes"]["best_iteration"]) + 1))
    trees = [_xgboost_tree(tree) for tree in model["trees"][:used]]
    return trees, list(model["tree_info"][:used]), start, link, True


def _margin(base: float, link: str) -> float:
    """The start of the sum whose link gives `base`; softmax and identity keep it as a sum."""
    if link == "logistic":
        return math.log(base / (1 - base)) if 0 < base < 1 else math.copysign(50.0, base - 0.5)
    return math.log(base) if link == "exponential" else base


def _xgboost_tree(tree: dict[str, Any]) -> np.ndarray:
    if int(tree["tree_param"].get("size_leaf_vector", "1")) > 1:
        raise _NotTrees("multi_strategy = 'multi_output_tree'")
    if any(tree.get("split_type", ())):
        raise _NotTrees("splits on categories")
    condition = np.asarray(tree["split_conditions"], dtype=np.float32)
    left = np.asarray(tree["left_children"])
    # x < t of 32-bit numbers is x <= the number before t.
    before = np.nextafter(condition, np.float32(-np.inf))
    return _nodes(
        tree["split_indices"], before, left, tree["right_children"], tree["default_left"], condition, left == -1
    )


def _link(objective: str) -> str:
    if objective not in _LINKS:
        raise _NotTrees(f"objective = '{objective}'")
    return _LINKS[objective]


# --- LightGBM -------------------------------------------------------------------------------------


def _lightgbm(estimator: Any) -> _Parts:
    head, *blocks = estimator.booster_.model_to_string().partition("end of trees")[0].split("\nTree=")
    about = dict(_lines(head))
    if "objective" not in about:
        raise _NotTrees("an objective of one's own")
    objective, *options = about["objective"].split()
    link = _link(objective)
    other = [option for option in options if not option.startswith(("num_class:", "sigmoid:"))]
    if other:
        raise _NotTrees(f"objective = '{about['objective']}'")
    scale = next((float(option.partition(":")[2]) for option in options if option.startswith("sigmoid:")), 1.0)
    outputs = int(about["num_tree_per_iteration"])
    if "average_output" in about:  # a forest: the mean in the place of the sum
        scale /= max(len(blocks) // outputs, 1)
    trees = [_lightgbm_tree(dict(_lines(block))) for block in blocks]
    for tree in trees:
        tree["value"] *= scale
    if not trees:
        raise _NotTrees("no trees")
    return trees, [number % outputs for number in range(len(trees))], [0.0] * outputs, link, False


def _lines(text: str) -> Iterator[tuple[str, str]]:
    yield from (line.partition("=")[::2] for line in text.splitlines())


def _lightgbm_tree(tree: dict[str, str]) -> np.ndarray:
    leaves = int(tree["num_leaves"])
    if int(tree["num_cat"]):
        raise _NotTrees("splits on categories")
    if int(tree.get("is_linear", "0")):
        raise _NotTrees("linear_tree = True")
    value = [float(number) for number in tree["leaf_value"].split()]
    if leaves == 1:
        return _nodes([LEAF], [0], [0], [0], [0], value, np.array([True]))
    feature, kind, left, right = (
        np.array(tree[name].split(), dtype=np.int64)
        for name in ("split_feature", "decision_type", "left_child", "right_child")
    )
    threshold = np.array(tree["threshold"].split(), dtype=np.float64)
    # Bits of a decision: 1 category, 2 missing goes left, 4 and 8 what is missing: 0 nothing, 1 zeros, 2 NaN.
    missing = kind >> 2 & 3
    if (missing == 1).any():
        raise _NotTrees("zero_as_missing = True")
    # Where nothing is missing, LightGBM takes NaN for zero.
    missing_left = np.where(missing == 2, kind & 2 > 0, threshold >= 0)
    splits = leaves - 1

    def padded(numbers: np.ndarray) -> np.ndarray:
        return np.concatenate([numbers, np.zeros(leaves, dtype=numbers.dtype)])

    # Leaf k is the child -1 - k: it stands after the splits here.
    left, right = (np.where(side < 0, splits - 1 - side, side) for side in (left, right))
    return _nodes(
        padded(feature),
        padded(np.clip(threshold, -1.7e308, 1.7e308)),
        padded(left),
        padded(right),
        padded(missing_left),
        np.concatenate([np.zeros(splits), value]),
        np.arange(splits + leaves) >= splits,
    )
