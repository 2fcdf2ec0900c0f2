"""Figures, axes and labels that several plots share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from codistill.plots.style import BLUE, INK
from codistill.text import bytes_text

LONGEST_NAME = 20
MOST_MARKERS = 30  # beyond, markers would run into one another
LOG_FROM = 30  # ratio of the largest to the smallest number of bytes

# Above the axes, where it hides no data.
LEGEND: dict[str, Any] = {
    "bbox_to_anchor": (-0.015, 1),
    "borderaxespad": 0.2,
    "handlelength": 1.8,
    "columnspacing": 1.4,
}


def canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """A figure with one pair of axes."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def plain(name: str, longest: int = LONGEST_NAME) -> str:
    """A name that can be drawn: short, printable, and not read as a formula."""
    short = name if len(name) <= longest else name[: longest - 1] + "…"
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in short).replace(
        "$", r"\$"
    )


def markers(points: int) -> dict[str, Any]:
    """Markers of a line with few points."""
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


def bytes_axis(axes: Axes, traffic: np.ndarray) -> None:
    """Numbers of bytes below, on a logarithmic axis where they span much."""
    lowest, highest = traffic.min(), traffic.max()
    if lowest > 0 and highest / lowest >= LOG_FROM:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if highest / lowest < 300 else (1,)))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel(f"{axes.get_xlabel()} (logarithmic)")
    else:
        axes.set_xlim(left=0)
        axes.xaxis.set_major_locator(MaxNLocator(steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(lambda count, _: tick_text(count))


def counts_axis(axes: Axes) -> None:
    """Whole numbers below, from zero on."""
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(lambda count, _: f"{count:,.0f}")


def time_axis(axes: Axes) -> None:
    """Seconds below, from the start of the run on."""
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(steps=[1, 2, 5, 10]))


def tick_text(count: float) -> str:
    """2,000,000 -> '2 MB'."""
    return bytes_text(count).replace(".0 ", " ")
