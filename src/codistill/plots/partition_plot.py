"""Which agent holds how many samples of which class, as circles."""

from __future__ import annotations

import math
from collections.abc import Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure

from codistill.errors import DataError
from codistill.plots.axes import plain
from codistill.plots.style import BLUE, STYLE

POINTS_PER_INCH = 72
FONT_SIZE = 8
LETTER = 0.08  # inches: how wide a letter of this font is at most
MOST_CIRCLES = 1_500  # beyond, an image is smaller than as many shapes


def draw_partition(counts: np.ndarray, agent_names: Sequence[str], class_names: Sequence[str]) -> Figure:
    """Draw agents (columns) by classes (rows); the area of each circle is the number of samples."""
    counts = _checked(counts, agent_names, class_names)
    agents, classes = counts.shape
    agent_labels, class_labels = ([plain(name) for name in names] for names in (agent_names, class_names))
    cell = min(0.5, 11 / agents, 11 / classes)
    with matplotlib.rc_context(STYLE):
        figure, axes = _canvas(cell * agents, cell * classes, left=_widest(class_labels), bottom=_widest(agent_labels))
        # A marker's size is the square of its diameter in points, so it is proportional to its area.
        size_of_one = (0.92 * cell * POINTS_PER_INCH) ** 2 / max(1, counts.max())
        column, row = np.nonzero(counts)
        axes.scatter(
            column, row, s=size_of_one * counts[column, row], color=BLUE, linewidths=0,
            rasterized=len(row) > MOST_CIRCLES,
        )  # fmt: skip
        axes.set(xlim=(-0.5, agents - 0.5), ylim=(classes - 0.5, -0.5), xlabel="agent", ylabel="class")
        _label(axes.xaxis, agent_labels, cell)
        _label(axes.yaxis, class_labels, cell)
        axes.tick_params(length=0, labelsize=FONT_SIZE)
        if _widest(agent_labels) > cell:
            axes.tick_params(axis="x", labelrotation=90)
        axes.spines[:].set_visible(True)
        _area_legend(axes, _examples(int(counts.max())), size_of_one, cell)
    return figure


def _checked(counts: np.ndarray, agent_names: Sequence[str], class_names: Sequence[str]) -> np.ndarray:
    counts = np.asarray(counts)
    if counts.shape != (len(agent_names), len(class_names)) or counts.size == 0:
        raise DataError(
            "The counts of a partition must be a matrix with a row per agent and a column per class.",
            f"shape {counts.shape} for {len(agent_names)} agents and {len(class_names)} classes",
            "Name every agent and every class.",
        )
    return counts


def _canvas(width: float, height: float, left: float, bottom: float) -> tuple[Figure, Axes]:
    """Axes of exactly this size in inches, with room for labels and, on the right, the legend."""
    left, right, bottom, top = left + 0.5, 1.4, bottom + 0.5, 0.3
    page_width, page_height = left + width + right, max(2.4, bottom + height + top)
    figure = Figure(figsize=(page_width, page_height))
    lower = 1 - (top + height) / page_height
    return figure, figure.add_axes((left / page_width, lower, width / page_width, height / page_height))


def _label(axis: Axis, names: Sequence[str], cell: float) -> None:
    """Name as many rows or columns as there is room for."""
    step = math.ceil(0.15 / cell)
    axis.set_ticks(range(0, len(names), step), list(names[::step]))


def _examples(largest: int) -> list[int]:
    """Three counts of one digit and zeros, up to the largest count, each about a quarter of the next."""
    digits = [10 ** (len(str(max(1, largest // part))) - 1) for part in (16, 4, 1)]
    sizes = [max(1, largest // part // digit * digit) for part, digit in zip((16, 4, 1), digits, strict=True)]
    return sorted(set(sizes))


def _area_legend(axes: Axes, examples: Sequence[int], size_of_one: float, cell: float) -> None:
    in_letters = cell * POINTS_PER_INCH / FONT_SIZE
    axes.legend(
        handles=[
            axes.scatter([], [], s=size_of_one * count, color=BLUE, linewidths=0, label=f"{count:,}")
            for count in examples
        ],
        title="samples",
        loc="upper left",
        bbox_to_anchor=(1, 1),
        frameon=False,
        fontsize=FONT_SIZE,
        title_fontsize=FONT_SIZE,
        labelspacing=max(0.5, in_letters - 0.7),
        handletextpad=max(0.8, in_letters / 2 - 0.5),
        borderpad=0.8,
    )


def _widest(names: Sequence[str]) -> float:
    return LETTER * max(map(len, names))
