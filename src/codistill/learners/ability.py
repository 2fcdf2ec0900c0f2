"""What a model can do: the universal API, and the ladder of abilities above it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from enum import Flag, auto
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    import torch

    from codistill.data.named_options import Naming
    from codistill.message import Message

    LossOfTwo = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Ability(Flag):
    """What a learner offers and what a protocol needs."""

    LABELS = 0  # fit on class labels, predict: every learner
    PREDICT = auto()  # fit on soft targets, predict
    PORTABLE = auto()  # the fitted model can be sent and opened safely elsewhere
    GRADIENTS = auto()  # call -> logits with autograd, loss, descend, snapshot
    FEATURES = auto()  # features(x) and a linear head
    WEIGHTS = auto()  # weights() and load(weights)

    def words(self) -> str:
        """The abilities' names, for a person."""
        return " + ".join(flag.name.lower() for flag in type(self) if flag in self and flag.name) or "labels"


class Learner(ABC):
    """A model behind `fit(x, targets)` and `predict(x)`; targets and predictions are (n, C)."""

    abilities: Ability = Ability.PREDICT
    probabilistic: bool = False  # whether it predicts class probabilities, so can only be fitted to them
    real_valued: bool = False  # whether its outputs are real values by its owner's loss, so not for a softmax
    ready: bool = True  # False as long as it cannot predict for want of a first fit
    is_constant: bool = False  # whether it answers with class frequencies: the last targets were too poor to be fitted
    takes_missing: bool = False  # whether samples may hold NaN, for values that are missing

    @abstractmethod
    def fit(self, x: np.ndarray, targets: np.ndarray) -> None:
        """Train on soft labels or real values."""

    @abstractmethod
    def predict(self, x: np.ndarray) -> np.ndarray:
        """Predict as float32 (n, C): class probabilities, or real values after a real-valued fit."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """All that training has changed, as arrays and plain values: what a checkpoint holds."""

    @abstractmethod
    def restore(self, state: dict[str, Any]) -> None:
        """Return to a state taken from an equal learner."""

    def set_aside(self) -> None:
        """Free what memory it can; only `restore` is called next. A model that cannot stays as it is."""

    def memory(self) -> tuple[int, int]:
        """Bytes of its weights, and of what an optimiser keeps beside them; 0 where that is not known."""
        return 0, 0

    def describe(self) -> str:
        """The model's name, for a person."""
        return type(self).__name__

    def check(self, x: np.ndarray, targets: np.ndarray, owner: str) -> None:
        """Before round 0: raise a `LearnerError` if this model cannot learn from such data."""

    def check_travel(self, x: np.ndarray, owner: str) -> None:
        """Before round 0 of a protocol in which models travel: raise a `LearnerError` if this one cannot."""

    def take_names(self, naming: Naming, x: np.ndarray) -> None:
        """Take the names of columns and classes, which options of the model may use; an error if one is unknown."""

    def join(self, federation_samples: int) -> None:
        """Be told how many private samples the federation holds in all."""

    def place(self) -> None:
        """Move to its device, if it has one: called in the process that trains it, before it computes anything."""

    def computing(self) -> AbstractContextManager[Any]:
        """Entered while its agent computes: whatever the agent makes of tensors is then where the model is."""
        return nullcontext()

    def advice(self, missing: Ability) -> str:
        """How its owner could get an ability that this model lacks."""
        return f"Use a model with the ability '{missing.words()}', for example a torch module."

    def export(self) -> Message:
        """The fitted model as a message (PORTABLE)."""
        raise NotImplementedError


class GradientLearner(Learner):
    """The upper rungs of the ladder: GRADIENTS, FEATURES, WEIGHTS."""

    @abstractmethod
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Outputs before the softmax, with a graph to differentiate."""

    @abstractmethod
    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The owner's own loss of outputs against targets, a scalar."""

    @abstractmethod
    def descend(self, loss: torch.Tensor) -> None:
        """One step of the owner's optimiser down the gradient of the loss."""

    @abstractmethod
    def set_lr(self, factor: float, lr: float | None = None) -> None:
        """From now on take steps of `factor` times `lr`; unset: times the owner's learning rate."""

    def reset_optimiser(self) -> None:
        """Forget what the optimiser has kept of its steps; a learner whose optimiser keeps nothing does nothing."""

    @abstractmethod
    def snapshot(self, *, training: bool = False) -> Callable[[torch.Tensor], torch.Tensor]:
        """A frozen copy of the model: call it for outputs without a graph; `training`: as in a gradient step."""

    @abstractmethod
    def reset(self) -> None:
        """Initialise the parameters anew from torch's generator, and clear the optimiser's state."""

    @abstractmethod
    def features(self, x: torch.Tensor) -> torch.Tensor:
        """The input of the head, the linear layer that gives the outputs."""

    @abstractmethod
    def with_features(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs before the softmax and the features (n, d) of one pass, both with a graph to differentiate."""

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
        """The same of the weights alone, where nothing else has changed."""
        return self.is_finite()

    def kept(self) -> Callable[[], None]:
        """Keep a copy of its state; what is returned goes back to it, as often as it is called."""
        from codistill.learners.tensors import copied

        state = copied(self.state())
        return lambda: self.restore(copied(state))  # a copy: an optimiser continues in what it is given

    @abstractmethod
    def load(self, weights: dict[str, np.ndarray]) -> None:
        """Take over parameters and buffers by name; names left out keep their values."""

    @property
    @abstractmethod
    def batch_norm(self) -> frozenset[str]:
        """Names of the weights that belong to batch norm: its parameters, running statistics and counters."""

    @abstractmethod
    def parameters(self) -> dict[str, torch.Tensor]:
        """The trainable parameters by name, to build a loss from."""

    @abstractmethod
    def gradient_at(self, weights: dict[str, np.ndarray], x: torch.Tensor, loss: LossOfTwo) -> dict[str, np.ndarray]:
        """The gradient of loss(outputs with these weights, own outputs) by these weights; see `HasWeights`."""

    @abstractmethod
    def outputs_at(self, weights: dict[str, np.ndarray], x: torch.Tensor) -> np.ndarray:
        """Outputs with these weights; see `HasWeights`."""


# --- what a protocol's file sees of `me.learner`: one class per ability ----------------------------------------


class CanPredict(Protocol):
    """PREDICT (and LABELS): every learner."""

    abilities: Ability
    probabilistic: bool
    real_valued: bool
    ready: bool
    takes_missing: bool

    def fit(self, x: np.ndarray, targets: np.ndarray) -> None:
        """Train on soft labels (n, C) or real values."""
        ...

    def predict(self, x: np.ndarray) -> np.ndarray:
        """Predict as (n, C): class probabilities, or real values after a real-valued fit."""
        ...

    def describe(self) -> str:
        """The model's name, for a person."""
        ...


class CanTravel(Protocol):
    """PORTABLE: the fitted model can be sent, and opened safely by `me.open_model`."""

    def export(self) -> Message:
        """The fitted model as a message."""
        ...


class CanDescend(Protocol):
    """GRADIENTS."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Outputs before the softmax, with a graph to differentiate."""
        ...

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The owner's own loss of outputs against targets, a scalar."""
        ...

    def descend(self, loss: torch.Tensor) -> None:
        """One step of the owner's optimiser down the gradient of the loss."""
        ...

    def set_lr(self, factor: float, lr: float | None = None) -> None:
        """From now on take steps of `factor` times `lr`; unset: times the owner's learning rate."""
        ...

    def reset_optimiser(self) -> None:
        """Forget what the optimiser has kept of its steps (momentum, Adam's moments); the learning rate stays."""
        ...

    def snapshot(self, *, training: bool = False) -> Callable[[torch.Tensor], torch.Tensor]:
        """A frozen copy of the model: call it for outputs without a graph; `training`: as in a gradient step."""
        ...

    def reset(self) -> None:
        """Initialise the parameters anew, and clear the optimiser's state."""
        ...


class HasFeatures(Protocol):
    """FEATURES."""

    @property
    def head(self) -> torch.nn.Linear:
        """The linear layer that gives the outputs, from features to outputs."""
        ...

    @property
    def head_name(self) -> str:
        """Its name in the module; empty where the module itself is the head."""
        ...

    def features(self, x: torch.Tensor) -> torch.Tensor:
        """The input of the head, with a graph."""
        ...

    def with_features(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs before the softmax and the features (n, d) of one pass, both with a graph."""
        ...

    def evaluated_features(self, x: np.ndarray) -> np.ndarray:
        """Features (n, d) in evaluation mode and without a graph."""
        ...


class HasWeights(Protocol):
    """WEIGHTS."""

    def weights(self) -> dict[str, np.ndarray]:
        """A copy of all parameters and buffers by name."""
        ...

    def load(self, weights: dict[str, np.ndarray]) -> None:
        """Take over parameters and buffers by name; names left out keep their values."""
        ...

    @property
    def batch_norm(self) -> frozenset[str]:
        """Names of the weights that belong to batch norm: its parameters, running statistics and counters."""
        ...

    def parameters(self) -> dict[str, torch.Tensor]:
        """The trainable parameters by name, to build a loss from."""
        ...

    def gradient_at(self, weights: dict[str, np.ndarray], x: torch.Tensor, loss: LossOfTwo) -> dict[str, np.ndarray]:
        """The gradient of loss(Φ(x; w), Φ(x; w_k)) by w, for given weights w and the model's own w_k.

        Batch norm uses the statistics of the batch, as in a gradient step; dropout leaves nothing out. The model keeps
        its own weights, which also stand in for names that are left out of `weights`. There is an array for each
        floating-point weight; of running statistics it is 0.
        """
        ...

    def outputs_at(self, weights: dict[str, np.ndarray], x: torch.Tensor) -> np.ndarray:
        """Outputs before the softmax with given weights instead of the model's own, as they would predict."""
        ...


class IsManaged(Protocol):
    """What the runtime calls, and no protocol does."""

    is_constant: bool

    def state(self) -> dict[str, Any]:
        """All that training has changed: what a checkpoint holds."""
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Return to a state taken from an equal learner."""
        ...

    def set_aside(self) -> None:
        """Free what memory it can; only `restore` is called next."""
        ...

    def memory(self) -> tuple[int, int]:
        """Bytes of its weights, and of what an optimiser keeps beside them; 0 where that is not known."""
        ...

    def take_names(self, naming: Naming, x: np.ndarray) -> None:
        """Take the names of columns and classes, which options of the model may use."""
        ...

    def is_finite(self) -> bool:
        """Whether all weights and the optimiser's state are finite (GRADIENTS)."""
        ...

    def has_finite_weights(self) -> bool:
        """The same of the weights alone, where nothing else has changed (GRADIENTS)."""
        ...

    def kept(self) -> Callable[[], None]:
        """Keep a copy of its state; what is returned goes back to it, as often as it is called (GRADIENTS)."""
        ...

    def check(self, x: np.ndarray, targets: np.ndarray, owner: str) -> None:
        """Before round 0: raise a `LearnerError` if this model cannot learn from such data."""
        ...

    def check_travel(self, x: np.ndarray, owner: str) -> None:
        """Before round 0 of a protocol in which models travel: raise a `LearnerError` if this one cannot."""
        ...

    def join(self, federation_samples: int) -> None:
        """Be told how many private samples the federation holds in all."""
        ...

    def place(self) -> None:
        """Move to its device, if it has one."""
        ...

    def computing(self) -> AbstractContextManager[Any]:
        """Entered while its agent computes."""
        ...

    def advice(self, missing: Ability) -> str:
        """How its owner could get an ability that this model lacks."""
        ...


class AnyLearner(CanPredict, CanTravel, CanDescend, HasFeatures, HasWeights, IsManaged, Protocol):
    """`me.learner`: all abilities. That the learner has those which a protocol `needs` is checked before round 0."""
