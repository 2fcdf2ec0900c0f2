"""How much an agent's answer takes from what it was taught: a weight between its own model and the taught one.

The answer is the mixture q_w = (1 - w) p_own + w p_taught, where p_taught is first adapted to how frequent the classes
are at the agent. The weight is learned on the agent's held-out samples, by exponential weights (a Gibbs posterior) over
a grid of values,

    ρ(w) ∝ π(w) exp(-n r(w)),    r(w): mean loss of q_w on n held-out samples,    answer: q_w̄ with w̄ = Σ ρ(w) w.

π has at least half of its mass at w = 0, and the more the fewer samples there are, so what they say must first outweigh
the agent's own model. Both losses are convex in w, hence n r(w̄) ≤ n r(0) + log 1/π(0) ≤ n r(0) + log 2: on the held-out
samples the answer is never worse than the own model by more than log 2 / n nats. See docs/safeguard.md for what follows
on new samples.
"""

from __future__ import annotations

import numpy as np

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
    mine, theirs = (_smoothed(answers)[rows, labels] for answers in (own, taught))
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


def _smoothed(answers: np.ndarray) -> np.ndarray:
    smoothed: np.ndarray = (1.0 - _UNIFORM) * as_probabilities(answers) + _UNIFORM / answers.shape[1]
    return smoothed
