"""Any `torch.nn.Module` as a learner, with all abilities."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial

import numpy as np
import torch
from torch import nn

from codistill.arguments import checked_arguments
from codistill.data.shard import cut
from codistill.devices import check_device
from codistill.errors import LearnerError
from codistill.learners.ability import Ability
from codistill.learners.batch_norm import forward, names_of_batch_norm
from codistill.learners.given_weights import gradient_at, outputs_at
from codistill.learners.head_input import (
    Head,
    checked_head,
    find_head,
    head_in_sequence,
    linear_layers,
    unused,
    with_head_input,
)
from codistill.learners.optimisers import OPTIMISERS, MakeOptimiser
from codistill.learners.portable import onnx_models as portable_onnx
from codistill.learners.projection import with_projection
from codistill.learners.trained_module import TrainedModule
from codistill.message import Message
from codistill.on_device import in_host_memory

PRECISIONS = ("full", "mixed")
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

# Rows per forward pass of `predict`. Small chunks stay in the cache; a fixed size keeps results equal
# to the bit, since the kernels chosen (and so the last digits) depend on it.
_CHUNK = 250


def _mean_squared(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(outputs, targets)


# Losses of real values: what they are of is no input of a softmax.
_OF_REAL_VALUES = (
    nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.PoissonNLLLoss, nn.GaussianNLLLoss,
)  # fmt: skip
_FUNCTIONS_OF_REAL_VALUES = (
    nn.functional.mse_loss, nn.functional.l1_loss, nn.functional.smooth_l1_loss, nn.functional.huber_loss,
    nn.functional.poisson_nll_loss, nn.functional.gaussian_nll_loss,
)  # fmt: skip
_LOSSES: dict[str, Loss] = {"cross_entropy": nn.functional.cross_entropy, "squared": _mean_squared}


class TorchLearner(TrainedModule):
    """A module with its own loss, optimiser, epochs and batch size.

    `loss` is "cross_entropy", "squared" or a function of (outputs, targets); `optimiser` is "adam",
    "adamw", "sgd" or a function of the parameters. `fit` starts from a fresh initialisation unless
    `warm`; steps taken by a protocol through `descend` always continue from the current weights. `projection`: the
    features of a linear layer before the head, for protocols that compare features. `head`: the name of the linear
    layer whose input is the features, such as "classifier.fc"; unset: the one whose output is the module's. `device` is
    "cpu", "cuda", "cuda:1", "mps", or "auto", a GPU where there is one; unset: what the run says. The module moves
    there when it first trains. `precision`: "mixed" computes outputs in bfloat16 where the device can; weights and
    losses are float32.
    """

    @checked_arguments
    def __init__(
        self,
        module: nn.Module,
        *,
        loss: str | Loss = "cross_entropy",
        optimiser: str | MakeOptimiser = "adam",
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
        epochs: int = 5,
        batch_size: int = 32,
        warm: bool = False,
        projection: int | None = None,
        head: str | None = None,
        device: str | None = None,
        precision: str = "full",
    ) -> None:
        if isinstance(loss, str) and loss not in _LOSSES:
            raise LearnerError("loss must be one of cross_entropy, squared, or a function.", repr(loss), "Fix it.")
        if isinstance(optimiser, str) and optimiser not in OPTIMISERS:
            raise LearnerError(
                f"optimiser must be one of {', '.join(OPTIMISERS)}, or a function of the parameters.",
                repr(optimiser),
                "Fix it.",
            )
        if precision not in PRECISIONS:
            raise LearnerError("precision must be full or mixed.", repr(precision), "Fix it.")
        if device is not None:
            check_device(device)
        self.named_head = head if head is None else checked_head(module, head)  # None: found by the first samples
        self._projected: str | None = None  # the head that a projection was put before, to be checked
        self._head: Head | None = None
        if projection is not None:
            module, projected = with_projection(module, projection, head)
            self.named_head, self._projected = (None, projected) if head is None else (projected, None)
        super().__init__(
            module,
            optimiser=optimiser,
            lr=lr,
            weight_decay=weight_decay,
            momentum=momentum,
            device=device,
            precision=precision,
        )
        self.probabilistic = loss == "cross_entropy"
        function = loss.func if isinstance(loss, partial) else loss
        self.real_valued = (
            loss == "squared" or isinstance(function, _OF_REAL_VALUES) or function in _FUNCTIONS_OF_REAL_VALUES
        )
        self.epochs, self.batch_size, self.warm = epochs, batch_size, warm
        self._loss = _LOSSES[loss] if isinstance(loss, str) else loss
        self.abilities = Ability.PREDICT | Ability.GRADIENTS | Ability.WEIGHTS
        if linear_layers(module):  # whether one of them is the head: see `check`
            self.abilities |= Ability.FEATURES
        self.sample_shape: tuple[int, ...] | None = None  # of what it has seen last
        if hasattr(module, "architecture") or portable_onnx.is_installed():
            self.abilities |= Ability.PORTABLE

    # --- PREDICT ------------------------------------------------------------------------------

    def fit(self, x: np.ndarray, targets: np.ndarray) -> None:
        """Train for `epochs` over shuffled batches, from a fresh initialisation unless `warm`."""
        self.place()
        if not self.warm:
            self.reset()
        with in_host_memory():  # samples wait here; a batch at a time is on the device
            inputs, wanted = self.tensor(x), torch.tensor(targets, dtype=torch.float32)
            for _ in range(self.epochs):
                order = torch.randperm(len(inputs))
                for part in cut(len(order), self.batch_size):
                    batch = order[part]
                    with self.computing():
                        self.descend(self.loss(self(inputs[batch]), wanted[batch]))

    def predict(self, x: np.ndarray) -> np.ndarray:
        """Class probabilities (cross-entropy) or raw outputs (any other loss)."""
        outputs = self.outputs(x)
        if self.probabilistic:
            outputs = torch.softmax(outputs, dim=1)
        return outputs.cpu().numpy()

    def outputs(self, x: np.ndarray) -> torch.Tensor:
        """Outputs before the softmax, in evaluation mode and without a graph."""
        self.module.eval()
        inputs = self.tensor(x)
        with torch.inference_mode():
            # A copy of each chunk: a module that works in place must not change its owner's samples.
            starts = range(0, max(len(inputs), 1), _CHUNK)
            return torch.cat([self._outputs(self.module, self._copied(inputs[i : i + _CHUNK])) for i in starts])

    def tensor(self, x: np.ndarray) -> torch.Tensor:
        """Samples as float32, images in the memory format that convolutions are fastest in."""
        samples = np.ascontiguousarray(x, dtype=np.float32)
        self.sample_shape = samples.shape[1:]
        inputs = torch.from_numpy(samples if samples.flags.writeable else samples.copy())
        if self._channels_last and inputs.dim() == 4:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        return inputs

    # --- GRADIENTS ----------------------------------------------------------------------------

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Outputs before the softmax, in training mode."""
        self.place()
        if not self.module.training:
            self.module.train()
        return self._outputs(partial(forward, self.module), self._uploaded(x))

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The owner's loss."""
        return self._loss(outputs, self._uploaded(targets))

    def descend(self, loss: torch.Tensor) -> None:
        """One optimiser step; its state (Adam's moments) is kept across rounds."""
        optimiser = self.optimiser
        steps = self._short_steps_of(optimiser)
        if steps is not None:
            steps.descend(loss)
            return
        optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()

    def snapshot(self, *, training: bool = False) -> Callable[[torch.Tensor], torch.Tensor]:
        """A frozen copy; in training mode its batch norm sees a batch as the model itself does."""
        frozen = self._copies.take(training=training)
        return lambda x: self._outputs(partial(forward, frozen.module), self._uploaded(x))

    # --- FEATURES -----------------------------------------------------------------------------

    @property
    def head(self) -> nn.Linear:
        """The linear layer whose output is the module's output, or the one that its owner has named."""
        head = self.module.get_submodule(self.head_name)
        assert isinstance(head, nn.Linear)
        return head

    def name_head(self, name: str) -> None:
        """Say which linear layer is the head, instead of the one that is found."""
        self.named_head, self._head = checked_head(self.module, name), None

    @property
    def head_name(self) -> str:
        """The head's name in the module; empty where the module itself is the head."""
        if self._head is not None or self.named_head is not None:
            return self._head.name if self._head is not None else str(self.named_head)
        known = getattr(self.module, "architecture", None)
        shape = self.sample_shape if known is None else known.shape
        if shape is None and head_in_sequence(self.module) is None:
            raise LearnerError(
                "The head is found by a pass of samples.",
                f"{self.describe()} has not seen any",
                "Let it predict first, or name its head: TorchLearner(module, head=...).",
            )
        return self._found_head(self._uploaded(torch.zeros(2, *(shape or ())))).name

    def _found_head(self, x: torch.Tensor) -> Head:
        """The head, found by the first samples that there are."""
        if self._head is None:
            in_sequence = head_in_sequence(self.module) if self.named_head is None else None
            if in_sequence is not None:
                head: Head | None = Head(in_sequence, -1)
            else:
                sample = x[:2] if len(x) else x.new_zeros((2, *x.shape[1:]))
                head = find_head(self.module, sample, self.named_head, partial(self._outputs, self.module))
            if head is None and self.named_head is not None:
                raise unused(self.describe(), self.named_head)
            if head is None:
                raise LearnerError(
                    "Features need a linear layer at the end, whose output is the module's output.",
                    self.describe(),
                    "Add an nn.Linear, or name the layer whose input is the features: TorchLearner(module, head=...).",
                )
            if self._projected not in (None, head.name):
                raise LearnerError(
                    "A projection must be before the linear layer that gives the outputs.",
                    f"'{head.name}' of {self.describe()} does, and is not the last one that it has",
                    f'Name it: TorchLearner(module, projection=..., head="{head.name}").',
                )
            self._head = head
        return self._head

    def features(self, x: torch.Tensor) -> torch.Tensor:
        """The input of the head, with a graph, in the mode the module is in."""
        return self._with_head_input(partial(forward, self.module), self._uploaded(x))[1]

    def with_features(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs before the softmax and features, of one pass in training mode."""
        outputs, features = self._with_head_input(self, x)
        return outputs, features.flatten(1)

    def evaluated_features(self, x: np.ndarray) -> np.ndarray:
        """Features in evaluation mode and without a graph."""
        self.module.eval()
        inputs = self.tensor(x)
        with torch.inference_mode():
            starts = range(0, max(len(inputs), 1), _CHUNK)
            chunks = (self._copied(inputs[i : i + _CHUNK]) for i in starts)
            parts = [self._with_head_input(self.module, chunk)[1].flatten(1) for chunk in chunks]
            return torch.cat(parts).cpu().numpy()

    def _with_head_input(
        self, run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        head = self._found_head(self._uploaded(x))
        outputs, features = with_head_input(self.module, head, partial(self._outputs, run), x, self.describe)
        return outputs, features.float() if self.precision == "mixed" else features

    # --- WEIGHTS ------------------------------------------------------------------------------

    @cached_property
    def batch_norm(self) -> frozenset[str]:
        """Names of the weights that belong to batch norm: its parameters, running statistics and counters."""
        return names_of_batch_norm(self.module)

    def parameters(self) -> dict[str, torch.Tensor]:
        """The trainable parameters by name, to build a loss from."""
        return {name: each for name, each in self.module.named_parameters() if each.requires_grad}

    def gradient_at(
        self,
        weights: dict[str, np.ndarray],
        x: torch.Tensor,
        loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> dict[str, np.ndarray]:
        """The gradient of loss(Φ(x; w), Φ(x; w_k)) by w, for given weights w and the model's own w_k."""
        return gradient_at(self.module, weights, self._uploaded(x), loss)

    def outputs_at(self, weights: dict[str, np.ndarray], x: torch.Tensor) -> np.ndarray:
        """Outputs before the softmax with given weights instead of the model's own, as they would predict."""
        return outputs_at(self.module, weights, self._uploaded(x)).cpu().numpy()

    # --- travel, checks -------------------------------------------------------------------------

    def export(self) -> Message:
        """A registered architecture's name and options, with the weights; any other module as ONNX."""
        from codistill.learners.portable.torch_models import export_torch

        return export_torch(self) if hasattr(self.module, "architecture") else portable_onnx.export_module(self)

    def describe(self) -> str:
        """The architecture's registered name, or the module's class."""
        known = getattr(self.module, "architecture", None)
        return str(known.name) if known is not None else type(self.module).__name__

    def check(self, x: np.ndarray, targets: np.ndarray, owner: str) -> None:
        """One forward pass must give one column per class, and leave the module untouched."""
        try:
            found = tuple(self.outputs(x[:2]).shape)
        except Exception as error:  # the module is its owner's code, and may fail in any way
            raise LearnerError(
                f"The module of agent '{owner}' must accept samples of shape {x.shape[1:]}.",
                f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}",
                "Reshape the data, or start the module with nn.Flatten().",
            ) from None
        wanted = (min(2, len(x)), targets.shape[1])
        if found != wanted:
            raise LearnerError(
                f"The module of agent '{owner}' must give {wanted[1]} outputs per sample, one per class.",
                f"output of shape {found} for {wanted[0]} samples",
                "Change its last layer.",
            )
        self._check_head(self._uploaded(self.tensor(x[:2])))

    def _check_head(self, x: torch.Tensor) -> None:
        """Find the head, where a protocol may ask for features; a module without one has no features."""
        if Ability.FEATURES not in self.abilities or self._head is not None:
            return
        try:
            self._found_head(x)
        except LearnerError:
            if self.named_head is not None or self._projected is not None:
                raise  # its owner wants features, of a layer that gives none
            self.abilities &= ~Ability.FEATURES
        except Exception:  # the pass above worked: what fails is to follow it, as in code that torch has compiled
            self.abilities &= ~Ability.FEATURES

    def check_travel(self, x: np.ndarray, owner: str) -> None:
        """A module must be one that receivers accept; if its architecture is not registered, ONNX must express it."""
        from codistill.learners.portable.torch_models import check_registered

        if hasattr(self.module, "architecture"):
            check_registered(self, owner)
        else:
            portable_onnx.check_module(self, x, owner)

    def advice(self, missing: Ability) -> str:
        """How to make a module portable or give it features."""
        if Ability.PORTABLE in missing:
            return (
                "Register its builder with codistill.register_architecture(name), and build it by that name; "
                f"or let it travel as ONNX: {portable_onnx.INSTALL}."
            )
        return (
            "End the module with an nn.Linear layer, or name the layer whose input is its features: "
            "TorchLearner(module, head=...)."
        )
