"""LeNet-5 (LeCun et al., 1998) in three forms."""

from __future__ import annotations

from torch import nn

from codistill.learners.zoo.layers import GlobalAveragePool, flat_size
from codistill.learners.zoo.registry import register_architecture


@register_architecture("lenet5", smallest_image=12)
def lenet5(shape: tuple[int, ...], classes: int) -> nn.Module:
    """LeNet-5 with ReLU and max-pooling, as in FedAL and Distributed Distillation.

    61,706 parameters for 1x28x28 and 10 classes.
    """
    return _lenet5(shape, classes, activation=nn.ReLU, pooling=nn.MaxPool2d)


@register_architecture("lenet5_tanh", smallest_image=12)
def lenet5_tanh(shape: tuple[int, ...], classes: int) -> nn.Module:
    """LeNet-5 with tanh and average pooling, close to the original of 1998.

    The original's sparse connections, trained pooling and Gaussian output are left out:
    61,706 parameters for 1x28x28 and 10 classes, like `lenet5`.
    """
    return _lenet5(shape, classes, activation=nn.Tanh, pooling=nn.AvgPool2d)


@register_architecture("lenet5_gap", smallest_image=4)
def lenet5_gap(shape: tuple[int, ...], classes: int) -> nn.Module:
    """LeNet-like network with global average pooling, as in Berdoz et al. (about 30K parameters).

    The paper gives its size and its 84 features only; these layers reproduce both:
    30,986 parameters for 1x28x28 and 10 classes.
    """
    return nn.Sequential(
        nn.Conv2d(shape[0], 6, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 120, 3, padding=1),
        nn.ReLU(),
        GlobalAveragePool(),
        nn.Linear(120, 84),
        nn.Tanh(),
        nn.Linear(84, classes),
    )


def _lenet5(
    shape: tuple[int, ...],
    classes: int,
    activation: type[nn.ReLU] | type[nn.Tanh],
    pooling: type[nn.MaxPool2d] | type[nn.AvgPool2d],
) -> nn.Module:
    trunk = nn.Sequential(
        nn.Conv2d(shape[0], 6, 5, padding=2),
        activation(),
        pooling(2),
        nn.Conv2d(6, 16, 5),
        activation(),
        pooling(2),
        nn.Flatten(),
    )
    return nn.Sequential(
        *trunk,
        nn.Linear(flat_size(trunk, shape), 120),
        activation(),
        nn.Linear(120, 84),
        activation(),
        nn.Linear(84, classes),
    )
