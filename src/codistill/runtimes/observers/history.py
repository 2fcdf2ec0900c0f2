"""Keeps every round's rows in memory."""

from __future__ import annotations

from collections.abc import Callable

from codistill.results.outputs import Outputs
from codistill.results.records import Record, Row
from codistill.runtimes.observers import Observer


class History(Observer):
    """All rows so far: one per round and agent."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.outputs: Outputs | None = None
        self.interrupted = False

    def round_ended(self, record: Record, save: Callable[[], dict[str, bytes]]) -> None:
        """Keep the rows, and after the last round the outputs."""
        self.rows.extend(record.rows)
        self.outputs = record.outputs

    @property
    def rounds(self) -> int:
        """Rounds done."""
        return int(self.rows[-1]["round"]) if self.rows else 0

    def last_scores(self) -> dict[str, Row]:
        """The newest row with scores of every agent."""
        return {row["agent"]: row for row in self.rows if "test_samples" in row}
