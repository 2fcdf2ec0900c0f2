"""The figures of a report, and the picture of a result."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, PercentFormatter

from codistill.faults import Fault
from codistill.plots.fault_bands import shade
from codistill.plots.partitions import draw_partition
from codistill.plots.style import BLUE, COLOURS, DASHES, GREY, INK, MUTED, STYLE, WORSE
from codistill.results.summary import AgentLine, Summary, honest_lines
from codistill.text import bytes_text, percent_text

MOST_SWITCHES = 20  # agents that get a switch of their own
MOST_BARS = 30
MOST_LABELS = 12  # lines that are labelled at their ends
MOST_POINTS = 40_000  # of all agents' lines together, so that the page stays small
MOST_COLUMNS = 60  # agents in the picture of the partition
MOST_CIRCLES = 1_500  # beyond, an image is smaller than as many shapes
MOST_MARKERS = 30
LONGEST_NAME = 20
LOG_FROM = 30  # ratio of the largest to the smallest number of bytes

# Above the axes, where it hides no data.
LEGEND: dict[str, Any] = {
    "bbox_to_anchor": (-0.015, 1),
    "borderaxespad": 0.2,
    "handlelength": 1.8,
    "columnspacing": 1.4,
}


@dataclass(frozen=True)
class Run:
    """A run's figures, arranged for drawing."""

    title: str
    metric: str
    own: bool  # scores are on each agent's own distribution, for want of a common test set
    lines: list[AgentLine]
    rounds: np.ndarray  # those that were evaluated
    values: list[np.ndarray]  # of each such round: the scores of the honest agents that were evaluated
    traffic: np.ndarray  # bytes sent and received by all agents up to each such round
    curves: dict[str, tuple[list[int], list[float]]]  # of each agent: rounds and scores
    faults: tuple[Fault, ...] = ()  # those that were injected
    test_part: str = "test"

    @property
    def names(self) -> list[str]:
        """The agents."""
        return [line.name for line in self.lines]

    @property
    def compared(self) -> list[AgentLine]:
        """Lines whose alone and together are the scores that are drawn."""
        if not self.own:
            return self.lines
        return [replace(line, alone=line.own_alone, together=line.own_together) for line in self.lines]

    @property
    def gainers(self) -> list[AgentLine]:
        """Of these lines, those with a gain that can be drawn."""
        return [line for line in self.compared if line.gain is not None and math.isfinite(line.gain)]

    @property
    def mean(self) -> np.ndarray:
        """Mean score of each evaluated round."""
        return np.array([values.mean() for values in self.values])

    @property
    def alone(self) -> float | None:
        """Mean score of the agents by themselves."""
        return mean([line.alone for line in honest_lines(self.compared)])

    @property
    def together(self) -> float | None:
        """Mean score of the agents after the run."""
        return mean([line.together for line in honest_lines(self.compared)])

    @property
    def gain(self) -> float | None:
        """Mean gain of the agents of which both scores are known."""
        return mean([line.gain for line in honest_lines(self.compared)])

    @property
    def word(self) -> str:
        """The metric as it is written."""
        return "RMSE" if self.metric == "rmse" else self.metric

    @property
    def word_of_axis(self) -> str:
        """The metric, what it is measured on and which way is better."""
        return (
            self.word
            + (" on each agent's own distribution" if self.own else f" on the common {self.test_part} set")
            + (" (lower is better)" if self.metric == "rmse" else "")
        )

    def score_text(self, value: float | None) -> str:
        """0.956 -> '95.6 %'; an error as it is."""
        if value is None:
            return "-"
        return percent_text(value) if self.metric == "accuracy" else f"{value:.4g}"

    def gain_text(self, value: float | None) -> str:
        """0.0123 -> '+1.2': percentage points; an error's change as it is."""
        if value is None:
            return "-"
        return f"{100 * value:+.1f}" if self.metric == "accuracy" else f"{value:+.3g}"

    def is_worse(self, gain: float) -> bool:
        """Whether a gain is a loss."""
        return gain > 0 if self.metric == "rmse" else gain < 0


def arrange(summary: Summary) -> Run:
    """A run's figures, read from its rows."""
    metric = summary.metric
    own = not any(metric in row for row in summary.rows)
    key = f"own_{metric}" if own else metric
    by_round: dict[int, list[float]] = {}
    traffic: dict[int, int] = {}
    curves: dict[str, tuple[list[int], list[float]]] = {name: ([], []) for name in summary.agents}
    for row in summary.rows:
        done = int(row["round"])
        traffic[done] = traffic.get(done, 0) + row["sent"] + row["received"]
        if key in row:
            if not row.get("lies"):
                by_round.setdefault(done, []).append(row[key])
            curves[row["agent"]][0].append(done)
            curves[row["agent"]][1].append(row[key])
    done_in_order = sorted(traffic)
    up_to = dict(zip(done_in_order, np.cumsum([traffic[done] for done in done_in_order]), strict=True))
    rounds = sorted(by_round)
    return Run(
        title=summary.title,
        metric=metric,
        own=own and bool(rounds),
        lines=summary.lines(),
        rounds=np.array(rounds),
        values=[np.array(by_round[done]) for done in rounds],
        traffic=np.array([up_to[done] for done in rounds], dtype=float),
        curves=curves,
        faults=summary.faults,
        test_part=summary.test_part,
    )


def mean(values: Sequence[float | None]) -> float | None:
    """The mean of those that are known."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def series_style(index: int) -> tuple[str, str]:
    """Colour and dash of one line among many; no two of the first 20 are alike."""
    return COLOURS[index % len(COLOURS)], DASHES[index // len(COLOURS) % len(DASHES)]


def draw_rounds(run: Run) -> Figure:
    """Score per round: mean, lowest to highest, and each agent as a line with the gid 'agent-<index>'."""
    with matplotlib.rc_context(STYLE):
        figure, axes = canvas(9, 4)
        _spread(axes, run, run.rounds)
        step = thinning(run)
        for index, name in enumerate(run.names):
            done, values = (np.array(part)[::-step][::-1] for part in run.curves[name])
            line = _agent_line(axes, done, values, index, len(run.names))
            line.set_gid(f"agent-{index}")
        shade(axes, run.faults, max(run.rounds, default=0))
        _finish(axes, run, "round")
        rounds_axis(axes, run.rounds)
    return figure


def thinning(run: Run) -> int:
    """Of how many evaluations one is drawn in the lines of single agents."""
    return math.ceil(sum(map(len, run.values)) / MOST_POINTS) or 1


def draw_traffic(run: Run) -> Figure:
    """Score against the bytes that all agents together have sent and received."""
    with matplotlib.rc_context(STYLE):
        figure, axes = canvas(9, 4)
        _spread(axes, run, run.traffic)
        average, up = run.mean, 6 if run.metric == "rmse" else -12  # beside the line, which falls or rises
        for index in sorted({0, len(run.rounds) - 1}):
            axes.annotate(
                f"round {run.rounds[index]}", (run.traffic[index], average[index]), xytext=(7, up),
                textcoords="offset points", fontsize=9, color=INK,
            )  # fmt: skip
        axes.margins(y=0.12)
        _finish(axes, run, "bytes sent and received, all agents together")
        _bytes_axis(axes, run.traffic)
    return figure


def draw_bars(run: Run) -> Figure:
    """Each agent alone and together; of many agents those that gained or lost most."""
    shown = _shown(run, MOST_BARS)
    with matplotlib.rc_context(STYLE):
        figure, axes = canvas(9, 1.1 + 0.36 * len(shown))
        _bars(axes, run, shown)
    return figure


def draw_shares(summary: Summary) -> Figure:
    """Which of the first agents holds how many samples of which class."""
    assert summary.counts is not None
    counts = summary.counts[:MOST_COLUMNS]
    names = [plain(name) for name in summary.agents][:MOST_COLUMNS]
    with matplotlib.rc_context(STYLE):
        figure = draw_partition(counts, names, [plain(name) for name in summary.class_names])
    figure.axes[0].collections[0].set_rasterized(bool(np.count_nonzero(counts) > MOST_CIRCLES))
    return figure


def draw_runs(runs: Sequence[tuple[int, Run]], against_bytes: bool = False) -> Figure:
    """Mean score of several numbered runs, per round or against bytes; lines have the gid 'run-<number>'."""
    with matplotlib.rc_context(STYLE):
        figure, axes = canvas(9, 4)
        for index, run in runs:
            if not len(run.rounds):
                continue
            colour, dash = series_style(index)
            gid = f"run-{index}"
            if against_bytes and run.traffic[-1] == 0:
                axes.axhline(run.mean[-1], color=colour, linestyle=dash, linewidth=1.2, alpha=0.8, gid=gid)
                continue
            x = run.traffic if against_bytes else run.rounds
            axes.plot(x, run.mean, color=colour, linestyle=dash, linewidth=2, gid=gid, **_marker(len(x)))
        _finish(axes, runs[0][1], "bytes sent and received, all agents together" if against_bytes else "round")
        if against_bytes:
            _bytes_axis(axes, np.concatenate([run.traffic for _, run in runs if run.traffic.any()]))
        else:
            rounds_axis(axes, np.concatenate([run.rounds for _, run in runs]))
    return figure


def draw_result(summary: Summary) -> Figure:
    """One wide picture: score per round on the left, each agent alone and together on the right."""
    run = arrange(summary)
    shown = _shown(run, MOST_LABELS)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(12 if shown else 7.5, 4.6), layout="constrained", facecolor="white")
        grid = figure.add_gridspec(1, 2 if shown else 1, width_ratios=[1.35, 1] if shown else [1])
        axes = figure.add_subplot(grid[0])
        _spread(axes, run, run.rounds)
        for index, name in enumerate(run.names):
            done, values = map(np.array, run.curves[name])
            _agent_line(axes, done, values, index, len(run.names))
        _finish(axes, run, "round")
        rounds_axis(axes, run.rounds)
        if len(run.names) <= MOST_LABELS:
            _label_ends(axes, run)
        if shown:
            _bars(figure.add_subplot(grid[1]), run, shown)
    return figure


def bars_note(run: Run) -> str:
    """Which agents the bars leave out, in words; empty if none."""
    known, agents = len(run.gainers), len(run.lines)
    notes = []
    if known > MOST_BARS:
        notes.append(f"Of {known:,} agents, the {MOST_BARS} with the largest gain or loss are shown.")
    if known < agents:
        notes.append(f"{agents - known:,} of {agents:,} agents lack a score alone or together.")
    return " ".join(notes)


def plain(name: str, longest: int = LONGEST_NAME) -> str:
    """A name that can be drawn: short, printable, and with no formula in it."""
    short = name if len(name) <= longest else name[: longest - 1] + "…"
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in short).replace(
        "$", r"\$"
    )


def canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """A figure with one pair of axes."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def _spread(axes: Axes, run: Run, x: np.ndarray) -> None:
    """The mean, the range of all agents around it, and the mean of the agents alone."""
    if len(x) == 0:
        return
    mean_and_range(axes, x, run.values, among=len(run.names))
    if run.alone is not None and np.isfinite(run.alone):
        axes.axhline(run.alone, color=MUTED, linestyle="dashed", linewidth=1.3, label="mean alone, at the end")


def mean_and_range(axes: Axes, x: np.ndarray, values: Sequence[np.ndarray], *, among: int) -> None:
    """At each x the mean of some values as a line and, of several agents, the lowest to the highest as a band."""
    average, low, high = (np.array([part(each) for each in values]) for part in (np.mean, np.min, np.max))
    axes.plot(x, average, color=INK, linewidth=2.4, zorder=3, label="mean", **_marker(len(x)))
    if among > 1:
        label = "lowest to highest agent"
        if len(x) == 1:  # an area of one point would have no width
            axes.vlines(x, low, high, color=BLUE, alpha=0.4, linewidth=5, label=label, zorder=2)
        else:
            axes.fill_between(x, low, high, color=BLUE, alpha=0.15, linewidth=0, label=label, zorder=1)


def _agent_line(axes: Axes, x: np.ndarray, values: np.ndarray, index: int, among: int) -> Any:
    colour, dash = series_style(index) if among <= MOST_SWITCHES else (MUTED, "solid")
    width, alpha = (1.4, 1.0) if among <= MOST_SWITCHES else (0.8, 0.45)
    (line,) = axes.plot(x, values, color=colour, linestyle=dash, linewidth=width, alpha=alpha, zorder=2)
    if len(x) == 1:
        line.set(marker="o", markersize=4)
    return line


def _marker(points: int) -> dict[str, Any]:
    return {"marker": "o", "markersize": 4} if points <= MOST_MARKERS else {}


def _finish(axes: Axes, run: Run, below: str) -> None:
    axes.set_xlabel(below)
    # Above and horizontal: upright text is read with a tilted head, and browsers place it less exactly.
    described = bool(axes.get_legend_handles_labels()[0])
    axes.set_title(run.word_of_axis, pad=26 if described else 12)
    axes.grid(axis="x", visible=False)
    if run.metric == "accuracy":
        axes.yaxis.set_major_formatter(PercentFormatter(1, symbol=" %"))
    if described:
        axes.legend(loc="lower left", ncols=3, **LEGEND)


def rounds_axis(axes: Axes, rounds: np.ndarray) -> None:
    """Whole rounds below, with a little room at both ends."""
    if len(rounds):
        axes.set_xlim(rounds.min() - 0.5, rounds.max() + max(0.5, 0.03 * np.ptp(rounds)))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def _bytes_axis(axes: Axes, traffic: np.ndarray) -> None:
    lowest, highest = traffic.min(), traffic.max()
    if lowest > 0 and highest / lowest >= LOG_FROM:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if highest / lowest < 300 else (1,)))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel(f"{axes.get_xlabel()} (logarithmic)")
    else:
        axes.set_xlim(left=0)
        axes.xaxis.set_major_locator(MaxNLocator(steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(lambda count, _: bytes_text(count).replace(".0 ", " "))


def _shown(run: Run, most: int) -> list[AgentLine]:
    """The agents that get bars: all in their order or, of many, those that gained or lost most, best first."""
    if len(run.gainers) <= most:
        return run.gainers
    largest = sorted(run.gainers, key=lambda line: -abs(line.gain or 0))[:most]
    return sorted(largest, key=lambda line: line.gain or 0, reverse=run.metric == "accuracy")


def _bars(axes: Axes, run: Run, lines: Sequence[AgentLine]) -> None:
    places = np.arange(len(lines))
    alone, together = (np.array([getattr(line, which) for line in lines]) for which in ("alone", "together"))
    axes.barh(places - 0.19, alone, 0.36, color=GREY, label="alone")
    axes.barh(places + 0.19, together, 0.36, color=BLUE, label="together")
    for place, gain, end in zip(places, together - alone, np.maximum(alone, together), strict=True):
        axes.annotate(
            run.gain_text(gain), (end, place), xytext=(5, 0), textcoords="offset points", va="center",
            fontsize=9, color=WORSE if run.is_worse(gain) else INK,
        )  # fmt: skip
    axes.set_yticks(places, [plain(line.name) for line in lines])
    axes.set_ylim(len(lines) - 0.5, -0.5)
    axes.margins(x=0.12)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
    if run.metric == "accuracy":
        axes.xaxis.set_major_formatter(PercentFormatter(1, symbol=" %"))
    unit = "gain in points" if run.metric == "accuracy" else "change"
    axes.set_title(f"{run.word_of_axis}\nand {unit}", pad=12, linespacing=1.5)
    axes.legend(loc="lower right", ncols=2, **LEGEND | {"bbox_to_anchor": (1, 1), "handlelength": 1.2})
    if len(lines) < len(run.gainers):
        axes.set_xlabel(f"the {len(lines)} of {len(run.lines):,} agents that gained or lost most")


def _label_ends(axes: Axes, run: Run) -> None:
    """Name each line at its end, moved apart where names would overlap."""
    ends = [(values[-1], done[-1], name) for name, (done, values) in run.curves.items() if values]
    ends = sorted(end for end in ends if np.isfinite(end[0]))
    if not ends:
        return
    low, high = axes.get_ylim()
    for _ in range(3):  # the axis grows to make room for the names, and with it the distance they need
        apart = 0.048 * (high - low)
        heights = _moved_apart([end[0] for end in ends], apart)
        low, high = min(low, heights[0] - apart / 2), max(high, heights[-1] + apart / 2)
    axes.set_ylim(low, high)
    arrow: dict[str, Any] = {"arrowstyle": "-", "linewidth": 1, "relpos": (0, 0.5), "shrinkA": 2, "shrinkB": 3}
    index = {name: place for place, name in enumerate(run.names)}
    for (value, done, name), height in zip(ends, heights, strict=True):
        axes.annotate(
            plain(name), (done, value), xytext=(1.06, height), textcoords=axes.get_yaxis_transform(), va="center",
            fontsize=9, annotation_clip=False, arrowprops=arrow | {"color": series_style(index[name])[0]},
        )  # fmt: skip


def _moved_apart(values: Sequence[float], apart: float) -> list[float]:
    """Sorted values, each at least `apart` above the one before, and as near to their places as groups allow."""
    groups: list[list[float]] = []
    for value in values:
        groups.append([value])
        while len(groups) > 1 and _top(groups[-2], apart) + apart > _bottom(groups[-1], apart):
            last = groups.pop()
            groups[-1] += last
    return [_bottom(group, apart) + place * apart for group in groups for place in range(len(group))]


def _bottom(group: Sequence[float], apart: float) -> float:
    return sum(group) / len(group) - apart * (len(group) - 1) / 2


def _top(group: Sequence[float], apart: float) -> float:
    return sum(group) / len(group) + apart * (len(group) - 1) / 2
