"""Torch models that travel: the name and options of a registered architecture, with its weights."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from codistill.learners import zoo
from codistill.learners.portable.model_limits import Cost
from codistill.message import Message

if TYPE_CHECKING:
    from codistill.learners.torch import TorchLearner

_OPTIONS_LIMIT = 10_000  # letters
_ELEMENT = 100  # operations per element that is read or written


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


def open_torch(message: Message, shape: tuple[int, ...], classes: int) -> tuple[TorchLearner, Callable[[int], Cost]]:
    """The torch model in a message, and what its predictions take; anything unsound raises, in whatever way."""
    from codistill.learners.torch import CHUNK, TorchLearner

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
    row = _count(plain["name"], shape, classes, plain["options"])
    row.check()
    module = zoo.build(plain["name"], shape, classes, **options)
    _compare(found, module)
    learner = TorchLearner(module, loss="cross_entropy" if plain["probabilistic"] is True else "squared")
    learner.load(message.arrays)
    return learner, lambda rows: Cost(rows, rows * row.operations, min(rows, CHUNK) * row.memory)


def _compare(found: dict[str, tuple[int, ...]], module: torch.nn.Module) -> None:
    if found != {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}:
        raise ValueError("weights that do not fit the architecture")


@functools.lru_cache(maxsize=64)
def _count(name: str, shape: tuple[int, ...], classes: int, options: str) -> Cost:
    """What a row takes in a registered architecture: run on the meta device, which computes nothing."""
    sizes, products = [0], FlopCounterMode(display=False)

    def add(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        sizes.extend(tensor.numel() for tensor in (*inputs, output) if isinstance(tensor, torch.Tensor))

    with torch.device("meta"), torch.inference_mode():
        module = zoo.build(name, shape, classes, **json.loads(options)).eval()
        for part in module.modules():
            part.register_forward_hook(add)
        try:
            with products:
                module(torch.zeros(1, *shape))
        except Exception:  # a user's own architecture may look at values: it cannot be counted
            return Cost(1, 0)
    # What a block holds at a time: its input, its output and what is between.
    return Cost(1, products.get_total_flops() + _ELEMENT * sum(sizes), 4 * 4 * max(sizes))
