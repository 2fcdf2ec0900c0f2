"""Small messages that hold models which would compute for minutes or fill the memory of a receiver."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import model_messages as made
import numpy as np
from onnx import NodeProto, TensorProto, helper
from travelling_models import CLASSES, D, message

from codistill.learners import zoo
from codistill.learners.portable.onnx_graph import to_message
from codistill.learners.torch import TorchLearner
from codistill.wire.message import Message

ROWS = 37  # of the receiver


@dataclass(frozen=True)
class Bomb:
    """A message, what is said of it, and the task of the receiver."""

    make: Callable[[], Message]
    said: str
    shape: tuple[int, ...] = (D,)
    classes: int = CLASSES


node = helper.make_node


def products(size: int, count: int) -> Message:
    """A number of the samples, expanded to a matrix that is multiplied with itself over and over."""
    chain = [node("ReduceMean", ["z"], ["s"], keepdims=0), node("Expand", ["s", "shape"], ["b0"])]
    for i in range(count):
        chain += [node("MatMul", [f"b{i}", f"b{i}"], [f"p{i}"]), node("Mul", [f"p{i}", "zero"], [f"b{i + 1}"])]
    return ending(chain, f"b{count}", {"shape": np.array([size, size])})


def ending(nodes: list[NodeProto], big: str, weights: dict[str, Any], **more: Any) -> Message:
    """A linear model that adds nothing of something big to its outputs."""
    nodes = [
        *(node("MatMul", ["x", "w"], ["z"]), *nodes),
        *(node("Cast", [big], ["f"], to=TensorProto.FLOAT), node("ReduceMax", ["f"], ["m"], keepdims=0)),
        *(node("Mul", ["m", "zero"], ["nothing"]), node("Add", ["z", "nothing"], ["y"])),
    ]
    fixed = {"w": np.ones((D, CLASSES), np.float32), "zero": np.float32(0)}
    return to_message(made.graph(nodes, fixed | weights))


def chained(count: int) -> Message:
    """Nodes that do nothing, one after the other: onnxruntime prepares them in quadratic time."""
    return ending([node("Relu", ["x" if i == 0 else f"r{i}"], [f"r{i + 1}"]) for i in range(count)], f"r{count}", {})


def axes(count: int) -> Message:
    """A tensor with so many axes more."""
    more = [node("Unsqueeze", ["x" if i == 0 else f"u{i}", "zeroth"], [f"u{i + 1}"]) for i in range(count)]
    return ending(more, f"u{count}", {"zeroth": np.array([0])})


def doubled(times: int) -> Message:
    """Something joined to itself over and over."""
    joins = [node("Concat", [f"c{i}"] * 2, [f"c{i + 1}"], axis=1) for i in range(times)]
    return ending([node("Identity", ["x"], ["c0"]), *joins], f"c{times}", {})


def hoarded(count: int) -> Message:
    """Many tensors, each of them within limits, all of them held to the end."""
    parts = [node("Expand", ["one", "shape"], [f"e{i}"]) for i in range(count)]
    weights = {"one": np.float32(1), "shape": np.array([5000, 5000])}
    return ending([*parts, node("Sum", [f"e{i}" for i in range(count)], ["big"])], "big", weights)


def size_of_values() -> Message:
    """As large as the samples say."""
    of_values = [
        *(node("ReduceSum", ["x"], ["s"], keepdims=1), node("Cast", ["s"], ["i"], to=TensorProto.INT64)),
        *(node("Reshape", ["i", "flat"], ["n"]), node("ConstantOfShape", ["n"], ["big"])),
    ]
    return ending(of_values, "big", {"flat": np.array([1])})


def only_for(rows: int, factor: int) -> Message:
    """Small, unless it is given exactly so many rows."""
    of_rows = [
        *(node("Shape", ["x"], ["sizes"]), node("Gather", ["sizes", "first"], ["n"])),
        *(node("Equal", ["n", "rows"], ["hit"]), node("Where", ["hit", "many", "few"], ["times"])),
        node("ConstantOfShape", ["times"], ["big"]),
    ]
    numbers = {"first": np.array([0]), "rows": np.array([rows]), "many": np.array([factor]), "few": np.array([1])}
    return ending(of_rows, "big", numbers)


def fails_unless(rows: set[int], width: int = D) -> Message:
    """A linear model for these numbers of rows, and for no other."""
    table = np.array([n if n in rows else n + 1 for n in range(100)])
    nodes = [
        *(
            node("MatMul", ["x", "w"], ["z"]),
            node("Shape", ["x"], ["sizes"]),
            node("Gather", ["sizes", "first"], ["n"]),
        ),
        *(node("Gather", ["table", "n"], ["m"]), node("Concat", ["m", "classes"], ["shape"], axis=0)),
        node("Reshape", ["z", "shape"], ["y"]),
    ]
    weights = {"w": np.zeros((width, CLASSES), np.float32), "first": np.array([0]), "table": table}
    return to_message(made.graph(nodes, weights | {"classes": np.array([CLASSES])}, width))


def sized(op: str, sizes: dict[str, Any], *before: str, **attributes: Any) -> Message:
    """One operator with sizes that it is given."""
    return ending([node(op, [*before, *sizes], ["big"], **attributes)], "big", sizes)


def image(op: str, side: int, weights: dict[str, Any], inputs: list[str], **attributes: Any) -> Message:
    """One operator on an image that is a single number."""
    nodes = [
        *(node("ReduceMean", ["x"], ["s"], keepdims=0), node("Expand", ["s", "shape"], ["image"])),
        node(op, ["image", *inputs], ["big"], **attributes),
    ]
    return ending(nodes, "big", {"shape": np.array([1, 1, side, side]), **weights})


def zeros(count: int) -> Message:
    """Zeros in an estimator: a thousandth of them travels."""
    return made.with_array("ridge", "coef_", np.zeros((CLASSES, count)))


def outline(parts: int) -> Message:
    """Empty lists in the outline of an estimator."""
    text, files = made.opened(message("ridge"))
    made.attributes(text)["alpha"] = {"content": "HERE"}
    return made.closed(json.dumps(text).replace('"HERE"', "[" + "[]," * parts + "[]]").encode(), files)


def noisy(sound: Message) -> tuple[bytes, dict[str, bytes]]:
    """An archive that is large enough for its outline, by noise that nothing reads."""
    text, files = made.opened(sound)
    return json.dumps(text).encode(), files | {"noise.npy": np.random.default_rng(0).bytes(500_000)}


def wide_features(count: int) -> Message:
    """Bagging whose first tree is said to read the first feature many times."""

    def edit(text, files):
        files["wide.npy"] = made.npy(np.zeros(count, np.int8))
        made.attributes(text)["estimators_features_"]["content"][0]["file"] = "wide.npy"

    return made.edited("bagging", edit)


def wide_components(count: int) -> Message:
    """A projection to many components."""

    def edit(text, files):
        files["wide.npy"] = made.npy(np.zeros((count, D), np.float32))
        first = next(n for n in made.nodes(text) if n["__class__"] == "PCA")
        made.attributes(first)["components_"]["file"] = "wide.npy"

    return made.edited("components", edit)


def slow_module() -> Message:
    """A registered architecture whose weights are few, for samples that are large."""
    return TorchLearner(zoo.build("resnet14", (3, 512, 512), CLASSES)).export()


OPERATIONS, HOLDS = "operations per row, above the limit of 20,000,000,000", "bytes for 4 rows, above 1,073,741,824"
UNKNOWN = "whose size cannot be known before it runs"

BOMBS: dict[str, Bomb] = {
    "onnx: products": Bomb(lambda: products(1500, 300), OPERATIONS),
    "onnx: products of many nodes": Bomb(lambda: products(4000, 900), OPERATIONS),
    "onnx: Expand": Bomb(lambda: sized("Expand", {"s": np.array([40_000, 40_000])}, "zero"), f"{OPERATIONS}|{HOLDS}"),
    "onnx: Tile": Bomb(lambda: sized("Tile", {"s": np.array([10**5, 10**4])}, "z"), f"{OPERATIONS}|{HOLDS}"),
    "onnx: Tile around": Bomb(lambda: sized("Tile", {"s": np.array([2**62, 1])}, "z"), "with a size of"),
    "onnx: Range": Bomb(
        lambda: sized("Range", {"a": np.array(0), "b": np.array(10**9), "c": np.array(1)}), f"{OPERATIONS}|{HOLDS}"
    ),
    "onnx: OneHot": Bomb(
        lambda: sized("OneHot", {"i": np.arange(99), "d": np.array([10**8]), "v": np.array([0.0, 1.0])}), OPERATIONS
    ),
    "onnx: Pad": Bomb(lambda: sized("Pad", {"p": np.array([0, 10**9, 0, 0])}, "z"), f"{OPERATIONS}|{HOLDS}"),
    "onnx: outer products": Bomb(
        lambda: sized("Einsum", dict.fromkeys("abc", np.ones(2000, np.float32)), equation="i,j,k->"), HOLDS
    ),
    "onnx: Resize": Bomb(
        lambda: image("Resize", 9, {"k": np.array([1, 1, 9000, 9000])}, ["", "", "k"], mode="cubic"), OPERATIONS
    ),
    "onnx: Conv": Bomb(
        lambda: image("Conv", 1000, {"k": np.ones((1, 1, 501, 501), np.float32)}, ["k"], pads=[250] * 4), OPERATIONS
    ),
    "onnx: LpPool": Bomb(lambda: image("LpPool", 600, {}, [], kernel_shape=[101] * 2, pads=[50] * 4), OPERATIONS),
    "onnx: Det": Bomb(lambda: image("Det", 5000, {}, []), OPERATIONS),
    "onnx: nodes": Bomb(lambda: chained(9900), "nodes, above the limit of 2000"),
    "onnx: axes": Bomb(lambda: axes(1000), "a tensor of shape"),
    "onnx: text": Bomb(lambda: sized("Cast", {}, "z", to=TensorProto.STRING), "or of text"),
    "onnx: doubled": Bomb(lambda: doubled(40), f"{OPERATIONS}|{HOLDS}"),
    "onnx: held": Bomb(lambda: hoarded(12), f"{OPERATIONS}|{HOLDS}"),
    "onnx: a size of values": Bomb(size_of_values, UNKNOWN),
    "onnx: for some rows": Bomb(lambda: only_for(ROWS, 2 * 10**9), "a model that holds .* for 37 rows"),
    "skops: zeros": Bomb(lambda: zeros(3_000_000), "bytes that unpacks to"),
    "skops: an outline of empty lists": Bomb(lambda: outline(5_000_000), "with an outline of"),
    "skops: a noisy outline of lists": Bomb(
        lambda: made.closed(*noisy(outline(500_000))), "parts and .* values, above the limits of"
    ),
    "skops: wide features": Bomb(lambda: wide_features(30_000_000), "30000000 numbers for each row, above the limit"),
    "skops: wide components": Bomb(lambda: wide_components(1_000_000), "1000000 numbers for each row, above the limit"),
    "kernel: short numbers": Bomb(
        lambda: made.changed(
            message("rbf kernel"),
            {"inputs": np.zeros((10**6, D), np.int8), "coefficients": np.zeros((10**6, CLASSES), np.int8)},
        ),
        "inputs of type int8",
    ),
    "torch: large samples": Bomb(slow_module, OPERATIONS, (3, 512, 512)),
}
