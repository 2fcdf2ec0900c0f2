"""One table of messages that are no sound models, and what a receiver says of each."""

from __future__ import annotations

import functools
import json
import lzma
import operator
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import model_messages as made
import numpy as np
import onnx
import skops.io
from onnx import TensorProto, helper
from sklearn.cluster import KMeans
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
from sklearn.linear_model import Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from travelling_models import CLASSES, D, N, message

from codistill.learners.portable.onnx_graph import to_message
from codistill.learners.portable.trees import LEAF, NODE
from codistill.learners.sklearn import SklearnLearner
from codistill.wire.message import Message


@dataclass(frozen=True)
class Hostile:
    """A message, or bytes in the place of one; what is said of it; and the task of the receiver."""

    make: Callable[[], Message | bytes]
    said: str = ""
    shape: tuple[int, ...] = (D,)
    classes: int = CLASSES


HOSTILE: dict[str, Hostile] = {}


def add(name: str, make: Callable[[], Message | bytes], said: str = "", **task: Any) -> None:
    """One more line of the table."""
    assert name not in HOSTILE, name
    HOSTILE[name] = Hostile(make, said, **task)


def named(what: str, value: Any) -> str:
    """A readable name for a changed value."""
    shape = f"array {value.shape} {value.dtype}" if isinstance(value, np.ndarray) else str(value)[:40]
    return f"{what} = {shape}"


# --- bytes that are no message --------------------------------------------------------------------


def announced(size: int, sent: int = 0) -> bytes:
    """A header that announces so many bytes."""
    header = json.dumps({"0.weight": {"dtype": "F32", "shape": [50_000, 50_000], "data_offsets": [0, size]}}).encode()
    return struct.pack("<Q", len(header)) + header + b"\0" * sent


add("bytes: a pickle", lambda: pickle.dumps(made.Trap()), "valid safetensors")
add("bytes: noise", lambda: np.random.default_rng(0).bytes(5000), "valid safetensors")
add("bytes: none", lambda: b"", "valid safetensors")
add("bytes: 10 GB announced", lambda: announced(10**10), "valid safetensors")
add("bytes: 10 GB announced, some sent", lambda: announced(10**10, 4096), "valid safetensors")
add("bytes: a header of 10 GB", lambda: struct.pack("<Q", 10**10) + b"{}", "valid safetensors")

# --- torch ----------------------------------------------------------------------------------------

MLP = functools.partial(message, "registered mlp")  # hidden = [4, 3]

for plain, said in [
    ({"kind": None}, "a model of unknown kind None"),
    ({"kind": "pickle"}, "a model of unknown kind 'pickle'"),
    ({"kind": ["torch"]}, "a model of unknown kind"),
    ({"name": None}, "KeyError"),
    ({"name": "backdoor"}, "'backdoor'"),
    ({"name": "__import__('os')"}, "import"),
    ({"name": ["mlp"]}, ""),
    ({"name": "logistic"}, "'hidden'"),
    ({"shape": [D + 1]}, rf"a model for samples \[{D + 1}\]"),
    ({"shape": "many"}, "a model for samples many"),
    ({"shape": None}, "KeyError"),
    ({"classes": CLASSES + 1}, f"and {CLASSES + 1} classes"),
    ({"classes": None}, "KeyError"),
    ({"options": '{"hidden": [5]}'}, "do not fit the architecture"),
    ({"options": '{"hidden": [4, 4]}'}, "do not fit the architecture"),
    ({"options": '{"hidden": [1000000, 1000000]}'}, "do not fit the architecture"),  # 4 TB
    ({"options": '{"hidden": [50000, 50000]}'}, "do not fit the architecture"),  # 10 GB
    ({"options": '{"hidden": [1000000000000000000]}'}, ""),
    ({"options": json.dumps({"hidden": [1] * 100_000})}, "options of 300012 letters"),
    ({"options": '{"hidden": [-1]}'}, "hidden"),
    ({"options": '{"hidden": "4"}'}, "hidden"),
    ({"options": '{"depth": 4}'}, "'depth'"),
    ({"options": '["hidden"]'}, ""),
    ({"options": "hidden"}, "JSONDecodeError"),
    ({"options": "[" * 9_999}, "RecursionError"),
    ({"options": 7}, "TypeError"),
    ({"options": None}, "KeyError"),
    ({"probabilistic": None}, "KeyError"),
]:
    add(f"torch: {named(*next(iter(plain.items())))}", lambda plain=plain: made.changed(MLP(), **plain), said)

for arrays, said in [
    ({"1.weight": None}, "do not fit the architecture"),
    ({"extra": np.zeros(1)}, "do not fit the architecture"),
    ({"1.weight": np.zeros((4, D + 1), np.float32)}, "do not fit the architecture"),
    ({"1.weight": np.zeros((D, 4), np.float32)}, "do not fit the architecture"),
    ({"1.bias": np.zeros(1, np.float32)}, "do not fit the architecture"),
    ({"1.bias": np.float32(0)}, "do not fit the architecture"),
    ({"5.bias": np.full(3, 3e38, np.float32), "5.weight": np.full((CLASSES, 3), 3e38, np.float32)}, "NaN or infinity"),
]:
    add(f"torch: {named(*next(iter(arrays.items())))}", lambda arrays=arrays: made.changed(MLP(), arrays), said)
add(
    "torch: NaN",
    lambda: made.changed(MLP(), {"1.bias": np.full(4, np.nan, np.float32)}).encoded,
    "NaN or infinity in '1",
)
add("torch: for more features", MLP, "a model for samples", shape=(D + 1,))
add("torch: for images", MLP, "a model for samples", shape=(1, D))
add("torch: for more classes", MLP, f"and {CLASSES} classes", classes=CLASSES + 1)
add("no model at all", lambda: Message({"f": np.zeros((4, CLASSES))}), "a model of unknown kind None")

# --- kernels --------------------------------------------------------------------------------------

for arrays, plain, said in [
    ({"inputs": None}, {}, "KeyError"),
    ({"inputs": np.zeros((N, D + 1))}, {}, "for other samples"),
    ({"inputs": np.zeros(N)}, {}, "for other samples"),
    ({"coefficients": np.zeros((N, CLASSES + 1))}, {}, "or classes"),
    ({"coefficients": np.zeros((N - 1, CLASSES))}, {}, "or classes"),
    ({"inputs": np.zeros((0, D)), "coefficients": np.zeros((0, CLASSES))}, {}, ""),
    ({"coefficients": np.full((N, CLASSES), 1e308)}, {}, "NaN or infinity"),
    ({}, {"kernel": "wavelet"}, "a kernel 'wavelet'"),
    ({}, {"kernel": "precomputed"}, "a kernel 'precomputed'"),
    ({}, {"kernel": ["rbf"]}, ""),
    ({}, {"kernel": None}, "KeyError"),
    ({}, {"options": '{"n_jobs": 1000}'}, "n_jobs"),
    ({}, {"options": '{"metric": "rbf"}'}, "metric"),
    ({}, {"options": '{"gamma": "os.system"}'}, ""),
    ({}, {"options": '{"c": 1}'}, r"options \['c'\]"),
    ({}, {"options": "[]"}, ""),
]:
    add(
        f"kernel: {named(*next(iter({**arrays, **plain}.items())))}",
        lambda arrays=arrays, plain=plain: made.changed(message("rbf kernel"), arrays, **plain),
        said,
    )

# --- constants ------------------------------------------------------------------------------------

CONSTANT = Message({"frequencies": np.full(CLASSES, 1 / CLASSES, np.float32)}, {"kind": "constant"})
for number, (frequencies, said) in enumerate(
    [
        (None, "KeyError"),
        (np.full(CLASSES + 1, 0.1), f"of shape .{CLASSES + 1},."),
        (np.full((1, CLASSES), 1 / CLASSES), "of shape"),
        (np.float32(1), "of shape"),
        (np.full(CLASSES, 1.0), "sum is not 1"),
        (np.full(CLASSES, 3e38), "sum is not 1"),
        (np.array([2.0, -1.0, *[0.0] * (CLASSES - 2)]), "negative"),
        (np.array([-0.0] * CLASSES), "sum is not 1"),
    ]
):
    add(
        f"constant: {number}, {named('frequencies', frequencies)}",
        lambda frequencies=frequencies: made.changed(CONSTANT, {"frequencies": frequencies}),
        said,
    )
add(
    "constant: NaN",
    lambda: made.changed(CONSTANT, {"frequencies": np.full(CLASSES, np.nan, np.float32)}).encoded,
    "NaN or infinity",
)
add("constant: for more classes", lambda: CONSTANT, "of shape", classes=CLASSES + 1)

# --- trees of other libraries ---------------------------------------------------------------------

BOOSTED = functools.partial(message, "lightgbm")


def grown(edit: Callable[[np.ndarray], object]) -> Message:
    """The trees with nodes changed by hand."""
    nodes = np.frombuffer(BOOSTED().arrays["nodes"].tobytes(), dtype=NODE).copy()
    edit(nodes)
    return made.changed(BOOSTED(), {"nodes": np.frombuffer(nodes.tobytes(), np.uint8)})


def chain(length: int) -> Message:
    """One tree with a leaf at every level."""
    nodes = np.zeros(2 * length + 1, dtype=NODE)
    nodes["feature"] = LEAF
    at = np.arange(0, 2 * length, 2)
    nodes["feature"][at], nodes["left"][at], nodes["right"][at] = 0, at + 1, at + 2
    one = {"nodes": np.frombuffer(nodes.tobytes(), np.uint8), "roots": np.zeros(1, np.int32)}
    return made.changed(BOOSTED(), one | {"outputs": np.zeros(1, np.int32)})


for column, where, value, said in [
    ("left", 0, 0, "or back"),
    ("left", 0, -1, "or back"),
    ("right", 0, 10**6, "point outside"),
    ("right", 0, 2**31 - 1, "point outside"),
    ("left", 2, 1, "or back"),
    ("right", 0, 1, "not one parent"),
    ("feature", 0, D, "features that do not exist"),
    ("feature", 0, -2, "features that do not exist"),
    ("feature", 0, LEAF, "not one parent"),
    ("missing_left", 0, 2, "features that do not exist"),
    ("threshold", 0, np.nan, "NaN or infinity in a tree"),
    ("threshold", 0, np.inf, "NaN or infinity in a tree"),
    ("value", -1, np.nan, "NaN or infinity in a tree"),
]:
    add(
        f"trees: {column} of node {where} = {value}",
        lambda column=column, where=where, value=value: grown(lambda nodes: nodes[column].__setitem__(where, value)),
        said,
    )
add("trees: leaves of 1e308", lambda: grown(lambda nodes: nodes["value"].fill(1e308)), "NaN or infinity")
add("trees: 1,001 levels", lambda: chain(1_001), "deeper than 1000")
for number, (arrays, plain, said) in enumerate(
    [
        ({"nodes": None}, {}, "KeyError"),
        ({"nodes": np.zeros(0, np.uint8)}, {}, "whole number of nodes"),
        ({"nodes": np.zeros(NODE.itemsize + 1, np.uint8)}, {}, "whole number of nodes"),
        ({"nodes": np.zeros((1, NODE.itemsize), np.uint8)}, {}, "whole number of nodes"),
        ({"nodes": np.zeros(NODE.itemsize, np.float32)}, {}, "whole number of nodes"),
        ({"nodes": np.zeros(NODE.itemsize * 4_000_001, np.uint8)}, {}, "more than 4,000,000 nodes"),
        ({"roots": np.zeros(0, np.int32), "outputs": np.zeros(0, np.int32)}, {}, "without a root"),
        ({"roots": np.zeros(6, np.int64)}, {}, "without a root"),
        ({"roots": np.ones(6, np.int32)}, {}, "roots are not in order"),
        ({"roots": np.zeros(6, np.int32)}, {}, "roots are not in order"),
        ({"roots": np.arange(6, dtype=np.int32)}, {}, "point outside of it|not one parent"),
        ({"roots": np.array([0, 1, 2, 3, 4, 10**6], np.int32)}, {}, "roots are not in order"),
        ({"roots": np.zeros(100_001, np.int32)}, {}, "more than"),
        ({"roots": np.float32(0)}, {}, ""),
        ({"outputs": np.zeros(5, np.int32)}, {}, "without a root or an output"),
        ({"outputs": np.full(6, CLASSES, np.int32)}, {}, "an output that does not exist"),
        ({"outputs": np.full(6, -1, np.int32)}, {}, "an output that does not exist"),
        ({}, {"classes": CLASSES + 1}, f"trees for {CLASSES + 1} classes"),
        ({}, {"start": []}, "start from nothing"),
        ({}, {"start": [0.0]}, f"1 outputs for {CLASSES} classes|an output that does not exist"),
        ({}, {"start": [0.0] * 10}, f"10 outputs for {CLASSES} classes"),
        ({}, {"start": [1, 2, 3]}, "a list of float"),
        ({}, {"start": "000"}, "a list of float"),
        ({}, {"labels": [0, 1, 1]}, "one class twice"),
        ({}, {"labels": [0, 1, CLASSES]}, "classes that do not exist"),
        ({}, {"labels": [0, 1, -1]}, "classes that do not exist"),
        ({}, {"labels": [0, 1, True]}, "a list of int"),
        ({}, {"labels": None}, "KeyError"),
        ({}, {"link": "__import__"}, "the link '__import__'"),
        ({}, {"link": ["softmax"]}, "the link"),
        ({}, {"single_precision": 1}, "the link"),
    ]
):
    add(
        f"trees: {number}, {named(*next(iter({**arrays, **plain}.items())))}",
        lambda arrays=arrays, plain=plain: made.changed(BOOSTED(), arrays, **plain),
        said,
    )
add("trees: for fewer features", BOOSTED, "features that do not exist", shape=(1,))
add("trees: for more classes", BOOSTED, f"trees for {CLASSES} classes", classes=CLASSES + 1)

# --- estimators: what is no archive, and what is foreign in it ------------------------------------

for data in (b"", b"PK", b"noise" * 100, b"PK\x05\x06" + b"\0" * 18, lzma.compress(b"model")):
    add(f"skops: no archive, {data[:6]!r}", lambda data=data: made.archive_message(data))
for size in (30, 1000):
    add(
        f"skops: {size} random bytes",
        lambda size=size: made.archive_message(b"PK\3\4" + np.random.default_rng(0).bytes(size)),
    )
add("skops: no bytes at all", lambda: Message({}, {"kind": "skops", "classes": CLASSES}), "KeyError")
add("skops: a pickle", lambda: made.archive_message(pickle.dumps(made.Trap())), "BadZipFile")
add(
    "skops: a pickle inside",
    lambda: made.closed({"__loader__": "ObjectNode"}, {"model.pkl": pickle.dumps(made.Trap())}),
)
PICKLED = (
    b"\x93NUMPY\x01\x00" + struct.pack("<H", 70)
    + b"{'descr': '|O', 'fortran_order': False, 'shape': (1,)}".ljust(69) + b"\n" + pickle.dumps([made.Trap()])
)  # fmt: skip
add("skops: a pickle as an array", lambda: made.with_array("logistic", "coef_", PICKLED), "an array of dtype")


class Foreign:
    """A class that a receiver does not know."""

    def __init__(self):
        self.harmless = 1


for name, make in {
    "own class": Foreign,
    "own class inside": lambda: Ridge(Foreign()),
    "partial": lambda: Ridge(functools.partial(os.mkdir, made.TRAP)),
    "function": lambda: Ridge(os.mkdir),
    "method": lambda: Ridge(Ridge().fit),
    "operator": lambda: Ridge(operator.methodcaller("mkdir", made.TRAP)),
    "type": lambda: Ridge(Foreign),
    "unlisted estimator inside": lambda: Ridge(KMeans()),
    "set": lambda: Ridge({1, 2}),
    "slice": lambda: Ridge(slice(3)),
    "bytes": lambda: Ridge(b"1"),
    "text array": lambda: Ridge(np.array(["a"])),
    "masked": lambda: Ridge(np.ma.MaskedArray([1.0], [True])),
    "a list": lambda: [Ridge()],
    "a number": lambda: 7,
}.items():
    add(f"skops: {name}", lambda make=make: made.archive_message(skops.io.dumps(make())))

LOADERS = ("ConstructorFromReduceNode", "LossNode", "TreeNode", "ObjectNode", "FunctionNode")
for loader, protocol in [*((loader, 2) for loader in LOADERS), (LOADERS[0], 0)]:

    def calls(outline, files, loader=loader, protocol=protocol):
        made.attributes(outline)["alpha"] = made.call_node("os", "mkdir", made.TRAP, loader=loader)
        outline["protocol"] = protocol

    said = r"a part of type os\.mkdir, which may not travel"
    add(f"skops: call by {loader}, {protocol}", lambda e=calls: made.edited("ridge", e), said)

for loader, module, name in [
    ("LossNode", "sklearn.tree._tree", "Tree"),
    ("TypeNode", "sklearn.tree._tree", "Tree"),
    ("ObjectNode", "sklearn.tree._tree", "Tree"),
    ("ConstructorFromReduceNode", "sklearn.tree._tree", "Tree"),
    ("ObjectNode", "sklearn.svm._classes", "SVC"),
    ("ObjectNode", "sklearn.linear_model._base", "Ridge"),
    ("ObjectNode", "codistill.learners.sklearn", "Ridge"),
    ("NdArrayNode", "numpy", "void"),
    ("NdArrayNode", "numpy", "str_"),
    ("DictNode", "collections", "OrderedDict"),
    ("CachedNode", "builtins", "str"),
    ("NoSuchNode", "builtins", "str"),
    (None, None, None),
]:

    def part(outline, files, loader=loader, module=module, name=name):
        node = {"__loader__": loader, "__module__": module, "__class__": name}
        node |= {
            "content": json.loads(json.dumps(outline["content"])),
            "file": made.first(outline, "NdArrayNode")["file"],
        }
        made.attributes(outline)["alpha"] = node | {
            "__reduce__": {"args": made.call_node("a", "b", 1, 2)["content"]},
            "type": "numpy",
        }

    add(f"skops: {loader} of {module}.{name}", lambda e=part: made.edited("ridge", e), "which may not travel")


def references(outline, files):
    """Ten lists of ten references each would be 10¹⁰ parts."""
    inner = made.plain_node(1) | {"__id__": 1}
    for level in range(2, 12):
        inner = made.list_node([inner, *[{"__id__": level - 1}] * 9], __id__=level)
    made.attributes(outline)["alpha"] = inner


def cached(outline, files):
    """A reference to nothing."""
    made.attributes(outline)["alpha"] = {"__class__": "x", "__module__": "x", "__loader__": "CachedNode", "__id__": 1}


add("skops: parts that refer to one another", lambda: made.edited("ridge", references), "refer to one another")
add("skops: a reference to nothing", lambda: made.edited("ridge", cached))
add(
    "skops: another version",
    lambda: made.with_attribute("ridge", "_sklearn_version", "0.1"),
    "InconsistentVersionWarning",
)

# --- estimators: another task, other shapes, other sizes ------------------------------------------

for classes in (CLASSES + 1, None, "3", [CLASSES]):
    add(
        f"skops: {named('classes', classes)}",
        lambda c=classes: made.changed(message("forest"), classes=c),
        "a model for .* classes",
    )
for name in ("forest", "scaled", "hist boosting"):
    for features in (D + 1, D - 1):
        add(
            f"skops: {name} for {features} features",
            functools.partial(message, name),
            f"a model for {D} features",
            shape=(features,),
        )
    add(f"skops: {name} for two classes", lambda n=name: made.changed(message(n), classes=2), classes=2)
for make in (
    Ridge,
    RandomForestClassifier,
    HistGradientBoostingClassifier,
    lambda: make_pipeline(StandardScaler(), Ridge()),
):
    add(f"skops: unfitted {type(make()).__name__}", lambda make=make: made.archive_message(skops.io.dumps(make())))
    add(
        f"skops: unfitted {type(make()).__name__}, exported",
        lambda make=make: made.changed(SklearnLearner(make()).export(), classes=CLASSES),
    )
add(
    "skops: NaN", lambda: made.with_array("ridge", "coef_", np.full((CLASSES, D), np.nan)), "NaN or infinity in a model"
)
add(  # as float32, infinite
    "skops: overflow",
    lambda: made.with_array("ridge", "coef_", np.full((CLASSES, D), 1e300)),
    "NaN or infinity in its pred",
)
for name in ("ridge", "logistic"):
    for shape in ((CLASSES, D + 1), (CLASSES + 1, D), (D,), (1, CLASSES, D), (0, D)):
        add(
            f"skops: {name} with coefficients {shape}", lambda n=name, s=shape: made.with_array(n, "coef_", np.zeros(s))
        )


def claims(data: bytes, size: int) -> bytes:
    """The archive with another claim of how long its outline is when unpacked."""
    data, name = bytearray(data), b"schema.json"
    for mark, offset, at in ((b"PK\x03\x04", 22, 30), (b"PK\x01\x02", 24, 46)):
        start = data.find(mark)
        while start >= 0:
            if data[start + at : start + at + len(name)] == name:
                data[start + offset : start + offset + 4] = struct.pack("<I", size)
            start = data.find(mark, start + 4)
    return bytes(data)


def claims_array(shape: str, descr: str = "'<f8'") -> Message:
    """Eight bytes in the place of an array of any shape and type."""
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}".encode().ljust(117) + b"\n"
    return made.with_array("ridge", "coef_", np.lib.format.magic(1, 0) + struct.pack("<H", 118) + text + b"0" * 8)


add(
    "skops: an archive that claims 4 GB",
    lambda: made.archive_message(claims(message("ridge").arrays["model"].tobytes(), 2**32 - 2)),
    "that unpacks to",
)
for method in (zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2):  # whose size on unpacking Python does not limit
    add(
        f"skops: packed by method {method}",
        lambda m=method: made.closed(*made.opened(message("ridge")), m),
        "unusual way",
    )
for shape in ("(10000000000,)", "(1000000, 1000000)", "(2,)", "(0,)", "(-1,)", "(2, 0)"):
    add(f"skops: an array that claims {shape}", lambda s=shape: claims_array(s), "shorter or longer than it says")
for shape in ("('1',)", "1", "(2**9,)", "__import__('os')"):
    add(f"skops: an array that claims {shape}", lambda s=shape: claims_array(s), "header|shape|malformed")
for descr in ("'<U2'", "'|S8'", "'|O'", "'<M8[s]'", "'<c16'", "'|V0'", "[('a', '|O')]"):
    add(f"skops: an array of {descr}", lambda d=descr: claims_array("(1,)", d), "an array of dtype")

# --- estimators: what compiled code follows -------------------------------------------------------

OUTSIDE, NO_FEATURE = "nodes point outside", "features that do not exist"
SHAPES = {  # an array of another form scikit-learn refuses by itself
    "none": lambda array: array[:0],
    "one": lambda array: array[:1],
    "in a matrix": lambda array: array.reshape(1, -1),
    "without fields": lambda array: np.zeros(len(array)),
}
TREES = [
    (("left_child", 0, 10**6), OUTSIDE),
    (("feature", 0, D), NO_FEATURE),
    (("right_child", 0, 10**6), OUTSIDE),
    (("right_child", 0, -1), OUTSIDE),
    (("right_child", 0, -(10**6)), OUTSIDE),
    (("left_child", 0, -2), OUTSIDE),
    (("left_child", 0, 0), OUTSIDE),  # a circle
    (("left_child", 1, 0), OUTSIDE),  # a longer one
    (("feature", 0, 10**9), NO_FEATURE),
    (("feature", 0, -2), NO_FEATURE),
]
HIST_TREES = [
    (("left", 0, 10**6), OUTSIDE),
    (("feature_idx", 0, D), NO_FEATURE),
    (("right", 0, 2**32 - 1), OUTSIDE),
    (("left", 0, 0), OUTSIDE),
    (("right", 1, 0), OUTSIDE),
    (("feature_idx", 0, -1), NO_FEATURE),
    (("feature_idx", 0, 2**60), NO_FEATURE),
    (("is_categorical", 0, 1), "with categories"),  # would look up bitset_idx and the map of categories
    (("is_leaf", slice(None), 0), OUTSIDE),
]
INSIDE = ("regression tree", "forest", "regression forest", "adaboost", "bagging", "boosting", "components")
for name, table, few in [
    ("tree", TREES, False),
    *((name, TREES, True) for name in INSIDE),
    ("hist boosting", HIST_TREES, False),
    ("hist boosting columns", HIST_TREES, True),
]:
    for change, said in table[:2] if few else table:
        add(f"skops: {name} with {change}", lambda n=name, c=change: made.with_tree_nodes(n, made.put(*c)), said)
    for form, reform in {} if few else SHAPES.items():
        add(f"skops: {name} with nodes {form}", lambda n=name, r=reform: made.with_tree_nodes(n, r))
add("skops: components beyond two", lambda: made.with_tree_nodes("components", made.put("feature", 0, 2)), NO_FEATURE)

for count, name in {
    "n_classes_": "forest",
    "n_outputs_": "regression forest",
    "n_trees_per_iteration_": "hist boosting",
}.items():
    for value in (10**9, 10**30, 0, -1, 1.5, [1, 10**9], "many", None)[: 8 if name == "forest" else 3]:
        add(
            f"skops: {named(count, value)}",
            lambda n=name, c=count, v=value: made.with_attribute(n, c, v),
            f"{count} = ",
        )
for attribute, value in (("_in_fit", True), ("_in_fit", 1), ("_preprocessor", "scaler")):
    add(
        f"skops: {attribute} = {value}",
        lambda a=attribute, v=value: made.with_attribute("hist boosting", a, v),
        "with categories, or in the middle of a fit",
    )
for name in ("tree", "hist boosting"):  # what samples are held to before compiled code reads them
    for value, said in [
        *((v, f"a model for {v} features") for v in (D + 1, 10**9, "5", None, True)),
        (float(D), "without a number of features"),
        (..., "KeyError: 'n_features_in_'"),
    ]:
        add(
            f"skops: {name} of {value!r} features",
            lambda n=name, v=value: made.with_attribute(n, "n_features_in_", v),
            said,
        )


def other_features(also_tree: bool) -> Callable[[Any, Any], None]:
    """The last tree of an ensemble sees other features."""

    def edit(outline, files):
        trees = [
            n for n in made.nodes(outline) if "DecisionTree" in n["__class__"] and "TreeNode" in str(n.get("content"))
        ]
        made.attributes(trees[-1])["n_features_in_"] = made.plain_node(D + 3)
        if also_tree:
            made.attributes(trees[-1])["tree_"]["__reduce__"]["args"]["content"][0] = made.plain_node(D + 3)

    return edit


for name, said in {"forest": "of their ensemble", "boosting": "of their ensemble", "bagging": "is expecting"}.items():
    for also in (False, True):
        words = said if also else f"a tree of the wrong size|{said}"
        add(
            f"skops: {name}, a tree of other features{' inside' * also}",
            lambda n=name, a=also: made.edited(n, other_features(a)),
            words,
        )


def tree_argument(place: int, value: Any) -> Callable[[Any, Any], None]:
    """Another argument of the compiled tree's constructor: features, class counts, outputs."""

    def edit(outline, files):
        made.first(outline, "TreeNode")["__reduce__"]["args"]["content"][place] = made.plain_node(value)

    return edit


def no_nodes(outline, files):
    """A tree without nodes."""
    node = made.first(outline, "TreeNode")
    node["content"]["content"], node["content"]["key_types"]["content"] = {}, []


def node_count(count: int) -> Callable[[Any, Any], None]:
    """A tree that says it has this many nodes."""
    return lambda outline, files: made.attributes(made.first(outline, "TreeNode")).update(
        node_count=made.plain_node(count)
    )


WRONG_SIZE = "a tree of the wrong size"
add("skops: a tree of more features than its model", lambda: made.edited("tree", tree_argument(0, D + 1)), WRONG_SIZE)
add("skops: a tree without nodes", lambda: made.edited("tree", no_nodes), WRONG_SIZE)
for count in (0, -5, 1):
    add(f"skops: a tree that says {count} nodes", lambda c=count: made.edited("tree", node_count(c)), WRONG_SIZE)
for outputs in (0, -1, 2, 1000, 10**12, "1", 1.0, None):
    add(
        f"skops: a tree of {outputs!r} outputs",
        lambda o=outputs: made.edited("tree", tree_argument(2, o)),
        "other class counts than outputs" if outputs == 2 else f"a tree with {outputs} outputs",
    )


def longer(outline, files):
    """Twice as many trees as the array of trees says."""
    for stage in made.attributes(outline)["estimators_"]["content"]:
        stage["content"] = stage["content"] * 2


def doubled(outline, files):
    """Twice as many trees as outputs: compiled code adds their values to columns that it does not check."""
    longer(outline, files)
    shape = made.attributes(outline)["estimators_"]["shape"]["content"]
    shape[1] = made.plain_node(2 * json.loads(shape[1]["content"]))


def short_prior(outline, files):
    """Boosting that starts from one column."""
    files["prior.npy"] = made.npy(np.array([1.0]))
    made.attributes(made.attributes(outline)["init_"])["class_prior_"]["file"] = "prior.npy"


def other_start(outline, files):
    """Boosting that starts from a tree."""
    other, more = made.opened(message("tree"))
    for node in made.nodes(other):
        if "file" in node:
            node["file"] = f"other {node['file']}"
    made.attributes(outline)["init_"] = other
    files |= {f"other {name}": data for name, data in more.items()}


for edit, name, said in [
    (longer, "boosting from zero", "an array of objects that is shorter or longer than it says"),
    (doubled, "boosting from zero", "boosting with a wrong number of trees"),
    (short_prior, "boosting", "boosting from a start of the wrong shape"),
    (other_start, "boosting", "boosting from an unknown start"),
]:
    add(f"skops: {name}, {edit.__name__}", lambda n=name, e=edit: made.edited(n, e), said)
add(
    "skops: boosting of one tree for three outputs",
    lambda: made.with_attribute("boosting from zero", "n_trees_per_iteration_", 1),
    "boosting with a wrong number of trees",
)

# --- ONNX -----------------------------------------------------------------------------------------


def set_node(**changes: Any) -> Callable[[onnx.ModelProto], None]:
    """Other values of the first node."""

    def change(proto):
        for name, value in changes.items():
            setattr(proto.graph.node[0], name, value)

    return change


def set_input(axis: int, size: int) -> Callable[[onnx.ModelProto], None]:
    """Another size of the input."""
    return lambda p: setattr(p.graph.input[0].type.tensor_type.shape.dim[axis], "dim_value", size)


def external(proto):
    """Weights in a file of the receiver."""
    tensor = TensorProto(name="v1", dims=[D, CLASSES], data_type=TensorProto.FLOAT, data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="../../../etc/passwd")
    proto.graph.initializer.append(tensor)


def external_constant(proto):
    """The same in a constant."""
    external(proto)
    added = proto.graph.node.add(op_type="Constant", output=["c"])
    added.attribute.add(name="value", type=onnx.AttributeProto.TENSOR).t.CopyFrom(proto.graph.initializer.pop())


def subgraph(proto):
    """A graph inside of a node."""
    set_node(op_type="Relu")(proto)
    proto.graph.node[0].attribute.add(name="body", type=onnx.AttributeProto.GRAPH).g.name = "g"


def nested(proto):
    """Many graphs, one inside of the other."""
    place = proto.graph
    for _ in range(90):
        place = place.node.add(op_type="Relu").attribute.add(name="g", type=onnx.AttributeProto.GRAPH).g


for name, (change, said) in {
    "custom domain": (set_node(domain="com.evil"), "the domain 'com.evil'"),
    "custom opset": (lambda p: p.opset_import.append(helper.make_opsetid("com.evil", 1)), "the domain 'com.evil'"),
    "runtime's own operators": (set_node(domain="com.microsoft"), "the domain 'com.microsoft'"),
    "external weights": (external, "weights inside of the graph"),
    "external constant": (external_constant, "numbers inside of the graph: 'value' of Constant"),
    "function": (lambda p: p.functions.add(name="MatMul", domain="ai.onnx"), "functions"),
    "training": (lambda p: p.training_info.add(), "functions, training"),
    "loop": (set_node(op_type="Loop"), "an operator Loop, which may not travel"),
    "random": (set_node(op_type="RandomNormalLike"), "an operator RandomNormalLike"),
    "unknown operator": (set_node(op_type="Pickle"), "an operator Pickle"),
    "support vectors": (set_node(op_type="SVMClassifier", domain="ai.onnx.ml"), "an operator SVMClassifier"),
    "subgraph": (subgraph, "a graph inside of the graph"),
    "nested subgraphs": (nested, "a graph inside of the graph|DecodeError"),
    "many nodes": (lambda p: p.graph.node.extend([onnx.NodeProto(op_type="Relu")] * 10_001), "10002 nodes"),
    "two inputs": (lambda p: p.graph.input.append(p.graph.input[0]), "2 inputs"),
    "no output": (lambda p: p.graph.output.pop(), "0 outputs"),
    "an input of text": (
        lambda p: setattr(p.graph.input[0].type.tensor_type, "elem_type", TensorProto.STRING),
        "an input that is not of floating-point numbers",
    ),
    "one sample only": (set_input(0, 1), "any number of samples"),
    "other samples": (set_input(1, 7), r"for samples of shape \(7,\)"),
    "giant samples": (set_input(1, 10**10), "for samples of shape"),
    "an output that is nowhere": (lambda p: setattr(p.graph.output[0], "name", "z"), ""),
    "a circle": (lambda p: p.graph.node[0].input.__setitem__(0, p.graph.node[0].output[0]), ""),
    "a name twice": (lambda p: p.graph.node.append(p.graph.node[0]), ""),
    "old operators": (lambda p: setattr(p.opset_import[0], "version", 0), ""),
    "operators of the future": (lambda p: setattr(p.opset_import[0], "version", 10**6), ""),
    "a format of the future": (lambda p: setattr(p, "ir_version", 10**6), ""),
}.items():
    add(f"onnx: {name}", lambda change=change: made.with_graph(change), said)

for arrays, said in [
    ({"v1": np.full((D, CLASSES), np.nan, np.float32)}, "NaN or infinity in 'v1'"),
    ({"v1": np.full((D, CLASSES), np.inf, np.float32)}, "NaN or infinity in 'v1'"),
    ({"v1": np.full((D, CLASSES), 3e38, np.float32)}, "NaN or infinity in its predictions"),
    ({"v1": np.zeros((D, CLASSES + 1), np.float32)}, r"predictions of shape \(4, 4\) instead of \(4, 3\)"),
    ({"v1": np.zeros((D + 1, CLASSES), np.float32)}, ""),
    ({"v1": np.zeros((D, CLASSES), np.int64)}, ""),
    ({"v1": np.zeros(D, np.float32)}, ""),
    ({"v1": None}, ""),
    ({"v9": np.zeros(1)}, "numbers 'v9' that nothing reads"),
    ({"0.alpha": np.zeros(1)}, "numbers '0.alpha' that nothing reads"),
    ({"graph": np.zeros(5_000_000, np.uint8)}, "a graph of 5000000 bytes"),
    ({"graph": np.zeros((1, 1), np.uint8)}, "a graph of 1 bytes"),
    ({"graph": np.zeros(9)}, "a graph of 72 bytes"),
    ({"graph": np.zeros(50, np.uint8)}, "DecodeError"),
    ({"graph": np.zeros(0, np.uint8)}, "0 inputs"),
    ({"graph": None}, "KeyError"),
]:
    kind, value = next(iter(arrays.items()))
    add(
        f"onnx: {named(kind, value)}, {'' if value is None or not value.size else value.flat[0]}",
        lambda arrays=arrays: made.changed(to_message(made.linear()), arrays),
        said,
    )


def empty_nodes() -> Message:
    """Two bytes make a node of more than a hundred."""
    body = b"\x0a\x00" * 3_000_000
    size = bytes([len(body) & 127 | 128, len(body) >> 7 & 127 | 128, len(body) >> 14 & 127 | 128, len(body) >> 21])
    return Message({"graph": np.frombuffer(b"\x3a" + size + body, np.uint8)}, {"kind": "onnx"})


add("onnx: a bomb of empty nodes", empty_nodes, "a graph of 6000005")
for elements in (2_500_000_000, 10**12, 2**62):
    add(f"onnx: wants {elements} elements", lambda e=elements: made.wants_memory(e), f"with a size of {elements}")

for changes, said in [
    ({"nodes_featureids": [5, 0, 0, 4, 0, 0]}, NO_FEATURE),
    ({"nodes_featureids": [-1, 0, 0, 4, 0, 0]}, NO_FEATURE),
    ({"nodes_truenodeids": [0, 0, 0, 1, 0, 0]}, "do not form trees"),  # a circle
    ({"nodes_truenodeids": [2, 0, 0, 1, 0, 0]}, "do not form trees"),  # a child of two
    ({"nodes_truenodeids": [9, 0, 0, 1, 0, 0]}, "do not form trees"),
    ({"nodes_nodeids": [0, 1, 1, 0, 1, 2]}, "do not form trees"),
    ({"nodes_nodeids": [0, 1, 2**40, 0, 1, 2]}, "giant numbers"),
    ({"nodes_values": [0.5]}, "lists of different lengths"),
    ({"nodes_modes": ["LEAF"]}, "lists of different lengths"),
    ({"nodes_modes": ["JUMP", "LEAF", "LEAF"] * 2}, ""),
    ({"target_ids": [0, 0, 2, 3]}, "outputs that do not exist"),
    ({"target_ids": [0, 0, 2, -1]}, "outputs that do not exist"),
    ({"target_nodeids": [1, 2, 1, 7]}, "leaves of other trees"),
    ({"target_weights": [1.0]}, "lists of different lengths"),
    ({"n_targets": 2**40}, "outputs that do not exist"),
    ({"base_values": [1.0]}, "base values"),
]:
    add(f"onnx: trees with {named(*next(iter(changes.items())))}", lambda c=changes: to_message(made.stumps(**c)), said)


def deep_trees(depth: int = 2000) -> Message:
    """Compiled code builds trees by recursion."""
    count = 2 * depth + 1
    inner = [i % 2 == 0 and i < count - 1 for i in range(count)]
    return to_message(
        made.stumps(
            nodes_treeids=[0] * count,
            nodes_nodeids=list(range(count)),
            nodes_featureids=[0] * count,
            nodes_truenodeids=[i + 1 if inner[i] else 0 for i in range(count)],
            nodes_falsenodeids=[i + 2 if inner[i] else 0 for i in range(count)],
            nodes_modes=["BRANCH_LT" if inside else "LEAF" for inside in inner],
            nodes_values=[0.0] * count,
            target_treeids=[0],
            target_nodeids=[1],
            target_ids=[0],
            target_weights=[1.0],
        )
    )


def trees_of_something_else() -> Message:
    """Trees that read one column of the samples, of five that they know."""
    leaves = {a.name: helper.get_attribute_value(a) for a in made.stumps().graph.node[0].attribute}
    cut = helper.make_node("Slice", ["x", "zero", "one", "one"], ["z"])
    forest = helper.make_node("TreeEnsembleRegressor", ["z"], ["y"], domain="ai.onnx.ml", **leaves)
    return to_message(made.graph([cut, forest], {"zero": np.array([0]), "one": np.array([1])}))


add("onnx: trees too deep", deep_trees, "deeper than 500")
add("onnx: trees of something else", trees_of_something_else, "does not read the samples")
