"""Images of one size and with one number of channels."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch.nn.functional import interpolate

from codistill.data.dataset import Dataset
from codistill.errors import DataError

LUMA = (0.299, 0.587, 0.114)  # of red, green and blue in a grey value (ITU-R BT.601)


def resized(dataset: Dataset, size: int | None, channels: int | None) -> Dataset:
    """The data set with images of `size` x `size` pixels and so many channels, as float32 where anything changes.

    Pixels are interpolated bilinearly; a smaller image takes the mean over all pixels that it stands for
    (antialiasing). A grey image is repeated in every channel; the grey of colours is their luma.
    """
    if size is None and channels is None:
        return dataset
    if dataset.x.ndim != 4:
        raise DataError(
            "data.size and data.channels must be for images.",
            f"samples of shape {dataset.x.shape[1:]} in data set '{dataset.name}'",
            "Remove them.",
        )
    x, x_test = (_with_size(_with_channels(part, channels, dataset.name), size) for part in (dataset.x, dataset.x_test))
    return replace(dataset, x=x, x_test=x_test)


def _with_channels(images: np.ndarray, channels: int | None, name: str) -> np.ndarray:
    given = images.shape[1]
    if channels is None or channels == given:
        return images
    if given == 1:
        return np.repeat(images, channels, axis=1)
    if (given, channels) == (3, 1):
        return np.tensordot(images.astype(np.float32), np.array(LUMA, np.float32), axes=(1, 0))[:, None]
    raise DataError(
        "data.channels must be what the images have, any number for grey images, or 1 for those with 3 channels.",
        f"{channels} for the {given} channels of data set '{name}'",
        f"Write channels = {given}, or convert the images.",
    )


def _with_size(images: np.ndarray, size: int | None) -> np.ndarray:
    if size is None or images.shape[2:] == (size, size):
        return images
    floats = torch.from_numpy(np.ascontiguousarray(images, dtype=np.float32))
    # align_corners=False: pixels are squares, and the outer edges of both images coincide.
    pixels = interpolate(floats, (size, size), mode="bilinear", align_corners=False, antialias=True)
    return np.asarray(pixels.numpy())
