"""A trained model in a file of its own, and back: nothing is pickled, nothing in it is executed.

Estimators of trusted types, kernel ridge and registered architectures need nothing else to be opened. The file of any
other model holds its state and, if it can travel, its message (for a torch module the ONNX graph), by which it is
opened. With `model=`, an untrained model of the same class, the state is loaded into it: only of files that one trusts.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import numpy as np
import torch
from sklearn.exceptions import InconsistentVersionWarning

from codistill.core.errors import CheckpointError, CodistillError, LearnerError
from codistill.data.frame_encoding import FrameEncoding
from codistill.learners import as_learner
from codistill.learners.ability import Ability, Learner
from codistill.learners.kernel_ridge import KernelRidge
from codistill.learners.module_calls import ModuleCall
from codistill.learners.portable import Predictor, open_model, skops_archive
from codistill.learners.portable.archive_reading import (
    Rules,
    listed_classes,
    named_classes,
    read_estimator,
    unknown_parts,
)
from codistill.learners.portable.estimators import HELPERS, check_structure
from codistill.learners.sklearn import SklearnLearner
from codistill.learners.torch import TorchLearner
from codistill.wire.message import Message

Saved = dict[str, Any]

# What estimators hold inside that are saved and do not travel; the content of compiled parts is checked.
_INSIDE = {
    "sklearn.neural_network._stochastic_optimizers": "AdamOptimizer SGDOptimizer",
    "sklearn.calibration": "_CalibratedClassifier _SigmoidCalibration _TemperatureScaling",
    "sklearn.cluster._bisect_k_means": "_BisectingTree",
    "sklearn.compose": "make_column_selector",
    "sklearn.feature_extraction.text": "CountVectorizer HashingVectorizer TfidfTransformer TfidfVectorizer",
    "sklearn.gaussian_process._gpc": "_BinaryGaussianProcessClassifierLaplace",
    "sklearn.gaussian_process.kernels": "CompoundKernel ConstantKernel DotProduct Exponentiation ExpSineSquared Matern "
    "PairwiseKernel Product RationalQuadratic RBF Sum WhiteKernel",
    "sklearn.impute._iterative": "IterativeImputer",
    "sklearn.metrics._scorer": "_CurveScorer _Scorer",
    "sklearn.model_selection": "GridSearchCV RandomizedSearchCV KFold StratifiedKFold ShuffleSplit "
    "StratifiedShuffleSplit RepeatedKFold RepeatedStratifiedKFold",
    "sklearn.multiclass": "_ConstantPredictor",
    "sklearn.neighbors": "NearestNeighbors",
    "sklearn.pipeline": "Pipeline",
}
_TEXT = "sklearn.feature_extraction"  # most of its classes take no rows of a table


@functools.cache
def _classes() -> dict[str, type]:
    """Estimators that a file may hold: classifiers, regressors and transformers of scikit-learn, and their parts."""
    from sklearn.utils import all_estimators

    listed = [cls for _, cls in all_estimators(["classifier", "regressor", "transformer"])]
    own = [cls for cls in listed if cls.__module__.startswith("sklearn.") and not cls.__module__.startswith(_TEXT)]
    return named_classes(own) | listed_classes(_INSIDE) | listed_classes(HELPERS)


_RULES = Rules(_classes, saved=True)
_MOST_CLASSES = 1 << 20  # of estimators inside of a transformer
_CALLED = frozenset({"FunctionNode", "MethodNode", "OperatorFuncNode", "PartialNode"})
_LIBRARIES = frozenset({"numpy", "scipy", "sklearn", "builtins"})


def save_learner(learner: Learner) -> Saved:
    """What `load_learner` needs, as arrays, bytes and plain values."""
    state = learner.state()
    saved: Saved = {"described": learner.describe(), "class": _class_of(learner), "message": None}
    if isinstance(learner, TorchLearner):
        registered = learner.travels_by_name
        if Ability.PORTABLE in learner.abilities and (registered or learner.sample_shape is not None):
            saved["message"] = _exported(learner)
        # Of a registered architecture the message holds the weights: they are not stored twice.
        stored = None if registered and saved["message"] else {**state, "optimiser": None}
        saved |= {"kind": "torch", "state": stored}
        return saved | {
            "probabilistic": learner.probabilistic,
            "head": learner.named_head,
            "call": learner.call.as_plain(),
        }
    if isinstance(learner, KernelRidge) and isinstance(learner.kernel, str):
        return {**saved, "kind": "kernel", "state": state, "kernel": learner.kernel, "options": learner.kernel_options}
    kind = "sklearn" if isinstance(learner, SklearnLearner) else "own"
    reason: str | None = "types that are not its own"  # why the state alone does not suffice; None: it does
    if kind == "sklearn":
        try:
            _trusted_estimator(state["estimator"], _MOST_CLASSES)
            reason = None
        except Exception as error:
            reason = str(error)
    if Ability.PORTABLE in learner.abilities and learner.ready and reason is not None:
        saved["message"] = _exported(learner)
    if reason is not None and saved["message"] is None:
        _check_loads_into(learner, state, reason)
    return {**saved, "kind": kind, "state": state, **({} if learner.frame is None else {"frames": True})}


def _check_loads_into(learner: Learner, state: dict[str, Any], reason: str) -> None:
    """What is written must be loaded again, at least into a model of the same class; a `LearnerError` if it cannot."""
    for name in ("estimator", "model"):  # of an estimator, and of an object with fit and predict
        own, data = getattr(learner, name, None), state.get(name)
        if own is None or not isinstance(data, bytes):
            continue
        try:
            if name == "estimator":
                _check_functions(data, type(own).__module__.split(".")[0])
            skops_archive.load_own_estimator(data, own)
        except (CodistillError, ValueError):
            raise LearnerError(
                f"A model that is saved must be one that can be loaded again: {learner.describe()}.",
                reason[:200],
                "Use what scikit-learn has, without functions of your own; or write a class of your own for it.",
            ) from None


def load_learner(
    saved: Saved, shape: tuple[int, ...], classes: int, model: Any = None, frame: FrameEncoding | None = None
) -> Learner:
    """The model that was saved, for samples of `shape`; a `CheckpointError` or `LearnerError` if it cannot be opened.

    `model`: an untrained model of the class that was saved, into which the state is loaded. `frame`: what its samples
    are, if they were a data frame.
    """
    try:
        found = _opened(saved, shape, classes) if model is None else _into(saved, as_learner(model, "model="))
        opened = found if isinstance(found, Learner) else OpenedModel(found, str(saved["described"]))
        if saved.get("frames") is True:
            if not isinstance(opened, SklearnLearner) or frame is None:
                raise ValueError("a model of data frames without their columns")
            opened.take_frames(frame)
            return opened  # whether it answers depends on what its categories are called
        answers = opened.predict(np.zeros((2, *shape), np.float32))
        if answers.shape != (2, classes):
            raise ValueError(f"predictions of shape {answers.shape} instead of {(2, classes)}")
        return opened
    except CodistillError:
        raise
    except Exception as error:  # whatever is in the file: each library has its own way to say what is wrong
        raise CheckpointError(
            "The saved model is corrupted, or of another class than it is loaded into.",
            f"{type(error).__name__}: {str(error)[:200]}",
            f"It was saved from {saved.get('class')!s:.100}. Pass model= of that class, or save it again.",
        ) from None


def save_transformer(transformer: Any, owner: str) -> bytes:
    """A fitted transformer in the skops format; a `LearnerError` if it could not be loaded again."""
    try:
        data = skops_archive.dump_estimator(transformer)
        load_transformer(data, transformer)
        return data
    except Exception as error:  # whatever its class holds
        raise LearnerError(
            f"The transformer prepare of {owner} must be one that can be written in the skops format, and read again.",
            f"{type(transformer).__name__}: {error}"[:200],
            "Use scikit-learn's transformers, or prepare the samples before they are given to the agent.",
        ) from None


def load_transformer(data: bytes, own: Any = None) -> Any:
    """The transformer that was saved; `own`: an unfitted one of the same class, if that is not scikit-learn's."""
    untrusted = unknown_parts(data, _RULES)
    if not untrusted:
        return _trusted_estimator(data, _MOST_CLASSES)
    if own is None:
        raise LearnerError(
            "A saved transformer of a class that is not scikit-learn's can only be loaded with one of that class.",
            _shown(untrusted),
            "In Python: codistill.load(path, prepare=...) with an unfitted transformer of that class.",
        )
    saved = skops_archive.read_outline(skops_archive.unzipped(data))["__class__"]
    found = f"a {type(own).__name__} in place of a {saved}"
    try:
        if type(own).__name__ == saved:
            _check_functions(data, type(own).__module__.split(".")[0])
            return skops_archive.load_own_estimator(data, own)
    except CheckpointError as error:
        found = error.found
    raise LearnerError("prepare= must be of the class that was saved.", found, "Pass one of that class.")


class OpenedModel(Learner):
    """A model that can only predict, such as an ONNX graph."""

    abilities = Ability.LABELS

    def __init__(self, model: Predictor, described: str) -> None:
        self._model, self._described = model, described

    def fit(self, x: np.ndarray, targets: np.ndarray) -> None:
        raise LearnerError("A loaded model can only predict.", "fit", "Train a model of the same class instead.")

    def predict(self, x: np.ndarray) -> np.ndarray:
        return self._model.predict(x)

    def state(self) -> dict[str, Any]:
        raise LearnerError("A loaded model is in its file.", "save", f"Copy the file of {self._described}.")

    def restore(self, state: dict[str, Any]) -> None:
        raise LearnerError("A loaded model can only predict.", "restore", "Load the other file.")

    def describe(self) -> str:
        return self._described


def _opened(saved: Saved, shape: tuple[int, ...], classes: int) -> Predictor:
    kind, state = saved["kind"], saved["state"]
    if kind == "kernel":
        learner = KernelRidge(saved["kernel"], **saved["options"])
        learner.restore(state)
        return learner
    untrusted = []
    if kind == "sklearn":
        data = state.get("estimator")
        untrusted = ["no estimator"] if data is None else unknown_parts(data, _RULES)
        if not untrusted:
            opened = SklearnLearner(_trusted_estimator(data, classes))
            opened.take(opened.estimator, state)
            return opened
    if saved["message"] is not None:
        with torch.random.fork_rng(devices=()):
            return open_model(Message.decode(saved["message"]), shape, classes)
    raise LearnerError(
        f"A saved model of the class {saved['class']} can only be loaded into a model of that class.",
        _shown(untrusted) if untrusted else "no model=",
        "In Python: codistill.load(path, model=...) with an untrained model of that class.",
    )


def _shown(untrusted: list[str]) -> str:
    others = [name for name in untrusted if name != skops_archive.OWN_FUNCTION]
    if not others:
        return "a function of its owner's, which is not in the file"
    return f"types that are not trusted: {', '.join(others[:3])}"


def _into(saved: Saved, learner: Learner) -> Learner:
    """Load a state into a model that the caller has made."""
    found, wanted = _class_of(learner), saved["class"]
    if found != wanted:
        raise LearnerError(
            "model= must be of the class that was saved.", f"{found} in place of {wanted}", f"Pass a {wanted}."
        )
    if saved["kind"] == "torch":
        assert isinstance(learner, TorchLearner)
        learner.probabilistic = saved["probabilistic"] is True
        if "call" in saved:
            learner.call = ModuleCall.from_plain(saved["call"])
        if saved.get("head") is not None:  # as its owner has named it
            learner.name_head(saved["head"])
        if saved["state"] is None:
            learner.load(Message.decode(saved["message"]).arrays)
            return learner
    if saved["kind"] == "sklearn" and isinstance(saved["state"].get("estimator"), bytes):
        _check_functions(saved["state"]["estimator"], wanted.split(".")[0])
    learner.restore(saved["state"])
    return learner


def _exported(learner: Learner) -> bytes | None:
    """The message of a model that travels; None if this one cannot: it is then loaded into `model=`."""
    try:
        return learner.export().encoded
    except Exception:  # the owner's own code, or an exporter that fails in any way
        return None


def _class_of(learner: Learner) -> str:
    wrapped = [getattr(learner, name, None) for name in ("module", "estimator", "model")]
    kind = type(next((each for each in wrapped if each is not None), learner))
    architecture = getattr(getattr(learner, "module", None), "architecture", None)
    return f"architecture '{architecture.name}'" if architecture else f"{kind.__module__}.{kind.__qualname__}"


def _trusted_estimator(data: bytes, classes: int) -> Any:
    """An estimator of trusted types: read as plain data, and checked before it is built and before it is used."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", InconsistentVersionWarning)
        estimator = read_estimator(data, _RULES, _MOST_CLASSES)
    check_structure(estimator, classes, travelling=False)
    return estimator


def _check_functions(data: bytes, package: str) -> None:
    """Functions in a model, such as those of a FunctionTransformer, must be trusted by skops or of its own package."""
    import skops.io

    untrusted = set(skops.io.get_untrusted_types(data=data))
    for node in skops_archive.nodes(skops_archive.read_outline(skops_archive.unzipped(data))):
        name = f"{node['__module__']}.{node['__class__']}"
        own = package not in _LIBRARIES and node["__module__"].split(".")[0] == package
        if node["__loader__"] in _CALLED and name in untrusted and not own:
            raise ValueError(f"a function {name}, which is not trusted")
