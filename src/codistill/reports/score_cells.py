"""Table cells and notes about scores that the pages of a run and of several runs share."""

from __future__ import annotations

from collections.abc import Iterable

from codistill.reports import html
from codistill.results.metric_text import gain_text, is_worse, metric_name, score_text
from codistill.results.run_scores import RunScores
from codistill.results.summary import Summary


def score_cells(metric: str, *values: float | None) -> list[str]:
    """A cell for each score."""
    return [f"<td{html.sorted_by(value)}>{score_text(metric, value)}</td>" for value in values]


def gain_cell(metric: str, value: float | None) -> str:
    """The cell of a gain; a loss stands out."""
    worse = " class='worse'" if value is not None and is_worse(metric, value) else ""
    return f"<td{html.sorted_by(value)}{worse}>{gain_text(metric, value)}</td>"


def gain_note(metrics: Iterable[str]) -> str:
    """How gains are to be read."""
    known = set(metrics)
    return html.note(
        "Gains in accuracy are in percentage points." if "accuracy" in known else "",
        "RMSE is an error: lower is better, and a negative gain is an improvement." if "rmse" in known else "",
    )


def measured_on(summary: Summary, run: RunScores) -> str:
    """What the scores were measured on, in words."""
    return f"{metric_name(run.metric)} on each agent's own data" if run.own else summary.scope()


def byzantine_note(run: RunScores, where: str = "") -> str:
    """Who is Byzantine; empty if nobody is."""
    names = [line.name for line in run.lines if line.byzantine]
    who = ", ".join(names) if len(names) <= 6 else f"{len(names):,} of {len(run.lines):,} agents"
    return html.note(f"{where}Byzantine agents (injected faults), left out of all means: {who}." if names else "")
