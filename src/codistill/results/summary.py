"""The results of a run in figures, and the tables of them for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from io import StringIO
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from codistill.faults import Fault
from codistill.results.agent_lines import (
    AgainstAlone,
    AgentLine,
    counted_lines,
    left_out_text,
    mean_label,
    mean_of_known,
    rounds_text,
    spread_of_known,
    worst_of_known,
)
from codistill.results.feature_space import FeatureSpace
from codistill.results.further_scores import further_table, missing_notes
from codistill.results.many_agents import MOST_LINES, quantiles, shown_lines, shown_text
from codistill.results.metric_text import gain_text, metric_name, score_text, spread_text
from codistill.results.outputs import Outputs
from codistill.results.records import Row
from codistill.results.safeguard_table import safeguard_table
from codistill.results.scores import ACCURACY, DEFAULT_SCORES, PREFIXES, RMSE, Score
from codistill.text import bytes_text, duration_text, percent_text
from codistill.topology import Topology

# Accuracy lost since an agent's best round from which on it is reported: more than sampling of test data explains.
FELL_BEHIND = 0.1


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
        return (RMSE,) if any("rmse" in row or "own_rmse" in row for row in self.rows) else (ACCURACY,)

    @property
    def metric(self) -> str:
        """The name of the first score."""
        return self.shown_scores[0].name

    @property
    def score_keys(self) -> set[str]:
        """The keys of all scores in the rows."""
        return {f"{prefix}{score.name}" for score in (*DEFAULT_SCORES, *self.scores) for prefix in PREFIXES}

    @property
    def task(self) -> str:
        """Whether classes or real values are learnt: "classification" or "regression"."""
        return self.shown_scores[0].task

    @cached_property
    def rounds(self) -> int:
        """Rounds done."""
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
        last, alone = _newest(self.rows), _newest(self.alone_rows or [])
        byzantine = {row["agent"] for row in self.rows if row.get("lies")}
        sent, received, present = (dict.fromkeys(self.agents, 0) for _ in range(3))
        end = self.evaluated
        scored = {name: int(row["round"]) for name, row in last.items() if row["round"] < end}
        for row in self.rows:
            present[row["agent"]] += bool(row["present"])
            sent[row["agent"]] += row["sent"]
            received[row["agent"]] += row["received"]
        return [
            AgentLine(
                name,
                model,
                alone.get(name, {}).get(metric),
                last.get(name, {}).get(metric),
                alone.get(name, {}).get(own),
                last.get(name, {}).get(own),
                sent[name],
                received[name],
                name in byzantine,
                present[name],
                scored.get(name),
                score.greater_is_better,
            )
            for name, model in self.agents.items()
        ]

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
        if not self.test_samples and self.by_own:
            own = f"{metric_name(self.metric)} on each agent's own test data"
            return f"{own} (there is no common test set; {self.task_text()})"
        if not self.test_samples:
            return "not evaluated: no common test set"
        if not self.tested_on:
            return "not evaluated yet"
        part = "" if self.tested_on >= self.test_samples else f" a random {self.tested_on:,} of"
        samples = f"{self.test_samples:,} samples; {self.task_text()}"
        return f"{metric_name(self.metric)} on{part} the common {self.test_part} set ({samples})"

    def task_text(self) -> str:
        """'classification, 3 classes'."""
        classes = len(self.class_names)
        counted = f", {classes:,} class{'' if classes == 1 else 'es'}" if self.task == "classification" else ""
        return f"{self.task}{counted}"

    def table(self, most: int = MOST_LINES) -> Table:
        """Each agent alone and together, on the common test set and on its own data; bytes; for the terminal."""
        table = Table(title=f"{escape(self.title)}: {self.scope()} after {self._when()}", title_justify="left")
        for heading in ("agent", "model"):
            table.add_column(heading, overflow="fold")
        lines = self.lines()
        missed = any(line.rounds < self.rounds for line in lines)
        counts = ["rounds"] if missed else []  # a column where some agent was not in all of them
        for heading in (*counts, "alone", "together", "gain", "own data", "own gain", "sent", "received"):
            table.add_column(heading, justify="right")
        shown = shown_lines(lines, most)
        for line in shown:
            traffic = (bytes_text(line.sent), bytes_text(line.received))
            taken = [rounds_text(line, self.rounds)] if missed else []
            table.add_row(escape(line.name), escape(line.described), *taken, *self.mean_cells([line]), *traffic)
        if len(shown) < len(lines):
            table.add_row(f"... {len(lines) - len(shown):,} more", *[""] * (len(table.columns) - 1))
        table.add_section()
        traffic = (bytes_text(sum(line.sent for line in lines)), bytes_text(sum(line.received for line in lines)))
        counted = counted_lines(lines)
        table.add_row(mean_label(lines), *[""] * (1 + missed), *self.mean_cells(counted), *traffic)
        for label, cells in self._footer(counted, with_quantiles=len(shown) < len(lines)).items():
            table.add_row(label, *[""] * (1 + missed), *cells, "", "")
        notes = [shown_text(lines, most), *self._notes(lines)]
        table.caption, table.caption_justify = "\n".join(note for note in notes if note), "left"
        return table

    def mean_cells(self, lines: Sequence[AgentLine]) -> list[str]:
        """Alone, together, gain; together and gain on own data: the means of some lines."""
        own = [line.on_own_data for line in lines]
        return [
            score_text(self.metric, mean_of_known([line.alone for line in lines])),
            score_text(self.metric, mean_of_known([line.together for line in lines])),
            gain_text(self.metric, mean_of_known([line.gain for line in lines])),
            score_text(self.metric, mean_of_known([line.together for line in own])),
            gain_text(self.metric, mean_of_known([line.gain for line in own])),
        ]

    def _footer(self, lines: Sequence[AgentLine], *, with_quantiles: bool) -> dict[str, list[str]]:
        """Of some lines in each column: the worst figure, quantiles, and the standard deviation."""
        own, better = [line.on_own_data for line in lines], self.shown_scores[0].greater_is_better
        columns = [(lines, "alone"), (lines, "together"), (lines, "gain"), (own, "together"), (own, "gain")]
        found: dict[str, list[str]] = {}
        for part, name in columns if len(lines) > 1 else []:
            values = [getattr(line, name) for line in part]
            text = gain_text if name == "gain" else score_text
            worst = worst_of_known(values, greater_is_better=better or name == "gain")
            found.setdefault("worst", []).append(text(self.metric, worst))
            for label, value in quantiles(values).items() if with_quantiles else ():
                found.setdefault(label, []).append(text(self.metric, value))
            found.setdefault("spread", []).append(spread_text(self.metric, spread_of_known(values)))
        return found

    def _notes(self, lines: Sequence[AgentLine]) -> list[str]:
        """What stands below the table."""
        notes = []
        if against := self.against_alone():
            notes.append(f"[not dim not italic]{escape(against.sentence())}[/]")
        if left_out := left_out_text(lines):
            notes.append(escape(left_out))
        if behind := self.fell_behind():
            more = f", and {len(behind) - 3} more" if len(behind) > 3 else ""
            notes.append(f"fell behind: {escape('; '.join(behind[:3]))}{more}")
        if len(lines) > 1 and not any(line.sent for line in lines):
            notes.append("no agent sent anything")
        notes += [escape(note) for note in missing_notes(self)]
        weighted = ", or on the common test set weighted by its class counts" if self.task == "classification" else ""
        notes.append(f"own data: {metric_name(self.metric)} on the agent's own test data{weighted}")
        return [*notes, f"time: {duration_text(self.seconds)}"]

    def table_text(self, width: int = 110) -> str:
        """The table as plain text: without colours, wherever it is asked for."""
        out = StringIO()
        # In a notebook rich takes every console for a screen with colours, and FORCE_COLOR asks for them.
        plain = Console(file=out, width=width, force_terminal=False, force_jupyter=False, color_system=None)
        for table in self.tables():
            plain.print(table)
        return out.getvalue()

    def tables(self, most: int = MOST_LINES) -> list[Table]:
        """The table of the first score; where there are any, of further scores, and of the safeguard."""
        tables = [self.table(most), *([further_table(self, most)] if len(self.shown_scores) > 1 else [])]
        guarded = safeguard_table(self, most)
        return tables if guarded is None else [*tables, guarded]

    def _when(self) -> str:
        done = "1 round" if self.rounds == 1 else f"{self.rounds} rounds"
        return done if self.evaluated in (0, self.rounds) else f"round {self.evaluated}; {done} done"


def _newest(rows: list[Row]) -> dict[str, Row]:
    return {row["agent"]: row for row in rows if "test_samples" in row}
