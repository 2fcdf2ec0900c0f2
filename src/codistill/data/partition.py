"""Partitions of the samples of one data set among agents, each sample to exactly one."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from codistill.core.errors import DataError, RecipeError, nearest
from codistill.core.settings import Settings, check_settings, setting
from codistill.data.validation import checked_labels

ATTEMPTS = 1000
_WHAT = "the partitioned data"  # in errors
Ids = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Partition(Settings, ABC):
    """Base of all partitions; all randomness comes from the generator passed to `split`."""

    def __post_init__(self) -> None:
        check_settings(self, "partition")

    def split(
        self,
        y: np.ndarray,
        agents: int,
        rng: np.random.Generator,
        ids: Ids | None = None,
        classes: int | None = None,
    ) -> list[np.ndarray]:
        """The sorted sample indices of each agent.

        `y` holds labels, or real-valued targets in two dimensions, which partitions by classes reject. `classes`: the
        bound of the labels, if known.
        """
        y = np.asarray(y)
        if not 1 <= agents <= len(y):
            raise DataError(
                "A partition needs at least one agent, and at least one sample per agent.",
                f"{agents} agents and {len(y)} samples",
                "Change the number of agents or of samples.",
            )
        if classes is not None and y.ndim == 1:
            checked_labels(y, _WHAT, classes)
        parts = [np.sort(part) for part in self._deal(y, ids or {}, agents, rng)]
        for agent, part in enumerate(parts):
            if len(part) == 0:
                raise DataError(
                    "Every agent must get at least one sample.",
                    f"none for agent {agent} (counted from 0) of {agents}, by {self}",
                    "Use fewer agents, more samples, or a more even partition.",
                )
        return parts

    @abstractmethod
    def _deal(self, y: np.ndarray, ids: Ids, agents: int, rng: np.random.Generator) -> list[np.ndarray]:
        """The sample indices of each agent, in any order."""


@dataclass(frozen=True)
class Iid(Partition):
    """Shuffled and split into parts of equal size."""

    def _deal(self, y: np.ndarray, ids: Ids, agents: int, rng: np.random.Generator) -> list[np.ndarray]:
        return np.array_split(rng.permutation(len(y)), agents)


@dataclass(frozen=True)
class Unequal(Partition):
    """Shuffled (or sorted) and split into parts of given or log-normal random sizes."""

    weights: tuple[float, ...] | None = setting(None, "the agents' shares, one positive number per agent", above=0)
    spread: float = setting(1.0, "without weights: standard deviation of the log of the shares", at_least=0.0)
    sort: bool = setting(False, "sort by label or first target instead of shuffling")

    def _deal(self, y: np.ndarray, ids: Ids, agents: int, rng: np.random.Generator) -> list[np.ndarray]:
        if self.weights is not None and len(self.weights) != agents:
            raise RecipeError(
                "partition.weights must have one number per agent.",
                f"{len(self.weights)} weights for {agents} agents",
                "Add or remove weights, or unset them for random sizes.",
            )
        logarithms = np.log(self.weights) if self.weights else self.spread * rng.standard_normal(agents)
        shares = np.exp(logarithms - logarithms.max())
        order = rng.permutation(len(y))
        if self.sort:
            order = order[np.argsort(y.reshape(len(y), -1)[order, 0], kind="stable")]
        return np.split(order, _cuts(shares / shares.sum(), len(y)))


@dataclass(frozen=True)
class Dirichlet(Partition):
    """Every class is divided in proportions drawn from a symmetric Dirichlet distribution."""

    alpha: float = setting(help="concentration: small for few classes per agent, large for iid", above=0.0)
    min_size: int = setting(1, "minimal number of samples per agent; proportions are redrawn until met", at_least=1)
    balance: bool = setting(False, "skip agents that already hold 1/K of the samples")

    def _deal(self, y: np.ndarray, ids: Ids, agents: int, rng: np.random.Generator) -> list[np.ndarray]:
        members = _by_class(y, rng)
        if self.balance:  # which agents are skipped should not depend on the order of the labels
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
            f"{ATTEMPTS} failed draws with {agents} agents, {len(y)} samples, alpha {self.alpha}",
            "Raise alpha, lower min_size, or use fewer agents.",
        )


@dataclass(frozen=True)
class ClassesPerAgent(Partition):
    """Every agent holds k classes; the samples of a class are shared equally by its holders."""

    k: int = setting(help="number of classes per agent", at_least=1)

    def _deal(self, y: np.ndarray, ids: Ids, agents: int, rng: np.random.Generator) -> list[np.ndarray]:
        members = _by_class(y, rng)
        if not self.k <= len(members) <= self.k * agents:
            raise DataError(
                "The partition classes must give every agent k different classes, and every class an agent.",
                f"k = {self.k}, {agents} agents and {len(members)} classes",
                f"Set k from {math.ceil(len(members) / agents)} to {len(members)}, or change the number of agents.",
            )
        holders: list[list[int]] = [[] for _ in members]
        for agent in rng.permutation(agents):
            # Classes with the fewest holders come first, so that each gets one; ties are random.
            order = rng.permutation(len(members))
            for held in sorted(order, key=lambda index: len(holders[index]))[: self.k]:
                holders[held].append(int(agent))
        parts: list[list[np.ndarray]] = [[] for _ in range(agents)]
        for group, agents_of_class in zip(members, holders, strict=True):
            if len(group) < len(agents_of_class):
                raise DataError(
                    "The partition classes needs a sample of each class for each of its agents.",
                    f"{len(group)} samples of class {y[group[0]]} for {len(agents_of_class)} agents",
                    "Lower k, use fewer agents, or remove this class.",
                )
            for agent, piece in zip(agents_of_class, np.array_split(group, len(agents_of_class)), strict=True):
                parts[agent].append(piece)
        return [np.concatenate(part) for part in parts]


@dataclass(frozen=True)
class LabelSplit(Partition):
    """The classes are split into consecutive blocks, one per agent; a portion α is then mixed.

    For two agents and ten classes the blocks are 0-4 and 5-9. A random portion α of each agent's samples is pooled and
    shuffled, and each agent gets back as many as it gave: α = 0 is fully split by labels, α = 1 is iid.
    """

    alpha: float = setting(0.0, "α, the portion of each agent's samples that is mixed", at_least=0.0, at_most=1.0)

    def _deal(self, y: np.ndarray, ids: Ids, agents: int, rng: np.random.Generator) -> list[np.ndarray]:
        members = _by_class(y, rng)
        if len(members) < agents:
            raise DataError(
                "The partition labels needs at least as many classes as agents.",
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
    """Samples with the same id stay together, e.g. all by one writer.

    With as many ids as agents, each agent gets one id, in sorted order. With more, groups are assigned by decreasing
    size, each to the agent with the fewest samples so far.
    """

    id: str = setting(help="the name of the id, e.g. writer, or agent for tables per agent")

    def _deal(self, y: np.ndarray, ids: Ids, agents: int, rng: np.random.Generator) -> list[np.ndarray]:
        if self.id not in ids:
            raise DataError(
                "The partition by needs an id of the data set.",
                f"'{self.id}'",
                nearest(self.id, ids) if ids else "This data set has no ids.",
            )
        values = ids[self.id]
        if len(values) != len(y):
            raise DataError(
                f"Every sample must have the id '{self.id}'.",
                f"{len(values)} ids for {len(y)} samples",
                "Pass the ids of the same samples.",
            )
        _, group = np.unique(values, return_inverse=True)
        sizes = np.bincount(group)
        if len(sizes) < agents:
            raise DataError(
                f"The id '{self.id}' must have at least as many different values as agents.",
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
    """The number of samples of each agent and class: a matrix of agents x classes."""
    labels = checked_labels(y, _WHAT, classes)
    return np.stack([np.bincount(labels[part], minlength=classes) for part in parts])


def _by_class(y: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    """The shuffled sample indices of every class that occurs, in the order of the labels."""
    if y.ndim != 1:
        raise DataError(
            "A partition by classes needs one label per sample.",
            f"real-valued targets of shape {y.shape}",
            "Use the partition iid, unequal or by.",
        )
    order = rng.permutation(len(y))
    return [order[y[order] == label] for label in np.unique(y)]


def _balanced(shares: np.ndarray, totals: np.ndarray) -> np.ndarray:
    """Shares (C, K) that skip, class by class, the agents that already hold 1/K of all samples."""
    even, sizes = totals.sum() / shares.shape[1], np.zeros(shares.shape[1])
    balanced = np.empty_like(shares)
    for c, total in enumerate(totals):
        # Some agent is always below 1/K. If all of these have drawn 0, they share the class equally.
        below = sizes < even
        left = np.where(below, shares[c], 0.0)
        balanced[c] = left / left.sum() if left.sum() > 0 else below / below.sum()
        sizes += balanced[c] * total
    return balanced


def _cuts(shares: np.ndarray, total: int | np.ndarray) -> np.ndarray:
    """Positions that split `total` samples so that each piece is within one sample of its share."""
    return np.round(np.cumsum(shares, axis=-1)[..., :-1] * total).astype(int).clip(0, total)
