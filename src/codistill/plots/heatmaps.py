"""The average output against the true class as heat maps, after Figure 2 of the FedAL paper (TMC 2024)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb, to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator, PercentFormatter

from codistill.plots.axes import plain
from codistill.plots.style import GREY, GRID, HEAT, INK, STYLE
from codistill.results.outputs import Outputs
from codistill.text import percent_text

Map = tuple[str, Outputs, Sequence[str]]  # title, outputs, names of the classes

MOST_NUMBERS = 12  # classes whose cells hold their number
MOST_NAMES = 30  # classes that are named beside the map
COLUMNS = 3  # of small maps side by side
_FAINT = 0.005  # below, a cell is empty: its number would be 0


def draw_outputs(outputs: Outputs, names: Sequence[str]) -> Figure:
    """One large map and, beside it, the disagreement by true class."""
    few = outputs.classes <= MOST_NUMBERS
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9, 1.3 + 0.36 * outputs.classes if few else 5.6), layout="constrained")
        grid = figure.add_gridspec(1, 2, width_ratios=[2.4, 1])
        axes = figure.add_subplot(grid[0])
        _heat(axes, outputs.mean, names, width=5.6)
        axes.set_title("average output, in percent", pad=12)
        axes.set(xlabel="output class", ylabel="true class")
        if outputs.disagreement is not None:
            _bars(figure.add_subplot(grid[1], sharey=axes), outputs.disagreement, numbers=few)
    return figure


def draw_maps(maps: Sequence[Map]) -> Figure:
    """Small maps, a few side by side, each with its title and the mean disagreement."""
    wrapped = [maps[start : start + COLUMNS] for start in range(0, len(maps), COLUMNS)]
    return draw_grid([[*row, *[None] * (COLUMNS - len(row))] for row in wrapped])


def draw_grid(grid: Sequence[Sequence[Map | None]]) -> Figure:
    """Small maps in rows of equal length; None leaves a place empty."""
    with matplotlib.rc_context(STYLE | {"font.size": 8, "axes.titlesize": 9}):
        width, height = 3.0, 3.1
        figure = Figure(figsize=(width * len(grid[0]), height * len(grid)), layout="constrained")
        places = figure.subplots(len(grid), len(grid[0]), squeeze=False)
        for place, each in zip(places.flat, itertools.chain.from_iterable(grid), strict=True):
            if each is None:
                place.set_axis_off()
                continue
            title, outputs, names = each
            _heat(place, outputs.mean, names, width=2.3, font=6.5)
            apart = outputs.mean_disagreement
            below = "" if apart is None else f"\ndisagreement {percent_text(apart)}"
            place.set_title(plain(title, longest=36) + below, pad=6)
            place.set_xlabel("output class")
            place.set_ylabel("true class")
    return figure


def _heat(axes: Axes, matrix: np.ndarray, names: Sequence[str], *, width: float, font: float = 9) -> None:
    """Cells as deep in colour as their value; `width` of the map in inches, to place the names."""
    classes = len(matrix)
    values = np.nan_to_num(matrix).clip(0, 1)  # a class without test samples stays empty
    axes.grid(visible=False)
    axes.set_xlim(-0.5, classes - 0.5)
    axes.set_ylim(classes - 0.5, -0.5)
    axes.spines[:].set_visible(True)
    if classes <= MOST_NUMBERS:
        for edge in np.arange(classes - 1) + 0.5:
            axes.axhline(edge, color=GRID, linewidth=0.8, zorder=0)
            axes.axvline(edge, color=GRID, linewidth=0.8, zorder=0)
        for row, column in np.argwhere(values >= _FAINT):
            value = float(values[row, column])
            corner = (column - 0.5, row - 0.5)
            axes.add_patch(Rectangle(corner, 1, 1, facecolor=to_rgba(HEAT, value), linewidth=0, zorder=1))
            axes.text(column, row, f"{100 * value:.0f}", ha="center", va="center", fontsize=font, color=INK)
    else:  # as an image: smaller than so many shapes; transparent, so that it fits light and dark pages
        colours = np.broadcast_to((*to_rgb(HEAT), 1.0), (classes, classes, 4)).copy()
        colours[..., 3] = values
        axes.imshow(colours, interpolation="nearest", aspect="auto", zorder=1)
    axes.tick_params(length=0)
    _name_classes(axes, classes, names, width)


def _name_classes(axes: Axes, classes: int, names: Sequence[str], width: float) -> None:
    if classes > MOST_NAMES:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        return
    shown = [plain(name) for name in names] if len(names) == classes else [str(index) for index in range(classes)]
    crowded = max(map(len, shown)) * 0.1 > width / classes
    axes.set_xticks(range(classes), shown, rotation=90 if crowded else 0)
    axes.set_yticks(range(classes), shown)


def _bars(axes: Axes, shares: np.ndarray, *, numbers: bool) -> None:
    places, ends = np.arange(len(shares)), np.nan_to_num(shares)
    axes.barh(places, ends, 0.7 if numbers else 1.0, color=GREY)
    if numbers:
        for place, end in zip(places, shares, strict=True):
            text = percent_text(float(end)) if np.isfinite(end) else ""
            axes.annotate(
                text, (np.nan_to_num(end), place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=9
            )
    axes.set_xlim(0, max(0.1, 1.3 * float(ends.max())))
    axes.set_xticks(
        [tick for tick in MaxNLocator(4, steps=[1, 2, 5, 10]).tick_values(*axes.get_xlim()) if 0 <= tick <= 1]
    )
    axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0, symbol=" %"))
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0, labelleft=False)
    axes.set_title("pairs of agents that disagree", pad=12)
