"""One HTML page about a run, or about several: self-contained, so that it opens anywhere without a connection."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from codistill.errors import RecipeError
from codistill.reports import html, run_sections
from codistill.reports.comparison_sections import all_outputs, chart_sections, runs_table
from codistill.reports.feature_section import FEATURES, features_section
from codistill.reports.further_section import further_section, safeguard_section
from codistill.reports.headline import headline
from codistill.reports.score_cells import footer_cells, gain_cell, gain_note, score_cells
from codistill.results.agent_lines import AgentLine, counted_lines, mean_label, mean_of_known, rounds_text
from codistill.results.many_agents import FEW_ON_PAGE, MOST_ON_PAGE, shown_lines, shown_text
from codistill.results.metric_text import metric_name
from codistill.results.run_scores import RunScores, scores_of
from codistill.results.summary import Summary
from codistill.text import bytes_text


def write_report(summary: Summary, path: Path) -> Path:
    """Write the report of one run; returns its path."""
    run = scores_of(summary)
    name = html.capitalised(metric_name(run.metric))
    sections = {
        "Alone versus together": run_sections.gains_section(summary, run),
        f"{name} per round": run_sections.rounds_section(summary, run),
        f"{name} against bytes": run_sections.traffic_section(run),
        f"{name} against exchanges and gradient steps": run_sections.counts_section(run),
        f"{name} against time": run_sections.times_section(run),
        "Graph of agents": run_sections.graph_section(summary, run),
        "Protocol measures": run_sections.measures_section(summary),
        run_sections.OUTPUTS: run_sections.outputs_section(summary),
        FEATURES: features_section(summary),
        "Training samples by agent and class": run_sections.partition_section(summary),
        "All agents": _agents_table(summary, run),
        "Safeguard": safeguard_section(summary),
        "Further scores": further_section(summary),
    }
    page = html.page(
        summary.title,
        f"<p class='scope'>{html.escaped(html.capitalised(summary.scope()))}.</p>",
        headline(summary, run),
        *(html.section(heading, content) for heading, content in sections.items() if content),
        _facts(summary.facts),
    )
    return html.write(page, path)


def write_comparison(summaries: Sequence[Summary], path: Path) -> Path:
    """Write one page about several runs; returns its path."""
    if not summaries:
        raise RecipeError("A comparison must have at least one run.", "none", "Name the folders of some runs.")
    runs = [scores_of(summary) for summary in summaries]
    sections = []
    for way in dict.fromkeys((run.metric, run.own) for run in runs):
        sections += chart_sections([(index, run) for index, run in enumerate(runs) if (run.metric, run.own) == way])
    if outputs := all_outputs(summaries):
        sections.append(html.section(run_sections.OUTPUTS, outputs))
    sections.append(html.section("All runs", runs_table(summaries, runs)))
    return html.write(html.page(f"{len(runs)} runs compared", *sections), path)


def _agents_table(summary: Summary, run: RunScores) -> str:
    missed = any(line.rounds < summary.rounds for line in run.lines)
    heads = [
        "agent", "model", *(["rounds"] if missed else []), "alone", "together", "gain", "own data alone",
        "own data together", "own gain", "sent", "received",
    ]  # fmt: skip

    def rounds(line: AgentLine) -> list[str]:
        return html.numbers(rounds_text(line, summary.rounds), by=(line.rounds,)) if missed else []

    rows = [
        [html.cell(line.name), html.cell(line.described), *rounds(line), *_figures(run.metric, [line], [line])]
        for line in shown_lines(run.lines, MOST_ON_PAGE, FEW_ON_PAGE)
    ]
    counted, empty = counted_lines(run.lines), [html.cell("")] * (1 + missed)
    mean = html.cell(f"{mean_label(run.lines)} (bytes: sum)")
    foot = [[mean, *empty, *_figures(run.metric, counted, run.lines)]]
    if len(counted) > 1:
        many = len(rows) < len(run.lines)
        foot += [[html.cell(label), *empty, *cells] for label, cells in footer_cells(run, counted, many=many).items()]
    chosen = shown_text(run.lines, MOST_ON_PAGE, FEW_ON_PAGE)
    return html.table(heads, rows, left=(0, 1), foot=foot) + html.note(
        f"Alone, together and gain: {summary.scope()}.",
        f"Own data: {metric_name(run.metric)} on the agent's own test data, or on the common test set weighted by its "
        "class counts.",
        "Spread: the sample standard deviation over the agents." if len(counted) > 1 else "",
        f"{html.capitalised(chosen)}." if chosen else "",
    ) + gain_note([run])  # fmt: skip


def _figures(metric: str, scored: Sequence[AgentLine], counted: Sequence[AgentLine]) -> list[str]:
    """Cells of the mean scores of some lines, and of the bytes of some lines."""
    cells = []
    for lines in (scored, [line.on_own_data for line in scored]):
        alone, together, gain = (
            mean_of_known([getattr(line, score) for line in lines]) for score in ("alone", "together", "gain")
        )
        cells += [*score_cells(metric, alone, together), gain_cell(metric, gain)]
    traffic = (sum(line.sent for line in counted), sum(line.received for line in counted))
    return cells + html.numbers(*map(bytes_text, traffic), by=traffic)


def _facts(facts: Mapping[str, Any]) -> str:
    if not facts:
        return ""
    return (
        "<section><details><summary>Recipe, versions, seed</summary>"
        f"<pre>{html.escaped(chr(10).join(_fact_lines(facts)))}</pre></details></section>"
    )


def _fact_lines(facts: Mapping[str, Any], indent: str = "") -> list[str]:
    lines = []
    for name, value in facts.items():
        if isinstance(value, Mapping):
            lines += [f"{indent}{name}:", *_fact_lines(value, indent + "  ")]
        elif "\n" in str(value):
            lines += [f"{indent}{name}:", *(f"{indent}  {line}" for line in str(value).splitlines())]
        else:
            lines.append(f"{indent}{name}: {value}")
    return lines
