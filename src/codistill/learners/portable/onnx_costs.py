"""What an ONNX graph computes and holds, counted before onnxruntime sees it.

The weights are from measurements of onnxruntime on one thread; an operation is a tenth of a nanosecond, rounded up.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from onnx import ModelProto, NodeProto

from codistill.learners.portable.model_limits import Cost
from codistill.learners.portable.onnx_graph import values
from codistill.learners.portable.onnx_sizes import Tensor, steps

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
        operations += _NODE + _operations(node, inputs, outputs)
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


def _operations(node: NodeProto, inputs: list[Tensor | None], outputs: list[Tensor]) -> int:
    sizes = [tensor.elements for tensor in (*inputs, *outputs) if tensor is not None]
    moved = max(sizes, default=0) * _SLOW.get(node.op_type, _ELEMENT)
    special = _SPECIAL.get(node.op_type)
    return moved + (special(node, inputs, outputs) if special else 0)


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


# --- operators that compute more than once per element ------------------------------------------------------


def _given(inputs: list[Tensor | None], index: int) -> Tensor:
    found = inputs[index] if index < len(inputs) else None
    if found is None:
        raise ValueError("an operator without its inputs")
    return found


def _matmul(node: NodeProto, inputs: list[Tensor | None], outputs: list[Tensor]) -> int:
    depth = (_given(inputs, 0).shape or (1,))[-1]
    matrices = math.prod(outputs[0].shape[:-2])
    # Integers have no fast product.
    return 2 * outputs[0].elements * depth * (1 if outputs[0].kind in (1, 11) else 4) + matrices * _MATRIX


def _gemm(node: NodeProto, inputs: list[Tensor | None], outputs: list[Tensor]) -> int:
    # One side of the first matrix is a side of the result, the other one is summed over.
    return 2 * outputs[0].elements * max(_given(inputs, 0).shape, default=1)


def _conv(node: NodeProto, inputs: list[Tensor | None], outputs: list[Tensor]) -> int:
    # Conv: per output a product with its part of the weights; ConvTranspose: per input.
    each = outputs[0] if node.op_type == "Conv" else _given(inputs, 0)
    grouped = values(node, "group").sum() > 1
    return (4 if grouped else 2) * each.elements * math.prod(_given(inputs, 1).shape[1:])


def _pool(node: NodeProto, inputs: list[Tensor | None], outputs: list[Tensor]) -> int:
    each = 200 if node.op_type == "LpPool" else 50
    return each * outputs[0].elements * math.prod(int(size) for size in values(node, "kernel_shape"))


def _recurrent(node: NodeProto, inputs: list[Tensor | None], outputs: list[Tensor]) -> int:
    x, weights, recurrence = (_given(inputs, index) for index in range(3))
    positions = math.prod(x.shape[:2])  # sequence x batch, each with all gates of all directions
    return positions * (2 * (weights.elements + recurrence.elements) + 2 * _MATRIX * max(weights.shape[0], 1))


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


def _einsum(node: NodeProto, inputs: list[Tensor | None], outputs: list[Tensor]) -> int:
    each = 1 if outputs[0].kind in (1, 11) else 4
    return 2 * each * math.prod(_labels(node, inputs).values()) + _MATRIX * outputs[0].elements


def _det(node: NodeProto, inputs: list[Tensor | None], outputs: list[Tensor]) -> int:
    x = _given(inputs, 0)
    return x.elements * x.shape[-1] + _MATRIX * outputs[0].elements


def _lrn(node: NodeProto, inputs: list[Tensor | None], outputs: list[Tensor]) -> int:
    return outputs[0].elements * (_SLOW["Pow"] + 10 * int(values(node, "size").sum()))


def _scores(node: NodeProto, inputs: list[Tensor | None]) -> int:
    """Elements of the products of queries and keys, over all heads."""
    queries, keys = _given(inputs, 0), _given(inputs, 1)
    past = inputs[4] if len(inputs) > 4 else None
    length = keys.shape[-2] + (past.shape[-2] if past is not None else 0)
    heads = 1 if len(queries.shape) == 4 else int(values(node, "q_num_heads").sum())
    return math.prod(queries.shape[:-1]) * heads * length


def _attention(node: NodeProto, inputs: list[Tensor | None], outputs: list[Tensor]) -> int:
    widest = max(tensor.shape[-1] for tensor in inputs[:3] if tensor is not None)
    return _scores(node, inputs) * (4 * widest + 4 * _ELEMENT)


def _trees(node: NodeProto, inputs: list[Tensor | None], outputs: list[Tensor]) -> int:
    # A walk passes at most every other node of its trees, and adds at most all of their leaves.
    leaves = max(len(values(node, name)) for name in ("class_ids", "target_ids"))
    return outputs[0].shape[0] * (len(values(node, "nodes_nodeids")) // 2 + leaves) * _ELEMENT


_SPECIAL: dict[str, Callable[[NodeProto, list[Tensor | None], list[Tensor]], int]] = {
    "MatMul": _matmul,
    "Gemm": _gemm,
    "Einsum": _einsum,
    "Det": _det,
    "LRN": _lrn,
    "Attention": _attention,
    **dict.fromkeys(("Conv", "ConvTranspose"), _conv),
    **dict.fromkeys(("AveragePool", "LpPool", "MaxPool"), _pool),
    **dict.fromkeys(("GRU", "LSTM", "RNN"), _recurrent),
    **dict.fromkeys(("TreeEnsembleClassifier", "TreeEnsembleRegressor"), _trees),
}
