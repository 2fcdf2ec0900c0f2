"""Architectures by name: `build("lenet5", shape=(1, 28, 28), classes=10)`.

Each of them is an `nn.Sequential` that ends in an `nn.Linear` to the classes, so `module[:-1](x)` are the features of
`x` and `module[-1]` is the head. Networks of the papers and the smallest models come first, residual ones last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from codistill.learners.architectures import Architecture, build, defaults, describe, names, register_architecture

__all__ = ["Architecture", "build", "defaults", "describe", "names", "register_architecture"]

POOL = 0  # among numbers of channels: a 2x2 max-pooling


def convolutions(
    before: int, *plan: int, kernel: int = 3, stride: int = 1, bias: bool = True, norm: bool = False
) -> list[nn.Module]:
    """Padded convolutions with these numbers of channels, each with ReLU, if asked after batch norm."""
    layers: list[nn.Module] = []
    for channels in plan:
        if channels == POOL:
            layers.append(nn.MaxPool2d(2))
            continue
        layers.append(nn.Conv2d(before, channels, kernel, stride, padding=kernel // 2, bias=bias))
        layers += [nn.BatchNorm2d(channels), nn.ReLU()] if norm else [nn.ReLU()]
        before = channels
    return layers


def conv_norm_relu(before: int, *plan: int, stride: int = 1) -> list[nn.Module]:
    """The same with batch norm. It subtracts the mean, so a bias before it would have no effect."""
    return convolutions(before, *plan, stride=stride, bias=False, norm=True)


def dense(
    layers: Sequence[nn.Module],
    shape: tuple[int, ...],
    *widths: int,
    activation: type[nn.ReLU] | type[nn.Tanh] = nn.ReLU,
) -> nn.Sequential:
    """The layers and, on all the numbers that they give, linear layers of these widths, with activations between."""
    trunk = nn.Sequential(*layers, nn.Flatten())
    sizes = (flat_size(trunk, shape), *widths)
    linear = [layer for pair in pairwise(sizes) for layer in (nn.Linear(*pair), activation())]
    return nn.Sequential(*trunk, *linear[:-1])


def flat_size(trunk: nn.Module, shape: tuple[int, ...]) -> int:
    """How many numbers a newly built `trunk` makes of one sample.

    It is tried on zeros in evaluation mode: no random number is drawn and no batch-norm statistic moves.
    """
    trunk.eval()
    with torch.no_grad():
        numbers = trunk(torch.zeros(1, *shape)).numel()
    trunk.train()
    return int(numbers)


def positive(option: str, *sizes: int) -> None:
    """Refuse a layer without a single unit."""
    if any(size < 1 for size in sizes):
        raise ValueError(f"every size in '{option}' must be at least 1")


class GlobalAveragePool(nn.Module):
    """The mean over height and width: (n, channels, height, width) -> (n, channels)."""

    def forward(self, images: Tensor) -> Tensor:
        return images.mean(dim=(2, 3))


# --- LeNet-5 (LeCun et al., 1998) in three forms.


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


def _lenet5(
    shape: tuple[int, ...],
    classes: int,
    activation: type[nn.ReLU] | type[nn.Tanh],
    pooling: type[nn.MaxPool2d] | type[nn.AvgPool2d],
) -> nn.Module:
    first = [nn.Conv2d(shape[0], 6, 5, padding=2), activation(), pooling(2)]
    second = [nn.Conv2d(6, 16, 5), activation(), pooling(2)]
    return dense([*first, *second], shape, 120, 84, classes, activation=activation)


@register_architecture("lenet5_gap", smallest_image=4)
def lenet5_gap(shape: tuple[int, ...], classes: int) -> nn.Module:
    """LeNet-like network with global average pooling, as in Berdoz et al. (about 30K parameters).

    The paper gives its size and its 84 features only; these layers reproduce both:
    30,986 parameters for 1x28x28 and 10 classes.
    """
    layers = [*convolutions(shape[0], 6, POOL, 16, POOL, kernel=5), *convolutions(16, 120), GlobalAveragePool()]
    return nn.Sequential(*layers, nn.Linear(120, 84), nn.Tanh(), nn.Linear(84, classes))


# --- The smallest models: logistic regression, a multi-layer perceptron, a small convolutional network.


@register_architecture("logistic")
def logistic(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Logistic regression: one linear layer on the flattened sample.

    7,850 parameters for 1x28x28 and 10 classes.
    """
    return dense([], shape, classes)


@register_architecture("mlp")
def mlp(shape: tuple[int, ...], classes: int, hidden: tuple[int, ...] = (200, 200)) -> nn.Module:
    """Multi-layer perceptron with ReLU, as in Afonin & Karimireddy (AKD, AvgKD, PKD, EKD).

    The paper does not give its layers. Two hidden layers of 200 are our choice:
    199,210 parameters for 1x28x28 and 10 classes.
    """
    positive("hidden", *hidden)
    return dense([], shape, *hidden, classes)


@register_architecture("cnn", smallest_image=4)
def cnn(shape: tuple[int, ...], classes: int, width: int = 16) -> nn.Module:
    """Small convolutional network, as in Afonin & Karimireddy (AKD, AvgKD, PKD, EKD).

    The paper does not give its layers. Our choice: two 3x3 convolutions with `width` and 2 `width` channels,
    each with ReLU and 2x2 max-pooling, then 128 hidden units:
    206,922 parameters for 1x28x28 and 10 classes.
    """
    positive("width", width)
    return dense(convolutions(shape[0], width, POOL, 2 * width, POOL), shape, 128, classes)


# --- VGG-16 (Simonyan & Zisserman, 2015) for small images.


@register_architecture("vgg16", smallest_image=32)
def vgg16(shape: tuple[int, ...], classes: int, batch_norm: bool = True, dropout: float = 0.5) -> nn.Module:
    """VGG-16 for CIFAR, as in Afonin & Karimireddy (AKD, AvgKD, PKD, EKD).

    The paper does not give its form. Our choice: the 13 convolutions of the original, with batch norm, then
    two hidden layers of 512 instead of 4096. For 3x32x32 and 10 classes: 15,253,578 parameters, and
    15,245,130 without batch norm.
    """
    layers: list[nn.Module] = []
    before = shape[0]
    for channels, depth in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(depth):
            convolution, *after = convolutions(before, channels, norm=batch_norm)
            # torch's own initialisation shrinks the signal in every layer, too much for thirteen without batch norm.
            nn.init.kaiming_normal_(convolution.weight, nonlinearity="relu")  # type: ignore[arg-type]
            nn.init.zeros_(convolution.bias)  # type: ignore[arg-type]
            layers += [convolution, *after]
            before = channels
        layers.append(nn.MaxPool2d(2))
    trunk = nn.Sequential(*layers, nn.Flatten())
    first = [nn.Dropout(dropout), nn.Linear(flat_size(trunk, shape), 512), nn.ReLU()]
    return nn.Sequential(*trunk, *first, nn.Dropout(dropout), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, classes))


# --- The networks of FedDKD (Li, Chen, Lu): Tables VII to IX, and that of FedGen for Table V.


@register_architecture("femnist_cnn", smallest_image=16)
def femnist_cnn(shape: tuple[int, ...], classes: int) -> nn.Module:
    """FedDKD's network for FEMNIST (Table VII): three convolutions, 512 hidden units.

    The table does not give the kernels. It calls the network a slimmer form of FedMAX's, whose convolutions
    are 3x3 without bias, padded by 1 except for the last; the same here gives 28 -> 14 -> 7 -> 2 pixels, and
    so the table's 256 = 64 * 2 * 2 inputs: 200,506 parameters for 1x28x28 and 26 classes.
    """
    padded = convolutions(shape[0], 32, POOL, 64, POOL, bias=False)
    layers = [*padded, nn.Conv2d(64, 64, 3, bias=False), nn.ReLU(), nn.MaxPool2d(2)]
    return dense(layers, shape, 512, classes)


@register_architecture("vgg9", smallest_image=8)
def vgg9(shape: tuple[int, ...], classes: int) -> nn.Module:
    """VGG-9, FedDKD's network for CIFAR (Table VIII), taken from FedMA.

    3x3 convolutions with padding 1 give the table's 4096 = 256 * 4 * 4 inputs at 32x32:
    3,491,530 parameters for 3x32x32 and 10 classes.
    """
    trunk = nn.Sequential(
        *convolutions(shape[0], 32, 64, POOL, 128, 128, POOL),
        nn.Dropout2d(0.05),
        *convolutions(128, 256, 256, POOL),
        nn.Flatten(),
    )
    first = [nn.Dropout(0.1), nn.Linear(flat_size(trunk, shape), 512), nn.ReLU()]
    return nn.Sequential(*trunk, *first, nn.Linear(512, 512), nn.ReLU(), nn.Dropout(0.1), nn.Linear(512, classes))


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
    layers = convolutions(shape[0], first, POOL, second, POOL, third, kernel=5, norm=True)
    trunk = nn.Sequential(*layers, nn.Flatten())
    for before, units in pairwise((flat_size(trunk, shape), hidden, features)):
        trunk.extend([nn.Linear(before, units), nn.BatchNorm1d(units), nn.ReLU()])
    return trunk.append(nn.Linear(features, classes))


@register_architecture("fedgen_cnn", smallest_image=1)
def fedgen_cnn(shape: tuple[int, ...], classes: int, features: int = 32) -> nn.Module:
    """FedGen's network for MNIST and EMNIST, as in FedDKD (Table V): two strided convolutions, 32 features.

    As in the code of FedGen's authors (Zhu, Hong, Zhou): 3x3 convolutions with stride 2 and batch norm give
    784 = 16 * 7 * 7 inputs at 28x28, and no activation follows the layer of features: 26,962 parameters for
    1x28x28 and 26 classes.
    """
    positive("features", features)
    return dense(convolutions(shape[0], 6, 16, stride=2, norm=True), shape, features).append(
        nn.Linear(features, classes)
    )


# --- Residual networks (He et al., 2016), with a stem for small images: 3x3, without pooling.


@register_architecture("resnet2", smallest_image=1)
def resnet2(shape: tuple[int, ...], classes: int) -> nn.Module:
    """ResNet-2 for CIFAR, as in Distributed Distillation: the stem and the linear layer (6n+2, n = 0).

    634 parameters for 3x32x32 and 10 classes.
    """
    return _cifar_resnet(shape, classes, n=0)


@register_architecture("resnet8", smallest_image=1)
def resnet8(shape: tuple[int, ...], classes: int) -> nn.Module:
    """ResNet-8 for CIFAR, as in Distributed Distillation (6n+2, n = 1).

    75,290 parameters for 3x32x32 and 10 classes.
    """
    return _cifar_resnet(shape, classes, n=1)


@register_architecture("resnet14", smallest_image=1)
def resnet14(shape: tuple[int, ...], classes: int) -> nn.Module:
    """ResNet-14 for CIFAR, as in Distributed Distillation (6n+2, n = 2).

    172,506 parameters for 3x32x32 and 10 classes.
    """
    return _cifar_resnet(shape, classes, n=2)


@register_architecture("resnet9", smallest_image=8)
def resnet9(shape: tuple[int, ...], classes: int, features: int = 128) -> nn.Module:
    """ResNet-9 with 128 features, as in Berdoz et al. (about 2.4 M parameters).

    The paper gives its size and its features only. Our choice is the usual network of eight convolutions
    and a linear layer, with 256 instead of 512 channels at the end, and a linear layer with ReLU to
    `features`: 2,470,730 parameters for 1x28x28 and 10 classes.
    """
    return nn.Sequential(
        *conv_norm_relu(shape[0], 64, 128, POOL),
        _Residual(nn.Sequential(*conv_norm_relu(128, 128, 128))),
        *conv_norm_relu(128, 256, POOL, 256, POOL),
        _Residual(nn.Sequential(*conv_norm_relu(256, 256, 256))),
        GlobalAveragePool(),
        *_head(256, features, classes),
    )


@register_architecture("resnet18", smallest_image=1)
def resnet18(shape: tuple[int, ...], classes: int, features: int | None = None) -> nn.Module:
    """ResNet-18 for small images, as in FedAL and, with features=256, in Berdoz et al.

    `features` adds a linear layer with ReLU before the last one. For 3x32x32 and 10 classes:
    11,173,962 parameters, and 11,302,730 (the 11.3 M of Berdoz et al.) with features=256.
    """
    return _resnet(shape, classes, (2, 2, 2, 2), features)


@register_architecture("resnet34", smallest_image=1)
def resnet34(shape: tuple[int, ...], classes: int, features: int | None = None) -> nn.Module:
    """ResNet-34 for small images, as in FedAL.

    `features` adds a linear layer with ReLU before the last one.
    21,282,122 parameters for 3x32x32 and 10 classes.
    """
    return _resnet(shape, classes, (3, 4, 6, 3), features)


def _cifar_resnet(shape: tuple[int, ...], classes: int, n: int) -> nn.Module:
    """Section 4.2 of He et al.: n blocks of 16, 32 and 64 channels each, shortcuts without parameters."""
    blocks = _stages(16, (16, 32, 64), (n, n, n), _Subsample)
    width = 64 if n else 16
    return nn.Sequential(*conv_norm_relu(shape[0], 16), *blocks, GlobalAveragePool(), nn.Linear(width, classes))


def _resnet(shape: tuple[int, ...], classes: int, depths: tuple[int, ...], features: int | None) -> nn.Module:
    blocks = _stages(64, (64, 128, 256, 512), depths, _projection)
    return nn.Sequential(*conv_norm_relu(shape[0], 64), *blocks, GlobalAveragePool(), *_head(512, features, classes))


def _stages(
    before: int, widths: tuple[int, ...], depths: tuple[int, ...], resize: Callable[[int, int, int], nn.Module]
) -> list[nn.Module]:
    """Basic blocks stage by stage; the first block of every stage but the first halves the image."""
    blocks: list[nn.Module] = []
    for stage, (width, depth) in enumerate(zip(widths, depths, strict=True)):
        for index in range(depth):
            stride = 2 if stage > 0 and index == 0 else 1
            same = stride == 1 and before == width
            body = nn.Sequential(
                *conv_norm_relu(before, width, stride=stride),
                nn.Conv2d(width, width, 3, padding=1, bias=False),
                nn.BatchNorm2d(width),
            )
            shortcut = nn.Identity() if same else resize(before, width, stride)
            blocks += [_Residual(body, shortcut), nn.ReLU()]
            before = width
    return blocks


def _projection(before: int, width: int, stride: int) -> nn.Module:
    """Option B of He et al.: a 1x1 convolution."""
    return nn.Sequential(nn.Conv2d(before, width, 1, stride, bias=False), nn.BatchNorm2d(width))


def _head(width: int, features: int | None, classes: int) -> list[nn.Module]:
    if features is None:
        return [nn.Linear(width, classes)]
    positive("features", features)
    return [nn.Linear(width, features), nn.ReLU(), nn.Linear(features, classes)]


class _Residual(nn.Module):
    """body(x) + shortcut(x)."""

    def __init__(self, body: nn.Module, shortcut: nn.Module | None = None) -> None:
        super().__init__()
        self.body = body
        self.shortcut = shortcut or nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        total: Tensor = self.body(images) + self.shortcut(images)
        return total


class _Subsample(nn.Module):
    """Option A of He et al.: every stride-th pixel, and zeros in the new channels."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.new_channels = width - before

    def forward(self, images: Tensor) -> Tensor:
        kept = images[:, :, :: self.stride, :: self.stride]
        return functional.pad(kept, (0, 0, 0, 0, 0, self.new_channels))


# --- Wide residual networks (Zagoruyko & Komodakis, 2016): WResNet-depth-width, depth = 6n+4.


@register_architecture("wresnet10_1", smallest_image=1)
def wresnet10_1(shape: tuple[int, ...], classes: int) -> nn.Module:
    """WResNet-10-1, as in FedAL: 64 features.

    77,850 parameters for 3x32x32 and 10 classes.
    """
    return _wide_resnet(shape, classes, n=1, width=1)


@register_architecture("wresnet10_2", smallest_image=1)
def wresnet10_2(shape: tuple[int, ...], classes: int) -> nn.Module:
    """WResNet-10-2, as in FedAL: 128 features.

    303,706 parameters for 3x32x32 and 10 classes.
    """
    return _wide_resnet(shape, classes, n=1, width=2)


@register_architecture("wresnet16_1", smallest_image=1)
def wresnet16_1(shape: tuple[int, ...], classes: int) -> nn.Module:
    """WResNet-16-1, as in FedAL: 64 features.

    175,066 parameters for 3x32x32 and 10 classes.
    """
    return _wide_resnet(shape, classes, n=2, width=1)


def _wide_resnet(shape: tuple[int, ...], classes: int, n: int, width: int) -> nn.Module:
    channels = (16, 16 * width, 32 * width, 64 * width)
    blocks = []
    for stage in (1, 2, 3):
        blocks.append(_PreActivation(channels[stage - 1], channels[stage], stride=1 if stage == 1 else 2))
        blocks += [_PreActivation(channels[stage], channels[stage], stride=1) for _ in range(n - 1)]
    return nn.Sequential(
        nn.Conv2d(shape[0], 16, 3, padding=1, bias=False),
        *blocks,
        nn.BatchNorm2d(channels[3]),
        nn.ReLU(),
        GlobalAveragePool(),
        nn.Linear(channels[3], classes),
    )


class _PreActivation(nn.Module):
    """Batch norm and ReLU before each convolution; a block that resizes also projects what it activated."""

    def __init__(self, before: int, channels: int, stride: int) -> None:
        super().__init__()
        self.activation = nn.Sequential(nn.BatchNorm2d(before), nn.ReLU())
        self.body = nn.Sequential(
            nn.Conv2d(before, channels, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
        )
        same = stride == 1 and before == channels
        self.projection = None if same else nn.Conv2d(before, channels, 1, stride, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        active = self.activation(images)
        shortcut = images if self.projection is None else self.projection(active)
        total: Tensor = shortcut + self.body(active)
        return total
