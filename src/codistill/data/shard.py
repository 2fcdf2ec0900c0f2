"""One agent's private data, and the public data that all agents share."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from codistill.data.named_columns import Names, column_names, places
from codistill.data.torch_datasets import read_items, seeded
from codistill.data.validation import digest, plain_samples, validate_samples
from codistill.errors import DataError
from codistill.on_device import in_host_memory, uploaded
from codistill.randomness import Key, derive


class Batch(NamedTuple):
    """Samples and their targets, ready for a gradient step."""

    x: torch.Tensor
    targets: torch.Tensor


class PublicBatch(NamedTuple):
    """Indices of public samples, and the samples."""

    ids: np.ndarray
    x: torch.Tensor


class Shard:
    """Private samples with targets (n, C); batches are seeded by (seed, owner, round).

    `items`: a torch dataset whose items are random (augmentation); batches read them anew.
    """

    def __init__(self, x: Any, y: Any, classes: int, owner: str, items: Any = None) -> None:
        self.x, y = validate_samples(x, y, classes, f"agent '{owner}'")
        self.owner, self.classes, self._items = owner, classes, items
        self.labels: np.ndarray | None = y if y.ndim == 1 else None
        self.targets = _one_hot(y, classes) if y.ndim == 1 else y
        self.seed = 0

    @cached_property
    def _tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        return _fast_tensor(self.x), torch.from_numpy(self.targets.astype(np.float32, copy=False))

    def __len__(self) -> int:
        return len(self.x)

    def set_aside(self) -> None:
        """Free what can be made again from the samples."""
        self.__dict__.pop("_tensors", None)

    def part(self, rows: np.ndarray) -> Shard:
        """Some of the samples, of the same owner."""
        chosen = copy.copy(self)
        chosen.set_aside()
        chosen.x, chosen.targets = self.x[rows], self.targets[rows]
        chosen.labels = None if self.labels is None else self.labels[rows]
        chosen._items = None if self._items is None else torch.utils.data.Subset(self._items, rows.tolist())
        return chosen

    def batches(
        self, t: int, size: int, epochs: int = 1, steps: int | None = None, purpose: str = "batches"
    ) -> Iterator[Batch]:
        """All samples in a new order, `epochs` times, cut into batches; or exactly `steps` batches.

        Batches of another `purpose` in the same round are drawn independently.
        """
        if steps is not None:
            x, wanted = self._tensors
            for step, chosen in enumerate(_steps(len(self), size, steps, self.seed, self.owner, purpose, t)):
                samples = x[chosen] if self._items is None else self._read(chosen, t, step)
                yield Batch(uploaded(samples), uploaded(wanted[chosen]))
            return
        for epoch in range(epochs):
            order = _order(len(self), self.seed, self.owner, purpose, t, epoch)
            x, wanted = (tensor[order] for tensor in self._tensors)
            for rows in cut(len(order), size):
                samples = x[rows] if self._items is None else self._read(order[rows], t, epoch)
                yield Batch(uploaded(samples), uploaded(wanted[rows]))

    def _read(self, chosen: torch.Tensor, t: int, number: int) -> torch.Tensor:
        """Random items, the same for the same (seed, owner, round, place in the round)."""
        with in_host_memory(), seeded(self.seed, self.owner, "items", t, number, int(chosen[0])):
            return _fast_tensor(read_items(self._items, chosen.numpy(), f"agent '{self.owner}'"))


class PublicData:
    """Public samples without labels, equal on every agent; their batches are equal without any message."""

    def __init__(self, x: Any, seed: int) -> None:
        self.columns: Names = column_names(x, "the public data")  # empty: unknown
        x = plain_samples(x, "the public data")
        samples, _ = validate_samples(x, np.zeros(len(x), dtype=np.int64), 1, "the public data")
        self.x = samples
        self.seed = seed
        self.digest = digest(samples)

    def digest_by_name(self) -> str | None:
        """The digest of the same samples with their columns sorted by name; None where they have no names."""
        return digest(self.x[:, places(self.columns, tuple(sorted(self.columns)))]) if self.columns else None

    def order_columns(self, wanted: Names) -> None:
        """Bring the columns into the order of all samples; the digest stays that of the samples as they were given."""
        if self.columns not in ((), wanted):
            self.x = np.ascontiguousarray(self.x[:, places(self.columns, wanted)])
            self.__dict__.pop("_inputs", None)
        self.columns = wanted

    def prepared(self, prepare: Callable[[np.ndarray], np.ndarray]) -> PublicData:
        """The same data as one agent's model takes them; the digest stays that of what all agents share."""
        x = prepare(self.x)
        if x is self.x:
            return self
        mine = copy.copy(self)
        mine.__dict__.pop("_inputs", None)
        mine.x = x
        return mine

    @cached_property
    def _inputs(self) -> torch.Tensor:
        return _fast_tensor(self.x)

    def __len__(self) -> int:
        return len(self.x)

    def batches(self, t: int, size: int, steps: int | None = None) -> Iterator[PublicBatch]:
        """One pass in a new order, or exactly `steps` batches, passing over the data as often as needed."""
        for chosen in _steps(len(self), size, steps, self.seed, "public", "batches", t):
            yield self.batch(chosen.numpy())

    def batch(self, ids: np.ndarray) -> PublicBatch:
        """These samples, such as those of an earlier batch."""
        return PublicBatch(ids, uploaded(self._inputs[torch.from_numpy(ids)]))


def released(mask: Any, x: Any, y: Any, items: Any, owner: str) -> tuple[tuple[Any, Any], Any]:
    """The samples (x, y) that a mask releases, and those of a random data set `items`, if there is one.

    The others are removed before anything is computed from them, so that nothing that is sent can depend on them.
    """
    try:
        samples, labels = len(x), len(y)
    except TypeError:
        return (x, y), items  # no samples: that is reported where they are checked
    chosen = np.asarray(mask)
    if chosen.dtype != bool or chosen.shape != (samples,):
        raise DataError(
            f"releases of agent '{owner}' must be a boolean for each of its {samples} samples.",
            f"{chosen.dtype} of shape {chosen.shape}",
            "Give a mask such as consent == 'yes'.",
        )
    if not chosen.any():
        raise DataError(
            f"releases of agent '{owner}' must release a sample: one that is withheld takes no part in a run.",
            f"{samples} samples, all withheld",
            "Release some, or leave the agent out.",
        )
    rows = np.flatnonzero(chosen)
    try:
        kept = [each.iloc[rows] if hasattr(each, "iloc") else np.asarray(each)[rows] for each in (x, y)]
    except (ValueError, IndexError):
        return (x, y), items  # fewer labels than samples, rows of unequal length: reported as well
    if labels != samples:
        return (x, y), items
    return (kept[0], kept[1]), None if items is None else torch.utils.data.Subset(items, rows.tolist())


def cut(length: int, size: int) -> list[slice]:
    """Cut samples into batches; a single remaining sample joins the last batch (batch norm needs two)."""
    starts = list(range(0, length, size))
    if len(starts) > 1 and length - starts[-1] == 1:
        starts.pop()
    return [slice(start, end) for start, end in zip(starts, [*starts[1:], length], strict=True)]


def _one_hot(labels: np.ndarray, classes: int) -> np.ndarray:
    targets = np.zeros((len(labels), classes), dtype=np.float32)
    targets[np.arange(len(labels)), labels] = 1
    return targets


def _order(length: int, seed: int, *keys: Key) -> torch.Tensor:
    source = torch.Generator()
    source.manual_seed(derive(seed, *keys) >> 1)
    return torch.randperm(length, generator=source)


def _steps(length: int, size: int, steps: int | None, seed: int, *keys: Key) -> Iterator[torch.Tensor]:
    """Indices of the samples of `steps` batches, passing over the data as often as needed; None: one pass."""
    taken = passes = 0
    while steps is None or taken < steps:
        order = _order(length, seed, *keys, passes)
        for rows in cut(length, size):
            if taken == steps:
                return
            yield order[rows]
            taken += 1
        passes += 1
        if steps is None:
            return


def _fast_tensor(x: np.ndarray) -> torch.Tensor:
    """For torch, a view if already float32; images in channels-last, the format in which convolutions are fastest."""
    tensor = torch.from_numpy(np.require(x, dtype=np.float32, requirements=["C", "W"]))
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor
