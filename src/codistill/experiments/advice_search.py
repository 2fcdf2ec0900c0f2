"""Probing runs within a time limit: all candidates on a first fold, on the next ones those that may still be best."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from codistill.errors import CodistillError
from codistill.experiments.advice_candidates import ALONE, FITTED, Candidates, Setting
from codistill.experiments.advice_gains import Gains, combined_gains, differences, measured_gains
from codistill.experiments.advice_prior import Prior
from codistill.experiments.advice_probe import Part, ProbeRun, folds, run_probe
from codistill.protocol import Protocol

FOLDS = 4
_DISCARD = 1.5  # standard errors by which a candidate must be behind the best one to be dropped
_WORTHWHILE = 0.005  # a candidate that cannot be expected to bring even half a point is dropped as well
_COST = 3.0  # of a protocol, in times of training alone: a guess, to choose how many rounds a probing run has
_FEWEST_ROUNDS = 0.5  # of the rounds of a run: with fewer, networks answer as if hardly trained
_FEWEST_SAMPLES = 150  # of an agent
_OVERTIME = 1.5  # the first fold, in which every candidate is seen once, may take so many times the limit

Tell = Callable[[str], None]


def silent(text: str) -> None:
    """Tell nobody about the progress."""


@dataclass
class Findings:
    """What the probing runs have brought so far."""

    rounds: int  # of a probing run
    samples: int  # of the largest agent in the probing runs
    runs: dict[str, list[ProbeRun]] = field(default_factory=dict)  # by candidate or baseline; one per fold, in order
    gains: dict[str, Gains] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)  # candidates whose probing run ended with an error
    seconds: float = 0.0
    interrupted: bool = False

    def sent(self, name: str) -> float | None:
        """Bytes that an agent sends in a round, on average; None: there was no probing run."""
        return float(np.mean([run.sent for run in self.runs[name]])) if name in self.runs else None

    def seconds_per_round(self, name: str) -> float | None:
        """The time of a round of all agents in one process; None: there was no probing run."""
        return float(np.mean([run.seconds / run.rounds for run in self.runs[name]])) if name in self.runs else None


class Search:
    """Probes candidates fold by fold."""

    def __init__(
        self, setting: Setting, candidates: Candidates, priors: Mapping[str, Prior], seconds: float, tell: Tell = silent
    ) -> None:
        self._began = time.monotonic()
        self._candidates, self._priors, self._seconds, self._tell = candidates, priors, seconds, tell
        self._whole = setting
        self.findings = Findings(setting.rounds, max(len(agent.shard) for agent in setting.agents))
        self._estimate()
        # Where time runs out in the first fold, those that are expected to be best have been seen.
        self._left = self._promising(sorted(priors, key=lambda name: -self.findings.gains[name].mean.mean))
        self._setting = self._affordable()

    def run(self) -> Findings:
        """All folds, or as many as there is time for."""
        left = self._left
        for number, split in enumerate(folds(self._setting.agents, FOLDS, self._setting.seed)):
            self._run_fold(number, split, left)
            self._estimate()
            left = self._promising([name for name in left if len(self.findings.runs.get(name, [])) == number + 1])
            if not left or self.findings.interrupted or self._spent > self._seconds:
                break
        self.findings.seconds = self._spent
        return self.findings

    def _affordable(self) -> Setting:
        """Fewer rounds, then fewer samples, where a fold of all candidates would take too long."""
        setting, findings = self._whole, self.findings
        one = _seconds_of_a_round(setting, self._candidates.baselines[ALONE])
        work = len(self._candidates.baselines) + _COST * len(self._left)
        allowed = self._seconds / work / max(one, 1e-6)  # rounds of training alone
        findings.rounds = int(min(setting.rounds, max(math.ceil(_FEWEST_ROUNDS * setting.rounds), allowed)))
        if allowed < findings.rounds:
            findings.samples = min(
                findings.samples, max(_FEWEST_SAMPLES, int(findings.samples * allowed / findings.rounds))
            )
        return replace(setting.limited_to(findings.samples), rounds=findings.rounds)

    @property
    def _spent(self) -> float:
        return time.monotonic() - self._began

    def _run_fold(self, number: int, split: Mapping[str, Part], left: list[str]) -> None:
        limit = self._seconds * (_OVERTIME if number == 0 else 1)
        protocols: dict[str, Protocol] = {**self._candidates.baselines}
        protocols |= {name: self._candidates.protocols[name] for name in left}
        for place, (name, protocol) in enumerate(protocols.items(), 1):
            is_baseline = name in self._candidates.baselines
            if self._spent > limit and not (is_baseline and number == 0):
                return
            self._tell(
                f"fold {number + 1} of {FOLDS}: {name} ({place} of {len(protocols)}), "
                f"{self._spent:.0f} of {self._seconds:.0f} s"
            )
            try:
                run = run_probe(
                    self._setting,
                    protocol,
                    split,
                    1 + number,
                    should_stop=None if is_baseline else lambda: self._spent > limit,
                )
            except Exception as error:  # whatever a model does with fewer samples
                if is_baseline:
                    raise
                said = f"{error.must} Found: {error.found}" if isinstance(error, CodistillError) else f"{error}"
                self.findings.failed[name] = f"its probing run failed: {said}"[:300]
                self.findings.gains.pop(name, None)  # left out: there is nothing to expect of it
                continue
            if run.complete:
                self.findings.runs.setdefault(name, []).append(run)
            elif is_baseline or self._spent <= limit:
                self.findings.interrupted = True
                return

    def _estimate(self) -> None:
        """Gains of all candidates from the folds that both they and the baseline have done."""
        findings, deviation = self.findings, None
        if not self._whole.has_labels:
            targets = np.concatenate([agent.shard.targets for agent in self._whole.agents])
            deviation = float(targets.std()) or 1.0
        for name, prior in self._priors.items():
            runs, alone = findings.runs.get(name, []), findings.runs.get(self._baseline(name), [])
            both = min(len(runs), len(alone))
            measured = {}
            if both:
                found = differences(_together(alone[:both]), _together(runs[:both]), deviation)
                measured = measured_gains(found, both, FOLDS, shortened=self._whole.rounds / findings.rounds)
            if name not in findings.failed:
                findings.gains[name] = combined_gains(measured, prior)

    def _baseline(self, name: str) -> str:
        """What a candidate is compared with: in whole runs the better of the two ways to train alone.

        In shortened runs the baseline with as much training: else what a protocol gains by training longer would count.
        """
        if self.findings.rounds < self._whole.rounds:
            return self._candidates.baseline_of(name)
        trained = {key: self.findings.runs.get(key, []) for key in self._candidates.baselines}
        both = min(len(runs) for runs in trained.values())
        if FITTED not in trained or not both:
            return ALONE
        return min(trained, key=lambda key: _mean_loss(trained[key][:both]))

    def _promising(self, names: list[str]) -> list[str]:
        """Without those that are behind another candidate, or bring nothing, by more than their uncertainty."""
        gains = {name: self.findings.gains[name].mean for name in names if name in self.findings.gains}
        best = max([_WORTHWHILE, *(gain.mean - gain.error for gain in gains.values())])
        return [name for name, gain in gains.items() if gain.mean + _DISCARD * gain.error >= best]


def _seconds_of_a_round(setting: Setting, alone: Protocol) -> float:
    """Of training alone; measured on a part of the samples."""
    few = setting.limited_to(_FEWEST_SAMPLES)
    split = {agent.name: (np.arange(len(agent.shard)), np.arange(0)) for agent in few.agents}
    share = sum(len(agent.shard) for agent in few.agents) / sum(len(agent.shard) for agent in setting.agents)
    # The shorter of two: the first one also loads libraries.
    return min(run_probe(replace(few, rounds=1), alone, split, 0).seconds for _ in range(2)) / share


def _together(runs: list[ProbeRun]) -> dict[str, np.ndarray]:
    return {name: np.concatenate([run.losses[name] for run in runs]) for name in runs[0].losses}


def _mean_loss(runs: list[ProbeRun]) -> float:
    return float(np.mean([losses.mean() for losses in _together(runs).values() if len(losses)]))
