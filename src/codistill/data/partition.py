"""Partitions: how the samples of one data set are divided among agents, each sample to exactly one."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from codistill.errors import DataError, RecipeError, nearest
from codistill.settings import Settings, check_settings, setting

ATTEMPTS = 1000


@dataclass(frozen=True, eq=False)
class Samples:
    """What a partition uses: labels (or real-valued targets), and the ids of each sample."""

    y: np.ndarray
    ids: Mapping[str, np.ndarray]

    def __len__(self) -> int:
        return len(self.y)

    def by_class(self, rng: np.random.Generator) -> dict[int, np.ndarray]:
        """The shuffled sample indices of every class that occurs, in the order of the labels."""
        if self.y.ndim != 1:
            raise DataError(
                "A partition by classes must have one label for each sample.",
                f"real-valued targets of shape {self.y.shape}",
                "Use the partition iid, unequal or by.",
            )
        order = rng.permutation(len(self.y))
        return {int(label): order[self.y[order] == label] for label in np.unique(self.y)}


@dataclass(frozen=True)
class Partition(Settings):
    """A way to divide samples; all of its randomness comes from the generator given to `split`."""

    def __post_init__(self) -> None:
        check_settings(self, "partition")

    def split(
        self,
        y: np.ndarray,
        agents: int,
        rng: np.random.Generator,
        ids: Mapping[str, np.ndarray] | None = None,
        classes: int | None = None,
    ) -> list[np.ndarray]:
        """The sorted sample indices of each agent.

        `y` holds labels, or real-valued targets in two dimensions, which only partitions that look at
        no classes accept. `classes`, where given, bounds the labels.
        """
        y = np.asarray(y)
        if not 1 <= agents <= len(y):
            raise DataError(
                "A partition must have at least one agent, and at least one sample for each agent.",
                f"{agents} agents and {len(y)} samples",
                "Change the number of agents or of samples.",
            )
        if classes is not None and y.ndim == 1:
            _check_range(y, classes)
        parts = [np.sort(part) for part in self._deal(Samples(y, ids or {}), agents, rng)]
        for agent, part in enumerate(parts):
            if len(part) == 0:
                raise DataError(
                    "Every agent of a partition must get at least one sample.",
                    f"none for agent {agent} (counted from 0) of {agents}, by {self}",
                    "Use fewer agents, more samples, or a more even partition.",
                )
        return parts

    @abstractmethod
    def _deal(self, samples: Samples, agents: int, rng: np.random.Generator) -> list[np.ndarray]:
        """The sample indices of each agent, in any order."""


@dataclass(frozen=True)
class Iid(Partition):
    """Shuffled, and cut into parts of equal size."""

    def _deal(self, samples: Samples, agents: int, rng: np.random.Generator) -> list[np.ndarray]:
        return np.array_split(rng.permutation(len(samples)), agents)


@dataclass(frozen=True)
class Unequal(Partition):
    """Shuffled (or sorted), and cut into parts of given or of log-normal random sizes."""

    weights: tuple[float, ...] | None = setting(None, "the agents' shares, one positive number per agent")
    spread: float = setting(1.0, "without weights: σ of the normal logarithm of the agents' shares", at_least=0.0)
    sort: bool = setting(False, "divide in the order of the labels or (first) targets instead of shuffled")

    def __post_init__(self) -> None:
        super().__post_init__()
        for weight in self.weights or ():
            number = isinstance(weight, int | float) and not isinstance(weight, bool)
            if not number or not math.isfinite(weight) or weight <= 0:
                raise RecipeError(
                    "partition.weights must be positive numbers.",
                    f"{weight!r}",
                    "Leave an agent without samples out.",
                )

    def _deal(self, samples: Samples, agents: int, rng: np.random.Generator) -> list[np.ndarray]:
        if self.weights is not None and len(self.weights) != agents:
            raise RecipeError(
                "partition.weights must hold one number for each agent.",
                f"{len(self.weights)} weights for {agents} agents",
                "Add or remove weights, or leave them out for random sizes.",
            )
        logarithms = np.log(self.weights) if self.weights else self.spread * rng.standard_normal(agents)
        shares = np.exp(logarithms - logarithms.max())
        order = rng.permutation(len(samples))
        if self.sort:
            order = order[np.argsort(samples.y.reshape(len(samples), -1)[order, 0], kind="stable")]
        return np.split(order, _cuts(shares / shares.sum(), len(samples)))


@dataclass(frozen=True)
class Dirichlet(Partition):
    """Every class is shared out in proportions drawn from a symmetric Dirichlet distribution."""

    alpha: float = setting(help="concentration: small for few classes per agent, large for iid", above=0.0)
    min_size: int = setting(1, "samples that every agent must get; proportions are redrawn until so", at_least=1)
    balance: bool = setting(False, "who has 1/K of all samples gets none of the classes that are shared out later")

    def _deal(self, samples: Samples, agents: int, rng: np.random.Generator) -> list[np.ndarray]:
        members = list(samples.by_class(rng).values())
        if self.balance:  # who gets no more should not depend on the order of the labels
            members = [members[c] for c in rng.permutation(len(members))]
        totals = np.array([len(group) for group in members])
        for _ in range(ATTEMPTS):
            shares = rng.dirichlet(np.full(agents, self.alpha), size=len(members))
            if self.balance:
                shares = _balanced(shares, totals)
            cuts = _cuts(shares, totals[:, None])
            sizes = np.diff(cuts, prepend=0, append=totals[:, None]).sum(axis=0)
            if sizes.min() >= self.min_size:
                pieces = [np.split(group, cut) for group, cut in zip(members, cuts, strict=True)]
                return [np.concatenate(piece) for piece in zip(*pieces, strict=True)]
        raise DataError(
            f"The partition dirichlet must give every agent at least {self.min_size} samples.",
            f"{ATTEMPTS} draws that do not: {agents} agents, {len(samples)} samples, alpha {self.alpha}",
            "Raise alpha, lower min_size, or use fewer agents.",
        )


@dataclass(frozen=True)
class ClassesPerAgent(Partition):
    """Every agent holds k classes; the samples of a class are shared equally by its holders."""

    k: int = setting(help="the number of classes that each agent holds", at_least=1)

    def _deal(self, samples: Samples, agents: int, rng: np.random.Generator) -> list[np.ndarray]:
        members = list(samples.by_class(rng).values())
        if not self.k <= len(members) <= self.k * agents:
            raise DataError(
                "The partition classes must give every agent k different classes and every class an agent.",
                f"k = {self.k}, {agents} agents and {len(members)} classes",
                f"Choose k from {math.ceil(len(members) / agents)} to {len(members)}, or change the agents.",
            )
        holders: list[list[int]] = [[] for _ in members]
        for agent in rng.permutation(agents):
            # The classes with the fewest holders come first, so none stays without; ties are random.
            order = rng.permutation(len(members))
            for held in sorted(order, key=lambda index: len(holders[index]))[: self.k]:
                holders[held].append(int(agent))
        parts: list[list[np.ndarray]] = [[] for _ in range(agents)]
        for group, agents_of_class in zip(members, holders, strict=True):
            if len(group) < len(agents_of_class):
                raise DataError(
                    "The partition classes must have a sample of each class for each of its holders.",
                    f"{len(group)} samples of class {samples.y[group[0]]} for {len(agents_of_class)} agents",
                    "Lower k, use fewer agents, or leave this class out.",
                )
            for agent, piece in zip(agents_of_class, np.array_split(group, len(agents_of_class)), strict=True):
                parts[agent].append(piece)
        return [np.concatenate(part) for part in parts]


@dataclass(frozen=True)
class LabelSplit(Partition):
    """The classes are cut into consecutive blocks, one per agent; a portion α is then mixed.

    For two agents and ten classes the blocks are 0-4 and 5-9. A random portion α of each agent's samples
    is pooled and shuffled, and each agent gets back as many as it gave: α = 0 is fully split by labels,
    α = 1 is iid.
    """

    alpha: float = setting(0.0, "α, the portion of each agent's samples that is mixed", at_least=0.0, at_most=1.0)

    def _deal(self, samples: Samples, agents: int, rng: np.random.Generator) -> list[np.ndarray]:
        members = list(samples.by_class(rng).values())
        if len(members) < agents:
            raise DataError(
                "The partition labels must have at least as many classes as agents.",
                f"{len(members)} classes and {agents} agents",
                "Use fewer agents, or the partition dirichlet or classes.",
            )
        blocks = np.array_split(np.arange(len(members)), agents)
        own = [rng.permutation(np.concatenate([members[label] for label in block])) for block in blocks]
        given = [round(self.alpha * len(part)) for part in own]
        pool = rng.permutation(np.concatenate([part[:count] for part, count in zip(own, given, strict=True)]))
        returned = np.split(pool, np.cumsum(given)[:-1])
        return [np.concatenate([part[count:], back]) for part, count, back in zip(own, given, returned, strict=True)]


@dataclass(frozen=True)
class ById(Partition):
    """Samples with the same id stay together, e.g. all that one person wrote.

    With as many ids as agents, the agents hold one id each, in sorted order. With more, whole groups are
    dealt out, the largest first, each to the agent that has the fewest samples so far.
    """

    id: str = setting(help="the name of the id, e.g. writer, or agent for tables per agent")

    def _deal(self, samples: Samples, agents: int, rng: np.random.Generator) -> list[np.ndarray]:
        if self.id not in samples.ids:
            raise DataError(
                "The partition by must name an id that the data set has.",
                f"'{self.id}'",
                nearest(self.id, samples.ids) if samples.ids else "This data set has no ids.",
            )
        values = samples.ids[self.id]
        if len(values) != len(samples):
            raise DataError(
                f"The id '{self.id}' must be given for every sample.",
                f"{len(values)} ids for {len(samples)} samples",
                "Take the ids of the same samples.",
            )
        _, group = np.unique(values, return_inverse=True)
        sizes = np.bincount(group)
        if len(sizes) < agents:
            raise DataError(
                f"The id '{self.id}' must have at least as many different values as there are agents.",
                f"{len(sizes)} values and {agents} agents",
                "Use fewer agents, or another partition.",
            )
        if len(sizes) == agents:
            return [np.flatnonzero(group == each) for each in range(agents)]
        order = rng.permutation(len(sizes))
        owner, load = np.empty(len(sizes), dtype=int), np.zeros(agents, dtype=int)
        for each in order[np.argsort(-sizes[order], kind="stable")]:
            owner[each] = load.argmin()
            load[owner[each]] += sizes[each]
        return [np.flatnonzero(owner[group] == agent) for agent in range(agents)]


KINDS: dict[str, type[Partition]] = {
    "iid": Iid,
    "unequal": Unequal,
    "dirichlet": Dirichlet,
    "classes": ClassesPerAgent,
    "labels": LabelSplit,
    "by": ById,
}


def counts(y: np.ndarray, parts: Sequence[np.ndarray], classes: int) -> np.ndarray:
    """How many samples of each class each agent holds: a matrix of agents x classes."""
    if np.ndim(y) != 1:
        raise DataError(
            "Counting classes must be done on one label per sample.",
            f"real-valued targets of shape {np.shape(y)}",
            "Count only partitions of labelled samples.",
        )
    _check_range(y, classes)
    return np.stack([np.bincount(y[part], minlength=classes) for part in parts])


def _check_range(y: np.ndarray, classes: int) -> None:
    wrong = (y < 0) | (y >= classes)
    if wrong.any():
        row = int(wrong.argmax())
        raise DataError(
            f"Every label of a partition must be from 0 to {classes - 1}.",
            f"{y[row]} in row {row} (counted from 0)",
            "Check the labels, or the number of classes.",
        )


def _balanced(shares: np.ndarray, totals: np.ndarray) -> np.ndarray:
    """Shares (C, K), class by class without the agents that have their even part of all samples by then."""
    even, sizes = totals.sum() / shares.shape[1], np.zeros(shares.shape[1])
    balanced = np.empty_like(shares)
    for c, total in enumerate(totals):
        # Some agent is always below its even part. Where those have drawn nothing, they share the class equally.
        below = sizes < even
        left = np.where(below, shares[c], 0.0)
        balanced[c] = left / left.sum() if left.sum() > 0 else below / below.sum()
        sizes += balanced[c] * total
    return balanced


def _cuts(shares: np.ndarray, total: int | np.ndarray) -> np.ndarray:
    """Where to cut `total` samples so that each piece is within one sample of its share."""
    return np.round(np.cumsum(shares, axis=-1)[..., :-1] * total).astype(int).clip(0, total)
