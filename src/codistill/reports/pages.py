"""A run, or several, as one HTML page that opens anywhere: nothing is fetched, everything is inside."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from codistill.errors import RecipeError
from codistill.plots import charts
from codistill.plots.charts import Run, arrange, mean
from codistill.plots.heatmaps import MOST_NUMBERS, draw_maps, draw_outputs
from codistill.plots.measures import draw_measure, measures
from codistill.reports import html as pieces
from codistill.results.summary import Summary, honest_lines, mean_words
from codistill.text import bytes_text, duration_text
from codistill.topology.facts import figures

_OUTPUTS = "Average output against the true class"


def write_report(summary: Summary, path: Path) -> Path:
    """Write the report of one run; returns its path."""
    run = arrange(summary)
    sections = [
        pieces.section(f"{pieces.upper(run.word)} per round", _rounds(summary, run)),
        pieces.section(f"{pieces.upper(run.word)} against bytes", _traffic(run)),
        pieces.section("Alone versus together", _bars(summary, run)),
    ]
    if spoken := _graph(summary, run):
        sections.append(pieces.section("Who speaks to whom", spoken))
    if measured := _measures(summary):
        sections.append(pieces.section("What the protocol measured", measured))
    if summary.outputs is not None:
        sections.append(pieces.section(_OUTPUTS, _outputs(summary)))
    if summary.counts is not None:
        sections.append(pieces.section("Who holds what", _shares(summary)))
    sections.append(pieces.section("All agents", _agents(summary, run)))
    sections.append(_facts(summary.facts))
    page = pieces.page(
        summary.title,
        f"<p class='scope'>{pieces.escaped(pieces.upper(_scope(summary)))}.</p>",
        _headline(summary, run),
        *sections,
    )
    return pieces.write(page, path)


def write_comparison(summaries: Sequence[Summary], path: Path) -> Path:
    """Write one page about several runs; returns its path."""
    if not summaries:
        raise RecipeError("A comparison must have at least one run.", "none", "Name the folders of some runs.")
    runs = [arrange(summary) for summary in summaries]
    sections = []
    for way in dict.fromkeys((run.metric, run.own) for run in runs):
        sections += _comparison([(index, run) for index, run in enumerate(runs) if (run.metric, run.own) == way])
    if known := [summary for summary in summaries if summary.outputs is not None]:
        sections.append(pieces.section(_OUTPUTS, _all_outputs(known)))
    rows = [
        [
            pieces.cell(summary.title),
            pieces.cell(summary.protocol),
            *pieces.numbers(
                f"{len(summary.agents):,}", f"{summary.rounds:,}", by=(len(summary.agents), summary.rounds)
            ),
            *_scores(run, run.alone, run.together),
            _gain(run, run.gain),
            *pieces.numbers(
                bytes_text(_bytes(summary)), duration_text(summary.seconds), by=(_bytes(summary), summary.seconds)
            ),
        ]
        for summary, run in zip(summaries, runs, strict=True)
    ]
    heads = ["run", "protocol", "agents", "rounds", "mean alone", "mean together", "gain", "bytes", "time"]
    notes = _measured_note(summaries, runs) + _gain_note(runs)
    notes += "".join(_liars(run, f"{run.title}: ") for run in runs)
    sections.append(pieces.section("All runs", pieces.table(heads, rows, left=(0, 1)) + notes))
    return pieces.write(pieces.page(f"{len(runs)} runs compared", *sections), path)


def _measured_note(summaries: Sequence[Summary], runs: Sequence[Run]) -> str:
    """What the runs were measured on; where that differs, which run on what."""
    measured: dict[str, list[str]] = {}
    for summary, run in zip(summaries, runs, strict=True):
        measured.setdefault(_measured(summary, run), []).append(summary.title)
    if len(measured) == 1:
        return pieces.note(f"{pieces.upper(next(iter(measured)))}.")
    differing = "; ".join(f"{', '.join(titles)}: {what}" for what, titles in measured.items())
    return pieces.note(f"The runs were not measured alike. {differing}.")


def _headline(summary: Summary, run: Run) -> str:
    sent, received = (sum(row[way] for row in summary.rows) for way in ("sent", "received"))
    figures = [
        (summary.protocol, "protocol"),
        (f"{len(summary.agents):,}", "agent" if len(summary.agents) == 1 else "agents"),
        (f"{summary.rounds:,}", "round" if summary.rounds == 1 else "rounds"),
        (duration_text(summary.seconds), "time"),
    ]
    if run.together is None:
        figures.append(("-", f"mean {run.word}: not evaluated"))
    elif run.alone is None:
        figures.append((run.score_text(run.together), f"mean {run.word} together"))
    else:
        both = f"{run.score_text(run.alone)} → {run.score_text(run.together)}"
        figures.append((both, f"mean {run.word}, alone → together"))
        gain = "mean gain, percentage points" if run.metric == "accuracy" else "mean change (lower is better)"
        figures.append((run.gain_text(run.gain), gain))
    figures.append((bytes_text(sent + received), f"{bytes_text(sent)} sent, {bytes_text(received)} received"))
    items = "".join(
        f"<div{' class=wide' if '→' in name else ''}><dt>{name}</dt><dd>{value}</dd></div>"
        for value, name in ((pieces.escaped(value), pieces.escaped(name)) for value, name in figures)
    )
    return f"<dl class='figures'>{items}</dl>{_absent(summary)}{_fallen(summary)}{_liars(run)}"


def _fallen(summary: Summary) -> str:
    """Who ends far below what it once had; empty if nobody does."""
    fallen = summary.fallen()
    who = "; ".join(fallen) if len(fallen) <= 6 else f"{len(fallen):,} of {len(summary.agents):,} agents"
    return pieces.note(f"Fell behind: {who}.") if fallen else ""


def _liars(run: Run, where: str = "") -> str:
    """Who lies on purpose, in a sentence; empty if nobody does."""
    liars = [line.name for line in run.lines if line.lies]
    who = ", ".join(liars) if len(liars) <= 6 else f"{len(liars):,} of {len(run.lines):,} agents"
    return pieces.note(f"{where}Agents that lie (injected faults), left out of every mean: {who}.") if liars else ""


def _absent(summary: Summary) -> str:
    missed: dict[str, int] = {}
    for row in summary.rows:
        if not row["present"]:
            missed[row["agent"]] = missed.get(row["agent"], 0) + 1
    if not missed:
        return ""
    if len(missed) > 6:
        times = f"{sum(missed.values()):,} of {len(summary.rows):,} times"
        who = f"{len(missed):,} of {len(summary.agents):,} agents, {times}"
    else:
        who = ", ".join(f"{name} ({count} of {summary.rounds})" for name, count in missed.items())
    return f"<p class='note'>Absent in some rounds: {pieces.escaped(who)}.</p>"


def _rounds(summary: Summary, run: Run) -> str:
    if not len(run.rounds):
        return pieces.note("The agents were not evaluated during this run.")
    notes = [f"{pieces.upper(_measured(summary, run))}."]
    if len(run.names) > 1:
        notes.append("The line is the mean of the agents, the band reaches from the lowest to the highest agent.")
    honest = len(honest_lines(run.lines))
    if honest < len(run.names):
        notes.append("Agents that lie have a line of their own, and no part in mean and band.")
    if thinned := charts.thinning(run) - 1:
        notes.append(f"Lines of single agents show one of {thinned + 1} evaluations.")
    if run.alone is not None:
        notes.append("Alone: a twin of each agent that learnt by itself; where those ended is the dashed line.")
    evaluated = [len(values) for values in run.values]
    if min(evaluated) < honest:
        notes.append(f"Of {honest:,} agents, {min(evaluated):,} to {max(evaluated):,} could be evaluated.")
    if run.rounds[-1] < summary.rounds:
        notes.append(f"Last evaluated in round {run.rounds[-1]} of {summary.rounds}.")
    notes += _samples(summary)
    titles = {f"agent-{index}": name for index, name in enumerate(run.names)}
    return _switches(run) + pieces.chart(
        charts.draw_rounds(run), "rounds", f"{run.word} per round", titles, hidden=True
    ) + pieces.note(*notes)  # fmt: skip


def _samples(summary: Summary) -> list[str]:
    """Sentences on evaluations that used fewer test samples than others."""
    last = summary.tested_on
    during = sorted({row["test_samples"] for row in summary.rows if "test_samples" in row} - {last})
    notes = []
    if during:
        used = " or ".join(f"{count:,}" for count in during)
        notes.append(
            f"Evaluations during the run used {used} random test samples, the last one {last:,}: "
            "the last point may differ from those before for that reason alone."
        )
    alone = [row["test_samples"] for row in summary.alone_rows or [] if "test_samples" in row]
    if alone and alone[-1] != last:
        notes.append(f"The agents alone were measured on {alone[-1]:,} test samples, together on {last:,}.")
    return notes


def _switches(run: Run) -> str:
    if len(run.names) == 1:
        return ""
    if len(run.names) > charts.MOST_SWITCHES:
        every = f"show all {len(run.names):,} agents (point at a line to read its name)"
        return f"<form class='switches'>{pieces.switch('[data-series^=agent-]', every)}</form>"
    boxes = [
        pieces.switch(f"[data-series=agent-{index}]", name, pieces.swatch(index))
        for index, name in enumerate(run.names)
    ]
    return f"<form class='switches'>{pieces.switch('', 'all agents')}{''.join(boxes)}</form>"


def _traffic(run: Run) -> str:
    if not len(run.rounds):
        return pieces.note("The agents were not evaluated during this run.")
    if run.traffic[-1] == 0:
        return pieces.note("The agents exchanged nothing.")
    note = "Bytes are those of the encoded messages, sent and received, of all agents, from the first round on."
    return pieces.chart(charts.draw_traffic(run), "traffic", f"{run.word} against bytes") + pieces.note(note)


def _bars(summary: Summary, run: Run) -> str:
    if not run.gainers:
        missing = "together" if run.together is None else "alone"
        return pieces.note(f"There is nothing to compare: this run has no scores of the agents {missing}.")
    return pieces.chart(charts.draw_bars(run), "bars", "alone versus together") + pieces.note(
        f"{pieces.upper(_measured(summary, run))}, after the last evaluation.", charts.bars_note(run)
    )


def _graph(summary: Summary, run: Run) -> str:
    """The graph of a run without a hub; empty where there is none worth drawing."""
    topology = summary.topology
    if topology is None or topology.hub or not topology.links:
        return ""
    from codistill.plots.topology_plot import MOST_NODES, draw_graph

    if not 2 < len(topology.names) <= MOST_NODES:
        return ""
    scores = {line.name: line.together for line in run.compared}
    titles = {f"node-{index}": f"{name}: {run.score_text(scores[name])}" for index, name in enumerate(topology.names)}
    notes = ["A disc is an agent, as deep in colour as it is good after the last evaluation; point at it for its name."]
    figure, numbered = draw_graph(topology, run)
    if numbered:
        notes.append("Numbers count the agents in the order of the table below.")
    if topology.directed:
        notes.append("Arrows point to those who hear.")
    if topology.kind == "torus":
        notes.append("Links that leave over a side come back in on the opposite one.")
    if any(line.lies for line in run.lines):
        notes.append("Agents that lie have a red rim.")
    notes.append(
        "Diameter: the steps that a word needs at most from one agent to another. Spectral gap: from 0 to 1, by how "
        "much a step of mixing shrinks at least what the agents differ by."
    )
    return pieces.chart(figure, "graph", "who speaks to whom", titles) + pieces.cards(figures(topology)) + pieces.note(
        *notes
    )  # fmt: skip


def _measures(summary: Summary) -> str:
    """A chart for each figure that the protocol has put into the rows; empty if none."""
    found = measures(summary)
    drawn = [
        pieces.chart(draw_measure(measure), f"measure-{number}", measure.title) + pieces.note(measure.sentence)
        for number, measure in enumerate(found)
    ]
    if not found or len(summary.agents) == 1:
        return "".join(drawn)
    honest = "honest " if any(row.get("lies") for row in summary.rows) else ""
    return "".join(drawn) + pieces.note(f"Mean and range are of the {honest}agents that were measured in the round.")


def _outputs(summary: Summary) -> str:
    outputs = summary.outputs
    assert outputs is not None
    notes = [_how_to_read(outputs.classes)]
    if outputs.disagreement is not None:
        notes.append(
            "Bars: of all pairs of agents, the share that answers a test sample of the class differently, be it right "
            "or wrong."
        )
    if len(outputs.agents) < len(summary.agents):
        counted = f"{len(outputs.agents):,} of {len(summary.agents):,} agents count"
        notes.append(f"{counted}: those that lie, or have never been present, are left out.")
    return pieces.chart(draw_outputs(outputs, summary.class_names), "outputs", _OUTPUTS.lower()) + pieces.note(*notes)


def _all_outputs(summaries: Sequence[Summary]) -> str:
    maps = [(each.title, each.outputs, each.class_names) for each in summaries if each.outputs is not None]
    most = max(outputs.classes for _, outputs, _ in maps)
    disagreement = "Disagreement: the share of pairs of agents that answer a test sample differently."
    return pieces.chart(draw_maps(maps), "outputs", _OUTPUTS.lower()) + pieces.note(_how_to_read(most), disagreement)


def _how_to_read(classes: int) -> str:
    empty = "; below 0.5 a cell is empty" if classes <= MOST_NUMBERS else ": full colour is 100 %"
    return (
        "A row is a true class: how the agents, on average, share out their output over the classes when they see its "
        f"test samples, in percent{empty}. Agents that are right and sure have 100 on the diagonal; what stands beside "
        "it goes to wrong classes."
    )


def _measured(summary: Summary, run: Run) -> str:
    return f"{run.word} on each agent's own distribution" if run.own else _scope(summary)


def _scope(summary: Summary) -> str:
    return re.sub("^rmse", "RMSE", summary.scope())


def _shares(summary: Summary) -> str:
    few = len(summary.agents) > charts.MOST_COLUMNS
    return pieces.chart(
        charts.draw_shares(summary), "shares", "samples of each class that each agent holds"
    ) + pieces.note(
        "Each column is an agent, each row a class; the area of a circle is the number of training samples.",
        f"The first {charts.MOST_COLUMNS} of {len(summary.agents):,} agents are shown." if few else "",
    )


def _agents(summary: Summary, run: Run) -> str:
    lines = run.lines
    scores = [[line.alone, line.together, line.gain, line.own_alone, line.own_together] for line in lines]
    rows = [
        [pieces.cell(line.name), pieces.cell(line.described), *_figures(run, values, (line.sent, line.received))]
        for line, values in zip(lines, scores, strict=True)
    ]
    # Means of nobody are unknown.
    honest = [values for line, values in zip(lines, scores, strict=True) if not line.lies] or [[None] * 5]
    means = [mean(values) for values in zip(*honest, strict=True)]
    traffic = (sum(line.sent for line in lines), sum(line.received for line in lines))
    foot = [pieces.cell(f"{mean_words(lines)} (bytes: sum)"), pieces.cell(""), *_figures(run, means, traffic)]
    heads = ["agent", "model", "alone", "together", "gain", "own mix alone", "own mix together", "sent", "received"]
    return pieces.table(heads, rows, left=(0, 1), foot=foot) + pieces.note(
        f"Alone, together and gain: {_scope(summary)}.",
        f"Own mix: {run.word} on the agent's own distribution (its own test data, or the common test set weighted "
        "by its class counts).",
    ) + _gain_note([run])  # fmt: skip


def _figures(run: Run, scores: Sequence[float | None], traffic: tuple[int, int]) -> list[str]:
    alone, together, gain, *own = scores
    cells = [*_scores(run, alone, together), _gain(run, gain), *_scores(run, *own)]
    return cells + pieces.numbers(*map(bytes_text, traffic), by=traffic)


def _gain_note(runs: Iterable[Run]) -> str:
    metrics = {run.metric for run in runs}
    notes = []
    if "accuracy" in metrics:
        notes.append("A gain in accuracy is in percentage points.")
    if "rmse" in metrics:
        notes.append("RMSE is an error: lower is better, and a negative gain is an improvement.")
    return pieces.note(*notes)


def _comparison(alike: Sequence[tuple[int, Run]]) -> list[str]:
    """The charts of numbered runs that were measured in the same way."""
    first = alike[0][1]
    headings = [f"Mean {first.word} per round", f"Mean {first.word} against bytes"]
    evaluated = [(index, run) for index, run in alike if len(run.rounds)]
    if not evaluated:
        return [pieces.section(headings[0], pieces.note("These runs were not evaluated."))]
    boxes = [
        pieces.switch(f"[data-series=run-{index}]", run.title, pieces.swatch(index), on=True)
        for index, run in evaluated
    ]
    switches = f"<form class='switches'>{''.join(boxes)}</form>"
    titles = {f"run-{index}": run.title for index, run in evaluated}
    names = [f"{chart}-{first.metric}{'-own' if first.own else ''}" for chart in ("rounds", "traffic")]
    rounds = switches + pieces.chart(charts.draw_runs(evaluated), names[0], headings[0], titles)
    silent = [run.title for _, run in evaluated if run.traffic[-1] == 0]
    if len(silent) == len(evaluated):
        traffic = pieces.note("The agents exchanged nothing.")
    else:
        traffic = pieces.chart(charts.draw_runs(evaluated, against_bytes=True), names[1], headings[1], titles)
        traffic += pieces.note(f"Without messages, drawn as a level line: {', '.join(silent)}.") if silent else ""
    return [pieces.section(headings[0], rounds), pieces.section(headings[1], traffic)]


def _scores(run: Run, *values: float | None) -> list[str]:
    return [f"<td{pieces.sorted_by(value)}>{run.score_text(value)}</td>" for value in values]


def _gain(run: Run, value: float | None) -> str:
    worse = " class='worse'" if value is not None and run.is_worse(value) else ""
    return f"<td{pieces.sorted_by(value)}{worse}>{run.gain_text(value)}</td>"


def _bytes(summary: Summary) -> int:
    return sum(row["sent"] + row["received"] for row in summary.rows)


def _facts(facts: Mapping[str, Any]) -> str:
    if not facts:
        return ""
    return (
        "<section><details><summary>Recipe, versions, seed</summary>"
        f"<pre>{pieces.escaped(chr(10).join(_fact_lines(facts)))}</pre></details></section>"
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
