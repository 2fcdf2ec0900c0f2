"""Kernel models that travel, where their owner agrees: training inputs and coefficients."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

from sklearn.metrics.pairwise import PAIRWISE_KERNEL_FUNCTIONS

from codistill.message import Message

if TYPE_CHECKING:
    from codistill.learners.kernel_ridge import KernelRidge


def export_kernel(learner: KernelRidge) -> Message:
    """Inputs and coefficients; only called when the owner agreed to reveal the inputs."""
    state = learner.state()
    options = json.dumps(learner.kernel_options, sort_keys=True)
    plain = {"kind": "kernel", "kernel": learner.kernel, "options": options}
    return Message({"inputs": state["inputs"], "coefficients": state["coefficients"]}, plain)


def open_kernel(message: Message, shape: tuple[int, ...], classes: int) -> KernelRidge:
    """The kernel model in a message; anything unsound raises, in whatever way."""
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
