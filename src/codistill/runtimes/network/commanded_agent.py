"""What an agent does when its hub commands it: rounds, evaluation, training alone; and the states it can return to."""

from __future__ import annotations

import time

from codistill.agent import Agent
from codistill.errors import CheckpointError, NetworkError, StorageError
from codistill.results.outputs import View
from codistill.results.records import Baseline, RoundEnded, Scores
from codistill.runtimes.description import RunDescription
from codistill.runtimes.evaluation import score
from codistill.runtimes.host import BEGIN
from codistill.runtimes.network.connections import Connections
from codistill.runtimes.network.frame_header import Turn
from codistill.runtimes.network.imitated_time import imitated_time
from codistill.runtimes.network.limits import derived_limit
from codistill.runtimes.network.state_store import StateStore
from codistill.runtimes.round_report import Report
from codistill.runtimes.running import measure_alone
from codistill.runtimes.runtime import ShouldStop
from codistill.topology import HUB
from codistill.wire.state import pack, unpack

_PROGRESS = 0.5  # seconds between two messages of an agent that trains alone


class CommandedAgent:
    """The agent of a run with a hub, with its host and its states."""

    def __init__(self, description: RunDescription, connections: Connections) -> None:
        self._description, self._connections = description, connections
        self._agent = description.agents[0]
        self._host = description.host([self._agent], connections)
        self._host.time = imitated_time(description)
        connections.backlog = self._host.backlog
        self._host.message_limit = connections.network.message_limit or derived_limit(description)
        connections.transport.accept(self._host.message_limit)
        self.states = StateStore(None)  # of the run, once its name is known
        self._begun = False
        self.uncounted = False  # whether its state includes a round that the hub has not counted
        self._beginning = Report()  # of the phase before the first round; sent with that of the first round

    def return_to(self, done: int) -> int:
        """Restore the newest state that counts; the number of its round."""
        found = self.states.newest(done)
        if found is None:
            if self._begun:
                raise NetworkError(
                    "An agent needs a state of a round that the hub has counted.",
                    f"the hub has counted {done} rounds, and all states of this agent are newer",
                    "Join again with a new process: it starts with a new model.",
                )
            self.uncounted = False
            return 0
        self._begun, self.uncounted = True, False
        return resumed(self._agent, found)

    def run_round(self, turn: Turn, present: tuple[str, ...], samples: int) -> Report:
        """Take part in a round, after the phase before the first one where that is still to be done."""
        if self.uncounted:
            self.return_to(turn.phase)  # its last round was not counted
        self._begin(samples)
        self.uncounted = True
        self._connections.begin(turn, (HUB,))
        before, self._beginning = self._beginning, Report()
        report = before.add(self._host.run(turn.phase, present))
        self._connections.finish()
        return report

    def _begin(self, samples: int) -> None:
        """The phase before its first round, whether it takes part in a round or is only evaluated."""
        self._agent.join(samples)
        if not self._begun:
            self._connections.begin(Turn(BEGIN), ())
            self._beginning = self._host.run(BEGIN, self._agent.roster)
            self._begun = True
            self.states.put(0, pack(self._agent.dump()), store=False)

    def keep(self, done: int, *, store: bool) -> str | None:
        """Keep the state of a round that counts; returns what went wrong, if anything did."""
        self.uncounted = False
        try:
            self.states.put(done, pack(self._agent.dump()), store=store)
        except StorageError as error:
            self._connections.tell(f"{error.must} Found: {error.found}. Continuing from memory: free some space.")
            return f"it could not store round {done}: {error.found}; it continues from memory"
        return None

    def store(self) -> str | None:
        """Store the newest state on disk; returns what went wrong, if anything did."""
        try:
            self.states.store_newest()
        except StorageError as error:
            return f"it could not store its state: {error.found}; it continues from memory"
        return None

    def evaluate(self, part: int | None, samples: int, *, views: bool) -> tuple[View, Scores]:
        """Its outputs on the common test set, if `views`, and its scores."""
        self._begin(samples)
        seen: dict[str, View] | None = {} if views else None
        scores = score(self._description, self._agent, part, seen)
        return (seen or {}).get(self._agent.name, {}), scores

    def train_alone(self, samples: int, number: int, should_stop: ShouldStop) -> Baseline:
        """What a copy of its model reaches that is trained alone; `number`: of the hub's command."""
        self._agent.learner.join(samples)
        progress = _TrainingAlone(self._connections, number)
        return measure_alone(self._description, should_stop, [progress])


def resumed(agent: Agent, found: tuple[int, bytes]) -> int:
    """Let an agent go on with a state that was kept; the number of its rounds."""
    try:
        agent.resume(unpack(found[1]))
    except Exception as error:  # a state of another model: each library has its own way to say so
        raise CheckpointError(
            "An agent must go on with the model and the protocol of its state.",
            f"{type(error).__name__}: {error}"[:200],
            "Use the model that it was trained with; or choose another state by 'codistill restore'.",
        ) from error
    return found[0]


class _TrainingAlone:
    """Tells the hub which rounds of training alone are done, so that its deadline is about the next one only."""

    def __init__(self, connections: Connections, number: int) -> None:
        self._connections, self._number = connections, number
        self._told = time.monotonic()

    def round_ended(self, record: RoundEnded) -> None:
        if time.monotonic() - self._told > _PROGRESS:
            self._told = time.monotonic()
            self._connections.command(HUB, do="working", number=self._number, round=record.round)
