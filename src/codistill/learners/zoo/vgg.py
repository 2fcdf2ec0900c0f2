"""VGG-16 (Simonyan & Zisserman, 2015) for small images."""

from __future__ import annotations

from torch import nn

from codistill.learners.zoo.layers import flat_size
from codistill.learners.zoo.registry import register_architecture

_STAGES = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


@register_architecture("vgg16", smallest_image=32)
def vgg16(shape: tuple[int, ...], classes: int, batch_norm: bool = True, dropout: float = 0.5) -> nn.Module:
    """VGG-16 for CIFAR, as in Afonin & Karimireddy (AKD, AvgKD, PKD, EKD).

    The paper does not give its form. Our choice: the 13 convolutions of the original, with batch norm, then
    two hidden layers of 512 instead of 4096. For 3x32x32 and 10 classes: 15,253,578 parameters, and
    15,245,130 without batch norm.
    """
    layers: list[nn.Module] = []
    before = shape[0]
    for stage in _STAGES:
        for channels in stage:
            layers += _convolution(before, channels, batch_norm)
            before = channels
        layers.append(nn.MaxPool2d(2))
    trunk = nn.Sequential(*layers, nn.Flatten())
    return nn.Sequential(
        *trunk,
        nn.Dropout(dropout),
        nn.Linear(flat_size(trunk, shape), 512),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(512, 512),
        nn.ReLU(),
        nn.Linear(512, classes),
    )


def _convolution(before: int, channels: int, batch_norm: bool) -> list[nn.Module]:
    convolution = nn.Conv2d(before, channels, 3, padding=1)
    # torch's own initialisation shrinks the signal in every layer, too much for thirteen without batch norm.
    nn.init.kaiming_normal_(convolution.weight, nonlinearity="relu")
    nn.init.zeros_(convolution.bias)  # type: ignore[arg-type]
    norm = [nn.BatchNorm2d(channels)] if batch_norm else []
    return [convolution, *norm, nn.ReLU()]
