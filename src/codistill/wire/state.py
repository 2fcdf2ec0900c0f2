"""State that lives across rounds, as bytes and back: nested tables of arrays and plain values.

`pack` flattens the tree: arrays go into one safetensors body and leave a mark behind in a JSON outline.
Used for checkpoints and for handing a trained agent from a worker to its owner. Nothing is executed.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch

from codistill.errors import CheckpointError, MessageError
from codistill.wire.codec import decode, encode

_OUTLINE = "outline"
_STATE_LIMIT = 1 << 40  # a checkpoint is one's own file: bounded by the disk, not by a sender


def pack(tree: Any) -> bytes:
    """Bytes of nested dicts, lists and tuples that hold arrays, tensors, bytes and plain values."""
    arrays: dict[str, np.ndarray] = {}

    def outline(node: Any, path: str) -> Any:
        if isinstance(node, np.ndarray | np.generic):
            return _leave("array", np.asarray(node), arrays)
        if isinstance(node, torch.Tensor):
            return _leave("tensor", node.detach().cpu().numpy(), arrays)
        if isinstance(node, bytes):
            return _leave("bytes", np.frombuffer(node, dtype=np.uint8), arrays)
        if isinstance(node, dict):
            return {"dict": [[outline(key, path), outline(value, f"{path}.{key}")] for key, value in node.items()]}
        if isinstance(node, list | tuple):
            kind = "list" if isinstance(node, list) else "tuple"
            return {kind: [outline(item, f"{path}[{i}]") for i, item in enumerate(node)]}
        if node is None or isinstance(node, bool | int | float | str):
            return node
        raise CheckpointError(
            "State must be arrays, tensors, plain values, or dicts and lists of them.",
            f"{type(node).__name__} at '{path}'",
            "Keep such an object out of me.state, or store what it is made of.",
        )

    text = json.dumps(outline(tree, "state"), separators=(",", ":"))
    arrays[_OUTLINE] = np.frombuffer(text.encode(), dtype=np.uint8)
    return encode(arrays, {})


def unpack(data: bytes) -> Any:
    """The tree that `pack` was given; arrays are fresh and writable."""
    try:
        arrays, _ = decode(data, finite=False, limit=_STATE_LIMIT)
        return _rebuild(json.loads(arrays[_OUTLINE].tobytes()), arrays)
    except (MessageError, KeyError, ValueError, TypeError) as error:
        raise CheckpointError(
            "Saved state must be readable.",
            f"{error}"[:300],
            "Remove this checkpoint and resume from the one before.",
        ) from None


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
