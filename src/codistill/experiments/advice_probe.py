"""Short runs on parts of the agents' own training data: how well each would answer on what it has held out."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from codistill.agent import Agent
from codistill.data.shard import Shard
from codistill.experiments.advice_candidates import Setting, copy_of, raw_samples
from codistill.experiments.advice_models import ProbedAgent, SentModels
from codistill.protocol import Protocol
from codistill.randomness import derive, generator
from codistill.results.records import RoundEnded

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
    owned = {agent.name: _fold_of_rows(agent.shard, count, seed) for agent in agents}
    return [
        {name: (np.flatnonzero(fold != k), np.flatnonzero(fold == k)) for name, fold in owned.items()}
        for k in range(count)
    ]


def _fold_of_rows(shard: Shard, count: int, seed: int) -> np.ndarray:
    """Of every sample the fold in which it is held out; -1: in none."""
    order = generator(seed, shard.owner, "folds").permutation(len(shard))
    if shard.labels is not None:
        order = order[np.argsort(shard.labels[order], kind="stable")]
    fold = np.empty(len(shard), dtype=int)
    fold[order] = np.arange(len(shard)) % count
    if shard.labels is not None:
        fold[np.bincount(shard.labels)[shard.labels] == 1] = -1
    if len(shard) < 2:
        fold[:] = -1
    return fold


def run_probe(
    setting: Setting,
    protocol: Protocol,
    parts: Mapping[str, Part],
    seed: int,
    *,
    rounds: int | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> ProbeRun:
    """Run a protocol on the training parts, and measure every agent's answers on what it has held out."""
    rounds = rounds or setting.rounds
    agents = [copy_of(agent, parts[agent.name][0]) for agent in setting.agents]
    if setting.compression is None:  # with it, bytes depend on what is in a message
        models = SentModels()
        agents = [ProbedAgent(agent, models) for agent in agents]
    began = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about convergence and the like: those of the run that is advised are shown
        federation = setting.federation(agents, protocol, derive(setting.seed, "advice", seed) >> 1)
        watch = [_Deadline(should_stop)] if should_stop else []
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
    answers: np.ndarray = trained.decision_function(raw_samples(agent)[held]).astype(np.float64)
    if agent.shard.labels is not None:
        wrong: np.ndarray = answers.argmax(axis=1) != agent.shard.labels[held]
        return wrong.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        squared: np.ndarray = ((answers - agent.shard.targets[held]) ** 2).sum(axis=1)
    return np.where(np.isfinite(squared), squared, _DIVERGED)


class _Deadline:
    """Ends a run after a round if there is no time left."""

    def __init__(self, should_stop: Callable[[], bool]) -> None:
        self._should_stop = should_stop

    def round_ended(self, record: RoundEnded) -> bool:
        """Whether to stop."""
        return self._should_stop()
