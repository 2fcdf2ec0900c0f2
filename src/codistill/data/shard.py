"""One agent's private data, prepared for its model and in batches; and the public data that all agents share."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from codistill.core.devices import in_host_memory, uploaded
from codistill.core.errors import CodistillError, DataError
from codistill.core.rng import Key, derive
from codistill.data.frame_encoding import FrameEncoding, frame_digest, non_numeric
from codistill.data.frames import (
    Names,
    Naming,
    as_frame,
    by_number,
    column_names,
    is_text,
    places,
    takes_frame,
    texts,
)
from codistill.data.validation import check_finite, digest, plain_samples, read_items, seeded, validate_samples

if TYPE_CHECKING:
    import pandas as pd

_CODES = 10  # a column with at most this many distinct values holds codes, imputed by the most frequent one


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

    `items`: a torch dataset with random items (augmentation), which batches read again.
    """

    def __init__(self, x: Any, y: Any, classes: int, owner: str, items: Any = None) -> None:
        self.x, y = validate_samples(x, y, classes, f"agent '{owner}'")
        self.owner, self.classes, self._items = owner, classes, items
        self.labels: np.ndarray | None = y if y.ndim == 1 else None
        self.targets = y if y.ndim == 2 else (y[:, None] == np.arange(classes)).astype(np.float32)
        self.seed = 0

    @cached_property
    def _tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        return _fast_tensor(self.x), torch.from_numpy(self.targets.astype(np.float32, copy=False))

    def __len__(self) -> int:
        return len(self.x)

    def offload(self) -> None:
        """Free tensors that can be made again from the samples."""
        self.__dict__.pop("_tensors", None)

    def part(self, rows: np.ndarray) -> Shard:
        """The shard with these samples only."""
        chosen = copy.copy(self)
        chosen.offload()
        chosen.x, chosen.targets = self.x[rows], self.targets[rows]
        chosen.labels = None if self.labels is None else self.labels[rows]
        chosen._items = None if self._items is None else torch.utils.data.Subset(self._items, rows.tolist())
        return chosen

    def batches(
        self, t: int, size: int, epochs: int = 1, steps: int | None = None, purpose: str = "batches"
    ) -> Iterator[Batch]:
        """Shuffle all samples `epochs` times and yield them in batches; or exactly `steps` batches.

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
        """Random items, equal for the same (seed, owner, round, position in the round)."""
        with in_host_memory(), seeded(self.seed, self.owner, "items", t, number, int(chosen[0])):
            return _fast_tensor(read_items(self._items, chosen.numpy(), f"agent '{self.owner}'"))


class PublicData:
    """Unlabelled public samples, equal on every agent; so are their batches, without any message.

    Where agents have columns of their own, each takes them from `frame`; in `x`, those that hold no numbers are codes.
    """

    def __init__(self, x: Any, seed: int) -> None:
        self.columns: Names = column_names(x, "the public data")  # empty: unknown
        self.frame = frame = as_frame(x)
        self.is_coded = frame is not None and bool(non_numeric(frame))
        if self.is_coded:
            self.columns = texts(frame.columns)
            x = FrameEncoding.of(frame, text=is_text(x)).encode(x, "the public data")
        x = plain_samples(x, "the public data")
        samples, _ = validate_samples(x, np.zeros(len(x), dtype=np.int64), 1, "the public data")
        self.x = samples
        self.seed = seed
        self.digest = frame_digest(frame) if self.is_coded else digest(samples)

    @property
    def given(self) -> Any:
        """The samples in the common order, or the frame of which agents take columns of their own."""
        return self.x if self.frame is None else self.frame

    def digest_by_name(self) -> str | None:
        """The digest of the samples with their columns sorted by name; None without names."""
        if self.is_coded:
            return self.digest
        return digest(self.x[:, places(self.columns, tuple(sorted(self.columns)))]) if self.columns else None

    def order_columns(self, wanted: Names) -> None:
        """Reorder the columns as in all samples; the digest stays that of the original samples."""
        self.frame = None
        if self.columns not in ((), wanted):
            self.x = np.ascontiguousarray(self.x[:, places(self.columns, wanted)])
            self.__dict__.pop("_inputs", None)
        self.columns = wanted

    def prepared(self, view: Callable[[Any], np.ndarray]) -> PublicData:
        """The data as one agent's model takes them; the digest stays that of the shared samples."""
        x = view(self.given)
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
        """One shuffled pass, or exactly `steps` batches from as many passes as needed."""
        for chosen in _steps(len(self), size, steps, self.seed, "public", "batches", t):
            yield self.batch(chosen.numpy())

    def batch(self, ids: np.ndarray) -> PublicBatch:
        """The samples with these indices."""
        return PublicBatch(ids, uploaded(self._inputs[torch.from_numpy(ids)]))


def released(mask: Any, x: Any, y: Any, items: Any, owner: str) -> tuple[tuple[Any, Any], Any]:
    """The samples (x, y) that a mask releases, and those of a random data set `items`, if there is one.

    The others are removed before anything is computed, so that no message can depend on them.
    """
    try:
        samples = len(x)
        fitting = len(y) == samples
    except TypeError:
        fitting = False
    if not fitting:
        return (x, y), items  # not samples with labels: reported when they are checked
    chosen = np.asarray(mask)
    if chosen.dtype != bool or chosen.shape != (samples,):
        raise DataError(
            f"releases of agent '{owner}' must be a boolean mask of its {samples} samples.",
            f"{chosen.dtype} of shape {chosen.shape}",
            "Pass a mask such as consent == 'yes'.",
        )
    if not chosen.any():
        raise DataError(
            f"releases of agent '{owner}' must release at least one sample.",
            f"{samples} samples, all withheld",
            "Release some, or remove the agent.",
        )
    rows = np.flatnonzero(chosen)
    try:
        kept = [each.iloc[rows] if hasattr(each, "iloc") else np.asarray(each)[rows] for each in (x, y)]
    except ValueError:
        return (x, y), items  # ragged rows: reported when they are checked
    return (kept[0], kept[1]), None if items is None else torch.utils.data.Subset(items, rows.tolist())


def cut(length: int, size: int) -> list[slice]:
    """Slices of batches; a single remaining sample joins the last batch (batch norm needs two)."""
    starts = list(range(0, length, size))
    if len(starts) > 1 and length - starts[-1] == 1:
        starts.pop()
    return [slice(start, end) for start, end in zip(starts, [*starts[1:], length], strict=True)]


def _order(length: int, seed: int, *keys: Key) -> torch.Tensor:
    source = torch.Generator()
    source.manual_seed(derive(seed, *keys) >> 1)
    return torch.randperm(length, generator=source)


def _steps(length: int, size: int, steps: int | None, seed: int, *keys: Key) -> Iterator[torch.Tensor]:
    """Sample indices of `steps` batches from as many shuffled passes as needed; None: one pass."""
    passes = range(1) if steps is None else itertools.count()
    orders = (_order(length, seed, *keys, number) for number in passes)
    return itertools.islice((order[rows] for order in orders for rows in cut(length, size)), steps)


def _fast_tensor(x: np.ndarray) -> torch.Tensor:
    """A tensor, a view if x is float32; images in channels-last format, in which convolutions are fastest."""
    tensor = torch.from_numpy(np.require(x, dtype=np.float32, requirements=["C", "W"]))
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor


# --- preprocessing of one agent's samples, fitted to its own training samples only


class Preparation:
    """An optional transformer, and imputation for models that do not accept missing values.

    With a fitted transformer, and `fill` as returned by `fill_values`, it needs no training samples. `frame`: of the
    samples, if they were a data frame.
    """

    def __init__(
        self,
        transformer: Any,
        *,
        takes_missing: bool,
        owner: str,
        fill: np.ndarray | None = None,
        frame: FrameEncoding | None = None,
    ) -> None:
        for method in ("fit", "transform"):
            if transformer is not None and not callable(getattr(transformer, method, None)):
                raise DataError(
                    f"prepare of {owner} must be a scikit-learn transformer.",
                    f"{transformer!r}"[:80],
                    "Pass for example sklearn.preprocessing.StandardScaler().",
                )
        # A copy, since several agents may be given the same transformer.
        self.transformer, self.takes_missing, self._owner = copy.deepcopy(transformer), takes_missing, owner
        self._naming = Naming(owner)  # of the training samples
        self.frame = frame if takes_frame(self.transformer, frame) else None  # that the transformer gets
        self._coded = None if frame is None or transformer is not None else frame.is_coded
        self.arguments: pd.DataFrame | None = None  # what the transformer made, if that is a table of arrays
        self._width: int | None = None  # columns that it makes
        self._training = np.empty((0, 0))  # after the transformer
        self._fill = fill  # computed when first needed

    def fill_values(self) -> np.ndarray | None:
        """The imputed value of each feature; None for images and before `fit`."""
        if self._fill is None and self._training.ndim == 2 and len(self._training):
            from sklearn.impute import SimpleImputer

            x = self._training
            codes = np.array([len(np.unique(column[~np.isnan(column)])) <= _CODES for column in x.T])
            median, frequent = (  # 0 for an empty column, which is the mean of standardised columns
                SimpleImputer(strategy=strategy, keep_empty_features=True).fit(x).statistics_
                for strategy in ("median", "most_frequent")
            )
            self._fill = np.where(codes, frequent, median)
            if self._coded is not None:  # what is missing among text, categories and dates is the model's own matter
                self._fill[self._coded] = np.nan
        return self._fill

    def fit(self, x: np.ndarray, naming: Naming | None = None) -> np.ndarray:
        """Fit to the agent's training samples, and return them prepared; `naming`: names of their columns."""
        if self.transformer is not None:
            self._naming = naming or self._naming
            x = self._transformed(x, self._naming)
        self._training, self._fill = x, None
        return x if self.takes_missing else self.complete(x)

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """Prepared samples; those that need no preparation are returned unchanged."""
        if self.transformer is not None:
            x = self._transformed(x)
        return x if self.takes_missing else self.complete(x)

    def complete(self, x: np.ndarray) -> np.ndarray:
        """Impute missing values by the median or the most frequent value of the column."""
        if x.ndim != 2 or not np.isnan(x).any():
            return x
        fill = self.fill_values()
        return x if fill is None else np.where(np.isnan(x), fill, x).astype(x.dtype)

    def _transformed(self, x: np.ndarray, fitting: Naming | None = None) -> np.ndarray:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # an empty column has no mean
                given = x if self.frame is None else self.frame.decode(x)
                if fitting is not None and self.frame is not None:
                    self.transformer.fit(given)
                elif fitting is not None:
                    with by_number(self.transformer, fitting, x):
                        self.transformer.fit(x)
                made = self.transformer.transform(given)
            made = made.toarray() if hasattr(made, "toarray") else made
            if isinstance(made, Mapping):  # what a tokenizer returns: an array for each argument of a module
                made = self.arguments = as_frame(made)
            made = np.ascontiguousarray(made, dtype=np.float32)
        except CodistillError:
            raise
        except Exception as error:  # a transformer may be user code
            raise DataError(
                f"The transformer prepare of {self._owner} must work on its samples.",
                f"{type(error).__name__}: {error}"[:300],
                "Try prepare.fit_transform(x) alone.",
            ) from error
        if made.ndim != 2 or len(made) != len(x):
            raise DataError(
                f"The transformer prepare of {self._owner} must return one row of numbers per sample.",
                f"shape {made.shape} for {len(x)} samples",
                "Try prepare.fit_transform(x) alone.",
            )
        if fitting is not None:
            self._width = made.shape[1]
        if self._width not in (None, made.shape[1]):
            raise DataError(
                f"The transformer prepare of {self._owner} must always return as many columns as for its training "
                f"samples, {self._width}.",
                f"{made.shape[1]}",
                "If it makes tokens of text, pad them to one length.",
            )
        check_finite(made, f"the prepared samples of {self._owner}", missing=True)
        return made
