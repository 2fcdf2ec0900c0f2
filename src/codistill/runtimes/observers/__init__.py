"""Observers: everything that watches a run. No protocol knows that it is being measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from codistill.outputs import Outputs

Row = dict[str, Any]


@dataclass(frozen=True)
class Record:
    """What is known at the end of a round."""

    round: int  # rounds done, from 1
    rows: list[Row]  # one per agent: round, agent, present, sent, received, and scores where evaluated
    events: list[str]  # what an operator should know, in plain words
    seconds: float  # of the round, evaluation included
    outputs: Outputs | None = None  # what the agents answer, after the last round


class Observer:
    """Is told of a run's progress; does nothing by default."""

    def round_ended(self, record: Record, save: Callable[[], dict[str, bytes]]) -> None:
        """A round is over; `save` packs what lives across rounds, if somebody wants to keep it."""

    def closed(self) -> None:
        """The run is over, for whatever reason."""
