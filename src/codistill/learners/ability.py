"""The universal API of models, `fit` and `predict`, and the abilities beyond it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from enum import Flag, auto
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from codistill.core.errors import LearnerError

if TYPE_CHECKING:
    import torch

    from codistill.data.frame_encoding import FrameEncoding
    from codistill.data.frames import Naming
    from codistill.wire.message import Message

    LossOfTwo = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Ability(Flag):
    """Abilities that learners have and protocols need."""

    LABELS = 0  # fit on class labels, predict: every learner
    PREDICT = auto()  # fit on soft targets, predict
    PORTABLE = auto()  # the fitted model can be sent and opened safely elsewhere
    GRADIENTS = auto()  # call -> logits with autograd, loss, descend, snapshot
    FEATURES = auto()  # features(x) and a linear head
    WEIGHTS = auto()  # weights() and load(weights)

    def words(self) -> str:
        """The names of the abilities, human-readable."""
        return " + ".join(flag.name.lower() for flag in type(self) if flag in self and flag.name) or "labels"


class Learner(ABC):
    """A model behind `fit(x, targets)` and `predict(x)`; targets and predictions are (n, C)."""

    abilities: Ability = Ability.PREDICT
    probabilistic: bool = False  # predicts class probabilities, so can only be fitted to them
    real_valued: bool = False  # outputs are real values, by the owner's loss, and not for a softmax
    ready: bool = True  # False until the first fit, if it cannot predict before
    is_constant: bool = False  # predicts class frequencies, since it could not be fitted to the last targets
    takes_missing: bool = False  # accepts samples with missing values (NaN)
    takes_frames: bool = False  # accepts columns that hold no numbers, as a data frame
    frame: FrameEncoding | None = None  # of its samples, if it gets them as data frames

    @abstractmethod
    def fit(self, x: np.ndarray, targets: np.ndarray) -> None:
        """Train on soft labels or real values."""

    @abstractmethod
    def predict(self, x: np.ndarray) -> np.ndarray:
        """Predict as float32 (n, C): class probabilities, or real values after a real-valued fit."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Everything that training changes, as arrays and plain values, for a checkpoint."""

    @abstractmethod
    def restore(self, state: dict[str, Any]) -> None:
        """Restore the state of an equal learner."""

    def offload(self) -> None:
        """Free memory if possible; only `restore` is called next."""

    def memory(self) -> tuple[int, int]:
        """Bytes of the weights and of the optimiser's state; 0 if unknown."""
        return 0, 0

    def takes_missing_in_frames(self, x: np.ndarray, targets: np.ndarray) -> bool:
        """Whether it accepts missing numbers, if it gets such samples as data frames."""
        return self.takes_missing

    def describe(self) -> str:
        """The model's human-readable name."""
        return type(self).__name__

    def check(self, x: np.ndarray, targets: np.ndarray, owner: str) -> None:
        """Raise a `LearnerError` before round 0 if the model cannot learn from such data."""

    def check_travel(self, x: np.ndarray, owner: str) -> None:
        """Raise a `LearnerError` before round 0 if the protocol sends models and this one cannot be sent."""

    def take_names(self, naming: Naming, x: np.ndarray) -> None:
        """Set the names of columns and classes that options of the model may use; raise if it uses an unknown one."""

    def join(self, federation_samples: int) -> None:
        """Set the number of private samples of the whole federation."""

    def place(self) -> None:
        """Move to its device, if any; called in the process that trains it, before any computation."""

    def computing(self) -> AbstractContextManager[Any]:
        """A context for its agent's computations, in which tensors are on the model's device."""
        return nullcontext()

    def advice(self, missing: Ability) -> str:
        """How to get an ability that this model lacks."""
        return f"Use a model with the ability '{missing.words()}', for example a torch module."

    def export(self) -> Message:
        """The fitted model as a message (PORTABLE)."""
        raise NotImplementedError


def not_fitted(learner: Learner) -> LearnerError:
    return LearnerError(
        "A model must be fitted before it predicts.",
        f"{learner.describe()} has not seen any data yet",
        "Run at least one round in which this agent is present.",
    )


class GradientLearner(Learner):
    """A learner with GRADIENTS, FEATURES and WEIGHTS."""

    @abstractmethod
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Outputs before the softmax, with a graph."""

    @abstractmethod
    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The owner's loss, a scalar."""

    @abstractmethod
    def descend(self, loss: torch.Tensor) -> None:
        """One step of the owner's optimiser on this loss."""

    @abstractmethod
    def set_lr(self, factor: float, lr: float | None = None) -> None:
        """Set the learning rate to `factor` times `lr`; unset: times the owner's learning rate."""

    def reset_optimiser(self) -> None:
        """Clear the optimiser's state (momentum, Adam's moments); the learning rate stays."""

    @abstractmethod
    def snapshot(self, *, training: bool = False) -> Callable[[torch.Tensor], torch.Tensor]:
        """A frozen copy of the model, which returns outputs without a graph; `training`: in training mode."""

    @abstractmethod
    def reset(self) -> None:
        """Reinitialise the parameters from torch's generator, and clear the optimiser's state."""

    @property
    @abstractmethod
    def head(self) -> torch.nn.Linear:
        """The linear layer that gives the outputs."""

    @property
    @abstractmethod
    def head_name(self) -> str:
        """The head's name in the module; empty if the module itself is the head."""

    @abstractmethod
    def features(self, x: torch.Tensor) -> torch.Tensor:
        """The input of the head, with a graph."""

    @abstractmethod
    def with_features(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs before the softmax and the features (n, d) of one pass, both with a graph."""

    @abstractmethod
    def evaluated_features(self, x: np.ndarray) -> np.ndarray:
        """Features (n, d) in evaluation mode and without a graph."""

    @abstractmethod
    def weights(self) -> dict[str, np.ndarray]:
        """A copy of all parameters and buffers by name."""

    def is_finite(self) -> bool:
        """Whether all weights and the optimiser's state are finite."""
        return all(np.isfinite(array).all() for array in self.weights().values())

    def has_finite_weights(self) -> bool:
        """The same for the weights alone, if nothing else has changed."""
        return self.is_finite()

    @abstractmethod
    def kept(self) -> Callable[[], None]:
        """Copy the state; the returned function restores it, and can be called repeatedly."""

    @abstractmethod
    def load(self, weights: dict[str, np.ndarray]) -> None:
        """Load parameters and buffers by name; others keep their values."""

    @property
    @abstractmethod
    def batch_norm(self) -> frozenset[str]:
        """Names of the weights of batch norm: parameters, running statistics and counters."""

    @abstractmethod
    def parameters(self) -> dict[str, torch.Tensor]:
        """The trainable parameters by name, for use in a loss."""

    @abstractmethod
    def gradient_at(self, weights: dict[str, np.ndarray], x: torch.Tensor, loss: LossOfTwo) -> dict[str, np.ndarray]:
        """The gradient of loss(Φ(x; w), Φ(x; w_k)) with respect to the given weights w; w_k are the model's own.

        Batch norm uses the statistics of the batch, as in a gradient step; dropout is off. The model keeps its own
        weights, which also replace names missing in `weights`. There is an array for each floating-point weight; it is
        0 for running statistics.
        """

    @abstractmethod
    def outputs_at(self, weights: dict[str, np.ndarray], x: torch.Tensor) -> np.ndarray:
        """Outputs before the softmax in evaluation mode, with the given weights instead of the model's own."""


# `me.learner` as the code of a protocol sees it: with all abilities. That the learner has those which the protocol
# `needs` is checked before round 0.
AnyLearner: TypeAlias = GradientLearner
