"""Messages that hold models, taken apart, changed by hand and put together again, as a hostile sender would."""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper
from travelling_models import CLASSES, D, message

from codistill.learners.portable.onnx_graph import to_message
from codistill.wire.message import Message

TRAP = "trap"  # a folder that nobody may make


class Trap:
    """Whoever unpickles it makes a folder."""

    def __reduce__(self):
        return os.mkdir, (TRAP,)


def changed(sound: Message, arrays: dict[str, Any] | None = None, **plain: Any) -> Message:
    """A message with other values; None removes one."""
    keep = {name: value for name, value in (sound.plain | plain).items() if value is not None}
    return Message({k: v for k, v in (sound.arrays | (arrays or {})).items() if v is not None}, keep)


# --- estimators: an archive of an outline in JSON and of arrays -----------------------------------


def archive_message(data: bytes, **plain: Any) -> Message:
    """Bytes in the place of an archive."""
    return Message({"model": np.frombuffer(data, np.uint8)}, {"kind": "skops", "classes": CLASSES} | plain)


def opened(sound: Message) -> tuple[Any, dict[str, bytes]]:
    """The outline of a travelling estimator and its files."""
    with zipfile.ZipFile(io.BytesIO(sound.arrays["model"].tobytes())) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    return json.loads(files.pop("schema.json")), files


def closed(outline: Any, files: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> Message:
    """The opposite of `opened`."""
    text = outline if isinstance(outline, bytes) else json.dumps(outline).encode()
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        for name, data in {"schema.json": text, **files}.items():
            archive.writestr(name, data)
    return archive_message(out.getvalue())


def edited(name: str, edit: Callable[[Any, dict[str, bytes]], object]) -> Message:
    """The message of an estimator of the table, its outline and files changed by hand."""
    outline, files = opened(message(name))
    edit(outline, files)
    return closed(outline, files)


def nodes(outline: Any) -> Iterator[dict[str, Any]]:
    """Every node of an outline that builds something."""
    if isinstance(outline, dict):
        if "__loader__" in outline:
            yield outline
        outline = list(outline.values())
    if isinstance(outline, list):
        for item in outline:
            yield from nodes(item)


def first(outline: Any, loader: str | None = None, name: str | None = None) -> dict[str, Any]:
    """The first node of a loader and of a class."""
    return next(n for n in nodes(outline) if loader in (None, n["__loader__"]) and name in (None, n["__class__"]))


def attributes(node: dict[str, Any]) -> dict[str, Any]:
    """The attributes of an object in the outline."""
    return node["content"]["content"]


def plain_node(value: Any) -> dict[str, Any]:
    """A plain value in the outline."""
    return {"__class__": "str", "__module__": "builtins", "__loader__": "JsonNode", "content": json.dumps(value)}


def list_node(content: list[Any], **more: Any) -> dict[str, Any]:
    """A list in the outline."""
    return {"__class__": "list", "__module__": "builtins", "__loader__": "ListNode", "content": content} | more


def call_node(module: str, name: str, *arguments: Any, loader: str = "ConstructorFromReduceNode") -> dict[str, Any]:
    """A node that calls a function on loading."""
    content = {"__class__": "tuple", "__module__": "builtins", "__loader__": "TupleNode"}
    content["content"] = [plain_node(argument) for argument in arguments]
    return {"__class__": name, "__module__": module, "__loader__": loader, "content": content} | (
        {"__reduce__": {"args": content}} if loader != "ConstructorFromReduceNode" else {}
    )


def npy(array: np.ndarray) -> bytes:
    """An array in numpy's file format."""
    out = io.BytesIO()
    np.save(out, array, allow_pickle=False)
    return out.getvalue()


def with_attribute(name: str, attribute: str, value: Any) -> Message:
    """A model with one attribute set by hand; ... removes it."""

    def edit(outline, files):
        own, types = attributes(outline), outline["content"]["key_types"]["content"]
        types.append(types[0])  # one too many does no harm
        own[attribute] = plain_node(None if value is ... else value)
        if value is ...:
            del own[attribute]

    return edited(name, edit)


def with_array(name: str, attribute: str, array: np.ndarray | bytes) -> Message:
    """A model with one array set by hand."""

    def edit(outline, files):
        files["new.npy"] = array if isinstance(array, bytes) else npy(array)
        attributes(outline)[attribute]["file"] = "new.npy"

    return edited(name, edit)


def with_tree_nodes(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Message:
    """A model whose first tree has nodes changed by hand."""

    def edit(outline, files):
        hist = name.startswith("hist")
        tree = first(outline, "ObjectNode" if hist else "TreeNode", "TreePredictor" if hist else "Tree")
        array = np.load(io.BytesIO(files[attributes(tree)["nodes"]["file"]])).copy()
        files["changed.npy"] = npy(change(array))
        attributes(tree)["nodes"]["file"] = "changed.npy"

    return edited(name, edit)


def put(field: str, index: Any, value: Any) -> Callable[[np.ndarray], np.ndarray]:
    """Set one field of a tree's nodes."""

    def change(array):
        array[field][index] = value
        return array

    return change


# --- ONNX: a bare graph, and its numbers beside it ------------------------------------------------


def graph(nodes: list[NodeProto], weights: dict[str, np.ndarray] | None = None, width: int = D) -> ModelProto:
    """A model x (n, width) -> y (n, CLASSES), with a sender's names and paths in it."""
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", width])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", CLASSES])
    held = [numpy_helper.from_array(array, name) for name, array in (weights or {}).items()]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
    body = helper.make_graph(nodes, "secret project", [x], [y], held)
    return helper.make_model(body, opset_imports=opsets, ir_version=8, producer_name="me", doc_string="/home/me/x.py")


def linear(scale: float = 1.0, softmax: bool = False) -> ModelProto:
    """y = x w, or its softmax."""
    weights = np.arange(D * CLASSES, dtype=np.float32).reshape(D, CLASSES) * np.float32(scale)
    product = helper.make_node("MatMul", ["x", "w"], ["z" if softmax else "y"], name="/home/me/layer", doc_string="me")
    after = [helper.make_node("Softmax", ["z"], ["y"], axis=1)] if softmax else []
    return graph([product, *after], {"w": weights})


def stumps(**changes: Any) -> ModelProto:
    """Two trees of one split each, on features 0 and 4, into columns 0 and 2."""
    lists = {
        "nodes_treeids": [0, 0, 0, 1, 1, 1],
        "nodes_nodeids": [0, 1, 2, 0, 1, 2],
        "nodes_featureids": [0, 0, 0, 4, 0, 0],
        "nodes_truenodeids": [1, 0, 0, 1, 0, 0],
        "nodes_falsenodeids": [2, 0, 0, 2, 0, 0],
        "nodes_modes": ["BRANCH_LEQ", "LEAF", "LEAF"] * 2,
        "nodes_values": [0.5, 0.0, 0.0, -0.5, 0.0, 0.0],
        "target_treeids": [0, 0, 1, 1],
        "target_nodeids": [1, 2, 1, 2],
        "target_ids": [0, 0, 2, 2],
        "target_weights": [1.0, 2.0, 3.0, 4.0],
        "n_targets": CLASSES,
    }
    return graph([helper.make_node("TreeEnsembleRegressor", ["x"], ["y"], domain="ai.onnx.ml", **(lists | changes))])


def with_graph(change: Callable[[ModelProto], object]) -> Message:
    """The message of `linear`, its graph changed by hand."""
    sound = to_message(linear())
    proto = ModelProto.FromString(sound.arrays["graph"].tobytes())
    change(proto)
    return changed(sound, {"graph": np.frombuffer(proto.SerializeToString(), np.uint8)})


def wants_memory(elements: int) -> Message:
    """A few bytes that ask for an array of so many elements."""
    asked = [
        helper.make_node("ConstantOfShape", ["size"], ["big"]),
        helper.make_node("ReduceSum", ["big"], ["sum"], keepdims=0),
        helper.make_node("MatMul", ["x", "w"], ["z"]),
        helper.make_node("Add", ["z", "sum"], ["y"]),
    ]
    return to_message(graph(asked, {"size": np.array([elements]), "w": np.ones((D, CLASSES), np.float32)}))
