"""Kernel models that travel, where their owner agrees: training inputs and coefficients."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from codistill.learners.portable.model_limits import BLOCK, Cost
from codistill.message import Message

if TYPE_CHECKING:
    from codistill.learners.kernel_ridge import KernelRidge

_LOOPS = frozenset({"additive_chi2", "chi2", "laplacian"})  # kernels that are not products of matrices


def export_kernel(learner: KernelRidge) -> Message:
    """Inputs and coefficients; only called when the owner agreed to reveal the inputs."""
    state = learner.state()
    options = json.dumps(learner.kernel_options, sort_keys=True)
    plain = {"kind": "kernel", "kernel": learner.kernel, "options": options}
    return Message({"inputs": state["inputs"], "coefficients": state["coefficients"]}, plain)


def open_kernel(message: Message, shape: tuple[int, ...], classes: int) -> tuple[KernelRidge, Callable[[int], Cost]]:
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
