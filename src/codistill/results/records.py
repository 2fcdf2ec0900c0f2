"""Rows and records: what is known at the end of a round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from codistill.results.outputs import Outputs

Row = dict[str, Any]


@dataclass(frozen=True)
class Record:
    """What is known at the end of a round."""

    round: int  # rounds done, from 1
    rows: list[Row]  # one per agent: round, agent, present, sent, received, and scores where evaluated
    events: list[str]  # what an operator should know, in plain words
    seconds: float  # of the round, evaluation included
    outputs: Outputs | None = None  # what the agents answer, after the last round
