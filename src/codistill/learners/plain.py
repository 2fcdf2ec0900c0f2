"""Any Python object with `fit(x, targets)` and `predict(x)` as a learner."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import numpy as np

from codistill.errors import LearnerError
from codistill.learners.ability import Ability, Learner
from codistill.learners.portable import onnx_models as portable_onnx
from codistill.learners.portable.constant_models import ConstantModel, class_frequencies, export_constant
from codistill.message import Message


class PlainLearner(Learner):
    """An object of the user's own. It gets (n, C) targets, and its `predict` must return (n, C).

    Missing values of its samples are filled in, unless it has an attribute `takes_missing` that is true.

    It may travel if it has a method `to_onnx()` that returns bytes or an onnx.ModelProto: a graph from samples to
    what `predict` returns. If its fit fails for targets of one class, it answers with that class until there are more.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self._columns = 0
        self._constant: ConstantModel | None = None  # answers in place of a model that could not be fitted
        self.takes_missing = bool(getattr(model, "takes_missing", False))
        self.abilities = Ability.PREDICT
        if callable(getattr(model, "to_onnx", None)) and portable_onnx.is_installed():
            self.abilities |= Ability.PORTABLE

    def fit(self, x: np.ndarray, targets: np.ndarray) -> None:
        """Pass the data on unchanged."""
        self._columns = targets.shape[1]
        self._constant = None
        try:
            self.model.fit(x, targets)
        except Warning:  # where Python is told to raise these
            raise
        except Exception:
            if not _holds_one_class(targets) or not self._fits_two_classes(x, targets):
                raise  # not for want of classes
            self._constant = ConstantModel(class_frequencies(targets))

    def _fits_two_classes(self, x: np.ndarray, targets: np.ndarray) -> bool:
        """Whether a copy could be fitted to these samples if every other one were of another class."""
        rows = np.arange(max(len(x), 2))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                copy.deepcopy(self.model).fit(x[rows % len(x)], np.eye(targets.shape[1], dtype=targets.dtype)[rows % 2])
            except Exception:  # the object is its owner's code, and may fail in any way
                return False
        return True

    @property
    def is_constant(self) -> bool:  # type: ignore[override]
        """Whether it answers with the only class that it was given, since it could not be fitted to one class."""
        return self._constant is not None

    @property
    def ready(self) -> bool:  # type: ignore[override]
        """Whether it has been fitted."""
        return self._columns > 0

    def predict(self, x: np.ndarray) -> np.ndarray:
        """The object's predictions, checked to be (n, C) finite numbers."""
        if not self._columns:
            raise LearnerError(
                "A model must be fitted before it predicts.",
                f"{self.describe()} has not seen any data yet",
                "Run at least one round in which this agent is present.",
            )
        if self._constant is not None:
            return self._constant.predict(x)
        given = np.asarray(self.model.predict(x))
        fits = given.shape == (len(x), self._columns) and given.dtype.kind in "biuf"
        if not fits or not np.isfinite(given).all():
            raise LearnerError(
                f"predict of {self.describe()} must return one row per sample and one column per class, "
                f"({len(x)}, {self._columns}), of finite numbers.",
                "NaN or infinity in it" if fits else f"shape {given.shape}, dtype {given.dtype}",
                "Return class probabilities or real values, not labels.",
            )
        return given.astype(np.float32)

    def state(self) -> dict[str, Any]:
        """The object's attributes, in a format made for safe loading."""
        from codistill.learners.portable.estimator_state import dump_estimator

        state = {"columns": self._columns, "model": dump_estimator(self.model)}
        return state if self._constant is None else state | {"frequencies": self._constant.frequencies}

    def restore(self, state: dict[str, Any]) -> None:
        """Return to a saved object of the same class."""
        from codistill.learners.portable.estimator_state import load_own_estimator

        self.model = load_own_estimator(state["model"], self.model)
        self._columns = state["columns"]
        self._constant = ConstantModel(state["frequencies"]) if "frequencies" in state else None

    def export(self) -> Message:
        """The object's own ONNX, or the class frequencies it answers with."""
        return portable_onnx.export_object(self.model) if self._constant is None else export_constant(self._constant)

    def describe(self) -> str:
        """The object's class."""
        return type(self.model).__name__

    def advice(self, missing: Ability) -> str:
        """How an object can travel."""
        if missing == Ability.PORTABLE:
            return f"Give it a method to_onnx() that returns its ONNX as bytes, and install: {portable_onnx.INSTALL}."
        return super().advice(missing)


def _holds_one_class(targets: np.ndarray) -> bool:
    return bool(targets.shape[1] > 1 and targets.min() >= 0 and targets.any(axis=0).sum() == 1)
