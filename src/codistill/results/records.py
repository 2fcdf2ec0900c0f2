"""What is told of a run while it goes on: one record for each event, and the rows of its metrics.

A row is a plain dict: "round", "agent", "present", "sent" and "received" (bytes), the protocol's own measures, and
after an evaluation the scores ("accuracy", "own_accuracy", or "rmse", "own_rmse") with "test_samples".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from codistill.results.outputs import Outputs

Row = dict[str, Any]
Scores = dict[str, float]


@dataclass(frozen=True)
class RunStarted:
    """A run begins, or goes on from a checkpoint."""

    protocol: str
    agents: tuple[str, ...]  # those whose rows the metrics hold
    rounds: int  # how many there are to be
    done: int = 0  # how many were done before
    rows: tuple[Row, ...] = ()  # the metrics of the rounds done before
    outputs: Outputs | None = None  # the agents' answers, where all rounds were done before
    notes: tuple[str, ...] = ()  # for the person who resumes, such as about a damaged checkpoint


@dataclass(frozen=True)
class Evaluated:
    """The agents have been evaluated at the end of a round."""

    round: int  # rounds done, from 1
    scores: dict[str, Scores]  # by agent; empty for an agent that has no model yet
    test_samples: int
    outputs: Outputs | None = None  # the agents' answers, after the last round


@dataclass(frozen=True)
class RoundEnded:
    """What is known at the end of a round."""

    round: int  # rounds done, from 1
    rows: list[Row]  # one per agent
    events: list[str]  # what an operator should know, in plain words
    seconds: float  # of the round, evaluation included, without the time that was waited for agents
    outputs: Outputs | None = None  # the agents' answers, after the last round


@dataclass(frozen=True)
class RunFinished:
    """A run is over, for whatever reason."""

    done: int  # rounds
    rounds: int  # how many there were to be
    outcome: str  # "complete", "stopped" (by an observer or an operator) or "failed" (by an error)
    seconds: float  # since it started
