"""Models that travel, and models at rest: never pickled, never executed.

A torch model travels as the name and options of a registered architecture with its weights. A
scikit-learn model travels in the skops format, and only if its type is on `TRAVELLING`: types that hold
no training rows, so that data stays home. What arrives is checked before it is built (types, sizes) and
before it is used (structure): `open_model` returns a predictor or raises `MessageError`.
"""

from __future__ import annotations

import importlib
import io
import json
import math
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import skops.io
import torch
from sklearn.ensemble import (
    ExtraTreesClassifier,
    ExtraTreesRegressor,
    GradientBoostingClassifier,
    GradientBoostingRegressor,
    HistGradientBoostingClassifier,
    HistGradientBoostingRegressor,
    RandomForestClassifier,
    RandomForestRegressor,
)
from sklearn.exceptions import InconsistentVersionWarning
from sklearn.metrics.pairwise import PAIRWISE_KERNEL_FUNCTIONS
from sklearn.tree import BaseDecisionTree
from skops.io.exceptions import UnsupportedTypeException

from codistill.errors import CheckpointError, CodistillError, MessageError
from codistill.learners import zoo
from codistill.message import Message

if TYPE_CHECKING:
    from codistill.learners.kernel import KernelRidge
    from codistill.learners.sklearn import SklearnLearner
    from codistill.learners.torch import TorchLearner

# Estimators that may be sent: what they hold after `fit` are parameters and thresholds, no rows. (Naive
# Bayes and discriminant analysis hold class means: the row itself, where a class has one sample.)
TRAVELLING = frozenset(
    {
        "DecisionTreeClassifier DecisionTreeRegressor ExtraTreeClassifier ExtraTreeRegressor",
        "RandomForestClassifier RandomForestRegressor ExtraTreesClassifier ExtraTreesRegressor",
        "GradientBoostingClassifier GradientBoostingRegressor",
        "HistGradientBoostingClassifier HistGradientBoostingRegressor",
        "AdaBoostClassifier BaggingClassifier BaggingRegressor",
        "LogisticRegression LinearRegression Ridge RidgeClassifier Lasso ElasticNet SGDClassifier Perceptron",
        "LinearSVC MLPClassifier MLPRegressor MultiOutputRegressor",
        "Pipeline StandardScaler MinMaxScaler MaxAbsScaler RobustScaler Normalizer PCA",
    }
)
_TRAVELLING_NAMES = frozenset(name for line in TRAVELLING for name in line.split())

# What estimators keep of their training and need no more to predict stays home: weights and votes of
# single rows (weights are the soft labels), sorted values of a feature, gradients, generators, threads.
_STAYS_HOME = frozenset(
    {"_sample_weight", "oob_decision_function_", "oob_prediction_", "bin_thresholds_", "_optimizer", "n_threads"}
)
_GENERATORS = frozenset({"RandomStateNode", "RandomGeneratorNode"})
_NOTHING = {"__class__": "str", "__module__": "builtins", "__loader__": "JsonNode", "content": "null", "is_json": True}

# Of what a received estimator may be made, by the node of the skops format that builds it.
_NUMBERS = {f"numpy.{kind.__name__}" for kind in (np.bool_, *(np.dtype(code).type for code in "bhilqBHILQefd"))}
_PARTS: dict[str, set[str]] = {
    "JsonNode": {"builtins.str"},
    "DictNode": {"builtins.dict"},
    "ListNode": {"builtins.list"},
    "TupleNode": {"builtins.tuple"},
    "TypeNode": {"builtins.str", "builtins.int", "builtins.float", "builtins.bool", *_NUMBERS},
    "NdArrayNode": {"numpy.ndarray", *_NUMBERS},
    "TreeNode": {"sklearn.tree._tree.Tree"},
}
_HELPERS = {"LabelBinarizer", "LabelEncoder", "DummyClassifier", "DummyRegressor", "TreePredictor", "_BinMapper"}
_LOSSES = {"sklearn._loss._loss", "sklearn.linear_model._sgd_fast"}

# Compiled types that skops does not trust by itself, since it cannot check their content; it is checked below.
_TRUSTED_PARTS = ["sklearn.tree._tree.Tree", "sklearn.ensemble._hist_gradient_boosting.predictor.TreePredictor"]

_FORESTS = (RandomForestClassifier, RandomForestRegressor, ExtraTreesClassifier, ExtraTreesRegressor)
_BOOSTING = (GradientBoostingClassifier, GradientBoostingRegressor)
_HIST_BOOSTING = (HistGradientBoostingClassifier, HistGradientBoostingRegressor)

# In one's own checkpoint: packages whose classes may be rebuilt, and single types of others.
_OWN_PACKAGES = frozenset({"numpy", "scipy", "sklearn", "collections"})
_OWN_TYPES = frozenset({"builtins.complex", "builtins.frozenset", "builtins.range", "functools.partial"})

_UNPACKED_LIMIT = 1 << 30
_OPTIONS_LIMIT = 10_000
_REFUSE = "The round goes on without this model; its sender should use a registered architecture or a listed type."


class Predictor(Protocol):
    """A received model: all one can do is ask it."""

    def predict(self, x: np.ndarray) -> np.ndarray:
        """Predict (n, C)."""
        ...


def may_travel(estimator: Any) -> bool:
    """Whether a scikit-learn estimator, with all it is made of, holds no training rows."""
    return all(_is_listed(part) for part in _parts(estimator))


def _is_listed(estimator: Any) -> bool:
    kind = type(estimator)
    # Boosting may start from any other estimator, and categories are values of the data.
    plain = all(isinstance(getattr(estimator, name, None), str | None) for name in ("init", "categorical_features"))
    return kind.__module__.split(".")[0] == "sklearn" and kind.__name__ in _TRAVELLING_NAMES and plain


def _parts(estimator: Any) -> Iterator[Any]:
    yield estimator
    if hasattr(estimator, "get_params"):
        yield from (value for value in estimator.get_params().values() if hasattr(value, "get_params"))


# --- sending ------------------------------------------------------------------------------------


def export_torch(learner: TorchLearner) -> Message:
    """Architecture, options and weights."""
    known: zoo.Architecture = learner.module.architecture  # type: ignore[assignment]
    plain = {
        "kind": "torch",
        "name": known.name,
        "shape": list(known.shape),
        "classes": known.classes,
        "options": json.dumps(dict(known.options), sort_keys=True),
        "probabilistic": learner.probabilistic,
    }
    return Message(learner.weights(), plain)


def export_estimator(learner: SklearnLearner) -> Message:
    """The fitted estimator in the skops format, equal bytes for equal models."""
    data = _canonical(dump_estimator(learner.estimator))
    return Message({"model": np.frombuffer(data, dtype=np.uint8)}, {"kind": "skops", "classes": learner.columns})


def export_kernel(learner: KernelRidge) -> Message:
    """Inputs and coefficients; only called when the owner agreed to reveal the inputs."""
    state = learner.state()
    options = json.dumps(learner.kernel_options, sort_keys=True)
    plain = {"kind": "kernel", "kernel": learner.kernel, "options": options}
    return Message({"inputs": state["inputs"], "coefficients": state["coefficients"]}, plain)


# --- receiving ----------------------------------------------------------------------------------


def open_model(message: Message, shape: tuple[int, ...], classes: int) -> Predictor:
    """The model in a message, for samples of `shape`; anything that is not a sound model is refused."""
    try:
        match message.plain.get("kind"):
            case "torch":
                model = _open_torch(message, shape, classes)
            case "skops":
                model = _open_estimator(message, shape, classes)
            case "kernel":
                model = _open_kernel(message, shape, classes)
            case other:
                raise ValueError(f"a model of unknown kind {other!r}")
        _probe(model, shape, classes)
    except MessageError:
        raise
    except CodistillError as error:
        raise _refused(error.found) from None
    except Exception as error:  # a hostile model may fail in any way; whatever it is, it is refused
        raise _refused(f"{type(error).__name__}: {str(error)[:200]}") from None
    return model


def _refused(found: str) -> MessageError:
    return MessageError("A received model must be of a known type, sound, and made for this task.", found, _REFUSE)


def _probe(model: Predictor, shape: tuple[int, ...], classes: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # More rows than classes: what fits each other only for a single row does not fit.
        rows = np.linspace(-1, 1, classes + 1, dtype=np.float32)
        answer = model.predict(np.broadcast_to(rows.reshape(-1, *(1 for _ in shape)), (classes + 1, *shape)))
    if answer.shape != (classes + 1, classes) or not np.isfinite(answer).all():
        raise ValueError("predictions of the wrong shape, or NaN or infinity in them")


def _open_torch(message: Message, shape: tuple[int, ...], classes: int) -> Predictor:
    from codistill.learners.torch import TorchLearner

    plain = message.plain
    if tuple(plain["shape"]) != shape or plain["classes"] != classes:
        raise ValueError(f"a model for samples {plain['shape']} and {plain['classes']} classes")
    if len(plain["options"]) > _OPTIONS_LIMIT:
        raise ValueError(f"options of {len(plain['options'])} letters")
    options = json.loads(plain["options"])
    found = {name: tuple(array.shape) for name, array in message.arrays.items()}
    if options != json.loads(json.dumps(zoo.defaults(plain["name"]))):
        # Sizes come from the sender: build on the meta device, which allocates nothing, before memory is taken.
        with torch.device("meta"):
            _compare(found, zoo.build(plain["name"], shape, classes, **options))
    module = zoo.build(plain["name"], shape, classes, **options)
    _compare(found, module)
    learner = TorchLearner(module, loss="cross_entropy" if plain["probabilistic"] is True else "squared")
    learner.load(message.arrays)
    return learner


def _compare(found: dict[str, tuple[int, ...]], module: torch.nn.Module) -> None:
    if found != {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}:
        raise ValueError("weights that do not fit the architecture")


def _open_estimator(message: Message, shape: tuple[int, ...], classes: int) -> Predictor:
    from codistill.learners.sklearn import SklearnLearner

    if message.plain.get("classes") != classes:
        raise ValueError(f"a model for {message.plain.get('classes')} classes")
    contents = _unzipped(message.arrays["model"].tobytes())
    _check_outline(contents, classes)
    with warnings.catch_warnings():
        warnings.simplefilter("error", InconsistentVersionWarning)
        estimator = skops.io.loads(_zipped(contents, zipfile.ZIP_STORED), trusted=_TRUSTED_PARTS)
    if not may_travel(estimator):
        raise ValueError(f"a {type(estimator).__name__}, which is not on the list of models that may travel")
    features = math.prod(shape)
    if getattr(estimator, "n_features_in_", features) != features:
        raise ValueError(f"a model for {estimator.n_features_in_} features")
    _check_structure(estimator, classes)
    learner = SklearnLearner(estimator)
    learner._columns = classes
    return learner


def _open_kernel(message: Message, shape: tuple[int, ...], classes: int) -> Predictor:
    from codistill.learners.kernel import KernelRidge

    inputs, coefficients = message.arrays["inputs"], message.arrays["coefficients"]
    if inputs.shape[1:] != (math.prod(shape),) or coefficients.shape != (len(inputs), classes):
        raise ValueError("a kernel model for other samples or classes")
    options = json.loads(message.plain["options"])
    if message.plain["kernel"] not in PAIRWISE_KERNEL_FUNCTIONS or not options.keys() <= {"gamma", "degree", "coef0"}:
        raise ValueError(f"a kernel {message.plain['kernel']!r} with options {sorted(options)}")
    model = KernelRidge(message.plain["kernel"], **options)
    model.restore({"inputs": inputs, "coefficients": coefficients, "samples": None})
    return model


# --- before a received estimator is built: its outline in the skops format -----------------------


def _unzipped(data: bytes) -> dict[str, bytes]:
    """The files of an archive, read no further than it says they are long, which may not be too long."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = archive.infolist()
        size = sum(entry.file_size for entry in entries)
        if size > _UNPACKED_LIMIT:
            raise ValueError(f"an archive that unpacks to {size} bytes")
        if any(entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) for entry in entries):
            raise ValueError("an archive packed in an unusual way")
        contents = {}
        for entry in entries:
            with archive.open(entry) as file:
                contents[entry.filename] = file.read(entry.file_size)
    return contents


def _zipped(contents: Mapping[str, bytes], method: int) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name in sorted(contents):
            archive.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), contents[name], method)
    return out.getvalue()


def _nodes(outline: Any) -> Iterator[dict[str, Any]]:
    """Every node of an outline that builds something."""
    stack = [outline]
    while stack:
        item = stack.pop()
        if isinstance(item, list):
            stack.extend(item)
        elif isinstance(item, dict):
            if "__loader__" in item:
                yield item
            stack.extend(item.values())


def _check_outline(contents: Mapping[str, bytes], classes: int) -> None:
    left = _UNPACKED_LIMIT
    for node in _nodes(json.loads(contents["schema.json"])):
        if not _is_part(node["__loader__"], node["__module__"], node["__class__"]):
            raise ValueError(f"a part of type {node['__module__']}.{node['__class__']}, which may not travel")
        if "__id__" in node:
            raise ValueError("parts that refer to one another")  # a few of them can make a giant, or a circle
        if "file" in node:
            left -= len(contents[node["file"]])
            if left < 0:
                raise ValueError(f"a model of more than {_UNPACKED_LIMIT} bytes")
            _read_array(contents[node["file"]])
        if node["__loader__"] == "TreeNode":
            _check_tree_outline(node, contents, classes)


def _is_part(loader: str, module: str, name: str) -> bool:
    if loader == "LossNode":
        return module in _LOSSES
    if loader == "ObjectNode":
        known = name in _TRAVELLING_NAMES or name in _HELPERS or module.startswith("sklearn._loss.")
        return module.startswith("sklearn.") and known
    return f"{module}.{name}" in _PARTS.get(loader, ())


def _read_array(data: bytes) -> np.ndarray:
    """An array in numpy's file format that is as long as it says: numpy would first allocate what it says."""
    stream = io.BytesIO(data)
    version = np.lib.format.read_magic(stream)
    read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
    shape, _, dtype = read(stream)
    if dtype.kind not in "biufV" or dtype.hasobject or dtype.itemsize == 0:
        raise ValueError(f"an array of dtype {dtype}")
    if math.prod(shape) * dtype.itemsize != len(data) - stream.tell():
        raise ValueError("an array that is shorter or longer than it says")
    array = np.frombuffer(data, dtype=dtype, offset=stream.tell())
    if dtype.kind == "f" and not np.isfinite(array).all():
        raise ValueError("NaN or infinity in a model")
    return array.reshape(shape)


def _check_tree_outline(node: Mapping[str, Any], contents: Mapping[str, bytes], classes: int) -> None:
    """The compiled tree reads as many class counts as it is told that there are outputs."""
    features, counts, outputs = node["__reduce__"]["args"]["content"]
    sizes = [json.loads(size["content"]) for size in (features, outputs)]
    if not all(type(size) is int for size in sizes) or not 1 <= sizes[1] <= classes:
        raise ValueError(f"a tree with {sizes[1]} outputs")
    if _read_array(contents[counts["file"]]).shape != (sizes[1],):
        raise ValueError("a tree with other class counts than outputs")


# --- before a received estimator is used: compiled code follows its indices without looking ------


def _check_structure(model: Any, classes: int) -> None:
    for part in _inside(model):
        own = vars(part)
        if "n_jobs" in own:
            part.n_jobs = None
        for name in ("n_classes_", "n_outputs_", "n_trees_per_iteration_"):
            counts = np.asarray(own.get(name, 1))
            if counts.dtype.kind not in "iu" or counts.min() < 1 or counts.max() > classes:
                raise ValueError(f"{name} = {own[name]!r}"[:100])
        if isinstance(part, BaseDecisionTree) and "tree_" in own:
            _check_tree(part.tree_, _features(part))
        elif isinstance(part, _FORESTS) and "estimators_" in own:
            _check_same_features(part, part.estimators_)
        elif isinstance(part, _BOOSTING) and "estimators_" in own:
            _check_boosting(part)
        elif isinstance(part, _HIST_BOOSTING) and "_predictors" in own:
            _check_hist_boosting(part)


def _inside(model: Any) -> Iterator[Any]:
    """Everything of scikit-learn that a model is made of."""
    stack = [model]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            stack.extend(item.values())
        elif isinstance(item, list | tuple):
            stack.extend(item)
        elif isinstance(item, np.ndarray) and item.dtype == object:
            stack.extend(item.flat)
        elif type(item).__module__.startswith("sklearn.") and hasattr(item, "__dict__"):
            yield item
            stack.extend(vars(item).values())


def _features(part: Any) -> int:
    """What scikit-learn holds samples to before compiled code sees them."""
    features = vars(part)["n_features_in_"]
    if type(features) is not int:
        raise ValueError("a model without a number of features")
    return features


def _check_same_features(ensemble: Any, trees: Any) -> None:
    for tree in trees:
        if not isinstance(tree, BaseDecisionTree) or _features(tree) != _features(ensemble):
            raise ValueError("trees for other features than those of their ensemble")


def _check_tree(tree: Any, features: int) -> None:
    if not 1 <= tree.node_count == tree.capacity or tree.n_features != features:
        raise ValueError("a tree of the wrong size")
    _check_nodes(tree.children_left, tree.children_right, tree.feature, tree.children_left == -1, features)


def _check_boosting(model: Any) -> None:
    trees = model.estimators_
    if not isinstance(trees, np.ndarray) or trees.ndim != 2 or trees.shape[1] != model.n_trees_per_iteration_:
        raise ValueError("boosting with a wrong number of trees")
    _check_same_features(model, trees.flat)
    if model.init_ != "zero" and type(model.init_).__name__ not in _HELPERS:
        raise ValueError("boosting from an unknown start")
    start = model._raw_predict_init(np.zeros((1, _features(model)), dtype=np.float32))
    if start.shape != (1, trees.shape[1]):
        raise ValueError("boosting from a start of the wrong shape")


def _check_hist_boosting(model: Any) -> None:
    features = _features(model)
    if model._preprocessor is not None or vars(model).get("_in_fit", False) is not False:
        raise ValueError("boosting with categories, or in the middle of a fit")
    for tree in _inside(model._predictors):
        nodes = tree.nodes
        if nodes.ndim != 1 or len(nodes) == 0 or nodes["is_categorical"].any():
            raise ValueError("a tree without nodes, or with categories")
        left, right = nodes["left"].astype(np.int64), nodes["right"].astype(np.int64)
        _check_nodes(left, right, nodes["feature_idx"], nodes["is_leaf"].astype(bool), features)


def _check_nodes(left: np.ndarray, right: np.ndarray, feature: np.ndarray, leaf: np.ndarray, features: int) -> None:
    own = np.arange(len(left))[~leaf]
    for child in (left[~leaf], right[~leaf]):
        # Children stand after their parent, so every walk ends.
        if not ((child > own) & (child < len(left))).all():
            raise ValueError("a tree whose nodes point outside of it")
    if not ((feature[~leaf] >= 0) & (feature[~leaf] < features)).all():
        raise ValueError("a tree that splits on features that do not exist")


# --- at rest ------------------------------------------------------------------------------------


def dump_estimator(estimator: Any) -> bytes:
    """Any estimator or plain object in the skops format."""
    try:
        return bytes(skops.io.dumps(estimator))
    except (UnsupportedTypeException, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(
            f"A model must be made of plain attributes to be saved: {type(estimator).__name__}.",
            f"{type(error).__name__}: {str(error)[:200]}",
            "Keep only arrays, numbers, strings, lists and dicts in its attributes.",
        ) from None


def load_own_estimator(data: bytes, like: Any) -> Any:
    """An estimator of one's own checkpoint: the class that the owner configured, and nothing foreign inside."""
    packages = _OWN_PACKAGES | {type(part).__module__.split(".")[0] for part in _configured(like)} - {"builtins"}
    try:
        untrusted = skops.io.get_untrusted_types(data=data)
        foreign = [name for name in untrusted if name not in _OWN_TYPES and name.split(".")[0] not in packages]
        if foreign:
            raise ValueError(f"foreign types {', '.join(foreign)}")
        _check_calls(data)
        model = skops.io.loads(data, trusted=untrusted)
        if type(model) is not type(like):
            raise ValueError(f"a {type(model).__name__} in place of a {type(like).__name__}")
    except Exception as error:
        raise CheckpointError(
            "A saved model must be of the class that the agent is configured with.",
            f"{type(error).__name__}: {str(error)[:200]}",
            "Resume with the recipe the run was started with, or from an earlier checkpoint.",
        ) from None
    return model


def _configured(model: Any) -> list[Any]:
    """A model and what its owner built it of."""
    parts = model.get_params() if hasattr(model, "get_params") else getattr(model, "__dict__", {})
    return [model, *parts.values()]


def _check_calls(data: bytes) -> None:
    """Classes are built by calling them; functions are never called."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        outline = json.loads(archive.read("schema.json"))
    for node in _nodes(outline):
        if node["__loader__"] in ("ConstructorFromReduceNode", "LossNode"):
            named = getattr(importlib.import_module(node["__module__"]), node["__class__"])
            if not isinstance(named, type):
                raise ValueError(f"a call of {node['__module__']}.{node['__class__']}")


def _canonical(data: bytes) -> bytes:
    """Equal models, equal bytes: skops names parts by memory address; number them by content instead."""
    contents = _unzipped(data)
    numbers: dict[bytes, str] = {}

    def tidy(node: Any) -> Any:
        if isinstance(node, list):
            return [tidy(item) for item in node]
        if not isinstance(node, dict):
            return node
        if node.get("__loader__") in _GENERATORS:
            return _NOTHING
        return {key: tidy_value(key, value) for key, value in node.items() if key != "__id__"}

    def tidy_value(key: str, value: Any) -> Any:
        if key in _STAYS_HOME:
            return _NOTHING
        if key == "file" and isinstance(value, str):
            return numbers.setdefault(_without_padding(contents[value]), f"{len(numbers)}.npy")
        return tidy(value)

    outline = tidy(json.loads(contents["schema.json"]))
    files = {name: content for content, name in numbers.items()}
    files["schema.json"] = json.dumps(outline, separators=(",", ":")).encode()
    return _zipped(files, zipfile.ZIP_DEFLATED)


def _without_padding(data: bytes) -> bytes:
    """Between the fields of a tree's nodes lies memory that nobody has written: it becomes zeros."""
    array = np.load(io.BytesIO(data), allow_pickle=False) if data.startswith(np.lib.format.MAGIC_PREFIX) else None
    if array is None or array.dtype.names is None or array.ndim != 1:
        return data
    clean = np.zeros(array.nbytes, dtype=np.uint8)
    for name in array.dtype.names:
        clean.view(array.dtype)[name] = array[name]
    return data[: len(data) - len(clean)] + clean.tobytes()
