"""The networks of FedDKD (Li, Chen, Lu): Tables VII to IX, and that of FedGen for Table V."""

from __future__ import annotations

from torch import nn

from codistill.learners.zoo.layers import flat_size, positive
from codistill.learners.zoo.registry import register_architecture


@register_architecture("femnist_cnn", smallest_image=16)
def femnist_cnn(shape: tuple[int, ...], classes: int) -> nn.Module:
    """FedDKD's network for FEMNIST (Table VII): three convolutions, 512 hidden units.

    The table does not give the kernels. It calls the network a slimmer form of FedMAX's, whose convolutions
    are 3x3 without bias, padded by 1 except for the last; the same here gives 28 -> 14 -> 7 -> 2 pixels, and
    so the table's 256 = 64 * 2 * 2 inputs: 200,506 parameters for 1x28x28 and 26 classes.
    """
    trunk = nn.Sequential(
        nn.Conv2d(shape[0], 32, 3, padding=1, bias=False),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1, bias=False),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3, bias=False),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
    )
    return nn.Sequential(*trunk, nn.Linear(flat_size(trunk, shape), 512), nn.ReLU(), nn.Linear(512, classes))


@register_architecture("vgg9", smallest_image=8)
def vgg9(shape: tuple[int, ...], classes: int) -> nn.Module:
    """VGG-9, FedDKD's network for CIFAR (Table VIII), taken from FedMA.

    3x3 convolutions with padding 1 give the table's 4096 = 256 * 4 * 4 inputs at 32x32:
    3,491,530 parameters for 3x32x32 and 10 classes.
    """
    trunk = nn.Sequential(
        nn.Conv2d(shape[0], 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 128, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(128, 128, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout2d(0.05),
        nn.Conv2d(128, 256, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(256, 256, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
    )
    return nn.Sequential(
        *trunk,
        nn.Dropout(0.1),
        nn.Linear(flat_size(trunk, shape), 512),
        nn.ReLU(),
        nn.Linear(512, 512),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Linear(512, classes),
    )


@register_architecture("digits_cnn", smallest_image=4)
def digits_cnn(shape: tuple[int, ...], classes: int, width: float = 1.0) -> nn.Module:
    """FedDKD's network for digits of several sources (Table IX), taken from FedBN: batch norm throughout.

    The table does not give the kernels. FedBN's 5x5 with padding 2, on digits resized to 28x28, give the
    table's 6272 = 128 * 7 * 7 inputs: 14,219,210 parameters for 3x28x28 and 10 classes. `width` is a factor on
    all channels and hidden units, rounded: with 0.25 there are 892,154 parameters.
    """
    first, second, third, hidden, features = (round(width * units) for units in (64, 64, 128, 2048, 512))
    if first < 1:
        raise ValueError("'width' must leave at least one channel of 64")
    trunk = nn.Sequential(
        nn.Conv2d(shape[0], first, 5, padding=2),
        nn.BatchNorm2d(first),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(first, second, 5, padding=2),
        nn.BatchNorm2d(second),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(second, third, 5, padding=2),
        nn.BatchNorm2d(third),
        nn.ReLU(),
        nn.Flatten(),
    )
    return nn.Sequential(
        *trunk,
        nn.Linear(flat_size(trunk, shape), hidden),
        nn.BatchNorm1d(hidden),
        nn.ReLU(),
        nn.Linear(hidden, features),
        nn.BatchNorm1d(features),
        nn.ReLU(),
        nn.Linear(features, classes),
    )


@register_architecture("fedgen_cnn", smallest_image=1)
def fedgen_cnn(shape: tuple[int, ...], classes: int, features: int = 32) -> nn.Module:
    """FedGen's network for MNIST and EMNIST, as in FedDKD (Table V): two strided convolutions, 32 features.

    As in the code of FedGen's authors (Zhu, Hong, Zhou): 3x3 convolutions with stride 2 and batch norm give
    784 = 16 * 7 * 7 inputs at 28x28, and no activation follows the layer of features: 26,962 parameters for
    1x28x28 and 26 classes.
    """
    positive("features", features)
    trunk = nn.Sequential(
        nn.Conv2d(shape[0], 6, 3, stride=2, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 16, 3, stride=2, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Flatten(),
    )
    return nn.Sequential(*trunk, nn.Linear(flat_size(trunk, shape), features), nn.Linear(features, classes))
