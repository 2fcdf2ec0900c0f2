"""ONNX in a message: the bare graph, and beside it every number as an array.

Names, comments and paths of the sender's files are left out, so equal models are equal bytes and nothing of
a machine is revealed. The numbers are arrays of the message, whose sizes, types and finite values are already
checked; the graph alone is small, which bounds what parsing it can cost.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, numpy_helper

from codistill.message import Message

# Parsing takes up to 75 times the bytes of the graph; the numbers are copied three times on their way.
GRAPH_LIMIT = 4 << 20
NUMBERS_LIMIT = 1 << 28
# onnxruntime takes time with the square of the nodes: 2 s for 2,000, a minute for 10,000.
NODE_LIMIT = 2_000

FLOATS: dict[int, np.dtype[Any]] = {
    TensorProto.FLOAT: np.dtype(np.float32),
    TensorProto.DOUBLE: np.dtype(np.float64),
}
_SHORT = 16  # lists of integers up to this length (strides, axes) stay in the graph


def to_message(model: ModelProto) -> Message:
    """A model as it travels; ValueError if it has parts that may not."""
    if model.functions or model.training_info or model.graph.sparse_initializer:
        raise ValueError("functions, training or sparse weights in the graph")
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    inputs = [value for value in model.graph.input if value.name not in weights]
    if len(inputs) != 1:
        raise ValueError(f"{len(inputs)} inputs instead of one")
    output = _predictions(model.graph)
    nodes = _needed(model.graph, output.name)
    names = _numbered([inputs[0].name, *(name for node in nodes for name in (*node.input, *node.output))])
    if output.name not in names:
        raise ValueError("an output that no node computes")

    arrays = {names[name]: _numbers(tensor) for name, tensor in weights.items() if name in names}
    bare = ModelProto(ir_version=model.ir_version)
    used = {node.domain for node in nodes}
    bare.opset_import.extend(sorted((o for o in model.opset_import if o.domain in used), key=lambda o: o.domain))
    bare.graph.name = "model"
    for index, node in enumerate(nodes):
        bare.graph.node.append(_bare_node(node, index, names, arrays))
    bare.graph.input.append(_bare_value(inputs[0], names))
    bare.graph.output.append(_bare_value(output, names))
    return Message({"graph": np.frombuffer(_bytes(bare), np.uint8), **arrays}, {"kind": "onnx"})


def from_message(message: Message) -> ModelProto:
    """The bare graph of a message, parsed but not yet trusted; its numbers are still apart."""
    data = message.arrays["graph"]
    if data.dtype != np.uint8 or data.ndim != 1 or len(data) > GRAPH_LIMIT:
        raise ValueError(f"a graph of {data.nbytes} bytes")
    model: ModelProto = ModelProto.FromString(data.tobytes())
    return model


def join(model: ModelProto, message: Message) -> None:
    """Put the numbers of a message into its graph, each where it belongs; anything left over is an error."""
    arrays = {name: array for name, array in message.arrays.items() if name != "graph"}
    size = sum(array.nbytes for array in arrays.values())
    if size > NUMBERS_LIMIT:
        raise ValueError(f"numbers of {size} bytes")
    for name, array in arrays.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise ValueError(f"NaN or infinity in '{name}'")
    read = {name for node in model.graph.node for name in node.input}
    for index, node in enumerate(model.graph.node):
        for attribute in node.attribute:
            key = f"{index}.{attribute.name}"
            if key in arrays:
                _fill(attribute, arrays.pop(key))
    for name, array in arrays.items():
        if name not in read:
            raise ValueError(f"numbers '{name}' that nothing reads")
        model.graph.initializer.append(numpy_helper.from_array(array, name))


def values(node: NodeProto, name: str) -> np.ndarray:
    """The numbers of an attribute, whatever form it has; empty if there is none."""
    for attribute in node.attribute:
        if attribute.name == name:
            if attribute.type == AttributeProto.TENSOR:
                return np.asarray(numpy_helper.to_array(attribute.t)).reshape(-1)
            for field in ("ints", "floats", "strings"):
                if getattr(attribute, field):
                    return np.asarray(getattr(attribute, field))
            return np.asarray([attribute.i] if attribute.type == AttributeProto.INT else [])
    return np.asarray([])


# --- sending ------------------------------------------------------------------------------------


def _predictions(graph: GraphProto) -> ValueInfoProto:
    """The output that is a matrix of floats; converters put class labels before it."""
    found = [value for value in graph.output if value.type.tensor_type.elem_type in FLOATS]
    if not found:
        raise ValueError("no output of floating-point numbers")
    predictions: ValueInfoProto = found[-1]
    return predictions


def _needed(graph: GraphProto, output: str) -> list[NodeProto]:
    """The nodes on which an output depends."""
    wanted, nodes = {output}, []
    for node in reversed(graph.node):
        if wanted & set(node.output):
            wanted |= set(node.input)
            nodes.append(node)
    return nodes[::-1]


def _numbered(names: list[str]) -> dict[str, str]:
    """Names by order of appearance; the empty name stands for an input left out."""
    return {"": ""} | {name: f"v{number}" for number, name in enumerate(dict.fromkeys(filter(None, names)))}


def _bare_value(value: ValueInfoProto, names: dict[str, str]) -> ValueInfoProto:
    bare = ValueInfoProto(name=names[value.name])
    kind = value.type.tensor_type
    bare.type.tensor_type.elem_type = kind.elem_type
    for axis, dim in enumerate(kind.shape.dim):
        bare.type.tensor_type.shape.dim.add(**({"dim_value": dim.dim_value} if axis and dim.dim_value else {}))
    return bare


def _bare_node(node: NodeProto, index: int, names: dict[str, str], arrays: dict[str, np.ndarray]) -> NodeProto:
    bare = NodeProto(op_type=node.op_type, domain=node.domain)
    bare.input.extend(names[name] for name in node.input)
    bare.output.extend(names[name] for name in node.output)
    for attribute in sorted(node.attribute, key=lambda attribute: attribute.name):
        kept = bare.attribute.add(name=attribute.name, type=attribute.type)
        match attribute.type:
            case AttributeProto.INT:
                kept.i = attribute.i
            case AttributeProto.FLOAT:
                kept.f = attribute.f
            case AttributeProto.STRING:
                kept.s = attribute.s
            case AttributeProto.INTS if len(attribute.ints) <= _SHORT:
                kept.ints.extend(attribute.ints)
            case AttributeProto.INTS:
                arrays[f"{index}.{attribute.name}"] = np.asarray(attribute.ints, np.int64)
            case AttributeProto.FLOATS:
                arrays[f"{index}.{attribute.name}"] = np.asarray(attribute.floats, np.float32)
            case AttributeProto.TENSOR:
                arrays[f"{index}.{attribute.name}"] = _numbers(attribute.t)
            case AttributeProto.STRINGS:  # a tree names the mode of every node: a few words, many times
                words, codes = np.unique(np.asarray(attribute.strings, object), return_inverse=True)
                kept.strings.extend(words)
                arrays[f"{index}.{attribute.name}"] = codes.astype(np.uint8 if len(words) <= 256 else np.uint32)
            case _:
                raise ValueError(f"'{attribute.name}' of {node.op_type}, a graph inside of the graph")
    return bare


def _numbers(tensor: TensorProto) -> np.ndarray:
    if tensor.data_location == TensorProto.EXTERNAL or tensor.external_data:
        raise ValueError("weights in a file of their own")
    array = np.asarray(numpy_helper.to_array(tensor))
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise ValueError("NaN or infinity in its weights")
    return array


def _bytes(model: ModelProto) -> bytes:
    return bytes(model.SerializeToString(deterministic=True))


# --- receiving ----------------------------------------------------------------------------------


def _fill(attribute: Any, array: np.ndarray) -> None:
    match attribute.type:
        case AttributeProto.TENSOR:
            attribute.t.CopyFrom(numpy_helper.from_array(array))
        case AttributeProto.INTS if array.dtype == np.int64 and array.ndim == 1:
            attribute.ints.extend(array)
        case AttributeProto.FLOATS if array.dtype == np.float32 and array.ndim == 1:
            attribute.floats.extend(array)
        case AttributeProto.STRINGS if array.dtype.kind == "u" and array.ndim == 1:
            words = list(attribute.strings)
            if math.prod(array.shape) * max(map(len, words), default=0) > NUMBERS_LIMIT:
                raise ValueError(f"'{attribute.name}', a giant list of words")
            del attribute.strings[:]
            attribute.strings.extend(words[code] for code in array)
        case _:
            raise ValueError(f"'{attribute.name}' of another type than its numbers")
