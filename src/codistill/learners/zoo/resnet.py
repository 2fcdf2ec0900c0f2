"""Residual networks (He et al., 2016), with a stem for small images: 3x3, without pooling."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional

from codistill.learners.zoo.layers import GlobalAveragePool, conv_norm_relu, positive
from codistill.learners.zoo.registry import register_architecture


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
        *conv_norm_relu(shape[0], 64),
        *conv_norm_relu(64, 128),
        nn.MaxPool2d(2),
        _Residual(nn.Sequential(*conv_norm_relu(128, 128), *conv_norm_relu(128, 128))),
        *conv_norm_relu(128, 256),
        nn.MaxPool2d(2),
        *conv_norm_relu(256, 256),
        nn.MaxPool2d(2),
        _Residual(nn.Sequential(*conv_norm_relu(256, 256), *conv_norm_relu(256, 256))),
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
    before: int,
    widths: tuple[int, ...],
    depths: tuple[int, ...],
    resize: Callable[[int, int, int], nn.Module],
) -> list[nn.Module]:
    """Basic blocks stage by stage; the first block of every stage but the first halves the image."""
    blocks: list[nn.Module] = []
    for stage, (width, depth) in enumerate(zip(widths, depths, strict=True)):
        for index in range(depth):
            stride = 2 if stage > 0 and index == 0 else 1
            same = stride == 1 and before == width
            body = nn.Sequential(
                *conv_norm_relu(before, width, stride),
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
