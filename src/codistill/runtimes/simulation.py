"""The simulation: all nodes in this process, one thread."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import ExitStack

import numpy as np

from codistill.clock import SECOND
from codistill.results.outputs import View
from codistill.results.records import Scores
from codistill.runtimes.description import RunDescription
from codistill.runtimes.evaluation import score_some
from codistill.runtimes.feature_samples import features_of
from codistill.runtimes.host import BEGIN
from codistill.runtimes.idle import IdleStates, load_with, save_with
from codistill.runtimes.round_report import Report
from codistill.runtimes.runtime import Runtime, one_thread
from codistill.runtimes.stored_state import Saved, StoredState, content_of
from codistill.runtimes.virtual_time import VirtualTime
from codistill.wire.state import pack

TIME = ":time"  # beside the nodes of a checkpoint, in a run with a clock: no agent can have this name


class Simulation(Runtime):
    """All nodes in this process, one thread; with a clock, in virtual time."""

    def __init__(self, description: RunDescription, idle: IdleStates | None = None) -> None:
        super().__init__(description)
        self._host = description.host(description.nodes)
        self._host.idle = self._idle = idle
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
        return self.evaluate_some(self.description.names, samples, views)

    def evaluate_some(
        self, names: Collection[str], samples: int | None, views: dict[str, View] | None = None
    ) -> dict[str, Scores]:
        """Evaluate some agents here."""
        return score_some(self.description, self.description.agents, names, samples, views, self._idle)

    def features(self) -> dict[str, np.ndarray]:
        """Compute them here."""
        return features_of(self.description, self.description.agents, self._idle)

    def save(self) -> dict[str, bytes | StoredState]:
        """Pack every node, and the time."""
        saved = save_with(self._idle, self.description.nodes)
        return {**saved, TIME: pack(self._host.time.save())} if self._host.time else saved

    def load(self, saved: Saved) -> None:
        """Unpack every node, and the time."""
        load_with(self._idle, self.description.nodes, saved)
        if self._host.time:
            self._host.time.load(content_of(saved[TIME]))

    def load_saved(self, saved: Saved) -> None:
        """The same: states in files stay there, if agents that are not at work are kept on disk."""
        self.load(saved)

    def close(self) -> None:
        """Return to the threads there were before."""
        self._single.close()
