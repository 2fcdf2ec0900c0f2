"""What the safeguard did: each agent alone, as it was taught, and with the safeguard, on its own data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from codistill.results.agent_lines import mean_of_known, worst_of_known
from codistill.results.many_agents import FEW_LINES, MOST_LINES, shown_lines
from codistill.results.metric_text import gain_text, score_text
from codistill.results.scores import SAFEGUARD_WEIGHT

if TYPE_CHECKING:
    from codistill.results.summary import Summary

HEADINGS = ("agent", "alone", "taught", "gain", "safeguarded", "gain", "weight")
HOW_TO_READ = (
    "taught: what the protocol alone would answer; safeguarded: weighed against the agent's own model by samples that "
    "it holds out; weight: the share of what it was taught"
)


@dataclass(frozen=True)
class GuardedLine:
    """One agent's scores after the run, each on its own data where there are any, otherwise on the common test set."""

    name: str
    alone: float | None
    taught: float | None
    safeguarded: float | None
    weight: float
    greater_is_better: bool

    def gain(self, score: float | None) -> float | None:
        """By how much a score is better than alone."""
        if score is None or self.alone is None:
            return None
        return score - self.alone if self.greater_is_better else self.alone - score


def guarded_lines(summary: Summary) -> list[GuardedLine]:
    """One line for each honest agent with a safeguard."""
    score = summary.shown_scores[0]
    last = {row["agent"]: row for row in summary.rows if "test_samples" in row}
    alone = {row["agent"]: row for row in summary.alone_rows or [] if "test_samples" in row}
    lines = []
    for name in summary.agents:
        row = last.get(name, {})
        if SAFEGUARD_WEIGHT not in row or row.get("lies"):
            continue
        key = f"own_{score.name}" if f"own_{score.name}" in row else score.name
        lines.append(
            GuardedLine(
                name, alone.get(name, {}).get(key), row.get(f"taught_{key}"), row.get(key), row[SAFEGUARD_WEIGHT],
                score.greater_is_better,
            )
        )  # fmt: skip
    return lines


def guarded_cells(summary: Summary, most: int, few: int = FEW_LINES) -> list[list[str]]:
    """The rows of the table, as text: agents, and of all of them the mean and the worst gain."""
    metric, lines = summary.metric, guarded_lines(summary)
    shown = {line.name for line in shown_lines(summary.lines(), most, few)}
    rows = [_cells(metric, line.name, [line]) for line in lines if line.name in shown]
    if len(lines) > len(rows):
        rows.append([f"... {len(lines) - len(rows):,} more", *[""] * (len(HEADINGS) - 1)])
    if len(lines) > 1:
        rows.append(_cells(metric, "mean", lines))
        gains = [[line.gain(line.taught) for line in lines], [line.gain(line.safeguarded) for line in lines]]
        taught, guarded = (gain_text(metric, worst_of_known(each, greater_is_better=True)) for each in gains)
        rows.append(["worst gain", "", "", taught, "", guarded, ""])
    return rows


def safeguard_table(summary: Summary, most: int = MOST_LINES) -> Table | None:
    """The table for the terminal; None where no agent had a safeguard."""
    cells = guarded_cells(summary, most)
    if not cells:
        return None
    table = Table(title="the safeguard, on each agent's own data", title_justify="left")
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading == "agent" else "right", overflow="fold")
    agents = len(cells) - 2 * (len(guarded_lines(summary)) > 1)  # the last two rows are of all of them
    for number, row in enumerate(cells):
        table.add_row(*[escape(cell) for cell in row], end_section=number == agents - 1)
    table.caption, table.caption_justify = HOW_TO_READ, "left"
    return table


def _cells(metric: str, label: str, lines: Sequence[GuardedLine]) -> list[str]:
    """One row: the means of some lines."""
    weight = mean_of_known([line.weight for line in lines])
    return [
        label,
        score_text(metric, mean_of_known([line.alone for line in lines])),
        score_text(metric, mean_of_known([line.taught for line in lines])),
        gain_text(metric, mean_of_known([line.gain(line.taught) for line in lines])),
        score_text(metric, mean_of_known([line.safeguarded for line in lines])),
        gain_text(metric, mean_of_known([line.gain(line.safeguarded) for line in lines])),
        "-" if weight is None else f"{weight:.2f}",
    ]
