"""Aggregation of many agents' outputs, plain and Byzantine-robust.

An agent learns from the *others*: each of N agents gets the aggregate of the N - 1 other ones. Every kind here
computes all N of these at once, from sums and ranks over all agents with one of them removed.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import numpy as np
from scipy.special import log_softmax, logsumexp

from codistill.protocol import Hub

# mean: of outputs before the softmax, as printed. The others first bring outputs to log-probabilities, since an
# output before the softmax is known up to a constant only, and ranks and weights would depend on it.
PLAIN_KINDS = ("mean", "trimmed", "median")
KINDS = (*PLAIN_KINDS, "probabilities", "confidence", "coverage")
# The help of the setting `trim`, wherever there is one.
TRIM = (
    "share of m values that 'trimmed' leaves out at each end, k = ⌈trim m⌉ < m/2: "
    "it tolerates k Byzantine agents, 'median' ⌈m/2⌉ - 1"
)

_LEAST_WEIGHT = 1e-3  # no weight is zero, so that a sum of weights never is


@dataclass(frozen=True, kw_only=True)
class Aggregation:
    """An aggregate of arrays of shape (N, samples, columns) over the first axis.

    `trimmed` is the coordinate-wise mean without the k largest and the k smallest of m values, k = min(⌈trim m⌉,
    ⌈m/2⌉ - 1); `median`, the coordinate-wise median, is the same with k = ⌈m/2⌉ - 1. While at most k of the m agents
    are Byzantine, every entry stays between the smallest and the largest honest value (Yin et al., ICML 2018); with
    k + 1 it need not. m is N - 1 in `of_others`, N in `of_all`: a share `trim` of all N agents is tolerated by both,
    wherever that leaves a majority of the m. `probabilities` is the mean of ψ(f, E), in which a confident agent
    counts no more than any other. `confidence` weights each agent's output for a
    sample by 1 - H(p)/log K; `coverage` weights its entry for a class by the share of that class among its samples.
    `outputs` is False for values that are not outputs before a softmax, such as features. `hub`: who aggregates; it
    remarks, once for each m, where `trimmed` or `median` are of so few values that they leave none out.
    """

    kind: str = "mean"
    trim: float = 0.2
    temperature: float = 1.0
    outputs: bool = True
    hub: Hub | None = None

    def of_others(self, values: np.ndarray, coverage: np.ndarray | None = None) -> np.ndarray:
        """For each of N ≥ 2 agents, the aggregate of all others: (N, samples, columns)."""
        f, weights = self._prepare(values, coverage)
        if self.kind in ("trimmed", "median"):
            answer = _trimmed_of_others(f, self._cut(len(f) - 1))
        else:
            answer = (np.sum(weights * f, axis=0) - weights * f) / (np.sum(weights, axis=0) - weights)
        return self._finish(answer, values.dtype)

    def of_all(self, values: np.ndarray, coverage: np.ndarray | None = None) -> np.ndarray:
        """The aggregate of all N ≥ 1 agents: (samples, columns)."""
        f, weights = self._prepare(values, coverage)
        if self.kind in ("trimmed", "median"):
            cut = self._cut(len(f))
            answer = np.sort(f, axis=0)[cut : len(f) - cut].mean(axis=0)
        else:
            answer = np.sum(weights * f, axis=0) / np.sum(weights, axis=0)
        return self._finish(answer, values.dtype)

    def _prepare(self, values: np.ndarray, coverage: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """What is summed or ranked, and its weights: (N, 1, 1), (N, samples, 1) or (N, 1, columns)."""
        f = values.astype(np.float64)
        equal = np.ones((len(f), 1, 1))
        if self.kind == "mean" or not self.outputs:
            return f, equal
        if self.kind == "probabilities":
            return np.exp(log_softmax(f / self.temperature, axis=-1)), equal  # (2): p_n = ψ(f_n, E)
        f = log_softmax(f, axis=-1)
        if self.kind == "confidence":
            # 1 - H(p)/log K, where H(p) = -Σ p log p is at most log K
            entropy = -np.sum(np.exp(f) * f, axis=-1, keepdims=True)
            return f, np.maximum(1 - entropy / np.log(max(f.shape[-1], 2)), _LEAST_WEIGHT)
        if self.kind == "coverage" and coverage is not None:
            return f, np.maximum(coverage.astype(np.float64)[:, None, :], _LEAST_WEIGHT)
        return f, equal

    def tolerated(self, count: int) -> int:
        """k: how many of `count` values are left out at each end, so how many of their senders may be Byzantine."""
        if self.kind not in ("trimmed", "median"):
            return 0
        middle = (count - 1) // 2  # ⌈m/2⌉ - 1: one or two values stay
        # ⌈trim m⌉; rounded before, since 0.07 · 100 is a little more than 7 in floating point
        return middle if self.kind == "median" else min(ceil(round(self.trim * count, 9)), middle)

    def _cut(self, count: int) -> int:
        """The same; where that is none, though some should be left out, the hub says so."""
        cut = self.tolerated(count)
        if not cut and self.hub is not None and (self.kind == "median" or self.trim > 0):
            said = self.hub.state.setdefault("too few to leave out", [])
            if count not in said:
                said.append(count)
                agents = f"{count} agent{'s' * (count > 1)}"
                does = f"aggregate = '{self.kind}' of {agents} leaves nobody out"
                self.hub.remark(f"{does}: against 1 Byzantine agent it needs 3.")
        return cut

    def _finish(self, answer: np.ndarray, dtype: np.dtype) -> np.ndarray:
        if self.kind == "probabilities":
            # an output whose ψ(·, E) is this mean; the sum of all less one's own may miss zero by a rounding
            answer = self.temperature * np.log(np.maximum(answer, 1e-12))
            answer = answer - self.temperature * logsumexp(answer / self.temperature, axis=-1, keepdims=True)
        return answer.astype(dtype)


def _trimmed_of_others(values: np.ndarray, cut: int) -> np.ndarray:
    """For each n, the mean of all values but the n-th, less the `cut` largest and smallest of them.

    Of the M = N - 1 others in order, those from `cut` to M - cut - 1 stay. Sorted with the n-th among them,
    at rank r, these are the values from `cut` to M - cut but one: the n-th itself where it is among them,
    else the one at the end on its side, which is the one at r held to that range.
    """
    order = np.sort(values, axis=0)
    rank = np.argsort(np.argsort(values, axis=0, kind="stable"), axis=0)
    last = len(values) - 1 - cut
    left_out = np.take_along_axis(order, np.clip(rank, cut, last), axis=0)
    answer: np.ndarray = (np.sum(order[cut : last + 1], axis=0) - left_out) / (last - cut)
    return answer
