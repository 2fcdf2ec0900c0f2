"""Architectures by name: `build("lenet5", shape=(1, 28, 28), classes=10)`.

Every architecture of this room is an `nn.Sequential` that ends in an `nn.Linear` to the classes, so
`module[:-1](x)` are the features of `x` and `module[-1]` is the head.
"""

from codistill.learners.zoo import feddkd_models, lenet, resnet, simple, vgg, wide_resnet  # noqa: F401  (they register)
from codistill.learners.zoo.registry import (
    Architecture,
    build,
    defaults,
    describe,
    names,
    register_architecture,
)

__all__ = ["Architecture", "build", "defaults", "describe", "names", "register_architecture"]
