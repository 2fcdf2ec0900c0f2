"""What the protocols of a sweep measure, per round, in one picture."""

from __future__ import annotations

import textwrap
from functools import partial
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes

from codistill.experiments.run import read_summary
from codistill.experiments.sweep import Sweep, has_liars, lines_of, panels, shown_keys, slug
from codistill.experiments.sweep_view import draw_lines, draw_panels, honest_words, rounds_below
from codistill.plots.measures import measures

_LOG_FROM = 100  # ratio of the largest to the smallest value
_WIDEST = 38  # letters beside an axis


def draw_measures_of(sweep: Sweep, frame: pd.DataFrame, folder: Path, path: Path) -> bool:
    """The panels of every measure; returns whether there was anything to draw."""
    table = measured(sweep, frame, folder)
    if table.empty:
        return False

    def panel(place: Axes, title: str, part: pd.DataFrame, name: str, logarithmic: bool) -> None:
        draw_lines(place, part, lines_of(sweep))
        place.set_title(title)
        place.set_ylabel("\n".join(textwrap.wrap(name, _WIDEST)), fontsize=9)
        rounds_below(place)
        if logarithmic:
            place.set_yscale("log")

    drawn = []
    for name, figures in table.groupby("measure", sort=False):
        low, high = figures["mean"].min(), figures["mean"].max()
        fixed = partial(panel, name=str(name), logarithmic=bool(low > 0 and high > _LOG_FROM * low))
        drawn += [partial(fixed, title=title, part=part) for title, part in panels(sweep, figures)]
    draw_panels(sweep, drawn, path, note=honest_words(table), sharey="row")
    return True


def measured(sweep: Sweep, frame: pd.DataFrame, folder: Path) -> pd.DataFrame:
    """Each measure by combination and round: mean over honest agents and then over seeds."""
    fields = [axis.key for axis in sweep.axes]
    done = set(frame[fields].drop_duplicates().itertuples(index=False, name=None))
    rows = [
        {**labels, "measure": measure.title, "round": t, "mean": values.mean()}
        for labels, _ in sweep.runs
        if tuple(labels[key] for key in fields) in done
        for measure in measures(read_summary(folder / slug(labels)))
        for t, values in zip(measure.rounds, measure.values, strict=True)
    ]
    if not rows:
        return pd.DataFrame()
    by_round = pd.DataFrame(rows).groupby([*shown_keys(sweep), "measure", "round"], sort=False)["mean"]
    table = by_round.mean().reset_index()
    table.attrs["honest"] = has_liars(frame)
    return table
