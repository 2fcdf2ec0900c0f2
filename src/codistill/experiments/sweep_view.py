"""A sweep as a person sees it: a table and a picture per combination, one line for each protocol."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter
from rich.table import Table

from codistill.experiments.sweep import Axis, Sweep
from codistill.look import BLUE, COLOURS, INK, STYLE

_MOST_ROUNDS = 7  # columns of a table


def lines_of(sweep: Sweep) -> Axis:
    """The axis whose values are compared with one another: the protocols, or else the last axis."""
    axes = [axis for axis in sweep.axes if axis.key != "seed"] or list(sweep.axes)
    return next((axis for axis in axes if axis.key == "protocol"), axes[-1])


def panels_of(sweep: Sweep) -> list[Axis]:
    """All other axes; what is averaged over (the seed) is none."""
    return [axis for axis in sweep.axes if axis not in (lines_of(sweep), *(a for a in sweep.axes if a.key == "seed"))]


def panels(sweep: Sweep, table: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """The figures of one combination of all axes but the compared one, with its title."""
    axes = panels_of(sweep)
    for labels in itertools.product(*(axis.values for axis in axes)):
        part = table
        for axis, label in zip(axes, labels, strict=True):
            part = part[part[axis.key] == label]
        yield ", ".join(axis.words(label) for axis, label in zip(axes, labels, strict=True)) or "all", part


def tables(sweep: Sweep, table: pd.DataFrame, *, percent: bool) -> Iterator[Table]:
    """One table per panel: a row per line, a column per round; means, and the spread over seeds."""
    compared = lines_of(sweep)
    for title, part in panels(sweep, table):
        rounds = sorted(part["round"].unique())
        places = np.unique(np.linspace(0, len(rounds) - 1, _MOST_ROUNDS).round().astype(int))
        shown = [rounds[i] for i in places] if rounds else []  # nothing to show where nobody is honest
        drawn = Table(title=title, title_justify="left", caption=_honest(table), caption_justify="left")
        drawn.add_column(compared.name)
        for t in shown:
            drawn.add_column(f"round {t}", justify="right")
        for label in compared.values:
            mine = part[part[compared.key] == label].set_index("round")
            if len(mine):
                cells = [_cell(mine, t, percent) for t in shown]
                drawn.add_row(label, *cells)
        yield drawn


def _honest(table: pd.DataFrame) -> str | None:
    """Said where agents that lie are left out."""
    return "means of the honest agents" if table.attrs.get("honest") else None


def _cell(mine: pd.DataFrame, t: int, percent: bool) -> str:
    if t not in mine.index:
        return ""
    row: Any = mine.loc[t]
    scale, digits = (100, 1) if percent else (1, 4)
    spread = f" ± {scale * row['spread']:.{digits}f}" if row["seeds"] > 1 else ""
    return f"{scale * row['mean']:.{digits}f}{spread}"


def draw(sweep: Sweep, table: pd.DataFrame, path: Path, *, percent: bool) -> None:
    """All panels in one picture; lines are means over agents and seeds, bands the spread over seeds."""
    parts = list(panels(sweep, table))
    axes = panels_of(sweep)
    columns = len(axes[-1].values) if axes else 1
    rows = -(-len(parts) // columns)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(3.4 * columns + 1.6, 2.9 * rows + 0.5), layout="constrained")
        grid = figure.subplots(rows, columns, squeeze=False, sharey=True)
        for place, (title, part) in zip(grid.flat, parts, strict=False):
            _panel(place, title, part, lines_of(sweep), percent=percent)
        handles: dict[Any, Any] = {}
        for place in grid.flat:
            for handle, label in zip(*place.get_legend_handles_labels(), strict=True):
                handles.setdefault(label, handle)
        figure.legend(list(handles.values()), list(handles), loc="outside right upper")
        if said := _honest(table):
            figure.supxlabel(said, fontsize=9)
        figure.savefig(path, dpi=110)


def _panel(place: Axes, title: str, part: pd.DataFrame, compared: Axis, *, percent: bool) -> None:
    colours = (BLUE, *COLOURS, INK)
    for number, label in enumerate(compared.values):
        mine = part[part[compared.key] == label].sort_values("round")
        if not len(mine):
            continue
        colour = colours[number % len(colours)]
        if len(mine) == 1:  # a yardstick of one round
            place.axhline(mine["mean"].iloc[0], color=colour, linestyle="dashed", linewidth=1.4, label=label)
            continue
        place.plot(mine["round"], mine["mean"], color=colour, marker="o", markersize=3, linewidth=1.8, label=label)
        low, high = mine["mean"] - mine["spread"], mine["mean"] + mine["spread"]
        place.fill_between(mine["round"], low, high, color=colour, alpha=0.15, linewidth=0)
    place.set_title(title)
    place.set_xlabel("round")
    place.xaxis.set_major_locator(MaxNLocator(integer=True))
    if percent:
        place.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        place.set_ylabel("accuracy, common test set")
    else:
        place.set_ylabel("RMSE, common test set")
    place.label_outer()
