"""scikit-learn's scorers, by name or from `make_scorer`, applied to answers in place of an estimator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from codistill.results.outputs import are_probabilities

_OF_VALUES = ("error", "deviance", "explained_variance", "r2", "d2_absolute", "d2_pinball", "d2_tweedie")


def sklearn_names() -> list[str]:
    """The names of all scorers that scikit-learn has."""
    from sklearn.metrics import get_scorer_names

    return list(get_scorer_names())


def is_scorer(given: Any) -> bool:
    """Whether this is a result of `make_scorer`."""
    return all(hasattr(given, part) for part in ("_score_func", "_sign", "_kwargs", "_response_method"))


def of_scorer_name(name: str) -> dict[str, Any] | None:
    """The fields of the score that scikit-learn calls by this name, with or without `neg_`; None if there is none."""
    from sklearn.metrics import get_scorer

    names = sklearn_names()
    known = next((each for each in (name, f"neg_{name}") if each in names), None)
    if known is None:
        return None
    return of_scorer(get_scorer(known), None) | {
        "name": known.removeprefix("neg_"),
        "task": "regression" if any(part in known for part in _OF_VALUES) else "classification",
    }


def of_scorer(scorer: Any, classes: Sequence[Any] | None) -> dict[str, Any]:
    """The fields of the score of a scorer; `classes`: as the user named them, None for their numbers."""
    function, options = scorer._score_func, dict(scorer._kwargs)
    method = scorer._response_method
    methods = {method} if isinstance(method, str) else set(method)
    name = str(getattr(function, "__name__", "own_score"))

    def value(y: np.ndarray, answers: np.ndarray) -> float | None:
        if y.ndim == 2:
            return float(function(y, answers, **options))
        names = np.arange(answers.shape[1]) if classes is None else np.asarray(classes)
        if methods <= {"predict"}:
            return float(function(names[y], names[answers.argmax(axis=1)], **options))
        if methods == {"predict_proba"} and not are_probabilities(answers):
            return None
        if answers.shape[1] == 2:
            positive = names.tolist().index(options["pos_label"]) if "pos_label" in options else 1
            return float(function(names[y], answers[:, positive], **options))
        return float(function(names[y], answers, **options))

    return {
        "name": name,
        "function": value,
        "greater_is_better": scorer._sign > 0,
        "task": "regression" if any(part in name for part in _OF_VALUES) else "classification",
    }
