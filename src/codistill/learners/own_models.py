"""A model of a user's own file as a learner: a class or a function with options, or a model as it stands."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

from sklearn.base import BaseEstimator, clone
from torch import nn

from codistill.errors import CodistillError, LearnerError, nearest
from codistill.learners import as_learner
from codistill.learners.ability import Learner
from codistill.learners.torch import TorchLearner
from codistill.source_lines import own_line

_SHAPE, _FEATURES = ("shape", "in_shape", "input_shape"), ("features", "in_features", "n_features")
_CLASSES = ("classes", "num_classes", "n_classes", "out_features")


def make_own(
    given: Any,
    name: str,
    options: Mapping[str, Any],
    shape: tuple[int, ...],
    classes: int,
    training: tuple[str, ...],
) -> Learner:
    """The learner in a class, a function or a model of one's own.

    Arguments called shape, features or classes (or in_shape, in_features, num_classes, ...) are passed where the
    options do not say them. For a torch module, options that it does not take itself are those of training.
    """
    build = given if isinstance(given, type) or inspect.isroutine(given) else None
    takes, takes_all = _parameters(build) if build is not None else ({}, False)
    task = {
        **dict.fromkeys(_SHAPE, shape),
        **dict.fromkeys(_FEATURES, math.prod(shape)),
        **dict.fromkeys(_CLASSES, classes),
    }
    own = {key: value for key, value in task.items() if key in takes}
    own |= {key: value for key, value in options.items() if key in takes or (takes_all and key not in training)}
    rest = {key: value for key, value in options.items() if key not in own}
    model = _copied(given) if build is None else call_own(build, name, own)
    unknown = [key for key in rest if not (isinstance(model, nn.Module) and key in training)]
    if unknown:
        known = {*takes, *(training if isinstance(model, nn.Module) else ())}
        raise LearnerError(f"'{name}' must be given options it has.", f"'{unknown[0]}'", nearest(unknown[0], known))
    if isinstance(model, nn.Module):
        return TorchLearner(model, **rest)
    try:
        return as_learner(model)
    except LearnerError as error:
        must = f"'{name}' must be a torch module, a scikit-learn estimator, a Learner, an object with fit and predict, "
        raise LearnerError(f"{must}or make one.", error.found, "Name such a class, function or model.") from None


def call_own(build: Callable[..., Any], name: str, options: Mapping[str, Any]) -> Any:
    """What a class or a function of one's own makes; an error says the line of the file."""
    try:
        return build(**options)
    except CodistillError:
        raise
    except Exception as error:  # the user's own code
        raise LearnerError(
            f"'{name}' must make a model from its options.",
            f"{type(error).__name__}: {error}"[:300] + (f", at {line}" if (line := own_line(error)) else ""),
            "Check its options, and run the file by itself.",
        ) from error


def _parameters(build: Any) -> tuple[Mapping[str, Any], bool]:
    """The arguments that can be given by name, and whether there are any others."""
    parameters = inspect.signature(build).parameters
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    takes = {key: parameter for key, parameter in parameters.items() if parameter.kind in by_name}
    return takes, any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())


def _copied(model: Any) -> Any:
    """Every agent has a model of its own."""
    return clone(model) if isinstance(model, BaseEstimator) else copy.deepcopy(model)
