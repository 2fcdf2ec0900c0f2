"""Kernel models that travel, where their owner agrees: training inputs and coefficients."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

import numpy as np
from sklearn.metrics.pairwise import PAIRWISE_KERNEL_FUNCTIONS

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


def open_kernel(message: Message, shape: tuple[int, ...], classes: int) -> KernelRidge:
    """The kernel model in a message; anything unsound raises, in whatever way."""
    from codistill.learners.kernel_ridge import KernelRidge

    inputs, coefficients = message.arrays["inputs"], message.arrays["coefficients"]
    if inputs.shape[1:] != (math.prod(shape),) or coefficients.shape != (len(inputs), classes):
        raise ValueError("a kernel model for other samples or classes")
    options = json.loads(message.plain["options"])
    if message.plain["kernel"] not in PAIRWISE_KERNEL_FUNCTIONS or not options.keys() <= {"gamma", "degree", "coef0"}:
        raise ValueError(f"a kernel {message.plain['kernel']!r} with options {sorted(options)}")
    if inputs.dtype.kind != "f" or coefficients.dtype.kind != "f" or len(inputs) > BLOCK:
        raise ValueError(f"{len(inputs)} inputs of type {inputs.dtype}, where at most {BLOCK} floats are taken")
    kernel_cost(message.plain["kernel"], inputs, classes, 1).check()
    model = KernelRidge(message.plain["kernel"], **options)
    numbers = {"inputs": np.asarray(inputs, np.float64), "coefficients": np.asarray(coefficients, np.float64)}
    model.restore({**numbers, "samples": None})
    return model


def kernel_cost(kernel: str, inputs: np.ndarray, classes: int, rows: int) -> Cost:
    """What predictions for some rows take: a kernel with every input, times its coefficients."""
    each = 100 + (50 if kernel in _LOOPS else 4) * inputs.shape[1] + 2 * classes
    return Cost(rows, rows * len(inputs) * each, 3 * BLOCK * 8)
