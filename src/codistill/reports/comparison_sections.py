"""The sections of the page about several runs."""

from __future__ import annotations

from collections.abc import Sequence

from codistill.plots.heatmaps import draw_maps
from codistill.plots.score_plots import draw_runs
from codistill.reports import html
from codistill.reports.run_sections import OUTPUTS, how_to_read_outputs
from codistill.reports.score_cells import byzantine_note, gain_cell, gain_note, measured_on, score_cells
from codistill.results.metric_text import metric_name
from codistill.results.run_scores import RunScores
from codistill.results.summary import Summary
from codistill.text import bytes_text, duration_text


def chart_sections(alike: Sequence[tuple[int, RunScores]]) -> list[str]:
    """The charts of numbered runs that were measured in the same way."""
    first = alike[0][1]
    headings = [f"Mean {metric_name(first.metric)} {along}" for along in ("per round", "against bytes", "against time")]
    evaluated = [(index, run) for index, run in alike if len(run.rounds)]
    if not evaluated:
        return [html.section(headings[0], html.note("These runs were not evaluated."))]
    boxes = [
        html.switch(f"[data-series=run-{index}]", run.title, html.swatch(index), on=True) for index, run in evaluated
    ]
    switches = f"<form class='switches'>{''.join(boxes)}</form>"
    titles = {f"run-{index}": run.title for index, run in evaluated}
    names = [f"{chart}-{first.metric}{'-own' if first.own else ''}" for chart in ("rounds", "traffic", "times")]
    rounds = switches + html.chart(draw_runs(evaluated), names[0], headings[0], titles)
    silent = [run.title for _, run in evaluated if run.traffic[-1] == 0]
    if len(silent) == len(evaluated):
        traffic = html.note("The agents exchanged nothing.")
    else:
        traffic = html.chart(draw_runs(evaluated, against="bytes"), names[1], headings[1], titles)
        traffic += html.note(f"Without messages, drawn as a level line: {', '.join(silent)}." if silent else "")
    sections = [html.section(headings[0], rounds), html.section(headings[1], traffic)]
    timed = [(index, run) for index, run in evaluated if run.times is not None]
    if timed:
        without = [run.title for _, run in evaluated if run.times is None]
        times = html.chart(draw_runs(timed, against="time"), names[2], headings[2], titles)
        times += html.note(f"Without a clock, and so not drawn: {', '.join(without)}." if without else "")
        sections.append(html.section(headings[2], times))
    return sections


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
