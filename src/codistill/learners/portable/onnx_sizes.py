"""The sizes of all that an ONNX graph computes, found without computing it.

Node after node, shapes are inferred from shapes. Small tensors of which shapes are made (the number of rows, and what
is calculated from it) are evaluated; so a size is known, or it depends on values of samples, and the graph is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, TypeProto, defs, helper, numpy_helper, shape_inference
from onnx.reference import ReferenceEvaluator

_SMALL = 256  # elements of a tensor whose values are evaluated
_RANK = 32  # axes of a tensor
_LARGEST = 1 << 31  # of a size, so that no product of two wraps around
# Of these, shapes are calculated; each takes time and memory in proportion to its inputs and outputs.
_EVALUATED = frozenset(
    " ".join(
        [
            "Abs Add And Cast CastLike Ceil Concat Constant ConstantOfShape Div Equal Expand Flatten Floor Gather",
            "Greater GreaterOrEqual Identity Less LessOrEqual Max Min Mod Mul Neg Not Or Range ReduceMax ReduceMin",
            "ReduceProd ReduceSum Reshape Round Size Slice Sqrt Squeeze Sub Tile Transpose Unsqueeze Where",
        ]
    ).split()
)
_OPEN_ENDED = frozenset({"Slice", "Shape"})  # may name an end beyond any size


@dataclass(frozen=True)
class Tensor:
    """The shape of a tensor, the bytes of an element, and its values where they are known."""

    shape: tuple[int, ...]
    kind: int
    value: np.ndarray | None = None

    @property
    def elements(self) -> int:
        """The number of its elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """The bytes of its elements."""
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
        _check_numbers(node, inputs)
        outputs = _inferred(model, node, inputs, versions.get(node.domain, versions.get("", 1)))
        if _is_evaluated(node, inputs, outputs):
            values = _plain_value(node, inputs)
            values = _evaluated(model, node, inputs) if values is None else values
            outputs = {name: _with(out, values.get(name)) for name, out in outputs.items()}
        yield node, inputs, list(outputs.values())
        known |= outputs


def _is_evaluated(node: NodeProto, inputs: Sequence[Tensor | None], outputs: Mapping[str, Tensor]) -> bool:
    if any(out.elements > _SMALL for out in outputs.values()):
        return False
    are_known = all(part is None or part.value is not None for part in inputs)
    return node.op_type == "Shape" or (node.op_type in _EVALUATED and are_known)


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
    return {name: _tensor(node, types.get(name)) for name in node.output if name}


def _tensor(node: NodeProto, kind: TypeProto | None) -> Tensor:
    shape = kind.tensor_type.shape.dim if kind is not None and kind.tensor_type.HasField("shape") else None
    if kind is None or shape is None or not all(dim.HasField("dim_value") for dim in shape):
        raise ValueError(f"a {node.op_type} whose size cannot be known before it runs")
    return _checked(Tensor(tuple(dim.dim_value for dim in shape), kind.tensor_type.elem_type))


def _checked(tensor: Tensor) -> Tensor:
    small = len(tensor.shape) <= _RANK and all(0 <= size <= _LARGEST for size in tensor.shape)
    if not small or tensor.kind == TensorProto.STRING:
        raise ValueError(f"a tensor of shape {tensor.shape}, or of text"[:200])
    return tensor


def _check_numbers(node: NodeProto, inputs: Sequence[Tensor | None]) -> None:
    """No integer that could be a size is so large that a sum or a product of two of them wraps around."""
    if node.op_type in _OPEN_ENDED:
        return
    named = [number for attribute in node.attribute for number in (attribute.i, *attribute.ints)]
    held = [part.value for part in inputs if part is not None and part.value is not None]
    numbers = [int(number) for value in held if value.dtype.kind in "iu" for number in value.flat]
    largest = max([0, *map(abs, named), *map(abs, numbers)])
    if largest > _LARGEST:
        raise ValueError(f"a {node.op_type} with a size of {largest}")


def _with(tensor: Tensor, value: np.ndarray | None) -> Tensor:
    return tensor if value is None or value.shape != tensor.shape else Tensor(tensor.shape, tensor.kind, value)


def _plain_value(node: NodeProto, inputs: Sequence[Tensor | None]) -> dict[str, np.ndarray] | None:
    """What Shape returns, also of a tensor whose values are not known, and what a Constant holds."""
    if node.op_type == "Shape" and inputs[0] is not None:
        ends: dict[str, Any] = {attribute.name: attribute.i for attribute in node.attribute}
        return {node.output[0]: np.asarray(inputs[0].shape[ends.get("start", 0) : ends.get("end")], np.int64)}
    if node.op_type == "Constant" and node.attribute[0].name == "value":
        return {node.output[0]: numpy_helper.to_array(node.attribute[0].t)}
    return None


def _evaluated(model: ModelProto, node: NodeProto, inputs: Sequence[Tensor | None]) -> dict[str, np.ndarray]:
    """The values of a node; none where they cannot be calculated (a division by zero, an index too large)."""
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
