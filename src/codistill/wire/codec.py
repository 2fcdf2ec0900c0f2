"""Encode named arrays and a few plain values as bytes, and decode untrusted bytes.

The encoding is safetensors: a JSON header and raw array bytes, nothing executable. Plain values are one JSON text in
the header's metadata, so that equal messages are equal bytes. `decode` returns valid arrays or raises `MessageError`,
whatever the bytes. Its limit holds for the decoded size: a packed message (`wire.packing`) may not decode to more
bytes than an unpacked one may have.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import safetensors
from safetensors.numpy import save

from codistill.core.errors import MessageError
from codistill.wire.packing import BODY, unpack

if TYPE_CHECKING:
    from codistill.wire.compression import Compression

Arrays = dict[str, np.ndarray]
Values = dict[str, Any]

# Bytes of one message, encoded and decoded; a larger one is rejected before it is parsed.
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
_TO_DO = "Use the same version of codistill and the same protocol on both sides."


def encode(arrays: Mapping[str, np.ndarray], values: Mapping[str, Any]) -> bytes:
    """The message as bytes; equal content gives equal bytes."""
    contiguous = {name: _sendable(name, array) for name, array in arrays.items()}
    text = _dump(values) if values else ""
    cached = _headers.get(_signature(contiguous))
    if cached is not None:
        return _joined(contiguous, text, *cached)
    made = bytes(save(contiguous, {"v": text} if text else None))
    _cache_header(contiguous, text, made)
    return made


def encode_packed(arrays: Mapping[str, np.ndarray], values: Mapping[str, Any], packed: list[Any], body: bytes) -> bytes:
    """The same with some arrays in a packed body, described by `packed`; see `wire.packing.unpack`."""
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
    packed: bool | Compression = True,
) -> tuple[Arrays, Values]:
    """Read-only arrays and plain values of an encoded message; raises `MessageError` on invalid bytes.

    `packed`: whether the message may be packed; or a compression, if only this one is allowed.
    """
    if len(data) > limit:
        raise MessageError(f"A message may have at most {limit} bytes.", f"{len(data)} bytes", _TO_DO)
    header = int.from_bytes(data[:8], "little")
    if header_limit < header <= len(data):
        found = f"{header} bytes"
        raise MessageError(f"The header of a message may have at most {header_limit} bytes.", found, _TO_DO)
    try:
        cached = _read_cached(data)
        if cached is not None and (not finite or np.isfinite(cached[0].numbers).all()):
            cached_arrays, text = cached
            return cached_arrays, _checked(read_json(text, len(data))) if text else {}
        tensors = safetensors.deserialize(data)  # type: ignore[no-untyped-call]
        arrays = {name: _array(tensor) for name, tensor in tensors}
        values, description = _metadata(data)
        if description is not None:
            if packed is False:
                raise ValueError("a packed message, although no compression was agreed on")
            arrays = unpack(arrays, description, len(data), limit, None if packed is True else packed)
        else:
            _cache_layout(data, arrays)
    except (safetensors.SafetensorError, ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
        raise MessageError("A message must be a valid safetensors encoding.", str(error)[:200], _TO_DO) from None
    if finite:
        for name, array in arrays.items():
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise MessageError("Arrays in a message must be finite.", f"NaN or infinity in '{name}'", _TO_DO)
    return arrays, values


def read_json(text: str, limit: int) -> Any:
    """The content of a received JSON text; `ValueError` if it is too long, too deeply nested, or not JSON."""
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
    return dtype.newbyteorder("=") in _SENDABLE


def _sendable(name: str, array: np.ndarray) -> np.ndarray:
    _check_name(name)
    if array.dtype in _SENDABLE and array.flags.c_contiguous:
        return array
    if not is_sendable(array.dtype):
        raise MessageError(
            "Arrays in a message must be numeric.",
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
        raise MessageError("Names in a message must be valid text.", ascii(name)[:100], "Choose another name.")


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
                "Plain values in a message must be finite numbers, strings, booleans, or lists of these.",
                f"'{name}' = {value!r}"[:200],
                "Send arrays as arrays, and everything else as plain values.",
            )
    return json.dumps(values, separators=(",", ":"), allow_nan=False)


def _metadata(data: bytes) -> tuple[Values, Any]:
    """Plain values, and the description of the packed body, if there is one."""
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


def _checked(values: Any) -> Values:
    """Checked plain values: a flat table with names that can be encoded again."""
    if not isinstance(values, dict) or not all(is_plain(value) for value in values.values()):
        raise ValueError("plain values that are not a flat table")
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


# --- cached layouts: of the next message with the same layout only the numbers are read

_MOST = 64  # cached layouts of either kind; when full, the cache is cleared
_LONGEST = 1 << 14  # bytes of the longest header that is cached
_LENGTH = 8  # bytes of the header's length
_METADATA = b'"__metadata__"'
# Plain values in a header: ASCII with no escapes but quotes and backslashes. Other headers go through safetensors,
# which decides what is valid.
_WITH_TEXT = re.compile(rb'\{"__metadata__":\{"v":("(?:[ !#-\[\]-~]|\\["\\])+")\},')


@dataclass(frozen=True)
class Layout:
    """Positions of a message's arrays: floating-point numbers of one dtype, one array after another."""

    size: int  # bytes of its numbers
    dtype: np.dtype[Any]
    places: tuple[tuple[str, int, int, tuple[int, ...]], ...]  # name, first number, number after the last, shape

    def read(self, data: bytes, offset: int) -> AdjacentArrays:
        """The arrays in the bytes from `offset` on, as read-only views."""
        return AdjacentArrays(self, np.frombuffer(data, self.dtype, offset=offset))


class AdjacentArrays(dict[str, np.ndarray]):
    """Arrays of one layout: views of one array of numbers."""

    def __init__(self, layout: Layout, numbers: np.ndarray) -> None:
        super().__init__({name: numbers[start:end].reshape(shape) for name, start, end, shape in layout.places})
        self.layout, self.numbers = layout, numbers


_layouts: dict[bytes, Layout] = {}  # by header, without plain values
_headers: dict[Any, tuple[bytes, list[str]]] = {}  # by names, dtypes and shapes: such a header, and names in its order


def _read_cached(data: bytes) -> tuple[AdjacentArrays, str] | None:
    """The arrays of a message, and the text of its plain values, if its layout is cached."""
    if not _layouts:
        return None
    offset, header, text = _parts(data)
    layout = _layouts.get(header)
    if layout is None or layout.size != len(data) - offset:
        return None
    return layout.read(data, offset), text


def _cache_layout(data: bytes, arrays: Mapping[str, np.ndarray]) -> None:
    """Cache the layout of an unpacked message, from which safetensors read these arrays."""
    dtypes = {array.dtype for array in arrays.values()}
    offset, header, _ = _parts(data)
    if len(dtypes) != 1 or not header or _METADATA in header:
        return
    dtype = dtypes.pop()
    if dtype.kind != "f":
        return
    starts = {name: start // dtype.itemsize for name, start in _starts(header).items()}
    places = tuple((name, starts[name], starts[name] + array.size, array.shape) for name, array in arrays.items())
    layout = Layout(len(data) - offset, dtype, places)
    if all(array.tobytes() == arrays[name].tobytes() for name, array in layout.read(data, offset).items()):
        _remember(_layouts, header, layout)


def _cache_header(arrays: Mapping[str, np.ndarray], text: str, made: bytes) -> None:
    """Cache the header of the message that safetensors made of arrays and a text."""
    _, header, _ = _parts(made)
    if arrays and header and _METADATA not in header:
        starts = _starts(header)
        order = sorted(arrays, key=lambda name: (starts[name], arrays[name].size))  # an empty one before what follows
        if _joined(arrays, text, header, order) == made:
            _remember(_headers, _signature(arrays), (header, order))


def _joined(arrays: Mapping[str, np.ndarray], text: str, header: bytes, order: list[str]) -> bytes:
    if text:
        header = b'{"__metadata__":{"v":' + json.dumps(text).encode() + b"}," + header[1:]
    header += b" " * (-len(header) % 8)
    return b"".join([len(header).to_bytes(_LENGTH, "little"), header, *(arrays[name].data for name in order)])


def _parts(data: bytes) -> tuple[int, bytes, str]:
    """Where the numbers begin, the header without plain values and padding, and the text of the plain values.

    The header is empty if it is too long, or the numbers are not aligned, as those of copies are: then nothing is
    cached.
    """
    offset = _LENGTH + int.from_bytes(data[:_LENGTH], "little")
    if offset % 8 or offset > _LONGEST:
        return offset, b"", ""
    header = data[_LENGTH:offset]
    if header.startswith(_METADATA, 1):
        found = _WITH_TEXT.match(header)
        if found is not None:
            return offset, b"{" + header[found.end() :].rstrip(b" "), json.loads(found[1])
    return offset, header.rstrip(b" "), ""


def _starts(header: bytes) -> dict[str, int]:
    """The first byte of each array, counted from the end of the header."""
    return {name: entry["data_offsets"][0] for name, entry in json.loads(header).items()}


def _signature(arrays: Mapping[str, np.ndarray]) -> Any:
    return tuple((name, array.dtype.char, array.shape) for name, array in arrays.items())


def _remember(table: dict[Any, Any], key: Any, value: Any) -> None:
    if len(table) >= _MOST:
        table.clear()
    table[key] = value
