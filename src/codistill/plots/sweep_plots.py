"""The pictures of a sweep: panels of lines with one legend.

A panel is a title and, for each line by its label, a frame with the columns `round` and `mean`, and where they are
known `spread` (over seeds) and the costs so far: `rounds`, `exchanges`, `steps` and `bytes`.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import Locator, LogLocator, MaxNLocator, NullFormatter, PercentFormatter

from codistill.plots.axes import MOST_MARKERS, tick_text
from codistill.plots.style import BLUE, COLOURS, INK, MUTED, STYLE

Lines = Mapping[str, pd.DataFrame]  # label -> rows of one line

_LOG_FROM = 100  # ratio of the largest to the smallest value of a measure
_COSTS = {
    "rounds": "rounds",
    "exchanges": "exchanges so far, per agent",
    "steps": "gradient steps so far, per agent",
    "bytes": "bytes sent so far, all together",
}
_WIDEST = 38  # letters beside an axis


@dataclass(frozen=True)
class Layout:
    """What all panels of a picture share."""

    labels: Sequence[str]  # of all lines, in the order of their colours
    columns: int = 1  # panels side by side
    note: str = ""  # below all panels


def draw_scores(panels: Sequence[tuple[str, Lines]], layout: Layout, *, measured: str, percent: bool) -> Figure:
    """Score per round; lines are means over agents and seeds, bands the spread over seeds."""

    def panel(axes: Axes, title: str, lines: Lines) -> None:
        _draw_lines(axes, lines, layout.labels)
        axes.set_title(title)
        _rounds_below(axes)
        _score_axis(axes, measured, percent=percent)

    return _draw_panels([partial(panel, title=title, lines=lines) for title, lines in panels], layout)


def draw_costs(
    panels: Sequence[tuple[str, Lines]],
    layout: Layout,
    *,
    measured: str,
    percent: bool,
    target: tuple[float, str] | None = None,
) -> Figure:
    """Score against each cost: a row for each panel, a column for each cost.

    A line without some cost (nothing sent, no steps) is drawn dashed at its last score, a target dotted.
    """
    spent = {name: _positive(panels, name) for name in _COSTS}
    # Where nobody was evaluated there is no line, and one empty column.
    spent = {name: values for name, values in spent.items() if len(values) or name == "rounds"}

    def panel(axes: Axes, title: str, lines: Lines, cost: str) -> None:
        _draw_lines(axes, lines, layout.labels, x=cost)
        if target is not None:
            axes.axhline(target[0], color=MUTED, linestyle="dotted", linewidth=1.2, label=target[1])
        axes.set_title(title if cost == "rounds" else "")  # once in a row
        axes.set_xlabel(_COSTS[cost])
        _cost_axis(axes, spent[cost], is_bytes=cost == "bytes")
        _score_axis(axes, measured, percent=percent)

    drawn = [partial(panel, title=title, lines=lines, cost=cost) for title, lines in panels for cost in spent]
    return _draw_panels(drawn, replace(layout, columns=len(spent)), sharex="col")


def draw_measures(measures: Mapping[str, Sequence[tuple[str, Lines]]], layout: Layout) -> Figure:
    """What the protocols measured, per round: the panels of each measure by its title."""

    def panel(axes: Axes, title: str, lines: Lines, name: str, logarithmic: bool) -> None:
        _draw_lines(axes, lines, layout.labels)
        axes.set_title(title)
        axes.set_ylabel("\n".join(textwrap.wrap(name, _WIDEST)), fontsize=9)
        _rounds_below(axes)
        if logarithmic:
            axes.set_yscale("log")

    drawn = []
    for name, panels in measures.items():
        values = pd.concat([line["mean"] for _, lines in panels for line in lines.values()])
        low, high = values.min(), values.max()
        fixed = partial(panel, name=name, logarithmic=bool(low > 0 and high > _LOG_FROM * low))
        drawn += [partial(fixed, title=title, lines=lines) for title, lines in panels]
    return _draw_panels(drawn, layout, sharey="row")


def _draw_panels(
    drawn: Sequence[Callable[[Axes], None]],
    layout: Layout,
    *,
    sharex: Literal["all", "col"] = "all",
    sharey: Literal["all", "row"] = "all",
) -> Figure:
    rows = -(-len(drawn) // layout.columns)
    with matplotlib.rc_context(STYLE):
        # The legend stands at the right: panels keep their width however long its words are.
        legend = 0.7 + 0.085 * max(map(len, layout.labels))
        width = 4.6 if layout.columns == 1 else 3.4
        figure = Figure(figsize=(width * layout.columns + legend, 2.9 * rows + 0.5), layout="constrained")
        grid = figure.subplots(rows, layout.columns, squeeze=False, sharex=sharex, sharey=sharey)
        handles: dict[Any, Any] = {}
        for axes, draw_panel in zip(grid.flat, drawn, strict=True):
            draw_panel(axes)
            axes.label_outer()
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
                handles.setdefault(label, handle)
        figure.legend(list(handles.values()), list(handles), loc="outside right upper")
        if layout.note:
            figure.supxlabel(layout.note, fontsize=9)
    return figure


def _draw_lines(axes: Axes, lines: Lines, labels: Sequence[str], x: str = "round") -> None:
    """A line of means for each label, with the spread as a band; one without values along `x` is drawn dashed."""
    colours = (BLUE, *COLOURS, INK)
    for number, label in enumerate(labels):
        if label not in lines:
            continue
        colour, mine = colours[number % len(colours)], lines[label].sort_values("round")
        # A baseline of one round, or without this cost.
        if len(mine) == 1 if x in ("round", "rounds") else not mine[x].any():
            axes.axhline(mine["mean"].iloc[-1], color=colour, linestyle="dashed", linewidth=1.4, label=label)
            continue
        mine = mine[mine[x] > 0]  # a logarithmic axis has no place for rounds before the first of it
        size = 3 if len(mine) <= MOST_MARKERS else 0
        axes.plot(mine[x], mine["mean"], color=colour, marker="o", markersize=size, linewidth=1.8, label=label)
        if "spread" in mine:
            low, high = mine["mean"] - mine["spread"], mine["mean"] + mine["spread"]
            axes.fill_between(mine[x], low, high, color=colour, alpha=0.15, linewidth=0)


def _rounds_below(axes: Axes) -> None:
    axes.set_xlabel("round")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _score_axis(axes: Axes, measured: str, *, percent: bool) -> None:
    axes.set_ylabel(measured)
    if percent:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))


def _positive(panels: Sequence[tuple[str, Lines]], cost: str) -> pd.Series[float]:
    """All values of a cost that can be drawn."""
    values = [line[cost] for _, lines in panels for line in lines.values()]
    found = pd.concat(values) if values else pd.Series(dtype=float)
    return found[found > 0]


def _cost_axis(axes: Axes, spent: pd.Series[float], *, is_bytes: bool) -> None:
    """Numbers below: logarithmic for bytes, and for counts that span much."""
    decades = float(np.log10(spent.max() / spent.min())) if len(spent) else 0.0
    if is_bytes or spent.max() > _LOG_FROM * spent.min():
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(_log_ticks(decades))
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=3, steps=[1, 2, 2.5, 3, 4, 5, 10]))
    axes.xaxis.set_major_formatter(lambda count, _: tick_text(count) if is_bytes else f"{count:,.0f}")


def _log_ticks(decades: float) -> Locator:
    """As many numbers as have room for their labels beside one another."""
    if decades < 0.5:
        return MaxNLocator(4, steps=[1, 2, 5, 10])
    return LogLocator(subs=(1, 2, 5) if decades < 1.3 else (1, 3) if decades < 2.3 else (1,))
