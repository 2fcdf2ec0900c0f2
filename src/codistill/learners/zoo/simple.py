"""The smallest models: logistic regression, a multi-layer perceptron, a small convolutional network."""

from __future__ import annotations

import math
from itertools import pairwise

from torch import nn

from codistill.learners.zoo.layers import flat_size, positive
from codistill.learners.zoo.registry import register_architecture


@register_architecture("logistic")
def logistic(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Logistic regression: one linear layer on the flattened sample.

    7,850 parameters for 1x28x28 and 10 classes.
    """
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), classes))


@register_architecture("mlp")
def mlp(shape: tuple[int, ...], classes: int, hidden: tuple[int, ...] = (200, 200)) -> nn.Module:
    """Multi-layer perceptron with ReLU, as in Afonin & Karimireddy (AKD, AvgKD, PKD, EKD).

    The paper does not give its layers. Two hidden layers of 200 are our choice:
    199,210 parameters for 1x28x28 and 10 classes.
    """
    positive("hidden", *hidden)
    widths = (math.prod(shape), *hidden)
    layers = [layer for before, width in pairwise(widths) for layer in (nn.Linear(before, width), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(widths[-1], classes))


@register_architecture("cnn", smallest_image=4)
def cnn(shape: tuple[int, ...], classes: int, width: int = 16) -> nn.Module:
    """Small convolutional network, as in Afonin & Karimireddy (AKD, AvgKD, PKD, EKD).

    The paper does not give its layers. Our choice: two 3x3 convolutions with `width` and 2 `width` channels,
    each with ReLU and 2x2 max-pooling, then 128 hidden units:
    206,922 parameters for 1x28x28 and 10 classes.
    """
    positive("width", width)
    trunk = nn.Sequential(
        nn.Conv2d(shape[0], width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
    )
    return nn.Sequential(*trunk, nn.Linear(flat_size(trunk, shape), 128), nn.ReLU(), nn.Linear(128, classes))
