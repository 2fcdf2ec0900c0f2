"""The scores of a run by round and by agent, arranged for charts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

import numpy as np

from codistill.nodes.faults import Fault
from codistill.results.agents import AgentLine, counted_lines, mean_of_known, metric_name, shown_lines
from codistill.results.records import ROW_KEYS, Row
from codistill.results.scores import DEFAULT_SCORES, PREFIXES
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
        return [line.name for line in self.lines]

    @cached_property
    def drawn(self) -> dict[int, str]:
        """The agents that have lines of their own, by their places: all or, of very many, the best and the worst."""
        shown = {line.name for line in shown_lines(self.lines, page=True)[0]}
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
    rounds = sorted(by_round)
    return RunScores(
        title=summary.title,
        metric=metric,
        own=own and bool(rounds),
        lines=summary.lines(),
        rounds=np.array(rounds),
        values=[np.array(by_round[done]) for done in rounds],
        traffic=_up_to(traffic, rounds).astype(float),
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
    return _up_to({t: fmean(counts) if counts else 0.0 for t, counts in by_round.items()}, rounds)


def _up_to(by_round: Mapping[int, float], rounds: Sequence[int]) -> np.ndarray:
    """What is counted in each round, summed up to each of some rounds."""
    done = sorted(by_round)
    so_far = dict(zip(done, np.cumsum([by_round[t] for t in done]), strict=True))
    return np.array([so_far[t] for t in rounds])


# --- What a protocol measured of its agents, beside their scores.

# Title and explanation of what the bundled protocols measure.
_KNOWN = {
    "discriminator_accuracy": (
        "accuracy of the discriminator: how often it recognises which agent an output is from",
        "At chance level the discriminator cannot tell the agents apart: it has not learnt yet, or their outputs are "
        "alike.",
    ),
    "consensus_error": (
        "consensus error: squared distance of an agent's soft-decisions from the weighted mean with its neighbours'",
        "At zero, neighbours have the same soft-decisions on the public data. Only neighbours whose messages arrive "
        "are compared, so the effect of a network split shows after it ends.",
    ),
    "safeguard_weight": (
        "weight of the safeguard: how much of an agent's answer is from what it was taught",
        "At zero an agent answers with its own model, as if it were alone; at one, as the protocol taught it.",
    ),
    "own_rounds": (
        "rounds of its own that an agent has completed",
        "In a run without rounds every agent goes on at its own pace; a round of this chart is a period of time.",
    ),
    "accuracy_before_dkd": (
        "accuracy of the mean of weights, before distillation, on samples of an agent's own",
        "A batch of each agent's training samples: what distillation is given.",
    ),
    "accuracy_after_dkd": (
        "accuracy after distillation, on the same samples",
        "Below the accuracy before it, distillation has made the mean worse: its learning rate may be too large.",
    ),
    "loss_before_dkd": (
        "cross-entropy of the mean of weights, before distillation, on samples of an agent's own",
        "A batch of each agent's training samples: what distillation is given.",
    ),
    "loss_after_dkd": (
        "cross-entropy after distillation, on the same samples",
        "Above the loss before it, distillation has made the mean worse: its learning rate may be too large.",
    ),
    "disagreement": (
        "disagreement: public samples on which an agent's prediction differs from that of the mean",
        "At zero all agents predict the same classes, right or wrong.",
    ),
}


@dataclass(frozen=True)
class Measure:
    """One measure, of all rounds in which it was taken."""

    title: str  # for a person
    sentence: str  # how to read it; empty for a measure of a protocol that is not bundled
    agents: int
    rounds: np.ndarray
    values: list[np.ndarray]  # of each such round: those of the honest agents for which it was taken
    chance: float | None  # what guessing would give
    faults: tuple[Fault, ...]  # those that were injected


def measures(summary: Summary) -> list[Measure]:
    found: dict[str, dict[int, list[float]]] = {}
    scores = {f"{prefix}{score.name}" for score in (*DEFAULT_SCORES, *summary.scores) for prefix in PREFIXES}
    others = ROW_KEYS | scores
    for row in summary.rows:
        if row.get("lies"):
            continue  # as in all means: honest agents only
        for name, value in row.items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if name not in others and is_number:
                found.setdefault(name, {}).setdefault(int(row["round"]), []).append(float(value))
    agents, measured = len(summary.agents), []
    for name, by_round in found.items():
        title, sentence = _KNOWN.get(name, (name.replace("_", " "), ""))
        rounds = sorted(by_round)
        values = [np.array(by_round[done]) for done in rounds]
        chance = 1 / agents if name == "discriminator_accuracy" else None
        measured.append(Measure(title, sentence, agents, np.array(rounds), values, chance, summary.faults))
    return measured
