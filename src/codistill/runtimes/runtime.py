"""What every runtime can do: drive rounds, evaluate, save and restore; and the simulation, which does it here."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from threadpoolctl import threadpool_limits

from codistill.agent import Agent, Node
from codistill.faults import Faults
from codistill.protocol import Protocol
from codistill.randomness import generator, seed_libraries
from codistill.results.outputs import View, view
from codistill.runtimes.host import Host, Report, Watcher
from codistill.runtimes.links import Carrier
from codistill.wire.compression import Compression
from codistill.wire.state import pack, unpack

Scores = dict[str, float]


@dataclass(frozen=True)
class Stage:
    """Everything that a runtime brings to life: the nodes, what they do, and what they are tested on."""

    nodes: list[Node]
    protocol: Protocol
    faults: Faults
    test: tuple[np.ndarray, np.ndarray] | None
    seed: int
    watchers: tuple[Watcher, ...] = ()  # told of every message that is sent: (sender, receiver, bytes)
    compression: Compression | None = None
    roster: tuple[str, ...] = ()  # all agents that are told of, where not all of them are nodes here

    @property
    def names(self) -> tuple[str, ...]:
        """The agents that this run tells of."""
        return self.roster or tuple(agent.name for agent in self.agents())

    def agents(self) -> list[Agent]:
        """The agents, without the hub."""
        return [node for node in self.nodes if isinstance(node, Agent)]

    def host(self, nodes: list[Node], links: Carrier | None = None) -> Host:
        """A host for some of the nodes."""
        return Host(nodes, self.protocol, self.faults, links, self.watchers, self.compression)


class Runtime(ABC):
    """Drives the coroutines and carries the messages."""

    @abstractmethod
    def run(self, phase: int, present: tuple[str, ...]) -> Report:
        """Drive one phase (-1: begin; otherwise the round) to its end."""

    @abstractmethod
    def evaluate(self, samples: int | None, views: dict[str, View] | None = None) -> dict[str, Scores]:
        """Every agent's scores on the common test set, or on a seeded part of it; `views`, if given, is filled."""

    @abstractmethod
    def save(self) -> dict[str, bytes]:
        """What lives across rounds, by node."""

    @abstractmethod
    def load(self, saved: dict[str, bytes]) -> None:
        """Return all nodes to what was saved."""

    @abstractmethod
    def close(self) -> None:
        """Give up all resources."""


class Simulation(Runtime):
    """All nodes in this process, one thread."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._host = stage.host(stage.nodes)
        self._single = ExitStack()
        self._single.enter_context(one_thread())

    def run(self, phase: int, present: tuple[str, ...]) -> Report:
        """Drive one phase here."""
        return self._host.run(phase, present)

    def evaluate(self, samples: int | None, views: dict[str, View] | None = None) -> dict[str, Scores]:
        """Ask every agent here."""
        return {agent.name: score(self._stage, agent, samples, views) for agent in self._stage.agents()}

    def save(self) -> dict[str, bytes]:
        """Pack every node."""
        return save_nodes(self._stage.nodes)

    def load(self, saved: dict[str, bytes]) -> None:
        """Unpack every node."""
        load_nodes(self._stage.nodes, saved)

    def close(self) -> None:
        """Return to the threads there were before."""
        self._single.close()


def save_nodes(nodes: list[Node]) -> dict[str, bytes]:
    """Pack nodes by name."""
    return {node.name: pack(node.dump()) for node in nodes}


def load_nodes(nodes: list[Node], saved: dict[str, bytes]) -> None:
    """Unpack nodes by name."""
    for node in nodes:
        node.resume(unpack(saved[node.name]))


def warm_up() -> None:
    """torch's first optimiser imports for about two seconds: now, and not in the first round."""
    torch.optim.SGD([torch.zeros(1)], lr=1.0)


@contextmanager
def one_thread() -> Iterator[None]:
    """Agents compute with one thread each: faster side by side, and equal to the bit everywhere."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(limits=1):
            yield
    finally:
        torch.set_num_threads(threads)


def score(stage: Stage, agent: Agent, samples: int | None, views: dict[str, View] | None = None) -> Scores:
    """An agent's accuracy (or error, for real-valued targets) on the common test set and on its own mix.

    Where `views` is given, what is kept of its answers on the common test set is put there.
    """
    scores: Scores = {}
    if not agent.learner.ready:
        return scores  # absent so far: it has nothing to say yet
    seed_libraries(stage.seed, agent.name, "evaluate")
    if stage.test is not None:
        x, y = _part(stage, samples)
        answers = stage.protocol.predict(agent, x)
        scores.update(_measure(answers, y, agent))
        if views is not None:
            among = len(agent.roster)
            seen = view(answers, y, probabilistic=agent.learner.probabilistic, agents=among)
            views.update({} if seen is None else {agent.name: seen})
    if agent.test is not None:
        own = _measure(stage.protocol.predict(agent, agent.test[0]), agent.test[1], agent)
        scores["own_accuracy" if "accuracy" in own else "own_rmse"] = own.get("accuracy", own.get("rmse", 0.0))
    return scores


def _part(stage: Stage, samples: int | None) -> tuple[np.ndarray, np.ndarray]:
    assert stage.test is not None
    x, y = stage.test
    if samples is None or samples >= len(x):
        return x, y
    chosen = np.sort(generator(stage.seed, "evaluation").choice(len(x), samples, replace=False))
    return x[chosen], y[chosen]


def _measure(answers: np.ndarray, y: np.ndarray, agent: Agent) -> Scores:
    if y.ndim == 2:
        return {"rmse": float(np.sqrt(np.mean((answers - y) ** 2)))}
    right = answers.argmax(axis=1) == y
    scores = {"accuracy": float(np.mean(right))}
    if agent.class_mix is not None:
        # On the agent's own mix of classes: test samples weighted by how often the agent sees their class.
        tested = np.bincount(y, minlength=len(agent.class_mix))
        weights = np.divide(agent.class_mix, tested, out=np.zeros(len(tested)), where=tested > 0)[y]
        if weights.sum() > 0:
            scores["own_accuracy"] = float(np.average(right, weights=weights))
    return scores
