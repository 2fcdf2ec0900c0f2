"""Scores per round, against bytes and against time: of one run, and of several runs together."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, PercentFormatter

from codistill.nodes.faults import Fault
from codistill.report.style import (
    BLUE,
    GREY,
    INK,
    MOST_MARKERS,
    MUTED,
    STYLE,
    WORSE,
    plain,
    series_style,
    tick_text,
)
from codistill.results.agents import AgentLine, gain_text, in_percent
from codistill.results.rounds import Measure, RunScores

MOST_SWITCHES = 20  # agents that have a colour, and a switch in the report, of their own
MOST_POINTS = 40_000  # of all agents' lines together, so that the page stays small
_BELOW = {  # the axes
    "round": "round",
    "bytes": "bytes sent and received, all agents together",
    "exchanges": "exchanges, per agent",
    "steps": "gradient steps, per agent",
    "time": "seconds since the start, by the clock of the run",
}


def draw_rounds(run: RunScores) -> Figure:
    """Score per round: mean, lowest to highest, and each agent as a line with the gid 'agent-<index>'."""
    few, step = len(run.names) <= MOST_SWITCHES, thinning(run)
    with canvas(4) as (figure, axes):
        _mean_range_alone(axes, run, run.rounds)
        for index, name in run.drawn.items():
            done, values = (np.array(part)[::-step][::-1] for part in run.curves[name])
            colour, dash = series_style(index) if few else (MUTED, "solid")
            width, alpha = (1.4, 1.0) if few else (0.8, 0.45)
            (line,) = axes.plot(done, values, color=colour, linestyle=dash, linewidth=width, alpha=alpha, zorder=2)
            if len(done) == 1:
                line.set(marker="o", markersize=4)
            line.set_gid(f"agent-{index}")
        shade_faults(axes, run.faults, max(run.rounds, default=0))
        _finish(axes, run, "round", run.rounds)
    return figure


def thinning(run: RunScores) -> int:
    """Of how many evaluations one is drawn in the lines of single agents."""
    return math.ceil(sum(map(len, run.values)) / MOST_POINTS) or 1


def draw_traffic(run: RunScores) -> Figure:
    """Score against the bytes that all agents together have sent and received."""
    with canvas(4) as (figure, axes):
        _mean_range_alone(axes, run, run.traffic)
        average, up = run.mean, -12 if run.greater_is_better else 6  # beside the line, which falls or rises
        for index in sorted({0, len(run.rounds) - 1}):
            axes.annotate(
                f"round {run.rounds[index]}", (run.traffic[index], average[index]), xytext=(7, up),
                textcoords="offset points", fontsize=9, color=INK,
            )  # fmt: skip
        axes.margins(y=0.12)
        _finish(axes, run, "bytes", run.traffic)
    return figure


def counted(run: RunScores) -> dict[str, np.ndarray]:
    """Exchanges and gradient steps up to each evaluated round, those that there were."""
    found = {"exchanges": run.exchanges, "steps": run.steps}
    return {name: counts for name, counts in found.items() if counts is not None and counts.any()}


def draw_counts(run: RunScores) -> Figure:
    counts = counted(run)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9, 3.6), layout="constrained")
        grid = figure.subplots(1, len(counts), squeeze=False, sharey=True)[0]
        for axes, (name, x) in zip(grid, counts.items(), strict=True):
            mean_and_range(axes, x, run.values, agents=len(run.names))
            _finish(axes, run, name, x)
        for axes in grid[1:]:
            axes.set_title("")
            axes.get_legend().remove()
    return figure


def draw_times(run: RunScores) -> Figure:
    assert run.times is not None
    with canvas(4) as (figure, axes):
        _mean_range_alone(axes, run, run.times)
        _finish(axes, run, "time", run.times)
    return figure


def draw_runs(runs: Sequence[tuple[int, RunScores]], against: str = "round") -> Figure:
    """Mean score of several numbered runs against "round", a cost or "time"; lines have the gid 'run-<number>'."""
    spent = []
    with canvas(4) as (figure, axes):
        for index, run in runs:
            colour, dash = series_style(index)
            gid = f"run-{index}"
            x = values_along(run, against)
            assert x is not None
            if not x.any():  # it has not spent anything of it
                axes.axhline(run.mean[-1], color=colour, linestyle=dash, linewidth=1.2, alpha=0.8, gid=gid)
                continue
            axes.plot(x, run.mean, color=colour, linestyle=dash, linewidth=2, gid=gid, **markers(len(x)))
            spent.append(x)
        _finish(axes, runs[0][1], against, np.concatenate(spent))
    return figure


def values_along(run: RunScores, against: str) -> np.ndarray | None:
    """What a run's scores are drawn against: rounds, a cost or the time up to each of them; None: unknown."""
    known: dict[str, np.ndarray | None] = {"round": run.rounds, "bytes": run.traffic, "time": run.times}
    return {**known, "exchanges": run.exchanges, "steps": run.steps}[against]


def _mean_range_alone(axes: Axes, run: RunScores, x: np.ndarray) -> None:
    """The mean, the range of all agents around it, and the mean of the agents alone."""
    mean_and_range(axes, x, run.values, agents=len(run.names))
    if run.alone is not None and np.isfinite(run.alone):
        axes.axhline(run.alone, color=MUTED, linestyle="dashed", linewidth=1.3, label="mean alone, at the end")


def _finish(axes: Axes, run: RunScores, against: str, x: np.ndarray) -> None:
    axes.set_xlabel(_BELOW[against])
    # Above and horizontal: upright text is read with a tilted head, and browsers place it less exactly.
    described = bool(axes.get_legend_handles_labels()[0])
    axes.set_title(run.axis_label(), pad=26 if described else 12)
    axes.grid(axis="x", visible=False)
    if in_percent(run.metric):
        axes.yaxis.set_major_formatter(PercentFormatter(1, symbol=" %"))
    if described:
        axes.legend(loc="lower left", ncols=3, **LEGEND)
    if against == "round":
        rounds_axis(axes, x)
    else:
        costs_axis(axes, against, x)


# --- Each agent alone and together, as bars.

MOST_BARS = 30


def draw_gains(lines: Sequence[AgentLine], metric: str, title: str) -> Figure:
    """Bars of the agents whose gain is known; of many agents those that gained or lost most, the best first."""
    shown = with_gain(lines)
    if len(shown) > MOST_BARS:
        largest = sorted(shown, key=lambda line: -abs(line.gain or 0))[:MOST_BARS]
        shown = sorted(largest, key=lambda line: line.gain or 0, reverse=True)
    with canvas(1.1 + 0.36 * len(shown)) as (figure, axes):
        _bars(axes, shown, metric)
        unit = "gain in points" if in_percent(metric) else "gain (positive is better)"
        axes.set_title(f"{title}\nand {unit}", pad=12, linespacing=1.5)
    return figure


def with_gain(lines: Sequence[AgentLine]) -> list[AgentLine]:
    return [line for line in lines if line.gain is not None and math.isfinite(line.gain)]


def omitted_agents(lines: Sequence[AgentLine]) -> str:
    """Which agents have no bars, in words; empty if all have."""
    known, agents = len(with_gain(lines)), len(lines)
    notes = []
    if known > MOST_BARS:
        notes.append(f"Of {known:,} agents, the {MOST_BARS} with the largest gain or loss are shown.")
    if known < agents:
        notes.append(f"{agents - known:,} of {agents:,} agents lack a score alone or together.")
    return " ".join(notes)


def _bars(axes: Axes, lines: Sequence[AgentLine], metric: str) -> None:
    places = np.arange(len(lines))
    alone, together = (np.array([getattr(line, which) for line in lines]) for which in ("alone", "together"))
    axes.barh(places - 0.19, alone, 0.36, color=GREY, label="alone")
    axes.barh(places + 0.19, together, 0.36, color=BLUE, label="together")
    gains = [line.gain or 0.0 for line in lines]
    for place, gain, end in zip(places, gains, np.maximum(alone, together), strict=True):
        axes.annotate(
            gain_text(metric, gain), (end, place), xytext=(5, 0), textcoords="offset points", va="center",
            fontsize=9, color=WORSE if gain < 0 else INK,
        )  # fmt: skip
    axes.set_yticks(places, [plain(line.name) for line in lines])
    axes.set_ylim(len(lines) - 0.5, -0.5)
    axes.margins(x=0.12)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
    if in_percent(metric):
        axes.xaxis.set_major_formatter(PercentFormatter(1, symbol=" %"))
    axes.legend(loc="lower right", ncols=2, **LEGEND | {"bbox_to_anchor": (1, 1), "handlelength": 1.2})


# --- What a protocol measured, per round.


def draw_measure(measure: Measure) -> Figure:
    """Mean per round, lowest to highest agent, and the chance level."""
    with canvas(3.4) as (figure, axes):
        mean_and_range(axes, measure.rounds, measure.values, agents=measure.agents)
        if measure.chance is not None:
            label = f"chance: 1 in {measure.agents}"
            axes.axhline(measure.chance, color=MUTED, linestyle="dashed", linewidth=1.3, label=label)
        shade_faults(axes, measure.faults, int(max(measure.rounds)))
        axes.set_xlabel("round")
        axes.set_title(plain(measure.title, longest=90), pad=26)
        axes.grid(axis="x", visible=False)
        if all(values.min() >= 0 and values.max() <= 1 for values in measure.values):  # they can be read as shares
            axes.yaxis.set_major_formatter(PercentFormatter(1, symbol=" %"))
        axes.legend(loc="lower left", ncols=3, **LEGEND)
        rounds_axis(axes, measure.rounds)
    return figure


# --- Axes that several charts share.

LOG_FROM = 30  # ratio of the largest to the smallest number of bytes
# Above the axes, where it hides no data.
LEGEND: dict[str, Any] = {
    "bbox_to_anchor": (-0.015, 1),
    "borderaxespad": 0.2,
    "handlelength": 1.8,
    "columnspacing": 1.4,
}


@contextmanager
def canvas(height: float) -> Iterator[tuple[Figure, Axes]]:
    """A figure with one pair of axes, to be drawn in the style of all."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9, height), layout="constrained")
        yield figure, figure.add_subplot()


def markers(points: int) -> dict[str, Any]:
    return {"marker": "o", "markersize": 4} if points <= MOST_MARKERS else {}


def mean_and_range(axes: Axes, x: np.ndarray, values: Sequence[np.ndarray], *, agents: int) -> None:
    """At each x the mean of some values as a line and, of several agents, the lowest to the highest as a band."""
    average, low, high = (np.array([part(each) for each in values]) for part in (np.mean, np.min, np.max))
    axes.plot(x, average, color=INK, linewidth=2.4, zorder=3, label="mean", **markers(len(x)))
    if agents > 1:
        label = "lowest to highest agent"
        if len(x) == 1:  # an area of one point would have no width
            axes.vlines(x, low, high, color=BLUE, alpha=0.4, linewidth=5, label=label, zorder=2)
        else:
            axes.fill_between(x, low, high, color=BLUE, alpha=0.15, linewidth=0, label=label, zorder=1)


def rounds_axis(axes: Axes, rounds: np.ndarray) -> None:
    """Whole rounds below, with a little room at both ends."""
    if len(rounds):
        axes.set_xlim(rounds.min() - 0.5, rounds.max() + max(0.5, 0.03 * np.ptp(rounds)))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def costs_axis(axes: Axes, against: str, spent: np.ndarray) -> None:
    """Bytes, whole numbers or seconds below, from zero on; bytes on a logarithmic axis where they span much."""
    lowest, highest, whole = spent.min(), spent.max(), against in ("exchanges", "steps")
    if against == "bytes" and lowest > 0 and highest / lowest >= LOG_FROM:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if highest / lowest < 300 else (1,)))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel(f"{axes.get_xlabel()} (logarithmic)")
    else:
        axes.set_xlim(left=0)
        axes.xaxis.set_major_locator(MaxNLocator(6 if whole else 10, integer=whole, steps=[1, 2, 5, 10]))
    if against != "time":
        axes.xaxis.set_major_formatter(lambda count, _: f"{count:,.0f}" if whole else tick_text(count))


# --- Faults that were injected for some rounds, marked in the charts over rounds.

_MOST = 4  # more would only hide the lines


def shade_faults(axes: Axes, faults: Sequence[Fault], rounds: int) -> None:
    """A grey band over the rounds of each fault, with its name; none for a fault that lasts for the whole run."""
    shown = [(fault, min(fault.last or rounds, rounds)) for fault in faults if fault.first <= rounds]
    passing = [(fault, last) for fault, last in shown if fault.first > 1 or last < rounds]
    for place, (fault, last) in enumerate(passing[:_MOST]):
        axes.axvspan(fault.first - 0.5, last + 0.5, color=MUTED, alpha=0.12, linewidth=0, zorder=0)
        axes.annotate(
            fault.words, (fault.first - 0.5, 0), xycoords=axes.get_xaxis_transform(), xytext=(4, 4 + 12 * place),
            textcoords="offset points", fontsize=8, color=MUTED,
        )  # fmt: skip
