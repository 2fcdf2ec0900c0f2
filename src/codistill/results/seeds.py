"""Scores over several seeds: mean, spread, a 95 % interval, and a paired test against another line.

Of n values x_1 .. x_n, one per seed, with the mean x̄ and the sample standard deviation s (divided by n - 1), the
interval is Student's, x̄ ± t s / √n, where t is the 97.5 % quantile with n - 1 degrees of freedom. With the few seeds
that runs have, a bootstrap would be too narrow: of n values it draws no more than these n.

Two lines are compared seed by seed: runs of the same seed have the same data, and start from the same models. The test
of their n differences d_i is the two-sided paired t-test, t = d̄ √n / s_d.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from codistill.core.errors import RecipeError, nearest
from codistill.core.text import flat, parse_toml
from codistill.results.agents import counted_lines, in_percent, mean_of_known
from codistill.results.scores import Score
from codistill.results.summary import Summary, gain_notes
from codistill.results.tables import AnyCell, Cell, Table

LEVEL = 0.95
FEWEST_PAIRS = 3
_EQUAL = 1e-9  # relative: differences that differ by less are equal up to rounding


@dataclass(frozen=True)
class Estimate:
    """A mean over n seeds; without spread and interval if n is 1."""

    n: int
    mean: float
    spread: float | None = None  # the sample standard deviation
    low: float | None = None  # the 95 % interval
    high: float | None = None

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate | None:
        """None of no values."""
        from scipy.stats import t

        n = len(values)
        if n < 2:
            return cls(n, values[0]) if n else None
        mean, spread = statistics.fmean(values), statistics.stdev(values)
        half = float(t.ppf((1 + LEVEL) / 2, n - 1)) * spread / math.sqrt(n)
        return cls(n, mean, spread, mean - half, mean + half)


def paired_p(differences: Sequence[float]) -> float | None:
    """The p-value of the two-sided paired t-test; None with fewer than 3 pairs, or if all differences are equal."""
    from scipy.stats import ttest_1samp

    if len(differences) < FEWEST_PAIRS or _all_equal(differences):
        return None
    return float(ttest_1samp(differences, 0.0).pvalue)


def _all_equal(differences: Sequence[float]) -> bool:
    return max(differences) - min(differences) <= _EQUAL * max(map(abs, differences))


@dataclass(frozen=True)
class Line:
    """What is compared, such as a protocol with its settings: of each score the value of each seed."""

    label: str
    scores: Mapping[str, Mapping[Any, float]]  # score -> seed -> mean over the agents
    runs: Sequence[str] = ()  # the titles of its runs

    @property
    def seeds(self) -> set[Any]:
        return {seed for by_seed in self.scores.values() for seed in by_seed}


def is_worth_a_table(lines: Iterable[Line], scores: Sequence[Score], over: str | None) -> bool:
    """Whether there is more to say than one number of one run per line."""
    return over is not None or len(scores) > 1 or any(len(line.seeds) > 1 for line in lines)


Part = tuple[Mapping[str, str], Sequence[Line]]  # what all these lines have in common: a heading and a value each


def seeds_table(
    parts: Sequence[Part], scores: Sequence[Score], over: str | None, *, what: str, title: str = "",
    notes: Sequence[str] = (),
) -> Table:  # fmt: skip
    """A row per line and score. `over`: the label of the line over which gains are tested; `what`: lines are."""
    several = len(scores) > 1  # one score is said once, in the title
    common = list(dict.fromkeys(heading for values, _ in parts for heading in values))
    left = [*common, what, *(["score"] if several else [])]
    right = ["n", "mean ± s", "95 % interval"]
    if over is not None:
        right += [f"gain over\n{over}", "its 95 % interval", "p", "pairs"]
    rows: list[list[AnyCell]] = []
    untested: dict[str, str] = {}  # lines without a p-value, and why
    for values, lines in parts:
        others = next((line.scores for line in lines if line.label == over), {})
        for line, score in itertools.product(lines, scores):
            by_seed = line.scores.get(score.name, {})
            named = [*(values.get(heading, "") for heading in common), line.label, *([score.words] if several else [])]
            count = Cell(str(len(by_seed)), len(by_seed))
            gains: list[AnyCell] = ["-"] * (len(right) - 3)
            if over is not None and line.label != over:
                gains, reason = _gain_cells(score, by_seed, others.get(score.name, {}))
                untested |= {line.label: reason} if reason else {}
            rows.append([*named, count, *_cells(score, Estimate.of(list(by_seed.values())), gain=False), *gains])
    title = title if several else ": ".join(filter(None, (title, scores[0].words)))
    how = _how_to_read([line for _, lines in parts for line in lines], scores, over, untested)
    align = "l" * len(left) + "r" * len(right)
    return Table([*left, *right], align, rows, title=title, notes=[*notes, *how])


def _gain_cells(score: Score, own: Mapping[Any, float], others: Mapping[Any, float]) -> tuple[list[AnyCell], str]:
    """The gains of the seeds that both lines have, and why there is no p-value."""
    gains = [gain for seed in own if (gain := score.gain(others.get(seed), own[seed])) is not None]
    p = paired_p(gains)
    cells = [*_cells(score, Estimate.of(gains), gain=True), _p_cell(p), Cell(str(len(gains)), len(gains))]
    if p is not None:
        return cells, ""
    return cells, f"pairs: {len(gains)}" if len(gains) < FEWEST_PAIRS else "all differences are equal"


def _how_to_read(
    lines: Sequence[Line], scores: Sequence[Score], over: str | None, untested: Mapping[str, str]
) -> list[str]:
    notes = [
        "n: seeds; s: sample standard deviation over them (n - 1); 95 % interval of the mean: Student's t with n - 1 "
        "degrees of freedom"
    ]
    if any(len(line.seeds) == 1 for line in lines):
        notes.append("one seed has neither s nor an interval")
    if over is None:
        return notes + [f"lower is better: {score.words}" for score in scores if not score.greater_is_better]
    notes.append(
        f"gain over {over}: differences of runs of the same seed (pairs); p: two-sided paired t-test, not corrected "
        "for several comparisons"
    )
    if untested:
        named = "; ".join(f"{label} ({reason})" for label, reason in untested.items())
        notes.append(f"no p-value, for which {FEWEST_PAIRS} pairs with unequal differences are needed: {named}")
    return notes + gain_notes(scores)


def _cells(score: Score, found: Estimate | None, *, gain: bool) -> list[AnyCell]:
    """'95.6 ± 0.2 %' and '95.2 to 96.0 %'; a file of numbers gets each number in a column of its own."""
    name = "gain" if gain else "mean"
    if found is None:
        blank = {name: None, f"{name}, s": None}, {f"{name}, 95 % low": None, f"{name}, 95 % high": None}
        return [Cell("-", parts=parts) for parts in blank]
    text, spread, interval = _number(score, found.mean, gain), "", "-"
    unit = "" if gain or not in_percent(score.name) else " %"
    if found.spread is not None and found.low is not None and found.high is not None:
        spread = f" ± {100 * found.spread:.1f}" if in_percent(score.name) else f" ± {found.spread:.2g}"
        interval = f"{_number(score, found.low, gain)} to {_number(score, found.high, gain)}{unit}"
    limits = {f"{name}, 95 % low": found.low, f"{name}, 95 % high": found.high}
    figures = {name: found.mean, f"{name}, s": found.spread}
    return [
        Cell(f"{text}{spread}{unit}", found.mean, worse=gain and found.mean < 0, parts=figures),
        Cell(interval, found.low, parts=limits),
    ]


def _number(score: Score, value: float, gain: bool) -> str:
    if in_percent(score.name):
        return f"{100 * value:+.1f}" if gain else f"{100 * value:.1f}"
    return f"{value:+.3g}" if gain else f"{value:.4g}"


def _p_cell(p: float | None) -> AnyCell:
    if p is None:
        return "-"
    return Cell("< 0.001" if p < 0.001 else f"{p:.3f}", p)


# --- The lines of runs in folders: runs that differ in their seeds alone are one line.

# What does not change the result of a run, and what its place is.
_NO_MATTER = ("data.dir", "runtime.kind", "runtime.workers", "ray.")
_MOST_NAMED = 3  # settings that tell lines apart


def lines_of(summaries: Sequence[Summary]) -> tuple[list[Line], list[str]]:
    """Runs by what they are but for the seed, and what must be said about them."""
    found: dict[str, dict[Any, Summary]] = {}
    settings: dict[str, dict[str, Any]] = {}
    notes = []
    for number, summary in enumerate(summaries):
        plain, seed = _identity(summary)
        key = json.dumps(plain, sort_keys=True, default=str) if seed is not None else f"run {number}"
        other = found.get(key, {}).get(seed)
        if other is not None and _values(other) == _values(summary):
            notes.append(f"{other.title}, {summary.title}: the same settings, seed and scores, counted once")
            continue
        if other is not None:  # such as without rounds over a network, where the same seed gives other scores
            notes.append(f"{other.title}, {summary.title}: other scores with the same settings and seed, not averaged")
            key = f"{key} {number}"
        found.setdefault(key, {})[seed] = summary
        settings.setdefault(key, plain)
    labels = _labels({key: next(iter(runs.values())) for key, runs in found.items()}, settings)
    scores = scores_in(summaries)
    lines = []
    for key, runs in found.items():
        by_seed = {seed: _values(summary) for seed, summary in runs.items()}
        names = {score.name: {s: v[score.name] for s, v in by_seed.items() if score.name in v} for score in scores}
        lines.append(Line(labels[key], names, [summary.title for summary in runs.values()]))
        rounds = sorted({summary.evaluated for summary in runs.values()})
        if len(rounds) > 1:
            notes.append(f"{labels[key]}: scores of different rounds ({', '.join(map(str, rounds))})")
    return lines, notes


def over_seeds_table(summaries: Sequence[Summary], over: str | None = None) -> Table | None:
    """Runs by what they are but for the seed; None if there is no more to say than what each run says.

    `over`: the label of the line over which gains are tested, or the title of one of its runs.
    """
    lines, notes = lines_of(summaries)
    scores = scores_in(summaries)
    if over is not None:
        over = _label_of(over, lines)
    if not is_worth_a_table(lines, scores, over):
        return None
    return seeds_table([({}, lines)], scores, over, what="runs", title="means over seeds", notes=notes)


def scores_in(summaries: Sequence[Summary]) -> list[Score]:
    """Every score of some runs, once."""
    return list({score.name: score for summary in summaries for score in summary.shown_scores}.values())


def _label_of(over: str, lines: Sequence[Line]) -> str:
    """The label of the line that is called so, or has a run that is."""
    found = [line.label for line in lines if over == line.label or over in line.runs]
    if not found:
        labels = [line.label for line in lines]
        raise RecipeError("--gain-over must name one of the lines, or a run of it.", f"'{over}'", nearest(over, labels))
    return found[0]


def _identity(summary: Summary) -> tuple[dict[str, Any], Any]:
    """What a run is but for its seed, by the names of the settings; and its seed, None if it is not known."""
    facts = summary.facts
    tables = parse_toml(facts["recipe"]) if "recipe" in facts else {"protocol": facts.get("protocol", summary.protocol)}
    settings = {
        name: value
        for name, value in flat(tables)
        if name != "seed" and not any(name == other or name.startswith(other) for other in _NO_MATTER)
    }
    return settings | {"agents": summary.agents}, facts.get("seed")


def _values(summary: Summary) -> dict[str, float]:
    """Each score after the run: the mean over the agents that count."""
    means = {
        score.name: mean_of_known([line.together for line in counted_lines(summary.lines(score))])
        for score in summary.shown_scores
    }
    return {name: value for name, value in means.items() if value is not None}


def _labels(firsts: Mapping[str, Summary], settings: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """The protocol of each line; of several lines of one protocol with the settings in which they differ."""
    labels: dict[str, str] = {}
    for key, summary in firsts.items():
        alike = [settings[other] for other, first in firsts.items() if first.protocol == summary.protocol]
        names = sorted({name for each in alike for name in each if any(o.get(name) != each[name] for o in alike)})
        named = [name for name in names if name != "agents" or len(names) == 1]
        said = [f"{name.rpartition('.')[2]}={settings[key].get(name, '-')}" for name in named if name != "agents"]
        is_clear = len(named) <= _MOST_NAMED and len(alike) > 1 and said
        labels[key] = ", ".join([summary.protocol, *(said if is_clear else [])])
    for label in {label for label in labels.values() if list(labels.values()).count(label) > 1}:
        for key in [key for key in labels if labels[key] == label]:
            labels[key] = f"{label} ({firsts[key].title})"
    return labels
