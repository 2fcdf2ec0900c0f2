"""Graphs by name, as recipes and Python choose them: `Random(degree=3).over(names, seed=0)` is a topology.

All are connected. A random one depends on the seed and on the order of the names, and on nothing else.
"""

from __future__ import annotations

import itertools
import math
import re
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from codistill.errors import RecipeError, nearest
from codistill.randomness import derive, generator
from codistill.settings import Settings, check_settings, setting
from codistill.topology import Topology, check_pairs

TRIES = 100  # to draw a graph that is connected
Pairs = Sequence[tuple[int, int]]


@dataclass(frozen=True, kw_only=True)
class Graph(Settings):
    """Base of all graphs: a frozen dataclass of options."""

    kind: ClassVar[str] = ""

    def __post_init__(self) -> None:
        check_settings(self, "topology")

    @abstractmethod
    def over(self, names: Sequence[str], seed: int = 0) -> Topology:
        """This graph over these agents."""

    def _join(self, names: Sequence[str], pairs: Pairs) -> Topology:
        return Topology(names, [(names[a], names[b]) for a, b in pairs], kind=self.kind)


@dataclass(frozen=True, kw_only=True)
class Star(Graph):
    """Every agent is linked to the hub, or to the agent in the centre, and to nobody else."""

    kind = "star"
    centre: str | None = setting(None, "the agent in the centre, among peers; unset: the hub")

    def over(self, names: Sequence[str], seed: int = 0) -> Topology:
        """This graph over these agents."""
        if self.centre is None:
            return Topology.star(names)
        if self.centre not in names:
            raise RecipeError("topology.centre must be an agent.", f"'{self.centre}'", nearest(self.centre, names))
        return Topology(names, [(self.centre, name) for name in names], kind=self.kind)


@dataclass(frozen=True, kw_only=True)
class Complete(Graph):
    """Every agent is linked to every other."""

    kind = "complete"

    def over(self, names: Sequence[str], seed: int = 0) -> Topology:
        """This graph over these agents."""
        return Topology.complete(names)


@dataclass(frozen=True, kw_only=True)
class Ring(Graph):
    """Every agent is linked to the one before and the one after."""

    kind = "ring"

    def over(self, names: Sequence[str], seed: int = 0) -> Topology:
        """This graph over these agents."""
        return Topology.ring(names)


@dataclass(frozen=True, kw_only=True)
class Silent(Graph):
    """No links."""

    kind = "silent"

    def over(self, names: Sequence[str], seed: int = 0) -> Topology:
        """This graph over these agents."""
        return Topology.silent(names)


@dataclass(frozen=True, kw_only=True)
class Islands(Graph):
    """Agents whose names differ only by the number at their end (those of one [[agents]] table) are linked.

    Groups are separate on purpose: this is how d_sgd runs with agents of several architectures.
    """

    kind = "islands"

    def over(self, names: Sequence[str], seed: int = 0) -> Topology:
        """This graph over these agents."""
        groups: dict[str, list[str]] = {}
        for name in names:
            groups.setdefault(re.sub(r"-\d+$", "", name), []).append(name)
        pairs = [pair for group in groups.values() for pair in itertools.combinations(group, 2)]
        return Topology(names, pairs, kind=self.kind, groups=list(groups.values()))


@dataclass(frozen=True, kw_only=True)
class Torus(Graph):
    """A grid, as square as the number of agents allows, whose opposite sides are joined.

    Four links each; in a grid of two rows, or of two columns, three or two.
    """

    kind = "torus"

    def over(self, names: Sequence[str], seed: int = 0) -> Topology:
        """This graph over these agents; the names fill it row by row."""
        rows, columns = most_square(len(names))
        if rows == 1 and columns > 3:
            raise RecipeError(
                "A torus needs a number of agents that is a product, rows times columns.",
                f"{columns} agents, a prime number",
                "Add or remove an agent, or use a ring.",
            )
        places = [(row, column) for row in range(rows) for column in range(columns)]
        right = [(r * columns + c, r * columns + (c + 1) % columns) for r, c in places]
        down = [(r * columns + c, (r + 1) % rows * columns + c) for r, c in places]
        return self._join(names, right + down)


@dataclass(frozen=True, kw_only=True)
class Random(Graph):
    """A random tree plus half of the further links that `degree`, the most that an agent may have, allows."""

    kind = "random"
    degree: int = setting(3, "how many links an agent has at most", at_least=2)
    seed: int | None = setting(None, "of the graph; unset: that of the run", at_least=0)

    def over(self, names: Sequence[str], seed: int = 0) -> Topology:
        """This graph over these agents."""
        rng = generator(seed if self.seed is None else self.seed, "topology", self.kind)
        order = [int(place) for place in rng.permutation(len(names))]
        free = [min(self.degree, len(names) - 1)] * len(names)
        pairs, joined = [], order[:1]  # those in the tree that may have one more link
        for new in order[1:]:
            chosen = int(rng.integers(len(joined)))
            old = joined[chosen]
            pairs.append((old, new))
            free[old], free[new] = free[old] - 1, free[new] - 1
            if not free[old]:
                joined[chosen] = joined[-1]
                joined.pop()
            joined.append(new)
        # Whoever may have more links offers them. Half of the offers are paired; a link that is there stays one.
        offers = rng.permutation(np.repeat(np.arange(len(names)), free)).tolist()
        pairs += zip(offers[0 : len(offers) // 2 : 2], offers[1 : len(offers) // 2 : 2], strict=False)
        return self._join(names, pairs)


@dataclass(frozen=True, kw_only=True)
class _Drawn(Graph):
    """Base of graphs that are drawn again until one is connected."""

    seed: int | None = setting(None, "of the graph; unset: that of the run", at_least=0)

    def over(self, names: Sequence[str], seed: int = 0) -> Topology:
        """This graph over these agents."""
        for attempt in range(TRIES):
            number = derive(seed if self.seed is None else self.seed, "topology", self.kind, attempt)
            topology = self._join(names, self._draw(len(names), number))
            if topology.unreached is None:
                return topology
        do, found = self._advice(len(names))
        raise RecipeError(
            f"A graph of the kind '{self.kind}' must be connected.", f"none of {TRIES} drawn for {found} was", do
        )

    @abstractmethod
    def _draw(self, agents: int, seed: int) -> Pairs:
        """The links of one such graph."""

    @abstractmethod
    def _advice(self, agents: int) -> tuple[str, str]:
        """What to do when none is connected, and what was asked for."""


@dataclass(frozen=True, kw_only=True)
class Geometric(_Drawn):
    """Agents are random points of a square with sides of 1; those within `radius` of each other are linked."""

    kind = "geometric"
    radius: float = setting(help="the largest distance of a link, in sides of the square", above=0)

    def _draw(self, agents: int, seed: int) -> Pairs:
        from scipy.spatial import KDTree

        check_pairs(agents)
        points = generator(seed).random((agents, 2))
        pairs: Pairs = KDTree(points).query_pairs(self.radius, output_type="ndarray").tolist() if agents else []
        return pairs

    def _advice(self, agents: int) -> tuple[str, str]:
        enough = math.sqrt(math.log(agents) / (math.pi * agents))
        do = f"Raise the radius: of {agents} agents, many graphs are connected above {enough:.2g}."
        return do, f"{agents} agents and the radius {self.radius:g}"


@dataclass(frozen=True, kw_only=True)
class ErdosRenyi(_Drawn):
    """Any two agents are linked with the same probability."""

    kind = "erdos_renyi"
    probability: float = setting(help="that two agents are linked", above=0, at_most=1)

    def _draw(self, agents: int, seed: int) -> Pairs:
        check_pairs(agents)
        linked = generator(seed).random((agents, agents)) < self.probability
        return [(int(a), int(b)) for a, b in np.argwhere(np.triu(linked, 1))]

    def _advice(self, agents: int) -> tuple[str, str]:
        enough = math.log(agents) / agents
        do = f"Raise the probability: of {agents} agents, many graphs are connected above {enough:.2g}."
        return do, f"{agents} agents and the probability {self.probability:g}"


@dataclass(frozen=True, kw_only=True)
class Expander(_Drawn):
    """A random graph in which everyone has `degree` links: few links, and short paths."""

    kind = "expander"
    degree: int = setting(3, "how many links every agent has", at_least=3)

    def _draw(self, agents: int, seed: int) -> Pairs:
        import networkx

        if self.degree >= agents or self.degree * agents % 2:
            raise RecipeError(
                "An expander needs more agents than its degree, and an even number of agents or an even degree.",
                f"{agents} agents and the degree {self.degree}",
                "Change the degree or the number of agents.",
            )
        return list(networkx.random_regular_graph(self.degree, agents, seed=seed).edges)

    def _advice(self, agents: int) -> tuple[str, str]:
        return "Raise the degree.", f"{agents} agents and the degree {self.degree}"


@dataclass(frozen=True, kw_only=True)
class Edges(Graph):
    """The links as they are listed."""

    kind = "edges"
    edges: tuple[list[str], ...] = setting(help='pairs of agents\' names: [["a", "b"], ["b", "c"]]')
    directed: bool = setting(False, "whether only the first of a pair sends to the second; needs a matrix")
    matrix: tuple[list[float], ...] | None = setting(
        None, "mixing weights, a row per receiving agent; unset: Metropolis-Hastings"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for edge in self.edges:
            if len(edge) != 2 or not all(isinstance(end, str) for end in edge):
                raise RecipeError("topology.edges must be pairs of agents' names.", f"{edge!r}", 'Write ["a", "b"].')

    def over(self, names: Sequence[str], seed: int = 0) -> Topology:
        """This graph over these agents."""
        pairs = [(a, b) for a, b in self.edges]
        return Topology(names, pairs, directed=self.directed, weights=self.matrix, kind=self.kind)


@dataclass(frozen=True, kw_only=True)
class Matrix(Graph):
    """The graph of a mixing matrix W: agent m sends to n where row n has a weight for m.

    Rows are receivers. Bistritz et al. write w_nm for the link from n to m: transpose a directed W of theirs.
    """

    kind = "matrix"
    matrix: tuple[list[float], ...] = setting(
        help="a row per agent, in their order; rows and columns sum to 1, the diagonal is above 0"
    )

    def over(self, names: Sequence[str], seed: int = 0) -> Topology:
        """This graph over these agents."""
        return Topology.from_matrix(names, self.matrix)


def most_square(number: int) -> tuple[int, int]:
    """Rows and columns of the most square grid with this many places."""
    rows = next((rows for rows in range(math.isqrt(number), 0, -1) if number % rows == 0), 1)
    return rows, number // rows


KINDS: dict[str, type[Graph]] = {
    cls.kind: cls
    for cls in (Star, Complete, Ring, Silent, Islands, Torus, Random, Geometric, ErdosRenyi, Expander, Edges, Matrix)
}
