"""The results of a sweep for a person: tables on the terminal, tables and pictures in its folder."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import pandas as pd
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from codistill.experiments.sweep import Sweep, lines_of, panels, panels_of
from codistill.experiments.sweep_costs import along_costs, costs, has_costs
from codistill.experiments.sweep_features import features_grid
from codistill.experiments.sweep_means import means, metric_of, on_compared_data
from codistill.experiments.sweep_measures import measured
from codistill.experiments.sweep_outputs import outputs_grid
from codistill.experiments.sweep_run import TABLE
from codistill.experiments.sweep_tables import cost_tables, honest_note, score_tables, target_text
from codistill.files import write_atomically
from codistill.plots import sweep_plots
from codistill.plots.feature_plot import draw_feature_grid
from codistill.plots.heatmaps import draw_grid
from codistill.plots.sweep_plots import Layout, Lines
from codistill.results.latex_table import latex_tables
from codistill.results.metric_text import in_percent, metric_name
from codistill.text import csv_text

_PICTURE, _OUTPUTS_PICTURE = "sweep.png", "outputs.png"
_FEATURES_PICTURE = "features.png"
_COSTS_TABLE, _COSTS_PICTURE, _MEASURES_PICTURE = "costs.csv", "costs.png", "measures.png"
_DOTS_PER_INCH = 110


def show_sweep(sweep: Sweep, frame: pd.DataFrame, folder: Path, console: Console) -> dict[str, Path]:
    """Print all tables, and write them and the pictures to the sweep's folder; returns what is where.

    Tables are also written as LaTeX, and pictures as PDF, beside them.
    """
    compared = sweep.on_all_values(on_compared_data(sweep, frame))
    table, percent = means(sweep, compared), in_percent(metric_of(frame))
    _show(list(score_tables(sweep, table, percent=percent)), (folder / TABLE).with_suffix(".tex"), console)
    written = {"table": folder / TABLE, "LaTeX": (folder / TABLE).with_suffix(".tex"), "picture": folder / _PICTURE}
    written |= show_costs(sweep, compared, folder, console)
    draw_scores(sweep, table, folder / _PICTURE, percent=percent)
    if draw_measures(sweep, sweep.on_all_values(measured(sweep, frame, folder)), folder / _MEASURES_PICTURE):
        written["protocol measures"] = folder / _MEASURES_PICTURE
    if grid := outputs_grid(sweep, folder):
        _save(draw_grid(grid), folder / _OUTPUTS_PICTURE)
        written["average outputs"] = folder / _OUTPUTS_PICTURE
    if maps := features_grid(sweep, folder):
        _save(draw_feature_grid(maps), folder / _FEATURES_PICTURE)
        written["feature space"] = folder / _FEATURES_PICTURE
    return written


def show_costs(sweep: Sweep, frame: pd.DataFrame, folder: Path, console: Console) -> dict[str, Path]:
    """Print the tables of costs, and write them and the picture to the sweep's folder; returns what is where."""
    if not has_costs(sweep, frame):
        return {}
    percent, table = in_percent(metric_of(frame)), costs(sweep, frame)
    _show(list(cost_tables(sweep, table, percent=percent)), (folder / _COSTS_TABLE).with_suffix(".tex"), console)
    written = {"costs": folder / _COSTS_TABLE}
    write_atomically(folder / _COSTS_TABLE, csv_text(table).encode())
    if frame["sent"].any():
        written[f"{metric_name(metric_of(frame))} against costs"] = folder / _COSTS_PICTURE
        draw_costs(sweep, along_costs(sweep, frame), folder / _COSTS_PICTURE, percent=percent)
    return written


def _show(tables: Sequence[Table], path: Path, console: Console) -> None:
    """Print tables, and write them as LaTeX."""
    for table in tables:
        console.print(table)
    write_atomically(path, latex_tables(tables).encode())


def draw_scores(sweep: Sweep, table: pd.DataFrame, path: Path, *, percent: bool) -> None:
    """Score per round, all panels in one picture."""
    figure = sweep_plots.draw_scores(
        _panels(sweep, table), _layout(sweep, table), measured=_measured_on(sweep, table), percent=percent
    )
    _save(figure, path)


def draw_costs(sweep: Sweep, table: pd.DataFrame, path: Path, *, percent: bool) -> None:
    """Score against each cost, all panels in one picture."""
    target = sweep.compare.target
    figure = sweep_plots.draw_costs(
        _panels(sweep, table), _layout(sweep, table), measured=_measured_on(sweep, table), percent=percent,
        target=None if target is None else (target, f"target: {target_text(target, percent=percent)}"),
    )  # fmt: skip
    _save(figure, path)


def draw_measures(sweep: Sweep, table: pd.DataFrame, path: Path) -> bool:
    """What the protocols measured, per round; returns whether there was anything to draw."""
    if table.empty:
        return False
    by_measure = {str(name): _panels(sweep, part) for name, part in table.groupby("measure", sort=False)}
    _save(sweep_plots.draw_measures(by_measure, _layout(sweep, table)), path)
    return True


def _panels(sweep: Sweep, table: pd.DataFrame) -> list[tuple[str, Lines]]:
    compared = lines_of(sweep)
    return [
        (title, {compared.words(str(label)): rows for label, rows in part.groupby(compared.key, sort=False)})
        for title, part in panels(sweep, table)
    ]


def _layout(sweep: Sweep, table: pd.DataFrame) -> Layout:
    """A column per value of the last panel axis."""
    axes, compared = panels_of(sweep), lines_of(sweep)
    labels = [compared.words(label) for label in compared.values]
    return Layout(labels, len(axes[-1].values) if axes else 1, honest_note(table))


def _measured_on(sweep: Sweep, table: pd.DataFrame) -> str:
    return f"{metric_name(table.attrs['metric'])}, {sweep.test_part} set"


def _save(figure: Figure, path: Path) -> None:
    """Write a picture as PNG, and as PDF beside it."""
    for kind, metadata in (("png", {}), ("pdf", {"CreationDate": None})):  # equal pictures, equal bytes
        picture = io.BytesIO()
        with matplotlib.rc_context({"pdf.fonttype": 42}):  # letters stay text, which journals ask for
            figure.savefig(picture, format=kind, dpi=_DOTS_PER_INCH, metadata=metadata)
        write_atomically(path.with_suffix(f".{kind}"), picture.getvalue())
