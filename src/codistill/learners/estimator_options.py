"""Options and signatures of estimators, of scikit-learn and of others: threads, log lines, sample weights."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from codistill.errors import LearnerError

_LOG_OPTIONS = ("verbosity", "verbose", "verbose_eval")  # of LightGBM


def options_of(estimator: Any) -> dict[str, Any]:
    """The options of an estimator and of its parts, by scikit-learn's names for them."""
    try:
        return dict(estimator.get_params())
    except (RuntimeError, AttributeError) as error:  # an __init__(self, *args, **options), or one that keeps nothing
        raise LearnerError(
            f"{type(estimator).__name__} must name its options in __init__ and keep each as an attribute of that name.",
            " ".join(str(error).split())[:200],
            "Write them out: def __init__(self, C=1.0, ...).",
        ) from None


def _parts(estimator: Any) -> Iterator[tuple[str, Any]]:
    """An estimator and the estimators in its options, each with the prefix of its own options."""
    yield "", estimator
    yield from ((f"{name}__", part) for name, part in options_of(estimator).items() if hasattr(part, "get_params"))


def use_one_thread(estimator: Any) -> None:
    """Agents compute with one thread each. For scikit-learn None means one thread, for others all of them."""
    parameters = options_of(estimator)
    for name, value in parameters.items():
        path, _, last = name.rpartition("__")
        if last == "n_jobs":
            owner = parameters[path] if path else estimator
            if value not in ({None, 1} if _has_options_of_scikit_learn(owner) else {1}):
                estimator.set_params(**{name: 1})


def _has_options_of_scikit_learn(estimator: Any) -> bool:
    of_options = next(base for base in type(estimator).__mro__ if "__init__" in vars(base))
    return of_options.__module__.startswith("sklearn.")


def silence_lightgbm(estimator: Any) -> bool:
    """Have LightGBM log errors only, unless its owner chose otherwise; returns whether there is any LightGBM in it."""
    found = [(prefix, part) for prefix, part in _parts(estimator) if _is_lightgbm(part)]
    for prefix, part in found:
        if not any(name in part.get_params() for name in _LOG_OPTIONS):
            estimator.set_params(**{f"{prefix}verbosity": -1})
    return bool(found)


def _is_lightgbm(estimator: Any) -> bool:
    return any(base.__module__.split(".")[0] == "lightgbm" for base in type(estimator).__mro__)


@contextmanager
def ignoring_feature_names(do: bool) -> Iterator[None]:
    """LightGBM gives names to the columns of arrays, and scikit-learn then misses them in the next array."""
    if not do:
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "X does not have valid feature names", UserWarning)
        yield


def has_sample_weight(estimator: Any) -> bool:
    """Whether `fit` takes sample_weight; a fit(self, *args, **options) takes what the one that it overrides takes."""
    bases: tuple[Any, ...] = type(estimator).__mro__
    overridden = [base.fit for base in bases if "fit" in vars(base)]
    for function in (estimator.fit, *overridden):
        parameters = inspect.signature(function).parameters
        if "sample_weight" in parameters:
            return True
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            return False
    return False
