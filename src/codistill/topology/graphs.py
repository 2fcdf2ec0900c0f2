"""Graphs by name, for recipes and Python: `Random(degree=3).over(names, seed=0)` is a topology.

All are connected, except silent, islands and given links. A random one depends only on the seed and the order of the
names.
"""

from __future__ import annotations

import itertools
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from codistill.core.errors import RecipeError, nearest
from codistill.core.rng import derive, generator
from codistill.core.settings import Settings, check_settings, setting
from codistill.topology import KINDS as PLAIN_KINDS
from codistill.topology import Topology, check_pairs

TRIES = 100  # draws of a random graph until one is connected
Pairs = Sequence[tuple[int, int]]


@dataclass(frozen=True, kw_only=True)
class Graph(Settings):
    """Base of all graphs: a frozen dataclass of options."""

    kind: ClassVar[str] = ""

    def __post_init__(self) -> None:
        check_settings(self, "topology")

    def over(self, names: Sequence[str], seed: int = 0) -> Topology:
        """This graph over these agents; here a kind that `Topology` itself can make."""
        return PLAIN_KINDS[self.kind](names)

    def _join(self, names: Sequence[str], pairs: Pairs) -> Topology:
        return Topology(names, [(names[a], names[b]) for a, b in pairs], kind=self.kind)


@dataclass(frozen=True, kw_only=True)
class Star(Graph):
    """Every agent is linked to the hub, or to the agent in the centre, and to nobody else."""

    kind = "star"
    centre: str | None = setting(None, "the agent in the centre, among peers; unset: the hub")

    def over(self, names: Sequence[str], seed: int = 0) -> Topology:
        if self.centre is None:
            return super().over(names)
        if self.centre not in names:
            raise RecipeError("topology.centre must be an agent.", f"'{self.centre}'", nearest(self.centre, names))
        return Topology(names, [(self.centre, name) for name in names], kind=self.kind)


@dataclass(frozen=True, kw_only=True)
class Complete(Graph):
    """Every agent is linked to every other."""

    kind = "complete"


@dataclass(frozen=True, kw_only=True)
class Ring(Graph):
    """Every agent is linked to the one before and the one after."""

    kind = "ring"


@dataclass(frozen=True, kw_only=True)
class Silent(Graph):
    """No links."""

    kind = "silent"


@dataclass(frozen=True, kw_only=True)
class Islands(Graph):
    """Agents whose names differ only in the trailing number (those of one [[agents]] table) are linked.

    Groups are separate on purpose: d_sgd can run with several architectures, one per group.
    """

    kind = "islands"

    def over(self, names: Sequence[str], seed: int = 0) -> Topology:
        groups: dict[str, list[str]] = {}
        for name in names:
            groups.setdefault(re.sub(r"-\d+$", "", name), []).append(name)
        pairs = [pair for group in groups.values() for pair in itertools.combinations(group, 2)]
        return Topology(names, pairs, kind=self.kind, groups=list(groups.values()))


@dataclass(frozen=True, kw_only=True)
class Torus(Graph):
    """A grid, as square as the number of agents allows, whose opposite sides are joined.

    Every agent has four links; fewer if there are only two rows or columns.
    """

    kind = "torus"

    def over(self, names: Sequence[str], seed: int = 0) -> Topology:
        rows, columns = most_square(len(names))  # the names fill it row by row
        if rows == 1 and columns > 3:
            raise RecipeError(
                "The number of agents in a torus must be rows times columns.",
                f"{columns} agents, a prime number",
                "Add or remove an agent, or use a ring.",
            )
        places = [(row, column) for row in range(rows) for column in range(columns)]
        right = [(r * columns + c, r * columns + (c + 1) % columns) for r, c in places]
        down = [(r * columns + c, (r + 1) % rows * columns + c) for r, c in places]
        return self._join(names, right + down)


@dataclass(frozen=True, kw_only=True)
class Random(Graph):
    """A random tree plus half of the additional links that `degree`, the most per agent, allows."""

    kind = "random"
    degree: int = setting(3, "maximal number of links of an agent", at_least=2)
    seed: int | None = setting(None, "seed of the graph; unset: that of the run", at_least=0)

    def over(self, names: Sequence[str], seed: int = 0) -> Topology:
        rng = generator(seed if self.seed is None else self.seed, "topology", self.kind)
        order = [int(place) for place in rng.permutation(len(names))]
        free = [min(self.degree, len(names) - 1)] * len(names)
        pairs, joined = [], order[:1]  # agents in the tree that may have another link
        for new in order[1:]:
            chosen = int(rng.integers(len(joined)))
            old = joined[chosen]
            pairs.append((old, new))
            free[old], free[new] = free[old] - 1, free[new] - 1
            if not free[old]:
                joined[chosen] = joined[-1]
                joined.pop()
            joined.append(new)
        # Agents offer their unused links, and half of the offers are paired; duplicates have no effect.
        offers = rng.permutation(np.repeat(np.arange(len(names)), free)).tolist()
        pairs += zip(offers[0 : len(offers) // 2 : 2], offers[1 : len(offers) // 2 : 2], strict=False)
        return self._join(names, pairs)


@dataclass(frozen=True, kw_only=True)
class _Drawn(Graph, ABC):
    """Base of random graphs that are redrawn until one is connected."""

    seed: int | None = setting(None, "seed of the graph; unset: that of the run", at_least=0)

    def over(self, names: Sequence[str], seed: int = 0) -> Topology:
        for attempt in range(TRIES):
            number = derive(seed if self.seed is None else self.seed, "topology", self.kind, attempt)
            topology = self._join(names, self._draw(len(names), number))
            if topology.unreached is None:
                return topology
        do, found = self._advice(len(names))
        raise RecipeError(f"The graph '{self.kind}' must be connected.", f"{TRIES} unconnected draws with {found}", do)

    @abstractmethod
    def _draw(self, agents: int, seed: int) -> Pairs:
        """The links of one such graph."""

    @abstractmethod
    def _advice(self, agents: int) -> tuple[str, str]:
        """What to do when none is connected, and what was asked for."""


@dataclass(frozen=True, kw_only=True)
class Geometric(_Drawn):
    """Agents are random points of the unit square; those within `radius` of each other are linked."""

    kind = "geometric"
    radius: float = setting(help="largest distance of linked agents in the unit square", above=0)

    def _draw(self, agents: int, seed: int) -> Pairs:
        from scipy.spatial import KDTree

        check_pairs(agents)
        points = generator(seed).random((agents, 2))
        pairs: Pairs = KDTree(points).query_pairs(self.radius, output_type="ndarray").tolist() if agents else []
        return pairs

    def _advice(self, agents: int) -> tuple[str, str]:
        enough = math.sqrt(math.log(agents) / (math.pi * agents))
        do = f"Raise the radius: with {agents} agents, many graphs are connected above {enough:.2g}."
        return do, f"{agents} agents and radius {self.radius:g}"


@dataclass(frozen=True, kw_only=True)
class ErdosRenyi(_Drawn):
    """Any two agents are linked with the same probability."""

    kind = "erdos_renyi"
    probability: float = setting(help="probability that two agents are linked", above=0, at_most=1)

    def _draw(self, agents: int, seed: int) -> Pairs:
        check_pairs(agents)
        linked = generator(seed).random((agents, agents)) < self.probability
        return [(int(a), int(b)) for a, b in np.argwhere(np.triu(linked, 1))]

    def _advice(self, agents: int) -> tuple[str, str]:
        enough = math.log(agents) / agents
        do = f"Raise the probability: with {agents} agents, many graphs are connected above {enough:.2g}."
        return do, f"{agents} agents and probability {self.probability:g}"


@dataclass(frozen=True, kw_only=True)
class Expander(_Drawn):
    """A random regular graph, in which every agent has `degree` links: few links and short paths."""

    kind = "expander"
    degree: int = setting(3, "number of links of every agent", at_least=3)

    def _draw(self, agents: int, seed: int) -> Pairs:
        import networkx

        if self.degree >= agents or self.degree * agents % 2:
            raise RecipeError(
                "An expander needs more agents than its degree, and an even number of agents or an even degree.",
                f"{agents} agents and degree {self.degree}",
                "Change the degree or the number of agents.",
            )
        return list(networkx.random_regular_graph(self.degree, agents, seed=seed).edges)

    def _advice(self, agents: int) -> tuple[str, str]:
        return "Raise the degree.", f"{agents} agents and degree {self.degree}"


@dataclass(frozen=True, kw_only=True)
class Edges(Graph):
    """Listed links."""

    kind = "edges"
    edges: tuple[list[str], ...] = setting(help='pairs of agents\' names: [["a", "b"], ["b", "c"]]')
    directed: bool = setting(False, "only the first of a pair sends to the second; needs a matrix")
    matrix: tuple[list[float], ...] | None = setting(
        None, "mixing weights, one row per receiving agent; unset: Metropolis-Hastings"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for edge in self.edges:
            if len(edge) != 2 or not all(isinstance(end, str) for end in edge):
                raise RecipeError("topology.edges must be pairs of agents' names.", f"{edge!r}", 'Write ["a", "b"].')

    def over(self, names: Sequence[str], seed: int = 0) -> Topology:
        pairs = [(a, b) for a, b in self.edges]
        return Topology(names, pairs, directed=self.directed, weights=self.matrix, kind=self.kind)


@dataclass(frozen=True, kw_only=True)
class Matrix(Graph):
    """The graph of a mixing matrix W: agent m sends to n if row n has a weight for m.

    Rows are receivers. Bistritz et al. write w_nm for the link from n to m: transpose their directed W.
    """

    kind = "matrix"
    matrix: tuple[list[float], ...] = setting(
        help="one row per agent, in their order; rows and columns sum to 1, the diagonal is above 0"
    )

    def over(self, names: Sequence[str], seed: int = 0) -> Topology:
        return Topology.from_matrix(names, self.matrix)


def most_square(number: int) -> tuple[int, int]:
    """Rows and columns of the most square grid with this many places."""
    rows = next((rows for rows in range(math.isqrt(number), 0, -1) if number % rows == 0), 1)
    return rows, number // rows


KINDS: dict[str, type[Graph]] = {
    cls.kind: cls
    for cls in (Star, Complete, Ring, Silent, Islands, Torus, Random, Geometric, ErdosRenyi, Expander, Edges, Matrix)
}

# --- graphs as text for tables, and as plain values in a run's folder


def figures(topology: Topology) -> dict[str, str]:
    """Kind, size, degrees, diameter and spectral gap, as text."""
    low, high = topology.degrees
    return {
        "kind": topology.kind + (", directed" if topology.directed else ""),
        "agents": f"{len(topology.names):,}",
        "links": f"{topology.links:,}",
        "links of an agent": f"{low:,}" if low == high else f"{low:,} to {high:,}",
        "diameter": "infinite" if topology.diameter is None else f"{topology.diameter:,}",
        "spectral gap": f"{topology.spectral_gap:.3g}",
    }


def as_plain(topology: Topology) -> dict[str, Any]:
    """The neighbours of each agent, as indices in one text, and the rows of a given matrix."""
    place = {name: str(number) for number, name in enumerate(topology.names)}
    agents = len(place)
    every = not topology.directed and topology.links == agents * (agents - 1) // 2
    matrix = topology.matrix() if topology.has_matrix else ()
    return {
        "kind": topology.kind,
        "directed": topology.directed,
        "links": "all" if every else [" ".join(map(place.__getitem__, topology.neighbours(name))) for name in place],
        "matrix": [" ".join(f"{m}:{float(row[m])!r}" for m in np.flatnonzero(row)) for row in matrix] or None,
    }


def from_plain(names: Sequence[str], plain: Mapping[str, Any]) -> Topology:
    """The inverse of `as_plain`."""
    if plain["links"] == "all":
        edges = [(name, other) for number, name in enumerate(names) for other in names[number + 1 :]]
    else:
        rows = zip(names, plain["links"], strict=True)
        edges = [(name, names[int(number)]) for name, row in rows for number in row.split()]
    matrix = None
    if plain["matrix"] is not None:
        matrix = np.zeros((len(names), len(names)))
        for row, text in zip(matrix, plain["matrix"], strict=True):
            for entry in text.split():
                number, _, weight = entry.partition(":")
                row[int(number)] = float(weight)
    return Topology(names, edges, directed=plain["directed"], weights=matrix, kind=plain["kind"])
