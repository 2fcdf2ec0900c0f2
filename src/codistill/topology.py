"""Who may speak to whom, and with which mixing weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from codistill.errors import RecipeError, nearest

HUB = "hub"


class Topology:
    """An undirected graph of agents; `hub=True` makes it a star whose centre is the hub."""

    def __init__(self, names: Sequence[str], edges: Iterable[tuple[str, str]], *, hub: bool = False) -> None:
        self.names = tuple(names)
        self.hub = hub
        linked: dict[str, set[str]] = {name: set() for name in self.names}
        for left, right in edges:
            for end in (left, right):
                if end not in linked:
                    raise RecipeError("An edge must join two agents.", f"'{end}'", nearest(end, linked))
            if left != right:
                linked[left].add(right)
                linked[right].add(left)
        # In the order of the roster, so that sums over neighbours are equal everywhere to the bit.
        self._neighbours = {name: tuple(other for other in self.names if other in linked[name]) for name in linked}

    @classmethod
    def star(cls, names: Sequence[str]) -> Topology:
        """Everyone speaks to the hub, and to nobody else."""
        return cls(names, (), hub=True)

    @classmethod
    def complete(cls, names: Sequence[str]) -> Topology:
        """Everyone speaks to everyone."""
        return cls(names, [(a, b) for i, a in enumerate(names) for b in names[i + 1 :]])

    @classmethod
    def ring(cls, names: Sequence[str]) -> Topology:
        """Everyone speaks to the one before and the one after."""
        return cls(names, [(name, names[(i + 1) % len(names)]) for i, name in enumerate(names)])

    @classmethod
    def silent(cls, names: Sequence[str]) -> Topology:
        """Nobody speaks."""
        return cls(names, ())

    def neighbours(self, name: str) -> tuple[str, ...]:
        """The agents that `name` may speak to, in the order of the roster."""
        return self._neighbours[name]

    def listeners(self, name: str) -> tuple[str, ...]:
        """Everyone that `name` may speak to, the hub included."""
        if name == HUB:
            return self.names
        return (*self._neighbours[name], HUB) if self.hub else self._neighbours[name]

    def may_speak(self, sender: str, receiver: str) -> bool:
        """Whether there is a link."""
        if HUB in (sender, receiver):
            return self.hub
        return receiver in self._neighbours[sender]

    def weights(self, name: str) -> Mapping[str, float]:
        """Metropolis-Hastings weights of a node's neighbours: w_ab = 1 / (1 + max(deg a, deg b)).

        With the rest on the diagonal, W is symmetric and doubly stochastic on any undirected graph.
        """
        degree = len(self._neighbours[name])
        return {other: 1.0 / (1 + max(degree, len(self._neighbours[other]))) for other in self._neighbours[name]}


KINDS = {
    "star": Topology.star,
    "complete": Topology.complete,
    "ring": Topology.ring,
    "silent": Topology.silent,
}
