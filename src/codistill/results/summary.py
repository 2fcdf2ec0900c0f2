"""The figures that a person is shown at the end of a run, whoever shows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from io import StringIO
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from codistill.faults import Fault
from codistill.results.outputs import Outputs
from codistill.results.records import Row
from codistill.text import bytes_text, duration_text
from codistill.topology import Topology

FALLEN = 0.1  # accuracy lost since the best round that is told: more than evaluation on a part can explain


@dataclass(frozen=True)
class AgentLine:
    """One agent's line in the final table; scores are None where they were not measured."""

    name: str
    model: str
    alone: float | None
    together: float | None
    own_alone: float | None
    own_together: float | None
    sent: int
    received: int
    lies: bool = False  # on purpose, in some round; such agents are left out of means

    @property
    def described(self) -> str:
        """The model, and a warning beside that of a liar."""
        return f"{self.model} (lies)" if self.lies else self.model

    @property
    def gain(self) -> float | None:
        """Together minus alone."""
        return None if self.alone is None or self.together is None else self.together - self.alone


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
    topology: Topology | None = None  # who spoke to whom, if it is known
    faults: tuple[Fault, ...] = ()  # those that were injected
    test_part: str = "test"  # what the common test samples are: a test set, or a validation set

    @property
    def metric(self) -> str:
        """What is measured: accuracy, or rmse for real-valued targets."""
        return "rmse" if any("rmse" in row or "own_rmse" in row for row in self.rows) else "accuracy"

    @property
    def rounds(self) -> int:
        """Rounds done."""
        return max((int(row["round"]) for row in self.rows), default=0)

    @property
    def evaluated(self) -> int:
        """The round of the last figures."""
        return max((int(row["round"]) for row in self.rows if "test_samples" in row), default=0)

    @property
    def tested_on(self) -> int:
        """Test samples behind the last figures."""
        tested = [row["test_samples"] for row in self.rows if "test_samples" in row]
        return int(tested[-1]) if tested else 0

    @property
    def by_own(self) -> bool:
        """Whether agents were measured on their own test data alone."""
        return not self.test_samples and any(f"own_{self.metric}" in row for row in self.rows)

    def lines(self) -> list[AgentLine]:
        """One line per agent."""
        own = f"own_{self.metric}"
        metric = own if self.by_own else self.metric
        last, alone = _newest(self.rows), _newest(self.alone_rows or [])
        liars = {row["agent"] for row in self.rows if row.get("lies")}
        sent, received = dict.fromkeys(self.agents, 0), dict.fromkeys(self.agents, 0)
        for row in self.rows:
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
                name in liars,
            )
            for name, model in self.agents.items()
        ]

    def fallen(self) -> list[str]:
        """Honest agents that end far below what they once had, in words: one that collapsed is hidden by a mean."""
        best: dict[str, Row] = {}
        for row in self.rows:
            known = best.get(row["agent"], {"accuracy": -1.0})["accuracy"]
            if row.get("accuracy", -1.0) > known and not row.get("lies"):
                best[row["agent"]] = row
        last = _newest(self.rows)
        now = {name: last[name]["accuracy"] for name in best}
        return [
            f"{name}: {self._score(now[name])} after {self._score(row['accuracy'])} in round {row['round']}"
            for name, row in best.items()
            if row["accuracy"] - now[name] > FALLEN
        ]

    def scope(self) -> str:
        """What the figures were measured on, in words."""
        if not self.test_samples and self.by_own:
            return f"{self.metric} on each agent's own test data, as there is no common test set,"
        if not self.test_samples:
            return "not evaluated: no common test set"
        if not self.tested_on:
            return "not evaluated yet"
        part = "" if self.tested_on >= self.test_samples else f" a random {self.tested_on:,} of"
        return f"{self.metric} on{part} the common {self.test_part} set ({self.test_samples:,} samples)"

    def table(self, most: int = 30) -> Table:
        """Each agent alone, together, gain; bytes; for the terminal."""
        table = Table(title=f"{escape(self.title)}: {self.scope()} after {self._when()}", title_justify="left")
        table.add_column("agent")
        table.add_column("model")
        for heading in ("alone", "together", "gain", "own mix", "sent", "received"):
            table.add_column(heading, justify="right")
        lines = self.lines()
        for line in lines[:most]:
            table.add_row(
                line.name, escape(line.described), self._score(line.alone), self._score(line.together),
                self._gain(line.gain), self._score(line.own_together), bytes_text(line.sent), bytes_text(line.received),
            )  # fmt: skip
        if len(lines) > most:
            table.add_row(f"... {len(lines) - most} more", *[""] * 7)
        table.add_section()
        honest = honest_lines(lines)
        table.add_row(
            mean_words(lines), "", self._score(_mean([line.alone for line in honest])),
            self._score(_mean([line.together for line in honest])), self._gain(_mean([line.gain for line in honest])),
            self._score(_mean([line.own_together for line in honest])),
            bytes_text(sum(line.sent for line in lines)), bytes_text(sum(line.received for line in lines)),
        )  # fmt: skip
        table.caption = (
            f"{duration_text(self.seconds)}; 'own mix': {self.metric} on the agent's own distribution "
            "(its test data, or the common test set weighted by its classes)"
        )
        if len(lines) > 1 and not any(line.sent for line in lines):
            table.caption += "; no agent sent anything"
        if fallen := self.fallen():
            more = f", and {len(fallen) - 3} more" if len(fallen) > 3 else ""
            table.caption += f"\nfell behind: {'; '.join(fallen[:3])}{more}"
        table.caption_justify = "left"
        return table

    def table_text(self, width: int = 110) -> str:
        """The table as plain text."""
        out = StringIO()
        Console(file=out, width=width).print(self.table())
        return out.getvalue()

    def _when(self) -> str:
        done = "1 round" if self.rounds == 1 else f"{self.rounds} rounds"
        return done if self.evaluated in (0, self.rounds) else f"round {self.evaluated}; {done} done"

    def _score(self, value: float | None) -> str:
        if value is None:
            return "-"
        return f"{100 * value:.1f} %" if self.metric == "accuracy" else f"{value:.4g}"

    def _gain(self, value: float | None) -> str:
        if value is None:
            return "-"
        return f"{100 * value:+.1f}" if self.metric == "accuracy" else f"{value:+.3g}"


def comparison_table(summaries: Sequence[Summary]) -> Table:
    """Several runs side by side, for the terminal."""
    table = Table(title="each figure: the mean over agents, on the run's common test set", title_justify="left")
    for heading in ("run", "protocol"):
        table.add_column(heading)
    for heading in ("agents", "rounds", "alone", "together", "gain", "own mix", "bytes", "time"):
        table.add_column(heading, justify="right")
    for summary in summaries:
        lines = summary.lines()
        honest = honest_lines(lines)
        agents = f"{len(lines)}" if len(honest) == len(lines) else f"{len(lines)} ({len(lines) - len(honest)} lie)"
        if len(honest) < len(lines):
            table.caption, table.caption_justify = "Agents that lie are left out of means.", "left"
        table.add_row(
            escape(summary.title), escape(summary.protocol), agents, str(summary.rounds),
            summary._score(_mean([line.alone for line in honest])),
            summary._score(_mean([line.together for line in honest])),
            summary._gain(_mean([line.gain for line in honest])),
            summary._score(_mean([line.own_together for line in honest])),
            bytes_text(sum(line.sent + line.received for line in lines)), duration_text(summary.seconds),
        )  # fmt: skip
    return table


def honest_lines(lines: Sequence[AgentLine]) -> list[AgentLine]:
    """Those that count in a mean."""
    return [line for line in lines if not line.lies]


def mean_words(lines: Sequence[AgentLine]) -> str:
    """What a mean is of, where it is not of all agents."""
    honest = len(honest_lines(lines))
    return "mean" if honest == len(lines) else f"mean of the {honest:,} honest agent{'' if honest == 1 else 's'}"


def _newest(rows: list[Row]) -> dict[str, Row]:
    return {row["agent"]: row for row in rows if "test_samples" in row}


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
