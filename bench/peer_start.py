"""Runs HtFLlib's main.py, in a folder that looks like its `system`, with the LeNet-5 of W1 for all of its models."""

from __future__ import annotations

import importlib
import os
import runpy
import sys
from collections import OrderedDict

from torch import nn

from codistill.learners import zoo


def lenet5(*_: object) -> nn.Module:
    """The network of W1; HtFLlib finds the last layer, which it replaces by its own, under the name `fc`."""
    *trunk, last = zoo.build("lenet5", (1, 28, 28), 10).children()
    return nn.Sequential(OrderedDict(trunk=nn.Sequential(*trunk), fc=last))


if __name__ == "__main__":
    sys.path[0] = os.getcwd()
    # Its families have no network for images of 1 x 28 x 28. It evaluates the text that describes a model in this
    # module, whose own `eval` comes before the built-in one.
    importlib.import_module("flcore.trainmodel.models").eval = lenet5  # type: ignore[attr-defined]
    runpy.run_path("main.py", run_name="__main__")
