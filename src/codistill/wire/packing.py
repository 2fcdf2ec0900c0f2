"""Pack arrays into one body of bytes, and unpack untrusted bytes.

A `Form` says how one array is packed; it is sent in the message's metadata as a short list. It determines how many
bytes of the body belong to the array, so all sizes are checked before anything is allocated. An invalid body or
description raises `ValueError`, which the codec turns into `MessageError`.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from codistill.wire.compression import Compression

BODY = "~"  # the array of a message that holds the packed arrays
EXPANSION = 1024  # unpacked arrays may be at most this many times as long as the message
INFLATION = 64  # and the inflated body at most this many times
_DTYPES = {kind: np.dtype(kind) for kind in "efd"}  # float16, float32, float64
_SIDES = 32
_LONGEST = 1 << 40  # longest side; Python multiplies huge integers slowly
_WIDEST = 1 << 16  # columns that fit in two bytes


@dataclass(frozen=True)
class Form:
    """How an array is packed: numbers in `bits` (0: unchanged), of each row the `k` largest (0: all)."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    bits: int = 0
    k: int = 0
    probable: bool = False  # every row is probabilities, and is normalised again

    def described(self) -> list[Any]:
        return [self.dtype.char, list(self.shape), self.bits, self.k, int(self.probable)]

    @classmethod
    def read(cls, item: Any) -> Form:
        """The form of a description; `ValueError` if it is malformed."""
        kind, shape, bits, k, probable = item
        whole = [bits, k, probable, *shape]
        counts = all(type(n) is int and 0 <= n < _LONGEST for n in whole)
        if not isinstance(shape, list) or len(shape) > _SIDES or not counts:
            raise ValueError("a packed array without a shape")
        form = cls(_DTYPES[kind], tuple(shape), bits, k, bool(probable))
        if bits not in (0, 8, 16) or probable > 1 or (k and not form.can_keep(k)) or form.size < 2:
            raise ValueError(f"an invalid form of packing: {item}"[:100])
        return form

    def can_keep(self, k: int) -> bool:
        """Whether rows have more than k columns, with indices of two bytes."""
        return len(self.shape) == 2 and 0 < k < self.shape[1] <= _WIDEST

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the unpacked array."""
        return self.size * self.dtype.itemsize

    @property
    def length(self) -> int:
        """Bytes of the array in the body."""
        return sum(dtype.itemsize * count for dtype, count in self._parts())

    def _values_shape(self) -> tuple[int, ...]:
        return (self.shape[0], self.k + (not self.probable)) if self.k else self.shape

    def _parts(self) -> list[tuple[np.dtype[Any], int]]:
        """Dtypes and lengths in the body: columns, then steps or an exponent, then the numbers."""
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
        arrays: list[np.ndarray] = []
        if self.k:
            columns, x = keep(x, self.k, fill=not self.probable)
            arrays.append(columns)
        # The receiver spreads the rest of the mass, so kept probabilities must not exceed 1.
        sums = "" if not self.probable else "not exceeded" if self.k else "kept"
        arrays += quantise(x, sums=sums) if self.bits == 8 else halve(x) if self.bits == 16 else (x,)
        return b"".join(_planes(a.astype(dtype)) for a, (dtype, _) in zip(arrays, self._parts(), strict=True))

    def unpack(self, data: np.ndarray) -> np.ndarray:
        cuts = np.cumsum([dtype.itemsize * count for dtype, count in self._parts()])[:-1]
        pieces = np.split(data, cuts)
        arrays = [_joined(part, dtype) for part, (dtype, _) in zip(pieces, self._parts(), strict=True)]
        columns = arrays.pop(0).reshape(self.shape[0], self.k) if self.k else None
        if not all(np.isfinite(array).all() for array in arrays):
            raise ValueError("NaN or infinity in a packed array")
        shape = self._values_shape()
        if self.bits == 8:
            x = dequantise(arrays[0].reshape(-1, 2), arrays[1], shape, self.dtype)
        elif self.bits == 16:
            x = unhalve(arrays[0], arrays[1], shape, self.dtype)
        else:
            x = arrays[0].reshape(shape)
        if columns is not None:
            if (columns[:, 1:] <= columns[:, :-1]).any() or columns[:, -1].max() >= self.shape[1]:
                raise ValueError("columns out of order or out of range")
            x = spread(columns, x, self.shape[1])
        return renormalise(x) if self.probable else x


def _planes(array: np.ndarray) -> bytes:
    """All first bytes, then all second ones, and so on: similar signs and exponents deflate well side by side."""
    return array.reshape(-1, 1).view(np.uint8).T.tobytes()


def _joined(planes: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    return np.ascontiguousarray(planes.reshape(dtype.itemsize, -1).T).view(dtype).ravel()


def unpack(
    arrays: Mapping[str, np.ndarray], packed: Any, message: int, limit: int, agreed: Compression | None = None
) -> dict[str, np.ndarray]:
    """All arrays of a message of `message` bytes: those packed in its body, and those beside it.

    `packed` describes the body: a list of names with forms, and the body's length if it is deflated, otherwise 0.
    All arrays together may have `limit` bytes. `agreed`: the allowed compression; None: any.
    """
    items, inflated = packed
    beside = {name: array for name, array in arrays.items() if name != BODY}
    forms = {_checked(name): Form.read(form) for name, *form in items}
    if len(forms) < len(items) or forms.keys() & beside.keys():
        raise ValueError("two arrays with the same name")
    if agreed is not None and not all(agreed.allows(form, deflated=bool(inflated)) for form in forms.values()):
        raise ValueError("a compression that was not agreed on")
    length, total = sum(form.length for form in forms.values()), sum(form.nbytes for form in forms.values())
    if total > EXPANSION * message or length > INFLATION * message:
        raise ValueError(f"{message} bytes that unpack to {max(length, total)}, above the allowed ratio")
    if max(length, total + sum(array.nbytes for array in beside.values())) > limit:
        raise ValueError(f"{message} bytes that unpack to {max(length, total)}, above the limit of {limit}")
    body = arrays[BODY]
    if body.dtype != np.uint8 or body.ndim != 1 or type(inflated) is not int or inflated not in (0, length):
        raise ValueError("a packed body that does not match its description")
    if inflated:
        body = np.frombuffer(_inflate(body.tobytes(), length), np.uint8)
    if len(body) != length:
        raise ValueError(f"a packed body of {len(body)} bytes instead of {length}")
    ends = np.cumsum([form.length for form in forms.values()])[:-1]
    with np.errstate(all="ignore"):  # overflow is checked later, or clipped to the range of the dtype
        for (name, form), part in zip(forms.items(), np.split(body, ends), strict=True):
            beside[name] = form.unpack(part)
            beside[name].flags.writeable = False
    return beside


def _checked(name: Any) -> str:
    if not isinstance(name, str) or name.encode() == b"__metadata__":  # raises on invalid Unicode
        raise ValueError("a packed array without a name")
    return name


def _inflate(data: bytes, length: int) -> bytes:
    inflater = zlib.decompressobj()
    try:
        found = inflater.decompress(data, length + 1)  # never allocates more
    except zlib.error as error:
        raise ValueError(f"a body that cannot be inflated: {error}") from None
    if len(found) != length or not inflater.eof or inflater.unused_data:
        raise ValueError("a body whose inflated length does not match its description")
    return found


# --- fewer bits: float16 with a common power of two, or 8-bit steps between the smallest and the largest number

LARGEST = 1e300  # differences of larger numbers could overflow float64
_STEPS = 255
_ROUNDING = 1e-4  # tolerance, in steps, for the rounding of floats
_WORTH = 16  # rows get their own steps if these take at most a 16th of the codes' bytes


def steps_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype of the smallest number and the step: a narrower one cannot hold 1e38 or a denormal."""
    return np.dtype(np.float64 if dtype.itemsize == 8 else np.float32)


def groups(shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    """How many parts of an array have their own smallest number and step: its rows, or one for all."""
    wide = shape[-1] >= _WORTH * 2 * steps_dtype(dtype).itemsize
    return math.prod(shape[:-1]) if wide else 1


def quantise(x: np.ndarray, *, sums: str = "") -> tuple[np.ndarray, np.ndarray]:
    """Steps, as rows (smallest, step), and codes 0..255 of all numbers, flat: x ≈ smallest + code · step.

    Codes are rounded to the nearest. With `sums`, some are rounded the other way: "kept" preserves the sums of rows,
    "not exceeded" lets none grow.
    """
    flat = x.reshape(groups(x.shape, x.dtype), -1).astype(np.float64)
    low, high = flat.min(axis=1), flat.max(axis=1)
    with np.errstate(under="ignore"):
        step = ((high - low) / _STEPS).astype(steps_dtype(x.dtype))
        # Round steps up, so that 255 of them reach the largest number; denormal steps round coarsely.
        short = step.astype(np.float64) * _STEPS < high - low
        step[short] = np.nextafter(step[short], np.array(np.inf, step.dtype))
        exact = (flat - low[:, None]) / np.where(step > 0, step, 1).astype(np.float64)[:, None]
    codes = _rounded_rows(exact.reshape(x.shape), down=sums == "not exceeded") if sums else np.rint(exact)
    return np.stack([low.astype(step.dtype), step], axis=1), codes.astype(np.uint8).ravel()


def _rounded_rows(x: np.ndarray, *, down: bool) -> np.ndarray:
    """Round each number to its floor or ceiling so that rows keep their (rounded or rounded down) sums.

    Rounding to the nearest would turn many small probabilities into 0; the largest remainders are rounded up instead.
    """
    whole = np.floor(x)
    remainders = x - whole
    missing = remainders.sum(axis=-1, keepdims=True)
    missing = np.floor(missing + _ROUNDING) if down else np.rint(missing)
    rank = np.argsort(np.argsort(-remainders, axis=-1, kind="stable"), axis=-1, kind="stable")
    return np.asarray(whole + (rank < missing))


def dequantise(steps: np.ndarray, codes: np.ndarray, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """The numbers, each within half a step of the original plus the rounding of its dtype."""
    low, step = steps.astype(np.float64).T
    with np.errstate(over="ignore", under="ignore"):
        return fit(low[:, None] + codes.reshape(len(steps), -1) * step[:, None], dtype).reshape(shape)


def halve(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The exponent e of the largest magnitude, and all numbers · 2^(15 − e) as float16, flat: none overflows."""
    exponent = np.frexp(np.abs(x).max().astype(np.float64))[1]
    with np.errstate(under="ignore"):
        return np.array([exponent], np.int16), np.ldexp(x.astype(np.float64), 15 - exponent).astype(np.float16).ravel()


def unhalve(exponent: np.ndarray, halves: np.ndarray, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """The numbers, each within 2^-11 of its own magnitude, or within 2^-39 of the largest."""
    with np.errstate(over="ignore", under="ignore"):
        return fit(np.ldexp(halves.astype(np.float64), int(exponent[0]) - 15), dtype).reshape(shape)


def fit(x: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    """Convert to a dtype, clipped to its range."""
    largest = np.finfo(dtype).max
    return np.asarray(np.clip(x, -largest, largest), dtype=dtype)


# --- the k largest entries of each row, and rows of probabilities

_TOLERANCE = 1e-3  # a row sums to 1 within this


def probability_rows(x: np.ndarray) -> np.ndarray:
    """Which rows of the last axis are probabilities: two or more non-negative numbers that sum to 1."""
    if x.ndim == 0 or x.shape[-1] < 2:
        return np.zeros(x.shape[:-1], dtype=bool)
    with np.errstate(over="ignore"):
        sums = x.sum(axis=-1, dtype=np.float64)
    return np.asarray((np.abs(sums - 1.0) <= _TOLERANCE) & (x.min(axis=-1) >= 0))


def renormalise(x: np.ndarray) -> np.ndarray:
    """Clip rows at 0 and normalise them to the sum 1; a row without positive entries stays 0."""
    positive = np.maximum(x, 0)
    sums = positive.sum(axis=-1, keepdims=True, dtype=np.float64).astype(x.dtype)
    return np.asarray(positive / np.where(sums > 0, sums, 1).astype(x.dtype))


def keep(x: np.ndarray, k: int, *, fill: bool) -> tuple[np.ndarray, np.ndarray]:
    """Columns (n, k) in ascending order, and their entries; with `fill`, append the mean of all other entries."""
    columns = np.sort(np.argsort(-x, axis=1, kind="stable")[:, :k], axis=1)
    kept = np.take_along_axis(x, columns, axis=1)
    if not fill:
        return columns, kept
    left_out = np.ones(x.shape, dtype=bool)
    np.put_along_axis(left_out, columns, False, axis=1)
    return columns, np.column_stack([kept, x.mean(axis=1, dtype=np.float64, where=left_out).astype(x.dtype)])


def spread(columns: np.ndarray, values: np.ndarray, width: int) -> np.ndarray:
    """Rows of full width; without a fill column they are probabilities, and the missing mass is spread evenly."""
    k = columns.shape[1]
    fill = values[:, k:]
    if values.shape[1] == k:
        missing = 1 - values.sum(axis=1, keepdims=True, dtype=np.float64)
        fill = (np.maximum(missing, 0) / (width - k)).astype(values.dtype)
    rows = np.repeat(fill, width, axis=1)
    np.put_along_axis(rows, columns, values[:, :k], axis=1)
    return rows
