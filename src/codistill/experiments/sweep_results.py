"""What the scores of a sweep cost: rounds, exchanges, gradient steps and bytes; see [compare] in a recipe."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from codistill.engine.store import OUTPUTS
from codistill.experiments.saved_run import read_summary
from codistill.experiments.sweep import ABSENT, Compare, Sweep, slug
from codistill.report.maps import Map, Panel
from codistill.results.outputs import Outputs, pool
from codistill.results.rounds import measures
from codistill.results.scores import as_score, find_score
from codistill.results.seeds import Line, Part

COSTS = ("rounds", "exchanges", "steps", "bytes")  # in the order in which they are shown
_REPEAT = "repeat"  # distinguishes runs that differ in their seed only


def has_costs(sweep: Sweep, frame: pd.DataFrame) -> bool:
    """Whether there are costs to show: some agent has sent something, or the recipe has a table [compare]."""
    return bool(frame["sent"].any()) or sweep.compare != Compare()


def along_costs(sweep: Sweep, frame: pd.DataFrame) -> pd.DataFrame:
    """The means of every evaluated round, and beside them each cost up to it, mean over seeds."""
    places = [*sweep.shown_keys, "round"]
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
    keys, line, metric, compare = sweep.shown_keys, sweep.lines.key, metric_of(frame), sweep.compare
    runs = _runs(sweep, frame)
    by_seed = {metric: runs["score"], "worst_agent": runs["worst"], **{name: runs[name] for name in COSTS[1:]}}
    if compare.gain_over is not None:
        above = runs["score"] - _paired(runs["score"], line, compare.gain_over)
        by_seed["gain"] = above if as_score(metric).greater_is_better else -above  # positive is better
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
    table.attrs |= {"honest": has_byzantine_agents(frame), "metric": metric}
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
    greater_is_better = as_score(metric).greater_is_better
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
    run = [*sweep.shown_keys, _REPEAT]
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
    averaged = "seed" in frame and "seed" not in sweep.shown_keys
    return frame.assign(**{_REPEAT: frame["seed"] if averaged else ""})


def _paired(values: pd.Series[float], line: str, label: str) -> pd.Series[float]:
    """For each run the value of the run on the line `label` that is like it in all else, the seed too."""
    theirs = values[values.index.get_level_values(line) == label].droplevel(line)
    return pd.Series(theirs.reindex(values.droplevel(line).index).to_numpy(), values.index)


# --- The scores of a sweep: means over honest agents and seeds, by combination and round.


def means(sweep: Sweep, frame: pd.DataFrame) -> pd.DataFrame:
    """The score by combination and round: mean over honest agents and seeds.

    `spread` is the sample standard deviation (divided by n - 1) over the `seeds`, n of them.
    """
    keys, metric = sweep.shown_keys, metric_of(frame)
    scored = _with_repeat(sweep, honest_rows(frame)).dropna(subset=[metric])
    by_seed = scored.groupby([*keys, _REPEAT, "round"], sort=False)[metric].mean()
    grouped = by_seed.groupby([*keys, "round"], sort=False)
    found = {"mean": grouped.mean(), "spread": grouped.std(ddof=1), "seeds": grouped.count()}
    table = pd.DataFrame(found).reset_index()
    table.attrs |= {"honest": has_byzantine_agents(frame), "metric": metric}  # honest: some agents were left out
    return table


def on_compared_data(sweep: Sweep, frame: pd.DataFrame) -> pd.DataFrame:
    """The rows with the scores that [compare] asks for.

    `own`: on each agent's own test data instead of the common test set; `present`: only of agents that took part in the
    round. Where only a share of the agents takes part, the others hold the common model of an earlier one.
    """
    compare, changed = sweep.compare, {}
    for name in metrics_of(frame):
        scores = frame.get(f"own_{name}" if compare.own else name, pd.Series(float("nan"), frame.index))
        changed[name] = scores.where(frame["present"].eq(True)) if compare.present else scores
    return frame.assign(**changed)


def metrics_of(frame: pd.DataFrame) -> list[str]:
    """The scores that were measured, the most important first; accuracy if there is none."""
    found = [str(name) for name in frame.columns if name == "accuracy" or find_score(str(name)) is not None]
    return found or ["accuracy"]


def metric_of(frame: pd.DataFrame) -> str:
    """What is compared: the first score that was measured, which is accuracy unless others are asked for."""
    return metrics_of(frame)[0]


def has_byzantine_agents(frame: pd.DataFrame) -> bool:
    return "lies" in frame and bool(frame["lies"].eq(True).any())


def honest_rows(frame: pd.DataFrame) -> pd.DataFrame:
    return frame[~frame["lies"].eq(True)] if has_byzantine_agents(frame) else frame


def scores_by_seed(sweep: Sweep, frame: pd.DataFrame) -> list[Part]:
    """For each panel its lines, with every score of each seed: the mean over honest agents at the last evaluation.

    A sweep over seeds alone is one line, of the protocol.
    """
    honest, only_seeds = _with_repeat(sweep, honest_rows(frame)), sweep.lines.key == "seed"
    label = sweep.lines.key
    if only_seeds:
        honest = honest.assign(**{_REPEAT: honest["seed"], label: sweep.runs[0][1].source["protocol"]["name"]})
    parts: list[Part] = []
    for labels, part in sweep.parts_by_labels(honest):
        lines = []
        for name in part[label].unique() if only_seeds else sweep.lines.values:
            mine = part[part[label] == name]
            scores = {metric: _last_means(mine, metric) for metric in metrics_of(frame)}
            lines += [Line(str(name), scores)] if any(scores.values()) else []
        parts.append((labels, lines))
    return parts


def _last_means(rows: pd.DataFrame, metric: str) -> dict[Any, float]:
    """By seed the mean over the agents at the last evaluation."""
    if metric not in rows:
        return {}
    by_round = rows.dropna(subset=[metric]).groupby([_REPEAT, "round"])[metric].mean()
    return {str(seed): float(value) for seed, value in by_round.groupby(level=_REPEAT).last().items()}


# --- What the protocols of a sweep measured, by combination and round.


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
    by_round = pd.DataFrame(rows).groupby([*sweep.shown_keys, "measure", "round"], sort=False)["mean"]
    table = by_round.mean().reset_index()
    table.attrs["honest"] = has_byzantine_agents(frame)
    return table


# --- The feature spaces of the runs of a sweep: a row per run, a column per round.

MOST_RUNS = 12  # a map takes seconds


def features_grid(sweep: Sweep, folder: Path) -> list[list[Panel | None]]:
    """Maps of the first runs that kept features; empty if none did."""
    kept = [(labels, recipe) for labels, recipe in sweep.runs if recipe.spec.features_at][:MOST_RUNS]
    # Impossible combinations are skipped, and have no folder.
    done = [labels for labels, _ in kept if (folder / slug(labels)).is_dir()]
    found = [(sweep.words(labels), read_summary(folder / slug(labels))) for labels in done]
    rounds = sorted({space.round for _, summary in found for space in summary.features})
    grid: list[list[Panel | None]] = []
    for words, summary in found:
        spaces = {space.round: space for space in summary.features}
        names: Sequence[str] = summary.class_names
        row = [(f"{words}, round {t}", spaces[t], names) if t in spaces else None for t in rounds]
        grid += [row] if spaces else []
    return grid


# --- The average outputs of the runs of a sweep, by combination.

Labels = frozenset[tuple[str, str]]  # (field, label) of a combination


def outputs_grid(sweep: Sweep, folder: Path) -> list[list[Map | None]]:
    """A map per combination, over all seeds: a column per value of the last panel axis, a row per line.

    Runs that kept no outputs are left out; empty if none kept any.
    """
    found, panels = _found(sweep, folder), sweep.panels
    *down, across = axes = [*panels[:-1], sweep.lines, *panels[-1:]]
    grid: list[list[Map | None]] = []
    for chosen in itertools.product(*(axis.values for axis in down)):
        row: list[Map | None] = []
        for last in across.values:
            labelled = list(zip(axes, (*chosen, last), strict=True))
            runs = found.get(frozenset((axis.key, label) for axis, label in labelled), {})
            title = ", ".join(axis.words(label) for axis, label in labelled)
            row += [(title, pool(outputs), names) for names, outputs in runs.items()][:1] or [None]
        grid.append(row)
    kept = [place for place in range(len(across.values)) if any(row[place] for row in grid)]
    return [[row[place] for place in kept] for row in grid if any(row)]


def _found(sweep: Sweep, folder: Path) -> dict[Labels, dict[tuple[str, ...], list[Outputs]]]:
    """The outputs of the runs of each combination, by the names of the classes; seeds together."""
    found: dict[Labels, dict[tuple[str, ...], list[Outputs]]] = {}
    for labels, _ in sweep.runs:
        place = folder / slug(labels)
        summary = read_summary(place) if (place / OUTPUTS).exists() else None
        if summary is not None and summary.outputs is not None:
            # They are shown at every value of a field that the protocol of the run does not have.
            axes = (*sweep.panels, sweep.lines)
            values = [axis.values if labels[axis.key] == ABSENT else (labels[axis.key],) for axis in axes]
            for chosen in itertools.product(*values):
                shown = frozenset(zip(sweep.shown_keys, chosen, strict=True))
                found.setdefault(shown, {}).setdefault(summary.class_names, []).append(summary.outputs)
    return found
