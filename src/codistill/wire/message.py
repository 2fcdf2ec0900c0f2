"""A message: named arrays and a few plain values. Its size is its number of encoded bytes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from codistill.core.errors import MessageError, ProtocolError, calling_line
from codistill.wire.codec import SIZE_LIMIT, AdjacentArrays, Layout, decode, encode, is_plain, is_sendable
from codistill.wire.compression import Compression, Residue

# What a receiver expects: for each array its shape (None: any length) or an array like it, for each plain value its
# type.
Expectation = Mapping[str, "tuple[int | None, ...] | np.ndarray | type[Any]"]


class Message(Mapping[str, Any]):
    """Named arrays and plain values, as a read-only mapping; received arrays are read-only."""

    def __init__(self, arrays: Mapping[str, Any] | None = None, values: Mapping[str, Any] | None = None) -> None:
        self.arrays = {name: _as_array(array) for name, array in (arrays or {}).items()}
        self.plain = dict(values or {})

    @classmethod
    def of(cls, **items: Any) -> Message:
        """Sort items into arrays (numpy, torch) and plain values (numbers, strings, lists)."""
        arrays, plain = {}, {}
        for name, item in items.items():
            if hasattr(item, "__array__"):
                arrays[name] = _numbers(name, item)
            elif is_plain(item):
                plain[name] = item
            else:
                raise _unsendable(name, f"{item!r}"[:60], item)
        return cls(arrays, plain)

    @classmethod
    def decode(cls, data: bytes, *, limit: int = SIZE_LIMIT, packed: bool | Compression = True) -> Message:
        """Decode received bytes; raises `MessageError` unless they are a valid message of finite numbers.

        `limit`: most bytes, encoded and decoded; `packed`: see `codistill.wire.codec.decode`.
        """
        message = cls.__new__(cls)
        message.arrays, message.plain = decode(data, limit=limit, packed=packed)
        both = sorted(message.arrays.keys() & message.plain.keys())
        if both:
            raise MessageError(
                "Names in a message must be unique.", f"'{both[0]}' as an array and as a value"[:80], _SAME
            )
        return message

    @cached_property
    def encoded(self) -> bytes:
        """The encoded bytes; made once for all receivers."""
        return encode(self.arrays, self.plain)

    def compressed(self, compression: Compression, residue: Residue, by: tuple[str, int]) -> bytes:
        """The compressed bytes; made once per sender and phase, for all receivers."""
        if by not in self._compressed:
            self._compressed[by] = compression.encode(self.arrays, self.plain, residue)
        return self._compressed[by]

    @cached_property
    def _compressed(self) -> dict[tuple[str, int], bytes]:
        return {}

    def check(self, expect: Expectation) -> None:
        """Raise `MessageError` unless the message holds exactly what its receiver expects; {}: anything."""
        for name, like in expect.items():
            if isinstance(like, type):
                value = self.plain.get(name)
                if not isinstance(value, like) or (isinstance(value, bool) and like is not bool):
                    must = f"The message must have '{name}' of type {like.__name__}."
                    raise MessageError(must, f"{value!r}"[:80], _SAME)
                continue
            shape = like.shape if isinstance(like, np.ndarray) else like
            array = self.arrays.get(name)
            if array is None:
                raise MessageError(f"The message must have an array '{name}'.", f"{sorted(self)}", _SAME)
            if array.shape != shape and (
                len(array.shape) != len(shape)
                or any(want not in (None, has) for want, has in zip(shape, array.shape, strict=True))
            ):
                raise MessageError(f"'{name}' must have shape {_show(shape)}.", _show(array.shape), _SAME)
            if isinstance(like, np.ndarray) and array.dtype != like.dtype:
                do = "Convert it with .astype before sending."
                raise MessageError(f"'{name}' must have dtype {like.dtype}.", str(array.dtype), do)
        if expect and len(self) > len(expect):
            extra = sorted(self.keys() - expect.keys())
            raise MessageError("The message has unexpected content.", f"{extra}"[:200], _SAME)

    @property
    def signature(self) -> tuple[tuple[str, tuple[int, ...], str], ...]:
        """Names, shapes and dtypes of the arrays."""
        return tuple((name, self.arrays[name].shape, self.arrays[name].dtype.str) for name in sorted(self.arrays))

    @property
    def layout(self) -> str:
        """A digest of the signature."""
        if isinstance(self.arrays, AdjacentArrays):  # cached by layout
            return _digest_of(self.arrays.layout)
        return _digest(self.signature)

    def __getitem__(self, name: str) -> Any:
        if name in self.arrays:
            return self.arrays[name]
        return self.plain[name]

    def __iter__(self) -> Iterator[str]:
        yield from self.arrays
        yield from self.plain

    def __len__(self) -> int:
        return len(self.arrays) + len(self.plain)

    def __repr__(self) -> str:
        arrays = ", ".join(f"{name}{_show(array.shape)}" for name, array in self.arrays.items())
        return f"Message({arrays}; {self.plain})"


@lru_cache(maxsize=64)
def _digest_of(layout: Layout) -> str:
    places = sorted((name, shape, layout.dtype.str) for name, _, _, shape in layout.places)
    return _digest(tuple(places))


@lru_cache(maxsize=64)  # the same in every round
def _digest(signature: Any) -> str:
    return hashlib.sha256(json.dumps(signature).encode()).hexdigest()


_SAME = "Run the same protocol with the same public data on both sides."


def _show(shape: tuple[int | None, ...]) -> str:
    return "(" + ", ".join("any" if size is None else str(size) for size in shape) + ")"


def _numbers(name: str, item: Any) -> np.ndarray:
    try:
        array = _as_array(item)
    except (TypeError, ValueError, RuntimeError) as error:  # such as bfloat16, which numpy lacks
        raise _unsendable(name, f"{error}"[:80], item) from None
    if not is_sendable(array.dtype):
        raise _unsendable(name, f"dtype {array.dtype}", item)
    return array


def _unsendable(name: str, found: str, item: Any) -> ProtocolError:
    return ProtocolError(
        f"'{name}' in a message must be an array of numbers, a finite number, a string, a boolean, or a list of these.",
        f"{found} ({type(item).__name__}), at {calling_line()}",
        "Send numbers as numpy arrays or torch tensors, and a model as me.learner.export().",
    )


def _as_array(array: Any) -> np.ndarray:
    if hasattr(array, "detach"):  # a torch tensor, with or without a graph
        array = array.detach().cpu().numpy()
    return np.asarray(array)
