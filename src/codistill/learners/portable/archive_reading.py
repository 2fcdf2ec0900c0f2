"""Estimators from an archive in the skops format: read as plain data, checked, and only then built.

Compiled code trusts its arrays: scikit-learn's tree copies as many bytes as a shape says, and follows its indices
without bounds checks. So no library but numpy sees what an archive says before this module has checked it. Objects are
rebuilt from their attributes; no function that an archive names is called on the way. Compiled parts are built here,
each from arrays whose dtype, shape and content are known: trees, losses, neighbours, splines, sparse matrices,
generators. What an estimator does with sound arrays that do not fit one another, `estimators` checks.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from codistill.learners.portable import skops_archive
from codistill.learners.portable.skops_archive import nodes, read_array, read_outline, unzipped

_DEPTH = 400  # of nested nodes; an estimator in an estimator takes four
_PROTOCOL = 2  # of the skops format, the newest that is known here

Node = dict[str, Any]

# Of what any estimator is made, by the node of the skops format that builds it.
_NUMBERS = {kind.__name__: kind for kind in (np.bool_, *(np.dtype(code).type for code in "bhilqBHILQefd"))}
_PLAIN_TYPES: dict[str, type] = {f"builtins.{kind.__name__}": kind for kind in (str, int, float, bool)}
_PLAIN_TYPES |= {f"numpy.{name}": kind for name, kind in _NUMBERS.items()}
_TREE = "sklearn.tree._tree.Tree"
LOSSES = (
    "AbsoluteError ExponentialLoss HalfBinomialLoss HalfGammaLoss HalfMultinomialLoss HalfPoissonLoss "
    "HalfSquaredError HalfTweedieLoss HalfTweedieLossIdentity HuberLoss PinballLoss"
)
_SGD = "EpsilonInsensitive Hinge Huber Log ModifiedHuber SquaredEpsilonInsensitive SquaredHinge SquaredLoss"
_COMPILED_LOSSES = {"sklearn._loss._loss.Cy": LOSSES, "sklearn.linear_model._sgd_fast.": _SGD}
_PARTS: dict[str, frozenset[str]] = {
    "JsonNode": frozenset({"builtins.str"}),
    "DictNode": frozenset({"builtins.dict"}),
    "ListNode": frozenset({"builtins.list"}),
    "TupleNode": frozenset({"builtins.tuple"}),
    "TypeNode": frozenset(_PLAIN_TYPES),
    "NdArrayNode": frozenset({"numpy.ndarray", *(f"numpy.{name}" for name in _NUMBERS)}),
    "TreeNode": frozenset({_TREE}),
    "LossNode": frozenset(start + name for start, names in _COMPILED_LOSSES.items() for name in names.split()),
}
_PREDICTOR = "sklearn.ensemble._hist_gradient_boosting.predictor.TreePredictor"

# What else a saved model may be made of.
_NEIGHBOURS = frozenset({"sklearn.neighbors._kd_tree.KDTree", "sklearn.neighbors._ball_tree.BallTree"})
_SPLINE = "scipy.interpolate._bsplines.BSpline"
_DISTANCES = "sklearn.metrics._dist_metrics."
_METRICS = frozenset({
    "BrayCurtis", "Canberra", "Chebyshev", "Dice", "Euclidean", "Hamming", "Haversine", "Jaccard", "Mahalanobis",
    "Manhattan", "Minkowski", "RogersTanimoto", "RussellRao", "SEuclidean", "SokalSneath", "Yule",
})  # fmt: skip
_CALLABLE = {
    f"{module}.{name}": name
    for module, names in {
        "numpy": "mean median max min sum nan_to_num",
        "sklearn.feature_selection._univariate_selection": "chi2 f_classif f_regression r_regression",
        "sklearn.feature_selection._mutual_info": "mutual_info_classif mutual_info_regression",
        "sklearn.cluster._kmeans": "_kmeans_single_elkan _kmeans_single_lloyd",
        "sklearn.utils.validation": "check_array",
    }.items()
    for name in names.split()
}
_MEASURES = frozenset(f"sklearn.metrics._{kind}" for kind in ("classification", "ranking", "regression"))
_SAVED_PARTS: dict[str, frozenset[str]] = {
    "DictNode": frozenset({"collections.OrderedDict", "sklearn.utils._bunch.Bunch"}),
    "TupleNode": frozenset({"sklearn.impute._iterative._ImputerTriplet"}),
    "SetNode": frozenset({"builtins.set"}),
    "SliceNode": frozenset({"builtins.slice"}),
    "TypeNode": frozenset({"builtins.object", "numpy.str_", "numpy.object_"}),
    "NdArrayNode": frozenset({"numpy.str_"}),
    "DTypeNode": frozenset({"numpy.dtype"}),
    "SparseMatrixNode": frozenset(
        f"scipy.sparse._{kind}.{kind}_{form}" for kind in ("csr", "csc") for form in ("matrix", "array")
    ),
    "RandomStateNode": frozenset({"numpy.random.mtrand.RandomState"}),
    "RandomGeneratorNode": frozenset({"numpy.random._generator.Generator"}),
    "PartialNode": frozenset({"functools.partial"}),
}  # fmt: skip
# Attributes that no prediction reads, and that hold more than a file may: how splits were scored, functions.
_NOT_READ = frozenset({"scorer_", "cv_results_", "_checked_cv_orig", "_asarray", "_metadata_request", "_optimizer"})


@dataclass(frozen=True)
class Rules:
    """What an archive may hold."""

    classes: Callable[[], Mapping[str, type]]  # by full name: what is rebuilt from its attributes
    saved: bool  # a file rather than a message: also text, NaN, functions of a list, and other compiled parts

    def allow(self, node: Node) -> bool:
        loader, name = node["__loader__"], _name(node)
        if loader == "ObjectNode":
            metric = name.removeprefix(_DISTANCES).removesuffix("Distance64")
            compiled = name in _NEIGHBOURS or name == _SPLINE or (name.startswith(_DISTANCES) and metric in _METRICS)
            return name in self.classes() or name == _PREDICTOR or (self.saved and compiled)
        if name in _PARTS.get(loader, ()):
            return True
        if loader == "FunctionNode":
            return self.saved and _function(name) is not None
        return self.saved and name in _SAVED_PARTS.get(loader, ())


def read_estimator(data: bytes, rules: Rules, classes: int) -> Any:
    """The object in an archive, whose trees have at most `classes` outputs or classes.

    Anything that the rules do not allow, or that is not sound, raises, in whatever way.
    """
    contents = unzipped(data)
    outline = read_outline(contents)
    if rules.saved:
        outline = _without_unread(outline)
    left = skops_archive.UNPACKED_LIMIT
    for node in nodes(outline):
        if not rules.allow(node):
            refusal = "which is not trusted" if rules.saved else "which may not travel"
            raise ValueError(f"a part of type {_name(node)}, {refusal}")
        if "__id__" in node and not rules.saved:
            raise ValueError("parts that refer to one another")  # a few of them can make a giant, or a circle
        if "file" in node:
            left -= len(contents[node["file"]])
            if left < 0:
                raise ValueError(f"a model of more than {skops_archive.UNPACKED_LIMIT} bytes")
    if not isinstance(outline, dict) or type(outline.get("protocol")) is not int or outline["protocol"] > _PROTOCOL:
        raise ValueError("an archive of an unknown version of the skops format")
    return _Reader(contents, rules, classes).build(outline)


def unknown_parts(data: bytes, rules: Rules) -> list[str]:
    """Types in an archive that the rules do not allow."""
    outline = _without_unread(read_outline(unzipped(data)))
    return sorted({_name(node) for node in nodes(outline) if not rules.allow(node)})


def _name(node: Node) -> str:
    return f"{node['__module__']}.{node['__class__']}"


def _function(name: str) -> Any:
    """A function that only computes, by its full name: one of a list, or a ufunc of numpy or scipy."""
    module, _, own = name.rpartition(".")
    if name in _CALLABLE:
        return getattr(importlib.import_module(module), own)
    if module in _MEASURES:
        measures = importlib.import_module("sklearn.metrics")
        return getattr(measures, own) if own in measures.__all__ else None
    if module.split(".")[0] == "numpy" or module.startswith("scipy.special"):
        found = getattr(importlib.import_module("numpy" if module.startswith("numpy") else "scipy.special"), own, None)
        return found if isinstance(found, np.ufunc) else None
    return None


def _without_unread(outline: Any) -> Any:
    for node in nodes(outline):
        content = node.get("content")
        if node["__loader__"] == "DictNode" and isinstance(content, dict):
            content.update({name: dict(skops_archive.NOTHING) for name in _NOT_READ & content.keys()})
    return outline


class _Reader:
    """Builds the nodes of one outline, from the innermost outwards."""

    def __init__(self, contents: Mapping[str, bytes], rules: Rules, classes: int) -> None:
        self._contents, self._rules, self._classes, self._depth = contents, rules, classes, 0

    def build(self, node: Any) -> Any:
        if self._depth > _DEPTH:
            raise ValueError(f"parts nested more than {_DEPTH} deep")
        if not isinstance(node, dict) or not self._rules.allow(node):
            raise ValueError(f"no part of a model: {node!r}"[:100])
        self._depth += 1
        try:
            match node["__loader__"]:
                case "JsonNode":
                    return json.loads(node["content"])
                case "ListNode":
                    return self._all(node["content"])
                case "SetNode":
                    return set(self._all(node["content"]))
                case "TypeNode":
                    more = {"builtins.object": object, "numpy.str_": np.str_, "numpy.object_": np.object_}
                    return (_PLAIN_TYPES | more)[_name(node)]
                case "FunctionNode":
                    return _function(_name(node))
                case loader:
                    return getattr(self, f"_{loader}")(node)
        finally:
            self._depth -= 1

    def _all(self, content: Any) -> list[Any]:
        if not isinstance(content, list):
            raise ValueError("a list of parts that is none")
        return [self.build(item) for item in content]

    # --- plain Python --------------------------------------------------------------------------------

    def _TupleNode(self, node: Node) -> tuple[Any, ...]:
        made = tuple(self._all(node["content"]))
        if _name(node) == "builtins.tuple":
            return made
        from sklearn.impute._iterative import _ImputerTriplet

        return _ImputerTriplet(*made)  # type: ignore[no-any-return]

    def _SliceNode(self, node: Node) -> slice:
        ends = [node["content"][end] for end in ("start", "stop", "step")]
        if not all(end is None or type(end) in (int, str) for end in ends):
            raise ValueError("a slice between other ends than numbers or names")
        return slice(*ends)

    def _DictNode(self, node: Node) -> Any:
        from collections import OrderedDict

        from sklearn.utils import Bunch

        content, kinds = node["content"], self.build(node["key_types"])
        if not isinstance(content, dict) or not all(isinstance(kind, type) for kind in kinds):
            raise ValueError("a dict without keys, or without their types")
        made = {"dict": dict, "OrderedDict": OrderedDict, "Bunch": Bunch}[node["__class__"]]()
        for kind, (key, value) in zip(kinds, content.items(), strict=False):
            made[kind(key)] = self.build(value)
        return made

    def _PartialNode(self, node: Node) -> Any:
        function, arguments, options = (self.build(node["content"][name]) for name in ("func", "args", "kwds"))
        if node["content"]["func"]["__loader__"] != "FunctionNode" or arguments != () or type(options) is not dict:
            raise ValueError("a partial function of more than options")
        return functools.partial(function, **options)

    # --- numpy ---------------------------------------------------------------------------------------

    def _NdArrayNode(self, node: Node) -> Any:
        if node["type"] == "json":
            return self._objects(node)
        array = self.array(node)
        if node["__class__"] == "ndarray":
            return array
        kind = np.str_ if node["__class__"] == "str_" else _NUMBERS[node["__class__"]]
        if array.ndim or array.dtype.kind != np.dtype(kind).kind:
            raise ValueError(f"an array of shape {array.shape} in the place of a number")
        return kind(array[()])

    def array(self, node: Node, dtype: np.dtype[Any] | None = None) -> np.ndarray:
        """An array of plain numbers (or text, in a file); one with fields must be of the dtype that is expected."""
        if node["__loader__"] != "NdArrayNode" or node["type"] != "numpy":
            raise ValueError("no array in the place of one")
        array = read_array(self._contents[node["file"]], text=self._rules.saved)
        if dtype is not None and array.dtype != dtype:
            raise ValueError(f"an array of dtype {array.dtype} in the place of {dtype}"[:200])
        if dtype is None and array.dtype.kind == "V":
            raise ValueError("an array with fields")
        if not self._rules.saved and array.dtype.kind == "f" and not np.isfinite(array).all():
            raise ValueError("NaN or infinity in a model")
        return array

    def _objects(self, node: Node) -> np.ndarray:
        """An array of objects: its items are nodes, in lists for each further dimension."""
        shape = self.build(node["shape"])
        if type(shape) is not tuple or not shape or not all(type(size) is int for size in shape):
            raise ValueError("an array of objects without a shape")
        items = node["content"]
        for _ in shape[1:]:
            items = [each for row in items for each in row["content"]]
        if min(shape) < 0 or math.prod(shape) != len(items):
            raise ValueError("an array of objects that is shorter or longer than it says")
        made = np.empty(len(items), dtype=object)
        for place, item in enumerate(items):
            made[place] = self.build(item)
        return made.reshape(shape)

    def _DTypeNode(self, node: Node) -> np.dtype[Any]:
        found = self.build(node["content"])
        if not isinstance(found, np.ndarray) or found.dtype.kind not in "biufUSO":
            raise ValueError("a dtype of more than plain values")
        dtype: np.dtype[Any] = found.dtype
        return dtype

    def _RandomStateNode(self, node: Node) -> np.random.RandomState:
        state = self.build(node["content"])
        key, place = state["state"]["key"], state["state"]["pos"]
        sound = isinstance(key, np.ndarray) and key.dtype == np.uint32 and key.shape == (624,)
        if state["bit_generator"] != "MT19937" or not sound or type(place) is not int or not 0 <= place <= 624:
            raise ValueError("a generator in an impossible state")
        made = np.random.RandomState()
        made.set_state(("MT19937", key, place, int(state["has_gauss"] == 1), float(state["gauss"])))
        return made

    def _RandomGeneratorNode(self, node: Node) -> np.random.Generator:
        state = self.build(node["content"]["bit_generator"])
        made = np.random.PCG64()
        if state["bit_generator"] != "PCG64" or not all(type(state["state"][name]) is int for name in ("state", "inc")):
            raise ValueError("a generator in an impossible state")
        numbers: Any = {name: int(state["state"][name]) % (1 << 128) for name in ("state", "inc")}
        kept, waiting = int(state["uinteger"]) % (1 << 32), int(state["has_uint32"] == 1)
        made.state = {"bit_generator": "PCG64", "state": numbers, "has_uint32": waiting, "uinteger": kept}
        return np.random.Generator(made)

    # --- objects -------------------------------------------------------------------------------------

    def _ObjectNode(self, node: Node) -> Any:
        name = _name(node)
        if name in _NEIGHBOURS:
            return self._neighbours(node)
        if name == _SPLINE:
            return self._spline(node)
        if name.startswith(_DISTANCES):
            return self._metric(node)
        if name == _PREDICTOR:
            cls = importlib.import_module("sklearn.ensemble._hist_gradient_boosting.predictor").TreePredictor
            attributes = self._tree_attributes(node["content"])
        else:
            cls, attributes = self._rules.classes()[name], self.build(node["content"])
        made: Any = object.__new__(cls)  # not its own, which warns of classes that are deprecated
        if attributes is None:  # of an object without any
            return made
        _check_attributes(cls, attributes)
        if hasattr(made, "__setstate__"):
            made.__setstate__(attributes)  # of scikit-learn: compares the versions
        else:
            vars(made).update(attributes)
        return made

    def _tree_attributes(self, node: Node) -> dict[str, Any]:
        """Of a tree of histogram boosting: nodes and bitsets, as its compiled functions take them."""
        from sklearn.ensemble._hist_gradient_boosting.common import PREDICTOR_RECORD_DTYPE

        content = _content_of(node)
        bitsets = {name: self.array(content[name], np.dtype(np.uint32)) for name in _BITSETS}
        tree = self.array(content["nodes"], PREDICTOR_RECORD_DTYPE)
        if tree.ndim != 1 or not len(tree):
            raise ValueError("a tree without nodes")
        if any(array.ndim != 2 or array.shape[1] != 8 for array in bitsets.values()):
            raise ValueError("a tree with sets of categories of another form")
        return {"nodes": tree, **{name: np.ascontiguousarray(array) for name, array in bitsets.items()}}

    # --- compiled parts ------------------------------------------------------------------------------

    def _TreeNode(self, node: Node) -> Any:
        """A tree: the constructor copies class counts, the state as many nodes and values as it says."""
        from sklearn.tree._tree import NODE_DTYPE, Tree

        features, counts, outputs = node["__reduce__"]["args"]["content"]
        sizes = [self.build(size) for size in (features, outputs)]
        if not all(type(size) is int for size in sizes) or not 1 <= sizes[1] <= self._classes:
            raise ValueError(f"a tree with {sizes[1]} outputs")
        classes = self.array(counts)
        if classes.shape != (sizes[1],) or classes.dtype.kind not in "iu":
            raise ValueError("a tree with other class counts than outputs")
        if not 1 <= classes.min() <= classes.max() <= self._classes:
            raise ValueError(f"a tree of {classes.max()} classes")
        state = _content_of(node["content"])
        if "nodes" not in state or not 1 <= sizes[0] < 1 << 31:
            raise ValueError("a tree of the wrong size")
        tree = self.array(state["nodes"], NODE_DTYPE)
        values = self.array(state["values"], np.dtype(np.float64))
        count, depth = self.build(state["node_count"]), self.build(state["max_depth"])
        if tree.ndim != 1 or not len(tree) or type(count) is not int or count < len(tree):
            raise ValueError("a tree of the wrong size")
        if values.shape != (len(tree), sizes[1], int(classes.max())) or type(depth) is not int:
            raise ValueError("a tree with other values than nodes, outputs and classes")
        if np.isnan(tree["threshold"]).any() or not np.isfinite(values).all():
            raise ValueError("NaN or infinity in a tree")
        check_nodes(
            tree["left_child"], tree["right_child"], tree["feature"], tree["left_child"] == -1, features=sizes[0]
        )
        made = Tree(sizes[0], classes.astype(np.intp), sizes[1])
        arrays = {"nodes": np.ascontiguousarray(tree), "values": np.ascontiguousarray(values)}
        made.__setstate__({"max_depth": max(0, min(depth, len(tree))), "node_count": len(tree), **arrays})
        return made

    def _LossNode(self, node: Node) -> Any:
        """A loss, of numbers alone; predictions do not call it."""
        arguments = self.build(node["__reduce__"]["args"])
        if type(arguments) is not tuple or not all(type(number) in (int, float) for number in arguments):
            raise ValueError("a loss of more than numbers")
        return getattr(importlib.import_module(node["__module__"]), node["__class__"])(*arguments)

    def _metric(self, node: Node) -> Any:
        from sklearn.metrics import DistanceMetric

        name = node["__class__"].removesuffix("Distance64").lower()
        power, vector, matrix = self.build(node["content"])
        options: dict[str, Any] = {}
        if name == "minkowski":
            options = {"p": float(power)} | ({"w": _sound(vector, 1)} if np.size(vector) else {})
        elif name == "seuclidean":
            options = {"V": _sound(vector, 1)}
        elif name == "mahalanobis":
            options = {"VI": _sound(matrix, 2)}
        return DistanceMetric.get_metric(name, **options)

    def _neighbours(self, node: Node) -> Any:
        """A tree of neighbours, grown anew from its points: the same points give the same tree."""
        from sklearn.neighbors import BallTree, KDTree

        content = node["content"]["content"]
        points, leaf, metric = _sound(self.array(content[0]), 2), self.build(content[4]), self.build(content[11])
        if type(leaf) is not int or leaf < 1:
            raise ValueError("a tree of neighbours without leaves")
        kind = KDTree if node["__class__"] == "KDTree" else BallTree
        return kind(points, leaf_size=min(leaf, len(points)), metric=metric)

    def _spline(self, node: Node) -> Any:
        from scipy.interpolate import BSpline

        held = {name.lstrip("_"): self.build(part) for name, part in _content_of(node["content"]).items()}
        if type(held["k"]) is not int or not isinstance(held["extrapolate"], bool | str):
            raise ValueError("a spline without a degree")
        return BSpline(_sound(held["t"], 1), _sound(held["c"]), held["k"], extrapolate=held["extrapolate"])

    def _SparseMatrixNode(self, node: Node) -> Any:
        """A sparse matrix, whose indices compiled code follows."""
        import scipy.sparse

        inner = {name.removesuffix(".npy"): data for name, data in unzipped(self._contents[node["file"]]).items()}
        data, indices, starts = (read_array(inner[name], text=True) for name in ("data", "indices", "indptr"))
        shape = read_array(inner["shape"], text=True)
        row_wise = node["__class__"].startswith("csr")
        for array in (data, indices, starts, shape):
            if array.ndim != 1 or array.dtype.kind not in ("biuf" if array is data else "iu"):
                raise ValueError("a sparse matrix of other arrays than numbers and indices")
        if len(shape) != 2 or shape.min() < 0 or len(indices) != len(data):
            raise ValueError("a sparse matrix of the wrong size")
        rows, width = (int(size) for size in (shape if row_wise else shape[::-1]))
        if len(starts) != rows + 1 or starts[0] != 0 or starts[-1] != len(data) or (np.diff(starts) < 0).any():
            raise ValueError("a sparse matrix whose rows do not follow one another")
        if len(indices) and (indices.min() < 0 or indices.max() >= width):
            raise ValueError("a sparse matrix with indices outside of it")
        return getattr(scipy.sparse, node["__class__"])((data, indices, starts), shape=tuple(map(int, shape)))


_BITSETS = ("binned_left_cat_bitsets", "raw_left_cat_bitsets")


def check_nodes(left: np.ndarray, right: np.ndarray, feature: np.ndarray, leaf: np.ndarray, *, features: int) -> None:
    """Raise ValueError unless the inner nodes of a tree have children behind them, and split on features."""
    own = np.arange(len(left))[~leaf]
    for child in (left[~leaf], right[~leaf]):
        # Children stand after their parent, so every walk ends.
        if not ((child > own) & (child < len(left))).all():
            raise ValueError("a tree whose nodes point outside of it")
    if not ((feature[~leaf] >= 0) & (feature[~leaf] < features)).all():
        raise ValueError("a tree that splits on features that do not exist")


def _content_of(node: Any) -> dict[str, Any]:
    if node["__loader__"] != "DictNode" or not isinstance(node["content"], dict):
        raise ValueError("a compiled part without its content")
    return node["content"]


def _check_attributes(cls: type, attributes: Any) -> None:
    """An attribute in the place of a method, or of a constant of the class, would change what is called."""
    if type(attributes) is not dict:
        raise ValueError(f"a {cls.__name__} without attributes")
    options = inspect.signature(cls).parameters
    for name in attributes:
        known = inspect.getattr_static(cls, name, None)
        if type(name) is not str or name.startswith("__"):
            raise ValueError(f"an attribute {name!r}"[:100])
        if known is not None and not hasattr(known, "__set__") and name not in options:
            raise ValueError(f"an attribute {name!r} in the place of one of {cls.__name__}"[:200])


def _sound(array: Any, dimensions: int | None = None) -> np.ndarray:
    """Finite numbers of 64 bits, in one piece of memory, and at least one."""
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "iuf" or dimensions not in (None, array.ndim):
        raise ValueError("a compiled part of other arrays than it takes")
    if not array.size or not np.isfinite(array).all():
        raise ValueError("NaN, infinity or nothing in a compiled part")
    return np.ascontiguousarray(array, dtype=np.float64)


def named_classes(classes: Iterable[type]) -> dict[str, type]:
    return {f"{cls.__module__}.{cls.__name__}": cls for cls in classes}


def listed_classes(names: Mapping[str, str]) -> dict[str, type]:
    """Classes by their full names, from their names by module; those that this version has not are left out."""
    found = [(importlib.import_module(module), listed.split()) for module, listed in names.items()]
    return named_classes(getattr(module, name) for module, listed in found for name in listed if hasattr(module, name))
