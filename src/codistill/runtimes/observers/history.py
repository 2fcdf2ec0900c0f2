"""Keeps every round's rows and events in memory."""

from __future__ import annotations

from codistill.results.feature_space import FeatureSpace
from codistill.results.outputs import Outputs
from codistill.results.records import RoundEnded, Row, RunStarted


class History:
    """All rows so far, one per round and agent; and the events of the rounds that were run here."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.events: list[str] = []
        self.outputs: Outputs | None = None
        self.features: list[FeatureSpace] = []

    def started(self, record: RunStarted) -> None:
        """Take over the rounds that were done before."""
        self.rows, self.outputs, self.features = list(record.rows), record.outputs, list(record.features)

    def round_ended(self, record: RoundEnded) -> None:
        """Keep the rows, the features where they are kept, and after the last round the outputs."""
        self.rows.extend(record.rows)
        self.events.extend(record.events)
        self.outputs = record.outputs
        self.features += [] if record.features is None else [record.features]

    @property
    def rounds(self) -> int:
        """Rounds done."""
        return int(self.rows[-1]["round"]) if self.rows else 0
