"""Trained models as ONNX graphs for use elsewhere: from samples as they are to what the model predicts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, checker, helper, numpy_helper

from codistill.data.scale import Scaling
from codistill.errors import LearnerError
from codistill.learners.ability import AnyLearner, Learner
from codistill.learners.plain import PlainLearner
from codistill.learners.portable.onnx_estimators import estimator_graph, without_form
from codistill.learners.portable.onnx_models import module_graph, object_graph
from codistill.learners.sklearn import SklearnLearner
from codistill.learners.torch import TorchLearner

INPUT, OUTPUT = "samples", "answers"


def as_graph(learner: Learner | AnyLearner, shape: tuple[int, ...], scaling: Scaling | None, owner: str) -> ModelProto:
    """The graph of a learner with the scaling of its samples before it; a `LearnerError` if it has none."""
    try:
        graph = _graph_of(learner, shape, scaling)
    except LearnerError:
        raise
    except Exception as error:  # the module is its owner's code, and an exporter may fail in any way
        raise _cannot(owner, f"{learner.describe()}: {type(error).__name__}: {error}"[:200]) from None
    if graph is None:
        found = without_form(learner) if isinstance(learner, SklearnLearner) else learner.describe()
        raise _cannot(owner, f"{found}, which has no ONNX form here")
    checker.check_model(graph)
    return graph


def _graph_of(learner: Any, shape: tuple[int, ...], scaling: Scaling | None) -> ModelProto | None:
    if isinstance(learner, SklearnLearner):
        return estimator_graph(learner, math.prod(shape), None if scaling is None else _by_value(scaling, shape))
    if isinstance(learner, TorchLearner):
        learner.sample_shape = shape
        graph: ModelProto = module_graph(learner)
    elif isinstance(learner, PlainLearner) and callable(getattr(learner.model, "to_onnx", None)):
        graph = object_graph(learner.model)
    else:
        return None
    _rename(graph, shape)
    if scaling is not None:
        _scale_before(graph, shape, scaling)
    return graph


def _by_value(scaling: Scaling, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """What is subtracted from and what divides each value of a sample, laid out in one row."""
    parts = (scaling.shift, scaling.divisor)
    shift, divisor = (np.broadcast_to(part, (1, *shape)).reshape(-1).astype(np.float64) for part in parts)
    return shift, divisor


def _cannot(owner: str, found: str) -> LearnerError:
    return LearnerError(
        f"The model of agent '{owner}' must be one that ONNX can express: a torch module, an object with to_onnx(), "
        "or one of scikit-learn's linear models, trees, forests, boosting and perceptrons, with scalers before it.",
        " ".join(found.split()),
        "Leave --onnx out: codistill's own format takes every model.",
    )


def _rename(graph: ModelProto, shape: tuple[int, ...]) -> None:
    """Give the only input and the predictions their names."""
    weights = {tensor.name for tensor in graph.graph.initializer}
    given = next(value for value in graph.graph.input if value.name not in weights)
    names = {given.name: INPUT, graph.graph.output[-1].name: OUTPUT}
    for node in graph.graph.node:
        for place, name in enumerate(node.input):
            node.input[place] = names.get(name, name)
        for place, name in enumerate(node.output):
            node.output[place] = names.get(name, name)
    graph.graph.output[-1].name = OUTPUT
    given.CopyFrom(helper.make_tensor_value_info(INPUT, given.type.tensor_type.elem_type, ["n", *shape]))


def _scale_before(graph: ModelProto, shape: tuple[int, ...], scaling: Scaling) -> None:
    """(x - shift) / divisor before all else: in double precision, as in training, except for images."""
    images = len(shape) == 3
    kind, number = (np.float32, TensorProto.FLOAT) if images else (np.float64, TensorProto.DOUBLE)
    given = next(value for value in graph.graph.input if value.name == INPUT)
    taken = given.type.tensor_type.elem_type
    constants = {"shift": scaling.shift, "divisor": scaling.divisor}
    for name, value in constants.items():
        graph.graph.initializer.append(numpy_helper.from_array(np.asarray(value, kind), f"scaling.{name}"))
    for node in graph.graph.node:
        for place, name in enumerate(node.input):
            node.input[place] = "scaling.done" if name == INPUT else name
    nodes = [
        helper.make_node("Sub", [INPUT, "scaling.shift"], ["scaling.shifted"]),
        helper.make_node("Div", ["scaling.shifted", "scaling.divisor"], ["scaling.scaled"]),
        helper.make_node("Cast", ["scaling.scaled"], ["scaling.done"], to=taken),
    ]
    kept = list(graph.graph.node)
    del graph.graph.node[:]
    graph.graph.node.extend([*nodes, *kept])
    given.type.tensor_type.elem_type = number
