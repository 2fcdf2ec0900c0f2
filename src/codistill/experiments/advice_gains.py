"""Expected gains with their uncertainty: what the probing runs say, and what was to be expected before."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from codistill.experiments.advice_prior import Prior

Losses = Mapping[str, np.ndarray]  # of each agent and held-out sample: 0-1 loss, or squared error for real values

_POOLED = 4  # samples that the variance over all agents counts for in that of one agent
_LARGEST_ERROR = 4.0  # of one sample, in standard deviations of the targets: a single one must not hide the others


@dataclass(frozen=True)
class Gain:
    """An expected gain and its standard error, as a share: 0.01 is a point."""

    mean: float
    error: float

    def above(self, value: float, factor: float = 1.0) -> bool:
        """Whether it is above a value by so many standard errors."""
        return self.mean - factor * self.error > value

    def below(self, value: float, factor: float = 1.0) -> bool:
        """Whether it is below a value by so many standard errors."""
        return self.mean + factor * self.error < value


NOTHING = Gain(0.0, 0.0)


@dataclass(frozen=True)
class Gains:
    """What the agents are expected to gain with one protocol over staying alone."""

    agents: dict[str, Gain]
    mean: Gain

    @property
    def worst(self) -> tuple[str, Gain]:
        """The agent with the smallest expected gain."""
        return min(self.agents.items(), key=lambda item: item[1].mean)


def differences(alone: Losses, together: Losses, deviation: float | None) -> dict[str, np.ndarray]:
    """For every agent and held-out sample what it contributes to the gain; the mean over samples is the gain.

    For classes the difference of the 0-1 losses. For real values the gain is (RMSE alone - RMSE together) / deviation
    of the targets, and a - b = (a² - b²) / (a + b).
    """
    found = {}
    for name in alone:
        a, b = alone[name], together[name]
        if deviation is None:
            found[name] = a - b
            continue
        most = (_LARGEST_ERROR * deviation) ** 2
        a, b = np.minimum(a, most), np.minimum(b, most)
        both = math.sqrt(a.mean()) + math.sqrt(b.mean()) if len(a) else 0.0
        found[name] = (a - b) / (both * deviation) if both else np.zeros(len(a))
    return found


def measured_gains(found: Mapping[str, np.ndarray], done: int, of: int, shortened: float = 1.0) -> dict[str, Gain]:
    """Of each agent the mean and its standard error after some folds; without held-out samples the error is infinite.

    Folds share most of their training samples, so their mean varies more than that of independent runs. Nadeau and
    Bengio (2003): the variance of the mean of J folds is (1/J + held out / trained on) times that of one. A run that is
    `shortened` to a part of its rounds tells less of the whole: its variance counts as many times.

    With few samples that hardly differ, their variance says little: that of an agent is drawn towards the variance
    over all agents, and that one counts a difference of +1 and one of -1 that were not seen.
    """
    overlap = shortened * (1 + done / (of - 1))  # J (1/J + 1/(k - 1)) for J of k folds
    means = {name: float(d.mean()) if len(d) else 0.0 for name, d in found.items()}
    squares = {name: float(((d - means[name]) ** 2).sum()) for name, d in found.items()}
    pooled = (sum(squares.values()) + 2) / (sum(len(d) for d in found.values()) + 2)
    gains = {}
    for name, d in found.items():
        variance = (squares[name] + _POOLED * pooled) / (len(d) + _POOLED)
        gains[name] = Gain(means[name], math.sqrt(overlap * variance / len(d)) if len(d) else math.inf)
    return gains


def combined_gains(measured: Mapping[str, Gain], prior: Prior) -> Gains:
    """The posterior of a normal model in two levels: the mean gain of all agents, then each agent around it.

    mean ~ N(m, setting²), m the mean of the prior gains m_i; gain_i ~ N(mean + m_i - m, agent²); what is measured of
    agent i ~ N(gain_i, error_i²).
    """
    names = list(prior.gains)
    before = float(np.mean([prior.gains[name] for name in names]))
    seen = {name: measured[name] for name in names if name in measured and math.isfinite(measured[name].error)}
    mean = Gain(before, prior.setting)
    if seen:
        # What was measured of some agents only tells of the mean of all up to the spread between agents.
        missing = 1 - len(seen) / len(names)
        variance = sum(gain.error**2 for gain in seen.values()) / len(seen) ** 2 + missing * prior.agent**2 / len(seen)
        offset = float(np.mean([gain.mean - prior.gains[name] + before for name, gain in seen.items()]))
        mean = _product(mean, Gain(offset, math.sqrt(variance)))
    agents = {}
    for name in names:
        around = Gain(mean.mean + prior.gains[name] - before, math.hypot(prior.agent, mean.error))
        agents[name] = _product(around, seen[name]) if name in seen else around
    return Gains(agents, Gain(float(np.mean([gain.mean for gain in agents.values()])), mean.error))


def _product(first: Gain, second: Gain) -> Gain:
    """The product of two normal densities."""
    a, b = max(first.error, 1e-9) ** -2, max(second.error, 1e-9) ** -2
    return Gain((a * first.mean + b * second.mean) / (a + b), (a + b) ** -0.5)
