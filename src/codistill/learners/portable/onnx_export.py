"""Trained models as ONNX graphs for use elsewhere: from samples as they are to what the model predicts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, checker, helper, numpy_helper
from sklearn.pipeline import Pipeline

from codistill.core.errors import LearnerError
from codistill.data.split import Scaling
from codistill.learners import PlainLearner
from codistill.learners.ability import Learner
from codistill.learners.portable.onnx_models import module_graph, object_graph
from codistill.learners.sklearn import SklearnLearner
from codistill.learners.torch import TorchLearner

INPUT, OUTPUT = "samples", "answers"


def as_graph(learner: Learner, shape: tuple[int, ...], scaling: Scaling | None, owner: str) -> ModelProto:
    """The graph of a learner with the scaling of its samples before it; a `LearnerError` if it has none."""
    graph: ModelProto | None = None
    try:
        if isinstance(learner, SklearnLearner):
            graph = _estimator_graph(learner, shape, scaling)
        elif isinstance(learner, TorchLearner):
            learner.sample_shape = shape
            graph = _adapted(module_graph(learner), shape, scaling)
        elif isinstance(learner, PlainLearner) and callable(getattr(learner.model, "to_onnx", None)):
            graph = _adapted(object_graph(learner.model), shape, scaling)
    except LearnerError:
        raise
    except Exception as error:  # the module is its owner's code, and an exporter may fail in any way
        raise _cannot(owner, f"{learner.describe()}: {type(error).__name__}: {error}"[:200]) from None
    if graph is None:
        steps = _steps(learner.estimator)[:-1] if isinstance(learner, SklearnLearner) else []
        hinders = [f"{type(step).__name__} in a pipeline" for step in steps if _operations(step) is None]
        raise _cannot(owner, f"{[*hinders, learner.describe()][0]}, which has no ONNX form here")
    checker.check_model(graph)
    return graph


def _cannot(owner: str, found: str) -> LearnerError:
    return LearnerError(
        f"The model of agent '{owner}' must be one that ONNX can express: a torch module, an object with to_onnx(), "
        "or one of scikit-learn's linear models, trees, forests, boosting and perceptrons, with scalers before it.",
        " ".join(found.split()),
        "Leave --onnx out: codistill's own format takes every model.",
    )


def _adapted(model: ModelProto, shape: tuple[int, ...], scaling: Scaling | None) -> ModelProto:
    """The graph with names for its only input and its predictions, and the scaling of samples before all else.

    (x - shift) / divisor in double precision, as in training, except for images.
    """
    graph = model.graph
    weights = {tensor.name for tensor in graph.initializer}
    given = next(value for value in graph.input if value.name not in weights)
    names = {given.name: INPUT if scaling is None else "scaling.done", graph.output[-1].name: OUTPUT}
    for node in graph.node:
        for ends in (node.input, node.output):
            ends[:] = [names.get(name, name) for name in ends]
    graph.output[-1].name = OUTPUT
    kind = given.type.tensor_type.elem_type
    if scaling is not None:
        nodes = [
            helper.make_node("Sub", [INPUT, "scaling.shift"], ["scaling.shifted"]),
            helper.make_node("Div", ["scaling.shifted", "scaling.divisor"], ["scaling.scaled"]),
            helper.make_node("Cast", ["scaling.scaled"], ["scaling.done"], to=kind),
            *graph.node,
        ]
        del graph.node[:]
        graph.node.extend(nodes)
        kind, number = (TensorProto.FLOAT, np.float32) if len(shape) == 3 else (TensorProto.DOUBLE, np.float64)
        for name, value in {"shift": scaling.shift, "divisor": scaling.divisor}.items():
            graph.initializer.append(numpy_helper.from_array(np.asarray(value, number), f"scaling.{name}"))
    given.CopyFrom(helper.make_tensor_value_info(INPUT, kind, ["n", *shape]))
    return model


# --- scikit-learn estimators as ONNX graphs: linear models, trees, forests, boosting, perceptrons; scalers before
# them.

Step = tuple[str, np.ndarray]  # an operator, and its second operand for each feature

_OPSET, _ML_OPSET = 17, 3
_LINEAR = ("LinearRegression", "Ridge", "Lasso", "ElasticNet")
_FORESTS = ("RandomForestClassifier", "RandomForestRegressor", "ExtraTreesClassifier", "ExtraTreesRegressor")
_TREES = ("DecisionTreeClassifier", "DecisionTreeRegressor", "ExtraTreeClassifier", "ExtraTreeRegressor")
_BOOSTING = ("GradientBoostingClassifier", "GradientBoostingRegressor")
_HIST_BOOSTING = ("HistGradientBoostingClassifier", "HistGradientBoostingRegressor")
_ACTIVATIONS = {"relu": "Relu", "tanh": "Tanh", "logistic": "Sigmoid"}
# Losses whose raw sums are the values, or become probabilities by a sigmoid or softmax.
_PLAIN_LOSSES = ("squared_error", "absolute_error", "quantile", "huber", "log_loss")


def _estimator_graph(learner: SklearnLearner, shape: tuple[int, ...], scaling: Scaling | None) -> ModelProto | None:
    """The graph of a fitted estimator, samples (n, features) to predictions; None if it is of another kind."""
    *before, last = _steps(learner.estimator)
    steps = [_operations(transformer) for transformer in before]
    if any(step is None for step in steps):
        return None
    builder = _Builder(shape, scaling, [operation for step in steps for operation in step or ()])
    answers = _answers(last, builder)
    if answers is None:
        return None
    labels = learner.seen_classes.tolist() if learner.classifies else list(range(learner.columns))
    if labels != list(range(learner.columns)):  # it has not seen every class: its columns where they belong
        answers = builder.add("MatMul", answers, np.eye(learner.columns, dtype=np.float32)[labels])
    return builder.finish(answers, learner.columns)


class _Builder:
    """Nodes and constants of a graph that reads `samples`."""

    def __init__(self, shape: tuple[int, ...], scaling: Scaling | None, operations: Sequence[Step]) -> None:
        self.features, self._shape, self._scaling, self._operations = math.prod(shape), shape, scaling, operations
        self._nodes: list[Any] = []
        self._constants: list[Any] = []

    def add(self, operator: str, *inputs: str | np.ndarray, domain: str = "", **attributes: Any) -> str:
        """A node; returns the name of its output."""
        names = []
        for each in inputs:
            names.append(each if isinstance(each, str) else f"c{len(self._constants)}")
            if not isinstance(each, str):
                self._constants.append(numpy_helper.from_array(np.ascontiguousarray(each), names[-1]))
        output = f"t{len(self._nodes)}"
        self._nodes.append(helper.make_node(operator, names, [output], domain=domain, **attributes))
        return output

    def scaled_samples(self) -> str:
        """The samples as the estimator sees them, in 32 bits."""
        name = INPUT
        if self._scaling is not None:
            for operator, part in (("Sub", self._scaling.shift), ("Div", self._scaling.divisor)):
                by_value = np.broadcast_to(part, (1, *self._shape)).reshape(1, -1).astype(np.float64)
                name = self.add(operator, name, by_value)
            name = self.add("Cast", name, to=TensorProto.FLOAT)
        for operator, operand in self._operations:
            wide = self.add("Cast", name, to=TensorProto.DOUBLE)
            name = self.add(operator, wide, np.asarray(operand, np.float64).reshape(1, -1))
            name = self.add("Cast", name, to=TensorProto.FLOAT)
        return name

    def finish(self, output: str, columns: int) -> ModelProto:
        self._nodes.append(helper.make_node("Identity", [output], [OUTPUT]))
        kind = TensorProto.FLOAT if self._scaling is None else TensorProto.DOUBLE
        taken = helper.make_tensor_value_info(INPUT, kind, ["n", self.features])
        given = helper.make_tensor_value_info(OUTPUT, TensorProto.FLOAT, ["n", columns])
        graph = helper.make_graph(self._nodes, "model", [taken], [given], self._constants)
        sets = [helper.make_opsetid("", _OPSET), helper.make_opsetid("ai.onnx.ml", _ML_OPSET)]
        return helper.make_model(graph, opset_imports=sets, ir_version=8)


def _steps(estimator: Any) -> list[Any]:
    steps = [step for _, step in estimator.steps] if isinstance(estimator, Pipeline) else [estimator]
    return [step for step in steps if step not in (None, "passthrough")]


def _operations(transformer: Any) -> list[Step] | None:
    """What a scaler does to samples, operation by operation; None for any other transformer."""
    fitted, name = vars(transformer), type(transformer).__name__
    if name == "StandardScaler":
        steps = [("Sub", fitted["mean_"] if transformer.with_mean else None), ("Div", fitted["scale_"])]
    elif name == "RobustScaler":
        steps = [("Sub", fitted["center_"]), ("Div", fitted["scale_"])]
    elif name == "MinMaxScaler" and not transformer.clip:
        steps = [("Mul", fitted["scale_"]), ("Add", fitted["min_"])]
    elif name == "MaxAbsScaler" and not getattr(transformer, "clip", False):
        steps = [("Div", fitted["scale_"])]
    else:
        return None
    return [(operator, operand) for operator, operand in steps if operand is not None]


def _answers(model: Any, builder: _Builder) -> str | None:
    name = type(model).__name__
    if not type(model).__module__.startswith("sklearn."):
        return None
    if name in _LINEAR:
        return _dense(builder, builder.scaled_samples(), model.coef_, model.intercept_)
    if name == "LogisticRegression" and (model.solver != "liblinear" or len(model.classes_) == 2):
        raw = _dense(builder, builder.scaled_samples(), model.coef_, model.intercept_)
        return _probabilities(builder, raw, len(np.atleast_2d(model.coef_)))
    if name in ("MLPClassifier", "MLPRegressor"):
        return _perceptron(model, builder)
    if name in _TREES or name in _FORESTS:
        trees = [model] if name in _TREES else model.estimators_
        return _ensemble(builder, [_tree(tree.tree_, 1 / len(trees), name) for tree in trees])
    if name in _BOOSTING and model.loss in _PLAIN_LOSSES:
        return _boosting(model, builder)
    if name in _HIST_BOOSTING and model.loss in _PLAIN_LOSSES and model._preprocessor is None:
        return _hist_boosting(model, builder)
    return None


def _dense(builder: _Builder, x: str, weights: np.ndarray, bias: Any) -> str:
    """x Wᵀ + b, where W has a row per output."""
    matrix = np.atleast_2d(weights).astype(np.float32)
    offset = np.broadcast_to(np.asarray(bias, np.float32).reshape(-1), (len(matrix),)).copy()
    return builder.add("Gemm", x, matrix, offset, transB=1)


def _probabilities(builder: _Builder, raw: str, columns: int) -> str:
    """Softmax; with one column p = 1 / (1 + exp(-raw)), and 1 - p before it."""
    if columns > 1:
        return builder.add("Softmax", raw, axis=1)
    both = builder.add("MatMul", raw, np.array([[-1, 1]], np.float32))
    return builder.add("Sigmoid", both)  # 1 - sigmoid(r) = sigmoid(-r)


def _perceptron(model: Any, builder: _Builder) -> str | None:
    if model.out_activation_ not in ("identity", "logistic", "softmax"):
        return None
    name = builder.scaled_samples()
    for number, (weights, bias) in enumerate(zip(model.coefs_, model.intercepts_, strict=True)):
        name = _dense(builder, name, weights.T, bias)
        if number < len(model.coefs_) - 1 and model.activation != "identity":
            name = builder.add(_ACTIVATIONS[model.activation], name)
    if model.out_activation_ == "identity":
        return name
    return _probabilities(builder, name, 1 if model.out_activation_ == "logistic" else 2)


# --- trees: lists of nodes as (left, right, feature, threshold, missing goes left, leaf values) ------------------

Tree = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def _tree(tree: Any, factor: float, name: str) -> Tree:
    values = tree.value[:, 0, :] if name.endswith("Classifier") else tree.value[:, :, 0]
    if name.endswith("Classifier"):
        values = values / values.sum(axis=1, keepdims=True)
    return (*_splits(tree), factor * values)


def _splits(tree: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    missing = np.asarray(getattr(tree, "missing_go_to_left", np.zeros(tree.node_count)))
    return tree.children_left, tree.children_right, tree.feature, tree.threshold, missing


def _boosting(model: Any, builder: _Builder) -> str:
    outputs = model.estimators_.shape[1]
    trees = []
    for column in range(outputs):
        for stage in model.estimators_[:, column]:
            values = np.zeros((stage.tree_.node_count, outputs))
            values[:, column] = model.learning_rate * stage.tree_.value[:, 0, 0]
            trees.append((*_splits(stage.tree_), values))
    start = model._raw_predict_init(np.zeros((1, builder.features), np.float32))
    return _summed(model, builder, trees, start)


def _hist_boosting(model: Any, builder: _Builder) -> str | None:
    outputs, trees = model.n_trees_per_iteration_, []
    for stages in model._predictors:
        for column, predictor in enumerate(stages):
            nodes = predictor.nodes
            if nodes["is_categorical"].any():
                return None
            leaf = nodes["is_leaf"].astype(bool)
            left, right = (np.where(leaf, -1, nodes[side].astype(np.int64)) for side in ("left", "right"))
            values = np.zeros((len(nodes), outputs))
            values[:, column] = nodes["value"]
            trees.append(
                (left, right, nodes["feature_idx"], nodes["num_threshold"], nodes["missing_go_to_left"], values)
            )
    return _summed(model, builder, trees, model._baseline_prediction)


def _summed(model: Any, builder: _Builder, trees: Sequence[Tree], start: Any) -> str:
    raw = builder.add("Add", _ensemble(builder, trees), np.asarray(start, np.float32).reshape(1, -1))
    return raw if model.loss != "log_loss" else _probabilities(builder, raw, int(np.size(start)))


def _ensemble(builder: _Builder, trees: Sequence[Tree]) -> str:
    """The sum over trees of the values of the leaf that a sample reaches."""
    outputs = trees[0][5].shape[1]
    sizes = [len(tree[0]) for tree in trees]
    number, own = np.repeat(np.arange(len(trees)), sizes), np.concatenate([np.arange(size) for size in sizes])
    left, right, feature, threshold, missing, values = (
        np.concatenate([np.asarray(tree[part]) for tree in trees]) for part in range(6)
    )
    leaf = left < 0
    feature = np.where(leaf, 0, feature)
    bounds = _rounded_down(np.where(leaf, 0.0, threshold))
    leaves, columns = np.flatnonzero(leaf).repeat(outputs), np.tile(np.arange(outputs), int(leaf.sum()))
    return builder.add(
        "TreeEnsembleRegressor",
        builder.scaled_samples(),
        domain="ai.onnx.ml",
        n_targets=outputs,
        aggregate_function="SUM",
        post_transform="NONE",
        nodes_treeids=number.tolist(),
        nodes_nodeids=own.tolist(),
        nodes_featureids=feature.astype(int).tolist(),
        nodes_values=bounds.tolist(),
        nodes_modes=np.where(leaf, "LEAF", "BRANCH_LEQ").tolist(),
        nodes_truenodeids=np.where(leaf, 0, left).tolist(),
        nodes_falsenodeids=np.where(leaf, 0, right).tolist(),
        nodes_missing_value_tracks_true=np.where(leaf, 0, missing).astype(int).tolist(),
        target_treeids=number[leaves].tolist(),
        target_nodeids=own[leaves].tolist(),
        target_ids=columns.tolist(),
        target_weights=values[leaves, columns].astype(np.float32).tolist(),
    )


def _rounded_down(values: np.ndarray) -> np.ndarray:
    """The largest numbers of 32 bits that are at most the given ones."""
    with np.errstate(over="ignore"):
        rounded = np.clip(values, np.finfo(np.float32).min, np.finfo(np.float32).max).astype(np.float32)
    return np.asarray(np.where(rounded > values, np.nextafter(rounded, np.float32(-np.inf)), rounded))
