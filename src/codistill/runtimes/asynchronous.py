"""The simulation of a run without rounds: all nodes in this process, in virtual time."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import ExitStack

import numpy as np

from codistill.results.outputs import View
from codistill.results.records import Scores
from codistill.runtimes.description import RunDescription
from codistill.runtimes.evaluation import score
from codistill.runtimes.event_host import EventHost
from codistill.runtimes.feature_samples import features_of
from codistill.runtimes.host import BEGIN
from codistill.runtimes.round_report import Report
from codistill.runtimes.runtime import Runtime, load_nodes, one_thread
from codistill.wire.state import pack, unpack

UNDER_WAY = ":under way"  # beside the nodes of a checkpoint: no agent can have this name


class AsynchronousSimulation(Runtime):
    """Every agent at its own pace; what elsewhere is a round is a period of virtual time."""

    def __init__(self, description: RunDescription) -> None:
        super().__init__(description)
        self._host = EventHost(description)
        self._single = ExitStack()
        self._single.enter_context(one_thread())

    @property
    def saved_nodes(self) -> tuple[str, ...]:
        """The nodes, and beside them what is under way."""
        return (*super().saved_nodes, UNDER_WAY)

    def run(self, phase: int, present: tuple[str, ...]) -> Report:
        """Run one period; whoever is present in it may start rounds. `begin` takes no time."""
        if phase == BEGIN:
            return self.description.host(self.description.nodes).run(BEGIN, present)
        return self._host.run(phase)

    def evaluate(self, samples: int | None, views: dict[str, View] | None = None) -> dict[str, Scores]:
        """Evaluate every agent as it was at the end of its last round."""
        return self.evaluate_some(self._host.rounds.keys(), samples, views)

    def evaluate_some(
        self, names: Collection[str], samples: int | None, views: dict[str, View] | None = None
    ) -> dict[str, Scores]:
        """Evaluate some agents in the same way."""
        wanted = frozenset(names)
        return {
            name: score(self.description, rounds.last_completed(), samples, views)
            for name, rounds in self._host.rounds.items()
            if name in wanted
        }

    def features(self) -> dict[str, np.ndarray]:
        """Of every agent as it was at the end of its last round."""
        return features_of(self.description, [rounds.last_completed() for rounds in self._host.rounds.values()])

    def save(self) -> dict[str, bytes]:
        """Every agent as it was at the end of its last round, the hub as it is, and what is under way."""
        saved = {name: pack(rounds.dump()) for name, rounds in self._host.rounds.items()}
        if self.description.hub is not None:
            saved[self.description.hub.name] = pack(self.description.hub.dump())
        return {**saved, UNDER_WAY: pack(self._host.save())}

    def load(self, saved: dict[str, bytes]) -> None:
        """Return to the end of a period: agents compute again what they had computed of their current rounds."""
        load_nodes(self.description.nodes, saved)
        self._host.load(unpack(saved[UNDER_WAY]))

    def finish(self, *, complete: bool) -> None:
        """Agents return to the end of their last rounds."""
        for rounds in self._host.rounds.values():
            rounds.abandon()

    def close(self) -> None:
        """Return to the threads there were before."""
        self._single.close()
