"""The outputs of the agents at the end of a run: their average by true class, how often each class was predicted for
which, and where the agents disagree.

Taken from the last evaluation, on the full test set; for classification only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from codistill.core.errors import MessageError
from codistill.wire.codec import decode, encode

View = dict[str, np.ndarray]  # of one agent: "mean" (K, K) and, where it is kept, "chosen" (samples,)

MOST_CLASSES = 100
MOST_ANSWERS = 20_000_000  # agents x samples whose classes are compared
MOST_ENTRIES = 1_000_000  # agents x classes x classes that are kept by agent, so that the file stays small
_UNSURE = 1e-3  # by how much probabilities in single precision may miss a sum of one


@dataclass(frozen=True, eq=False)
class Outputs:
    """Average outputs of the honest agents. A class without test samples has NaN in its row."""

    round: int  # rounds done
    agents: tuple[str, ...]  # those that could answer
    samples: np.ndarray  # (K,) test samples of each class
    mean: np.ndarray  # (K, K) mean over the agents; rows: true class, columns: output
    by_agent: np.ndarray | None  # (agents, K, K), unless that is too much to keep
    disagreement: np.ndarray | None  # (K,) share of pairs of agents that answer differently; None: not compared
    # (agents, K, K) test samples by true class (rows) and predicted class (columns), unless that is too much to keep;
    # zeros for an agent whose predicted classes are unknown
    confusion: np.ndarray | None = None

    @property
    def classes(self) -> int:
        return len(self.samples)

    @property
    def mean_disagreement(self) -> float | None:
        """The share of pairs of agents that answer differently, over all test samples."""
        if self.disagreement is None:
            return None
        there = self.samples > 0
        return float(np.average(self.disagreement[there], weights=self.samples[there]))

    def encode(self) -> bytes:
        arrays = {"samples": self.samples, "mean": self.mean}
        arrays |= {} if self.by_agent is None else {"by_agent": self.by_agent}
        arrays |= {} if self.disagreement is None else {"disagreement": self.disagreement}
        arrays |= {} if self.confusion is None else {"confusion": self.confusion}
        return encode(arrays, {"round": self.round, "agents": list(self.agents)})

    @classmethod
    def decode(cls, data: bytes) -> Outputs:
        """From a file; a `MessageError` if it is none."""
        arrays, values = decode(data, finite=False, header_limit=len(data), packed=False)
        done, agents = values.get("round"), values.get("agents")
        shapes = {name: array.shape for name, array in arrays.items()}
        k = shapes.get("samples", (0,))[:1]
        wanted = {"samples": k, "mean": k + k, "disagreement": k}
        if isinstance(agents, list):
            wanted["by_agent"] = wanted["confusion"] = (len(agents), *k, *k)
        fits = {"samples", "mean"} <= shapes.keys() and all(wanted.get(name) == shapes[name] for name in shapes)
        if not fits or k in ((), (0,)) or type(done) is not int or not isinstance(agents, list):
            raise MessageError(
                "Arrays of outputs must have matching shapes.", f"{shapes}"[:200], "Write the file again."
            )
        confusion = arrays.get("confusion")
        if confusion is not None and not _counts_all(confusion, arrays["samples"]):
            raise MessageError(
                "A confusion matrix must count every test sample once.",
                f"{confusion.dtype}, other sums than 'samples'",
                "Write the file again.",
            )
        optional = (arrays.get("by_agent"), arrays.get("disagreement"), confusion)
        return cls(done, tuple(agents), arrays["samples"], arrays["mean"], *optional)


def _counts_all(confusion: np.ndarray, samples: np.ndarray) -> bool:
    known = confusion[confusion.any(axis=(1, 2))]
    return confusion.dtype == np.uint32 and bool((known.sum(axis=2) == samples).all())


def view(answers: np.ndarray, y: np.ndarray, *, probabilistic: bool, agents: int) -> View | None:
    """What is kept of one agent's answers, if they are classes and not too many; `agents`: how many answer."""
    classes = answers.shape[1]
    if y.ndim != 1 or classes > MOST_CLASSES:
        return None
    chosen = answers.argmax(axis=1)
    if not probabilistic or not are_probabilities(answers):
        # Real values are no probabilities, and a softmax does not make them any: what counts is the class they name.
        answers = np.eye(classes)[chosen]
    # M[c, k] = mean of the output k over the test samples of class c
    mean = np.full((classes, classes), np.nan)
    for c in np.unique(y):
        mean[c] = answers[y == c].mean(axis=0, dtype=np.float64)
    kept: View = {"mean": mean}
    if agents * len(y) <= MOST_ANSWERS:
        kept["chosen"] = chosen.astype(np.uint8)
    return kept


def are_probabilities(answers: np.ndarray) -> bool:
    """Whether answers are at least 0 and add up to 1; those of an ensemble of probabilistic models may not."""
    if not len(answers):
        return True
    return bool(answers.min() >= -_UNSURE and np.abs(answers.sum(axis=1) - 1).max() <= _UNSURE)


def collect(done: int, views: Mapping[str, View], y: np.ndarray) -> Outputs | None:
    """The views of all agents as one; None if there are none."""
    if not views:
        return None
    by_agent = np.stack([view["mean"] for view in views.values()])
    classes = by_agent.shape[-1]
    chosen = [view["chosen"] for view in views.values() if "chosen" in view]
    compared = len(chosen) == len(views) > 1
    small = by_agent.size <= MOST_ENTRIES
    nothing = np.zeros((classes, classes), np.uint32)
    counts = [confusion_matrix(view["chosen"], y, classes) if "chosen" in view else nothing for view in views.values()]
    return Outputs(
        done,
        tuple(views),
        np.bincount(y, minlength=classes),
        by_agent.mean(axis=0),
        by_agent if small else None,
        disagreement(np.stack(chosen), y, classes) if compared else None,
        np.stack(counts) if chosen and small else None,
    )


def confusion_matrix(chosen: np.ndarray, y: np.ndarray, classes: int) -> np.ndarray:
    """(K, K) C[c, k] = how many test samples of class c are predicted as class k."""
    counts = np.bincount(y * classes + chosen, minlength=classes * classes)
    return counts.reshape(classes, classes).astype(np.uint32)


def disagreement(chosen: np.ndarray, y: np.ndarray, classes: int) -> np.ndarray:
    """(K,) by true class: the share of pairs of agents that choose different classes, mean over the samples."""
    agents = len(chosen)
    alike = np.zeros(len(y))
    for k in range(classes):
        count = np.count_nonzero(chosen == k, axis=0)
        alike += count * (count - 1)  # twice the pairs that both choose k
    apart = 1 - alike / (agents * (agents - 1))
    samples = np.bincount(y, minlength=classes)
    total = np.bincount(y, weights=apart, minlength=classes)
    shares: np.ndarray = np.divide(total, samples, out=np.full(classes, np.nan), where=samples > 0)
    return shares


def pool(several: Sequence[Outputs]) -> Outputs:
    """Outputs of like runs, such as those of several seeds, as one: each test sample of each run counts alike."""
    samples = np.stack([each.samples for each in several])
    total = samples.sum(axis=0)

    def average(parts: list[np.ndarray]) -> np.ndarray:
        weights = samples.reshape(samples.shape + (1,) * (parts[0].ndim - 1))
        summed = (weights * np.nan_to_num(np.stack(parts))).sum(axis=0)
        whole = np.broadcast_to(weights.sum(axis=0), summed.shape)
        pooled: np.ndarray = np.divide(summed, whole, out=np.full(summed.shape, np.nan), where=whole > 0)
        return pooled

    apart = [each.disagreement for each in several if each.disagreement is not None]
    return Outputs(
        several[0].round,
        several[0].agents,
        total,
        average([each.mean for each in several]),
        None,
        average(apart) if len(apart) == len(several) else None,
    )


# --- The features of the agents on some common test samples after a round, for a map of the feature space.


@dataclass(frozen=True, eq=False)
class FeatureSpace:
    """Features of the same test samples by agent, after one round."""

    round: int  # rounds done
    samples: np.ndarray  # (n,) places of the samples in the common test set
    labels: np.ndarray | None  # (n,) their classes; None: real values
    by_agent: dict[str, np.ndarray]  # (n, d) of each agent that has features and a model; d may differ

    def encode(self) -> bytes:
        arrays = {"samples": self.samples} | ({} if self.labels is None else {"labels": self.labels})
        arrays |= {_key(place): features for place, features in enumerate(self.by_agent.values())}
        return encode(arrays, {"round": self.round, "agents": list(self.by_agent)})

    @classmethod
    def decode(cls, data: bytes) -> FeatureSpace:
        """From a file; a `MessageError` if it is none."""
        arrays, values = decode(data, finite=False, limit=len(data), header_limit=len(data), packed=False)
        done, agents = values.get("round"), values.get("agents")
        shapes = {name: array.shape for name, array in arrays.items()}
        n = shapes.get("samples", ())
        names = agents if isinstance(agents, list) and all(isinstance(name, str) for name in agents) else []
        keys = [_key(place) for place in range(len(names))]
        fits = len(n) == 1 and shapes.keys() - {"labels"} == {"samples", *keys} and shapes.get("labels", n) == n
        fits = fits and all(len(shapes[key]) == 2 and shapes[key][:1] == n for key in keys)
        if not fits or type(done) is not int or names != agents:
            raise MessageError(
                "Arrays of features must have matching shapes.", f"{shapes}"[:200], "Write the file again."
            )
        by_agent = {name: arrays[key] for name, key in zip(names, keys, strict=True)}
        return cls(done, arrays["samples"], arrays.get("labels"), by_agent)


def _key(place: int) -> str:
    return f"agent-{place}"
