"""Arrays packed into one body of bytes, and unpacked from untrusted bytes.

A `Form` says how one array is packed; it travels in the message's metadata as a short list. From it follows how many
bytes of the body are the array's, so nothing is allocated before all sizes are known and within bounds. What is
wrong with a body or its description is a `ValueError`; the codec makes it a `MessageError`.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from codistill.wire.quantise import dequantise, groups, halve, quantise, steps_dtype, unhalve
from codistill.wire.topk import keep, renormalise, spread

BODY = "~"  # the array of a message that holds what is packed
EXPANSION = 1024  # arrays may be at most this many times as long as the message that they are packed in
INFLATION = 64  # and its inflated body at most this many times
_DTYPES = {kind: np.dtype(kind) for kind in "efd"}  # float16, float32, float64
_SIDES = 32
_LONGEST = 1 << 40  # far beyond any side of an array: larger numbers are slow to multiply
_WIDEST = 1 << 16  # columns that two bytes can count


class Agreed(Protocol):
    """The compression that sender and receiver have agreed on."""

    def allows(self, form: Form, *, deflated: bool) -> bool:
        """Whether an array may be packed like this."""
        ...


@dataclass(frozen=True)
class Form:
    """How an array is packed: its numbers in `bits` (0: as they are), of each row the `k` largest (0: all)."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    bits: int = 0
    k: int = 0
    probable: bool = False  # every row is probabilities, and is to sum to 1 again

    def described(self) -> list[Any]:
        """As written in the metadata."""
        return [self.dtype.char, list(self.shape), self.bits, self.k, int(self.probable)]

    @classmethod
    def read(cls, item: Any) -> Form:
        """The form that a description stands for; `ValueError` if it is malformed."""
        kind, shape, bits, k, probable = item
        whole = [bits, k, probable, *shape]
        counts = all(type(n) is int and 0 <= n < _LONGEST for n in whole)
        if not isinstance(shape, list) or len(shape) > _SIDES or not counts:
            raise ValueError("a packed array without a shape")
        form = cls(_DTYPES[kind], tuple(shape), bits, k, bool(probable))
        if bits not in (0, 8, 16) or probable > 1 or (k and not form.can_keep(k)) or form.size < 2:
            raise ValueError(f"no way to pack an array: {item}"[:100])
        return form

    def can_keep(self, k: int) -> bool:
        """Whether rows have more than k columns, and those can be counted."""
        return len(self.shape) == 2 and 0 < k < self.shape[1] <= _WIDEST

    @property
    def size(self) -> int:
        """How many numbers the array holds."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the array as it was."""
        return self.size * self.dtype.itemsize

    @property
    def length(self) -> int:
        """Bytes of the array in the body."""
        return sum(dtype.itemsize * count for dtype, count in self._parts())

    def _values_shape(self) -> tuple[int, ...]:
        return (self.shape[0], self.k + (not self.probable)) if self.k else self.shape

    def _parts(self) -> list[tuple[np.dtype[Any], int]]:
        """What stands in the body, in order: columns, then steps or an exponent, then the numbers."""
        parts: list[tuple[np.dtype[Any], int]] = []
        if self.k:
            parts.append((np.dtype(np.uint8 if self.shape[1] <= 256 else np.uint16), self.shape[0] * self.k))
        shape = self._values_shape()
        if self.bits == 8:
            parts += [(steps_dtype(self.dtype), 2 * groups(shape, self.dtype)), (np.dtype(np.uint8), math.prod(shape))]
        elif self.bits == 16:
            parts += [(np.dtype(np.int16), 1), (np.dtype(np.float16), math.prod(shape))]
        else:
            parts.append((self.dtype, math.prod(shape)))
        return parts

    def pack(self, x: np.ndarray) -> bytes:
        """The array's bytes in the body."""
        arrays: list[np.ndarray] = []
        if self.k:
            columns, x = keep(x, self.k, fill=not self.probable)
            arrays.append(columns)
        # The receiver spreads what kept probabilities leave of 1: they must not exceed it.
        sums = "" if not self.probable else "not exceeded" if self.k else "kept"
        arrays += quantise(x, sums=sums) if self.bits == 8 else halve(x) if self.bits == 16 else (x,)
        return b"".join(_planes(a.astype(dtype)) for a, (dtype, _) in zip(arrays, self._parts(), strict=True))

    def unpack(self, data: np.ndarray) -> np.ndarray:
        """The array in its own shape and dtype."""
        cuts = np.cumsum([dtype.itemsize * count for dtype, count in self._parts()])[:-1]
        pieces = np.split(data, cuts)
        arrays = [_joined(part, dtype) for part, (dtype, _) in zip(pieces, self._parts(), strict=True)]
        columns = arrays.pop(0).reshape(self.shape[0], self.k) if self.k else None
        if not all(np.isfinite(array).all() for array in arrays):
            raise ValueError("NaN or infinity in a packed array")
        shape = self._values_shape()
        if self.bits:
            back = dequantise if self.bits == 8 else unhalve
            steps = arrays[0].reshape(-1, 2) if self.bits == 8 else arrays[0]
            x = back(steps, arrays[1], shape, self.dtype)
        else:
            x = arrays[0].reshape(shape)
        if columns is not None:
            if (columns[:, 1:] <= columns[:, :-1]).any() or columns[:, -1].max() >= self.shape[1]:
                raise ValueError("columns that are out of order or not there")
            x = spread(columns, x, self.shape[1])
        return renormalise(x) if self.probable else x


def _planes(array: np.ndarray) -> bytes:
    """All first bytes, then all second ones: signs and exponents are alike, and deflate well side by side."""
    return array.reshape(-1, 1).view(np.uint8).T.tobytes()


def _joined(planes: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    return np.ascontiguousarray(planes.reshape(dtype.itemsize, -1).T).view(dtype).ravel()


def unpack(
    arrays: Mapping[str, np.ndarray], packed: Any, message: int, limit: int, agreed: Agreed | None = None
) -> dict[str, np.ndarray]:
    """All arrays of a message of `message` bytes: those packed in its body, and those beside it.

    `packed` describes the body: a list of names with forms, and the body's length if it is deflated, otherwise 0.
    All arrays together have at most `limit` bytes. `agreed`: how they may be packed; None: in any way.
    """
    items, inflated = packed
    beside = {name: array for name, array in arrays.items() if name != BODY}
    forms = {_checked(name): Form.read(form) for name, *form in items}
    if len(forms) < len(items) or forms.keys() & beside.keys():
        raise ValueError("two arrays of one name")
    if agreed is not None and not all(agreed.allows(form, deflated=bool(inflated)) for form in forms.values()):
        raise ValueError("a message packed in another way than was agreed on")
    length, total = sum(form.length for form in forms.values()), sum(form.nbytes for form in forms.values())
    if total > EXPANSION * message or length > INFLATION * message:
        raise ValueError(f"{message} bytes that unpack to {max(length, total)}, too many times as much")
    if max(length, total + sum(array.nbytes for array in beside.values())) > limit:
        raise ValueError(f"{message} bytes that unpack to {max(length, total)}, above the limit of {limit}")
    body = arrays[BODY]
    if body.dtype != np.uint8 or body.ndim != 1 or type(inflated) is not int or inflated not in (0, length):
        raise ValueError("a packed body that is not as described")
    if inflated:
        body = np.frombuffer(_inflate(body.tobytes(), length), np.uint8)
    if len(body) != length:
        raise ValueError(f"a packed body of {len(body)} bytes instead of {length}")
    ends = np.cumsum([form.length for form in forms.values()])[:-1]
    with np.errstate(all="ignore"):  # what overflows is seen in the end, or stays within its dtype
        for (name, form), part in zip(forms.items(), np.split(body, ends), strict=True):
            beside[name] = form.unpack(part)
            beside[name].flags.writeable = False
    return beside


def _checked(name: Any) -> str:
    if not isinstance(name, str) or name.encode() == b"__metadata__":  # what is no Unicode cannot be encoded
        raise ValueError("a packed array without a name")
    return name


def _inflate(data: bytes, length: int) -> bytes:
    inflater = zlib.decompressobj()
    try:
        found = inflater.decompress(data, length + 1)  # no more than that is ever made
    except zlib.error as error:
        raise ValueError(f"a body that cannot be inflated: {error}") from None
    if len(found) != length or not inflater.eof or inflater.unused_data:
        raise ValueError("a body that is not as long as it says when inflated")
    return found
