"""The sections of the page about a run: a chart each, and notes on how to read it."""

from __future__ import annotations

from collections.abc import Sequence

from codistill.plots.gain_plot import draw_gains, omitted_agents, with_gain
from codistill.plots.heatmaps import MOST_NUMBERS, draw_outputs
from codistill.plots.measure_plot import draw_measure
from codistill.plots.partition_plot import draw_partition
from codistill.plots.score_plots import (
    MOST_SWITCHES,
    counted,
    draw_counts,
    draw_rounds,
    draw_times,
    draw_traffic,
    thinning,
)
from codistill.reports import html
from codistill.reports.score_cells import measured_on
from codistill.results.agent_lines import AgentLine, honest_lines
from codistill.results.measures import measures
from codistill.results.metric_text import metric_name, score_text
from codistill.results.run_scores import RunScores
from codistill.results.summary import Summary
from codistill.topology.facts import figures

OUTPUTS = "Average output by true class"
_MOST_COLUMNS = 60  # agents in the picture of the partition
_NOT_EVALUATED = "The agents were not evaluated during this run."


def rounds_section(summary: Summary, run: RunScores) -> str:
    """Score per round, with a switch for each agent."""
    if not len(run.rounds):
        return html.note(_NOT_EVALUATED)
    notes = [f"{html.capitalised(measured_on(summary, run))}."]
    if len(run.names) > 1:
        notes.append("The line is the mean of the agents, the band reaches from the lowest to the highest agent.")
    honest = len(honest_lines(run.lines))
    if honest < len(run.names):
        notes.append("Byzantine agents have lines of their own, and count neither in the mean nor in the band.")
    if (step := thinning(run)) > 1:
        notes.append(f"Lines of single agents show one of {step} evaluations.")
    if run.alone is not None:
        notes.append("Dashed: the mean of the same agents trained alone, at the end of their training.")
    evaluated = [len(values) for values in run.values]
    if min(evaluated) < honest:
        notes.append(f"Of {honest:,} agents, {min(evaluated):,} to {max(evaluated):,} could be evaluated.")
    if run.rounds[-1] < summary.rounds:
        notes.append(f"Last evaluated in round {run.rounds[-1]} of {summary.rounds}.")
    notes += _sample_notes(summary)
    titles = {f"agent-{index}": name for index, name in run.drawn.items()}
    chart = html.chart(draw_rounds(run), "rounds", f"{metric_name(run.metric)} per round", titles, hidden=True)
    return _switches(run) + chart + html.note(*notes)


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


def _switches(run: RunScores) -> str:
    if len(run.names) == 1:
        return ""
    if len(run.names) > MOST_SWITCHES:
        some = len(run.drawn) < len(run.names)
        which = f"the {len(run.drawn)} best and worst" if some else f"all {len(run.names):,}"
        every = f"show {which} agents (point at a line to read its name)"
        return f"<form class='switches'>{html.switch('[data-series^=agent-]', every)}</form>"
    boxes = [
        html.switch(f"[data-series=agent-{index}]", name, html.swatch(index)) for index, name in enumerate(run.names)
    ]
    return f"<form class='switches'>{html.switch('', 'all agents')}{''.join(boxes)}</form>"


def traffic_section(run: RunScores) -> str:
    """Score against bytes."""
    if not len(run.rounds):
        return html.note(_NOT_EVALUATED)
    if run.traffic[-1] == 0:
        return html.note("The agents exchanged nothing.")
    note = "Bytes are those of the encoded messages that all agents sent and received since the first round."
    return html.chart(draw_traffic(run), "traffic", f"{metric_name(run.metric)} against bytes") + html.note(note)


def counts_section(run: RunScores) -> str:
    """Score against exchanges and gradient steps; empty where there were none, or they were not counted."""
    if not len(run.rounds) or not counted(run):
        return ""
    note = (
        "An exchange is a time that an agent waits for messages of others; a gradient step is one on a batch. "
        "Of each round, the mean of the agents that took part counts."
    )
    name = f"{metric_name(run.metric)} against exchanges and steps"
    return html.chart(draw_counts(run), "counts", name) + html.note(note)


def times_section(run: RunScores) -> str:
    """Score against time; empty for a run without a clock."""
    if run.times is None:
        return ""
    note = "Time is that of the run's clock: virtual in a simulation, where this machine's speed does not matter."
    return html.chart(draw_times(run), "times", f"{metric_name(run.metric)} against time") + html.note(note)


def gains_section(summary: Summary, run: RunScores) -> str:
    """Each agent alone and together: on its own data and, where there is one, on the common test set."""
    own = [line.on_own_data for line in run.lines]
    charts = [_gains(run, own, "own-gains", own=True)] if with_gain(own) else []
    if not run.own and with_gain(run.lines):
        charts.append(_gains(run, run.lines, "gains", own=False))
        charts.append(html.note(f"{html.capitalised(summary.scope())}, after the last evaluation."))
    if charts:
        return "".join(charts)
    missing = "together" if run.together is None else "alone"
    return html.note(f"There is nothing to compare: this run has no scores of the agents {missing}.")


def _gains(run: RunScores, lines: Sequence[AgentLine], name: str, *, own: bool) -> str:
    title = run.axis_label(own=own)
    return html.chart(draw_gains(lines, run.metric, title), name, f"alone versus together: {title}") + html.note(
        "Own data: the agent's own test data, or the common test set weighted by its class counts." if own else "",
        omitted_agents(lines),
    )


def graph_section(summary: Summary, run: RunScores) -> str:
    """The graph of a run without a hub; empty where there is none worth drawing."""
    topology = summary.topology
    if topology is None or topology.hub or not topology.links:
        return ""
    from codistill.plots.topology_plot import MOST_NODES, draw_graph

    if not 2 < len(topology.names) <= MOST_NODES:
        return ""
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
    return html.chart(figure, "graph", "graph of agents", titles) + html.cards(figures(topology)) + html.note(*notes)


def measures_section(summary: Summary) -> str:
    """A chart for each measure of the protocol; empty if there is none."""
    found = measures(summary)
    drawn = [
        html.chart(draw_measure(measure), f"measure-{number}", measure.title) + html.note(measure.sentence)
        for number, measure in enumerate(found)
    ]
    if not found or len(summary.agents) == 1:
        return "".join(drawn)
    honest = "honest " if any(row.get("lies") for row in summary.rows) else ""
    return "".join(drawn) + html.note(f"Mean and range are of the {honest}agents that were measured in the round.")


def outputs_section(summary: Summary) -> str:
    """The average output by true class, and where the agents disagree; empty if it is unknown."""
    outputs = summary.outputs
    if outputs is None:
        return ""
    notes = [how_to_read_outputs(outputs.classes)]
    if outputs.disagreement is not None:
        notes.append(
            "Bars: the share of pairs of agents that predict different classes for a test sample of the class."
        )
    if len(outputs.agents) < len(summary.agents):
        counted = f"{len(outputs.agents):,} of {len(summary.agents):,} agents count"
        notes.append(f"{counted}: Byzantine agents, and agents that were never present, are left out.")
    return html.chart(draw_outputs(outputs, summary.class_names), "outputs", OUTPUTS.lower()) + html.note(*notes)


def how_to_read_outputs(classes: int) -> str:
    """How to read a map of average outputs."""
    empty = "; cells below 0.5 are empty" if classes <= MOST_NUMBERS else "; full colour is 100"
    return (
        "Each row is a true class: the mean output of all agents on its test samples, in percent"
        f"{empty}. Agents that are always right and certain have 100 on the diagonal."
    )


def partition_section(summary: Summary) -> str:
    """Which agent holds how many samples of which class; empty if it is unknown."""
    if summary.counts is None:
        return ""
    few = len(summary.agents) > _MOST_COLUMNS
    figure = draw_partition(summary.counts[:_MOST_COLUMNS], list(summary.agents)[:_MOST_COLUMNS], summary.class_names)
    return html.chart(figure, "shares", "training samples by agent and class") + html.note(
        "Each column is an agent, each row a class; the area of a circle is the number of training samples.",
        f"The first {_MOST_COLUMNS} of {len(summary.agents):,} agents are shown." if few else "",
    )
