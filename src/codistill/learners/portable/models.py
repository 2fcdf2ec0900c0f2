"""How much a received model may compute and hold, found before it runs for the first time.

An operation stands for a tenth of a nanosecond of one processor of 2024, rounded up: a multiplication with an addition
in a product of matrices counts 2, the sine of a number 100. What counts how much was measured, and is coarse: the
limits are far above honest models, and far below what would stop a receiver. They do not depend on the machine, so a
model is refused everywhere or nowhere.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from codistill.core.devices import current_device, in_host_memory
from codistill.core.errors import LearnerError
from codistill.learners import zoo
from codistill.learners.trained_module import distinct_tensors, frozen_tensors
from codistill.wire.message import Message

if TYPE_CHECKING:
    from codistill.learners.kernel_ridge import KernelRidge
    from codistill.learners.torch import TorchLearner

ROW_OPERATIONS = 20_000_000_000  # per row: about a second. A ResNet-34 for images of 32 x 32 has 2,600,000,000
CALL_OPERATIONS = 20_000_000_000_000  # for all rows of the receiver: about a quarter of an hour
MEMORY = 1 << 30  # bytes of intermediate results
BLOCK = 1 << 22  # numbers in one block of intermediate results, where rows are predicted in blocks


@dataclass(frozen=True)
class Cost:
    """What predictions for some rows take."""

    rows: int
    operations: int
    memory: int = 0  # bytes of intermediate results that are held at a time

    def check(self) -> None:
        """Raise ValueError, with the figure and the limit, if a model computes or holds too much."""
        per_row = self.operations // max(self.rows, 1)
        if per_row > ROW_OPERATIONS:
            raise ValueError(f"a model of {per_row:,} operations per row, above the limit of {ROW_OPERATIONS:,}")
        if self.operations > CALL_OPERATIONS:
            raise ValueError(f"a model of {self.operations:,} operations in all, above {CALL_OPERATIONS:,}")
        if self.memory > MEMORY:
            raise ValueError(f"a model that holds {self.memory:,} bytes for {self.rows} rows, above {MEMORY:,}")


CostOfRows = Callable[[int], Cost]  # what predictions for some rows take


# --- Constant models that travel: the class frequencies of an agent whose model could not be fitted yet.

_TOLERANCE = 1e-3  # by which received frequencies may miss a sum of 1: they are rounded to 32 bits, or compressed


@dataclass(frozen=True)
class ConstantModel:
    """Predicts the same class frequencies for every sample."""

    frequencies: np.ndarray

    def predict(self, x: np.ndarray) -> np.ndarray:
        return np.tile(self.frequencies, (len(x), 1))


def class_frequencies(targets: np.ndarray) -> np.ndarray:
    """The share of each class in soft labels (n, C); all classes alike where they have no mass."""
    mass = targets.sum(axis=0, dtype=np.float64)
    shares = mass / mass.sum() if mass.sum() > 0 else np.full(len(mass), 1 / len(mass))
    return np.asarray(shares, dtype=np.float32)


def export_constant(frequencies: np.ndarray) -> Message:
    return Message({"frequencies": frequencies}, {"kind": "constant"})


def open_constant(message: Message, shape: tuple[int, ...], classes: int) -> tuple[ConstantModel, CostOfRows]:
    """The constant model in a message, and what its predictions take; anything unsound raises."""
    frequencies = np.asarray(message.arrays["frequencies"], dtype=np.float32)
    if frequencies.shape != (classes,):
        raise ValueError(f"class frequencies of shape {frequencies.shape} for {classes} classes")
    # "not <=": a comparison with NaN is False.
    if not frequencies.min() >= 0 or not abs(float(frequencies.sum(dtype=np.float64)) - 1) <= _TOLERANCE:
        raise ValueError("class frequencies that are negative, or whose sum is not 1")
    return ConstantModel(frequencies), lambda rows: Cost(rows, rows * classes)


# --- Kernel models that travel, where their owner agrees: training inputs and coefficients.

_LOOPS = frozenset({"additive_chi2", "chi2", "laplacian"})  # kernels that are not products of matrices


def export_kernel(learner: KernelRidge) -> Message:
    """Inputs and coefficients; only called when the owner agreed to reveal the inputs."""
    state = learner.state()
    options = json.dumps(learner.kernel_options, sort_keys=True)
    plain = {"kind": "kernel", "kernel": learner.kernel, "options": options}
    return Message({"inputs": state["inputs"], "coefficients": state["coefficients"]}, plain)


def open_kernel(message: Message, shape: tuple[int, ...], classes: int) -> tuple[KernelRidge, CostOfRows]:
    """The kernel model in a message, and what its predictions take; anything unsound raises, in whatever way."""
    from sklearn.metrics.pairwise import PAIRWISE_KERNEL_FUNCTIONS

    from codistill.learners.kernel_ridge import KernelRidge

    inputs, coefficients = message.arrays["inputs"], message.arrays["coefficients"]
    if inputs.shape[1:] != (math.prod(shape),) or coefficients.shape != (len(inputs), classes):
        raise ValueError("a kernel model for other samples or classes")
    options = json.loads(message.plain["options"])
    if message.plain["kernel"] not in PAIRWISE_KERNEL_FUNCTIONS or not options.keys() <= {"gamma", "degree", "coef0"}:
        raise ValueError(f"a kernel {message.plain['kernel']!r} with options {sorted(options)}")
    if inputs.dtype.kind != "f" or coefficients.dtype.kind != "f" or len(inputs) > BLOCK:
        raise ValueError(f"{len(inputs)} inputs of type {inputs.dtype}, where at most {BLOCK} floats are taken")
    model = KernelRidge(message.plain["kernel"], **options)
    numbers = {"inputs": np.asarray(inputs, np.float64), "coefficients": np.asarray(coefficients, np.float64)}
    model.restore({**numbers, "samples": None})
    # A row takes the kernel with every input, times its coefficients.
    each = len(inputs) * (100 + (50 if model.kernel in _LOOPS else 4) * inputs.shape[1] + 2 * classes)
    return model, lambda rows: Cost(rows, rows * each, 8 * min(rows * len(inputs), BLOCK))


# --- Torch models that travel: the name and options of a registered architecture, with its weights.

_OPTIONS_LIMIT = 10_000  # letters
_CHUNK = 250  # rows per forward pass of a TorchLearner
_ELEMENT = 100  # operations per element that is read or written
_HELD = 16  # bytes per value of the widest layer: its input, its output and what is between are held at a time


def export_torch(learner: TorchLearner) -> Message:
    known: zoo.Architecture = learner.module.architecture  # type: ignore[assignment]
    plain = {
        "kind": "torch",
        "name": known.name,
        "shape": list(known.shape),
        "classes": known.classes,
        "options": json.dumps(dict(known.options), sort_keys=True),
        "probabilistic": learner.probabilistic,
    }
    if learner.named_head is not None:  # any other is found by the samples, there as here
        plain["head"] = learner.named_head
    frozen = {name: tensor.numpy(force=True).copy() for name, tensor in frozen_tensors(learner.module).items()}
    return Message(learner.weights() | frozen, plain)


def check_registered(learner: TorchLearner, owner: str) -> None:
    """Before round 0: a model that receivers would refuse as too large is an error of its owner."""
    known: zoo.Architecture = learner.module.architecture  # type: ignore[assignment]
    sizes = [tuple(tensor.shape) for tensor in distinct_tensors(learner.module).values()]
    options = json.dumps(dict(known.options), sort_keys=True)
    try:
        _cost(known.name, known.shape, known.classes, options, sizes)(_CHUNK).check()
    except ValueError as error:
        raise LearnerError(
            f"The module of agent '{owner}' must be within the limits of models that travel.",
            str(error),
            "Use a smaller architecture, or smaller samples; or a protocol in which no models travel.",
        ) from None


def open_torch(message: Message, shape: tuple[int, ...], classes: int) -> tuple[TorchLearner, CostOfRows]:
    """The torch model in a message, and what its predictions take; anything unsound raises, in whatever way."""
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
        with in_host_memory(), torch.device("meta"):
            _compare(found, zoo.build(plain["name"], shape, classes, **options))
    cost = _cost(plain["name"], shape, classes, plain["options"], found.values())
    cost(_CHUNK).check()
    with in_host_memory():
        module = zoo.build(plain["name"], shape, classes, **options)
        _compare(found, module)
        loss = "cross_entropy" if plain["probabilistic"] is True else "squared"
        learner = TorchLearner(module, loss=loss, head=plain.get("head"))
        learner.load(message.arrays)
    here = current_device()
    if here is not None:  # it predicts where its receiver computes
        learner.assigned = str(here)
        learner.place()
    return learner, cost


def _compare(found: dict[str, tuple[int, ...]], module: torch.nn.Module) -> None:
    if found != {name: tuple(tensor.shape) for name, tensor in distinct_tensors(module).items()}:
        raise ValueError("weights that do not fit the architecture")


def _cost(
    name: str, shape: tuple[int, ...], classes: int, options: str, weights: Iterable[tuple[int, ...]]
) -> CostOfRows:
    # At most every weight at every place of a sample, and there as many values as the widest convolution has.
    places, sides = max(shape[0], math.prod(shape[1:])), [(1,), *filter(None, weights)]
    values = max(side[0] * places if len(side) > 2 else max(side) for side in sides)
    most = Cost(1, 2 * places * sum(map(math.prod, sides)), _HELD * values)

    def cost(rows: int) -> Cost:
        taken = _times(most, rows)
        try:
            taken.check()
        except ValueError:  # layers that make images smaller take far less: counting takes seconds, the first time
            return _times(_count(name, shape, classes, options), rows)
        return taken

    return cost


def _times(row: Cost, rows: int) -> Cost:
    return Cost(rows, rows * row.operations, min(rows, _CHUNK) * row.memory)


@functools.lru_cache(maxsize=64)
def _count(name: str, shape: tuple[int, ...], classes: int, options: str) -> Cost:
    """What a row takes in a registered architecture: run on the meta device, which computes nothing."""
    sizes, products = [0], FlopCounterMode(display=False)

    def add(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        sizes.extend(tensor.numel() for tensor in (*inputs, output) if isinstance(tensor, torch.Tensor))

    with in_host_memory(), torch.device("meta"), torch.inference_mode():
        module = zoo.build(name, shape, classes, **json.loads(options)).eval()
        for part in module.modules():
            part.register_forward_hook(add)
        try:
            with products:
                module(torch.zeros(1, *shape))
        except Exception:  # a user's own architecture may look at values: it cannot be counted
            return Cost(1, 0)
    return Cost(1, products.get_total_flops() + _ELEMENT * sum(sizes), _HELD * max(sizes))
