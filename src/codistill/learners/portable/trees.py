"""Boosted trees of other libraries that travel: as plain arrays, checked, and evaluated by numpy alone.

A message of kind `trees` holds all nodes of all trees one after another. A node sends a sample to its left child if
its feature is at most the threshold, to the right one otherwise, and to the side `missing_left` says if the feature is
missing. Children stand after their parent, in the same tree, and every node but the first has one parent: every walk
ends. No library but numpy reads what arrives.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from scipy.special import expit, softmax

from codistill.core.errors import LearnerError
from codistill.learners.portable.models import BLOCK, Cost, CostOfRows
from codistill.wire.message import Message

# Bytes, not numbers, in the message: compression may round numbers, and a rounded threshold is another threshold.
_INDICES = [("feature", "<i4"), ("left", "<i4"), ("right", "<i4"), ("missing_left", "u1")]
NODE = np.dtype([*_INDICES, ("threshold", "<f8"), ("value", "<f8")])
LEAF = -1  # in the place of a feature
_TREES, _NODES, _DEPTH = 100_000, 4_000_000, 1_000  # at most; boosting in use has 1,000 trees of 30 leaves
_CALL, _STEP = 1_000_000, 1_000  # operations: per level and block of rows, per node on a path

# From the sums of the leaves to predictions; the one output of two classes is the probability of the second.
_LINKS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "identity": lambda margins: margins,
    "exponential": np.exp,
    "logistic": expit,
    "softmax": lambda margins: softmax(margins, axis=1),
}


@dataclass(frozen=True)
class TreeEnsemble:
    """Trees whose leaves are added up, per output."""

    nodes: np.ndarray  # of all trees, of dtype NODE
    roots: np.ndarray  # the first node of each tree
    outputs: np.ndarray  # to which output each tree adds
    start: tuple[float, ...]  # the value of each output before the first tree
    link: str
    labels: tuple[int, ...]  # the class of each output, or of both for a single probability
    classes: int
    single_precision: bool  # whether samples are rounded to 32 bits before they are compared

    def predict(self, x: np.ndarray) -> np.ndarray:
        """Class probabilities with a column for every class, or real values."""
        rows = np.asarray(x).reshape(len(x), math.prod(np.shape(x)[1:]))
        if self.single_precision:
            rows = rows.astype(np.float32)
        block = self.block(rows.shape[1])
        parts = [self._predict(rows[i : i + block]) for i in range(0, max(len(rows), 1), block)]
        return np.concatenate(parts)

    def block(self, features: int) -> int:
        return max(1, BLOCK // 8 // max(len(self.roots), features))

    def _predict(self, rows: np.ndarray) -> np.ndarray:
        leaves = np.ascontiguousarray(self.nodes["value"])[self._walk(rows)]
        margins = np.stack(
            [start + leaves[:, self.outputs == output].sum(axis=1) for output, start in enumerate(self.start)], axis=1
        )
        with np.errstate(over="ignore"):
            given = _LINKS[self.link](margins)
        if len(self.labels) > len(self.start):
            given = np.concatenate([1 - given, given], axis=1)
        answer = np.zeros((len(rows), self.classes), dtype=np.float32)
        answer[:, self.labels] = given
        return answer

    def _walk(self, rows: np.ndarray) -> np.ndarray:
        """The leaf of every row in every tree."""
        feature, threshold, left, right, missing_left = self._columns
        at = np.repeat(self.roots, len(rows))  # tree by tree: the nodes of one tree stay in the cache
        inside = np.flatnonzero(feature[at] != LEAF)
        first, flat = np.tile(np.arange(len(rows)) * rows.shape[1], len(self.roots)), rows.ravel()
        while len(inside):
            node = at[inside]
            value = flat[first[inside] + feature[node]]
            goes_left = np.where(np.isnan(value), missing_left[node], value <= threshold[node])
            node = np.where(goes_left, left[node], right[node])
            at[inside] = node
            inside = inside[feature[node] != LEAF]
        return at.reshape(len(self.roots), len(rows)).T

    @cached_property
    def _columns(self) -> tuple[np.ndarray, ...]:
        """Feature, threshold, left, right and missing_left of all nodes, each in one piece of memory."""
        numbers = [self.nodes[name].astype(np.int64) for name in ("feature", "left", "right")]
        threshold = np.ascontiguousarray(self.nodes["threshold"])
        return numbers[0], threshold, numbers[1], numbers[2], self.nodes["missing_left"] == 1

    def message(self) -> Message:
        plain = {
            "kind": "trees",
            "start": list(self.start),
            "link": self.link,
            "labels": list(self.labels),
            "classes": self.classes,
            "single_precision": self.single_precision,
        }
        arrays = {
            "nodes": np.frombuffer(self.nodes.tobytes(), dtype=np.uint8),
            "roots": self.roots.astype(np.int32),
            "outputs": self.outputs.astype(np.int32),
        }
        return Message(arrays, plain)


def open_trees(message: Message, shape: tuple[int, ...], classes: int) -> tuple[TreeEnsemble, CostOfRows]:
    """The trees in a message, and what their predictions take; anything unsound raises."""
    if message.plain["classes"] != classes:
        raise ValueError(f"trees for {message.plain['classes']} classes"[:100])
    start, labels = _numbers(message, "start", float), _numbers(message, "labels", int)
    link, single = message.plain["link"], message.plain["single_precision"]
    if not isinstance(link, str) or link not in _LINKS or not isinstance(single, bool):
        raise ValueError(f"trees with the link {link!r}"[:100])
    if not start or not all(map(math.isfinite, start)):
        raise ValueError("trees that start from nothing, or from NaN or infinity")
    if len(set(labels)) != len(labels) or not set(labels) <= set(range(classes)):
        raise ValueError("trees of classes that do not exist, or of one class twice")
    one_of_two = link == "logistic" and (len(start), len(labels)) == (1, 2)
    if len(start) != len(labels) and not one_of_two:
        raise ValueError(f"trees with {len(start)} outputs for {len(labels)} classes")
    nodes, roots, outputs = (message.arrays[name] for name in ("nodes", "roots", "outputs"))
    if nodes.dtype != np.uint8 or nodes.ndim != 1 or not nodes.size or nodes.size % NODE.itemsize:
        raise ValueError("nodes that are no whole number of nodes")
    if nodes.size // NODE.itemsize > _NODES or len(roots) > _TREES:
        raise ValueError(f"more than {_NODES:,} nodes or {_TREES:,} trees")
    for indices in (roots, outputs):
        if indices.dtype != np.int32 or indices.ndim != 1 or indices.size == 0 or len(indices) != len(roots):
            raise ValueError("trees without a root or an output each")
    if outputs.min() < 0 or outputs.max() >= len(start):
        raise ValueError("trees of an output that does not exist")
    features = math.prod(shape)
    nodes, roots = np.frombuffer(nodes.tobytes(), dtype=NODE), roots.astype(np.int64)
    steps, depth = _check_nodes(nodes, roots, features)
    ensemble = TreeEnsemble(nodes, roots, outputs, start, link, labels, classes, single)

    def cost(rows: int) -> Cost:
        block = ensemble.block(features)
        width = max(len(roots), features)
        calls = math.ceil(rows / block) * (depth + 1)
        return Cost(rows, rows * (steps + len(roots)) * _STEP + calls * _CALL, 64 * min(rows, block) * width)

    return ensemble, cost


def _numbers(message: Message, name: str, kind: type) -> tuple[Any, ...]:
    given = message.plain[name]
    if not isinstance(given, list) or not all(type(number) is kind for number in given):
        raise ValueError(f"'{name}' must be a list of {kind.__name__}")
    return tuple(given)


def _check_nodes(nodes: np.ndarray, roots: np.ndarray, features: int) -> tuple[int, int]:
    """Raise ValueError unless all trees are trees; returns the sum of their depths, and the largest depth."""
    if roots[0] != 0 or not (np.diff(roots) > 0).all() or roots[-1] >= len(nodes):
        raise ValueError("trees whose roots are not in order")
    if not np.isfinite(nodes["threshold"]).all() or not np.isfinite(nodes["value"]).all():
        raise ValueError("NaN or infinity in a tree")
    tree = np.repeat(np.arange(len(roots)), np.diff(roots, append=len(nodes)))
    own = np.flatnonzero(nodes["feature"] != LEAF)
    feature = nodes["feature"][own]
    if not ((feature >= 0) & (feature < features)).all() or nodes["missing_left"].max() > 1:
        raise ValueError("a tree that splits on features that do not exist")
    children = [nodes[side][own].astype(np.int64) for side in ("left", "right")]
    for child in children:
        if not ((child > own) & (child < len(nodes))).all() or (tree[child] != tree[own]).any():
            raise ValueError("a tree whose nodes point outside of it, or back")
    parents = np.bincount(np.concatenate(children), minlength=len(nodes))
    if (parents[roots] != 0).any() or parents.sum() != len(nodes) - len(roots) or parents.max() > 1:
        raise ValueError("a tree with a node that has not one parent")
    steps = depth = 0
    level = roots[nodes["feature"][roots] != LEAF]
    while len(level):
        depth += 1
        if depth > _DEPTH:
            raise ValueError(f"a tree deeper than {_DEPTH}")
        steps += len(np.unique(tree[level]))
        below = np.concatenate([nodes["left"][level], nodes["right"][level]])
        level = below[nodes["feature"][below] != LEAF]
    return steps, depth


# --- XGBoost and LightGBM models as trees that travel: read from their own JSON and text form, at the sender.

_TYPES = {
    "lightgbm": ("LGBMClassifier", "LGBMRegressor"),
    "xgboost": ("XGBClassifier", "XGBRegressor", "XGBRFClassifier", "XGBRFRegressor"),
}
_OBJECTIVES = {
    **dict.fromkeys(("binary", "multiclassova", "cross_entropy", "binary:logistic", "reg:logistic"), "logistic"),
    **dict.fromkeys(("multiclass", "multi:softprob", "multi:softmax"), "softmax"),
    **dict.fromkeys(("regression", "regression_l1", "huber", "fair", "quantile", "mape"), "identity"),
    **dict.fromkeys(("reg:squarederror", "reg:absoluteerror", "reg:pseudohubererror", "reg:quantileerror"), "identity"),
    **dict.fromkeys(("poisson", "gamma", "tweedie", "count:poisson", "reg:gamma", "reg:tweedie"), "exponential"),
}


def is_boosted(estimator: Any) -> bool:
    """Whether an estimator is one of XGBoost or LightGBM, itself or once per output; not a sub-class of one's own."""
    if _is_one_per_output(estimator):
        return is_boosted(estimator.estimator) and not hasattr(estimator.estimator, "predict_proba")
    return type(estimator).__name__ in _TYPES.get(type(estimator).__module__.split(".")[0], ())


def as_trees(estimator: Any, labels: Sequence[int], classes: int) -> TreeEnsemble:
    """The trees of a fitted estimator, for these classes or outputs; a `LearnerError` where trees do not say it all."""
    parts = estimator.estimators_ if _is_one_per_output(estimator) else [estimator]
    library = type(parts[0]).__module__.split(".")[0]
    try:
        read = [(_xgboost if library == "xgboost" else _lightgbm)(part) for part in parts]
    except _NotTrees as error:
        raise LearnerError(
            "travels as plain trees: numerical splits, one value per leaf, a known objective.",
            str(error),
            "Change that option, or choose a protocol in which predictions are exchanged instead of models.",
        ) from None
    trees, outputs, start, link, single = read[0]
    if _is_one_per_output(estimator):  # models of one output each, as one model
        trees = [tree for part in read for tree in part[0]]
        outputs = [number for number, part in enumerate(read) for _ in part[0]]
        start, labels = [part[2][0] for part in read], range(len(read))
    roots = np.cumsum([0, *(len(tree) for tree in trees[:-1])])
    for root, tree in zip(roots, trees, strict=True):
        for side in ("left", "right"):
            tree[side] += np.where(tree["feature"] != LEAF, root, 0).astype(np.int32)
    nodes = np.concatenate(trees)
    return TreeEnsemble(nodes, roots, np.asarray(outputs), tuple(start), link, tuple(labels), classes, single)


class _NotTrees(ValueError):
    """What a model has that plain trees do not."""


_Parts = tuple[list[np.ndarray], list[int], list[float], str, bool]


def _is_one_per_output(estimator: Any) -> bool:
    from sklearn.multioutput import MultiOutputRegressor  # takes a second to import

    return type(estimator) is MultiOutputRegressor


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
    if objective not in _OBJECTIVES:
        raise _NotTrees(f"objective = '{objective}'")
    return _OBJECTIVES[objective]


# --- LightGBM -------------------------------------------------------------------------------------


def _lightgbm(estimator: Any) -> _Parts:
    head, *blocks = estimator.booster_.model_to_string().partition("end of trees")[0].split("\nTree=")
    about = _values(head)
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
    trees = [_lightgbm_tree(_values(block)) for block in blocks]
    for tree in trees:
        tree["value"] *= scale
    if not trees:
        raise _NotTrees("no trees")
    return trees, [number % outputs for number in range(len(trees))], [0.0] * outputs, link, False


def _values(text: str) -> dict[str, str]:
    return dict(line.partition("=")[::2] for line in text.splitlines())


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
    # Leaf k is the child -1 - k: it stands after the splits here.
    left, right = (np.where(side < 0, splits - 1 - side, side) for side in (left, right))
    feature, threshold, left, right, missing_left = (
        np.concatenate([numbers, np.zeros(leaves, dtype=numbers.dtype)])
        for numbers in (feature, np.clip(threshold, -1.7e308, 1.7e308), left, right, missing_left)
    )
    values = np.concatenate([np.zeros(splits), value])
    return _nodes(feature, threshold, left, right, missing_left, values, np.arange(splits + leaves) >= splits)
