"""Boosted trees of other libraries that travel: as plain arrays, checked, and evaluated by numpy alone.

A message of kind `trees` holds all nodes of all trees one after another. A node sends a sample to its left child if
its feature is at most the threshold, to the right one otherwise, and to the side `missing_left` says if the feature is
missing. Children stand after their parent, in the same tree, and every node but the first has one parent: every walk
ends. No library but numpy reads what arrives.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from scipy.special import expit, softmax

from codistill.learners.portable.model_limits import BLOCK, Cost
from codistill.message import Message

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
        """Rows to predict at a time."""
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
        """The trees as a message."""
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


def open_trees(message: Message, shape: tuple[int, ...], classes: int) -> tuple[TreeEnsemble, Callable[[int], Cost]]:
    """The trees in a message, and what their predictions take; anything unsound raises."""
    if message.plain["classes"] != classes:
        raise ValueError(f"trees for {message.plain['classes']} classes"[:100])
    start, labels = _numbers(message, "start", float), _numbers(message, "labels", int)
    link, single = message.plain["link"], message.plain["single_precision"]
    if not isinstance(link, str) or link not in _LINKS or not isinstance(single, bool):
        raise ValueError(f"trees with the link {link!r}"[:100])
    _check_outputs(start, labels, link, classes)
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
    ensemble = TreeEnsemble(
        np.frombuffer(nodes.tobytes(), dtype=NODE),
        roots.astype(np.int64),
        outputs,
        start,
        link,
        labels,
        classes,
        single,
    )
    steps, depth = _check_nodes(ensemble.nodes, ensemble.roots, features)

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


def _check_outputs(start: tuple[float, ...], labels: tuple[int, ...], link: str, classes: int) -> None:
    if not start or not all(map(math.isfinite, start)):
        raise ValueError("trees that start from nothing, or from NaN or infinity")
    if len(set(labels)) != len(labels) or not set(labels) <= set(range(classes)):
        raise ValueError("trees of classes that do not exist, or of one class twice")
    one_of_two = link == "logistic" and (len(start), len(labels)) == (1, 2)
    if len(start) != len(labels) and not one_of_two:
        raise ValueError(f"trees with {len(start)} outputs for {len(labels)} classes")


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
