"""Table cells and notes about scores that the pages of a run and of several runs share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from codistill.reports import html
from codistill.results.agent_lines import AgentLine, spread_of_known, worst_of_known
from codistill.results.many_agents import quantiles
from codistill.results.metric_text import gain_text, in_percent, metric_name, score_text, spread_text
from codistill.results.run_scores import RunScores
from codistill.results.summary import Summary


def score_cells(metric: str, *values: float | None) -> list[str]:
    """A cell for each score."""
    return [f"<td{html.sorted_by(value)}>{score_text(metric, value)}</td>" for value in values]


def gain_cell(metric: str, value: float | None) -> str:
    """The cell of a gain; a loss stands out."""
    worse = " class='worse'" if value is not None and value < 0 else ""
    return f"<td{html.sorted_by(value)}{worse}>{gain_text(metric, value)}</td>"


def gain_note(runs: Iterable[RunScores]) -> str:
    """How gains are to be read."""
    shown = {run.metric: run for run in runs}
    shares = [metric_name(metric) for metric in shown if in_percent(metric)]
    errors = [metric_name(metric) for metric, run in shown.items() if not run.greater_is_better]
    return html.note(
        f"Gains in {' and '.join(shares)} are in percentage points." if shares else "",
        f"Lower is better: {', '.join(errors)}." if errors else "",
        "A gain is positive when it is better.",
    )


def footer_cells(run: RunScores, lines: Sequence[AgentLine], *, many: bool) -> dict[str, list[str]]:
    """Cells of the worst score and gain of some lines, on all data and on own data; quantiles of many; the spread."""
    found: dict[str, list[str]] = {}
    for part in (lines, [line.on_own_data for line in lines]):
        for name in ("alone", "together", "gain"):
            values = [getattr(line, name) for line in part]
            better = run.greater_is_better or name == "gain"
            figures = {"worst": worst_of_known(values, greater_is_better=better)} | (quantiles(values) if many else {})
            for label, value in figures.items():
                cell = gain_cell(run.metric, value) if name == "gain" else score_cells(run.metric, value)[0]
                found.setdefault(label, []).append(cell)
            found.setdefault("spread", []).append(f"<td>{spread_text(run.metric, spread_of_known(values))}</td>")
    return {label: [*cells, "<td></td><td></td>"] for label, cells in found.items()}


def measured_on(summary: Summary, run: RunScores) -> str:
    """What the scores were measured on, in words."""
    return f"{metric_name(run.metric)} on each agent's own data" if run.own else summary.scope()


def byzantine_note(run: RunScores, where: str = "") -> str:
    """Who is Byzantine; empty if nobody is."""
    names = [line.name for line in run.lines if line.byzantine]
    who = ", ".join(names) if len(names) <= 6 else f"{len(names):,} of {len(run.lines):,} agents"
    return html.note(f"{where}Byzantine agents (injected faults), left out of all means: {who}." if names else "")
