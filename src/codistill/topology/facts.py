"""Figures of a graph for a person, and the graph as plain values in a run's folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from codistill.topology import Topology


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
    """For each agent the numbers of its neighbours as one text; and the rows of a given matrix."""
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
    """The graph that `as_plain` was given."""
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
