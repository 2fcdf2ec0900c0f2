"""Encode state (nested dicts and lists of arrays and plain values) as bytes, and decode it.

`pack` moves the arrays of the tree into one safetensors body and replaces them by references in a JSON outline.
Checkpoints use it, and worker processes that return a trained agent. Decoding executes nothing.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch

from codistill.core.errors import CheckpointError, MessageError
from codistill.wire.codec import decode, encode, is_sendable

_OUTLINE = "outline"
_KINDS = {"array": np.ndarray, "scalar": np.generic, "tensor": torch.Tensor}
_STATE_LIMIT = 1 << 40  # a checkpoint is a file of the user, bounded by the disk


def pack(tree: Any) -> bytes:
    """Bytes of nested dicts, lists and tuples that hold arrays, tensors, bytes and plain values."""
    arrays: dict[str, np.ndarray] = {}

    def moved(kind: str, array: np.ndarray) -> dict[str, str]:
        name = f"a{len(arrays)}"
        arrays[name] = array
        return {kind: name}

    def outline(node: Any, path: str) -> Any:
        if isinstance(node, str):
            return str(node)
        if isinstance(node, bytes):
            return moved("bytes", np.frombuffer(node, dtype=np.uint8))
        for kind, types in _KINDS.items():
            if isinstance(node, types):
                return moved(kind, _numbers(node, path))
        if isinstance(node, dict):
            return {"dict": [[outline(key, path), outline(value, f"{path}.{key}")] for key, value in node.items()]}
        if isinstance(node, list | tuple):
            kind = "list" if isinstance(node, list) else "tuple"
            return {kind: [outline(item, f"{path}[{i}]") for i, item in enumerate(node)]}
        if node is None or isinstance(node, bool | int | float):
            return node
        raise _unfit(f"{type(node).__name__} at '{path}'")

    try:
        text = json.dumps(outline(tree, "state"), separators=(",", ":"))
    except RecursionError:
        raise _unfit("a dict or list that contains itself, or is nested too deeply") from None
    arrays[_OUTLINE] = np.frombuffer(text.encode(), dtype=np.uint8)
    return encode(arrays, {})


def unpack(data: bytes) -> Any:
    """The tree that `pack` was given; arrays are fresh and writable."""
    try:
        arrays, _ = decode(data, finite=False, limit=_STATE_LIMIT, header_limit=_STATE_LIMIT, packed=False)
        return _rebuild(json.loads(arrays[_OUTLINE].tobytes()), arrays)
    except (MessageError, KeyError, ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(
            "The checkpoint is corrupted.",
            f"{error}"[:300],
            "Remove it, and resume from the one before.",
        ) from None


def _unfit(found: str) -> CheckpointError:
    return CheckpointError(
        "State must be arrays, tensors, plain values, or dicts and lists of them.",
        found,
        "Keep such objects out of me.state, or store their arrays and values.",
    )


def _numbers(node: Any, path: str) -> np.ndarray:
    """An array, a scalar or a tensor as an array that can be encoded."""
    try:
        array = node.detach().cpu().numpy() if isinstance(node, torch.Tensor) else np.asarray(node)
    except (TypeError, RuntimeError):  # bfloat16 or sparse: numpy lacks them
        array = None
    if array is None or not is_sendable(array.dtype):
        raise _unfit(f"{type(node).__name__} of {node.dtype} at '{path}'")
    return array


def _rebuild(node: Any, arrays: dict[str, np.ndarray]) -> Any:
    if not isinstance(node, dict):
        return node
    ((kind, content),) = node.items()
    match kind:
        case "array":
            return arrays[content].copy()
        case "scalar":
            return arrays[content][()]
        case "tensor":
            return torch.from_numpy(arrays[content].copy())
        case "bytes":
            return arrays[content].tobytes()
        case "dict":
            return {_rebuild(key, arrays): _rebuild(value, arrays) for key, value in content}
        case "list":
            return [_rebuild(item, arrays) for item in content]
        case "tuple":
            return tuple(_rebuild(item, arrays) for item in content)
    raise ValueError(f"unknown kind of state '{kind}'")
