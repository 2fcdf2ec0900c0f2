"""The scores of a run beyond the first: a table of all agents, and notes on scores that could not be computed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from codistill.results.agent_lines import (
    counted_lines,
    mean_label,
    mean_of_known,
    spread_of_known,
    worst_of_known,
)
from codistill.results.many_agents import MOST_LINES, shown_lines
from codistill.results.metric_text import gain_text, score_text, spread_text
from codistill.results.scores import DEFAULT_SCORES, Score

if TYPE_CHECKING:
    from codistill.results.summary import Summary

_MOST_NAMED = 3
HOW_TO_READ = "↓: lower is better; in brackets the gain over alone, which is positive when it is better"


def further_table(summary: Summary, most: int = MOST_LINES) -> Table:
    """Every score but the first: of each agent after the run, with the gain over alone in brackets."""
    scores = summary.shown_scores[1:]
    table = Table(title="further scores after the run", title_justify="left")
    table.add_column("agent", overflow="fold")
    for score in scores:
        table.add_column(escape(score_heading(score)), justify="right")
    columns = [summary.lines(score) for score in scores]
    shown = {line.name for line in shown_lines(summary.lines(), most)}
    for row in (row for row in zip(*columns, strict=True) if row[0].name in shown):
        cells = [_cell(score, line.together, line.gain) for score, line in zip(scores, row, strict=True)]
        table.add_row(escape(row[0].name), *cells)
    if len(columns[0]) > len(shown):
        table.add_row(f"... {len(columns[0]) - len(shown):,} more", *[""] * len(scores))
    table.caption, table.caption_justify = HOW_TO_READ, "left"
    table.add_section()
    for label, cells in footer(summary, scores).items():
        table.add_row(label, *cells)
    return table


def score_heading(score: Score) -> str:
    """The score's name, with an arrow where lower is better."""
    return score.words if score.greater_is_better else f"{score.words} ↓"


def footer(summary: Summary, scores: tuple[Score, ...]) -> dict[str, list[str]]:
    """Mean, worst agent and spread over the agents that count, a cell per score."""
    found: dict[str, list[str]] = {}
    for score in scores:
        lines = summary.lines(score)
        counted = counted_lines(lines)
        together, gains = [line.together for line in counted], [line.gain for line in counted]
        worst = worst_of_known(together, greater_is_better=score.greater_is_better)
        found.setdefault(mean_label(lines), []).append(_cell(score, mean_of_known(together), mean_of_known(gains)))
        if len(counted) > 1:
            found.setdefault("worst", []).append(_cell(score, worst, worst_of_known(gains)))
            found.setdefault("spread", []).append(spread_text(score.name, spread_of_known(together)))
    return found


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


def _cell(score: Score, together: float | None, gain: float | None) -> str:
    shown = score_text(score.name, together)
    return shown if gain is None else f"{shown} ({gain_text(score.name, gain)})"
