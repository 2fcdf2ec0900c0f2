"""What every runtime can do: run phases, evaluate, save and restore."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from threadpoolctl import threadpool_limits

from codistill.agent import Agent
from codistill.base_node import Node
from codistill.learners.ability import Ability
from codistill.results.outputs import View
from codistill.results.records import Baseline, Scores
from codistill.runtimes.description import RunDescription
from codistill.runtimes.plan import features_stay, present_only
from codistill.runtimes.round_report import Report
from codistill.runtimes.stored_state import Saved, packed
from codistill.wire.state import pack, unpack

ShouldStop = Callable[[], bool]


class Stopped(Exception):
    """A runtime was asked to stop while it was waiting for other nodes."""


def never() -> bool:
    """Nobody asks to stop."""
    return False


class Runtime(ABC):
    """Runs the nodes' coroutines and carries their messages."""

    def __init__(self, description: RunDescription) -> None:
        self.description = description

    @property
    def saved_nodes(self) -> tuple[str, ...]:
        """The nodes whose states `save` returns."""
        return tuple(node.name for node in self.description.nodes)

    def start(self, done: int, should_stop: ShouldStop = never) -> None:
        """Get ready for the round after the `done` that are done; `should_stop` ends any later wait."""

    def measure_baseline(self) -> Baseline | None:
        """What every agent reaches alone, where its data are; None: it is measured as a run of its own."""
        return None

    @abstractmethod
    def run(self, phase: int, present: tuple[str, ...]) -> Report:
        """Run one phase (-1: begin; otherwise the round) to its end."""

    @abstractmethod
    def evaluate(self, samples: int | None, views: dict[str, View] | None = None) -> dict[str, Scores]:
        """Every agent's scores on the common test set, or on a seeded part of it; `views`, if given, is filled."""

    def evaluate_some(
        self, names: Collection[str], samples: int | None, views: dict[str, View] | None = None
    ) -> dict[str, Scores]:
        """The same of some agents; only where all agents are at hand."""
        raise present_only(f"the runtime {type(self).__name__}")

    def features(self) -> dict[str, np.ndarray]:
        """Features (n, d) of the chosen test samples, by agent that has any; only where all agents are at hand."""
        raise features_stay(f"the runtime {type(self).__name__}")

    @abstractmethod
    def save(self) -> Saved:
        """What lives across rounds, by node."""

    @abstractmethod
    def load(self, saved: dict[str, bytes]) -> None:
        """Return the nodes to what was saved."""

    def load_saved(self, saved: Saved) -> None:
        """The same from what a checkpoint holds: some states may be in files."""
        self.load({name: packed(state) for name, state in saved.items()})

    def finish(self, *, complete: bool) -> None:
        """End the rounds: the agents at hand get their trained models, other machines are told."""

    def close(self) -> None:
        """Release all resources."""


def save_nodes(nodes: Sequence[Node]) -> dict[str, bytes]:
    """Pack nodes by name."""
    return {node.name: pack(node.dump()) for node in nodes}


def load_nodes(nodes: Sequence[Node], saved: dict[str, bytes]) -> None:
    """Unpack nodes by name."""
    for node in nodes:
        node.resume(unpack(saved[node.name]))


def warm_up(agents: Sequence[Agent] | None = None) -> None:
    """Import now what takes seconds, and not in the first round, nor in every process that is forked.

    That is what torch's first optimiser imports, and skops, in whose format models other than torch's are saved and
    sent: unless all `agents` of the federation are known to have torch models.
    """
    torch.optim.SGD([torch.zeros(1)], lr=1.0)
    if agents is None or any(Ability.GRADIENTS not in agent.learner.abilities for agent in agents):
        importlib.import_module("skops.io")


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
