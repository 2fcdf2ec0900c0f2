"""Compression of messages, independent of the protocol; see docs/compression.md."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from codistill.core.errors import MessageError, RecipeError
from codistill.core.settings import Settings, check_settings, setting
from codistill.wire.codec import decode, encode, encode_packed
from codistill.wire.packing import BODY, EXPANSION, INFLATION, LARGEST, Form, probability_rows

# Accumulated compression errors of a sender, by name, dtype and shape of the array.
Residue = dict[tuple[Any, ...], np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Compression(Settings):
    """Compression of floating-point arrays with two or more numbers; everything else is sent unchanged.

    The receiver gets arrays of the original shapes and dtypes. Settings combine: keep the largest entries of each row,
    store them in fewer bits, deflate. An array or message that would not get smaller is sent unchanged.
    """

    bits: int | None = setting(None, "bits per number: 16 (float16) or 8 (linear steps); unset: unchanged")
    top_k: int | None = setting(None, "of a 2-D array, keep the k largest entries per row; unset: all", at_least=1)
    lossless: bool = setting(False, "deflate messages if that makes them smaller")
    error_feedback: bool = setting(
        False, "add the compression error to the next array of the same name and shape; never to probabilities"
    )

    def __post_init__(self) -> None:
        check_settings(self, "compression")
        if self.bits not in (None, 8, 16):
            raise RecipeError("compression.bits must be 8 or 16.", f"{self.bits}", "Leave it unset for full precision.")
        if self.error_feedback and not self.is_lossy:
            raise RecipeError(
                "compression.error_feedback needs lossy compression.", "neither bits nor top_k", "Set one of them."
            )

    @property
    def is_lossy(self) -> bool:
        """Whether arrays may arrive changed."""
        return self.bits is not None or self.top_k is not None

    def __bool__(self) -> bool:
        return self.is_lossy or self.lossless

    def allows(self, form: Form, *, deflated: bool) -> bool:
        """Whether these settings can pack an array in such a form."""
        if form.bits not in (0, self.bits) or form.k not in (0, self.top_k):
            return False
        return self.lossless or (not deflated and bool(form.bits or form.k))

    def encode(self, arrays: Mapping[str, np.ndarray], values: Mapping[str, Any], residue: Residue) -> bytes:
        """The encoded bytes; with error feedback, first add `residue` to the arrays, then update it."""
        if not self.error_feedback:
            return self._encode(arrays, values)
        meant = {name: _with_residue(name, array, residue) for name, array in arrays.items()}
        data = self._encode(meant, values)
        received, _ = decode(data, finite=False)
        for name, array in meant.items():
            residue.pop(_key(name, array), None)
            if _is_fit(array):
                with np.errstate(over="ignore"):
                    lost = np.where(probability_rows(arrays[name])[..., None], 0, array - received[name])
                if lost.any() and np.isfinite(lost).all():
                    residue[_key(name, array)] = lost.astype(array.dtype.newbyteorder("="))
        return data

    def _encode(self, arrays: Mapping[str, np.ndarray], values: Mapping[str, Any]) -> bytes:
        if BODY in arrays:
            raise MessageError(
                f"The array name '{BODY}' is reserved in compressed messages.", BODY, "Rename the array."
            )
        forms = {name: self._form(arrays[name]) for name in sorted(arrays) if _is_fit(arrays[name])}
        if not self.lossless:
            forms = {name: form for name, form in forms.items() if form.bits or form.k}
        if not forms:
            return encode(arrays, values)
        beside = {name: array for name, array in arrays.items() if name not in forms}
        items = [[name, *form.described()] for name, form in forms.items()]
        body = b"".join(form.pack(arrays[name]) for name, form in forms.items())
        unpacked = sum(form.nbytes for form in forms.values())
        data = encode_packed(beside, values, [items, 0], body)
        if self.lossless:
            deflated = encode_packed(beside, values, [items, len(body)], zlib.compress(body))
            # A receiver rejects a message that expands by more than this.
            if unpacked <= EXPANSION * len(deflated) and len(body) <= INFLATION * len(deflated):
                data = min(data, deflated, key=len)
        return data if len(data) < unpacked else min(data, encode(arrays, values), key=len)

    def _form(self, array: np.ndarray) -> Form:
        """The shortest form that the settings allow; among equally short ones the most precise."""
        whole = Form(array.dtype.newbyteorder("="), array.shape)
        if float(np.abs(array).max()) > LARGEST:
            return whole
        probable = bool(probability_rows(array).all())
        kept = (0, self.top_k) if self.top_k is not None and whole.can_keep(self.top_k) else (0,)
        ways = [
            replace(whole, bits=bits, k=k, probable=probable)
            for bits in ((0,) if self.bits is None else (0, self.bits))
            for k in kept
            if bits or k
        ]
        return min([whole, *(way for way in ways if way.nbytes <= EXPANSION * way.length)], key=lambda way: way.length)


def _is_fit(array: np.ndarray) -> bool:
    """Whether an array can be compressed: two or more finite floating-point numbers."""
    return array.dtype.kind == "f" and array.dtype.itemsize <= 8 and array.size > 1 and bool(np.isfinite(array).all())


def _key(name: str, array: np.ndarray) -> tuple[Any, ...]:
    return (name, array.dtype.char, *array.shape)


def _with_residue(name: str, array: np.ndarray, residue: Residue) -> np.ndarray:
    """The array plus the accumulated compression error; rows of probabilities stay unchanged."""
    lost = residue.get(_key(name, array))
    if lost is None or not _is_fit(array):
        return array
    with np.errstate(over="ignore"):
        meant = np.where(probability_rows(array)[..., None], array, array + lost)
    return meant if np.isfinite(meant).all() else array
