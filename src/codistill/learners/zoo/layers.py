"""Small parts that several architectures share."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class GlobalAveragePool(nn.Module):
    """The mean over height and width: (n, channels, height, width) -> (n, channels)."""

    def forward(self, images: Tensor) -> Tensor:
        """One vector for each image."""
        return images.mean(dim=(2, 3))


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


def conv_norm_relu(before: int, channels: int, stride: int = 1) -> list[nn.Module]:
    """A padded 3x3 convolution, batch norm and ReLU; stride 1 keeps the image's size."""
    # Batch norm subtracts the mean, so a bias before it would have no effect.
    convolution = nn.Conv2d(before, channels, 3, stride, padding=1, bias=False)
    return [convolution, nn.BatchNorm2d(channels), nn.ReLU()]
