"""Which scikit-learn estimators take samples with missing values (NaN), and columns without any value."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.compose import ColumnTransformer
from sklearn.pipeline import Pipeline
from sklearn.utils import get_tags


def takes_missing(estimator: Any) -> bool:
    """Whether an estimator takes NaN, by its tags; a pipeline does if a step fills it in before one that does not."""
    for step in _steps(estimator):
        if _fills_in(step):
            return True
        if not get_tags(step).input_tags.allow_nan:
            return False
    return True


def without_empty_columns(rows: np.ndarray) -> np.ndarray:
    """Rows to fit to, with 0 in each column that has no value: nothing can be learnt from it, but some fits fail."""
    empty = np.isnan(rows).all(axis=0)
    return np.where(empty, rows.dtype.type(0), rows) if empty.any() else rows


def _steps(estimator: Any) -> list[Any]:
    """The steps of a pipeline, and of the pipelines in it."""
    if not isinstance(estimator, Pipeline):
        return [] if estimator is None or estimator == "passthrough" else [estimator]
    return [inner for _, step in estimator.steps for inner in _steps(step)]


def _fills_in(step: Any) -> bool:
    """Whether no NaN is left after this step."""
    if isinstance(step, ColumnTransformer):
        parts = [part for _, part, _ in step.transformers] + [step.remainder]
        return all(part == "drop" or any(map(_fills_in, _steps(part))) for part in parts)
    return type(step).__module__.startswith("sklearn.impute")
