"""Observers: everything that watches a run. No protocol knows that it is being measured."""

from __future__ import annotations

from collections.abc import Callable

from codistill.results.records import Record


class Observer:
    """Is told of a run's progress; does nothing by default."""

    def round_ended(self, record: Record, save: Callable[[], dict[str, bytes]]) -> None:
        """A round is over; `save` packs what lives across rounds, if somebody wants to keep it."""

    def closed(self) -> None:
        """The run is over, for whatever reason."""
