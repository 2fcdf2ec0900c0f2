"""Models that travel: never pickled, never executed.

A torch model travels as the name and options of a registered architecture with its weights, a kernel model
as its inputs and coefficients, a scikit-learn model as `portable_sklearn` says, anything else as ONNX
(`portable_onnx`). What arrives is checked before it is built and before it is used: `open_model` returns a
predictor or raises `MessageError`.
"""

from __future__ import annotations

import json
import math
import warnings
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from sklearn.metrics.pairwise import PAIRWISE_KERNEL_FUNCTIONS

from codistill.errors import CodistillError, MessageError
from codistill.learners import zoo
from codistill.learners.portable.onnx_models import open_onnx
from codistill.learners.portable.sklearn_models import open_estimator
from codistill.message import Message

if TYPE_CHECKING:
    from codistill.learners.kernel_ridge import KernelRidge
    from codistill.learners.torch import TorchLearner

_OPTIONS_LIMIT = 10_000
_REFUSE = "The round goes on without this model; its sender should use a registered architecture or a listed type."


class Predictor(Protocol):
    """A received model: all one can do is ask it."""

    def predict(self, x: np.ndarray) -> np.ndarray:
        """Predict (n, C)."""
        ...


class Heard:
    """A received model that has answered for one's own samples: there it is known to be sound."""

    def __init__(self, model: Predictor, x: np.ndarray, classes: int) -> None:
        self._model, self._x = model, x
        try:
            self._answer = model.predict(x)
            _check_answer(self._answer, (len(x), classes))
        except Exception as error:  # it passed the probe, and may fail all the same
            raise _refused(f"{type(error).__name__}: {str(error)[:200]}") from None

    def predict(self, x: np.ndarray) -> np.ndarray:
        """Predict (n, C); one's own samples cost nothing again."""
        return self._answer.copy() if x is self._x else self._model.predict(x)


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
                model = open_estimator(message, shape, classes)
            case "kernel":
                model = _open_kernel(message, shape, classes)
            case "onnx":
                model = open_onnx(message, shape, classes)
            case other:
                raise ValueError(f"a model of unknown kind {other!r}"[:200])
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
    _check_answer(answer, (classes + 1, classes))


def _check_answer(answer: np.ndarray, wanted: tuple[int, int]) -> None:
    if answer.shape != wanted:
        raise ValueError(f"predictions of shape {answer.shape} instead of {wanted}")
    if not np.isfinite(answer).all():
        raise ValueError("NaN or infinity in its predictions")


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


def _open_kernel(message: Message, shape: tuple[int, ...], classes: int) -> Predictor:
    from codistill.learners.kernel_ridge import KernelRidge

    inputs, coefficients = message.arrays["inputs"], message.arrays["coefficients"]
    if inputs.shape[1:] != (math.prod(shape),) or coefficients.shape != (len(inputs), classes):
        raise ValueError("a kernel model for other samples or classes")
    options = json.loads(message.plain["options"])
    if message.plain["kernel"] not in PAIRWISE_KERNEL_FUNCTIONS or not options.keys() <= {"gamma", "degree", "coef0"}:
        raise ValueError(f"a kernel {message.plain['kernel']!r} with options {sorted(options)}")
    model = KernelRidge(message.plain["kernel"], **options)
    model.restore({"inputs": inputs, "coefficients": coefficients, "samples": None})
    return model
