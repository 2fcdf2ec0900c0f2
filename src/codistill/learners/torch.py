"""Any `torch.nn.Module` as a learner, with all abilities."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import nn

from codistill.arguments import checked_arguments
from codistill.data.shard import cut
from codistill.devices import check_device, has_mixed_precision, resolved
from codistill.errors import LearnerError
from codistill.learners.ability import Ability, GradientLearner
from codistill.learners.batch_norm import forward, names_of_batch_norm
from codistill.learners.given_weights import gradient_at
from codistill.learners.module_memory import FreedTensor, bytes_of, free, initial_values
from codistill.learners.optimisers import OPTIMISERS, MakeOptimiser, lay_out_alike, make_optimiser, moments_of
from codistill.learners.portable import onnx_models as portable_onnx
from codistill.learners.projection import with_projection
from codistill.learners.tensors import all_finite, copied, moments_in
from codistill.message import Message
from codistill.on_device import HOST, OnDevice, in_host_memory

PRECISIONS = ("full", "mixed")
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

# Rows per forward pass of `predict`. Small chunks stay in the cache; a fixed size keeps results equal
# to the bit, since the kernels chosen (and so the last digits) depend on it.
_CHUNK = 250


def _mean_squared(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(outputs, targets)


_LOSSES: dict[str, Loss] = {"cross_entropy": nn.functional.cross_entropy, "squared": _mean_squared}


class TorchLearner(GradientLearner):
    """A module with its own loss, optimiser, epochs and batch size.

    `loss` is "cross_entropy", "squared" or a function of (outputs, targets); `optimiser` is "adam",
    "adamw", "sgd" or a function of the parameters. `fit` starts from a fresh initialisation unless
    `warm`; steps taken by a protocol through `descend` always continue from the current weights. `projection`: a linear
    layer to so many features before the last layer, for protocols that compare features. `device` is "cpu", "cuda",
    "cuda:1", "mps", or "auto", a GPU where there is one; unset: what the run says. The module moves there when it first
    trains. `precision`: "mixed" computes outputs in bfloat16 where the device can; weights and losses are float32.
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
        if projection is not None:
            module = with_projection(module, projection)
        first = next(module.parameters(), torch.empty(0))
        if first.device.type not in ("cpu", "meta"):  # its owner has chosen; until it trains, it waits in host memory
            device, module = device or str(first.device), module.to(HOST)
        self.module = module
        self.device = device  # as its owner says; None: as the run says
        self.assigned: str | None = None  # the device that a run has chosen for it
        self.precision = precision
        self._place = HOST  # where the module is
        self._placed_by: tuple[str | None, str | None] | None = None  # by what that was said
        self.probabilistic = loss == "cross_entropy"
        self.epochs, self.batch_size, self.warm = epochs, batch_size, warm
        self._loss = _LOSSES[loss] if isinstance(loss, str) else loss
        self._make_optimiser = optimiser
        self._lr, self._weight_decay, self._momentum = lr, weight_decay, momentum
        self._optimiser: torch.optim.Optimizer | None = None
        self._initial = initial_values(module)
        self._freed: list[FreedTensor] = []
        self._channels_last = any(isinstance(part, nn.Conv2d) for part in module.modules())
        if self._channels_last:
            module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.abilities = Ability.PREDICT | Ability.GRADIENTS | Ability.WEIGHTS
        if self._head() is not None:
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
        optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()

    def set_lr(self, factor: float, lr: float | None = None) -> None:
        """Set the learning rate of all parameters; the owner's own is kept beside it."""
        for group in self.optimiser.param_groups:
            own = group.setdefault("own_lr", group["lr"])
            group["lr"] = factor * (own if lr is None else lr)

    @property
    def optimiser(self) -> torch.optim.Optimizer:
        """The optimiser, made when first needed."""
        if self._optimiser is None:
            self._optimiser = make_optimiser(
                self._make_optimiser,
                self.module.parameters(),
                lr=self._lr,
                weight_decay=self._weight_decay,
                momentum=self._momentum,
            )
        return self._optimiser

    def snapshot(self, *, training: bool = False) -> Callable[[torch.Tensor], torch.Tensor]:
        """A frozen copy; in training mode its batch norm sees a batch as the model itself does."""
        frozen = copy.deepcopy(self.module).train(training).requires_grad_(False)
        return lambda x: self._outputs(partial(forward, frozen), self._uploaded(x))

    def reset(self) -> None:
        """Fresh parameters: every layer's own initialisation; what has none returns to its first value."""
        # Drawn in host memory: the same initial weights on every device.
        with in_host_memory():
            module = self.module_in_host_memory()
            if self._initial:
                module.load_state_dict(self._initial, strict=False)
            for part in module.modules():
                if hasattr(part, "reset_parameters"):
                    part.reset_parameters()  # type: ignore[operator]
            if module is not self.module:
                self.module.load_state_dict(module.state_dict())
        self._optimiser = None

    # --- FEATURES -----------------------------------------------------------------------------

    def _head(self) -> nn.Linear | None:
        linears = [part for part in self.module.modules() if isinstance(part, nn.Linear)]
        return linears[-1] if linears else None

    @property
    def head(self) -> nn.Linear:
        """The last linear layer."""
        head = self._head()
        if head is None:
            raise LearnerError("Features need a linear layer at the end.", self.describe(), "Add an nn.Linear.")
        return head

    def features(self, x: torch.Tensor) -> torch.Tensor:
        """The input of the last linear layer, with a graph, in the mode the module is in."""
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
        caught: list[torch.Tensor] = []
        hook = self.head.register_forward_pre_hook(lambda _, inputs: caught.append(inputs[0]))
        try:
            outputs = self._outputs(run, x)
        finally:
            hook.remove()
        if not caught:
            raise LearnerError(
                "Features need a linear layer that every sample passes at the end.",
                f"{self.describe()} does not use its last one",
                "Remove that layer, or use it.",
            )
        return outputs, caught[0].float() if self.precision == "mixed" else caught[0]

    # --- WEIGHTS ------------------------------------------------------------------------------

    @cached_property
    def _tensors(self) -> dict[str, torch.Tensor]:
        return dict(self.module.state_dict(keep_vars=True))

    def weights(self) -> dict[str, np.ndarray]:
        """A copy of all parameters and buffers."""
        if self._place != HOST:
            return {name: tensor.detach().cpu().numpy() for name, tensor in self._tensors.items()}
        return {name: tensor.detach().numpy().copy() for name, tensor in self._tensors.items()}

    def is_finite(self) -> bool:
        """Parameters, buffers and moments."""
        return all_finite([*self._tensors.values(), *moments_in(self._optimiser)])

    def has_finite_weights(self) -> bool:
        """Parameters and buffers."""
        return all_finite(self._tensors.values())

    def load(self, weights: dict[str, np.ndarray]) -> None:
        """Take over parameters and buffers; names left out keep their values."""
        own = self._tensors
        for name, value in weights.items():
            if name not in own or tuple(own[name].shape) != np.shape(value):
                raise LearnerError(
                    f"Weights must fit {self.describe()} by name and shape.",
                    f"'{name}' of shape {np.shape(value)}",
                    "Give every agent the same architecture.",
                )
        if self._place != HOST:
            with torch.no_grad(), in_host_memory():
                for name, value in weights.items():
                    own[name].copy_(torch.tensor(value))
            return
        for name, value in weights.items():
            # A view: half the time of a detour by torch. Means of counters are floats, the counters are not.
            np.copyto(own[name].detach().numpy(), value, casting="unsafe")

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

    # --- the device ---------------------------------------------------------------------------

    def place(self) -> None:
        """Move the module, and the optimiser's state, to the device: called in the process that trains it."""
        said = self.assigned, self.device
        if said == self._placed_by:
            return
        target, self._placed_by = resolved(self.assigned or self.device), said
        if target == self._place:
            return
        memory = self._optimiser.state_dict() if self._optimiser else None
        with in_host_memory():
            self.module.to(target)
            self._place = target
            self.__dict__.pop("_tensors", None)
            self._restore_optimiser(memory)

    def computing(self) -> AbstractContextManager[Any]:
        """While it is entered, torch computes in this thread where the module is."""
        return nullcontext() if self._place == HOST else OnDevice(self._place)

    def _uploaded(self, x: torch.Tensor) -> torch.Tensor:
        return x if self._place == HOST else x.to(self._place)

    def _copied(self, x: torch.Tensor) -> torch.Tensor:
        return x.clone() if self._place == HOST else x.to(self._place)

    def module_in_host_memory(self) -> nn.Module:
        """The module or, where it is on a device, a copy."""
        return self.module if self._place == HOST else copy.deepcopy(self.module).to(HOST)

    def _outputs(self, run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """What a module gives, in the precision that was chosen; float32 in any case."""
        if self.precision == "full" or not has_mixed_precision(self._place):
            return run(x)
        with torch.autocast(self._place.type, dtype=torch.bfloat16):
            return run(x).float()

    # --- state, travel, checks ----------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Weights and the optimiser's state."""
        memory = self._optimiser.state_dict() if self._optimiser else None
        return {"weights": dict(self.module.state_dict()), "optimiser": memory}

    def restore(self, state: dict[str, Any]) -> None:
        """Return to saved weights and optimiser state."""
        while self._freed:
            self._freed.pop().allocate()
        self.module.load_state_dict(state["weights"])
        self._restore_optimiser(state["optimiser"])

    def _restore_optimiser(self, memory: dict[str, Any] | None) -> None:
        self._optimiser = None
        if memory is not None:
            self.optimiser.load_state_dict(memory)
            lay_out_alike(self.optimiser)

    def kept(self) -> Callable[[], None]:
        """By copies of the tensors alone, without the tables of `state`: this is done in every round."""
        optimiser = self._optimiser
        if optimiser is None:
            return super().kept()
        weights, moments = copied(self._tensors), [copied(table) for table in optimiser.state.values()]
        parameters = list(optimiser.state)
        groups = [{name: item for name, item in group.items() if name != "params"} for group in optimiser.param_groups]

        def go_back() -> None:
            with torch.no_grad():
                for name, value in weights.items():
                    self._tensors[name].copy_(value)
            optimiser.state.clear()
            optimiser.state.update(zip(parameters, copied(moments), strict=True))
            for group, before in zip(optimiser.param_groups, groups, strict=True):
                group.update(before)
            self._optimiser = optimiser

        return go_back

    def set_aside(self) -> None:
        """Free the memory of the weights and of the optimiser's state."""
        self._optimiser = None
        if not self._freed:
            self._freed = free(self.module)

    def memory(self) -> tuple[int, int]:
        """Bytes of the weights, and of the moments of its optimiser."""
        weights = bytes_of(self.module)
        return weights, moments_of(self._make_optimiser, self._momentum) * weights

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
        return "End the module with an nn.Linear layer."
