"""The HTML pages about a run and about several runs: self-contained, so that they open without a connection."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from codistill.core.errors import RecipeError
from codistill.core.text import bytes_text, duration_text
from codistill.report import score_plots
from codistill.report.graphs import MOST_NODES, draw_graph, draw_partition
from codistill.report.html import Chart, Section, Switch, capitalised, chart, sentence, write_page
from codistill.report.maps import MOST_NUMBERS, draw_features, draw_maps, draw_outputs, shown_agents
from codistill.results.agents import (
    AgentLine,
    gain_cell,
    gain_text,
    honest_lines,
    in_percent,
    left_out_text,
    metric_name,
    score_cell,
    score_text,
)
from codistill.results.per_class import (
    MOST_ON_PAGE,
    agents_table,
    lacking,
    mapped_agents,
    matrices,
    mean_shares,
    row_shares,
    runs_table,
)
from codistill.results.rounds import RunScores, measures, scores_of
from codistill.results.summary import Summary, further_table, gain_notes, missing_notes, safeguard_table
from codistill.results.tables import AnyCell, Cell, Table
from codistill.topology.graphs import figures

_OUTPUTS = "Average output by true class"
_NOT_EVALUATED = "The agents were not evaluated during this run."
_SILENT = "The agents exchanged nothing."
_MOST_NAMED = 6  # agents that a sentence names
_MOST_COLUMNS = 60  # agents in the picture of the partition
_MOST_MAPS = 24  # runs whose confusion matrices a comparison shows


def write_report(summary: Summary, path: Path) -> Path:
    run, against = scores_of(summary), summary.against_alone()
    worse = against.losses(_MOST_NAMED) if against and against.worse else ""
    sections = [
        gains_section(summary, run),
        rounds_section(summary, run),
        *cost_sections(run),
        graph_section(summary, run),
        measures_section(summary),
        per_class_section(summary),
        outputs_section(summary),
        features_section(summary),
        partition_section(summary),
        Section("All agents", table=summary.table(page=True)),
        safeguard_section(summary),
        further_section(summary),
        best_round_section(summary),
    ]
    return write_page(
        path,
        "run.html",
        title=summary.title,
        scope=sentence(summary.scope()),
        figures=key_figures(summary, run),
        warning=f"Worse than alone on their own data: {worse}." if worse else "",
        remarks=remarks(summary, run),
        sections=[section for section in sections if section is not None],
        facts="\n".join(_fact_lines(summary.facts)),
    )


def key_figures(summary: Summary, run: RunScores) -> list[tuple[str, str]]:
    """What the page begins with: values and their names."""
    agents, rounds = len(summary.agents), summary.rounds
    size = f"{agents:,} agent{'' if agents == 1 else 's'}, {rounds:,} round{'' if rounds == 1 else 's'}"
    sent, received = (sum(row[way] for row in summary.rows) for way in ("sent", "received"))
    found = []
    if against := summary.against_alone():
        honest = "honest agents" if against.byzantine else "agents"
        found.append((against.share, f"{honest} better than alone on their own data"))
    return [
        *found,
        *_score_figures(run),
        (summary.protocol, f"protocol: {size}"),
        (bytes_text(sent + received), f"{bytes_text(sent)} sent, {bytes_text(received)} received"),
        (duration_text(summary.seconds), "time"),
    ]


def _score_figures(run: RunScores) -> list[tuple[str, str]]:
    name = f"mean {metric_name(run.metric)} on {'their own data' if run.own else f'the common {run.test_part} set'}"
    if run.together is None:
        return [("-", f"mean {metric_name(run.metric)}: not evaluated")]
    if run.alone is None:
        return [(score_text(run.metric, run.together), f"{name}, together")]
    both = f"{score_text(run.metric, run.alone)} → {score_text(run.metric, run.together)}"
    gain = "mean gain, percentage points" if in_percent(run.metric) else "mean gain (positive is better)"
    return [(both, f"{name}, alone → together"), (gain_text(run.metric, run.gain), gain)]


def remarks(summary: Summary, run: RunScores) -> list[str]:
    """What needs attention, below the key figures."""
    found, agents = [], len(summary.agents)
    if (against := summary.against_alone()) and not against.worse:
        found.append("No agent is worse than alone on its own data.")
    missed = Counter(row["agent"] for row in summary.rows if not row["present"])
    if len(missed) > _MOST_NAMED:
        times = f"{missed.total():,} of {len(summary.rows):,} times"
        found.append(f"Absent in some rounds: {len(missed):,} of {agents:,} agents, {times}.")
    elif missed:
        who = ", ".join(f"{name} ({count} of {summary.rounds})" for name, count in missed.items())
        found.append(f"Absent in some rounds: {who}.")
    if left_out := left_out_text(run.lines, _MOST_NAMED):
        found.append(sentence(left_out))
    if behind := summary.fell_behind():
        who = "; ".join(behind) if len(behind) <= _MOST_NAMED else f"{len(behind):,} of {agents:,} agents"
        found.append(f"Fell behind: {who}.")
    return [*found, *byzantine_notes(run)]


def byzantine_notes(run: RunScores, where: str = "") -> list[str]:
    names = [line.name for line in run.lines if line.byzantine]
    who = ", ".join(names) if len(names) <= _MOST_NAMED else f"{len(names):,} of {len(run.lines):,} agents"
    return [f"{where}Byzantine agents (injected faults), left out of all means: {who}."] if names else []


def gains_section(summary: Summary, run: RunScores) -> Section:
    """Each agent alone and together: on its own data and, where there is one, on the common test set."""

    def drawn(lines: Sequence[AgentLine], name: str, *notes: str, own: bool) -> Chart:
        title = run.axis_label(own=own)
        figure = score_plots.draw_gains(lines, run.metric, title)
        return chart(figure, name, f"alone versus together: {title}", *notes, score_plots.omitted_agents(lines))

    own = [line.on_own_data for line in run.lines]
    charts = []
    if score_plots.with_gain(own):
        note = "Own data: the agent's own test data, or the common test set weighted by its class counts."
        charts.append(drawn(own, "own-gains", note, own=True))
    if not run.own and score_plots.with_gain(run.lines):
        note = f"{capitalised(summary.scope())}, after the last evaluation."
        charts.append(drawn(run.lines, "gains", note, own=False))
    missing = "together" if run.together is None else "alone"
    nothing = f"There is nothing to compare: this run has no scores of the agents {missing}."
    return Section("Alone versus together", charts=charts, notes=() if charts else [nothing])


def rounds_section(summary: Summary, run: RunScores) -> Section:
    """Score per round, with a switch for each agent."""
    name = f"{metric_name(run.metric)} per round"
    heading = capitalised(name)
    if not len(run.rounds):
        return Section(heading, notes=[_NOT_EVALUATED])
    notes = [sentence(measured_on(summary, run))]
    if len(run.names) > 1:
        notes.append("The line is the mean of the agents, the band reaches from the lowest to the highest agent.")
    honest = len(honest_lines(run.lines))
    if honest < len(run.names):
        notes.append("Byzantine agents have lines of their own, and count neither in the mean nor in the band.")
    if (step := score_plots.thinning(run)) > 1:
        notes.append(f"Lines of single agents show one of {step} evaluations.")
    if run.alone is not None:
        notes.append("Dashed: the mean of the same agents trained alone, at the end of their training.")
    evaluated = [len(values) for values in run.values]
    if min(evaluated) < honest:
        notes.append(f"Of {honest:,} agents, {min(evaluated):,} to {max(evaluated):,} could be evaluated.")
    if run.rounds[-1] < summary.rounds:
        notes.append(f"Last evaluated in round {run.rounds[-1]} of {summary.rounds}.")
    titles = {f"agent-{index}": agent for index, agent in run.drawn.items()}
    drawn = chart(score_plots.draw_rounds(run), "rounds", name, titles=titles, hidden=True)
    return Section(heading, _switches(run), [drawn], notes=[*notes, *_sample_notes(summary)])


def measured_on(summary: Summary, run: RunScores) -> str:
    return f"{metric_name(run.metric)} on each agent's own data" if run.own else summary.scope()


def _sample_notes(summary: Summary) -> list[str]:
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


def _switches(run: RunScores) -> list[Switch]:
    if len(run.names) == 1:
        return []
    if len(run.names) > score_plots.MOST_SWITCHES:
        some = len(run.drawn) < len(run.names)
        which = f"the {len(run.drawn)} best and worst" if some else f"all {len(run.names):,}"
        return [Switch("[data-series^=agent-]", f"show {which} agents (point at a line to read its name)")]
    each = [Switch(f"[data-series=agent-{index}]", name, index) for index, name in enumerate(run.names)]
    return [Switch("", "all agents"), *each]


def cost_sections(run: RunScores) -> list[Section]:
    """Score against bytes; against exchanges and gradient steps, where they were counted; and time, with a clock."""
    metric = metric_name(run.metric)
    heading = f"{capitalised(metric)} against"
    if not len(run.rounds):
        return [Section(f"{heading} bytes", notes=[_NOT_EVALUATED])]
    sections = [Section(f"{heading} bytes", notes=[_SILENT])]
    if run.traffic[-1] != 0:
        note = "Bytes are those of the encoded messages that all agents sent and received since the first round."
        drawn = chart(score_plots.draw_traffic(run), "traffic", f"{metric} against bytes", note)
        sections = [Section(f"{heading} bytes", charts=[drawn])]
    if score_plots.counted(run):
        drawn = chart(
            score_plots.draw_counts(run), "counts", f"{metric} against exchanges and steps",
            "An exchange is a time that an agent waits for messages of others; a gradient step is one on a batch.",
            "Of each round, the mean of the agents that took part counts.",
        )  # fmt: skip
        sections.append(Section(f"{heading} exchanges and gradient steps", charts=[drawn]))
    if run.times is not None:
        note = "Time is that of the run's clock: virtual in a simulation, where this machine's speed does not matter."
        drawn = chart(score_plots.draw_times(run), "times", f"{metric} against time", note)
        sections.append(Section(f"{heading} time", charts=[drawn]))
    return sections


def graph_section(summary: Summary, run: RunScores) -> Section | None:
    """The graph of a run without a hub; None where there is none worth drawing."""
    topology = summary.topology
    if topology is None or topology.hub or not topology.links or not 2 < len(topology.names) <= MOST_NODES:
        return None
    scores = {line.name: line.together for line in run.compared}
    titles = {
        f"node-{index}": f"{name}: {score_text(run.metric, scores[name])}" for index, name in enumerate(topology.names)
    }
    figure, numbered = draw_graph(topology, run)
    notes = [
        "Each disc is an agent; the deeper its colour, the better its score after the last evaluation. Point at a disc "
        "to read its name.",
        "The numbers are the places of the agents in the table below." if numbered else "",
        "Arrows point to the receivers." if topology.directed else "",
        "Links that leave at one side come in at the opposite side." if topology.kind == "torus" else "",
        "Byzantine agents have a red rim." if any(line.byzantine for line in run.lines) else "",
        "Diameter: the largest number of links on the shortest path between two agents. Spectral gap: from 0 to 1; the "
        "larger it is, the faster the agents reach consensus.",
    ]
    drawn = chart(figure, "graph", "graph of agents", titles=titles)
    return Section("Graph of agents", charts=[drawn], figures=figures(topology), notes=notes)


def measures_section(summary: Summary) -> Section | None:
    found = measures(summary)
    if not found:
        return None
    charts = [
        chart(score_plots.draw_measure(measure), f"measure-{number}", measure.title, measure.sentence)
        for number, measure in enumerate(found)
    ]
    honest = "honest " if any(row.get("lies") for row in summary.rows) else ""
    several = [f"Mean and range are of the {honest}agents that were measured in the round."]
    return Section("Protocol measures", charts=charts, notes=several if len(summary.agents) > 1 else ())


def outputs_section(summary: Summary) -> Section | None:
    """The average output by true class, and where the agents disagree; None if it is unknown."""
    outputs = summary.outputs
    if outputs is None:
        return None
    notes = [_how_to_read_outputs(outputs.classes)]
    if outputs.disagreement is not None:
        notes.append(
            "Bars: the share of pairs of agents that predict different classes for a test sample of the class."
        )
    if len(outputs.agents) < len(summary.agents):
        counted = f"{len(outputs.agents):,} of {len(summary.agents):,} agents count"
        notes.append(f"{counted}: Byzantine agents, and agents that were never present, are left out.")
    figure = draw_outputs(outputs, summary.class_names)
    return Section(_OUTPUTS, charts=[chart(figure, "outputs", _OUTPUTS.lower(), *notes)])


_PER_CLASS = "Scores per class"
_HOW_TO_READ_COUNTS = (
    "Each row is a true class: of its test samples the share that is predicted as each class, in percent. On the "
    "diagonal is the recall."
)


def per_class_section(summary: Summary) -> Section | None:
    """The confusion matrix and the recall of each agent, or why they are unknown; None for real values."""
    if summary.task != "classification":
        return None
    table, shown = agents_table(summary), mapped_agents(summary)
    if table is None:
        return Section(_PER_CLASS, notes=[sentence(phrase) for phrase in (lacking(summary) or ("unknown",))[:1]])
    found = matrices(summary)
    many = f"The best and the worst of {len(found):,} agents are shown." if len(shown) < len(found) else ""
    drawn = draw_maps([(name, row_shares(found[name]), summary.class_names) for name in shown])
    made = chart(drawn, "confusion", "confusion matrix of each agent", "Confusion matrices.", _HOW_TO_READ_COUNTS, many)
    return Section(_PER_CLASS, charts=[made], table=table)


def _how_to_read_outputs(classes: int) -> str:
    empty = "; cells below 0.5 are empty" if classes <= MOST_NUMBERS else "; full colour is 100"
    return (
        "Each row is a true class: the mean output of all agents on its test samples, in percent"
        f"{empty}. Agents that are always right and certain have 100 on the diagonal."
    )


def features_section(summary: Summary) -> Section | None:
    """A map of the feature space per round at which features were kept; None where there was none."""
    if not summary.features:
        return None
    last = summary.features[-1]
    notes = [
        "Each point is a test sample as one agent sees it: the input of the last layer of its model, brought to two "
        "dimensions by t-SNE, for all agents of a panel together.",
        "Agents whose points of a class lie in the same place have similar features for it; agents whose points lie "
        "apart have features of their own.",
        "Only which points are close has a meaning: axes, sizes and distances between clusters have none, and each "
        "panel is a map of its own.",
        "Points of equal features hide each other.",
        "" if last.labels is None else "The opacity shows the class: from faint for the first to full for the last.",
    ]
    if left := len(summary.agents) - len(shown_agents(last)):
        notes.append(
            f"{left:,} of {len(summary.agents):,} agents are not shown: they have no features, none that are "
            "finite, or another number of them; or there are too many agents."
        )
    figure = draw_features(summary.features, summary.class_names)
    return Section("Feature space", charts=[chart(figure, "features", "feature space by round", *notes)])


def partition_section(summary: Summary) -> Section | None:
    """Which agent holds how many samples of which class; None if it is unknown."""
    if summary.counts is None:
        return None
    few = len(summary.agents) > _MOST_COLUMNS
    figure = draw_partition(summary.counts[:_MOST_COLUMNS], list(summary.agents)[:_MOST_COLUMNS], summary.class_names)
    drawn = chart(
        figure, "shares", "training samples by agent and class",
        "Each column is an agent, each row a class; the area of a circle is the number of training samples.",
        f"The first {_MOST_COLUMNS} of {len(summary.agents):,} agents are shown." if few else "",
    )  # fmt: skip
    return Section("Training samples by agent and class", charts=[drawn])


def safeguard_section(summary: Summary) -> Section | None:
    table = safeguard_table(summary, page=True)
    return None if table is None else Section("Safeguard", table=table)


def best_round_section(summary: Summary) -> Section | None:
    table = summary.best_round_table(page=True)
    return None if table is None else Section("Best round by validation", table=table)


def further_section(summary: Summary) -> Section | None:
    """Every further score of every agent; where there is one score only, notes on agents that lack it."""
    table, missing = further_table(summary, page=True), missing_notes(summary)
    if table is None and not missing:
        return None
    return Section("Further scores", table=table, notes=[] if table else [sentence(note) for note in missing])


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


def write_comparison(summaries: Sequence[Summary], path: Path, over_seeds: Table | None = None) -> Path:
    """`over_seeds`: the table of `over_seeds_table`, if there is one."""
    if not summaries:
        raise RecipeError("A comparison must have at least one run.", "none", "Name the folders of some runs.")
    runs = [scores_of(summary) for summary in summaries]
    sections: list[Section] = []
    for way in dict.fromkeys((run.metric, run.own) for run in runs):
        sections += _chart_sections([(index, run) for index, run in enumerate(runs) if (run.metric, run.own) == way])
    sections += _all_confusions(summaries)
    sections += _all_outputs(summaries)
    if over_seeds is not None:
        sections.append(Section(capitalised(over_seeds.title), table=over_seeds))
    byzantine = [note for run in runs for note in byzantine_notes(run, f"{run.title}: ")]
    sections.append(Section("All runs", table=_runs_table(summaries, runs), notes=byzantine))
    return write_page(path, "page.html", title=f"{len(runs)} runs compared", sections=sections)


# What scores are drawn against: the chart's name, the words for it, and what is said of runs that have spent none of
# it or do not know it.
_ALONG = {
    "bytes": ("traffic", "bytes", "Without messages", ""),
    "exchanges": ("exchanges", "exchanges", "Without exchanges", "Not counted"),
    "steps": ("steps", "gradient steps", "Without gradient steps", "Not counted"),
    "time": ("times", "time", "", "Without a clock"),
}


def _chart_sections(alike: Sequence[tuple[int, RunScores]]) -> list[Section]:
    """The mean score of numbered runs that were measured in the same way: per round, and against each cost and time."""
    metric = metric_name(alike[0][1].metric)
    evaluated = [(index, run) for index, run in alike if len(run.rounds)]
    heading = f"Mean {metric} per round"
    if not evaluated:
        return [Section(heading, notes=["These runs were not evaluated."])]
    switches = [Switch(f"[data-series=run-{index}]", run.title, index, on=True) for index, run in evaluated]
    sections = [Section(heading, switches, [_chart(evaluated, "round", "rounds", heading)])]
    for against, (name, words, nothing, unknown) in _ALONG.items():
        heading = f"Mean {metric} against {words}"
        along = {index: score_plots.values_along(run, against) for index, run in evaluated}
        known = [(index, run) for index, run in evaluated if along[index] is not None]
        level = [run.title for index, run in known if not np.any(along[index])]
        missing = [run.title for index, run in evaluated if along[index] is None]
        if len(level) < len(known):
            notes = [f"{nothing}, drawn as a level line: {', '.join(level)}."] if level else []
            notes += [f"{unknown}, and so not drawn: {', '.join(missing)}."] if missing else []
            sections.append(Section(heading, charts=[_chart(known, against, name, heading)], notes=notes))
        elif against == "bytes":
            sections.append(Section(heading, notes=[_SILENT]))
    return sections


def _chart(runs: Sequence[tuple[int, RunScores]], against: str, name: str, heading: str) -> Chart:
    first, titles = runs[0][1], {f"run-{index}": run.title for index, run in runs}
    name += f"-{first.metric}{'-own' if first.own else ''}"
    return chart(score_plots.draw_runs(runs, against), name, heading, titles=titles)


def _all_confusions(summaries: Sequence[Summary]) -> list[Section]:
    """The recall per class of the runs, and their confusion matrices as small maps; empty if no run has any."""
    table = runs_table(summaries, MOST_ON_PAGE)
    if table is None:
        return []
    known = [each for each in summaries if matrices(each)]
    drawn = draw_maps([(each.title, mean_shares(each), each.class_names) for each in known[:_MOST_MAPS]])
    many = f"The first {_MOST_MAPS} of {len(known)} runs are shown." if len(known) > _MOST_MAPS else ""
    how = ("Confusion matrices: means over the agents.", _HOW_TO_READ_COUNTS, many)
    return [Section(_PER_CLASS, charts=[chart(drawn, "confusion", "confusion matrix of each run", *how)], table=table)]


def _all_outputs(summaries: Sequence[Summary]) -> list[Section]:
    """The average outputs of the runs that kept them, as small maps; empty if none did."""
    maps = [(each.title, each.outputs, each.class_names) for each in summaries if each.outputs is not None]
    if not maps:
        return []
    how = _how_to_read_outputs(max(outputs.classes for _, outputs, _ in maps))
    disagreement = "Disagreement: the share of pairs of agents that predict different classes for a test sample."
    return [Section(_OUTPUTS, charts=[chart(draw_maps(maps), "outputs", _OUTPUTS.lower(), how, disagreement)])]


def _runs_table(summaries: Sequence[Summary], runs: Sequence[RunScores]) -> Table:
    headings = (
        "run", "protocol", "agents", "rounds", "mean alone", "mean together", "gain", "better than alone", "bytes",
        "time",
    )  # fmt: skip
    rows: list[list[AnyCell]] = []
    measured: dict[str, list[str]] = {}  # on what -> titles
    for summary, run in zip(summaries, runs, strict=True):
        measured.setdefault(measured_on(summary, run), []).append(summary.title)
        agents, traffic = len(summary.agents), sum(row["sent"] + row["received"] for row in summary.rows)
        against = summary.against_alone()
        rows.append(
            [
                summary.title,
                summary.protocol,
                Cell(f"{agents:,}", agents),
                Cell(f"{summary.rounds:,}", summary.rounds),
                score_cell(run.metric, run.alone),
                score_cell(run.metric, run.together),
                gain_cell(run.metric, run.gain),
                Cell("-", -1) if against is None else Cell(against.share, len(against.better)),
                Cell(bytes_text(traffic), traffic),
                Cell(duration_text(summary.seconds), summary.seconds),
            ]
        )
    notes = list(measured)
    if len(measured) > 1:
        differing = "; ".join(f"{', '.join(titles)}: {what}" for what, titles in measured.items())
        notes = [f"the runs were not measured in the same way. {differing}"]
    notes += gain_notes(summary.shown_scores[0] for summary in summaries)
    notes.append("better than alone: agents with a better score on their own data than the same agents alone")
    return Table(headings, "ll" + "r" * (len(headings) - 2), rows, notes=notes)
