"""A cache of message layouts: of the next message with the same layout only the numbers are read.

A protocol sends the same names, shapes and dtypes over and over. Where safetensors has found a header sound for numbers
of some length, it is sound for the next message with so many numbers and the same header, byte for byte: its arrays are
at the same places, whatever their numbers are. And where safetensors has made a header for some names, shapes and
dtypes, it would make the same again. Plain values stand before that, as one text; where they are as `encode` writes
them, what follows is looked up. Messages of several dtypes, or without arrays, are left to safetensors.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

_MOST = 64  # cached layouts of either kind; when full, the cache is cleared
_LONGEST = 1 << 14  # bytes of the longest header that is cached
_LENGTH = 8  # bytes that say how long the header is
_METADATA = b'"__metadata__"'
# The text of plain values in a header: ASCII, and nothing escaped but quotes and backslashes. Any other is left to
# safetensors, which is the judge of what a header may be.
_WITH_TEXT = re.compile(rb'\{"__metadata__":\{"v":("(?:[ !#-\[\]-~]|\\["\\])+")\},')


@dataclass(frozen=True)
class Layout:
    """Where the arrays of a message are: floating-point numbers of one dtype, one array after the other."""

    size: int  # bytes of its numbers
    dtype: np.dtype[Any]
    places: tuple[tuple[str, int, int, tuple[int, ...]], ...]  # name, first number, number after the last, shape

    def read(self, data: bytes, offset: int) -> AdjacentArrays:
        """The arrays that all numbers from `offset` on make up: views, and read-only as the bytes are."""
        return AdjacentArrays(self, np.frombuffer(data, self.dtype, offset=offset))


class AdjacentArrays(dict[str, np.ndarray]):
    """Arrays of one layout, that is views of one array of numbers."""

    def __init__(self, layout: Layout, numbers: np.ndarray) -> None:
        super().__init__({name: numbers[start:end].reshape(shape) for name, start, end, shape in layout.places})
        self.layout, self.numbers = layout, numbers


@dataclass(frozen=True)
class Known:
    """A message with a known layout: its arrays, and the text of its plain values."""

    arrays: AdjacentArrays
    text: str


_layouts: dict[bytes, Layout] = {}  # by header, without plain values
_headers: dict[Any, tuple[bytes, list[str]]] = {}  # by names, dtypes and shapes: the same, and the names in its order


def of(data: bytes) -> Known | None:
    """What a message holds, if one with the same layout was read before."""
    offset = _LENGTH + int.from_bytes(data[:_LENGTH], "little")
    # What is read in place must be aligned, as a copy would be.
    if not _layouts or offset % 8 or offset > _LONGEST:
        return None
    header, text = _parts(data[_LENGTH:offset])
    layout = _layouts.get(header)
    if layout is None or layout.size != len(data) - offset:
        return None
    return Known(layout.read(data, offset), text)


def learn(data: bytes, arrays: Mapping[str, np.ndarray]) -> None:
    """Cache the layout of a message that is not packed, from which safetensors has read these arrays."""
    offset = _LENGTH + int.from_bytes(data[:_LENGTH], "little")
    dtypes = {array.dtype for array in arrays.values()}
    header, _ = _parts(data[_LENGTH:offset])
    if len(dtypes) != 1 or offset % 8 or offset > _LONGEST or _METADATA in header:
        return
    dtype = dtypes.pop()
    if dtype.kind != "f":
        return
    starts = {name: start // dtype.itemsize for name, start in _starts(header).items()}
    places = tuple((name, starts[name], starts[name] + array.size, array.shape) for name, array in arrays.items())
    layout = Layout(len(data) - offset, dtype, places)
    if all(array.tobytes() == arrays[name].tobytes() for name, array in layout.read(data, offset).items()):
        _remember(_layouts, header, layout)


def join(arrays: Mapping[str, np.ndarray], text: str) -> bytes | None:
    """The message that safetensors makes of contiguous arrays and a text, if it made one like it before."""
    found = _headers.get(_signature(arrays))
    return None if found is None else _joined(arrays, text, *found)


def learn_to_join(arrays: Mapping[str, np.ndarray], text: str, made: bytes) -> bytes:
    """Cache the header of the message that safetensors has made of arrays and a text; returns the message."""
    offset = _LENGTH + int.from_bytes(made[:_LENGTH], "little")
    header, _ = _parts(made[_LENGTH:offset])
    if arrays and offset <= _LONGEST and _METADATA not in header:
        starts = _starts(header)
        order = sorted(arrays, key=lambda name: (starts[name], arrays[name].size))  # an empty one before what follows
        if _joined(arrays, text, header, order) == made:
            _remember(_headers, _signature(arrays), (header, order))
    return made


def _joined(arrays: Mapping[str, np.ndarray], text: str, header: bytes, order: list[str]) -> bytes:
    if text:
        header = b'{"__metadata__":{"v":' + json.dumps(text).encode() + b"}," + header[1:]
    header += b" " * (-len(header) % 8)
    return b"".join([len(header).to_bytes(_LENGTH, "little"), header, *(arrays[name].data for name in order)])


def _parts(header: bytes) -> tuple[bytes, str]:
    """A header as it would be without plain values, and their text; without the spaces that fill it up."""
    if header.startswith(_METADATA, 1):
        found = _WITH_TEXT.match(header)
        if found is not None:
            return b"{" + header[found.end() :].rstrip(b" "), json.loads(found[1])
    return header.rstrip(b" "), ""


def _starts(header: bytes) -> dict[str, int]:
    """Where each array begins, in bytes after the header."""
    return {name: entry["data_offsets"][0] for name, entry in json.loads(header).items()}


def _signature(arrays: Mapping[str, np.ndarray]) -> Any:
    return tuple((name, array.dtype.char, array.shape) for name, array in arrays.items())


def _remember(table: dict[Any, Any], key: Any, value: Any) -> None:
    if len(table) >= _MOST:
        table.clear()
    table[key] = value
