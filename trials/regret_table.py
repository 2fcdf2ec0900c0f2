"""From the results of `trials.regret` to the regret of the advice, and to the prior of `codistill advise`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from codistill.experiments.advice import Option, choose
from codistill.experiments.advice_prior import (
    ALONE,
    FEATURES,
    NOTHING,
    AgentFacts,
    Gains,
    combined_gains,
    differences,
    expected_gains,
    features,
    measured_gains,
)
from codistill.experiments.advice_probe import FOLDS
from trials.regret_settings import build, cases

Prior = dict[str, dict[str, Any]]
_RIDGE = 3.0  # agents that all say that a coefficient is 0
_NEGLIGIBLE = -0.01  # an agent that loses more than a point counts as harmed
_WORST = -1.0  # a run that diverges counts as a loss of 100 points


@dataclass(frozen=True, eq=False)
class Measured:
    """One setting: true gains, and what the probing runs have measured."""

    name: str
    data: str
    facts: dict[str, AgentFacts]
    true: dict[str, dict[str, float]]  # by candidate and agent
    probes: dict[str, dict[str, np.ndarray]]  # by candidate and agent: contributions of held-out samples to the gain
    noise: dict[str, float]  # by candidate: the standard error of its true mean gain, since test samples are few
    seconds: float  # of all probing runs
    folds: dict[str, int]

    def gain(self, name: str) -> float:
        """The true mean gain of a candidate."""
        return 0.0 if name == ALONE else float(np.mean(list(self.true[name].values())))

    @property
    def is_probed(self) -> bool:
        """Whether its probing runs are known as well."""
        return self.seconds > 0

    @property
    def best(self) -> str:
        """The candidate with the largest true mean gain."""
        return max([ALONE, *self.true], key=self.gain)

    def harms(self, name: str) -> bool:
        """Whether some agent truly loses more than a point."""
        return name != ALONE and min(self.true[name].values()) < _NEGLIGIBLE


def measured_settings(rows: Iterable[Mapping[str, Any]]) -> list[Measured]:
    """All settings of which the true gains are known."""
    by_case: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        by_case.setdefault(row["case"], []).append(row)
    found = []
    for case in cases():
        known = by_case.get(case.name, [])
        runs = {(row["run"], row["candidate"]): row for row in known if "losses" in row}
        facts = next((row["facts"] for row in known if "facts" in row), None)
        if facts is None or ("truth", ALONE) not in runs:
            continue
        deviation = None
        if case.data == "linear":
            deviation = float(np.concatenate([agent.shard.targets for agent in build(case)[0].agents]).std())
        true, noise, probes, folds = {}, {}, {}, {}
        for name in dict.fromkeys(candidate for _, candidate in runs if candidate != ALONE):
            if ("truth", name) not in runs:
                continue
            gains = differences(_losses(runs, "truth", ALONE), _losses(runs, "truth", name), deviation)
            true[name] = {agent: max(_WORST, float(d.mean())) for agent, d in gains.items() if len(d)}
            noise[name] = float(np.sqrt(sum(d.var() / len(d) for d in gains.values() if len(d)))) / len(gains)
            own = [run for run, candidate in runs if candidate == name and run.startswith("fold")]
            parts = [_losses(runs, run, name) for run in sorted(own)]
            alone = [_losses(runs, run, ALONE) for run in sorted(own)]
            folds[name] = len(own)
            probes[name] = differences(_joined(alone), _joined(parts), deviation) if own else {}
        facts = {
            name: AgentFacts(**{**each, "counts": each["counts"] and tuple(each["counts"])})
            for name, each in facts.items()
        }
        seconds = sum(row["seconds"] for (run, _), row in runs.items() if run.startswith("fold"))
        found.append(Measured(case.name, case.data, facts, true, probes, noise, seconds, folds))
    return found


def _agent_facts(known: Mapping[str, Any]) -> AgentFacts:
    return AgentFacts(**{**known, "counts": None if known["counts"] is None else tuple(known["counts"])})


def _losses(runs: Mapping[tuple[str, str], Mapping[str, Any]], run: str, name: str) -> dict[str, np.ndarray]:
    return {agent: np.asarray(each) for agent, each in runs[run, name]["losses"].items()}


def _joined(parts: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {agent: np.concatenate([part[agent] for part in parts]) for agent in parts[0]}


def fit_prior(settings: Sequence[Measured]) -> Prior:
    """For each protocol a ridge regression of the agents' true gains on the facts, and how far off it is."""
    prior: Prior = {}
    for name in sorted({name for each in settings for name in each.true}):
        having = [each for each in settings if name in each.true]
        rows, gains, place = [], [], []
        for number, each in enumerate(having):
            for agent, row in features(each.facts).items():
                if agent in each.true[name]:
                    rows.append(row)
                    gains.append(np.clip(each.true[name][agent], -0.5, 0.5))
                    place.append(number)
        x, y, where = np.array(rows), np.array(gains), np.array(place)
        penalty = _RIDGE * np.diag([0.1, *[1.0] * (len(FEATURES) - 1)])
        coefficients = np.linalg.solve(x.T @ x + penalty, x.T @ y)
        off = y - x @ coefficients
        means = np.array([off[where == number].mean() for number in range(len(having))])
        lost = len(having) / max(len(having) - 2, 1)  # a fit to few settings looks better than it is
        around = off - means[where]
        prior[name] = {
            "coefficients": [round(float(value), 4) for value in coefficients],
            "setting": round(float(np.sqrt((means**2).mean() * lost + 0.01**2)), 4),
            "agent": round(float(np.sqrt((around**2).mean() * lost + 0.01**2)), 4),
            "settings": len(having),
        }
    return prior


def prior_text(prior: Prior) -> str:
    """As the file `advice_prior.toml`."""
    lines = [
        "# What a protocol brings an agent over staying alone: a regression of true gains on facts, and the",
        "# standard deviations of a setting's mean and of an agent around it. Made by: python -m trials.regret prior",
        f"# Coefficients: {', '.join(FEATURES)}.",
    ]
    for name, known in prior.items():
        lines += ["", f"[{name}]", *(f"{key} = {value}" for key, value in known.items())]
    return "\n".join(lines)


def advised(setting: Measured, prior: Prior | None, *, probes: bool = True) -> tuple[str, dict[str, Gains]]:
    """The recommended candidate, by a prior that has not seen this data set, and what was expected of each."""
    expected = {}
    for name in setting.true:
        seen = setting.probes[name] if probes else {}
        measured = measured_gains(seen, setting.folds[name], FOLDS) if seen else {}
        expected[name] = combined_gains(measured, expected_gains(name, setting.facts, prior))
    options = [Option(name, "", gains, folds=setting.folds[name] if probes else 0) for name, gains in expected.items()]
    options.append(Option(ALONE, "", Gains(dict.fromkeys(setting.facts, NOTHING), NOTHING), folds=int(probes)))
    return choose(options), expected


@dataclass(frozen=True)
class Line:
    """How one way to choose does over some settings."""

    gain: float  # true mean gain over staying alone
    regret: float  # behind the best candidate of each setting
    largest: float  # regret in any setting
    best: float  # share of settings in which it is at most a point behind the best
    harmed: float  # share of settings in which some agent truly loses more than a point
    worst: float  # loss of any agent in any setting


def line(settings: Sequence[Measured], chosen: Sequence[str]) -> Line:
    """The figures of one way to choose."""
    pairs = list(zip(settings, chosen, strict=True))
    gains = np.array([each.gain(name) for each, name in pairs])
    regrets = np.array([each.gain(each.best) for each in settings]) - gains
    worst = [0.0 if name == ALONE else min(each.true[name].values()) for each, name in pairs]
    return Line(
        gains.mean(),
        regrets.mean(),
        regrets.max(),
        float((regrets <= 0.01).mean()),
        float(np.mean([each.harms(name) for each, name in pairs])),
        min(worst),
    )


def choices(settings: Sequence[Measured]) -> dict[str, list[str]]:
    """What each way to choose takes in each setting; priors are fitted without the setting's data set."""
    priors = {data: fit_prior([each for each in settings if each.data != data]) for data in {s.data for s in settings}}
    fixed = sorted({name for each in settings for name in each.true})
    single = max(fixed, key=lambda name: np.mean([each.gain(_or_alone(each, name)) for each in settings]))
    return {
        "advise": [advised(each, priors[each.data])[0] for each in settings],
        "advise, from summaries alone": [advised(each, priors[each.data], probes=False)[0] for each in settings],
        "always fedmd": [_or_alone(each, "fedmd") for each in settings],
        f"always {single}, in hindsight the best": [_or_alone(each, single) for each in settings],
        "always alone": [ALONE for _ in settings],
        "the best of each setting": [each.best for each in settings],
    }


def _or_alone(setting: Measured, name: str) -> str:
    return name if name in setting.true else ALONE


def table(settings: Sequence[Measured]) -> str:
    """All of it as text."""
    made = choices(settings)
    head = f"{'':42}{'gain':>7}{'regret':>9}{'largest':>9}{'within 1':>10}{'harmed':>9}{'worst':>9}"
    lines = [
        f"{len(settings)} settings, {len({each.data for each in settings})} data sets; points of accuracy, for real "
        "targets % of their standard deviation.",
        "gain: over staying alone, mean of all agents and settings. regret: behind the best protocol of each setting,",
        "mean and largest. within 1: settings in which the choice is at most a point behind the best. harmed: settings",
        "in which some agent loses more than a point on its test samples. worst: the largest loss of any agent.",
        "",
        head,
    ]
    for name, chosen in made.items():
        lines.append(f"{name:42}{_cells(line(settings, chosen))}")
    labelled = [number for number, each in enumerate(settings) if each.data != "linear"]
    some = [settings[number] for number in labelled]
    lines += ["", f"The same for the {len(some)} settings with classes", ""]
    for name, chosen in made.items():
        lines.append(f"{name:42}{_cells(line(some, [chosen[number] for number in labelled]))}")
    lines += ["", "By data set: regret of advise, of always fedmd (where it cannot run: alone), of always alone", ""]
    for data in sorted({each.data for each in settings}):
        which = [number for number, each in enumerate(settings) if each.data == data]
        some = [settings[number] for number in which]
        figures = [line(some, [made[name][number] for number in which]).regret for name in _compared(made)]
        lines.append(f"{data:16}{len(some):4} settings" + "".join(f"{100 * figure:9.1f}" for figure in figures))
    lines += ["", f"Expected and true mean gains: {_coverage(settings)}"]
    seconds = [each.seconds for each in settings]
    lines += [
        "",
        f"Time of probing: {np.median(seconds):.0f} s in the median, {max(seconds):.0f} s at most (busy machine)",
    ]
    lines += ["", "Each setting: what was advised (true gain, of the agent that gains least), and what was best", ""]
    for each, name in zip(settings, made["advise"], strict=True):
        least = 0.0 if name == ALONE else min(each.true[name].values())
        lines.append(
            f"{each.name.removesuffix(' | seed 0'):62} {name:15}{100 * each.gain(name):+6.1f} ({100 * least:+6.1f})   "
            f"{each.best:15}{100 * each.gain(each.best):+6.1f}"
        )
    return "\n".join(lines)


def _coverage(settings: Sequence[Measured]) -> str:
    """How often a true gain is within one and two standard errors of what was expected after probing runs."""
    priors = {data: fit_prior([each for each in settings if each.data != data]) for data in {s.data for s in settings}}
    off = []
    for each in settings:
        for name, gains in advised(each, priors[each.data])[1].items():
            if each.folds[name]:
                error = np.hypot(gains.mean.error, each.noise[name])
                off.append(abs(each.gain(name) - gains.mean.mean) / error)
    within = [100 * float(np.mean(np.array(off) <= bound)) for bound in (1, 2)]
    return f"within one standard error in {within[0]:.0f} %, within two in {within[1]:.0f} % of {len(off)} cases."


def _compared(made: Mapping[str, Any]) -> list[str]:
    return [name for name in ("advise", "always fedmd", "always alone") if name in made]


def _cells(found: Line) -> str:
    return (
        f"{100 * found.gain:+7.1f}{100 * found.regret:9.1f}{100 * found.largest:9.1f}{100 * found.best:8.0f} %"
        f"{100 * found.harmed:7.0f} %{100 * found.worst:9.1f}"
    )


def by_partition(settings: Sequence[Measured]) -> str:
    """Mean true gains of the protocols by kind of partition."""
    names = sorted({name for each in settings for name in each.true})
    kinds: dict[str, list[Measured]] = {}
    for each in settings:
        kinds.setdefault(each.name.split(" | ")[1], []).append(each)
    lines = [f"{'':16}" + "".join(f"{name[:8]:>10}" for name in names)]
    for kind, some in sorted(kinds.items()):
        cells = []
        for name in names:
            gains = [each.gain(name) for each in some if name in each.true]
            cells.append(f"{100 * np.mean(gains):+8.1f}{len(gains):2}" if gains else f"{'-':>10}")
        lines.append(f"{kind:16}" + "".join(cells))
    return "\n".join(lines)
