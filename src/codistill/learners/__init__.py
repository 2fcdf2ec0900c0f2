"""Learners: any model behind `fit(x, targets)` and `predict(x)`."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from codistill.errors import LearnerError
from codistill.learners.ability import Learner
from codistill.learners.plain import PlainLearner
from codistill.learners.torch import TorchLearner

__all__ = ["Learner", "as_learner"]


def as_learner(model: Any, owner: str = "") -> Learner:
    """Whatever a user calls a model, behind the universal API."""
    if isinstance(model, Learner):
        return model
    if isinstance(model, nn.Module):
        return TorchLearner(model)
    if _is_estimator(model):
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


def _is_estimator(model: Any) -> bool:
    """Whether it is an estimator of scikit-learn's kind; where nobody has imported that, there is none."""
    base = sys.modules.get("sklearn.base")
    return base is not None and isinstance(model, base.BaseEstimator)
