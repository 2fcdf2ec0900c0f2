"""The results of a run: scores, bytes and times, and the tables of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from codistill.core.text import bytes_text, duration_text, percent_text
from codistill.nodes.faults import Fault
from codistill.results.agents import (
    AgainstAlone,
    AgentLine,
    counted_lines,
    gain_cell,
    honest_lines,
    in_percent,
    left_out_text,
    mean_label,
    mean_of_known,
    metric_name,
    score_cell,
    shown_lines,
)
from codistill.results.best_round import BestRound, best_round_table, find_best_round
from codistill.results.outputs import FeatureSpace, Outputs
from codistill.results.records import Row
from codistill.results.scores import ACCURACY, DEFAULT_SCORES, PREFIXES, RMSE, SAFEGUARD_WEIGHT, Score
from codistill.results.tables import AnyCell, Cell, Table, plain_text
from codistill.topology import Topology

# Accuracy lost since an agent's best round from which on it is reported: more than sampling of test data explains.
FELL_BEHIND = 0.1
_QUANTILES = {"10 % quantile": 0.1, "median": 0.5, "90 % quantile": 0.9}
_CELLS = {"alone": score_cell, "together": score_cell, "gain": gain_cell}  # of a line's figures


@dataclass(frozen=True)
class Summary:
    """A run in figures: from these the table and the report are made."""

    title: str
    protocol: str
    agents: dict[str, str]  # name -> model
    rows: list[Row]
    alone_rows: list[Row] | None
    counts: np.ndarray | None  # agents x classes
    class_names: tuple[str, ...]
    seconds: float
    test_samples: int
    facts: dict[str, Any] = field(default_factory=dict)  # recipe, versions, seed: shown as they are
    outputs: Outputs | None = None  # what the agents answer on average, after the last round
    features: tuple[FeatureSpace, ...] = ()  # by round, where they were kept
    topology: Topology | None = None  # who spoke to whom, if it is known
    faults: tuple[Fault, ...] = ()  # those that were injected
    test_part: str = "test"  # what the common test samples are: a test set, or a validation set
    scores: tuple[Score, ...] = DEFAULT_SCORES  # those asked for; the first is that of the main table

    @property
    def shown_scores(self) -> tuple[Score, ...]:
        """What is measured, the most important first: by default accuracy, or RMSE for real-valued targets."""
        if self.scores and self.scores != DEFAULT_SCORES:
            return self.scores
        return (RMSE,) if any(f"{prefix}rmse" in row for row in self.rows for prefix in PREFIXES) else (ACCURACY,)

    @property
    def metric(self) -> str:
        return self.shown_scores[0].name

    @property
    def task(self) -> str:
        """Whether classes or real values are learnt: "classification" or "regression"."""
        return self.shown_scores[0].task

    @cached_property
    def rounds(self) -> int:
        return max((int(row["round"]) for row in self.rows), default=0)

    @cached_property
    def evaluated(self) -> int:
        """The round of the last figures."""
        return max((int(row["round"]) for row in self.rows if "test_samples" in row), default=0)

    @property
    def tested_on(self) -> int:
        """Test samples behind the last figures."""
        tested = [row["test_samples"] for row in self.rows if "test_samples" in row]
        return int(tested[-1]) if tested else 0

    @property
    def clock_seconds(self) -> float | None:
        """Seconds since the start, by the clock of the run, at its last row; None: it had no clock."""
        return max((float(row["time"]) for row in self.rows if "time" in row), default=None)

    @property
    def by_own(self) -> bool:
        """Whether agents were measured on their own test data alone."""
        own = {f"own_{score.name}" for score in self.shown_scores}
        return not self.test_samples and any(own & row.keys() for row in self.rows)

    def lines(self, score: Score | None = None) -> list[AgentLine]:
        """One line per agent; unset: of the first score."""
        score = score or self.shown_scores[0]
        own = f"own_{score.name}"
        metric = own if self.by_own else score.name
        before, last, end = _newest(self.alone_rows or []), _newest(self.rows), self.evaluated
        byzantine = {row["agent"] for row in self.rows if row.get("lies")}
        sent, received, present = (dict.fromkeys(self.agents, 0) for _ in range(3))
        for row in self.rows:
            present[row["agent"]] += bool(row["present"])
            sent[row["agent"]] += row["sent"]
            received[row["agent"]] += row["received"]
        lines = []
        for name, model in self.agents.items():
            alone, together = before.get(name, {}), last.get(name, {})
            scores = alone.get(metric), together.get(metric), alone.get(own), together.get(own)
            scored = int(together["round"]) if together and together["round"] < end else None
            traffic = sent[name], received[name]
            lines.append(AgentLine(name, model, score, *scores, *traffic, name in byzantine, present[name], scored))
        return lines

    def against_alone(self) -> AgainstAlone | None:
        """Who is better off than alone on its own data; None where that was not measured."""
        return AgainstAlone.of(self.metric, self.lines())

    def fell_behind(self) -> list[str]:
        """Honest agents that end far below their own best round, in words: a mean hides one that collapsed."""
        best: dict[str, Row] = {}
        for row in self.rows:
            known = best.get(row["agent"], {"accuracy": -1.0})["accuracy"]
            if row.get("accuracy", -1.0) > known and not row.get("lies"):
                best[row["agent"]] = row
        last = _newest(self.rows)
        now = {name: last[name]["accuracy"] for name in best}
        return [
            f"{name}: {percent_text(now[name])} after {percent_text(row['accuracy'])} in round {row['round']}"
            for name, row in best.items()
            if row["accuracy"] - now[name] > FELL_BEHIND
        ]

    def scope(self) -> str:
        """What the figures were measured on, in words."""
        task, classes = self.task, len(self.class_names)
        if task == "classification":
            task += f", {classes:,} class{'' if classes == 1 else 'es'}"
        if not self.test_samples and self.by_own:
            own = f"{metric_name(self.metric)} on each agent's own test data"
            return f"{own} (there is no common test set; {task})"
        if not self.test_samples:
            found = "not evaluated: no common test set"
            return found if self.best_round() is None else f"{found}; see the table of validation samples"
        if not self.tested_on:
            return "not evaluated yet"
        part = "" if self.tested_on >= self.test_samples else f" a random {self.tested_on:,} of"
        samples = f"{self.test_samples:,} samples; {task}"
        return f"{metric_name(self.metric)} on{part} the common {self.test_part} set ({samples})"

    def table(self, *, page: bool = False) -> Table:
        """Each agent alone and together, on the common test set and on its own data, and its bytes.

        A page shows more agents, and in another column how each does alone on its own data.
        """
        lines = self.lines()
        (shown, which), counted = shown_lines(lines, page=page), counted_lines(lines)
        missed = any(line.rounds < self.rounds for line in lines)  # then a column counts the rounds of each agent
        own = ("own data alone", "own data together") if page else ("own data",)
        headings = [
            "agent", "model", *(["rounds"] if missed else []), "alone", "together", "gain", *own, "own gain", "sent",
            "received",
        ]  # fmt: skip
        rows: list[list[AnyCell]] = []
        for line in shown:
            taken = [Cell(f"{line.rounds:,} of {self.rounds:,}", line.rounds)] if missed else []
            cells = self.figures([line], page=page)["mean"]
            rows.append([line.name, line.described, *taken, *cells, *_traffic([line])])
        rows += _more_row(len(lines) - len(shown), len(headings), page=page)
        blank = [""] * (1 + missed)
        label = f"{mean_label(lines)}{' (bytes: sum)' if page else ''}"
        figures = self.figures(counted, page=page, many=len(shown) < len(lines))
        footer: list[list[AnyCell]] = [[label, *blank, *figures.pop("mean"), *_traffic(lines)]]
        if len(counted) > 1:
            footer += [[name, *blank, *cells, "", ""] for name, cells in figures.items()]
        if page:
            notes = [
                f"alone, together and gain: {self.scope()}", self._own_note(),
                "spread: the sample standard deviation over the agents" if len(counted) > 1 else "",
                which, *gain_notes(self.shown_scores[:1]),
            ]  # fmt: skip
            return Table(headings, _align(headings, 2), rows, footer, notes=[note for note in notes if note])
        against = self.against_alone()
        when = done = "1 round" if self.rounds == 1 else f"{self.rounds} rounds"
        if self.evaluated not in (0, self.rounds):
            when = f"round {self.evaluated}; {done} done"
        title, result = f"{self.title}: {self.scope()} after {when}", "" if against is None else against.sentence()
        return Table(headings, _align(headings, 2), rows, footer, title, result, self._notes(lines))

    def figures(self, lines: Sequence[AgentLine], *, page: bool = False, many: bool = False) -> dict[str, list[Cell]]:
        """As `_figures`, on the common test set and on the agents' own data."""
        score = self.shown_scores[0]
        on_common = _figures(score, lines, many=many)
        on_own = _figures(score, [line.on_own_data for line in lines], many=many)
        return {label: [*cells, *on_own[label][0 if page else 1 :]] for label, cells in on_common.items()}

    def _notes(self, lines: Sequence[AgentLine]) -> list[str]:
        """The notes below the table on a terminal."""
        notes = [shown_lines(lines)[1], left_out_text(lines)]
        if behind := self.fell_behind():
            more = f", and {len(behind) - 3} more" if len(behind) > 3 else ""
            notes.append(f"fell behind: {'; '.join(behind[:3])}{more}")
        if len(lines) > 1 and not any(line.sent for line in lines):
            notes.append("no agent sent anything")
        notes += [*missing_notes(self), self._own_note(), f"time: {duration_text(self.seconds)}"]
        return [note for note in notes if note]

    def _own_note(self) -> str:
        weighted = ", or on the common test set weighted by its class counts" if self.task == "classification" else ""
        return f"own data: {metric_name(self.metric)} on the agent's own test data{weighted}"

    def tables(self) -> list[Table]:
        """The table of the first score; where there are any, of further scores, the safeguard, and the best round."""
        found = self.table(), further_table(self), safeguard_table(self), self.best_round_table()
        return [table for table in found if table is not None]

    def best_round(self) -> BestRound | None:
        """The best round by validation; None without validation samples."""
        return find_best_round(self.rows, self.shown_scores[0])

    def best_round_table(self, *, page: bool = False) -> Table | None:
        """Each agent in the last round, and in the best by validation; None without validation samples."""
        return best_round_table(self.rows, self.shown_scores[0], page=page)

    def table_text(self, width: int = 110) -> str:
        return plain_text(self.tables(), width)


def _newest(rows: list[Row]) -> dict[str, Row]:
    return {row["agent"]: row for row in rows if "test_samples" in row}


def _traffic(lines: Sequence[AgentLine]) -> list[Cell]:
    sums = sum(line.sent for line in lines), sum(line.received for line in lines)
    return [Cell(bytes_text(count), count) for count in sums]


def _figures(score: Score, lines: Sequence[AgentLine], *, many: bool = False) -> dict[str, list[Cell]]:
    """By label, cells of alone, together and gain: their mean, the worst, of many agents quantiles, the spread."""
    found: dict[str, list[Cell]] = {}
    for kind, cell in _CELLS.items():
        values = [getattr(line, kind) for line in lines]
        worst = _worst(values, score.greater_is_better or kind == "gain")
        figures = {"mean": mean_of_known(values), "worst": worst, **(_quantiles(values) if many else {})}
        for label, value in figures.items():
            found.setdefault(label, []).append(cell(score.name, value))
        found.setdefault("spread", []).append(_spread(score.name, values))
    return found


def _worst(values: Sequence[float | None], greater_is_better: bool = True) -> float | None:
    known = [value for value in values if value is not None]
    return (min if greater_is_better else max)(known, default=None)


def _quantiles(values: Sequence[float | None]) -> dict[str, float | None]:
    known = np.array([value for value in values if value is not None and not math.isnan(value)])
    return {name: float(np.quantile(known, q)) if len(known) else None for name, q in _QUANTILES.items()}


def _spread(metric: str, values: Sequence[float | None]) -> Cell:
    """The sample standard deviation; '-' if fewer than two values are known, or one is not finite."""
    known = [value for value in values if value is not None]
    if len(known) < 2 or not all(map(math.isfinite, known)):
        return Cell("-")
    spread = statistics.stdev(known)
    return Cell(f"± {100 * spread:.1f}" if in_percent(metric) else f"± {spread:.3g}")


def _more_row(hidden: int, columns: int, *, page: bool) -> list[list[AnyCell]]:
    """The row for agents that are not shown; on a page, which sorts rows, a note has it."""
    return [[f"... {hidden:,} more", *[""] * (columns - 1)]] if hidden and not page else []


def _align(headings: Sequence[str], left: int) -> str:
    """The first columns to the left, and the numbers after them to the right."""
    return "l" * left + "r" * (len(headings) - left)


def gain_notes(scores: Iterable[Score]) -> list[str]:
    """How to read the gains in some scores."""
    by_name = {score.name: score for score in scores}
    shares = [metric_name(name) for name in by_name if in_percent(name)]
    errors = [metric_name(name) for name, score in by_name.items() if not score.greater_is_better]
    return [
        *([f"gains in {' and '.join(shares)} are in percentage points"] if shares else []),
        *([f"lower is better: {', '.join(errors)}"] if errors else []),
        "a gain is positive when it is better",
    ]


_MOST_NAMED = 3
_FURTHER_NOTE = "↓: lower is better; in brackets the gain over alone, which is positive when it is better"
_FURTHER_PAGE_NOTE = "↓: lower is better; a gain over alone is positive when it is better"


def further_table(summary: Summary, *, page: bool = False) -> Table | None:
    """Every score but the first of each agent after the run, with its gain over alone; None if there is one score."""
    scores = summary.shown_scores[1:]
    if not scores:
        return None
    headings = ["agent"]
    for score in scores:
        name = score.words if score.greater_is_better else f"{score.words} ↓"
        headings += [f"{name}, alone", "together", "gain"] if page else [name]

    def cells(score: Score, lines: Sequence[AgentLine]) -> dict[str, list[Cell]]:
        """On a terminal one cell for each score: the score together, and the gain in brackets."""
        found = _figures(score, lines)
        for label, (_, together, gain) in found.items() if not page else ():
            text = together.text if gain.value is None else f"{together.text} ({gain.text})"
            found[label] = [Cell(text, together.value)]
        return found

    by_score = [summary.lines(score) for score in scores]
    shown = {line.name for line in shown_lines(summary.lines(), page=page)[0]}
    rows: list[list[AnyCell]] = [
        [lines[0].name, *(cell for line in lines for cell in cells(line.score, [line])["mean"])]
        for lines in zip(*by_score, strict=True)
        if lines[0].name in shown
    ]
    rows += _more_row(len(by_score[0]) - len(shown), len(headings), page=page)
    counted = [counted_lines(lines) for lines in by_score]
    figures = [cells(score, lines) for score, lines in zip(scores, counted, strict=True)]
    footer: list[list[AnyCell]] = [[label, *(cell for each in figures for cell in each[label])] for label in figures[0]]
    labels = {mean_label(lines) for lines in by_score}
    footer[0][0] = labels.pop() if len(labels) == 1 else "mean"
    if max(map(len, counted)) < 2:
        del footer[1:]
    if page:
        notes = [_FURTHER_PAGE_NOTE, *missing_notes(summary)]
        return Table(headings, _align(headings, 1), rows, footer, notes=notes)
    return Table(headings, _align(headings, 1), rows, footer, "further scores after the run", notes=[_FURTHER_NOTE])


def missing_notes(summary: Summary) -> list[str]:
    """Which agents lack a score that was asked for, and what it needs; empty if none does."""
    notes = []
    for score in summary.shown_scores if summary.evaluated else ():
        lacking = [line.name for line in summary.lines(score) if line.together is None]
        if lacking and score not in DEFAULT_SCORES:  # those can be computed of any answers
            more = f" and {len(lacking) - _MOST_NAMED:,} more" if len(lacking) > _MOST_NAMED else ""
            who = f"{', '.join(lacking[:_MOST_NAMED])}{more}"
            notes.append(f"{score.words}: no value for {who}, left out of its means (it needs {score.needs})")
    return notes


def guarded_lines(summary: Summary) -> dict[str, list[float | None]]:
    """The figures of `safeguard_table` of each honest agent with a safeguard.

    Scores are those after the run, on its own data or else on the common test set.
    """
    score = summary.shown_scores[0]
    last, before = _newest(summary.rows), _newest(summary.alone_rows or [])
    lines: dict[str, list[float | None]] = {}
    for name in summary.agents:
        row = last.get(name, {})
        if SAFEGUARD_WEIGHT not in row or row.get("lies"):
            continue
        key = f"own_{score.name}" if f"own_{score.name}" in row else score.name
        alone, taught, guarded = before.get(name, {}).get(key), row.get(f"taught_{key}"), row.get(key)
        gains = score.gain(alone, taught), score.gain(alone, guarded)
        lines[name] = [alone, taught, gains[0], guarded, gains[1], row[SAFEGUARD_WEIGHT]]
    return lines


_GUARDED_HEADINGS = ("agent", "alone", "taught", "gain", "safeguarded", "gain", "weight")
_GUARDED_NOTE = (
    "taught: what the protocol alone would answer; safeguarded: weighed against the agent's own model by samples that "
    "it holds out; weight: the share of what it was taught"
)


def safeguard_table(summary: Summary, *, page: bool = False) -> Table | None:
    """Each agent alone, as it was taught, and with the safeguard; None where no agent had a safeguard."""
    metric, lines = summary.metric, guarded_lines(summary)
    if not lines:
        return None

    def cells(label: str, figures: Sequence[float | None]) -> list[AnyCell]:
        makers = (gain_cell if heading == "gain" else score_cell for heading in _GUARDED_HEADINGS[1:-1])
        weight = figures[-1]
        shown = [make(metric, value) for make, value in zip(makers, figures[:-1], strict=True)]
        return [label, *shown, "-" if weight is None else Cell(f"{weight:.2f}", weight)]

    shown = {line.name for line in shown_lines(summary.lines(), page=page)[0]}
    rows = [cells(name, figures) for name, figures in lines.items() if name in shown]
    rows += _more_row(len(lines) - len(rows), len(_GUARDED_HEADINGS), page=page)
    footer: list[list[AnyCell]] = []
    if len(lines) > 1:
        columns = list(zip(*lines.values(), strict=True))
        taught, guarded = (gain_cell(metric, _worst(columns[place])) for place in (2, 4))
        footer = [cells("mean", list(map(mean_of_known, columns))), ["worst gain", "", "", taught, "", guarded, ""]]
    title = "" if page else "the safeguard, on each agent's own data"
    return Table(_GUARDED_HEADINGS, _align(_GUARDED_HEADINGS, 1), rows, footer, title, notes=[_GUARDED_NOTE])


def comparison_table(summaries: Sequence[Summary]) -> Table:
    headings = [
        "run", "protocol", "agents", "rounds", "alone", "together", "gain", "own data", "own gain", "better", "bytes",
        "time",
    ]  # fmt: skip
    notes = ["better: agents that are better than alone on their own data"]
    timed = any(summary.clock_seconds is not None for summary in summaries)
    if timed:
        headings.append("clock")
        notes.append("clock: seconds by the clock of the run, virtual in a simulation")
    rows: list[list[AnyCell]] = []
    for summary in summaries:
        lines, against, clock = summary.lines(), summary.against_alone(), summary.clock_seconds
        byzantine = len(lines) - len(honest_lines(lines))
        if byzantine:
            notes.append("Byzantine agents are left out of all means")
        if left_out := left_out_text(lines):
            notes.append(f"{summary.title}: {left_out}")
        traffic = sum(line.sent + line.received for line in lines)
        rows.append(
            [
                summary.title,
                summary.protocol,
                Cell(f"{len(lines)} ({byzantine} Byzantine)" if byzantine else f"{len(lines)}", len(lines)),
                Cell(str(summary.rounds), summary.rounds),
                *summary.figures(counted_lines(lines))["mean"],
                "-" if against is None else Cell(against.share, len(against.better)),
                Cell(bytes_text(traffic), traffic),
                Cell(duration_text(summary.seconds), summary.seconds),
                *([] if not timed else ["-" if clock is None else Cell(f"{clock:.4g} s", clock)]),
            ]
        )
    title = "means over the agents, on each run's common test set"
    return Table(headings, _align(headings, 2), rows, title=title, notes=list(dict.fromkeys(notes)))
