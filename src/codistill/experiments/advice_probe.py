"""Short runs on parts of the agents' own training data: how well each would answer on what it has held out."""

from __future__ import annotations

import copy
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from codistill.core.errors import CodistillError
from codistill.core.rng import derive, generator
from codistill.experiments.advice_prior import (
    ALONE,
    FITTED,
    Candidates,
    Gains,
    Prior,
    Setting,
    combined_gains,
    copy_of,
    differences,
    measured_gains,
    raw_samples,
)
from codistill.learners.ability import Ability
from codistill.learners.portable import ReceivedModel, checked_predictions
from codistill.nodes.agent import Agent
from codistill.nodes.record import record_of
from codistill.protocol import Protocol
from codistill.wire.message import Message

_DIVERGED = 1e30  # squared error of a prediction that is not finite
Rows = np.ndarray
Part = tuple[Rows, Rows]  # of one agent: samples to train on, samples that are held out


@dataclass(frozen=True, eq=False)
class ProbeRun:
    """What a short run brought: for each agent a loss for each held-out sample, and the costs."""

    losses: dict[str, np.ndarray]  # (n,): 0 or 1 for classes, the squared error for real values
    sent: float  # bytes that an agent sends in a round, on average
    seconds: float
    rounds: int
    complete: bool


def folds(agents: Sequence[Agent], count: int, seed: int) -> list[dict[str, Part]]:
    """For every fold the part that each agent trains on and the part that it holds out.

    Classes are spread evenly over the folds. What an agent has a single sample of stays in training: without it the
    model would not know the class at all.
    """
    owned = {}  # of every sample the fold in which it is held out; -1: in none
    for agent in agents:
        labels, size = agent.shard.labels, len(agent.shard)
        order = generator(seed, agent.shard.owner, "folds").permutation(size)
        if labels is not None:
            order = order[np.argsort(labels[order], kind="stable")]
        fold = np.empty(size, dtype=int)
        fold[order] = np.arange(size) % count
        if labels is not None:
            fold[np.bincount(labels)[labels] == 1] = -1
        if size < 2:
            fold[:] = -1
        owned[agent.name] = fold
    return [
        {name: (np.flatnonzero(fold != k), np.flatnonzero(fold == k)) for name, fold in owned.items()}
        for k in range(count)
    ]


def run_probe(
    setting: Setting,
    protocol: Protocol,
    parts: Mapping[str, Part],
    seed: int,
    should_stop: Callable[[], bool] | None = None,
) -> ProbeRun:
    """Run a protocol on the training parts, and measure every agent's answers on what it has held out."""
    rounds = setting.rounds
    agents = [copy_of(agent, parts[agent.name][0]) for agent in setting.agents]
    if setting.compression is None:  # with it, bytes depend on what is in a message
        models: list[Any] = []
        agents = [ProbedAgent(agent, models) for agent in agents]
    began = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about convergence and the like: those of the run that is advised are shown
        federation = setting.federation(agents, protocol, derive(setting.seed, "advice", seed) >> 1)
        watch = [] if should_stop is None else [SimpleNamespace(round_ended=lambda _: should_stop())]
        result = federation.run(
            rounds, runtime="simulation", alone=False, progress=False, evaluate_every=rounds, observers=watch
        )
        losses = {}
        for agent in setting.agents:
            held, trained = parts[agent.name][1], result.agents[agent.name]
            losses[agent.name] = _losses(trained, agent, held) if len(held) else np.empty(0)
    seconds = time.monotonic() - began
    sent = float(np.mean([row["sent"] for row in result.rows])) if result.rows else 0.0
    return ProbeRun(losses, sent, seconds, rounds, not result.interrupted)


def _losses(trained: Any, agent: Agent, held: Rows) -> np.ndarray:
    record, rows = record_of(agent), raw_samples(agent)[held]
    asked = rows if record.frame is None else record.frame.decode(rows)
    answers: np.ndarray = trained.answers(asked).astype(np.float64)
    if agent.shard.labels is not None:
        wrong: np.ndarray = answers.argmax(axis=1) != agent.shard.labels[held]
        return wrong.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        squared: np.ndarray = ((answers - agent.shard.targets[held]) ** 2).sum(axis=1)
    return np.where(np.isfinite(squared), squared, _DIVERGED)


# --- Models in probing runs stay in this process: most of the time would go into encoding, checking and opening them.


class ProbedAgent(Agent):
    """An agent of a probing run. Its answers are those of any other agent.

    `models`: those that the agents of a run have sent. A message holds the number of one, and as many bytes as it has.
    """

    def __init__(self, agent: Agent, models: list[Any]) -> None:
        of = record_of(agent)
        super().__init__(agent.name, agent.learner, *of.data, prepare=of.prepare, choices=agent.choices)
        record_of(self).named = of.named
        if of.has_names:
            record_of(self).use_columns_of(of)
        self._models = models
        if Ability.PORTABLE in self.learner.abilities:
            self.learner.export = self._exporter(self.learner)  # type: ignore[method-assign]

    def _exporter(self, learner: Any) -> Callable[[], Message]:
        """In place of a learner's `export`, which is called once, for the bytes of a model."""
        export, size = learner.export, 0

        def keep() -> Message:
            nonlocal size
            size = size or len(export().encoded)
            self._models.append(copy.deepcopy(learner))
            return Message.of(model=len(self._models) - 1, bytes=np.zeros(size, dtype=np.uint8))

        return keep

    def _sent(self, message: Message) -> Any:
        return self._models[int(message.plain["model"])]

    def open_model(self, sender: str, message: Message) -> Any:
        model = self._sent(message)
        if sender == self.name:
            return model
        return ReceivedModel(model, self.shard.x, self.shard.classes, record_of(self).prepared.complete)

    def predict_with(self, sender: str, data: bytes, x: np.ndarray) -> np.ndarray:
        model, complete = self._sent(Message.decode(data)), record_of(self).prepared.complete
        return checked_predictions(model, x, self.shard.classes, complete)


# --- Probing runs within a time limit: all candidates on a first fold, on the next ones those that may still be best.

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


class Search:
    """Probes candidates fold by fold."""

    def __init__(
        self, setting: Setting, candidates: Candidates, priors: Mapping[str, Prior], seconds: float, tell: Tell = silent
    ) -> None:
        self._began = time.monotonic()
        self._candidates, self._priors, self._seconds, self._tell = candidates, priors, seconds, tell
        self._whole = setting
        self.findings = Findings(setting.rounds, max(len(agent.shard) for agent in setting.agents))

    def run(self) -> Findings:
        self._estimate()
        # Where time runs out in the first fold, those that are expected to be best have been seen.
        left = self._promising(sorted(self._priors, key=lambda name: -self.findings.gains[name].mean.mean))
        setting = self._affordable(len(left))
        for number, split in enumerate(folds(setting.agents, FOLDS, setting.seed)):
            self._run_fold(setting, number, split, left)
            self._estimate()
            left = self._promising([name for name in left if len(self.findings.runs.get(name, [])) == number + 1])
            if not left or self.findings.interrupted or self._spent > self._seconds:
                break
        self.findings.seconds = self._spent
        return self.findings

    def _affordable(self, count: int) -> Setting:
        """Fewer rounds, then fewer samples, where a fold of so many candidates would take too long."""
        setting, findings = self._whole, self.findings
        # How long a round of training alone takes is measured on a part of the samples.
        few = setting.limited_to(_FEWEST_SAMPLES)
        split = {agent.name: (np.arange(len(agent.shard)), np.arange(0)) for agent in few.agents}
        share = sum(len(agent.shard) for agent in few.agents) / sum(len(agent.shard) for agent in setting.agents)
        alone, once = self._candidates.baselines[ALONE], replace(few, rounds=1)
        # The shorter of two: the first one also loads libraries.
        one = min(run_probe(once, alone, split, 0).seconds for _ in range(2)) / share
        work = len(self._candidates.baselines) + _COST * count
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

    def _run_fold(self, setting: Setting, number: int, split: Mapping[str, Part], left: list[str]) -> None:
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
                should_stop = None if is_baseline else lambda: self._spent > limit
                run = run_probe(setting, protocol, split, 1 + number, should_stop=should_stop)
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
        losses = {key: _together(runs[:both]).values() for key, runs in trained.items()}
        return min(losses, key=lambda key: np.mean([each.mean() for each in losses[key] if len(each)]))

    def _promising(self, names: list[str]) -> list[str]:
        """Without those that are behind another candidate, or bring nothing, by more than their uncertainty."""
        gains = {name: self.findings.gains[name].mean for name in names if name in self.findings.gains}
        best = max([_WORTHWHILE, *(gain.lowest for gain in gains.values())])
        return [name for name, gain in gains.items() if gain.mean + _DISCARD * gain.error >= best]


def _together(runs: list[ProbeRun]) -> dict[str, np.ndarray]:
    return {name: np.concatenate([run.losses[name] for run in runs]) for name in runs[0].losses}
