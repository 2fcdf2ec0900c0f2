"""Any `torch.nn.Module` as a learner, with all abilities."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from codistill.core.devices import HOST, check_device, in_host_memory
from codistill.core.errors import LearnerError
from codistill.core.settings import clear_argument_errors
from codistill.data.frames import Naming, listed, packed_parts
from codistill.data.shard import cut
from codistill.learners.ability import Ability
from codistill.learners.features import (
    Head,
    checked_head,
    find_head,
    head_in_sequence,
    linear_layers,
    unused,
    with_projection,
)
from codistill.learners.module_calls import CalledModule, ModuleCall, forward, logits, single_values_allowed
from codistill.learners.portable import onnx_models as portable_onnx
from codistill.learners.portable.models import check_registered, export_torch
from codistill.learners.trained_module import OPTIMISERS, MakeOptimiser, ShortSteps, TrainedModule
from codistill.wire.message import Message

PRECISIONS = ("full", "mixed")
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

# Rows per forward pass of `predict`. Small chunks stay in the cache; a fixed size keeps results equal
# to the bit, since the kernels chosen (and so the last digits) depend on it.
_CHUNK = 250


# Losses of real values: what they are of is no input of a softmax.
_OF_REAL_VALUES = {
    nn.MSELoss: nn.functional.mse_loss,
    nn.L1Loss: nn.functional.l1_loss,
    nn.SmoothL1Loss: nn.functional.smooth_l1_loss,
    nn.HuberLoss: nn.functional.huber_loss,
    nn.PoissonNLLLoss: nn.functional.poisson_nll_loss,
    nn.GaussianNLLLoss: nn.functional.gaussian_nll_loss,
}
_LOSSES: dict[str, Loss] = {"cross_entropy": nn.functional.cross_entropy, "squared": nn.functional.mse_loss}


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

    The module's forward returns a tensor, a table or an object with `logits`, or a tuple whose first item is the
    logits. A module that takes whole numbers only, such as token ids, gets them; samples that were given as a table of
    arrays go to its arguments of these names.
    """

    @clear_argument_errors
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
            raise LearnerError(
                "loss must be cross_entropy, squared or a function.",
                repr(loss),
                'Write loss="squared" for real values.',
            )
        if isinstance(optimiser, str) and optimiser not in OPTIMISERS:
            raise LearnerError(
                f"optimiser must be one of {', '.join(OPTIMISERS)}, or a function of the parameters.",
                repr(optimiser),
                'Write optimiser="adam", or lambda parameters: torch.optim.RMSprop(parameters).',
            )
        if precision not in PRECISIONS:
            raise LearnerError("precision must be full or mixed.", repr(precision), 'Write precision="full".')
        if device is not None:
            check_device(device)
        lazy = [name for name, each in module.named_parameters() if nn.parameter.is_lazy(each)]
        if lazy:
            raise LearnerError(
                "All weights of a torch module must exist before a run.",
                f"'{lazy[0]}' of a lazy layer",
                "Make them by a first pass of some samples: module(x[:2]).",
            )
        self.named_head = head if head is None else checked_head(module, head)  # None: found by the first samples
        self._projected: str | None = None  # the head that a projection was put before, to be checked
        self._head: Head | None = None
        if projection is not None:
            module, projected = with_projection(module, projection, head)
            self.named_head, self._projected = (None, projected) if head is None else (projected, None)
        options = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum}
        super().__init__(module, optimiser, options, device, precision)
        self.probabilistic = loss == "cross_entropy"
        function = loss.func if isinstance(loss, partial) else loss
        by_itself = isinstance(function, tuple(_OF_REAL_VALUES)) or function in _OF_REAL_VALUES.values()
        self.real_valued = loss == "squared" or by_itself
        self.epochs, self.batch_size, self.warm = epochs, batch_size, warm
        self._loss = _LOSSES[loss] if isinstance(loss, str) else loss
        self.abilities = Ability.PREDICT | Ability.GRADIENTS | Ability.WEIGHTS
        if linear_layers(module):  # whether one of them is the head: see `check`
            self.abilities |= Ability.FEATURES
        self.sample_shape: tuple[int, ...] | None = None  # of what it has seen last
        self.call = ModuleCall()
        self._has_passed = False  # whether the module has taken samples that way
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
        run = partial(self._outputs, self._called)
        try:
            found = self._evaluated(run, x)
        except Exception as error:  # the module is its owner's code, and may fail in any way
            if self._has_passed or (x != np.floor(x)).any():
                raise
            self.call = ModuleCall(whole=True)
            try:
                found = self._evaluated(run, x)
            except Exception:
                self.call = ModuleCall()
                raise error from None
        self._has_passed = True
        return found

    def of_one_tensor(self) -> nn.Module:
        """The module in host memory, or one around it where it takes or returns more than one tensor."""
        module = self.module_in_host_memory().eval()
        plain = self.call == ModuleCall() and isinstance(
            module(torch.zeros(2, *(self.sample_shape or ()))), torch.Tensor
        )
        return module if plain else CalledModule(self.call, module)

    def _called(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(self.module, x)

    def take_names(self, naming: Naming, x: np.ndarray) -> None:
        """Samples that were given as a table of arrays go to the arguments of these names."""
        parts = packed_parts(naming.columns) if naming.by_argument else {}
        if not parts:
            return  # one tensor of columns, whose names are its owner's
        arguments = inspect.signature(self.module.forward).parameters.values()
        known = [each.name for each in arguments if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
        unknown = [name for name in parts if name not in known]
        if unknown and not any(each.kind is each.VAR_KEYWORD for each in arguments):
            raise LearnerError(
                f"forward of {self.describe()} of {naming.owner} must take {listed(unknown)}, as its samples have it.",
                f"it takes {listed(known)}",
                "Leave the others out of the samples, or name them as the module does.",
            )

        def is_whole(columns: int | list[int]) -> bool:
            first = columns if isinstance(columns, int) else columns[0]
            return naming.dtypes[naming.columns[first]].kind in "iub"

        self.call = ModuleCall(parts=tuple((name, columns, is_whole(columns)) for name, columns in parts.items()))

    def _evaluated(self, run: Callable[[torch.Tensor], torch.Tensor], x: np.ndarray) -> torch.Tensor:
        self.module.eval()
        inputs = self.tensor(x)
        with torch.inference_mode():
            # A copy of each chunk: a module that works in place must not change its owner's samples.
            chunks = (inputs[i : i + _CHUNK] for i in range(0, max(len(inputs), 1), _CHUNK))
            return torch.cat([run(chunk.clone() if self._place == HOST else self._uploaded(chunk)) for chunk in chunks])

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
        return self._outputs(partial(forward, self.call, self.module), self._uploaded(x))

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self._loss(outputs, self._uploaded(targets))

    def descend(self, loss: torch.Tensor) -> None:
        """One optimiser step; its state (Adam's moments) is kept across rounds."""
        optimiser = self.optimiser
        if self._place == HOST and isinstance(self._make_optimiser, str):
            if self._short_steps is None or self._short_steps.optimiser is not optimiser:
                self._short_steps = ShortSteps(optimiser)
            self._short_steps.descend(loss)
            return
        optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()

    def snapshot(self, *, training: bool = False) -> Callable[[torch.Tensor], torch.Tensor]:
        frozen = self._copies.take(training=training)
        return lambda x: self._outputs(partial(forward, self.call, frozen.module), self._uploaded(x))

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
                head = find_head(self.module, sample, self.named_head, partial(self._outputs, self._called))
            if head is None and self.named_head is not None:
                raise unused(self.describe(), self.named_head)
            if head is None:
                must = "Features need a linear layer at the end, whose output is the module's output."
                do = "Add an nn.Linear, or name the layer whose input is the features: TorchLearner(module, head=...)."
                raise LearnerError(must, self.describe(), do)
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
        return self._with_head_input(partial(forward, self.call, self.module), self._uploaded(x))[1]

    def with_features(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs before the softmax and features, of one pass in training mode."""
        outputs, features = self._with_head_input(self, x)
        return outputs, features.flatten(1)

    def evaluated_features(self, x: np.ndarray) -> np.ndarray:
        features = self._evaluated(lambda chunk: self._with_head_input(self._called, chunk)[1].flatten(1), x)
        return features.cpu().numpy()

    def _with_head_input(
        self, run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What `run` gives for x, and what the head got meanwhile."""
        head, caught = self._found_head(self._uploaded(x)), list[torch.Tensor]()

        def catch(_: nn.Module, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> None:
            caught.append(inputs[0] if inputs else named["input"])

        hook = self.module.get_submodule(head.name).register_forward_pre_hook(catch, with_kwargs=True)
        try:
            outputs = self._outputs(run, x)
        finally:
            hook.remove()
        if len(caught) < -head.call:
            raise unused(self.describe(), head.name)
        features = caught[head.call]
        return outputs, features.float() if self.precision == "mixed" else features

    # --- WEIGHTS ------------------------------------------------------------------------------

    @cached_property
    def batch_norm(self) -> frozenset[str]:
        norms = {name: part for name, part in self.module.named_modules() if isinstance(part, _BatchNorm)}
        return frozenset(f"{name}.{key}" if name else key for name, norm in norms.items() for key in norm.state_dict())

    def parameters(self) -> dict[str, torch.Tensor]:
        return {name: each for name, each in self.module.named_parameters() if each.requires_grad}

    def gradient_at(self, weights: dict[str, np.ndarray], x: torch.Tensor, loss: Loss) -> dict[str, np.ndarray]:
        """The gradient of loss(Φ(x; w), Φ(x; w_k)) by w; of a weight that layers share it is the sum over these."""
        x = self._uploaded(x)
        self.module.eval()
        for part in self.module.modules():
            if isinstance(part, _BatchNorm):
                part.train()
        trained = self.parameters()
        given = {name: tensor.requires_grad_(name in trained) for name, tensor in self._given(weights).items()}
        with torch.no_grad():
            own = self._outputs_of({}, x)
        value = loss(self._outputs_of(given, x), own)
        wanted = {name: tensor for name, tensor in given.items() if name in trained}
        found = torch.autograd.grad(value, list(wanted.values()), allow_unused=True) if wanted else ()
        arrays = {name: each.cpu().numpy() for name, each in zip(wanted, found, strict=True) if each is not None}
        floating = {name: array for name, array in weights.items() if array.dtype.kind == "f"}
        return {
            name: arrays.get(self._first_names.get(name, name), np.zeros(array.shape, array.dtype))
            for name, array in floating.items()
        }

    def outputs_at(self, weights: dict[str, np.ndarray], x: torch.Tensor) -> np.ndarray:
        self.module.eval()
        with torch.no_grad():
            return self._outputs_of(self._given(weights), self._uploaded(x)).cpu().numpy()

    def _outputs_of(self, given: Mapping[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """Outputs with the given weights, and the module's own for others, on copies of its buffers: norms write."""
        module = self.module
        tensors = {name: buffer.clone() for name, buffer in module.named_buffers() if name not in given} | dict(given)
        places = {place: tensors[name] for place, name in _places(module).items() if name in tensors}
        with single_values_allowed(module, x):
            # What layers share is put into each of them here: torch would not take it out of a layer with two names.
            return logits(functional_call(module, places, *self.call.arguments(x), tie_weights=False))

    def _given(self, weights: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
        """Copies of weights, one that layers share under its first name alone; kernels as convolutions take them."""
        given = {}
        for name, array in weights.items():
            tensor = torch.tensor(array, device=self._place)
            if tensor.dim() == 4:
                tensor = tensor.contiguous(memory_format=torch.channels_last)
            given[self._first_names.get(name, name)] = tensor
        return given

    # --- travel, checks -------------------------------------------------------------------------

    def export(self) -> Message:
        """A registered architecture's name and options, with the weights; any other module as ONNX."""
        if self.travels_by_name:
            return export_torch(self)
        return portable_onnx.graph_message(portable_onnx.module_graph(self), self.describe())

    @property
    def travels_by_name(self) -> bool:
        """Whether its architecture is registered; a receiver calls that with one tensor."""
        return hasattr(self.module, "architecture") and not self.call.parts

    def describe(self) -> str:
        """The architecture's registered name, or the module's class."""
        known = getattr(self.module, "architecture", None)
        return str(known.name) if known is not None else type(self.module).__name__

    def check(self, x: np.ndarray, targets: np.ndarray, owner: str) -> None:
        """One forward pass must give one column per class; a module in which it finds no head has no features."""
        trained = [each.requires_grad for each in self.module.parameters()]
        if trained and not any(trained):
            raise LearnerError(
                f"The module of agent '{owner}' must have weights to train.",
                f"{self.describe()}, of which all weights are frozen",
                "Let its last layer learn: module.head.requires_grad_(True).",
            )
        try:
            outputs = self.outputs(x[:2])
            found = tuple(outputs.shape)
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
        if self.probabilistic and wanted[1] > 1 and outputs.min() > 0 and (outputs.sum(dim=1) - 1).abs().max() < 1e-5:
            warnings.warn(
                f"The module of agent '{owner}' gives probabilities; remove its final softmax: the loss has one.",
                stacklevel=2,
            )
        if Ability.FEATURES not in self.abilities:
            return
        try:
            self._found_head(self._uploaded(self.tensor(x[:2])))
        except Exception as error:  # the pass above worked: to follow it may fail, as in code that torch has compiled
            if isinstance(error, LearnerError) and (self.named_head is not None or self._projected is not None):
                raise  # its owner wants features, of a layer that gives none
            self.abilities &= ~Ability.FEATURES

    def check_travel(self, x: np.ndarray, owner: str) -> None:
        """A module must be one that receivers accept; if its architecture is not registered, ONNX must express it."""
        if self.travels_by_name:
            check_registered(self, owner)
        else:
            portable_onnx.check_module(self, x, owner)

    def advice(self, missing: Ability) -> str:
        if Ability.PORTABLE in missing:
            return (
                "Register its builder with codistill.register_architecture(name), and build it by that name; "
                f"or let it travel as ONNX: {portable_onnx.INSTALL}."
            )
        return (
            "End the module with an nn.Linear layer, or name the layer whose input is its features: "
            "TorchLearner(module, head=...)."
        )


# --- A module evaluated with other weights than its own, which it keeps.


def _places(module: nn.Module) -> dict[str, str]:
    """Where parameters and buffers are, each layer under its first name, and the first name of what is there."""
    names: dict[int, str] = {}
    places = {}
    for prefix, part in module.named_modules():
        parameters = part.named_parameters(prefix, recurse=False, remove_duplicate=False)
        for place, tensor in (*parameters, *part.named_buffers(prefix, recurse=False, remove_duplicate=False)):
            places[place] = names.setdefault(id(tensor), place)
    return places
