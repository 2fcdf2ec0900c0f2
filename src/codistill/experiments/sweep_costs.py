"""What the scores of a sweep cost: bytes, rounds, and the gain for them; see [compare] in a recipe."""

from __future__ import annotations

from typing import Any

import pandas as pd

from codistill.experiments.sweep import Compare, Sweep, lines_of
from codistill.experiments.sweep_means import has_byzantine_agents, honest_rows, means, metric_of, score_of, shown_keys

_REPEAT = "repeat"  # distinguishes runs that differ in their seed only


def has_costs(sweep: Sweep, frame: pd.DataFrame) -> bool:
    """Whether there are costs to show: some agent has sent something, or the recipe has a table [compare]."""
    return bool(frame["sent"].any()) or sweep.compare != Compare()


def along_bytes(sweep: Sweep, frame: pd.DataFrame) -> pd.DataFrame:
    """The means of every evaluated round, and beside them the bytes sent so far, mean over seeds."""
    places = [*shown_keys(sweep), "round"]
    table = means(sweep, frame)
    sent = _sent_so_far(sweep, frame).groupby(level=places).mean()
    table["bytes"] = sent.reindex(pd.MultiIndex.from_frame(table[places])).to_numpy()
    return table


def costs(sweep: Sweep, frame: pd.DataFrame) -> pd.DataFrame:
    """A row per panel and line: figures of the last evaluation and of all bytes, means over seeds.

    A target counts from the first evaluated round in which the honest agents reach it on average. Gains and
    factors are those of each seed; `spread` is the sample standard deviation over seeds.
    """
    keys, line, metric, compare = shown_keys(sweep), lines_of(sweep).key, metric_of(frame), sweep.compare
    runs = _runs(sweep, frame)
    by_seed = {metric: runs["score"], "worst_agent": runs["worst"], "bytes": runs["bytes"]}
    if compare.gain_over is not None:
        above = runs["score"] - _paired(runs["score"], line, compare.gain_over)
        by_seed["gain"] = above if score_of(frame).greater_is_better else -above  # positive is better
    if compare.target is not None:
        by_seed |= {"bytes_to_target": runs["bytes_to_target"], "round_of_target": runs["round_of_target"]}
    if compare.bytes_against is not None:
        for name in [name for name in ("bytes", "bytes_to_target") if name in runs]:
            sent = runs[name].where(runs[name] > 0)  # nothing can be compared with no bytes
            by_seed[f"fewer_{name}"] = _paired(sent, line, compare.bytes_against) / sent
    grouped = pd.DataFrame(by_seed).groupby(level=keys)
    found: dict[str, pd.Series[Any]] = {"seeds": grouped.size()}
    for name in by_seed:
        found[name] = grouped[name].mean()
        if name in (metric, "gain"):
            found[f"{name}_spread"] = grouped[name].std(ddof=1)
    if compare.target is not None:
        found["seeds_at_target"] = grouped["bytes_to_target"].count()
    table = pd.DataFrame(found).reset_index()
    table.attrs["honest"] = has_byzantine_agents(frame)
    table.attrs["metric"] = metric
    return table


def _runs(sweep: Sweep, frame: pd.DataFrame) -> pd.DataFrame:
    """A row per run: its last score, that of its worst agent, its bytes, and those up to the target."""
    metric, target = metric_of(frame), sweep.compare.target
    greater_is_better = score_of(frame).greater_is_better
    worst = "min" if greater_is_better else "max"
    sent = _sent_so_far(sweep, frame)
    run = [name for name in sent.index.names if name != "round"]
    scored = _with_repeat(sweep, honest_rows(frame)).dropna(subset=[metric])
    rounds = scored.groupby([*run, "round"])[metric].agg(score="mean", worst=worst)
    rounds = rounds.assign(bytes=sent.reindex(rounds.index)).reset_index("round")
    last, found = rounds.groupby(level=run).last(), {"bytes": sent.groupby(level=run).last()}
    if target is not None:
        enough = rounds["score"] >= target if greater_is_better else rounds["score"] <= target
        first = rounds[enough].groupby(level=run).first()
        found |= {"bytes_to_target": first["bytes"], "round_of_target": first["round"]}
    return pd.DataFrame({"score": last["score"], "worst": last["worst"], **found})


def _sent_so_far(sweep: Sweep, frame: pd.DataFrame) -> pd.Series[float]:
    """Bytes that all agents, Byzantine ones included, and the hub have sent up to each round, evaluated or not."""
    run = [*shown_keys(sweep), _REPEAT]
    from_hub = frame["from_hub"].fillna(0) if "from_hub" in frame else 0
    known = _with_repeat(sweep, frame.assign(sent=frame["sent"] + from_hub))
    by_round = known.groupby([*run, "round"])["sent"].sum()  # sorted, so rounds are in order
    return by_round.groupby(level=run).cumsum().astype(float)


def _with_repeat(sweep: Sweep, frame: pd.DataFrame) -> pd.DataFrame:
    averaged = "seed" in frame and "seed" not in shown_keys(sweep)
    return frame.assign(**{_REPEAT: frame["seed"] if averaged else ""})


def _paired(values: pd.Series[float], line: str, label: str) -> pd.Series[float]:
    """For each run the value of the run on the line `label` that is like it in all else, the seed too."""
    theirs = values[values.index.get_level_values(line) == label].droplevel(line)
    return pd.Series(theirs.reindex(values.droplevel(line).index).to_numpy(), values.index)
