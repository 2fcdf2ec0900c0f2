"""What is told of a run while it goes on: one record for each event, and the rows of its metrics.

A row is a plain dict: "round", "agent", "present", "sent" and "received" (bytes), "steps" (gradient steps) and
"exchanges" (how often the agent waited for messages of others), the protocol's own measures, and after an evaluation
the scores by name ("accuracy", or "rmse" for real values, unless others are asked for; on the agent's own data
"own_accuracy", on the samples that it holds out of its own "validation_accuracy") with "test_samples".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from codistill.results.outputs import FeatureSpace, Outputs

if TYPE_CHECKING:
    from codistill.results.summary import Summary

Row = dict[str, Any]
Scores = dict[str, float]
# What a row may hold beside scores and a protocol's measures.
ROW_KEYS = frozenset({
    "round", "agent", "present", "lies", "sent", "received", "steps", "exchanges", "from_hub", "time", "test_samples",
})  # fmt: skip


@dataclass(frozen=True)
class Baseline:
    """What agents have reached and done alone."""

    scores: dict[str, Scores]
    """Scores at the end, by name of the agent."""
    steps: dict[str, list[int]]
    """Gradient steps of each round, of the agents that have told them."""


@dataclass(frozen=True)
class RunStarted:
    """A run begins, or continues from a checkpoint."""

    protocol: str
    """The name of the protocol."""
    agents: tuple[str, ...]
    """Names of the agents in the metrics."""
    rounds: int
    """The number of rounds that are planned."""
    done: int = 0
    """The number of rounds that were done before, if the run is resumed."""
    rows: tuple[Row, ...] = ()
    """The metrics of the rounds done before."""
    outputs: Outputs | None = None
    """The agents' mean outputs, if all rounds were done before."""
    notes: tuple[str, ...] = ()
    """For the person who resumes, such as about a damaged checkpoint."""
    scores: tuple[str, ...] = ("accuracy", "rmse")
    """Names of the scores, the most important first; those that do not suit the task are in no row."""
    features: tuple[FeatureSpace, ...] = ()
    """The agents' features on some test samples, after those of the rounds done before at which they were kept."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What the run is run with, by the names that a recipe has for it, such as "protocol.name"."""
    folder: Path | None = None
    """The folder of the run, if it has one."""


@dataclass(frozen=True)
class Evaluated:
    """The agents have been evaluated at the end of a round."""

    round: int
    """Rounds done, from 1."""
    scores: dict[str, Scores]
    """Scores by name of the agent; empty for an agent that has no model yet."""
    test_samples: int
    """The number of test samples."""
    outputs: Outputs | None = None
    """The agents' mean outputs, after the last round."""


@dataclass(frozen=True)
class RoundEnded:
    """What is known at the end of a round."""

    round: int
    """Rounds done, from 1."""
    rows: list[Row]
    """The metrics of this round, one row per agent."""
    events: list[str]
    """Rejected messages, absent agents, models that diverged, and other remarks, one sentence each."""
    seconds: float
    """The time of the round with its evaluation, without waiting for agents."""
    outputs: Outputs | None = None
    """The agents' mean outputs, after the last round."""
    features: FeatureSpace | None = None
    """The agents' features on some test samples, after the rounds of `features_at`."""


@dataclass(frozen=True)
class RunFinished:
    """A run is over, for whatever reason."""

    done: int
    """The number of rounds that are done."""
    rounds: int
    """The number of rounds that were planned."""
    outcome: str
    """One of "complete", "stopped" (by an observer or an operator) and "failed" (by an error)."""
    seconds: float
    """The time since the run started."""
    by_operator: bool = False
    """Whether an operator has stopped it, by Ctrl-C or a signal."""
    summary: Callable[[], Summary] | None = None
    """Makes the summary of the run so far, with the scores of the agents alone: see `Result.summary`."""
