"""Constant models that travel: the class frequencies of an agent whose model could not be fitted yet."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from codistill.learners.portable.model_limits import Cost
from codistill.message import Message

_TOLERANCE = 1e-3  # by which received frequencies may miss a sum of 1: they are rounded to 32 bits, or compressed


class ConstantModel:
    """Predicts the same class frequencies for every sample."""

    def __init__(self, frequencies: np.ndarray) -> None:
        self.frequencies = frequencies

    def predict(self, x: np.ndarray) -> np.ndarray:
        """One row of frequencies per sample."""
        return np.tile(self.frequencies, (len(x), 1))


def class_frequencies(targets: np.ndarray) -> np.ndarray:
    """The share of each class in soft labels (n, C); all classes alike where they have no mass."""
    mass = targets.sum(axis=0, dtype=np.float64)
    shares = mass / mass.sum() if mass.sum() > 0 else np.full(len(mass), 1 / len(mass))
    return np.asarray(shares, dtype=np.float32)


def export_constant(model: ConstantModel) -> Message:
    """The frequencies (C,)."""
    return Message({"frequencies": model.frequencies}, {"kind": "constant"})


def open_constant(
    message: Message, shape: tuple[int, ...], classes: int
) -> tuple[ConstantModel, Callable[[int], Cost]]:
    """The constant model in a message, and what its predictions take; anything unsound raises."""
    frequencies = np.asarray(message.arrays["frequencies"], dtype=np.float32)
    if frequencies.shape != (classes,):
        raise ValueError(f"class frequencies of shape {frequencies.shape} for {classes} classes")
    # "not <=": a comparison with NaN is False.
    if not frequencies.min() >= 0 or not abs(float(frequencies.sum(dtype=np.float64)) - 1) <= _TOLERANCE:
        raise ValueError("class frequencies that are negative, or whose sum is not 1")
    return ConstantModel(frequencies), lambda rows: Cost(rows, rows * classes)
