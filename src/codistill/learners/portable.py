"""Models that travel, and models at rest: never pickled, never executed.

A torch model travels as the name and options of a registered architecture with its weights. A
scikit-learn model travels in the skops format, and only if its type is on `TRAVELLING`: types that hold
no training rows, so that data stays home. What arrives is checked before it is built (sizes), while it
is loaded (types) and before it is used (structure): `open_model` returns a predictor or raises
`MessageError`.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import skops.io
import torch
from skops.io.exceptions import UnsupportedTypeException

from codistill.errors import CheckpointError, CodistillError, MessageError
from codistill.learners import zoo
from codistill.message import Message

if TYPE_CHECKING:
    from codistill.learners.kernel import KernelRidge
    from codistill.learners.sklearn import SklearnLearner
    from codistill.learners.torch import TorchLearner

# Estimators that may be sent: what they hold after `fit` are parameters and thresholds, no rows.
TRAVELLING = frozenset(
    {
        "DecisionTreeClassifier DecisionTreeRegressor ExtraTreeClassifier ExtraTreeRegressor",
        "RandomForestClassifier RandomForestRegressor ExtraTreesClassifier ExtraTreesRegressor",
        "GradientBoostingClassifier GradientBoostingRegressor",
        "HistGradientBoostingClassifier HistGradientBoostingRegressor",
        "AdaBoostClassifier BaggingClassifier BaggingRegressor",
        "LogisticRegression LinearRegression Ridge RidgeClassifier Lasso ElasticNet SGDClassifier Perceptron",
        "LinearSVC GaussianNB MultinomialNB BernoulliNB LinearDiscriminantAnalysis",
        "MLPClassifier MLPRegressor MultiOutputRegressor",
        "Pipeline StandardScaler MinMaxScaler MaxAbsScaler RobustScaler Normalizer PCA",
    }
)
_TRAVELLING_NAMES = frozenset(name for line in TRAVELLING for name in line.split())

# Types inside these estimators that skops does not trust by itself; their content is checked below.
_TRUSTED_PARTS = frozenset(
    {"sklearn.tree._tree.Tree", "sklearn.ensemble._hist_gradient_boosting.predictor.TreePredictor"}
)
_UNPACKED_LIMIT = 1 << 30
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
    return kind.__module__.split(".")[0] == "sklearn" and kind.__name__ in _TRAVELLING_NAMES


def _parts(estimator: Any) -> Iterator[Any]:
    yield estimator
    for step in [step for _, step in getattr(estimator, "steps", [])] + [getattr(estimator, "estimator", None)]:
        if hasattr(step, "get_params"):
            yield from _parts(step)


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
    plain = {"kind": "kernel", "kernel": learner.kernel, "options": json.dumps(learner.kernel_options)}
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
    except MessageError:
        raise
    except CodistillError as error:
        raise _refused(error.found) from None
    except Exception as error:  # a hostile model may fail in any way; whatever it is, it is refused
        raise _refused(f"{type(error).__name__}: {str(error)[:200]}") from None
    return model


def _refused(found: str) -> MessageError:
    return MessageError("A received model must be of a known type, sound, and made for this task.", found, _REFUSE)


def _open_torch(message: Message, shape: tuple[int, ...], classes: int) -> Predictor:
    from codistill.learners.torch import TorchLearner

    plain = message.plain
    if tuple(plain["shape"]) != shape or plain["classes"] != classes:
        raise ValueError(f"a model for samples {plain['shape']} and {plain['classes']} classes")
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

    data = message.arrays["model"].tobytes()
    _check_archive(data)
    untrusted = set(skops.io.get_untrusted_types(data=data)) - _TRUSTED_PARTS
    if untrusted:
        raise ValueError(f"untrusted types {', '.join(sorted(untrusted))}")
    estimator = skops.io.loads(data, trusted=sorted(_TRUSTED_PARTS))
    if not may_travel(estimator):
        raise ValueError(f"a {type(estimator).__name__}, which is not on the list of models that may travel")
    features = int(np.prod(shape))
    _check_trees(estimator, features)
    if message.plain.get("classes") != classes or getattr(estimator, "n_features_in_", features) != features:
        raise ValueError(f"a model for {message.plain.get('classes')} classes, or for other features")
    learner = SklearnLearner(estimator)
    learner._columns = classes
    if learner.predict(np.zeros((1, *shape), dtype=np.float32)).shape != (1, classes):
        raise ValueError("predictions of the wrong shape")
    return learner


def _open_kernel(message: Message, shape: tuple[int, ...], classes: int) -> Predictor:
    from codistill.learners.kernel import KernelRidge

    inputs, coefficients = message.arrays["inputs"], message.arrays["coefficients"]
    if inputs.shape[1:] != (int(np.prod(shape)),) or coefficients.shape != (len(inputs), classes):
        raise ValueError("a kernel model for other samples or classes")
    model = KernelRidge(message.plain["kernel"], **json.loads(message.plain["options"]))
    model.restore({"inputs": inputs, "coefficients": coefficients, "samples": None})
    return model


def _check_archive(data: bytes) -> None:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        size = sum(entry.file_size for entry in archive.infolist())
    if size > _UNPACKED_LIMIT:
        raise ValueError(f"an archive that unpacks to {size} bytes")


def _check_trees(model: Any, features: int) -> None:
    """Every tree inside must be walkable: compiled code follows its indices without looking."""
    if hasattr(model, "tree_"):
        tree = model.tree_
        _check_nodes(tree.children_left, tree.children_right, tree.feature, tree.children_left == -1, features)
    if hasattr(model, "nodes") and hasattr(model.nodes, "dtype"):
        nodes = model.nodes
        leaf = nodes["is_leaf"].astype(bool)
        _check_nodes(
            nodes["left"].astype(np.int64), nodes["right"].astype(np.int64), nodes["feature_idx"], leaf, features
        )
    inner = [getattr(model, name, None) for name in ("estimators_", "_predictors", "steps")]
    for part in inner:
        for child in _leaves(part):
            _check_trees(child, features)


def _check_nodes(left: np.ndarray, right: np.ndarray, feature: np.ndarray, leaf: np.ndarray, features: int) -> None:
    own = np.arange(len(left))[~leaf]
    for child in (left[~leaf], right[~leaf]):
        # Children stand after their parent, so every walk ends.
        if not ((child > own) & (child < len(left))).all():
            raise ValueError("a tree whose nodes point outside of it")
    if not ((feature[~leaf] >= 0) & (feature[~leaf] < features)).all():
        raise ValueError("a tree that splits on features that do not exist")


def _leaves(part: Any) -> Iterator[Any]:
    if isinstance(part, list | tuple) or (isinstance(part, np.ndarray) and part.dtype == object):
        for item in part:
            yield from _leaves(item)
    elif part is not None and not isinstance(part, str):
        yield part


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
    packages = {"numpy", "scipy", "sklearn", "builtins", "collections", type(like).__module__.split(".")[0]}
    try:
        untrusted = skops.io.get_untrusted_types(data=data)
        foreign = [name for name in untrusted if name.split(".")[0] not in packages]
        if foreign:
            raise ValueError(f"foreign types {', '.join(foreign)}")
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


def _canonical(data: bytes) -> bytes:
    """Equal models, equal bytes: skops names parts by memory address; number them by appearance instead."""
    numbers: dict[str, int] = {}

    def renumber(node: Any) -> Any:
        if isinstance(node, list):
            return [renumber(item) for item in node]
        if not isinstance(node, dict):
            return node
        return {key: _renamed(key, value, numbers) or renumber(value) for key, value in node.items()}

    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        schema = renumber(json.loads(archive.read("schema.json")))
        contents = {"schema.json": json.dumps(schema, separators=(",", ":")).encode()}
        for name in archive.namelist():
            stem, _, ending = name.partition(".")
            if stem in numbers:
                contents[f"{numbers[stem]}.{ending}"] = archive.read(name)
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(contents):
            archive.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), contents[name], zipfile.ZIP_DEFLATED)
    return out.getvalue()


def _renamed(key: str, value: Any, numbers: dict[str, int]) -> Any:
    if key == "__id__":
        return numbers.setdefault(str(value), len(numbers) + 1)
    if key == "file" and isinstance(value, str):
        stem, _, ending = value.partition(".")
        return f"{numbers.setdefault(stem, len(numbers) + 1)}.{ending}"
    return None
