"""Wide residual networks (Zagoruyko & Komodakis, 2016): WResNet-depth-width, depth = 6n+4."""

from __future__ import annotations

from torch import Tensor, nn

from codistill.learners.zoo.layers import GlobalAveragePool
from codistill.learners.zoo.registry import register_architecture


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
