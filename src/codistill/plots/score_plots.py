"""Scores per round, against bytes and against time: of one run, and of several runs together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from codistill.plots.axes import (
    LEGEND,
    bytes_axis,
    canvas,
    counts_axis,
    markers,
    mean_and_range,
    rounds_axis,
    time_axis,
)
from codistill.plots.fault_bands import shade_faults
from codistill.plots.style import INK, MUTED, STYLE, series_style
from codistill.results.metric_text import in_percent
from codistill.results.run_scores import RunScores

MOST_SWITCHES = 20  # agents that have a colour, and a switch in the report, of their own
MOST_POINTS = 40_000  # of all agents' lines together, so that the page stays small
_BYTES = "bytes sent and received, all agents together"
_TIME = "seconds since the start, by the clock of the run"
_COUNTS = {"exchanges": "exchanges, per agent", "steps": "gradient steps, per agent"}


def draw_rounds(run: RunScores) -> Figure:
    """Score per round: mean, lowest to highest, and each agent as a line with the gid 'agent-<index>'."""
    with matplotlib.rc_context(STYLE):
        figure, axes = canvas(9, 4)
        _mean_range_alone(axes, run, run.rounds)
        step = thinning(run)
        for index, name in run.drawn.items():
            done, values = (np.array(part)[::-step][::-1] for part in run.curves[name])
            line = _agent_line(axes, done, values, index, len(run.names))
            line.set_gid(f"agent-{index}")
        shade_faults(axes, run.faults, max(run.rounds, default=0))
        _finish(axes, run, "round")
        rounds_axis(axes, run.rounds)
    return figure


def thinning(run: RunScores) -> int:
    """Of how many evaluations one is drawn in the lines of single agents."""
    return math.ceil(sum(map(len, run.values)) / MOST_POINTS) or 1


def draw_traffic(run: RunScores) -> Figure:
    """Score against the bytes that all agents together have sent and received."""
    with matplotlib.rc_context(STYLE):
        figure, axes = canvas(9, 4)
        _mean_range_alone(axes, run, run.traffic)
        average, up = run.mean, -12 if run.greater_is_better else 6  # beside the line, which falls or rises
        for index in sorted({0, len(run.rounds) - 1}):
            axes.annotate(
                f"round {run.rounds[index]}", (run.traffic[index], average[index]), xytext=(7, up),
                textcoords="offset points", fontsize=9, color=INK,
            )  # fmt: skip
        axes.margins(y=0.12)
        _finish(axes, run, _BYTES)
        bytes_axis(axes, run.traffic)
    return figure


def counted(run: RunScores) -> dict[str, np.ndarray]:
    """Exchanges and gradient steps up to each evaluated round, those that there were."""
    found = {"exchanges": run.exchanges, "steps": run.steps}
    return {name: counts for name, counts in found.items() if counts is not None and counts.any()}


def draw_counts(run: RunScores) -> Figure:
    """Score against exchanges and against gradient steps, side by side."""
    counts = counted(run)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9, 3.6), layout="constrained")
        grid = figure.subplots(1, len(counts), squeeze=False, sharey=True)[0]
        for axes, (name, x) in zip(grid, counts.items(), strict=True):
            mean_and_range(axes, x, run.values, agents=len(run.names))
            _finish(axes, run, _COUNTS[name])
            counts_axis(axes)
        for axes in grid[1:]:
            axes.set_title("")
            axes.get_legend().remove()
    return figure


def draw_times(run: RunScores) -> Figure:
    """Score against the time since the start, of a run with a clock."""
    assert run.times is not None
    with matplotlib.rc_context(STYLE):
        figure, axes = canvas(9, 4)
        _mean_range_alone(axes, run, run.times)
        _finish(axes, run, _TIME)
        time_axis(axes)
    return figure


def draw_runs(runs: Sequence[tuple[int, RunScores]], against: str = "round") -> Figure:
    """Mean score of several numbered runs against "round", a cost or "time"; lines have the gid 'run-<number>'."""
    with matplotlib.rc_context(STYLE):
        figure, axes = canvas(9, 4)
        for index, run in runs:
            colour, dash = series_style(index)
            gid = f"run-{index}"
            x = values_along(run, against)
            assert x is not None
            if not x.any():  # it has not spent anything of it
                axes.axhline(run.mean[-1], color=colour, linestyle=dash, linewidth=1.2, alpha=0.8, gid=gid)
                continue
            axes.plot(x, run.mean, color=colour, linestyle=dash, linewidth=2, gid=gid, **markers(len(x)))
        _finish(axes, runs[0][1], {"round": "round", "bytes": _BYTES, "time": _TIME, **_COUNTS}[against])
        if against == "bytes":
            bytes_axis(axes, np.concatenate([run.traffic for _, run in runs if run.traffic.any()]))
        elif against == "time":
            time_axis(axes)
        elif against in _COUNTS:
            counts_axis(axes)
        else:
            rounds_axis(axes, np.concatenate([run.rounds for _, run in runs]))
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


def _agent_line(axes: Axes, x: np.ndarray, values: np.ndarray, index: int, agents: int) -> Any:
    colour, dash = series_style(index) if agents <= MOST_SWITCHES else (MUTED, "solid")
    width, alpha = (1.4, 1.0) if agents <= MOST_SWITCHES else (0.8, 0.45)
    (line,) = axes.plot(x, values, color=colour, linestyle=dash, linewidth=width, alpha=alpha, zorder=2)
    if len(x) == 1:
        line.set(marker="o", markersize=4)
    return line


def _finish(axes: Axes, run: RunScores, below: str) -> None:
    axes.set_xlabel(below)
    # Above and horizontal: upright text is read with a tilted head, and browsers place it less exactly.
    described = bool(axes.get_legend_handles_labels()[0])
    axes.set_title(run.axis_label(), pad=26 if described else 12)
    axes.grid(axis="x", visible=False)
    if in_percent(run.metric):
        axes.yaxis.set_major_formatter(PercentFormatter(1, symbol=" %"))
    if described:
        axes.legend(loc="lower left", ncols=3, **LEGEND)
