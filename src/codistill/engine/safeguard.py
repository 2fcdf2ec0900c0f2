"""The safeguard: an agent's answer is formed from its own model and what it was taught, by its own held-out samples.

It stands around every protocol. Before the first round a part of the agent's shard is held out. A copy of its model
is trained alone, on all of its samples, exactly as the baseline. After each of its rounds the agent weighs both models
on the held-out samples. Nothing of this is sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from codistill.core.errors import DataError, RecipeError
from codistill.core.rng import derive, seed_libraries
from codistill.core.settings import Settings, check_settings, setting
from codistill.data.shard import Shard
from codistill.data.split import hold_out
from codistill.engine.host import BEGIN, Host
from codistill.nodes.agent import Agent, twin_of
from codistill.nodes.faults import Faults
from codistill.nodes.record import record_of
from codistill.protocol import Protocol
from codistill.topology import Topology

_NEGLIGIBLE = 0.005  # a weight below is 0: the agent answers with its own model, to the bit


@dataclass(frozen=True, kw_only=True)
class Safeguard(Settings):
    """[safeguard]: how an agent weighs what it was taught against its own model."""

    share: float = setting(
        0.25, "share of an agent's samples that is held out from the protocol, to judge by", above=0, at_most=0.5
    )
    shrinkage: float = setting(
        1.0,
        "how strongly few held-out samples draw the answer to the agent's own model; 1: all weights above 0 alike",
        at_least=1,
        at_most=100,
    )
    unseen: float = setting(
        0.01,
        "share of its held-out samples that an agent may lose for knowledge of classes it does not hold; 0: none",
        at_least=0,
        at_most=1,
    )

    def __post_init__(self) -> None:
        check_settings(self, "safeguard")


def as_safeguard(given: Any) -> Safeguard | None:
    """What a user may write: true, false, or the settings."""
    if given is None or isinstance(given, Safeguard):
        return given
    if isinstance(given, bool):
        return Safeguard() if given else None
    raise RecipeError("safeguard must be true, false, or its settings.", f"{given!r}"[:80], "Write safeguard = true.")


class SafeguardedAnswer:
    """An agent's answer from its own model and what it was taught: all that is needed of a safeguard to predict."""

    def __init__(
        self, own: Agent, weight: float, threshold: float | None, seen: np.ndarray, factors: np.ndarray | None
    ) -> None:
        self.own, self.weight, self.seen = own, weight, seen
        self.factors = factors  # of the classes, by which taught answers are adapted; None: they are as they are
        self.threshold = threshold  # of a taught answer that names a class which the agent does not hold
        self.ready = True  # whether there is an own model to answer with

    def answer(self, taught: np.ndarray, alone: Protocol, x: np.ndarray) -> np.ndarray:
        with record_of(self.own).computing():
            own = alone.predict(self.own, x)
        answers = mixture(own, adapted(taught, self.factors), self.weight)
        return with_unseen(answers, taught, self.seen, self.threshold)


class AgentSafeguard(SafeguardedAnswer):
    """The safeguard of one agent: its own model, its held-out samples, and the weight that they chose."""

    def __init__(self, settings: Safeguard, agent: Agent) -> None:
        whole = agent.shard
        kept, held = _split(whole, settings.share, agent)
        self.settings = settings
        self.held = whole.part(held)
        agent.shard = whole.part(kept)
        seen = np.ones(whole.classes, bool) if whole.labels is None else _counts(whole) > 0
        # Two models that learn alone: one from all samples, and one to judge by, from those that are not held out.
        super().__init__(_copy(agent, whole), 0.0, None, seen, None)
        self._judged = _copy(agent, agent.shard)
        self.models = self.own, self._judged
        self._phase, self.ready = BEGIN, False  # the next one in which they learn

    def end_round(self, agent: Agent, t: int, protocol: Protocol, alone: Protocol) -> None:
        """Let the own model catch up with round t, as the baseline does; then choose the weight anew."""
        names = (agent.name,)
        hosts = [Host([model], alone, Faults((), names, agent.seed)) for model in self.models]
        for phase in range(self._phase, t + 1):
            for host in hosts:
                host.run(phase, names)
        self._phase, self.ready = t + 1, True
        if agent.learner.ready and len(self.held):
            own, taught = self._predict(alone, self._judged, self.held.x), self._predict(protocol, agent, self.held.x)
            self._weigh(own, taught, agent.shard)

    def _weigh(self, own: np.ndarray, taught: np.ndarray, shard: Shard) -> None:
        if self.held.labels is None:
            losses = squared_losses(own, taught, self.held.targets)
        else:
            self.factors = class_factors(taught, _counts(shard) / len(shard))
            losses = log_losses(own, adapted(taught, self.factors), self.held.labels)
            self.threshold = unseen_threshold(taught, self.seen, self.settings.unseen)
        weight = posterior_mean(losses, self.settings.shrinkage)
        self.weight = weight if weight >= _NEGLIGIBLE else 0.0

    def _predict(self, protocol: Protocol, agent: Agent, x: np.ndarray) -> np.ndarray:
        seed_libraries(agent.seed, agent.name, "safeguard")
        with record_of(agent).computing():
            return protocol.predict(agent, x)

    def dump(self) -> dict[str, Any]:
        return {
            "phase": self._phase, "weight": self.weight, "threshold": self.threshold, "factors": self.factors,
            "own": record_of(self.own).dump(), "judged": record_of(self._judged).dump(),
        }  # fmt: skip

    def offload(self) -> None:
        for model in self.models:
            record_of(model).offload()
        self.held.offload()

    def resume(self, saved: dict[str, Any]) -> None:
        self._phase, self.weight, self.threshold = saved["phase"], saved["weight"], saved["threshold"]
        self.factors, self.ready = saved["factors"], self._phase > BEGIN
        record_of(self.own).resume(saved["own"])
        record_of(self._judged).resume(saved["judged"])


def _split(shard: Shard, share: float, agent: Agent) -> tuple[np.ndarray, np.ndarray]:
    """Rows for the protocol, and rows to judge by: of every class in proportion, and at least one for the protocol."""
    strata = np.zeros(len(shard), dtype=int) if shard.labels is None else shard.labels
    try:
        return hold_out(strata, share, derive(agent.seed, agent.name, "safeguard") >> 1, agent.name)
    except DataError:  # too few samples to hold any out
        return np.arange(len(shard)), np.arange(0)


def _counts(shard: Shard) -> np.ndarray:
    assert shard.labels is not None
    return np.bincount(shard.labels, minlength=shard.classes)


def _copy(agent: Agent, shard: Shard) -> Agent:
    """An agent for training alone, with an untouched copy of the model."""
    twin = twin_of(agent)
    twin.seed, twin.classes, twin.topology = agent.seed, agent.classes, Topology.silent((agent.name,))
    twin.shard, record_of(twin).class_mix = shard, None
    return twin


# --- How much an agent's answer takes from what it was taught: a weight between its own model and the taught one.

GRID = np.linspace(0.0, 1.0, 21)
_FEW = 5  # held-out samples with which a quarter of the prior is above w = 0; with many it is half
_UNIFORM = 0.01  # share of the uniform distribution in a probability before its logarithm: losses are bounded
_PSEUDO_SAMPLES, _STEPS = 20.0, 20  # of each class; of the adaptation to the agent's class frequencies
_THRESHOLDS = (0.0, 0.5, 0.7, 0.9)  # of the taught model's probability of a class that the agent does not hold


def prior(shrinkage: float, samples: int) -> np.ndarray:
    """π on the grid: n / 2(n + 5) spread over it, decreasing as (1 - w)^(shrinkage - 1); the rest at 0."""
    spread: np.ndarray = (1.0 - GRID + 0.025) ** (shrinkage - 1.0)  # 0.025: half a step, so that w = 1 is possible
    above = 0.5 * samples / (samples + _FEW)
    masses: np.ndarray = above * spread / spread.sum()
    masses[0] += 1.0 - above
    return masses


def posterior_mean(losses: np.ndarray, shrinkage: float) -> float:
    """w̄ from the losses (grid, n) of the held-out samples."""
    samples = losses.shape[1]
    if not samples:  # what cannot be judged is not taken
        return 0.0
    exponent = np.log(prior(shrinkage, samples)) - losses.sum(axis=1)
    masses = np.exp(exponent - exponent.max())
    return float(masses @ GRID / masses.sum())


def class_factors(taught: np.ndarray, frequencies: np.ndarray) -> np.ndarray:
    """Factors b of the classes, so that the taught answers name each as often as the agent's own labels do.

    What others teach carries how frequent the classes are among *their* samples. With prior correction (Saerens et al.
    2002) the answer is q_c ∝ b_c p_c, where b solves Σ_i q_ic = n f_c, f: the frequencies of the agent's own labels.
    From b = 1 on, 20 steps b_c ← b_c (n f_c + 20) / (Σ_i q_ic + 20): with many samples of a class they reach the
    solution, with few they stay near 1. Only the inputs of the held-out samples are used, not their labels.
    """
    samples, classes = taught.shape
    given, factors, more = as_probabilities(taught), np.ones(classes), _PSEUDO_SAMPLES
    for _ in range(_STEPS):
        factors = factors * (samples * frequencies + more) / (_scaled(given * factors).sum(axis=0) + more)
    return factors


def adapted(taught: np.ndarray, factors: np.ndarray | None) -> np.ndarray:
    """The taught answers with the factors of the classes; as they are without factors."""
    if factors is None:
        return taught
    return _scaled(as_probabilities(taught) * factors).astype(taught.dtype, copy=False)


def log_losses(own: np.ndarray, taught: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """-log q_w(y) for every w of the grid and every sample: (grid, n), at most log(classes / 0.01)."""
    rows = np.arange(len(labels))
    mine, theirs = (
        (1.0 - _UNIFORM) * as_probabilities(answers)[rows, labels] + _UNIFORM / answers.shape[1]
        for answers in (own, taught)
    )
    losses: np.ndarray = -np.log((1.0 - GRID)[:, None] * mine + GRID[:, None] * theirs)
    return losses


def squared_losses(own: np.ndarray, taught: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Gaussian log losses |y - q_w|² / 2σ² of real values, σ² the own model's mean squared error: (grid, n)."""
    if not len(targets):
        return np.zeros((len(GRID), 0))
    mine, theirs = (
        np.nan_to_num(part.astype(np.float64), nan=1e30, posinf=1e30, neginf=-1e30) for part in (own, taught)
    )
    variance = np.mean((targets - mine) ** 2, axis=0)
    scale = np.where(variance > 0, variance, 1.0)
    return np.stack([np.sum((targets - (1 - w) * mine - w * theirs) ** 2 / (2 * scale), axis=1) for w in GRID])


def unseen_threshold(taught: np.ndarray, seen: np.ndarray, tolerance: float) -> float | None:
    """From which probability on the taught model may name a class that the agent does not hold; None: never.

    The held-out samples are all of classes that the agent holds, so there each such answer is wrong. The lowest
    threshold is chosen at which their share is within the tolerance: (k + 1/2) / (n + 1) for k of n samples,
    so that a few samples without a wrong answer do not count as proof.
    """
    if seen.all() or not len(taught) or tolerance == 0.0:
        return None
    likeliest = _unseen_probability(taught, seen)
    lost = {at: (np.sum(likeliest >= at) + 0.5) / (len(taught) + 1) for at in _THRESHOLDS}
    return next((at for at, share in lost.items() if share <= tolerance), None)


def mixture(own: np.ndarray, taught: np.ndarray, weight: float) -> np.ndarray:
    """q_w = (1 - w) p_own + w p_taught; the own answers as they are where w = 0."""
    if weight == 0.0:
        return own
    usable = np.where(np.isfinite(taught), taught, own)
    return ((1.0 - weight) * own + weight * usable).astype(own.dtype, copy=False)


def with_unseen(answers: np.ndarray, taught: np.ndarray, seen: np.ndarray, threshold: float | None) -> np.ndarray:
    """The answers; the taught ones where those name a class that the agent does not hold, surely enough."""
    if threshold is None:
        return answers
    passed = _unseen_probability(taught, seen) >= threshold
    return np.where(passed[:, None], taught, answers).astype(answers.dtype, copy=False)


def _unseen_probability(taught: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """The probability of the likeliest class where that is one that the agent does not hold, and else -1."""
    shares = as_probabilities(taught)
    likeliest: np.ndarray = np.where(seen[shares.argmax(axis=1)], -1.0, shares.max(axis=1))
    return likeliest


def as_probabilities(answers: np.ndarray) -> np.ndarray:
    """Answers as probabilities: what is not positive counts as nothing, and rows are scaled to add up to 1."""
    positive = np.clip(np.nan_to_num(answers.astype(np.float64), posinf=1e30), 1e-12, 1e30)
    return _scaled(positive)


def _scaled(positive: np.ndarray) -> np.ndarray:
    scaled: np.ndarray = positive / positive.sum(axis=1, keepdims=True)
    return scaled
