"""Encoding of named arrays and a few plain values as bytes, and decoding.

The encoding is safetensors: a JSON header and raw array bytes, nothing that could be executed. Plain
values are in the header's metadata as one JSON text, so that equal messages are equal bytes.
`decode` takes any byte string: it returns valid arrays or raises `MessageError`. The limit counts what is decoded: the
arrays of a packed message (`wire.packing`) may not have more bytes than an unpacked message may.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import safetensors
from safetensors.numpy import save

from codistill.errors import MessageError
from codistill.wire import layouts
from codistill.wire.packing import BODY, Agreed, unpack

Arrays = dict[str, np.ndarray]
Values = dict[str, Any]

# Bytes of one message, as it arrives and of its arrays once decoded; a larger one is rejected before it is parsed.
SIZE_LIMIT = 1 << 30
# Bytes of its header: names, shapes and plain values. As Python objects they take up to 24 times as much.
HEADER_LIMIT = 1 << 20
_DEPTH = 16  # of nested tables and lists

_DTYPES = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "I8": np.int8,
    "U16": np.uint16,
    "I16": np.int16,
    "U32": np.uint32,
    "I32": np.int32,
    "U64": np.uint64,
    "I64": np.int64,
    "F16": np.float16,
    "F32": np.float32,
    "F64": np.float64,
}
_SENDABLE = frozenset(np.dtype(kind) for kind in _DTYPES.values())
_TO_DO = "The sender must use the same version of codistill and the same protocol."


def encode(arrays: Mapping[str, np.ndarray], values: Mapping[str, Any]) -> bytes:
    """Bytes of named arrays and plain values; equal content gives equal bytes."""
    contiguous = {name: _sendable(name, array) for name, array in arrays.items()}
    text = _dump(values) if values else ""
    known = layouts.join(contiguous, text)
    if known is not None:
        return known
    return layouts.learn_to_join(contiguous, text, bytes(save(contiguous, {"v": text} if text else None)))


def encode_packed(arrays: Mapping[str, np.ndarray], values: Mapping[str, Any], packed: list[Any], body: bytes) -> bytes:
    """The same with some of the arrays in a packed body, which `packed` describes; see `wire.packing.unpack`."""
    contiguous = {name: _sendable(name, array) for name, array in arrays.items()}
    for name, *_ in packed[0]:
        _check_name(name)
    text = f"[{_dump(values)},{json.dumps(packed, separators=(',', ':'))}]"
    return bytes(save({**contiguous, BODY: np.frombuffer(body, np.uint8)}, {"p": text}))


def decode(
    data: bytes,
    *,
    finite: bool = True,
    limit: int = SIZE_LIMIT,
    header_limit: int = HEADER_LIMIT,
    packed: bool | Agreed = True,
) -> tuple[Arrays, Values]:
    """Read-only arrays and plain values of an encoded message; anything else is a `MessageError`.

    `packed`: whether the message may be packed; or a compression, if it may be packed in no other way than by it.
    """
    if len(data) > limit:
        raise MessageError(f"A message must have at most {limit} bytes.", f"{len(data)} bytes", _TO_DO)
    header = int.from_bytes(data[:8], "little")
    if header_limit < header <= len(data):
        found = f"{header} bytes"
        raise MessageError(f"The header of a message must have at most {header_limit} bytes.", found, _TO_DO)
    try:
        known = layouts.of(data)
        if known is not None and (not finite or np.isfinite(known.arrays.numbers).all()):
            return known.arrays, _values(known.text, len(data)) if known.text else {}
        tensors = safetensors.deserialize(data)  # type: ignore[no-untyped-call]
        arrays = {name: _array(tensor) for name, tensor in tensors}
        values, description = _metadata(data)
        if description is not None:
            if packed is False:
                raise ValueError("a packed message, where no compression was agreed on")
            arrays = unpack(arrays, description, len(data), limit, None if packed is True else packed)
        else:
            layouts.learn(data, arrays)
    except (safetensors.SafetensorError, ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
        raise MessageError("A message must be a valid safetensors encoding.", str(error)[:200], _TO_DO) from None
    if finite:
        for name, array in arrays.items():
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise MessageError("Arrays in a message must be finite.", f"NaN or infinity in '{name}'", _TO_DO)
    return arrays, values


def read_json(text: str, limit: int) -> Any:
    """The content of a received JSON text; a `ValueError` if it is too long, nested too deeply, or no JSON."""
    if len(text) > limit:
        raise ValueError(f"a text of {len(text)} characters, above {limit}")
    content = json.loads(text)
    level, depth = [content], 0
    while level:  # what is nested deeply cannot even be printed
        depth += 1
        if depth > _DEPTH:
            raise ValueError(f"a text with more than {_DEPTH} levels")
        inside = [node for node in level if isinstance(node, dict | list)]
        level = [item for node in inside for item in (node.values() if isinstance(node, dict) else node)]
    return content


def is_sendable(dtype: np.dtype[Any]) -> bool:
    """Whether arrays of this dtype can be encoded."""
    return dtype.newbyteorder("=") in _SENDABLE


def _sendable(name: str, array: np.ndarray) -> np.ndarray:
    _check_name(name)
    if array.dtype in _SENDABLE and array.flags.c_contiguous:
        return array
    if not is_sendable(array.dtype):
        raise MessageError(
            "An array in a message must hold numbers.",
            f"'{name}' of dtype {array.dtype}",
            "Send float, integer or boolean arrays.",
        )
    return np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("=")).reshape(array.shape)


def _check_name(name: Any) -> None:
    try:
        usable = name.encode() != b"__metadata__"  # where safetensors keeps the plain values
    except (AttributeError, UnicodeEncodeError):
        usable = False
    if not usable:
        raise MessageError("A name in a message must be text.", ascii(name)[:100], "Choose another name.")


def _array(tensor: Mapping[str, Any]) -> np.ndarray:
    kind = _DTYPES[tensor["dtype"]]
    array = np.frombuffer(tensor["data"], dtype=kind).reshape(tensor["shape"])
    if kind is np.bool_ and array.view(np.uint8).max(initial=0) > 1:
        raise ValueError("booleans that are neither 0 nor 1")
    array.flags.writeable = False
    return array


def _dump(values: Mapping[str, Any]) -> str:
    for name, value in values.items():
        _check_name(name)
        if not is_plain(value):
            raise MessageError(
                "A plain value in a message must be a finite number, a string, a boolean, or a list of these.",
                f"'{name}' = {value!r}"[:200],
                "Send arrays as arrays and everything else as plain values.",
            )
    return json.dumps(values, separators=(",", ":"), allow_nan=False)


def _metadata(data: bytes) -> tuple[Values, Any]:
    """Plain values, and what describes the packed body, if there is one."""
    length = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + length]
    if b"__metadata__" not in header:
        return {}, None
    metadata = read_json(header.decode(), len(header)).get("__metadata__") or {}
    if "p" in metadata:
        values, packed = read_json(metadata["p"], len(header))
        if packed is None or "v" in metadata:
            raise ValueError("a packed body without a description")
    else:
        values, packed = read_json(metadata.get("v", "{}"), len(header)), None
    return _checked(values), packed


def _values(text: str, limit: int) -> Values:
    return _checked(read_json(text, limit))


def _checked(values: Any) -> Values:
    """A flat table of plain values, with names that can be encoded again."""
    if not isinstance(values, dict) or not all(is_plain(value) for value in values.values()):
        raise ValueError("the plain values are not a flat table")
    for name in values:
        _check_name(name)
    return values


def is_plain(value: Any) -> bool:
    """Whether a value can be sent beside arrays: a finite number, a string, a boolean, None, or a list of these."""
    if isinstance(value, list | tuple):
        return all(_is_scalar(item) for item in value)
    return _is_scalar(value)


def _is_scalar(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, int):
        return -(1 << 63) <= value < 1 << 64
    return value is None or isinstance(value, str)
