"""The sections of the page about several runs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from codistill.plots.heatmaps import draw_maps
from codistill.plots.score_plots import draw_runs, values_along
from codistill.reports import html
from codistill.reports.run_sections import OUTPUTS, how_to_read_outputs
from codistill.reports.score_cells import byzantine_note, gain_cell, gain_note, measured_on, score_cells
from codistill.results.metric_text import metric_name
from codistill.results.run_scores import RunScores
from codistill.results.summary import Summary
from codistill.text import bytes_text, duration_text

# What scores are drawn against: its words, and what is said of runs that have spent none of it or do not know it.
_ALONG = {
    "bytes": ("bytes", "Without messages", ""),
    "exchanges": ("exchanges", "Without exchanges", "Not counted"),
    "steps": ("gradient steps", "Without gradient steps", "Not counted"),
    "time": ("time", "", "Without a clock"),
}
_CHARTS = {"round": "rounds", "bytes": "traffic", "exchanges": "exchanges", "steps": "steps", "time": "times"}


def chart_sections(alike: Sequence[tuple[int, RunScores]]) -> list[str]:
    """The charts of numbered runs that were measured in the same way."""
    first = alike[0][1]
    evaluated = [(index, run) for index, run in alike if len(run.rounds)]
    heading = f"Mean {metric_name(first.metric)} per round"
    if not evaluated:
        return [html.section(heading, html.note("These runs were not evaluated."))]
    boxes = [
        html.switch(f"[data-series=run-{index}]", run.title, html.swatch(index), on=True) for index, run in evaluated
    ]
    switches = f"<form class='switches'>{''.join(boxes)}</form>"
    return [html.section(heading, switches + _chart(evaluated, "round", heading)), *_against(evaluated)]


def _against(evaluated: Sequence[tuple[int, RunScores]]) -> list[str]:
    """Sections of the mean score against each cost, and against time."""
    sections = []
    for against, (words, nothing, unknown) in _ALONG.items():
        heading = f"Mean {metric_name(evaluated[0][1].metric)} against {words}"
        along = {index: values_along(run, against) for index, run in evaluated}
        known = [(index, run) for index, run in evaluated if along[index] is not None]
        level = [run.title for index, run in known if not np.any(along[index])]
        missing = [run.title for index, run in evaluated if along[index] is None]
        if len(level) < len(known):
            notes = [f"{nothing}, drawn as a level line: {', '.join(level)}."] if level else []
            notes += [f"{unknown}, and so not drawn: {', '.join(missing)}."] if missing else []
            sections.append(html.section(heading, _chart(known, against, heading) + html.note(*notes)))
        elif against == "bytes":
            sections.append(html.section(heading, html.note("The agents exchanged nothing.")))
    return sections


def _chart(runs: Sequence[tuple[int, RunScores]], against: str, heading: str) -> str:
    """The chart of some runs, with their titles at its lines."""
    first = runs[0][1]
    name = f"{_CHARTS[against]}-{first.metric}{'-own' if first.own else ''}"
    return html.chart(draw_runs(runs, against), name, heading, {f"run-{index}": run.title for index, run in runs})


def all_outputs(summaries: Sequence[Summary]) -> str:
    """The average outputs of the runs that kept them, as small maps; empty if none did."""
    maps = [(each.title, each.outputs, each.class_names) for each in summaries if each.outputs is not None]
    if not maps:
        return ""
    most = max(outputs.classes for _, outputs, _ in maps)
    disagreement = "Disagreement: the share of pairs of agents that predict different classes for a test sample."
    return html.chart(draw_maps(maps), "outputs", OUTPUTS.lower()) + html.note(how_to_read_outputs(most), disagreement)


def runs_table(summaries: Sequence[Summary], runs: Sequence[RunScores]) -> str:
    """All runs side by side, with notes."""
    heads = [
        "run", "protocol", "agents", "rounds", "mean alone", "mean together", "gain", "better than alone", "bytes",
        "time",
    ]  # fmt: skip
    rows = [_row(summary, run) for summary, run in zip(summaries, runs, strict=True)]
    notes = _measured_note(summaries, runs) + gain_note(runs)
    notes += html.note("Better than alone: agents with a better score on their own data than the same agents alone.")
    notes += "".join(byzantine_note(run, f"{run.title}: ") for run in runs)
    return html.table(heads, rows, left=(0, 1)) + notes


def _row(summary: Summary, run: RunScores) -> list[str]:
    agents, traffic = len(summary.agents), sum(row["sent"] + row["received"] for row in summary.rows)
    against = summary.against_alone()
    share, better = ("-", -1) if against is None else (against.share, len(against.better))
    return [
        html.cell(summary.title),
        html.cell(summary.protocol),
        *html.numbers(f"{agents:,}", f"{summary.rounds:,}", by=(agents, summary.rounds)),
        *score_cells(run.metric, run.alone, run.together),
        gain_cell(run.metric, run.gain),
        *html.numbers(
            share, bytes_text(traffic), duration_text(summary.seconds), by=(better, traffic, summary.seconds)
        ),
    ]


def _measured_note(summaries: Sequence[Summary], runs: Sequence[RunScores]) -> str:
    """What the runs were measured on; where that differs, which run on what."""
    measured: dict[str, list[str]] = {}
    for summary, run in zip(summaries, runs, strict=True):
        measured.setdefault(measured_on(summary, run), []).append(summary.title)
    if len(measured) == 1:
        return html.note(f"{html.capitalised(next(iter(measured)))}.")
    differing = "; ".join(f"{', '.join(titles)}: {what}" for what, titles in measured.items())
    return html.note(f"The runs were not measured in the same way. {differing}.")
