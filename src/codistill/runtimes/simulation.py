"""The simulation: all nodes in this process, one thread."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np

from codistill.clock import SECOND
from codistill.results.outputs import View
from codistill.results.records import Scores
from codistill.runtimes.description import RunDescription
from codistill.runtimes.evaluation import score
from codistill.runtimes.feature_samples import features_of
from codistill.runtimes.host import BEGIN
from codistill.runtimes.round_report import Report
from codistill.runtimes.runtime import Runtime, load_nodes, one_thread, save_nodes
from codistill.runtimes.virtual_time import VirtualTime
from codistill.wire.state import pack, unpack

TIME = ":time"  # beside the nodes of a checkpoint, in a run with a clock: no agent can have this name


class Simulation(Runtime):
    """All nodes in this process, one thread; with a clock, in virtual time."""

    def __init__(self, description: RunDescription) -> None:
        super().__init__(description)
        self._host = description.host(description.nodes)
        if description.clock is not None:
            self._host.time = VirtualTime(description.clock, description.topology.names, description.seed)
        self._single = ExitStack()
        self._single.enter_context(one_thread())

    @property
    def saved_nodes(self) -> tuple[str, ...]:
        """The nodes, and beside them the time."""
        return (*super().saved_nodes, *([TIME] if self._host.time else []))

    def run(self, phase: int, present: tuple[str, ...]) -> Report:
        """Run one phase here; with a clock, of those who are online."""
        time = self._host.time
        if time is None or phase == BEGIN:
            return self._host.run(phase, present)
        online = time.present(present)
        report = self._host.run(phase, online) if online else Report()
        report.present = online
        report.measures += [(name, "time", time.now / SECOND) for name in self.description.names]
        return report

    def evaluate(self, samples: int | None, views: dict[str, View] | None = None) -> dict[str, Scores]:
        """Evaluate every agent here."""
        return {agent.name: score(self.description, agent, samples, views) for agent in self.description.agents}

    def features(self) -> dict[str, np.ndarray]:
        """Compute them here."""
        return features_of(self.description, self.description.agents)

    def save(self) -> dict[str, bytes]:
        """Pack every node, and the time."""
        saved = save_nodes(self.description.nodes)
        return {**saved, TIME: pack(self._host.time.save())} if self._host.time else saved

    def load(self, saved: dict[str, bytes]) -> None:
        """Unpack every node, and the time."""
        load_nodes(self.description.nodes, saved)
        if self._host.time:
            self._host.time.load(unpack(saved[TIME]))

    def close(self) -> None:
        """Return to the threads there were before."""
        self._single.close()
