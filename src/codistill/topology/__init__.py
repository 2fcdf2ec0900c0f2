"""Which agents are linked, and with which mixing weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from codistill.core.errors import RecipeError, nearest
from codistill.core.settings import clear_argument_errors

HUB = "hub"
MOST_PAIRED = 10_000  # agents in a graph that is built from all pairs: fifty million


class Topology:
    """A graph of agents with mixing weights; `hub=True` makes it a star whose centre is the hub.

    An edge (a, b) lets a send to b and, unless the graph is directed, b to a. `weights` is the matrix W with a row
    and a column per agent: w_nm is the weight that n gives to what it receives from m. Without it, weights are those
    of Metropolis and Hastings. `groups` are separate on purpose: each must be connected, but not with the others.
    More graphs are in `codistill.topology.graphs`.
    """

    @clear_argument_errors
    def __init__(
        self,
        names: Sequence[str],
        edges: Iterable[tuple[str, str]],
        *,
        hub: bool = False,
        directed: bool = False,
        weights: Any = None,
        kind: str = "edges",
        groups: Sequence[Sequence[str]] | None = None,
    ) -> None:
        self.groups = (tuple(names),) if groups is None else tuple(map(tuple, groups))
        self.names, self.hub, self.directed, self.kind = tuple(names), hub, directed, kind
        self._places = {name: place for place, name in enumerate(self.names)}
        if len(self._places) < len(self.names):
            twice = next(name for place, name in enumerate(self.names) if self._places[name] != place)
            raise RecipeError("Names of agents must be unique.", f"'{twice}' more than once", "Rename one.")
        self._receivers: dict[str, set[str]] = {name: set() for name in self.names}
        senders: dict[str, set[str]] = {name: set() for name in self.names} if directed else self._receivers
        for left, right in edges:
            for end in (left, right):
                if end not in senders:
                    raise RecipeError("An edge must join two agents.", f"'{end}'", nearest(end, senders))
            if left != right:
                self._receivers[left].add(right)
                senders[right].add(left)
        # In the order of the names, so that sums over neighbours are equal everywhere to the bit.
        self._neighbours = self._ordered(self._receivers)
        self._sources = self._ordered(senders) if directed else self._neighbours
        self.has_matrix = weights is not None  # otherwise weights are made from degrees
        self._weights: dict[str, dict[str, float]] = {}
        if self.has_matrix:
            self._weights = self._take(as_mixing_matrix(weights, self.names))
            self.check_mixing()
        elif directed:
            raise RecipeError(
                "A directed graph needs an explicit matrix of mixing weights: weights made from degrees are doubly "
                "stochastic only if every link goes both ways.",
                "no matrix",
                "Give the matrix W, or make all links go both ways.",
            )

    @classmethod
    def star(cls, names: Sequence[str]) -> Topology:
        """Every agent is linked to the hub, and to nobody else."""
        return cls(names, (), hub=True, kind="star")

    @classmethod
    def complete(cls, names: Sequence[str]) -> Topology:
        """Every agent is linked to every other."""
        check_pairs(len(names))
        return cls(names, [(a, b) for i, a in enumerate(names) for b in names[i + 1 :]], kind="complete")

    @classmethod
    def ring(cls, names: Sequence[str]) -> Topology:
        """Every agent is linked to the one before and the one after."""
        return cls(names, [(name, names[(i + 1) % len(names)]) for i, name in enumerate(names)], kind="ring")

    @classmethod
    def silent(cls, names: Sequence[str]) -> Topology:
        """No links."""
        return cls(names, (), kind="silent")

    @classmethod
    def from_matrix(cls, names: Sequence[str], matrix: Any) -> Topology:
        """The graph of a mixing matrix: m sends to n where w_nm > 0; directed unless all links go both ways."""
        w = as_mixing_matrix(matrix, names)
        edges = [(names[m], names[n]) for n, m in np.argwhere(w > 0)]
        directed = not np.array_equal(w > 0, w.T > 0)
        return cls(names, edges, directed=directed, weights=w, kind="matrix")

    def neighbours(self, name: str) -> tuple[str, ...]:
        """The agents that `name` may send to, in the order of the names."""
        return self._neighbours[name]

    def sources(self, name: str) -> tuple[str, ...]:
        """The agents that `name` receives from, in the same order: its neighbours, unless the graph is directed."""
        return self._sources[name]

    def receivers(self, name: str) -> tuple[str, ...]:
        """All nodes that `name` may send to, the hub included."""
        if name == HUB:
            return self.names
        return (*self._neighbours[name], HUB) if self.hub else self._neighbours[name]

    def may_send(self, sender: str, receiver: str) -> bool:
        """Whether there is a link from sender to receiver."""
        if HUB in (sender, receiver):
            return self.hub
        return receiver in self._receivers[sender]

    def weights(self, name: str) -> Mapping[str, float]:
        """The weights of those that an agent receives from: its row of W without the diagonal.

        Where no matrix was given, they are Metropolis-Hastings weights, w_ab = 1 / (1 + max(deg a, deg b)): with
        them, W is symmetric and doubly stochastic on any undirected graph.
        """
        if name not in self._weights:  # once: they are needed for every array of every message
            degree, others = len(self._neighbours[name]), self._neighbours[name]
            self._weights[name] = {other: 1.0 / (1 + max(degree, len(self._neighbours[other]))) for other in others}
        return self._weights[name]

    def matrix(self) -> np.ndarray:
        """W, with the diagonal."""
        w = np.zeros((len(self.names), len(self.names)))
        for place, name in enumerate(self.names):
            for other, weight in self.weights(name).items():
                w[place, self._places[other]] = weight
        np.fill_diagonal(w, 1.0 - w.sum(axis=1))
        return w

    @property
    def links(self) -> int:
        """The number of links between agents; in a directed graph each direction counts."""
        ends = sum(map(len, self._neighbours.values()))
        return ends if self.directed else ends // 2

    @property
    def degrees(self) -> tuple[int, int]:
        """The smallest and the largest number of neighbours of an agent."""
        counts = [len(others) for others in self._neighbours.values()] or [0]
        return min(counts), max(counts)

    @cached_property
    def unreached(self) -> tuple[str, str] | None:
        """Two agents without a path from the first to the second; None if there is a path between any two."""
        return self._unreached(self.names)

    def _unreached(self, among: Sequence[str]) -> tuple[str, str] | None:
        """As `unreached`, for the graph of these agents only."""
        inside = set(among)
        outgoing, incoming = (
            {name: [other for other in ways[name] if other in inside] for name in among}
            for ways in (self._neighbours, self._sources)
        )
        for first in among[:1]:
            there, back = _reached(first, outgoing), _reached(first, incoming)
            for other in among:
                if other not in there:
                    return first, other
                if other not in back:
                    return other, first
        return None

    @cached_property
    def diameter(self) -> int | None:
        """The longest shortest path between two agents, in links; None if the graph is not connected."""
        if self.unreached:
            return None
        outgoing = [[self._places[other] for other in others] for others in self._neighbours.values()]
        reached, steps = [1 << place for place in range(len(outgoing))], 0  # sets of agents, as bits
        while reached.count((1 << len(outgoing)) - 1) < len(outgoing):
            before, steps = reached, steps + 1
            reached = before.copy()
            for place, others in enumerate(outgoing):
                for other in others:
                    reached[place] |= before[other]
        return steps

    @cached_property
    def spectral_gap(self) -> float:
        """1 - the second largest singular value of W: how fast mixing converges to the mean, from 0 to 1."""
        return spectral_gap(self.matrix()) if self.names and not self.unreached else 0.0

    def check_mixing(self) -> None:
        """Raise `RecipeError` unless each group is connected, so that its agents can reach consensus."""
        for group in self.groups:
            if unreached := self._unreached(group):
                sender, receiver = unreached
                raise RecipeError(
                    "The graph must be " + ("strongly connected." if self.directed else "connected."),
                    f"'{receiver}' cannot be reached from '{sender}'",
                    "Add links, or use a connected topology such as ring.",
                )

    def _ordered(self, linked: Mapping[str, set[str]]) -> dict[str, tuple[str, ...]]:
        return {name: tuple(sorted(others, key=self._places.__getitem__)) for name, others in linked.items()}

    def _take(self, w: np.ndarray) -> dict[str, dict[str, float]]:
        """Weights by name; they must be positive exactly where there are links."""
        linked = np.eye(len(self.names), dtype=bool)
        for place, name in enumerate(self.names):
            linked[place, [self._places[other] for other in self._sources[name]]] = True
        for place, other in np.argwhere(linked != (w > 0))[:1]:
            receiver, sender = self.names[place], self.names[other]
            raise RecipeError(
                "Off the diagonal, the matrix W must be above 0 exactly where there is a link.",
                f"{w[place, other]:g} in the row of '{receiver}' for '{sender}', "
                + ("which may send to it" if linked[place, other] else "which may not send to it"),
                "Change the entry or the links; a row holds an agent's weights for what it receives.",
            )
        return {
            name: {other: float(w[place, self._places[other]]) for other in self._sources[name]}
            for place, name in enumerate(self.names)
        }


def check_pairs(agents: int) -> None:
    """Limit graphs that need memory for every pair of agents."""
    if agents > MOST_PAIRED:
        raise RecipeError(
            f"Complete and random graphs may have at most {MOST_PAIRED:,} agents.",
            f"{agents:,}",
            "Choose a hub (star) or a ring, or fewer agents.",
        )


def _reached(start: str, ways: Mapping[str, Sequence[str]]) -> set[str]:
    reached, new = {start}, [start]
    while new:
        new = list({other for name in new for other in ways[name]} - reached)
        reached.update(new)
    return reached


KINDS = {make.__name__: make for make in (Topology.star, Topology.complete, Topology.ring, Topology.silent)}

# --- mixing matrices: w_nm is the weight that agent n gives to what it receives from m; W is doubly stochastic

_EXACT = 1e-6  # tolerance of sums, for entries such as 0.333333


def as_mixing_matrix(matrix: Any, names: Sequence[str]) -> np.ndarray:
    """W as an array with a row and a column per agent, doubly stochastic and with a positive diagonal."""
    must = f"The matrix W must have a row and a column for each of the {len(names)} agents."
    do = "Write a list of rows, each with a number per agent."
    try:
        w = np.array(matrix, dtype=np.float64)
    except (TypeError, ValueError):
        raise RecipeError(must, _unlike(matrix, names), do) from None
    if w.shape != (len(names), len(names)):
        raise RecipeError(must, f"the shape {' x '.join(map(str, w.shape)) or 'of a number'}", do)
    for (row, column), value in _first(~np.isfinite(w) | (w < 0), w):
        raise RecipeError(
            "Entries of the matrix W must be finite and at least 0.",
            f"{value:g} in row {_at(row, names)}, column {_at(column, names)}",
            "Write 0 where there is no link.",
        )
    for what, sums in (("row", w.sum(axis=1)), ("column", w.sum(axis=0))):
        for (place,), value in _first(abs(sums - 1) > _EXACT, sums):
            raise RecipeError(
                f"Every {what} of the matrix W must sum to 1.",
                f"{what} {_at(place, names)} sums to {value:.9g}",
                "Correct its entries: mixing preserves the mean only if rows and columns sum to 1.",
            )
    for (place,), value in _first(np.diag(w) <= 0, np.diag(w)):
        raise RecipeError(
            "The diagonal of the matrix W must be above 0.",
            f"{value:g} in row {_at(place, names)}",
            "Give every agent some weight for its own value.",
        )
    return w


def spectral_gap(w: np.ndarray) -> float:
    """1 - the second largest singular value of W: a mixing step shrinks differences by at least this share.

    For a symmetric W this is 1 - |lambda_2|, with the eigenvalue of the second largest magnitude. W is doubly
    stochastic, so the largest belongs to the mean, and in W - 11'/n the second largest is the largest.
    """
    rest = w - 1 / len(w)
    second = np.abs(np.linalg.eigvalsh(rest)).max() if np.array_equal(w, w.T) else np.linalg.norm(rest, 2)
    return max(0.0, 1.0 - float(second))


def _unlike(matrix: Any, names: Sequence[str]) -> str:
    """A description of the first malformed row."""
    rows = matrix if isinstance(matrix, list | tuple) else []
    for number, row in enumerate(rows, 1):
        if not isinstance(row, list | tuple) or len(row) != len(names):
            return f"row {number} is {row!r}"[:80]
    return "non-numeric entries"


def _first(wrong: np.ndarray, values: np.ndarray) -> list[tuple[tuple[int, ...], float]]:
    """The first wrong position, if any, with its value."""
    places = np.argwhere(wrong)[:1]
    return [(tuple(map(int, place)), float(values[tuple(place)])) for place in places]


def _at(place: int, names: Sequence[str]) -> str:
    return f"{place + 1} ('{names[place]}')"
