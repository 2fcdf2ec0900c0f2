"""Models that travel in messages: never pickled, never executed.

`open_model` checks what arrives before it is built and before it is used, and returns a predictor or raises
`MessageError`. `archive_reading` reads estimators, also of saved models, as plain data before anything compiled is
built. `models` says how much a model may compute and hold. `skops_archive` is also for an agent's own checkpoints.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Protocol

import numpy as np

from codistill.core.errors import CodistillError, MessageError
from codistill.learners.portable.models import CostOfRows, open_constant, open_kernel, open_torch
from codistill.learners.portable.onnx_models import open_onnx
from codistill.learners.portable.trees import open_trees
from codistill.wire.message import Message

__all__ = ["Predictor", "ReceivedModel", "checked_predictions", "open_model"]

Complete = Callable[[np.ndarray], np.ndarray]


class Predictor(Protocol):
    """An opened model: all one can do is ask it for predictions."""

    def predict(self, x: np.ndarray) -> np.ndarray:
        """Class probabilities or real values (n, C)."""


def _open_estimator(message: Message, shape: tuple[int, ...], classes: int) -> tuple[Predictor, CostOfRows]:
    from codistill.learners.portable.estimators import open_estimator  # scikit-learn takes seconds to import

    return open_estimator(message, shape, classes)


# By the value `kind` of a message. Each of them returns a model and what its predictions for some rows take, or raises,
# in whatever way, on anything that is not a sound model.
_OPENERS: dict[str, Callable[[Message, tuple[int, ...], int], tuple[Predictor, CostOfRows]]] = {
    "constant": open_constant,  # class frequencies, of a model that could not be fitted yet
    "kernel": open_kernel,  # inputs and coefficients, if their owner agrees
    "onnx": open_onnx,  # any torch module but a registered architecture, or an object with `to_onnx()`
    "skops": _open_estimator,  # a fitted estimator of scikit-learn, of a listed type, which holds no training rows
    "torch": open_torch,  # name and options of a registered architecture, weights
    "trees": open_trees,  # the trees of XGBoost and LightGBM, as arrays
}


def open_model(message: Message, shape: tuple[int, ...], classes: int, rows: int = 0) -> Predictor:
    """The model in a message, for samples of `shape`, of which `rows` are to be predicted.

    Anything that is not a sound model, or takes more than the limits allow, is a `MessageError`.
    """
    kind = message.plain.get("kind")
    try:
        if not isinstance(kind, str) or kind not in _OPENERS:
            raise ValueError(f"a model of unknown kind {kind!r}"[:200])
        model, cost = _OPENERS[kind](message, shape, classes)
        for count in {rows or classes + 1, classes + 1}:
            cost(count).check()
        _probe(model, shape, classes)
    except MessageError:
        raise
    except CodistillError as error:
        raise _refused(error.found) from None
    except Exception as error:  # a hostile model may fail in any way; whatever it is, it is refused
        raise _refused(f"{type(error).__name__}: {str(error)[:200]}") from None
    return model


class ReceivedModel:
    """A received model whose predictions for the receiver's own samples `x` are known to be sound."""

    def __init__(self, model: Predictor, x: np.ndarray, classes: int, complete: Complete | None = None) -> None:
        self._model, self._x, self._complete = model, x, complete
        self._predictions = checked_predictions(model, x, classes, complete)

    def predict(self, x: np.ndarray) -> np.ndarray:
        """Predict (n, C); predictions for the receiver's own samples are computed once."""
        return self._predictions.copy() if x is self._x else self._model.predict(_taken(self._model, x, self._complete))


def _taken(model: Predictor, x: np.ndarray, complete: Complete | None) -> np.ndarray:
    """Samples without missing values for a model that does not take them."""
    return x if complete is None or getattr(model, "takes_missing", False) else complete(x)


def checked_predictions(model: Predictor, x: np.ndarray, classes: int, complete: Complete | None = None) -> np.ndarray:
    """Predictions (n, C) of a received model; a `MessageError` if it fails or they are not sound.

    `complete` fills in missing values, by the receiver's own samples.
    """
    try:
        predictions = model.predict(_taken(model, x, complete))
        _check_predictions(predictions, (len(x), classes))
    except Exception as error:  # a model that passed the probe may still fail on other samples
        raise _refused(f"{type(error).__name__}: {str(error)[:200]}") from None
    return predictions


def _refused(found: str) -> MessageError:
    return MessageError(
        "A received model must be of a known type, sound, within its limits, and made for this task.",
        found,
        "The round continues without this model; its sender should use a smaller model, or a listed type.",
    )


def _probe(model: Predictor, shape: tuple[int, ...], classes: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # More rows than classes: predictions of one row, or transposed ones, do not pass for (n, C).
        rows = np.linspace(-1, 1, classes + 1, dtype=np.float32)
        predictions = model.predict(np.broadcast_to(rows.reshape(-1, *(1 for _ in shape)), (classes + 1, *shape)))
    _check_predictions(predictions, (classes + 1, classes))


def _check_predictions(predictions: np.ndarray, wanted: tuple[int, int]) -> None:
    if predictions.shape != wanted:
        raise ValueError(f"predictions of shape {predictions.shape} instead of {wanted}")
    if not np.isfinite(predictions).all():
        raise ValueError("NaN or infinity in its predictions")
