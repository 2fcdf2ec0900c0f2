"""The federations that are measured."""

from __future__ import annotations

from typing import Any

import numpy as np

import codistill as cd
from codistill.core.errors import DataError
from codistill.learners.zoo import build
from codistill.topology.graphs import Graph


def images(count: int) -> tuple[np.ndarray, np.ndarray]:
    """MNIST where a data folder has it, otherwise noise of the same shape: the arithmetic is the same."""
    from codistill.data.datasets import load

    try:
        data = load("mnist", samples=min(count, 60_000))
        x, y = data.x, data.y
    except DataError:
        rng = np.random.default_rng(0)
        x, y = rng.random((count, 1, 28, 28), dtype=np.float32), rng.integers(0, 10, count)
    return x[:count], y[:count]


def lenets(
    protocol: cd.Protocol,
    *,
    agents: int = 10,
    samples: int = 1200,
    test: int = 0,
    safeguard: bool = False,
    **options: Any,
) -> cd.Federation:
    """W1: agents with LeNet-5 on 1,200 samples in all; options are those of their learners."""
    x, y = images(samples)
    parts = np.array_split(np.arange(samples), agents)
    members = [
        cd.Agent(f"a{i}", cd.TorchLearner(build("lenet5", (1, 28, 28), 10), **options), x[part], y[part])
        for i, part in enumerate(parts)
    ]
    public = np.random.default_rng(1).random((1000, 1, 28, 28), dtype=np.float32)
    tested = images(test) if test else None
    return cd.Federation(members, protocol, public=public, test=tested, classes=10, safeguard=safeguard)


def devices(count: int, protocol: cd.Protocol, graph: Graph, *, samples: int) -> cd.Federation:
    """Agents with LeNet-5 on a graph, each with `samples` samples; 1,024 public images."""
    x, y = images(count * samples)
    members = [
        cd.Agent(f"a{i}", cd.TorchLearner(build("lenet5", (1, 28, 28), 10)), x[i::count], y[i::count])
        for i in range(count)
    ]
    topology = graph.over([member.name for member in members])
    public = np.random.default_rng(1).random((1024, 1, 28, 28), dtype=np.float32)
    return cd.Federation(members, protocol, public=public, classes=10, topology=topology)


def pair(protocol: cd.Protocol, model: str, samples: int, batch: int, epochs: int) -> cd.Federation:
    """Two agents with the same architecture, each fitted anew in every round; squared loss."""
    x, y = images(2 * samples)
    options = {"loss": "squared", "batch_size": batch, "epochs": epochs}
    members = [
        cd.Agent(f"a{i}", cd.TorchLearner(build(model, (1, 28, 28), 10), **options), x[i::2], y[i::2])  # type: ignore[arg-type]
        for i in range(2)
    ]
    return cd.Federation(members, protocol, classes=10)


def small(agents: int, protocol: cd.Protocol, graph: Graph | None = None) -> cd.Federation:
    """Logistic regression, 20 samples each."""
    rng = np.random.default_rng(0)
    members = [
        cd.Agent(f"a{i}", build("logistic", (20,), 10), rng.random((20, 20), dtype=np.float32), np.arange(20) % 10)
        for i in range(agents)
    ]
    public = rng.random((64, 20), dtype=np.float32)
    topology = graph.over([member.name for member in members]) if graph else None
    return cd.Federation(members, protocol, public=public, classes=10, topology=topology)
