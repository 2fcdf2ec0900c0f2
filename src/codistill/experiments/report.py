"""A run, or several, as one HTML page that opens anywhere: nothing is fetched, everything is inside."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib
from matplotlib.figure import Figure

from codistill import look
from codistill.errors import RecipeError
from codistill.experiments import charts
from codistill.experiments.charts import Run, arrange, mean
from codistill.experiments.graph_facts import figures
from codistill.experiments.heatmaps import MOST_NUMBERS, draw_maps, draw_outputs
from codistill.experiments.measures import draw_measure, measures
from codistill.experiments.store import write_atomically, writing
from codistill.summary import Summary, honest_lines, mean_words
from codistill.text import bytes_text, duration_text

# Colours of the charts become variables, so that the style sheet can choose others on a dark background.
# The last three are those of the partition's picture.
_NAMED = {
    look.INK: "var(--ink)", look.MUTED: "var(--muted)", look.AXIS: "var(--axis)", look.GRID: "var(--grid)",
    look.BLUE: "var(--blue)", look.GREY: "var(--grey)", look.WORSE: "var(--worse)",
    look.HEAT: "var(--heat)", look.PAPER: "var(--paper)",
    "#000000": "var(--ink)", "#cccccc": "var(--axis)", "#ebebeb": "var(--grid)",
}  # fmt: skip
_OUTPUTS = "Average output against the true class"
_SWATCH_DASHES = {"solid": "none", "dashed": "6 3", "dotted": "2 3", "dashdot": "7 3 2 3"}


def write_report(summary: Summary, path: Path) -> Path:
    """Write the report of one run; returns its path."""
    run = arrange(summary)
    sections = [
        _section(f"{_upper(run.word)} per round", _rounds(summary, run)),
        _section(f"{_upper(run.word)} against bytes", _traffic(run)),
        _section("Alone versus together", _bars(summary, run)),
    ]
    if spoken := _graph(summary, run):
        sections.append(_section("Who speaks to whom", spoken))
    if measured := _measures(summary):
        sections.append(_section("What the protocol measured", measured))
    if summary.outputs is not None:
        sections.append(_section(_OUTPUTS, _outputs(summary)))
    if summary.counts is not None:
        sections.append(_section("Who holds what", _shares(summary)))
    sections.append(_section("All agents", _agents(summary, run)))
    sections.append(_facts(summary.facts))
    page = _page(
        summary.title, f"<p class='scope'>{_text(_upper(_scope(summary)))}.</p>", _headline(summary, run), *sections
    )
    return _write(page, path)


def write_comparison(summaries: Sequence[Summary], path: Path) -> Path:
    """Write one page about several runs; returns its path."""
    if not summaries:
        raise RecipeError("A comparison must have at least one run.", "none", "Name the folders of some runs.")
    runs = [arrange(summary) for summary in summaries]
    sections = []
    for way in dict.fromkeys((run.metric, run.own) for run in runs):
        sections += _comparison([(index, run) for index, run in enumerate(runs) if (run.metric, run.own) == way])
    if known := [summary for summary in summaries if summary.outputs is not None]:
        sections.append(_section(_OUTPUTS, _all_outputs(known)))
    rows = [
        [
            _cell(summary.title),
            _cell(summary.protocol),
            *_numbers(f"{len(summary.agents):,}", f"{summary.rounds:,}", by=(len(summary.agents), summary.rounds)),
            *_scores(run, run.alone, run.together),
            _gain(run, run.gain),
            *_numbers(
                bytes_text(_bytes(summary)), duration_text(summary.seconds), by=(_bytes(summary), summary.seconds)
            ),
        ]
        for summary, run in zip(summaries, runs, strict=True)
    ]
    heads = ["run", "protocol", "agents", "rounds", "mean alone", "mean together", "gain", "bytes", "time"]
    notes = _measured_note(summaries, runs) + _gain_note(runs)
    notes += "".join(_liars(run, f"{run.title}: ") for run in runs)
    sections.append(_section("All runs", _table(heads, rows, left=(0, 1)) + notes))
    return _write(_page(f"{len(runs)} runs compared", *sections), path)


def _measured_note(summaries: Sequence[Summary], runs: Sequence[Run]) -> str:
    """What the runs were measured on; where that differs, which run on what."""
    measured: dict[str, list[str]] = {}
    for summary, run in zip(summaries, runs, strict=True):
        measured.setdefault(_measured(summary, run), []).append(summary.title)
    if len(measured) == 1:
        return _note(f"{_upper(next(iter(measured)))}.")
    differing = "; ".join(f"{', '.join(titles)}: {what}" for what, titles in measured.items())
    return _note(f"The runs were not measured alike. {differing}.")


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
        f"<div{' class=wide' if '→' in name else ''}><dt>{_text(name)}</dt><dd>{_text(value)}</dd></div>"
        for value, name in figures
    )
    return f"<dl class='figures'>{items}</dl>{_absent(summary)}{_liars(run)}"


def _liars(run: Run, where: str = "") -> str:
    """Who lies on purpose, in a sentence; empty if nobody does."""
    liars = [line.name for line in run.lines if line.lies]
    who = ", ".join(liars) if len(liars) <= 6 else f"{len(liars):,} of {len(run.lines):,} agents"
    return _note(f"{where}Agents that lie (injected faults), left out of every mean: {who}.") if liars else ""


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
    return f"<p class='note'>Absent in some rounds: {_text(who)}.</p>"


def _rounds(summary: Summary, run: Run) -> str:
    if not len(run.rounds):
        return _note("The agents were not evaluated during this run.")
    notes = [f"{_upper(_measured(summary, run))}."]
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
    return _switches(run) + _chart(
        charts.draw_rounds(run), "rounds", f"{run.word} per round", titles, hidden=True
    ) + _note(*notes)  # fmt: skip


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
        return f"<form class='switches'>{_switch('[data-series^=agent-]', every)}</form>"
    boxes = [_switch(f"[data-series=agent-{index}]", name, _swatch(index)) for index, name in enumerate(run.names)]
    return f"<form class='switches'>{_switch('', 'all agents')}{''.join(boxes)}</form>"


def _switch(selector: str, name: str, swatch: str = "", *, on: bool = False) -> str:
    """A box that shows and hides the lines of a selector; without one, it works all boxes of its form."""
    checked = " checked" if on else ""
    return f"<label><input type='checkbox' value='{selector}'{checked}>{swatch} {_text(name)}</label>"


def _swatch(index: int) -> str:
    colour, dash = charts.series_style(index)
    return (
        "<svg class='swatch' viewBox='0 0 22 8' aria-hidden='true'><path d='M1 4h20' "
        f"stroke='{colour}' stroke-dasharray='{_SWATCH_DASHES[dash]}'/></svg>"
    )


def _traffic(run: Run) -> str:
    if not len(run.rounds):
        return _note("The agents were not evaluated during this run.")
    if run.traffic[-1] == 0:
        return _note("The agents exchanged nothing.")
    note = "Bytes are those of the encoded messages, sent and received, of all agents, from the first round on."
    return _chart(charts.draw_traffic(run), "traffic", f"{run.word} against bytes") + _note(note)


def _bars(summary: Summary, run: Run) -> str:
    if not run.gainers:
        missing = "together" if run.together is None else "alone"
        return _note(f"There is nothing to compare: this run has no scores of the agents {missing}.")
    return _chart(charts.draw_bars(run), "bars", "alone versus together") + _note(
        f"{_upper(_measured(summary, run))}, after the last evaluation.", charts.bars_note(run)
    )


def _graph(summary: Summary, run: Run) -> str:
    """The graph of a run without a hub; empty where there is none worth drawing."""
    topology = summary.topology
    if topology is None or topology.hub or not topology.links:
        return ""
    from codistill.experiments.graph_picture import MOST_NODES, draw_graph

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
    return _chart(figure, "graph", "who speaks to whom", titles) + _cards(figures(topology)) + _note(
        *notes
    )  # fmt: skip


def _cards(named: Mapping[str, str]) -> str:
    items = "".join(f"<div><dt>{_text(name)}</dt><dd>{_text(value)}</dd></div>" for name, value in named.items())
    return f"<dl class='figures few'>{items}</dl>"


def _measures(summary: Summary) -> str:
    """A chart for each figure that the protocol has put into the rows; empty if none."""
    found = measures(summary)
    drawn = [
        _chart(draw_measure(measure), f"measure-{number}", measure.title) + _note(measure.sentence)
        for number, measure in enumerate(found)
    ]
    if not found or len(summary.agents) == 1:
        return "".join(drawn)
    honest = "honest " if any(row.get("lies") for row in summary.rows) else ""
    return "".join(drawn) + _note(f"Mean and range are of the {honest}agents that were measured in the round.")


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
    return _chart(draw_outputs(outputs, summary.class_names), "outputs", _OUTPUTS.lower()) + _note(*notes)


def _all_outputs(summaries: Sequence[Summary]) -> str:
    maps = [(each.title, each.outputs, each.class_names) for each in summaries if each.outputs is not None]
    most = max(outputs.classes for _, outputs, _ in maps)
    disagreement = "Disagreement: the share of pairs of agents that answer a test sample differently."
    return _chart(draw_maps(maps), "outputs", _OUTPUTS.lower()) + _note(_how_to_read(most), disagreement)


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
    return _chart(charts.draw_shares(summary), "shares", "samples of each class that each agent holds") + _note(
        "Each column is an agent, each row a class; the area of a circle is the number of training samples.",
        f"The first {charts.MOST_COLUMNS} of {len(summary.agents):,} agents are shown." if few else "",
    )


def _agents(summary: Summary, run: Run) -> str:
    lines = run.lines
    scores = [[line.alone, line.together, line.gain, line.own_alone, line.own_together] for line in lines]
    rows = [
        [_cell(line.name), _cell(line.described), *_figures(run, values, (line.sent, line.received))]
        for line, values in zip(lines, scores, strict=True)
    ]
    # Means of nobody are unknown.
    honest = [values for line, values in zip(lines, scores, strict=True) if not line.lies] or [[None] * 5]
    means = [mean(values) for values in zip(*honest, strict=True)]
    traffic = (sum(line.sent for line in lines), sum(line.received for line in lines))
    foot = [_cell(f"{mean_words(lines)} (bytes: sum)"), _cell(""), *_figures(run, means, traffic)]
    heads = ["agent", "model", "alone", "together", "gain", "own mix alone", "own mix together", "sent", "received"]
    return _table(heads, rows, left=(0, 1), foot=foot) + _note(
        f"Alone, together and gain: {_scope(summary)}.",
        f"Own mix: {run.word} on the agent's own distribution (its own test data, or the common test set weighted "
        "by its class counts).",
    ) + _gain_note([run])  # fmt: skip


def _figures(run: Run, scores: Sequence[float | None], traffic: tuple[int, int]) -> list[str]:
    alone, together, gain, *own = scores
    cells = [*_scores(run, alone, together), _gain(run, gain), *_scores(run, *own)]
    return cells + _numbers(*map(bytes_text, traffic), by=traffic)


def _gain_note(runs: Iterable[Run]) -> str:
    metrics = {run.metric for run in runs}
    notes = []
    if "accuracy" in metrics:
        notes.append("A gain in accuracy is in percentage points.")
    if "rmse" in metrics:
        notes.append("RMSE is an error: lower is better, and a negative gain is an improvement.")
    return _note(*notes)


def _comparison(alike: Sequence[tuple[int, Run]]) -> list[str]:
    """The charts of numbered runs that were measured in the same way."""
    first = alike[0][1]
    headings = [f"Mean {first.word} per round", f"Mean {first.word} against bytes"]
    evaluated = [(index, run) for index, run in alike if len(run.rounds)]
    if not evaluated:
        return [_section(headings[0], _note("These runs were not evaluated."))]
    boxes = [_switch(f"[data-series=run-{index}]", run.title, _swatch(index), on=True) for index, run in evaluated]
    switches = f"<form class='switches'>{''.join(boxes)}</form>"
    titles = {f"run-{index}": run.title for index, run in evaluated}
    names = [f"{chart}-{first.metric}{'-own' if first.own else ''}" for chart in ("rounds", "traffic")]
    rounds = switches + _chart(charts.draw_runs(evaluated), names[0], headings[0], titles)
    silent = [run.title for _, run in evaluated if run.traffic[-1] == 0]
    if len(silent) == len(evaluated):
        traffic = _note("The agents exchanged nothing.")
    else:
        traffic = _chart(charts.draw_runs(evaluated, against_bytes=True), names[1], headings[1], titles)
        traffic += _note(f"Without messages, drawn as a level line: {', '.join(silent)}.") if silent else ""
    return [_section(headings[0], rounds), _section(headings[1], traffic)]


def _chart(
    figure: Figure, name: str, label: str, titles: Mapping[str, str] | None = None, *, hidden: bool = False
) -> str:
    """The figure; artists with a gid in `titles` can be switched, and say who they are."""
    out = io.BytesIO()
    settings: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": name}
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        # Text stays text: letters that matplotlib's font lacks are drawn by the browser's.
        warnings.filterwarnings("ignore", message="Glyph")
        figure.savefig(out, format="svg", transparent=True, dpi=150, metadata={"Date": None})
    root = ElementTree.fromstring(out.getvalue())
    for parent in list(root.iter()):
        for child in [child for child in parent if _local(child.tag) in ("metadata", "style")]:
            parent.remove(child)
    for element in list(root.iter()):
        gid = element.get("id", "")
        _adapt(element, name)
        if titles and gid in titles:
            element.attrib |= {"data-series": gid} | ({"class": "hidden"} if hidden else {})
            ElementTree.SubElement(element, "title").text = titles[gid]
    root.attrib |= {"role": "img", "aria-label": label}
    return f"<figure class='chart' id='{name}'>{ElementTree.tostring(root, encoding='unicode')}</figure>"


def _adapt(element: ElementTree.Element, name: str) -> None:
    """No namespaces, ids unlike those of the page's other charts, named colours, short numbers."""
    element.tag = _local(element.tag)
    for key, value in list(element.attrib.items()):
        del element.attrib[key]
        key = _local(key)
        if key == "id":
            value = f"{name}-{value}"
        elif key == "href":
            value = re.sub("^#", f"#{name}-", value)
        elif key == "clip-path":
            value = value.replace("url(#", f"url(#{name}-")
        elif key == "style":
            value = re.sub("#[0-9a-f]{6}", lambda hit: _NAMED.get(hit[0], hit[0]), value)
        elif key == "d":
            value = re.sub(r"\d+\.\d+", lambda hit: f"{float(hit[0]):.2f}", " ".join(value.split()))
        element.set(key, value)


def _local(name: str) -> str:
    return name.rpartition("}")[2]


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int], foot: Sequence[str] = ()) -> str:
    head = "".join(
        f"<th scope='col'{' class=left' if place in left else ''}><button type='button'>{_text(text)}</button></th>"
        for place, text in enumerate(heads)
    )
    body = "\n".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    ending = f"<tfoot><tr>{''.join(foot)}</tr></tfoot>" if foot else ""
    return f"<div class='scroll'><table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody>{ending}</table></div>"


def _cell(text: str) -> str:
    return f"<td class='left'>{_text(text)}</td>"


def _numbers(*texts: str, by: Sequence[float]) -> list[str]:
    """Cells of numbers as people read them, and the plain numbers to sort them by."""
    return [f"<td data-by='{number!r}'>{_text(text)}</td>" for text, number in zip(texts, by, strict=True)]


def _scores(run: Run, *values: float | None) -> list[str]:
    return [f"<td{_by(value)}>{run.score_text(value)}</td>" for value in values]


def _gain(run: Run, value: float | None) -> str:
    worse = " class='worse'" if value is not None and run.is_worse(value) else ""
    return f"<td{_by(value)}{worse}>{run.gain_text(value)}</td>"


def _by(value: float | None) -> str:
    return "" if value is None else f" data-by='{float(value)!r}'"


def _bytes(summary: Summary) -> int:
    return sum(row["sent"] + row["received"] for row in summary.rows)


def _facts(facts: Mapping[str, Any]) -> str:
    if not facts:
        return ""
    return (
        "<section><details><summary>Recipe, versions, seed</summary>"
        f"<pre>{_text(chr(10).join(_fact_lines(facts)))}</pre></details></section>"
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


def _section(heading: str, content: str) -> str:
    return f"<section><h2>{_text(heading)}</h2>{content}</section>"


def _note(*sentences: str) -> str:
    text = " ".join(filter(None, sentences))
    return f"<p class='note'>{_text(text)}</p>" if text else ""


def _page(title: str, *parts: str) -> str:
    style, script = ((files("codistill.experiments") / f"report.{kind}").read_text("utf-8") for kind in ("css", "js"))
    body = "\n".join(filter(None, parts))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; \
style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<title>{_text(title)} - codistill</title>
<style>
{style}</style>
</head>
<body>
<main>
<h1>{_text(title)}</h1>
{body}
</main>
<script>
{script}</script>
</body>
</html>
"""


def _write(page: str, path: Path) -> Path:
    with writing(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, page.encode("utf-8", "replace"))
    return path


def _text(text: str) -> str:
    return escape(str(text))


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]
