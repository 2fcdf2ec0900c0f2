"""What the protocols of a sweep measured, by combination and round."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from codistill.experiments.saved_run import read_summary
from codistill.experiments.sweep import Sweep
from codistill.experiments.sweep_means import has_byzantine_agents, shown_keys
from codistill.experiments.sweep_run import slug
from codistill.results.measures import measures


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
    table.attrs["honest"] = has_byzantine_agents(frame)
    return table
