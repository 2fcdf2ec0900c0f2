"""The scores of a sweep: means over honest agents and seeds, by combination and round."""

from __future__ import annotations

import pandas as pd

from codistill.experiments.sweep import Sweep, lines_of, panels_of
from codistill.results.scores import Score, as_score, find_score


def means(sweep: Sweep, frame: pd.DataFrame) -> pd.DataFrame:
    """The score by combination and round: mean over honest agents and seeds.

    `spread` is the sample standard deviation (divided by n - 1) over the `seeds`, n of them.
    """
    keys, metric = shown_keys(sweep), metric_of(frame)
    scored = honest_rows(frame).dropna(subset=[metric])
    seeds = ["seed"] if "seed" in frame and "seed" not in keys else []
    by_seed = scored.groupby([*keys, *seeds, "round"], sort=False)[metric].mean()
    grouped = by_seed.groupby([*keys, "round"], sort=False)
    found = {"mean": grouped.mean(), "spread": grouped.std(ddof=1), "seeds": grouped.count()}
    table = pd.DataFrame(found).reset_index()
    table.attrs["honest"] = has_byzantine_agents(frame)  # whether some agents were left out
    table.attrs["metric"] = metric
    return table


def on_compared_data(sweep: Sweep, frame: pd.DataFrame) -> pd.DataFrame:
    """The rows with the scores that [compare] asks for.

    `own`: on each agent's own test data instead of the common test set; `present`: only of agents that took part in the
    round. Where only a share of the agents takes part, the others hold the common model of an earlier one.
    """
    metric, compare = metric_of(frame), sweep.compare
    scores = frame[f"own_{metric}" if compare.own else metric]
    return frame.assign(**{metric: scores.where(frame["present"].eq(True)) if compare.present else scores})


def shown_keys(sweep: Sweep) -> list[str]:
    """The fields by which figures are told apart; the seed, which is averaged over, is none."""
    return [axis.key for axis in (*panels_of(sweep), lines_of(sweep))]


def metric_of(frame: pd.DataFrame) -> str:
    """What is compared: the first score that was measured, which is accuracy unless others are asked for."""
    found = [name for name in frame.columns if name == "accuracy" or find_score(str(name)) is not None]
    return str(found[0]) if found else "accuracy"


def score_of(frame: pd.DataFrame) -> Score:
    """The score that is compared."""
    return as_score(metric_of(frame))


def has_byzantine_agents(frame: pd.DataFrame) -> bool:
    """Whether some agents lie, and are left out of means."""
    return "lies" in frame and bool(frame["lies"].eq(True).any())


def honest_rows(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of agents that do not lie."""
    return frame[~frame["lies"].eq(True)] if has_byzantine_agents(frame) else frame
