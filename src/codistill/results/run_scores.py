"""The scores of a run by round and by agent, arranged for charts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

import numpy as np

from codistill.faults import Fault
from codistill.results.agent_lines import AgentLine, counted_lines, mean_of_known
from codistill.results.many_agents import FEW_ON_PAGE, MOST_ON_PAGE, shown_lines
from codistill.results.metric_text import metric_name
from codistill.results.records import Row
from codistill.results.summary import Summary


@dataclass(frozen=True)
class RunScores:
    """The scores of a run, from its rows."""

    title: str
    metric: str
    own: bool  # scores are on each agent's own data, as there is no common test set
    lines: list[AgentLine]
    rounds: np.ndarray  # those that were evaluated
    values: list[np.ndarray]  # of each such round: the scores of the honest agents that were evaluated
    traffic: np.ndarray  # bytes sent and received by all agents up to each such round
    times: np.ndarray | None  # seconds since the start at the end of each such round, if the run had a clock
    curves: dict[str, tuple[list[int], list[float]]]  # of each agent: rounds and scores
    # Up to each such round, summed over rounds: the mean of the agents that took part. None: it was not counted.
    steps: np.ndarray | None = None
    exchanges: np.ndarray | None = None
    faults: tuple[Fault, ...] = ()  # those that were injected
    test_part: str = "test"
    greater_is_better: bool = True  # of the metric

    @cached_property
    def names(self) -> list[str]:
        """The agents."""
        return [line.name for line in self.lines]

    @cached_property
    def drawn(self) -> dict[int, str]:
        """The agents that have lines of their own, by their places: all or, of very many, the best and the worst."""
        shown = {line.name for line in shown_lines(self.lines, MOST_ON_PAGE, FEW_ON_PAGE)}
        return {index: name for index, name in enumerate(self.names) if name in shown}

    @property
    def compared(self) -> list[AgentLine]:
        """Lines whose alone and together are the scores that are drawn."""
        return [line.on_own_data for line in self.lines] if self.own else self.lines

    @property
    def mean(self) -> np.ndarray:
        """Mean score of each evaluated round."""
        return np.array([values.mean() for values in self.values])

    @property
    def alone(self) -> float | None:
        """Mean score of the agents alone."""
        return mean_of_known([line.alone for line in counted_lines(self.compared)])

    @property
    def together(self) -> float | None:
        """Mean score of the agents after the run."""
        return mean_of_known([line.together for line in counted_lines(self.compared)])

    @property
    def gain(self) -> float | None:
        """Mean gain of the agents of which both scores are known."""
        return mean_of_known([line.gain for line in counted_lines(self.compared)])

    def axis_label(self, *, own: bool | None = None) -> str:
        """The metric, what it is measured on and which way is better; by default that of the curves."""
        own = self.own if own is None else own
        data = "each agent's own data" if own else f"the common {self.test_part} set"
        return f"{metric_name(self.metric)} on {data}" + ("" if self.greater_is_better else " (lower is better)")


def scores_of(summary: Summary) -> RunScores:
    """Arrange the scores of a run."""
    metric = summary.metric
    own = not any(metric in row for row in summary.rows)
    key = f"own_{metric}" if own else metric
    by_round: dict[int, list[float]] = {}
    traffic: dict[int, int] = {}
    times: dict[int, float] = {}
    curves: dict[str, tuple[list[int], list[float]]] = {name: ([], []) for name in summary.agents}
    for row in summary.rows:
        done = int(row["round"])
        traffic[done] = traffic.get(done, 0) + row["sent"] + row["received"]
        if "time" in row:
            times[done] = row["time"]
        if key in row:
            if not row.get("lies"):
                by_round.setdefault(done, []).append(row[key])
            curves[row["agent"]][0].append(done)
            curves[row["agent"]][1].append(row[key])
    done_in_order = sorted(traffic)
    up_to = dict(zip(done_in_order, np.cumsum([traffic[done] for done in done_in_order]), strict=True))
    rounds = sorted(by_round)
    return RunScores(
        title=summary.title,
        metric=metric,
        own=own and bool(rounds),
        lines=summary.lines(),
        rounds=np.array(rounds),
        values=[np.array(by_round[done]) for done in rounds],
        traffic=np.array([up_to[done] for done in rounds], dtype=float),
        times=np.array([times[done] for done in rounds]) if rounds and times.keys() >= set(rounds) else None,
        curves=curves,
        steps=_counted(summary.rows, "steps", rounds),
        exchanges=_counted(summary.rows, "exchanges", rounds),
        faults=summary.faults,
        test_part=summary.test_part,
        greater_is_better=summary.shown_scores[0].greater_is_better,
    )


def _counted(rows: Sequence[Row], name: str, rounds: Sequence[int]) -> np.ndarray | None:
    """A count up to each of some rounds; None where a run of an older version has no such column."""
    if not all(name in row for row in rows):
        return None
    by_round: dict[int, list[int]] = {}
    for row in rows:
        counts = by_round.setdefault(int(row["round"]), [])
        if row["present"]:
            counts.append(row[name])
    done = sorted(by_round)
    so_far = np.cumsum([fmean(by_round[t]) if by_round[t] else 0.0 for t in done])
    up_to = dict(zip(done, so_far, strict=True))
    return np.array([up_to[t] for t in rounds])
