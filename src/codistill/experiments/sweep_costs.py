"""What the scores of a sweep cost: rounds, exchanges, gradient steps and bytes; see [compare] in a recipe."""

from __future__ import annotations

from typing import Any

import pandas as pd

from codistill.experiments.sweep import Compare, Sweep, lines_of
from codistill.experiments.sweep_means import has_byzantine_agents, honest_rows, means, metric_of, score_of, shown_keys

COSTS = ("rounds", "exchanges", "steps", "bytes")  # in the order in which they are shown
_REPEAT = "repeat"  # distinguishes runs that differ in their seed only


def has_costs(sweep: Sweep, frame: pd.DataFrame) -> bool:
    """Whether there are costs to show: some agent has sent something, or the recipe has a table [compare]."""
    return bool(frame["sent"].any()) or sweep.compare != Compare()


def along_costs(sweep: Sweep, frame: pd.DataFrame) -> pd.DataFrame:
    """The means of every evaluated round, and beside them each cost up to it, mean over seeds."""
    places = [*shown_keys(sweep), "round"]
    table = means(sweep, frame)
    so_far = _costs_so_far(sweep, frame).groupby(level=places).mean()
    found = so_far.reindex(pd.MultiIndex.from_frame(table[places]))
    for name in COSTS:
        table[name] = found[name].to_numpy()
    return table


def costs(sweep: Sweep, frame: pd.DataFrame) -> pd.DataFrame:
    """A row per panel and line: figures of the last evaluation and of all rounds, means over seeds.

    A target counts from the first evaluated round in which the honest agents reach it on average. Gains and
    factors are those of each seed; `spread` is the sample standard deviation over seeds, to the target over those
    that reach it.
    """
    keys, line, metric, compare = shown_keys(sweep), lines_of(sweep).key, metric_of(frame), sweep.compare
    runs = _runs(sweep, frame)
    by_seed = {metric: runs["score"], "worst_agent": runs["worst"], **{name: runs[name] for name in COSTS[1:]}}
    if compare.gain_over is not None:
        above = runs["score"] - _paired(runs["score"], line, compare.gain_over)
        by_seed["gain"] = above if score_of(frame).greater_is_better else -above  # positive is better
    to_target = [f"{name}_to_target" for name in COSTS] if compare.target is not None else []
    by_seed |= {name: runs[name] for name in to_target}
    factors = [f"fewer_{name}" for name in compared_costs(compare)]
    for name in compared_costs(compare):
        spent = runs[name].where(runs[name] > 0)  # nothing can be compared with no cost
        by_seed[f"fewer_{name}"] = _paired(spent, line, str(compare.costs_against)) / spent
    grouped = pd.DataFrame(by_seed).groupby(level=keys)
    found: dict[str, pd.Series[Any]] = {"seeds": grouped.size()}
    for name in by_seed:
        found[name] = grouped[name].mean()
        if name in (metric, "gain", *to_target, *factors):
            found[f"{name}_spread"] = grouped[name].std(ddof=1)
    if to_target:
        found["seeds_at_target"] = grouped["rounds_to_target"].count()
    if to_target and factors:
        found["seeds_compared"] = grouped[factors[1]].count()  # rounds, which no run is without, or bytes only
    table = pd.DataFrame(found).reset_index()
    table.attrs["honest"] = has_byzantine_agents(frame)
    table.attrs["metric"] = metric
    return table


def compared_costs(compare: Compare) -> list[str]:
    """The costs of which factors are told: bytes, and those up to the target; all four with `fewer_against`."""
    if compare.costs_against is None:
        return []
    to_target = (COSTS if compare.fewer_against else ("bytes",)) if compare.target is not None else ()
    return ["bytes", *(f"{name}_to_target" for name in to_target)]


def _runs(sweep: Sweep, frame: pd.DataFrame) -> pd.DataFrame:
    """A row per run: its last score, that of its worst agent, its costs, and those up to the target."""
    metric, target = metric_of(frame), sweep.compare.target
    greater_is_better = score_of(frame).greater_is_better
    worst = "min" if greater_is_better else "max"
    so_far = _costs_so_far(sweep, frame)
    run = [name for name in so_far.index.names if name != "round"]
    scored = _with_repeat(sweep, honest_rows(frame)).dropna(subset=[metric])
    rounds = scored.groupby([*run, "round"])[metric].agg(score="mean", worst=worst)
    rounds = rounds.join(so_far)
    last, found = rounds.groupby(level=run).last(), so_far.groupby(level=run).last()
    if target is not None:
        enough = rounds["score"] >= target if greater_is_better else rounds["score"] <= target
        first = rounds.loc[enough, list(COSTS)].groupby(level=run).first()
        found = found.join(first.add_suffix("_to_target"))
    return found.join(last[["score", "worst"]])


def _costs_so_far(sweep: Sweep, frame: pd.DataFrame) -> pd.DataFrame:
    """Each cost up to each round, evaluated or not; NaN where a run of an older version did not count it.

    Bytes are those that all agents, Byzantine ones included, and the hub have sent. Steps and exchanges of a round
    are means of the agents that took part in it.
    """
    run = [*shown_keys(sweep), _REPEAT]
    from_hub = frame["from_hub"].fillna(0) if "from_hub" in frame else 0
    known = _with_repeat(sweep, frame.assign(bytes=frame["sent"] + from_hub))
    rounds = known.groupby([*run, "round"])  # sorted, so rounds are in order
    took_part = known[known["present"].eq(True)].groupby([*run, "round"])
    by_round = pd.DataFrame({"bytes": rounds["bytes"].sum().astype(float)})
    for name in ("exchanges", "steps"):
        # A round in which nobody takes part costs nothing.
        by_round[name] = (
            took_part[name].mean().reindex(by_round.index, fill_value=0.0) if name in known else float("nan")
        )
    so_far = by_round.groupby(level=run).cumsum()
    so_far["rounds"] = so_far.index.get_level_values("round").astype(float)
    return so_far[list(COSTS)]


def _with_repeat(sweep: Sweep, frame: pd.DataFrame) -> pd.DataFrame:
    averaged = "seed" in frame and "seed" not in shown_keys(sweep)
    return frame.assign(**{_REPEAT: frame["seed"] if averaged else ""})


def _paired(values: pd.Series[float], line: str, label: str) -> pd.Series[float]:
    """For each run the value of the run on the line `label` that is like it in all else, the seed too."""
    theirs = values[values.index.get_level_values(line) == label].droplevel(line)
    return pd.Series(theirs.reindex(values.droplevel(line).index).to_numpy(), values.index)
