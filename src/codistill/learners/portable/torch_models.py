"""Torch models that travel: the name and options of a registered architecture, with its weights."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch

from codistill.learners import zoo
from codistill.message import Message

if TYPE_CHECKING:
    from codistill.learners.torch import TorchLearner

_OPTIONS_LIMIT = 10_000  # letters


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


def open_torch(message: Message, shape: tuple[int, ...], classes: int) -> TorchLearner:
    """The torch model in a message; anything unsound raises, in whatever way."""
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
