"""What to expect of a protocol before anything is run: from what the agents may tell of their data and models.

The coefficients in `advice_prior.toml` are those of a ridge regression of true gains on the facts below, over the
settings of `python -m trials.regret`, which also writes the file.
"""

from __future__ import annotations

import math
import tomllib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import numpy as np

from codistill.experiments.advice_candidates import Setting, raw_samples
from codistill.learners.ability import Ability

FEATURES = ("intercept", "own samples", "others' samples", "label skew", "input shift", "gradients", "real targets")
# `python -m trials.regret` has not been run with these: they are expected to bring what the protocol does that they are
# made of, as uncertain as a protocol of one's own.
LIKE = {
    "crs": "fedproto", "fedbn": "fedavg", "feddistill": "fedavg", "feddkd": "fedavg", "fedgen": "fedavg",
    "fedmax": "fedavg", "fedprox": "fedavg",
}  # fmt: skip
UNKNOWN = {"coefficients": [0.0] * len(FEATURES), "setting": 0.1, "agent": 0.1}  # of a protocol of one's own


@dataclass(frozen=True)
class AgentFacts:
    """What is known of an agent: its number of samples, those of each class, and its model's kind."""

    samples: int
    counts: tuple[int, ...] | None  # None: real-valued targets
    gradients: bool
    shift: float | None = None  # 0: inputs like the others'; 1: they can be told apart without error; None: not known


@dataclass(frozen=True)
class Prior:
    """Expected gains of the agents with one protocol, and how far off such expectations are."""

    gains: dict[str, float]
    setting: float  # standard deviation of the mean gain of a setting around what is expected
    agent: float  # of an agent's gain around that of its setting


def facts_of(setting: Setting) -> dict[str, AgentFacts]:
    """The facts of agents whose data are at hand."""
    shifts = input_shifts(setting)
    return {
        agent.name: AgentFacts(
            samples=len(agent.shard),
            counts=None if agent.class_mix is None else tuple(int(count) for count in agent.class_mix),
            gradients=Ability.GRADIENTS in agent.learner.abilities,
            shift=shifts[agent.name],
        )
        for agent in setting.agents
    }


def expected_gains(protocol: str, facts: Mapping[str, AgentFacts], table: Mapping[str, Any] | None = None) -> Prior:
    """The expectation for one protocol."""
    priors = read_prior() if table is None else table
    known = priors.get(protocol, UNKNOWN)
    if protocol not in priors and LIKE.get(protocol) in priors:
        known = UNKNOWN | {"coefficients": priors[LIKE[protocol]]["coefficients"]}
    coefficients = np.asarray(known["coefficients"])
    gains = {name: float(row @ coefficients) for name, row in features(facts).items()}
    return Prior(gains, float(known["setting"]), float(known["agent"]))


@cache
def read_prior() -> dict[str, Any]:
    """The fitted coefficients, by protocol."""
    text = (resources.files("codistill.experiments") / "advice_prior.toml").read_text("utf-8")
    known: dict[str, Any] = tomllib.loads(text)
    return known


def features(facts: Mapping[str, AgentFacts]) -> dict[str, np.ndarray]:
    """For every agent the numbers that its expected gain depends on."""
    rows = {}
    for name, mine in facts.items():
        others = [each for other, each in facts.items() if other != name]
        theirs = sum(each.samples for each in others)
        classes = 1 if mine.counts is None else max(len(mine.counts), 1)
        rows[name] = np.array(
            [
                1.0,
                math.log10(max(mine.samples, 1) / classes) - 1,  # samples of a class: 0 for ten
                math.log10(max(theirs, 1) / max(mine.samples, 1)) - 0.5,
                label_skew(mine, others),
                0.0 if mine.shift is None else mine.shift - 0.5,  # unknown: as in an average setting
                float(mine.gradients),
                float(mine.counts is None),
            ]
        )
    return rows


def label_skew(mine: AgentFacts, others: list[AgentFacts]) -> float:
    """Total variation distance between an agent's mix of classes and that of all others: 0 equal, 1 disjoint."""
    theirs = [each.counts for each in others if each.counts is not None]
    if mine.counts is None or not theirs:
        return 0.0
    own, pooled = np.asarray(mine.counts, dtype=float), np.sum(theirs, axis=0, dtype=float)
    return float(np.abs(own / max(own.sum(), 1) - pooled / max(pooled.sum(), 1)).sum() / 2)


def input_shifts(setting: Setting, most: int = 200) -> dict[str, float]:
    """How well a small forest tells an agent's inputs from those of the others; in a simulation only.

    2 AUC - 1 on samples that a tree has not seen: 0 for equal distributions, 1 for disjoint ones.
    """
    from sklearn.ensemble import ExtraTreesClassifier
    from sklearn.metrics import roc_auc_score

    samples = [raw_samples(agent)[:most] for agent in setting.agents]
    x = np.concatenate([each.reshape(len(each), -1) for each in samples])
    owner = np.concatenate([[agent.name] * len(agent.shard.x[:most]) for agent in setting.agents])
    if len(setting.agents) < 2:
        return {agent.name: 0.0 for agent in setting.agents}
    forest = ExtraTreesClassifier(
        100, min_samples_leaf=3, bootstrap=True, oob_score=True, random_state=0, class_weight="balanced"
    )
    shifts = {}
    for name in dict.fromkeys(owner):
        mine = owner == name
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # a sample that every tree has seen: it counts as undecided
            seen = np.nan_to_num(forest.fit(x, mine).oob_decision_function_[:, 1], nan=0.5)
        shifts[str(name)] = float(np.clip(2 * roc_auc_score(mine, seen) - 1, 0, 1))
    return shifts
