"""A cache of message layouts: of the next message with the same layout only the numbers are read.

A protocol sends the same names, shapes and dtypes over and over. Where safetensors has found a header sound for a
message of some length, it is sound for the next message of that length with the same header, byte for byte: its arrays
are at the same places, whatever their numbers are. And where safetensors has made a header for some names, shapes and
dtypes, it would make the same again. Messages with plain values or of several dtypes are left to safetensors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

_MOST = 64  # cached layouts of either kind; when full, the cache is cleared
_LONGEST = 1 << 14  # bytes of the longest header that is cached


@dataclass(frozen=True)
class Layout:
    """Where the arrays of a message are: floating-point numbers of one dtype, one array after the other."""

    length: int  # bytes of the message
    header: int  # bytes before its numbers
    dtype: np.dtype[Any]
    places: tuple[tuple[str, int, int, tuple[int, ...]], ...]  # name, first number, number after the last, shape

    def read(self, data: bytes) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """All numbers, and the arrays that they make up: views, and read-only as the bytes are."""
        numbers = np.frombuffer(data, self.dtype, offset=self.header)
        return numbers, {name: numbers[start:end].reshape(shape) for name, start, end, shape in self.places}


_layouts: dict[bytes, Layout] = {}  # by header
_headers: dict[Any, tuple[bytes, list[str]]] = {}  # by names, dtypes and shapes: a header, and the names in its order


def of(data: bytes) -> Layout | None:
    """The layout of a message, if one like it was read before."""
    layout = _layouts.get(_header(data))
    return layout if layout is not None and layout.length == len(data) else None


def learn(data: bytes, arrays: Mapping[str, np.ndarray]) -> None:
    """Cache the layout of a message without plain values from which safetensors has read these arrays."""
    header, dtypes = _header(data), {array.dtype for array in arrays.values()}
    # What is read in place must be aligned, as a copy would be.
    if len(dtypes) != 1 or len(header) % 8 or len(header) > _LONGEST:
        return
    dtype = dtypes.pop()
    if dtype.kind != "f":
        return
    starts = {name: start // dtype.itemsize for name, start in _starts(header).items()}
    places = tuple((name, starts[name], starts[name] + array.size, array.shape) for name, array in arrays.items())
    layout = Layout(len(data), len(header), dtype, places)
    if all(array.tobytes() == arrays[name].tobytes() for name, array in layout.read(data)[1].items()):
        _remember(_layouts, header, layout)


def join(arrays: Mapping[str, np.ndarray]) -> bytes | None:
    """The message that safetensors makes of contiguous arrays, if it made one like it before."""
    found = _headers.get(_signature(arrays))
    return None if found is None else b"".join([found[0], *(arrays[name].data for name in found[1])])


def learn_to_join(arrays: Mapping[str, np.ndarray], made: bytes) -> bytes:
    """Cache the header of the message that safetensors has made of these arrays; returns the message."""
    header = _header(made)
    if len(header) <= _LONGEST:
        starts = _starts(header)
        order = sorted(arrays, key=lambda name: (starts[name], arrays[name].size))  # an empty one before what follows
        _remember(_headers, _signature(arrays), (header, order))
    return made


def _header(data: bytes) -> bytes:
    return data[: 8 + int.from_bytes(data[:8], "little")]


def _starts(header: bytes) -> dict[str, int]:
    """Where each array begins, in bytes after the header."""
    entries = json.loads(header[8:])
    return {name: entry["data_offsets"][0] for name, entry in entries.items() if name != "__metadata__"}


def _signature(arrays: Mapping[str, np.ndarray]) -> Any:
    return tuple((name, array.dtype.char, array.shape) for name, array in arrays.items())


def _remember(table: dict[Any, Any], key: Any, value: Any) -> None:
    if len(table) >= _MOST:
        table.clear()
    table[key] = value
