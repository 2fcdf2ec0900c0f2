"""What an agent does under a hub in a run without rounds: its own rounds, and now and then a report on itself."""

from __future__ import annotations

from dataclasses import dataclass

from codistill.errors import StorageError
from codistill.results.outputs import View
from codistill.results.records import Scores
from codistill.runtimes.description import RunDescription
from codistill.runtimes.evaluation import score
from codistill.runtimes.network.commanded_agent import resumed
from codistill.runtimes.network.connections import Connections
from codistill.runtimes.network.limits import derived_limit
from codistill.runtimes.network.own_pace import OwnPace
from codistill.runtimes.network.state_store import StateStore
from codistill.runtimes.round_report import Report
from codistill.wire.state import pack

_ANY = 1 << 62  # a number of rounds above all others


@dataclass(frozen=True)
class OwnReport:
    """What an agent has done since its last report, and how well it answers now."""

    done: int  # rounds of its own, since the start of the run
    report: Report
    scores: Scores


class AsynchronousAgent:
    """The agent of a run without rounds with a hub; its states are numbered by its own rounds."""

    uncounted = False  # every round of its own counts

    def __init__(self, description: RunDescription, connections: Connections) -> None:
        self._description, self._connections = description, connections
        self._agent = description.agents[0]
        limit = connections.network.message_limit or derived_limit(description)
        connections.transport.accept(limit)
        self._pace = OwnPace(description, connections, limit)
        self.states = StateStore(None)  # of the run, once its name is known
        self.is_going = False
        self._begun = False
        self._kept = -1  # the rounds of its own that it has stored last
        self._part: int | None = None  # test samples of an evaluation
        self._evaluate_every = self._store_every = 1  # periods
        self._reported = self._evaluated = self._stored = -1  # the periods in which it last did so

    def return_to(self, done: int) -> int:
        """Go on as it is or, in a new process, with its newest state; the number of rounds of its own."""
        self.is_going = False  # until it is told to
        self._pace.stop_waiting()
        found = None if self._begun else self.states.newest(_ANY)
        if found is not None:
            self._pace.rounds.done = self._kept = resumed(self._agent, found)
            self._begun = True
        return self._pace.rounds.done

    def go(self, elapsed: float, samples: int, part: int | None, evaluate_every: int, store_every: int) -> None:
        """Start, or go on, as the hub says: after so many seconds of the run, with this much evaluated and stored."""
        self._pace.set_time(elapsed)
        self._part, self._evaluate_every, self._store_every = part, max(1, evaluate_every), store_every
        self._begin(samples)
        self.is_going = True

    def _begin(self, samples: int) -> None:
        if not self._begun:
            self._pace.begin(samples)
            self._begun = True
        else:
            self._agent.join(samples)

    def advance(self) -> OwnReport | None:
        """A step of its rounds; once in a period, after a round, a report."""
        ended, period = self._pace.advance(), self._pace.period
        if not ended or period == self._reported:
            return None
        self._reported = period
        scores: Scores = {}
        if period // self._evaluate_every != self._evaluated:
            self._evaluated = period // self._evaluate_every
            scores = score(self._description, self._pace.rounds.last_completed(), self._part)
        if self._store_every and period // self._store_every != self._stored:
            self._stored = period // self._store_every
            self.store()
        return OwnReport(self._pace.rounds.done, self._pace.take_report(), scores)

    def last_report(self) -> OwnReport:
        """What there is to report since the last time, without scores."""
        return OwnReport(self._pace.rounds.done, self._pace.take_report(), {})

    def store(self) -> None:
        """Store its state of the last completed round."""
        done = self._pace.rounds.done
        if not self._begun or done == self._kept:
            return
        try:
            self.states.put(done, pack(self._pace.rounds.dump()), store=True)
            self._kept = done
        except StorageError as error:
            self._connections.tell(f"{error.must} Found: {error.found}. Continuing from memory: free some space.")

    def evaluate(self, part: int | None, samples: int, *, views: bool) -> tuple[View, Scores]:
        """The last evaluation: its rounds are over. Its outputs on the common test set, if `views`, and its scores."""
        self._begin(samples)
        self.end()
        seen: dict[str, View] | None = {} if views else None
        scores = score(self._description, self._agent, part, seen)
        return (seen or {}).get(self._agent.name, {}), scores

    def end(self) -> None:
        """Return to the end of the last completed round, store it, and start no other one."""
        self.is_going = False
        self._pace.rounds.abandon()
        self.store()
