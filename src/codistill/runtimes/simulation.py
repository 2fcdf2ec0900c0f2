"""The simulation: all nodes in this process, one thread."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np

from codistill.results.outputs import View
from codistill.results.records import Scores
from codistill.runtimes.description import RunDescription
from codistill.runtimes.evaluation import score
from codistill.runtimes.feature_samples import features_of
from codistill.runtimes.round_report import Report
from codistill.runtimes.runtime import Runtime, load_nodes, one_thread, save_nodes


class Simulation(Runtime):
    """All nodes in this process, one thread."""

    def __init__(self, description: RunDescription) -> None:
        super().__init__(description)
        self._host = description.host(description.nodes)
        self._single = ExitStack()
        self._single.enter_context(one_thread())

    def run(self, phase: int, present: tuple[str, ...]) -> Report:
        """Run one phase here."""
        return self._host.run(phase, present)

    def evaluate(self, samples: int | None, views: dict[str, View] | None = None) -> dict[str, Scores]:
        """Evaluate every agent here."""
        return {agent.name: score(self.description, agent, samples, views) for agent in self.description.agents}

    def features(self) -> dict[str, np.ndarray]:
        """Compute them here."""
        return features_of(self.description, self.description.agents)

    def save(self) -> dict[str, bytes]:
        """Pack every node."""
        return save_nodes(self.description.nodes)

    def load(self, saved: dict[str, bytes]) -> None:
        """Unpack every node."""
        load_nodes(self.description.nodes, saved)

    def close(self) -> None:
        """Return to the threads there were before."""
        self._single.close()
