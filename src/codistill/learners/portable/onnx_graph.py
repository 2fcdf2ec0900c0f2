"""ONNX in a message: the bare graph, and beside it every number as an array; what is checked and counted of a graph.

Names, comments and paths of the sender's files are left out, so equal models are equal bytes and nothing of
a machine is revealed. The numbers are arrays of the message, whose sizes, types and finite values are already
checked; the graph alone is small, which bounds what parsing it can cost.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from onnx import (
    AttributeProto,
    GraphProto,
    ModelProto,
    NodeProto,
    TensorProto,
    TypeProto,
    ValueInfoProto,
    defs,
    helper,
    numpy_helper,
    shape_inference,
)
from onnx.reference import ReferenceEvaluator

from codistill.learners.portable.models import Cost
from codistill.wire.message import Message

# Parsing takes up to 75 times the bytes of the graph; the numbers are copied three times on their way.
GRAPH_LIMIT = 4 << 20
NUMBERS_LIMIT = 1 << 28
# onnxruntime takes time with the square of the nodes: 2 s for 2,000, a minute for 10,000.
NODE_LIMIT = 2_000

FLOATS: dict[int, np.dtype[Any]] = {TensorProto.FLOAT: np.dtype(np.float32), TensorProto.DOUBLE: np.dtype(np.float64)}
_SHORT = 16  # lists of integers up to this length (strides, axes) stay in the graph


def to_message(model: ModelProto) -> Message:
    """A model as it travels; ValueError if it has parts that may not."""
    if model.functions or model.training_info or model.graph.sparse_initializer:
        raise ValueError("functions, training or sparse weights in the graph")
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    inputs = [value for value in model.graph.input if value.name not in weights]
    if len(inputs) != 1:
        raise ValueError(f"{len(inputs)} inputs instead of one")
    floats = [value for value in model.graph.output if value.type.tensor_type.elem_type in FLOATS]
    if not floats:
        raise ValueError("no output of floating-point numbers")
    output = floats[-1]  # converters put class labels before the predictions
    nodes = _needed(model.graph, output.name)
    # Names by order of appearance; the empty name stands for an input left out.
    found = [inputs[0].name, *(name for node in nodes for name in (*node.input, *node.output))]
    names = {"": ""} | {name: f"v{number}" for number, name in enumerate(dict.fromkeys(filter(None, found)))}
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
    data = bare.SerializeToString(deterministic=True)
    return Message({"graph": np.frombuffer(data, np.uint8), **arrays}, {"kind": "onnx"})


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


def _needed(graph: GraphProto, output: str) -> list[NodeProto]:
    """The nodes on which an output depends."""
    wanted, nodes = {output}, []
    for node in reversed(graph.node):
        if wanted & set(node.output):
            wanted |= set(node.input)
            nodes.append(node)
    return nodes[::-1]


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


# --- Checks of a received ONNX graph before onnxruntime sees it.

# Operators that may travel: they compute the same on every run, call nothing, and hold no graph of their own
# (no If, Loop or Scan; nothing random, no text, no sequences). Support vectors would be rows of the data.
_STANDARD = """
Abs Acos Acosh Add And Asin Asinh Atan Atanh Ceil Cos Cosh Div Equal Erf Exp Floor Greater
GreaterOrEqual IsInf IsNaN Less LessOrEqual Log Max Mean Min Mod Mul Neg Not Or Pow Reciprocal
Round Sign Sin Sinh Sqrt Sub Sum Tan Where Xor Clip Cast CastLike Identity Dropout
Celu Elu Gelu HardSigmoid HardSwish LeakyRelu LogSoftmax Mish PRelu Relu Selu Sigmoid Softmax
Softplus Softsign Tanh ThresholdedRelu Hardmax
Conv ConvTranspose AveragePool GlobalAveragePool GlobalMaxPool GlobalLpPool LpPool MaxPool
BatchNormalization GroupNormalization InstanceNormalization LayerNormalization LpNormalization
RMSNormalization LRN MeanVarianceNormalization Gemm MatMul Einsum Det GRU LSTM RNN Attention
ArgMax ArgMin CumSum ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin
ReduceProd ReduceSum ReduceSumSquare TopK
Concat Constant ConstantOfShape DepthToSpace Expand EyeLike Flatten Gather GatherElements GatherND
OneHot Pad Range Reshape Resize ReverseSequence ScatterElements ScatterND Shape Size Slice
SpaceToDepth Split Squeeze Tile Transpose Trilu Unsqueeze
"""
OPERATORS = {
    "": frozenset(_STANDARD.split()),
    "ai.onnx.ml": frozenset({"TreeEnsembleClassifier", "TreeEnsembleRegressor", "Normalizer", "Scaler"}),
}
OPERATORS["ai.onnx"] = OPERATORS[""]
_KEEP_WIDTH = frozenset({"Cast", "Identity", "Normalizer", "Scaler"})
_BY_VALUE = frozenset({"Add", "Sub", "Mul", "Div"})
_PLAIN = (
    *(AttributeProto.INT, AttributeProto.FLOAT, AttributeProto.STRING, AttributeProto.TENSOR),
    *(AttributeProto.INTS, AttributeProto.FLOATS, AttributeProto.STRINGS),
)
_DEPTH_LIMIT = 500  # compiled code builds trees by recursion


def check_graph(model: ModelProto, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Raise ValueError unless a bare graph is sound; return the shape in which it takes a sample."""
    graph = model.graph
    if model.functions or model.training_info or graph.initializer or graph.sparse_initializer:
        raise ValueError("functions, training or weights inside of the graph")
    if len(graph.node) > NODE_LIMIT:
        raise ValueError(f"{len(graph.node)} nodes, above the limit of {NODE_LIMIT}")
    for domain in [*(opset.domain for opset in model.opset_import), *(node.domain for node in graph.node)]:
        if domain not in OPERATORS:
            raise ValueError(f"operators of the domain '{domain[:60]}'")
    for node in graph.node:
        if node.op_type not in OPERATORS[node.domain]:
            raise ValueError(f"an operator {node.op_type[:60]}, which may not travel")
        if node.op_type == "Dropout" and len(node.input) > 2:
            raise ValueError("a Dropout in training mode")
        for attribute in node.attribute:
            if attribute.type not in _PLAIN or attribute.ref_attr_name or attribute.HasField("g") or attribute.graphs:
                raise ValueError(f"'{attribute.name[:60]}' of {node.op_type}, a graph inside of the graph")
            if attribute.HasField("t") or attribute.floats or not math.isfinite(attribute.f):
                # Numbers come beside the graph, so there is no way to name a file that holds them.
                raise ValueError(f"numbers inside of the graph: '{attribute.name[:60]}' of {node.op_type}")
    if len(graph.input) != 1 or len(graph.output) != 1:
        raise ValueError(f"{len(graph.input)} inputs and {len(graph.output)} outputs instead of one of each")
    if graph.output[0].type.tensor_type.elem_type not in FLOATS:
        raise ValueError("an output that is not of floating-point numbers")
    return _taken_shape(model, shape)


def _taken_shape(model: ModelProto, shape: tuple[int, ...]) -> tuple[int, ...]:
    kind = model.graph.input[0].type.tensor_type
    dims = kind.shape.dim
    if kind.elem_type not in FLOATS or not len(dims) or dims[0].dim_value:
        raise ValueError("an input that is not of floating-point numbers, with an axis for any number of samples")
    for taken in dict.fromkeys([shape, (math.prod(shape),)]):
        if len(dims) == 1 + len(taken) and all(
            dim.dim_value in (0, size) for dim, size in zip(list(dims)[1:], taken, strict=True)
        ):
            return taken
    raise ValueError(f"a model for samples of shape {tuple(dim.dim_value for dim in list(dims)[1:])}")


# --- with numbers: compiled code follows the indices of trees without bounds checks -------------


def check_numbers(model: ModelProto, taken: tuple[int, ...]) -> None:
    """Raise ValueError unless trees and scalers look only at features that there are."""
    widths = {model.graph.input[0].name: taken[0]} if len(taken) == 1 else {}
    constants = {tensor.name: tuple(tensor.dims) for tensor in model.graph.initializer}
    made = [name for node in model.graph.node for name in node.output if name]
    names = [*(given.name for given in model.graph.input), *constants, *made]
    if len(set(names)) < len(names) or len(constants) < len(model.graph.initializer):
        raise ValueError("two values of one name")  # what is known of a width or of a constant holds for one value
    for node in model.graph.node:
        width = widths.get(node.input[0]) if node.input else None
        # (n, w) with a constant (1, w) is (n, w) again.
        by_value = node.op_type in _BY_VALUE and len(node.input) == 2 and constants.get(node.input[1]) == (1, width)
        if width is not None and (node.op_type in _KEEP_WIDTH or by_value):
            widths[node.output[0]] = width
        if node.domain == "ai.onnx.ml" and width is None:
            raise ValueError(f"a {node.op_type} that does not read the samples")
        if node.op_type == "Scaler" and any(len(values(node, name)) not in (1, width) for name in ("offset", "scale")):
            raise ValueError("a Scaler for other features")
        if node.op_type.startswith("TreeEnsemble"):
            assert width is not None
            _check_trees(node, width)


def _check_trees(node: NodeProto, features: int) -> None:
    names = ("treeids", "nodeids", "featureids", "truenodeids", "falsenodeids", "modes")
    tree, own, feature, yes, no, mode = (values(node, f"nodes_{name}") for name in names)
    thresholds = values(node, "nodes_values")
    if not len(own) or any(len(part) != len(own) for part in (tree, feature, yes, no, mode, thresholds)):
        raise ValueError("trees with lists of different lengths")
    if max(tree.max(), own.max(), yes.max(), no.max()) >= 1 << 31 or min(tree.min(), own.min()) < 0:
        raise ValueError("trees with giant numbers of nodes")
    inner = mode != b"LEAF"
    keys = (tree << 31) + own
    children = np.concatenate([((tree << 31) + part)[inner] for part in (yes, no)])
    parents = np.concatenate([own[inner]] * 2)
    # Every child stands after its parent and has one parent: each walk ends, and there are no more paths than nodes.
    after = np.concatenate([yes[inner], no[inner]]) > parents
    once = len(np.unique(children)) == len(children) and len(np.unique(keys)) == len(keys)
    if not once or not after.all() or not np.isin(children, keys).all():
        raise ValueError("trees whose nodes do not form trees")
    if not ((feature[inner] >= 0) & (feature[inner] < features)).all():
        raise ValueError("trees that split on features that do not exist")
    above = np.concatenate([keys[inner]] * 2)
    order, depth = np.argsort(above, kind="stable"), dict[int, int]()
    for parent, child in zip(above[order].tolist(), children[order].tolist(), strict=True):
        depth[child] = depth.get(parent, 0) + 1
        if depth[child] > _DEPTH_LIMIT:
            raise ValueError(f"trees deeper than {_DEPTH_LIMIT}")
    _check_leaves(node, keys)


def _check_leaves(node: NodeProto, keys: np.ndarray) -> None:
    kind = "class" if node.op_type == "TreeEnsembleClassifier" else "target"
    tree, own, column, weight = (values(node, f"{kind}_{name}") for name in ("treeids", "nodeids", "ids", "weights"))
    labels = [len(values(node, name)) for name in ("classlabels_int64s", "classlabels_strings")]
    columns = max(labels) if kind == "class" else int(values(node, "n_targets").sum())
    if not len(own) or any(len(part) != len(own) for part in (tree, column, weight)):
        raise ValueError("leaves with lists of different lengths")
    if not 1 <= columns <= 1 << 20 or column.min() < 0 or column.max() >= columns:
        raise ValueError("leaves for outputs that do not exist")
    if not np.isin((tree << 31) + own, keys).all() or len(values(node, "base_values")) not in (0, columns):
        raise ValueError("leaves of other trees, or another number of base values than outputs")


# --- What a graph computes and holds, counted before onnxruntime sees it. The weights are from measurements of
# onnxruntime on one thread; an operation is a tenth of a nanosecond, rounded up.

_NODE = 10_000  # per node
_ELEMENT = 100  # per element that is read or written: 10 ns, also where broadcasting or transposing is slow
_SLOW = {
    **dict.fromkeys(["Acosh", "Asinh", "Atanh", "Cosh", "Mish", "Pow", "Sinh", "Softplus", "Tan"], 400),
    **dict.fromkeys(["Resize", "TopK"], 1000),
}
_MATRIX = 2000  # per matrix of a batch, per step of a recurrent layer, and per element of a general Einsum


def count(model: ModelProto, taken: tuple[int, ...], rows: int) -> Cost:
    """Operations and memory of a sound graph for so many rows; ValueError as soon as a limit is exceeded."""
    last = {name: index for index, node in enumerate(model.graph.node) for name in node.input}
    operations, held, now, alive = 0, 0, 0, dict[str, int]()
    for index, (node, inputs, outputs) in enumerate(steps(model, taken, rows)):
        sizes = [tensor.elements for tensor in (*inputs, *outputs) if tensor is not None]
        moved = max(sizes, default=0) * _SLOW.get(node.op_type, _ELEMENT)
        operations += _NODE + moved + _products(node, inputs, outputs)
        names = [name for name in node.output if name]
        alive |= {name: out.bytes for name, out in zip(names, outputs, strict=True)}
        now += sum(out.bytes for out in outputs)
        held = max(held, now + _workspace(node, inputs, outputs))
        Cost(rows, operations, held).check()
        # A result is held until its last reader has run.
        for name in {*node.input, *names}:
            if last.get(name, -1) <= index and name != model.graph.output[0].name:
                now -= alive.pop(name, 0)
    return Cost(rows, operations, held)


def _workspace(node: NodeProto, inputs: list[Tensor | None], outputs: list[Tensor]) -> int:
    """Bytes that a node holds beside its outputs."""
    if node.op_type in ("Conv", "ConvTranspose"):  # the patches of one image, side by side
        weights, images = _given(inputs, 1), outputs[0] if node.op_type == "Conv" else _given(inputs, 0)
        return math.prod(weights.shape[1:]) * math.prod(images.shape[2:]) * 4
    if node.op_type == "Einsum" and len(inputs) > 2:  # inputs are contracted in pairs
        return math.prod(_labels(node, inputs).values()) * 8
    if node.op_type == "Attention":
        return _scores(node, inputs) * 8
    return 0


def _given(inputs: list[Tensor | None], index: int) -> Tensor:
    found = inputs[index] if index < len(inputs) else None
    if found is None:
        raise ValueError("an operator without its inputs")
    return found


def _products(node: NodeProto, inputs: list[Tensor | None], outputs: list[Tensor]) -> int:
    """Operations of an operator that computes more than once per element; 0 of any other."""
    match node.op_type:
        case "MatMul":
            depth = (_given(inputs, 0).shape or (1,))[-1]
            matrices = math.prod(outputs[0].shape[:-2])
            return 2 * _slower_for_integers(outputs[0]) * outputs[0].elements * depth + matrices * _MATRIX
        case "Gemm":  # one side of the first matrix is a side of the result, the other one is summed over
            return 2 * outputs[0].elements * max(_given(inputs, 0).shape, default=1)
        case "Einsum":
            products = math.prod(_labels(node, inputs).values())
            return 2 * _slower_for_integers(outputs[0]) * products + _MATRIX * outputs[0].elements
        case "Conv" | "ConvTranspose":  # Conv: per output a product with its part of the weights; the other: per input
            each = outputs[0] if node.op_type == "Conv" else _given(inputs, 0)
            grouped = values(node, "group").sum() > 1
            return (4 if grouped else 2) * each.elements * math.prod(_given(inputs, 1).shape[1:])
        case "AveragePool" | "LpPool" | "MaxPool":
            weight = 200 if node.op_type == "LpPool" else 50
            return weight * outputs[0].elements * math.prod(int(size) for size in values(node, "kernel_shape"))
        case "GRU" | "LSTM" | "RNN":
            x, weights, recurrence = (_given(inputs, index) for index in range(3))
            positions = math.prod(x.shape[:2])  # sequence x batch, each with all gates of all directions
            return positions * (2 * (weights.elements + recurrence.elements) + 2 * _MATRIX * max(weights.shape[0], 1))
        case "Det":
            x = _given(inputs, 0)
            return x.elements * x.shape[-1] + _MATRIX * outputs[0].elements
        case "LRN":
            return outputs[0].elements * (_SLOW["Pow"] + 10 * int(values(node, "size").sum()))
        case "Attention":
            widest = max(tensor.shape[-1] for tensor in inputs[:3] if tensor is not None)
            return _scores(node, inputs) * (4 * widest + 4 * _ELEMENT)
        case "TreeEnsembleClassifier" | "TreeEnsembleRegressor":
            # A walk passes at most every other node of its trees, and adds at most all of their leaves.
            leaves = max(len(values(node, name)) for name in ("class_ids", "target_ids"))
            return outputs[0].shape[0] * (len(values(node, "nodes_nodeids")) // 2 + leaves) * _ELEMENT
    return 0


def _slower_for_integers(product: Tensor) -> int:
    return 1 if product.kind in (TensorProto.FLOAT, TensorProto.DOUBLE) else 4


def _labels(node: NodeProto, inputs: list[Tensor | None]) -> dict[str, int]:
    """The size of each index of an Einsum; of those in '...', counted from the right."""
    equation = b"".join(attribute.s for attribute in node.attribute if attribute.name == "equation").decode()
    sizes: dict[str, int] = {}
    terms = equation.replace(" ", "").partition("->")[0].split(",")
    for term, tensor in zip(terms, inputs, strict=True):
        before, dots, after = term.partition("...")
        assert tensor is not None
        hidden = [f"...{place}" for place in range(len(tensor.shape) - len(before) - len(after), 0, -1)] if dots else []
        for label, size in zip([*before, *hidden, *after], tensor.shape, strict=True):
            sizes[label] = max(size, sizes.get(label, 1))
    return sizes


def _scores(node: NodeProto, inputs: list[Tensor | None]) -> int:
    """Elements of the products of queries and keys, over all heads."""
    queries, keys = _given(inputs, 0), _given(inputs, 1)
    past = inputs[4] if len(inputs) > 4 else None
    length = keys.shape[-2] + (past.shape[-2] if past is not None else 0)
    heads = 1 if len(queries.shape) == 4 else int(values(node, "q_num_heads").sum())
    return math.prod(queries.shape[:-1]) * heads * length


# --- The sizes of all that an ONNX graph computes, found without computing it.

_SMALL = 256  # elements of a tensor whose values are evaluated
_RANK = 32  # axes of a tensor
_LARGEST = 1 << 31  # of a size, so that no product of two wraps around
# Of these, shapes are calculated; each takes time and memory in proportion to its inputs and outputs.
_EVALUATED = """
Abs Add And Cast CastLike Ceil Concat Constant ConstantOfShape Div Equal Expand Flatten Floor Gather
Greater GreaterOrEqual Identity Less LessOrEqual Max Min Mod Mul Neg Not Or Range ReduceMax ReduceMin
ReduceProd ReduceSum Reshape Round Size Slice Sqrt Squeeze Sub Tile Transpose Unsqueeze Where
"""
_OPEN_ENDED = frozenset({"Slice", "Shape"})  # may name an end beyond any size


@dataclass(frozen=True)
class Tensor:
    """The shape of a tensor, the bytes of an element, and its values where they are known."""

    shape: tuple[int, ...]
    kind: int
    value: np.ndarray | None = None

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.elements * int(helper.tensor_dtype_to_np_dtype(self.kind).itemsize)


Step = tuple[NodeProto, list[Tensor | None], list[Tensor]]  # a node, its inputs (None: left out), its outputs


def steps(model: ModelProto, taken: tuple[int, ...], rows: int) -> Iterator[Step]:
    """Every node of a sound graph with the sizes of what it reads and writes, for so many rows of samples."""
    graph, versions = model.graph, {opset.domain: opset.version for opset in model.opset_import}
    kind = graph.input[0].type.tensor_type.elem_type
    known = {graph.input[0].name: Tensor((rows, *taken), kind)}
    for weight in graph.initializer:
        small = math.prod(weight.dims) <= _SMALL
        known[weight.name] = _checked(
            Tensor(tuple(weight.dims), weight.data_type, numpy_helper.to_array(weight) if small else None)
        )
    for node in graph.node:
        if any(name and name not in known for name in node.input):
            raise ValueError(f"a {node.op_type} that reads what no node before it has computed")
        inputs = [known[name] if name else None for name in node.input]
        _check_sizes(node, inputs)
        outputs = _inferred(model, node, inputs, versions.get(node.domain, versions.get("", 1)))
        are_known = node.op_type in _EVALUATED.split() and all(
            part is None or part.value is not None for part in inputs
        )
        if (are_known or node.op_type == "Shape") and all(out.elements <= _SMALL for out in outputs.values()):
            for name, value in _evaluated(model, node, inputs).items():
                if name in outputs and value.shape == outputs[name].shape:
                    outputs[name] = replace(outputs[name], value=value)
        yield node, inputs, list(outputs.values())
        known |= outputs


def _inferred(model: ModelProto, node: NodeProto, inputs: Sequence[Tensor | None], version: int) -> dict[str, Tensor]:
    first = inputs[0] if inputs else None
    if node.op_type in ("Normalizer", "Scaler") and first is not None:  # of which onnx infers nothing
        return {node.output[0]: Tensor(first.shape, TensorProto.FLOAT)}
    given = {name: part for name, part in zip(node.input, inputs, strict=True) if part is not None}
    types = shape_inference.infer_node_outputs(
        defs.get_schema(node.op_type, version, node.domain),
        node,
        {name: helper.make_tensor_type_proto(part.kind, part.shape) for name, part in given.items()},
        {name: numpy_helper.from_array(part.value) for name, part in given.items() if part.value is not None},
        opset_imports=list(model.opset_import),
        ir_version=model.ir_version,
    )
    return {name: _sized(node, types.get(name)) for name in node.output if name}


def _sized(node: NodeProto, kind: TypeProto | None) -> Tensor:
    shape = kind.tensor_type.shape.dim if kind is not None and kind.tensor_type.HasField("shape") else None
    if kind is None or shape is None or not all(dim.HasField("dim_value") for dim in shape):
        raise ValueError(f"a {node.op_type} whose size cannot be known before it runs")
    return _checked(Tensor(tuple(dim.dim_value for dim in shape), kind.tensor_type.elem_type))


def _checked(tensor: Tensor) -> Tensor:
    small = len(tensor.shape) <= _RANK and all(0 <= size <= _LARGEST for size in tensor.shape)
    if not small or tensor.kind == TensorProto.STRING:
        raise ValueError(f"a tensor of shape {tensor.shape}, or of text"[:200])
    return tensor


def _check_sizes(node: NodeProto, inputs: Sequence[Tensor | None]) -> None:
    """No integer that could be a size is so large that a sum or a product of two of them wraps around."""
    if node.op_type in _OPEN_ENDED:
        return
    named = [number for attribute in node.attribute for number in (attribute.i, *attribute.ints)]
    held = [part.value for part in inputs if part is not None and part.value is not None]
    numbers = [int(number) for value in held if value.dtype.kind in "iu" for number in value.flat]
    largest = max([0, *map(abs, named), *map(abs, numbers)])
    if largest > _LARGEST:
        raise ValueError(f"a {node.op_type} with a size of {largest}")


def _evaluated(model: ModelProto, node: NodeProto, inputs: Sequence[Tensor | None]) -> dict[str, np.ndarray]:
    """The values of a node; none where they cannot be calculated (a division by zero, an index too large)."""
    if node.op_type == "Shape" and inputs[0] is not None:  # also of a tensor whose values are not known
        ends: dict[str, Any] = {attribute.name: attribute.i for attribute in node.attribute}
        return {node.output[0]: np.asarray(inputs[0].shape[ends.get("start", 0) : ends.get("end")], np.int64)}
    if node.op_type == "Constant" and node.attribute[0].name == "value":
        return {node.output[0]: numpy_helper.to_array(node.attribute[0].t)}
    given = {name: part.value for name, part in zip(node.input, inputs, strict=True) if part is not None}
    names = [name for name in node.output if name]
    alone = helper.make_graph(
        [node],
        "node",
        [helper.make_empty_tensor_value_info(name) for name in given],
        [helper.make_empty_tensor_value_info(name) for name in names],
    )
    try:
        with np.errstate(all="ignore"):
            evaluator = ReferenceEvaluator(
                ModelProto(graph=alone, ir_version=model.ir_version, opset_import=model.opset_import)
            )
            return dict(zip(names, map(np.asarray, evaluator.run(names, given)), strict=True))
    except Exception:  # whatever it is: the value stays unknown, and a shape made of it is refused
        return {}
