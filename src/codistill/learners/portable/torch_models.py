"""Torch models that travel: the name and options of a registered architecture, with its weights."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from codistill.errors import LearnerError
from codistill.learners import zoo
from codistill.learners.module_memory import distinct_tensors
from codistill.learners.portable.model_limits import Cost
from codistill.message import Message
from codistill.on_device import current_device, in_host_memory

if TYPE_CHECKING:
    from codistill.learners.torch import TorchLearner

_OPTIONS_LIMIT = 10_000  # letters
_CHUNK = 250  # rows per forward pass of a TorchLearner
_ELEMENT = 100  # operations per element that is read or written
_HELD = 16  # bytes per value of the widest layer: its input, its output and what is between are held at a time


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
    if learner.named_head is not None:  # any other is found by the samples, there as here
        plain["head"] = learner.named_head
    return Message(learner.weights(), plain)


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


def open_torch(message: Message, shape: tuple[int, ...], classes: int) -> tuple[TorchLearner, Callable[[int], Cost]]:
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
) -> Callable[[int], Cost]:
    """What predictions for some rows take."""
    # At most every weight at every place of a sample, and there as many values as the widest convolution has.
    places, sides = max(shape[0], math.prod(shape[1:])), [(1,), *filter(None, weights)]
    values = max(side[0] * places if len(side) > 2 else max(side) for side in sides)
    most = Cost(1, 2 * places * sum(map(math.prod, sides)), _HELD * values)

    def cost(rows: int) -> Cost:
        taken = _times(most, rows)
        # Layers that make images smaller take far less. To count exactly takes seconds, the first time.
        return taken if taken.is_within_limits() else _times(_count(name, shape, classes, options), rows)

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
