"""Numbers in fewer bits: as float16 with a common power of two, or as 8-bit steps between smallest and largest.

All arithmetic is in float64, and results are clipped to the range of the original dtype, so that nothing
finite becomes infinite. Numbers must be finite and of magnitude at most `LARGEST`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

LARGEST = 1e300  # beyond, differences leave float64
_STEPS = 255
_ROUNDING = 1e-4  # of a step: by this a whole number of steps may seem to be missing for the rounding of floats
_WORTH = 16  # rows have steps of their own where these take at most a 16th of what the codes take


def steps_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """In what the smallest number and the step are stored: nothing narrower holds 1e38 or a denormal."""
    return np.dtype(np.float64 if dtype.itemsize == 8 else np.float32)


def groups(shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    """How many parts of an array have a smallest number and a step of their own: its rows, or it as a whole."""
    wide = shape[-1] >= _WORTH * 2 * steps_dtype(dtype).itemsize
    return math.prod(shape[:-1]) if wide else 1


def quantise(x: np.ndarray, *, sums: str = "") -> tuple[np.ndarray, np.ndarray]:
    """Steps, as rows (smallest, step), and codes 0..255 of all numbers, flat: x ≈ smallest + code · step.

    Each is rounded to the nearest. With `sums` some of them to the other side: "kept", so that rows keep their sums, or
    "not exceeded", so that no row gets a larger one.
    """
    flat = x.reshape(groups(x.shape, x.dtype), -1).astype(np.float64)
    low, high = flat.min(axis=1), flat.max(axis=1)
    with np.errstate(under="ignore"):
        step = ((high - low) / _STEPS).astype(steps_dtype(x.dtype))
        # Never too short, so that 255 steps reach the largest; a step of denormals may round by a lot.
        short = step.astype(np.float64) * _STEPS < high - low
        step[short] = np.nextafter(step[short], np.array(np.inf, step.dtype))
        exact = (flat - low[:, None]) / np.where(step > 0, step, 1).astype(np.float64)[:, None]
    codes = _rounded_rows(exact.reshape(x.shape), down=sums == "not exceeded") if sums else np.rint(exact)
    return np.stack([low.astype(step.dtype), step], axis=1), codes.astype(np.uint8).ravel()


def _rounded_rows(x: np.ndarray, *, down: bool) -> np.ndarray:
    """Rows of integers, each the floor or the ceiling of its number, with the sum of the row, rounded (`down`).

    Many small probabilities would all be rounded to 0 and lose their mass: the largest remainders are rounded up.
    """
    whole = np.floor(x)
    remainders = x - whole
    missing = remainders.sum(axis=-1, keepdims=True)
    missing = np.floor(missing + _ROUNDING) if down else np.rint(missing)
    rank = np.argsort(np.argsort(-remainders, axis=-1, kind="stable"), axis=-1, kind="stable")
    return np.asarray(whole + (rank < missing))


def dequantise(steps: np.ndarray, codes: np.ndarray, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """The numbers, each at most half a step from what it was, and a rounding of its dtype."""
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
    """Numbers of a dtype; what is rounded up beyond its range stays at its end."""
    largest = np.finfo(dtype).max
    return np.asarray(np.clip(x, -largest, largest), dtype=dtype)
