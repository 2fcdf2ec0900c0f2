"""What a sweep's accuracy costs, as a person sees it: a table per panel, and accuracy against bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import Locator, LogLocator, MaxNLocator, NullFormatter
from rich.console import Console
from rich.table import Table

from codistill.experiments.sweep import COSTS_PICTURE, COSTS_TABLE, Sweep, lines_of, panels
from codistill.experiments.sweep_costs import along_bytes, costs, has_costs
from codistill.experiments.sweep_view import (
    draw_lines,
    draw_panels,
    honest_words,
    score_axis,
    score_text,
    score_words,
    table_of,
)
from codistill.plots.style import MUTED
from codistill.text import bytes_text

_CAPTION = "bytes: sent by all agents and the hub in all rounds, each message counted once"

Cell = Callable[[Any], str]  # of a row of costs


def show_costs(sweep: Sweep, frame: pd.DataFrame, folder: Path, console: Console) -> dict[str, Path]:
    """Print all tables, and write them and the picture to the sweep's folder; returns what is where, if anything."""
    if not has_costs(sweep, frame):
        return {}
    percent, table = "accuracy" in frame, costs(sweep, frame)
    for drawn in cost_tables(sweep, table, percent=percent):
        console.print(drawn)
    written = {"costs": folder / COSTS_TABLE}
    table.to_csv(folder / COSTS_TABLE, index=False)
    if frame["sent"].any():
        written["accuracy against bytes" if percent else "RMSE against bytes"] = folder / COSTS_PICTURE
        draw_costs(sweep, along_bytes(sweep, frame), folder / COSTS_PICTURE, percent=percent)
    return written


def cost_tables(sweep: Sweep, table: pd.DataFrame, *, percent: bool) -> Iterator[Table]:
    """One table per panel: a row per line."""
    compared, columns = lines_of(sweep), _columns(sweep, percent)
    caption = "; ".join(filter(None, (_CAPTION, honest_words(table))))
    for title, part in panels(sweep, table):
        rows = {row[compared.key]: row for row in part.to_dict("records")}
        cells = {label: [cell(rows[label]) for cell in columns.values()] for label in compared.values if label in rows}
        yield table_of(f"{title}: costs", compared, list(columns), cells, caption)


def _columns(sweep: Sweep, percent: bool) -> dict[str, Cell]:
    """What is told of each line, by its heading."""
    compare, line, metric = sweep.compare, lines_of(sweep).key, "accuracy" if percent else "rmse"

    def over_seeds(row: Any, name: str, digits: int = 1, sign: Literal["", "+"] = "") -> str:
        spread = row[f"{name}_spread"] if row["seeds"] > 1 else None
        return score_text(row[name], spread, percent=percent, digits=digits, sign=sign)

    columns: dict[str, Cell] = {metric: lambda row: over_seeds(row, metric)}
    if compare.gain_over is not None:
        columns[f"gain over\n{compare.gain_over}"] = lambda row: (
            "-" if row[line] == compare.gain_over else over_seeds(row, "gain", digits=2, sign="+")
        )
    columns["lowest agent" if percent else "highest agent"] = lambda row: score_text(
        row["worst_agent"], percent=percent
    )
    columns["bytes"] = lambda row: bytes_text(row["bytes"])
    if compare.bytes_against is not None:
        columns["fewer bytes"] = lambda row: _factor(row["fewer_bytes"])
    if compare.target is not None:
        target = target_words(compare.target, percent=percent)
        columns[f"bytes\nto {target}"] = _bytes_to_target
        columns["round"] = lambda row: f"{round(row['round_of_target'], 1):g}" if row["seeds_at_target"] else "-"
        if compare.bytes_against is not None:
            columns[f"fewer bytes\nto {target}"] = lambda row: _factor(row["fewer_bytes_to_target"])
    return columns


def target_words(target: float, *, percent: bool) -> str:
    """0.958 -> '95.8 %'; an error as it is."""
    return f"{100 * target:g} %" if percent else f"{target:g}"


def _bytes_to_target(row: Any) -> str:
    if not row["seeds_at_target"]:
        return "not reached"
    some = f"{row['seeds_at_target']} of {row['seeds']} seeds: " if row["seeds_at_target"] < row["seeds"] else ""
    return some + bytes_text(row["bytes_to_target"])


def _factor(factor: float) -> str:
    if np.isnan(factor):
        return "-"
    return f"{factor:,.0f} x" if factor >= 10 else f"{factor:.2g} x"


def draw_costs(sweep: Sweep, table: pd.DataFrame, path: Path, *, percent: bool) -> None:
    """Accuracy against bytes, all panels in one picture; who sends nothing lies dashed at its last accuracy."""
    measured, target = score_words(sweep, percent=percent), sweep.compare.target
    sent = table["bytes"][table["bytes"] > 0]
    decades = float(np.log10(sent.max() / sent.min())) if len(sent) else 0.0

    def panel(place: Axes, title: str, part: pd.DataFrame) -> None:
        draw_lines(place, part, lines_of(sweep), x="bytes")
        if target is not None:
            label = f"target: {target_words(target, percent=percent)}"
            place.axhline(target, color=MUTED, linestyle="dotted", linewidth=1.2, label=label)
        place.set_title(title)
        place.set_xlabel("bytes sent so far, all together")
        place.set_xscale("log")
        place.xaxis.set_major_locator(_ticks(decades))
        place.xaxis.set_major_formatter(lambda count, _: bytes_text(count).replace(".0 ", " "))
        place.xaxis.set_minor_formatter(NullFormatter())
        score_axis(place, measured, percent=percent)

    drawn = [partial(panel, title=title, part=part) for title, part in panels(sweep, table)]
    draw_panels(sweep, drawn, path, note=honest_words(table))


def _ticks(decades: float) -> Locator:
    """So many numbers of bytes that their labels have room beside one another."""
    if decades < 0.5:
        return MaxNLocator(4, steps=[1, 2, 5, 10])
    return LogLocator(subs=(1, 2, 5) if decades < 1.3 else (1, 3) if decades < 2.3 else (1,))
