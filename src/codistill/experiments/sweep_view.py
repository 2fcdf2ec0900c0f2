"""A sweep as a person sees it: a table and a picture per combination, one line for each protocol."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter
from rich.markup import escape
from rich.table import Table

from codistill.experiments.sweep import Axis, Sweep, lines_of, panels, panels_of
from codistill.plots.style import BLUE, COLOURS, INK, STYLE

_MOST_ROUNDS = 7  # columns of a table
_MOST_MARKERS = 30  # beyond, they would run into one another


def tables(sweep: Sweep, table: pd.DataFrame, *, percent: bool) -> Iterator[Table]:
    """One table per panel: a row per line, a column per round; means, and the spread over seeds."""
    compared = lines_of(sweep)
    for title, part in panels(sweep, table):
        rounds = sorted(part["round"].unique())
        places = np.unique(np.linspace(0, len(rounds) - 1, _MOST_ROUNDS).round().astype(int))
        shown = [rounds[i] for i in places] if rounds else []  # nothing to show where nobody is honest
        cells: dict[str, list[str]] = {}
        for label in compared.values:
            mine = part[part[compared.key] == label].set_index("round")
            if len(mine):
                cells[label] = [_cell(mine, t, percent) for t in shown]
        yield table_of(title, compared, [f"round {t}" for t in shown], cells, honest_words(table))


def table_of(
    title: str, compared: Axis, headings: Sequence[str], cells: Mapping[str, Sequence[str]], caption: str
) -> Table:
    """A table of figures: a row per line."""
    drawn = Table(title=escape(title), title_justify="left", caption=caption or None, caption_justify="left")
    drawn.add_column(compared.name)
    for heading in headings:
        drawn.add_column(escape(heading), justify="right")
    for label, row in cells.items():
        drawn.add_row(escape(label), *row)
    return drawn


def honest_words(table: pd.DataFrame) -> str:
    """Said where agents that lie are left out."""
    return "means of the honest agents" if table.attrs.get("honest") else ""


def _cell(mine: pd.DataFrame, t: int, percent: bool) -> str:
    if t not in mine.index:
        return ""
    row: Any = mine.loc[t]
    return score_text(row["mean"], row["spread"] if row["seeds"] > 1 else None, percent=percent)


def score_text(
    mean: float, spread: float | None = None, *, percent: bool, digits: int = 1, sign: Literal["", "+"] = ""
) -> str:
    """0.956, 0.002 -> '95.6 ± 0.2'; an error as it is."""
    if np.isnan(mean):
        return "-"
    scale, digits = (100, digits) if percent else (1, 4)
    return f"{scale * mean:{sign}.{digits}f}" + ("" if spread is None else f" ± {scale * spread:.{digits}f}")


def draw(sweep: Sweep, table: pd.DataFrame, path: Path, *, percent: bool) -> None:
    """All panels in one picture; lines are means over agents and seeds, bands the spread over seeds."""
    measured = score_words(sweep, percent=percent)

    def panel(place: Axes, title: str, part: pd.DataFrame) -> None:
        draw_lines(place, part, lines_of(sweep))
        place.set_title(title)
        rounds_below(place)
        score_axis(place, measured, percent=percent)

    drawn = [partial(panel, title=title, part=part) for title, part in panels(sweep, table)]
    draw_panels(sweep, drawn, path, note=honest_words(table))


def draw_panels(
    sweep: Sweep,
    drawn: Sequence[Callable[[Axes], None]],
    path: Path,
    *,
    note: str = "",
    sharey: Literal["all", "row"] = "all",
) -> None:
    """A picture of panels: a column per value of the last panel axis, and one legend for all."""
    axes = panels_of(sweep)
    columns = len(axes[-1].values) if axes else 1
    rows = -(-len(drawn) // columns)
    with matplotlib.rc_context(STYLE):
        # The legend stands at the right: panels keep their width however long its words are.
        legend = 0.7 + 0.085 * max(map(len, lines_of(sweep).values))
        width = 4.6 if columns == 1 else 3.4
        figure = Figure(figsize=(width * columns + legend, 2.9 * rows + 0.5), layout="constrained")
        grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=sharey)
        handles: dict[Any, Any] = {}
        for place, draw_panel in zip(grid.flat, drawn, strict=True):
            draw_panel(place)
            place.label_outer()
            for handle, label in zip(*place.get_legend_handles_labels(), strict=True):
                handles.setdefault(label, handle)
        figure.legend(list(handles.values()), list(handles), loc="outside right upper")
        if note:
            figure.supxlabel(note, fontsize=9)
        figure.savefig(path, dpi=110)


def draw_lines(place: Axes, part: pd.DataFrame, compared: Axis, x: str = "round") -> None:
    """A line of means per compared value, with the spread as a band; one with no course along `x` lies dashed."""
    colours = (BLUE, *COLOURS, INK)
    for number, label in enumerate(compared.values):
        mine = part[part[compared.key] == label].sort_values("round")
        if not len(mine):
            continue
        colour = colours[number % len(colours)]
        if len(mine) == 1 if x == "round" else not mine[x].any():  # a yardstick of one round, or without traffic
            place.axhline(mine["mean"].iloc[-1], color=colour, linestyle="dashed", linewidth=1.4, label=label)
            continue
        mine = mine[mine[x] > 0]  # a logarithmic axis has no place for rounds before the first byte
        size = 3 if len(mine) <= _MOST_MARKERS else 0
        place.plot(mine[x], mine["mean"], color=colour, marker="o", markersize=size, linewidth=1.8, label=label)
        if "spread" in mine:
            low, high = mine["mean"] - mine["spread"], mine["mean"] + mine["spread"]
            place.fill_between(mine[x], low, high, color=colour, alpha=0.15, linewidth=0)


def rounds_below(place: Axes) -> None:
    """Whole rounds on the axis below."""
    place.set_xlabel("round")
    place.xaxis.set_major_locator(MaxNLocator(integer=True))


def score_words(sweep: Sweep, *, percent: bool) -> str:
    """What was measured, and on what."""
    return f"{'accuracy' if percent else 'RMSE'}, {sweep.test_part} set"


def score_axis(place: Axes, measured: str, *, percent: bool) -> None:
    """What was measured on the axis at the left."""
    place.set_ylabel(measured)
    if percent:
        place.yaxis.set_major_formatter(PercentFormatter(1.0))
