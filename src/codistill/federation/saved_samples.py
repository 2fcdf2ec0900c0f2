"""What is done to a sample before a trained model sees it: columns, scaling and preparation, as plain values and back.

a row of a table -> features (Columns) -> scaled (Scaling) -> prepared (Preparation) -> the model
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from codistill.agent import Agent
from codistill.data.columns import Columns
from codistill.data.named_columns import as_frame, column_names
from codistill.data.preparation import Preparation
from codistill.data.scale import Scaling
from codistill.errors import DataError
from codistill.learners.portable.saved_learner import load_transformer, save_transformer


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Samples:
    """What is known of the samples that a model takes."""

    columns: Columns | None = None  # how the columns of a table become features; None: their names are unknown
    label: str | None = None  # the column of a table that holds the labels
    unused: tuple[str, ...] = ()  # columns of a table that are neither features nor labels
    missing_values: tuple[str, ...] = ()  # cells of a table that count as empty
    scaling: Scaling | None = None  # done to the features before they are prepared

    @classmethod
    def of(cls, agent: Agent) -> Samples:
        """Of an agent whose samples were a data frame: its columns are numbers with names."""
        return cls(columns=Columns(dict.fromkeys(agent.column_names, "number")) if agent.column_names else None)

    def features(self, x: Any, shape: tuple[int, ...], owner: str) -> Any:
        """Samples as the agent was given them, from a frame or an array as they were before they were scaled."""
        frame = None if self.columns is None else as_frame(x)
        if frame is not None and self.columns is not None and (column_names(x, owner) or not self._fits(frame)):
            x = self.columns.transform(frame, owner)
        if self.scaling is None:
            return x
        try:
            array = np.asarray(x, dtype=np.float64)
        except (TypeError, ValueError):
            return x  # told by what checks the samples next
        return self.scaling.apply(array, owner) if array.shape[1:] == shape else x

    def _fits(self, frame: Any) -> bool:
        """Whether a frame with numbered columns can be taken by position, as an array."""
        return self.columns is not None and frame.shape[1] == self.columns.numbers == len(self.columns.columns)

    def as_plain(self) -> dict[str, Any]:
        """As arrays and plain values."""
        scaling = self.scaling
        return {
            "columns": None if self.columns is None else self.columns.as_plain(),
            "label": self.label,
            "unused": list(self.unused),
            "missing_values": list(self.missing_values),
            "scaling": None if scaling is None else {"shift": scaling.shift, "divisor": scaling.divisor},
        }

    @classmethod
    def from_plain(cls, saved: dict[str, Any], shape: tuple[int, ...]) -> Samples:
        """What `as_plain` returned; a ValueError or DataError if it does not belong to samples of `shape`."""
        scaling, columns = saved["scaling"], saved["columns"]
        schema = None if columns is None else Columns.from_plain(columns)
        if schema is not None and (len(schema.feature_names()),) != shape:
            raise ValueError(f"{len(schema.feature_names())} features for samples of shape {shape}")
        return cls(
            columns=schema, label=saved["label"], unused=tuple(map(str, saved["unused"])),
            missing_values=tuple(map(str, saved["missing_values"])),
            scaling=None if scaling is None else Scaling(np.asarray(scaling["shift"]), np.asarray(scaling["divisor"])),
        )  # fmt: skip


def save_preparation(preparation: Preparation, owner: str) -> dict[str, Any]:
    """A fitted preparation as bytes, arrays and plain values."""
    transformer = preparation.transformer
    return {
        "transformer": None if transformer is None else save_transformer(transformer, owner),
        "takes_missing": preparation.takes_missing,
        "fill": preparation.fill_values(),
    }


def load_preparation(saved: dict[str, Any], shape: tuple[int, ...], owner: str, prepare: Any = None) -> Preparation:
    """What `save_preparation` returned. `prepare`: a transformer of the class that was saved, if that is one's own."""
    transformer = None if saved["transformer"] is None else load_transformer(saved["transformer"], prepare)
    fill = None if saved["fill"] is None else np.asarray(saved["fill"], dtype=np.float64)
    if fill is not None and fill.shape != shape:
        raise DataError(
            "The values that fill in missing ones must be one per feature.",
            f"shape {fill.shape} for samples of shape {shape}",
            "Save the model again.",
        )
    return Preparation.fitted(transformer, fill, takes_missing=saved["takes_missing"] is True, owner=owner)
