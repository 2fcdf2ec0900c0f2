"""Checks of a received ONNX graph before onnxruntime sees it."""

from __future__ import annotations

import math

import numpy as np
from onnx import AttributeProto, ModelProto, NodeProto

from codistill.learners.portable.onnx_graph import FLOATS, NODE_LIMIT, values

# Operators that may travel: they compute the same on every run, call nothing, and hold no graph of their own
# (no If, Loop or Scan; nothing random, no text, no sequences). Support vectors would be rows of the data.
OPERATORS = {
    "": frozenset(
        " ".join(
            [
                "Abs Acos Acosh Add And Asin Asinh Atan Atanh Ceil Cos Cosh Div Equal Erf Exp Floor Greater",
                "GreaterOrEqual IsInf IsNaN Less LessOrEqual Log Max Mean Min Mod Mul Neg Not Or Pow Reciprocal",
                "Round Sign Sin Sinh Sqrt Sub Sum Tan Where Xor Clip Cast CastLike Identity Dropout",
                "Celu Elu Gelu HardSigmoid HardSwish LeakyRelu LogSoftmax Mish PRelu Relu Selu Sigmoid Softmax",
                "Softplus Softsign Tanh ThresholdedRelu Hardmax",
                "Conv ConvTranspose AveragePool GlobalAveragePool GlobalMaxPool GlobalLpPool LpPool MaxPool",
                "BatchNormalization GroupNormalization InstanceNormalization LayerNormalization LpNormalization",
                "RMSNormalization LRN MeanVarianceNormalization Gemm MatMul Einsum Det GRU LSTM RNN Attention",
                "ArgMax ArgMin CumSum ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin",
                "ReduceProd ReduceSum ReduceSumSquare TopK",
                "Concat Constant ConstantOfShape DepthToSpace Expand EyeLike Flatten Gather GatherElements GatherND",
                "OneHot Pad Range Reshape Resize ReverseSequence ScatterElements ScatterND Shape Size Slice",
                "SpaceToDepth Split Squeeze Tile Transpose Trilu Unsqueeze",
            ]
        ).split()
    ),
    "ai.onnx.ml": frozenset({"TreeEnsembleClassifier", "TreeEnsembleRegressor", "Normalizer", "Scaler"}),
}
OPERATORS["ai.onnx"] = OPERATORS[""]
_KEEP_WIDTH = frozenset({"Cast", "Identity", "Normalizer", "Scaler"})
_BY_VALUE = frozenset({"Add", "Sub", "Mul", "Div"})
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
        _check_node(node)
    if len(graph.input) != 1 or len(graph.output) != 1:
        raise ValueError(f"{len(graph.input)} inputs and {len(graph.output)} outputs instead of one of each")
    if graph.output[0].type.tensor_type.elem_type not in FLOATS:
        raise ValueError("an output that is not of floating-point numbers")
    return _taken_shape(model, shape)


def _check_node(node: NodeProto) -> None:
    if node.op_type not in OPERATORS[node.domain]:
        raise ValueError(f"an operator {node.op_type[:60]}, which may not travel")
    if node.op_type == "Dropout" and len(node.input) > 2:
        raise ValueError("a Dropout in training mode")
    for attribute in node.attribute:
        plain = attribute.type in (
            *(AttributeProto.INT, AttributeProto.FLOAT, AttributeProto.STRING, AttributeProto.TENSOR),
            *(AttributeProto.INTS, AttributeProto.FLOATS, AttributeProto.STRINGS),
        )
        if not plain or attribute.ref_attr_name or attribute.HasField("g") or attribute.graphs:
            raise ValueError(f"'{attribute.name[:60]}' of {node.op_type}, a graph inside of the graph")
        if attribute.HasField("t") or attribute.floats or not math.isfinite(attribute.f):
            # Numbers come beside the graph, so there is no way to name a file that holds them.
            raise ValueError(f"numbers inside of the graph: '{attribute.name[:60]}' of {node.op_type}")


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
    _check_depth(np.concatenate([keys[inner]] * 2), children)
    _check_leaves(node, keys)


def _check_depth(parents: np.ndarray, children: np.ndarray) -> None:
    order, depth = np.argsort(parents, kind="stable"), dict[int, int]()
    for parent, child in zip(parents[order].tolist(), children[order].tolist(), strict=True):
        depth[child] = depth.get(parent, 0) + 1
        if depth[child] > _DEPTH_LIMIT:
            raise ValueError(f"trees deeper than {_DEPTH_LIMIT}")


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
