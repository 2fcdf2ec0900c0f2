"""A data set, and its entry in the catalogue."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from codistill.data.columns import Columns
    from codistill.data.scale import Scaling


@dataclass(frozen=True, eq=False)
class Dataset:
    """Training and test samples of one task.

    `x` is float32: images (samples, channels, height, width) or tables (samples, features); `y` is int64
    in 0 … classes-1, or real-valued with a column per output. `ids` says of every training sample where it comes
    from, e.g. `{"writer": …}`; `ids_test` of every test sample, as far as that is known.
    """

    name: str
    x: np.ndarray
    y: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    classes: int
    class_names: tuple[str, ...]
    ids: dict[str, np.ndarray] = field(default_factory=dict)
    ids_test: dict[str, np.ndarray] = field(default_factory=dict)
    columns: Columns | None = None  # of a table: what its features are made from
    scaling: Scaling | None = None  # what was done to the values as they were read


@dataclass(frozen=True)
class DatasetInfo:
    """One line of the catalogue; `problem` says why a file cannot be used, and is empty otherwise."""

    name: str
    where: str
    train: int = 0
    test: int = 0
    shape: tuple[int, ...] = ()
    classes: int = 0
    problem: str = ""
