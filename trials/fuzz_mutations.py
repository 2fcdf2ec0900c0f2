"""Valid messages with one thing changed: a field, its type, its size, or how it is written down."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from codistill.wire.codec import decode
from codistill.wire.compression import Compression

_KINDS = {
    "BOOL": np.bool_, "U8": np.uint8, "I8": np.int8, "U16": np.uint16, "I16": np.int16, "U32": np.uint32,
    "I32": np.int32, "U64": np.uint64, "I64": np.int64, "F16": np.float16, "F32": np.float32, "F64": np.float64,
}  # fmt: skip
_DTYPES = {np.dtype(kind): name for name, kind in _KINDS.items()}
PLAIN: tuple[Any, ...] = (
    0, 1, -1, 2, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1, 10**4000, 0.5, -0.0,
    1e308, 5e-324, float("nan"), float("inf"), float("-inf"), "", "x" * 10_000, "\x00", "\ud800", "../../escape",
    True, False, None, [], [1] * 1000, ["a", None, 2.5], [[1]], {}, {"a": 1}, [float("nan")],
)  # fmt: skip
_NAMES = ("", "~", "x" * 1000, "samples", "f", "ä\u202e", "__metadata__", "\x00", "age", "kind", "coverage", "extra")
_COMPRESSIONS = [
    Compression(bits=8), Compression(bits=16), Compression(top_k=1), Compression(lossless=True),
    Compression(bits=8, top_k=2, lossless=True), Compression(bits=8, error_feedback=True),
]  # fmt: skip
Tables = tuple[dict[str, np.ndarray], dict[str, Any]]


def written(arrays: dict[str, np.ndarray], plain: dict[str, Any], twice: dict[str, Any] | None = None) -> bytes:
    """A message as safetensors, whatever it holds; `twice`: plain values whose names are there a second time."""
    header: dict[str, Any] = {}
    if plain or twice:
        text = json.dumps(plain)
        if twice:
            text = (text[:-1] + "," if plain else "{") + json.dumps(twice)[1:]
        header["__metadata__"] = {"v": text}
    body = b""
    for name, array in sorted(arrays.items(), key=lambda item: -item[1].dtype.itemsize):
        data = np.ascontiguousarray(array).tobytes()
        place = [len(body), len(body) + len(data)]
        header[name] = {"dtype": _DTYPES[array.dtype], "shape": list(array.shape), "data_offsets": place}
        body += data
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    return struct.pack("<Q", len(encoded)) + encoded + body


def mutate(data: bytes, rng: random.Random, agreed: Compression | None) -> bytes:
    """The message with one thing changed; with compression agreed on, it is often compressed as agreed."""
    arrays, plain = decode(data, finite=False)
    arrays = {name: array.copy() for name, array in arrays.items()}
    ways: list[tuple[int, Callable[[], bytes]]] = [
        (2, lambda: _bytes(data, rng)),
        (3, lambda: _repacked(arrays, plain, rng)),
        (5, lambda: _one_plain(arrays, plain, rng)),
    ]
    if arrays:
        ways.append((12, lambda: _encoded(*_one_array(arrays, plain, rng), rng, agreed)))
    weights = [weight for weight, _ in ways]
    return rng.choices([way for _, way in ways], weights)[0]()


def _encoded(arrays: dict[str, np.ndarray], plain: dict[str, Any], rng: random.Random, agreed: Any) -> bytes:
    if agreed and rng.random() < 0.7 and "~" not in arrays and "__metadata__" not in arrays:
        return bytes(agreed.encode(arrays, plain, {}))
    return written(arrays, plain)


# --- arrays -------------------------------------------------------------------------------------------------


def _one_array(arrays: dict[str, np.ndarray], plain: dict[str, Any], rng: random.Random) -> Tables:
    name = rng.choice(sorted(arrays))
    array = arrays[name]
    match rng.choice(["values", "values", "values", "shape", "shape", "dtype", "drop", "add", "rename", "plain"]):
        case "values":
            arrays[name] = _values(array, rng)
        case "shape":
            arrays[name] = _shape(array, rng)
        case "dtype":
            with np.errstate(all="ignore"):
                arrays[name] = array.astype(rng.choice(list(_DTYPES)))
        case "drop":
            del arrays[name]
        case "add":
            arrays[rng.choice(_NAMES)] = _values(rng.choice([array, np.zeros(0), np.ones((2, 2)), np.array(1)]), rng)
        case "rename":
            arrays[rng.choice(_NAMES)] = arrays.pop(name)
        case "plain":
            plain = plain | {name: 1}
            del arrays[name]
    return arrays, plain


def _extremes(dtype: np.dtype[Any]) -> list[Any]:
    if dtype.kind == "b":
        return [True, False]
    if dtype.kind in "iu":
        return [0, 1, np.iinfo(dtype).max, np.iinfo(dtype).min]
    info = np.finfo(dtype)
    usual = [0, -0.0, 1, -1, 1e-3, 100, -1e4, 6e4, info.max, info.min, info.tiny, info.smallest_subnormal]
    return [*usual, np.nan, np.inf, -np.inf, np.sqrt(info.max), -np.sqrt(info.max)]


def _values(array: np.ndarray, rng: random.Random) -> np.ndarray:
    changed, extreme = array.copy(), rng.choice(_extremes(array.dtype))
    if not array.size:
        return changed
    with np.errstate(all="ignore"):
        match rng.randrange(6):
            case 0:
                changed[...] = extreme
            case 1:
                changed.reshape(-1)[rng.randrange(array.size)] = extreme
            case 2 if array.ndim:
                changed[rng.randrange(len(array))] = extreme
            case 3 if array.dtype.kind == "f":
                changed = changed * array.dtype.type(rng.choice([-1, 3, 1000]))
            case 4 if array.dtype.kind == "u":
                for _ in range(rng.choice([1, 3, 30])):
                    changed.reshape(-1)[rng.randrange(array.size)] = rng.randrange(256)
            case _ if array.dtype.kind == "f":
                scale = rng.choice([1, 1e3, 1e15, 1e30])
                changed = (np.random.default_rng(rng.randrange(99)).normal(size=array.shape) * scale).astype(
                    array.dtype
                )
            case _:
                changed[...] = extreme
    return changed


def _shape(array: np.ndarray, rng: random.Random) -> np.ndarray:
    ways = [
        lambda: array.ravel(), lambda: array[None], lambda: array[..., None], lambda: array.T, lambda: array[:0],
        lambda: array[1:], lambda: array[:1], lambda: array[..., :-1], lambda: array[..., :0],
        lambda: np.concatenate([array, array]), lambda: np.concatenate([array, array], axis=-1),
        lambda: array.reshape(-1)[0], lambda: np.resize(array, (1000,)), lambda: array[::-1],
        lambda: np.zeros((0, 1 << 20), array.dtype), lambda: array.reshape(1, -1), lambda: array.reshape(-1, 1),
    ]  # fmt: skip
    try:
        return np.asarray(rng.choice(ways)())
    except (IndexError, ValueError):  # an array of no dimension
        return np.stack([array, array])


# --- plain values, compression, bytes ---------------------------------------------------------------------------


def _one_plain(arrays: dict[str, np.ndarray], plain: dict[str, Any], rng: random.Random) -> bytes:
    changed = dict(plain)
    name = rng.choice(sorted(plain)) if plain and rng.random() < 0.8 else rng.choice([*_NAMES, *arrays])
    match rng.randrange(8):
        case 0:
            changed.pop(name, None)
        case 1:
            changed[rng.choice(_NAMES)] = changed.pop(name, 1)
        case 2:
            return written(arrays, changed, {name: rng.choice(PLAIN)})
        case _:
            changed[name] = rng.choice(PLAIN)
    return written(arrays, changed)


def _repacked(arrays: dict[str, np.ndarray], plain: dict[str, Any], rng: random.Random) -> bytes:
    """Compressed in any way, and sometimes with one number of its description changed."""
    if "~" in arrays:
        return written(arrays, plain)
    data = rng.choice(_COMPRESSIONS).encode(arrays, plain, {})
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    told = header.get("__metadata__", {}).get("p")
    if told is None or rng.random() < 0.3:
        return bytes(data)
    values, description = json.loads(told)
    items, _ = description
    new = rng.choice([0, 1, 2, 3, 7, 16, 2**16, 2**31, 2**40, 2**63, -1, 1.5, "f", None, [], [2, 3], [2**20, 2**20]])
    match rng.randrange(4):
        case 0:
            description[1] = new
        case 1:
            items[rng.randrange(len(items))] = new
        case _:
            item = rng.choice(items)
            item[rng.randrange(len(item))] = new
    header["__metadata__"]["p"] = json.dumps([values, description])
    encoded = json.dumps(header).encode()
    return struct.pack("<Q", len(encoded)) + encoded + data[end:]


def _bytes(data: bytes, rng: random.Random) -> bytes:
    end = 8 + int.from_bytes(data[:8], "little")
    where = rng.randrange(end)
    match rng.randrange(7):
        case 0:
            return data[: rng.randrange(len(data))]
        case 1:
            return data + bytes(rng.randrange(1, 9))
        case 2:
            return struct.pack("<Q", rng.choice([0, 1, end, len(data), 2**30, 2**63])) + data[8:]
        case 3:
            return data[:where] + bytes([rng.randrange(256)]) + data[where + 1 :]
        case 4:
            return data[:where] + rng.choice([b"9", b"-", b'"', b"[", b"{", b","]) + data[where + 1 :]
        case 5:
            nested = b'{"a":' + b"[" * 900 + b"]" * 900 + b"}"
            return struct.pack("<Q", len(nested)) + nested + data[end:]
        case _:
            return rng.choice([b"", b"\x00" * 8, b"\x02" + bytes(7) + b"{}", b"\x80\x04K\x01."])


# --- JSON ---------------------------------------------------------------------------------------------------


def mutate_json(content: Any, rng: random.Random) -> Any:
    """A copy of plain values in which one entry, at any depth, is changed, left out or added."""
    copy = json.loads(json.dumps(content))
    places: list[tuple[Any, Any]] = []
    stack = [copy]
    while stack:
        node = stack.pop()
        inside = list(node.items()) if isinstance(node, dict) else list(enumerate(node))
        places += [(node, key) for key, _ in inside]
        stack += [item for _, item in inside if isinstance(item, dict | list)]
    if not places:
        return rng.choice(PLAIN)
    node, key = rng.choice(places)
    match rng.randrange(8):
        case 0:
            del node[key]
        case 1 if isinstance(node, dict):
            node[rng.choice(["", "x" * 500, "ä", "round"])] = rng.choice(PLAIN)
        case 1:
            node.extend([node[key]] * rng.choice([1, 3, 20_000]))
        case 2:
            deep: Any = 1
            for _ in range(rng.choice([3, 20, 300])):
                deep = [deep]
            node[key] = deep
        case 3 if isinstance(node[key], int | float):
            node[key] = -node[key] - 1
        case _:
            node[key] = rng.choice(PLAIN)
    return copy
