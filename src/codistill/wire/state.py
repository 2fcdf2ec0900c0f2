"""State that is kept across rounds, as bytes and back: nested tables of arrays and plain values.

`pack` flattens the tree: arrays go into one safetensors body and leave references in a JSON outline.
Used for checkpoints and for returning a trained agent from a worker process. Nothing is executed.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch

from codistill.errors import CheckpointError, MessageError
from codistill.wire.codec import decode, encode, is_sendable

_OUTLINE = "outline"
_STATE_LIMIT = 1 << 40  # a checkpoint is one's own file: bounded by the disk, not by a sender


def pack(tree: Any) -> bytes:
    """Bytes of nested dicts, lists and tuples that hold arrays, tensors, bytes and plain values."""
    arrays: dict[str, np.ndarray] = {}

    def outline(node: Any, path: str) -> Any:
        if isinstance(node, str):
            return str(node)
        if isinstance(node, bytes):
            return _leave("bytes", np.frombuffer(node, dtype=np.uint8), arrays)
        kind = _kind(node)
        if kind:
            numbers = _numbers(node)
            if numbers is None:
                raise _unfit(f"{type(node).__name__} of {node.dtype} at '{path}'")
            return _leave(kind, numbers, arrays)
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
            "Saved state must be readable.",
            f"{error}"[:300],
            "Remove this checkpoint and resume from the one before.",
        ) from None


def _unfit(found: str) -> CheckpointError:
    return CheckpointError(
        "State must be arrays, tensors, plain values, or dicts and lists of them.",
        found,
        "Keep such an object out of me.state, or store what it is made of.",
    )


def _kind(node: Any) -> str | None:
    if isinstance(node, np.ndarray):
        return "array"
    if isinstance(node, np.generic):
        return "scalar"
    return "tensor" if isinstance(node, torch.Tensor) else None


def _numbers(node: Any) -> np.ndarray | None:
    """An array or tensor as numbers that the codec carries, if it is one."""
    try:
        array = node.detach().cpu().numpy() if isinstance(node, torch.Tensor) else np.asarray(node)
    except (TypeError, RuntimeError):  # bfloat16, sparse: numpy has nothing like it
        return None
    return array if is_sendable(array.dtype) else None


def _leave(kind: str, array: np.ndarray, arrays: dict[str, np.ndarray]) -> dict[str, str]:
    name = f"a{len(arrays)}"
    arrays[name] = array
    return {kind: name}


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
