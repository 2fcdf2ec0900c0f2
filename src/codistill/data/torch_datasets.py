"""A torch `Dataset` or `DataLoader` as an agent's data.

It is read once, in order, for everything that needs arrays: predictions, class counts, and models that are fitted to
arrays. If its items are random (augmentation in `__getitem__`), batches of gradient steps read their items anew, seeded
by (seed, agent, round), so that every runtime sees the same ones.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler

from codistill.errors import DataError
from codistill.randomness import Key, seed_libraries

_COMPARED = 64  # items that are read twice, to see whether they are random


def is_dataset(data: Any) -> bool:
    """Whether these are data of torch, samples and labels in one."""
    return isinstance(data, Dataset | DataLoader)


def read_dataset(data: Any, owner: str) -> tuple[np.ndarray, np.ndarray, Any]:
    """All samples and labels, and the data set itself if its items are random (None otherwise)."""
    items = _dataset_of(data, owner)
    with seeded(0, "dataset"):
        each: Iterable[Any] = items if isinstance(items, IterableDataset) else (items[i] for i in range(len(items)))
        pairs = [_pair(item, owner) for item in each]
    if not pairs:
        raise DataError(f"The dataset of {owner} must hold samples.", "none", "Give it some.")
    x = _stacked([sample for sample, _ in pairs], owner)
    y = np.asarray([label for _, label in pairs])
    if isinstance(items, IterableDataset):
        return x, y, None
    few = np.arange(min(len(x), _COMPARED))
    with seeded(1, "dataset"):
        is_random = not np.array_equal(read_items(items, few, owner), x[few])
    return x, y, items if is_random else None


def read_items(items: Any, indices: np.ndarray, owner: str) -> np.ndarray:
    """The samples at some indices, read from the data set again."""
    return _stacked([_pair(items[int(i)], owner)[0] for i in indices], owner)


@contextmanager
def seeded(seed: int, *keys: Key) -> Iterator[None]:
    """Seed the libraries for a while, and leave them as they were: dropout goes on as if nothing had been read."""
    before = torch.default_generator.get_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
    seed_libraries(seed, *keys)
    try:
        yield
    finally:
        torch.default_generator.set_state(before[0])
        np.random.set_state(before[1])  # noqa: NPY002
        random.setstate(before[2])


def _dataset_of(data: Any, owner: str) -> Any:
    """Of a loader, the data set: batches and their order are the federation's."""
    if not isinstance(data, DataLoader):
        return data
    if not isinstance(data.dataset, IterableDataset) and type(data.sampler) not in (SequentialSampler, RandomSampler):
        raise DataError(
            f"The DataLoader of {owner} must go over its whole dataset: batches are drawn by the federation.",
            f"a sampler of type {type(data.sampler).__name__}",
            "Give the dataset, or torch.utils.data.Subset(dataset, indices).",
        )
    return data.dataset


def _pair(item: Any, owner: str) -> tuple[np.ndarray, Any]:
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise DataError(
            f"Every item of the dataset of {owner} must be a pair of a sample and a label.",
            f"{type(item).__name__} of {len(item)}" if isinstance(item, tuple | list) else type(item).__name__,
            "Return (x, y) from __getitem__.",
        )
    return np.asarray(item[0], dtype=np.float32), np.asarray(item[1]).tolist()


def _stacked(samples: list[np.ndarray], owner: str) -> np.ndarray:
    shapes = sorted({sample.shape for sample in samples})
    if len(shapes) > 1:
        raise DataError(
            f"All items of the dataset of {owner} must have the same shape.",
            f"{shapes[0]} and {shapes[1]}",
            "Resize or crop them in the dataset's transform.",
        )
    return np.stack(samples)
