"""The rounds of one agent in a run without rounds: started and resumed by whoever has its messages and its time.

The same for a simulation, where time is virtual, and for an agent in a process of its own. What it computed so far in
a round can be computed again from the state at its start and from what it received since: so a checkpoint needs no
state from the middle of a round.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from codistill.agent import Agent
from codistill.clock import SECOND
from codistill.effects import Effect, Receive, Send
from codistill.hooks import own_files
from codistill.learners.tensors import copied
from codistill.protocol import Protocol
from codistill.runtimes.divergence import guarded_round
from codistill.runtimes.host import foreign
from codistill.runtimes.message_in_transit import Parcel, opened
from codistill.runtimes.round_report import Report
from codistill.source_lines import add_line

Entry = tuple[int, dict[str, bytes] | None]  # when a round went on, and with which messages; None: after sending


class OwnRounds:
    """Drives one agent from effect to effect, round after round. All times are in nanoseconds since the run's start."""

    def __init__(self, agent: Agent, protocol: Protocol, after: Callable[[Agent, int], Any] | None = None) -> None:
        agent.place()
        self.agent, self._after = agent, after
        self._whole, self._protocol = protocol, protocol.chosen(agent.choices)
        self.done = 0  # rounds of its own that it has completed
        self.began = 0  # when the current round began
        self.effect: Effect | None = None  # what the current round has come to; None: its end
        self._coroutine: Coroutine[Effect, Any, None] | None = None
        self._log: list[Entry] = []  # of the current round
        self._start: dict[str, Any] = {}  # learner and state as they were when the current round began
        self._seen = _reader(agent)

    @property
    def running(self) -> bool:
        """Whether it is in a round."""
        return self._coroutine is not None

    def begin(self, now: int) -> None:
        """Begin the next round, and compute until it sends, receives or ends."""
        agent = self.agent
        self._start = copied({"learner": agent.learner.state(), "state": agent.state})
        self.began, self._log = now, []
        with agent.computing():
            agent.start(self.done, agent.roster)
        agent.work, agent.time = 0, now / SECOND
        self._coroutine = guarded_round(self._protocol, agent, self.done)
        self._compute(None)

    def go_on(self, now: int, parcels: Mapping[str, Parcel] | None = None) -> None:
        """Compute from the effect that it has come to until the next; `parcels`: what it receives, by sender."""
        agent, effect, answer = self.agent, self.effect, None
        if isinstance(effect, Receive):
            self._log.append((now, {sender: parcel.data for sender, parcel in (parcels or {}).items()}))
            answer = opened(agent, effect, parcels or {})
        else:
            self._log.append((now, None))
        agent.time = now / SECOND
        self._compute(answer)

    def take_work(self) -> int:
        """The gradient steps since this was last asked."""
        work, self.agent.work = self.agent.work, 0
        return work

    def end(self, report: Report) -> None:
        """Count the round that has come to its end, let the safeguard judge it, and report on it."""
        self._coroutine = None
        if self._after:
            self._after(self.agent, self.done)
        self.done += 1
        report.collect(self.agent)

    def _compute(self, answer: Any) -> None:
        assert self._coroutine is not None
        try:
            with self.agent.computing():
                effect = self._coroutine.send(answer)
            if not isinstance(effect, Send | Receive):
                self._coroutine.throw(foreign(effect))
            self.effect = effect
        except StopIteration:
            self.effect = None
        except Exception as error:
            error.add_note(f"This happened at '{self.agent.name}' in its round {self.done + 1}.")
            add_line(error, own_files(self._whole))
            raise

    # --- as it was at the end of its last completed round -------------------------------------------

    def last_completed(self) -> Agent:
        """The agent as it was at the end of its last completed round; a copy, if it is in another one."""
        if not self.running:
            return self.agent
        seen, start = self._seen, copied(self._start)
        seen.learner.restore(start["learner"])
        seen.state, seen.memo = start["state"], {}
        seen.unreported = self.agent.unreported  # what it finds wrong is part of the next round's report
        return seen

    def abandon(self) -> None:
        """Return to the end of the last completed round."""
        if self._coroutine is not None:
            self._coroutine.close()
            self._coroutine = None
            self.agent.learner.restore(self._start["learner"])
            self.agent.state, self.agent.memo = self._start["state"], {}

    # --- checkpoints ---------------------------------------------------------------------------------

    def dump(self) -> dict[str, Any]:
        """What the agent keeps, as it was at the end of its last completed round."""
        return {**self.agent.dump(), **(self._start if self.running else {})}

    def progress(self) -> dict[str, Any]:
        """How far it is: with this and `dump`, the current round can be computed again."""
        return {"done": self.done, "began": self.began, "log": self._log if self.running else None}

    def resume(self, progress: Mapping[str, Any], parcel: Callable[[bytes], Parcel]) -> None:
        """Go back to such a moment; the agent has returned to what was dumped, and what it sent is not sent again."""
        self.done = progress["done"]
        if progress["log"] is None:
            return
        self.begin(progress["began"])
        for now, received in progress["log"]:
            self.go_on(now, {sender: parcel(data) for sender, data in (received or {}).items()})
        self.take_work()


def _reader(agent: Agent) -> Agent:
    """A copy of an agent that predicts while the agent itself is in the middle of a round."""
    seen = copy.copy(agent)
    seen.learner = copy.deepcopy(agent.learner)
    return seen
