"""Keeps every round's rows in memory."""

from __future__ import annotations

from codistill.results.outputs import Outputs
from codistill.results.records import RoundEnded, Row, RunStarted


class History:
    """All rows so far: one per round and agent."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.outputs: Outputs | None = None

    def started(self, record: RunStarted) -> None:
        """Take over the rounds that were done before."""
        self.rows, self.outputs = list(record.rows), record.outputs

    def round_ended(self, record: RoundEnded) -> None:
        """Keep the rows, and after the last round the outputs."""
        self.rows.extend(record.rows)
        self.outputs = record.outputs

    @property
    def rounds(self) -> int:
        """Rounds done."""
        return int(self.rows[-1]["round"]) if self.rows else 0
