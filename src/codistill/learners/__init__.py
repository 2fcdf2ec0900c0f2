"""Learners: any model behind `fit(x, targets)` and `predict(x)`."""

from __future__ import annotations

import copy
import sys
import warnings
from typing import Any

import numpy as np
from torch import nn

from codistill.core.errors import LearnerError
from codistill.learners.ability import Ability, Learner, not_fitted
from codistill.learners.portable import onnx_models as portable_onnx
from codistill.learners.portable.models import class_frequencies, export_constant
from codistill.learners.portable.skops_archive import dump_estimator, load_own_estimator
from codistill.learners.torch import TorchLearner
from codistill.wire.message import Message

__all__ = ["Learner", "PlainLearner", "as_learner"]


def as_learner(model: Any, owner: str = "") -> Learner:
    """Whatever a user calls a model, behind the universal API."""
    if isinstance(model, Learner):
        return model
    if isinstance(model, nn.Module):
        return TorchLearner(model)
    base = sys.modules.get("sklearn.base")  # where nobody has imported that, there is no estimator
    if base is not None and isinstance(model, base.BaseEstimator):
        from codistill.learners.sklearn import SklearnLearner

        return SklearnLearner(model)
    if not isinstance(model, type) and all(callable(getattr(model, name, None)) for name in ("fit", "predict")):
        return PlainLearner(model)
    found = f"the class {model.__name__} itself" if isinstance(model, type) else type(model).__name__
    raise LearnerError(
        f"The model of agent '{owner}' must be a torch module, a scikit-learn estimator, a Learner, "
        "or an object with fit and predict.",
        found,
        "Pass an instance of such a model.",
    )


class PlainLearner(Learner):
    """An object of the user's own. It gets (n, C) targets, and its `predict` must return (n, C).

    Missing values of its samples are filled in, unless it has an attribute `takes_missing` that is true.

    It may travel if it has a method `to_onnx()` that returns bytes or an onnx.ModelProto: a graph from samples to
    what `predict` returns. If its fit fails for targets of one class, it answers with that class until there are more.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self._columns = 0
        self._frequencies: np.ndarray | None = None  # the answer in place of a model that could not be fitted
        self.takes_missing = bool(getattr(model, "takes_missing", False))
        self.abilities = Ability.PREDICT
        if callable(getattr(model, "to_onnx", None)) and portable_onnx.is_installed():
            self.abilities |= Ability.PORTABLE

    def fit(self, x: np.ndarray, targets: np.ndarray) -> None:
        self._columns = targets.shape[1]
        self._frequencies = None
        try:
            self.model.fit(x, targets)
        except Warning:  # if Python turns warnings into errors
            raise
        except Exception:
            one_class = targets.shape[1] > 1 and targets.min() >= 0 and targets.any(axis=0).sum() == 1
            if not one_class or not self._fits_two_classes(x, targets):
                raise  # not for want of classes
            self._frequencies = class_frequencies(targets)

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
        return self._frequencies is not None

    @property
    def ready(self) -> bool:  # type: ignore[override]
        return self._columns > 0

    def predict(self, x: np.ndarray) -> np.ndarray:
        """The object's predictions, checked to be (n, C) finite numbers."""
        if not self._columns:
            raise not_fitted(self)
        if self._frequencies is not None:
            return np.tile(self._frequencies, (len(x), 1))
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
        state = {"columns": self._columns, "model": dump_estimator(self.model)}
        return state if self._frequencies is None else state | {"frequencies": self._frequencies}

    def restore(self, state: dict[str, Any]) -> None:
        self.model = load_own_estimator(state["model"], self.model)
        self._columns, self._frequencies = state["columns"], state.get("frequencies")

    def export(self) -> Message:
        """The object's own ONNX, or the class frequencies it answers with."""
        if self._frequencies is not None:
            return export_constant(self._frequencies)
        return portable_onnx.graph_message(portable_onnx.object_graph(self.model), self.describe())

    def describe(self) -> str:
        return type(self.model).__name__

    def advice(self, missing: Ability) -> str:
        if missing == Ability.PORTABLE:
            return f"Give it a method to_onnx() that returns its ONNX as bytes, and install: {portable_onnx.INSTALL}."
        return super().advice(missing)
