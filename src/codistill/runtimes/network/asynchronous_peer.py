"""A peer of a run without rounds: it exchanges with its neighbours at its own pace, and counts its own periods.

Its rounds are computed in a thread of their own, which alone uses the connections. So the rows of a period are written
in time, however long a round takes; they hold what the agent was when it was last evaluated.
"""

from __future__ import annotations

import math
import threading
import time
from typing import Any

from codistill.results.outputs import View
from codistill.results.records import Scores
from codistill.runtimes.description import RunDescription
from codistill.runtimes.evaluation import score
from codistill.runtimes.host import BEGIN
from codistill.runtimes.network.connections import Connections
from codistill.runtimes.network.frame_header import Turn
from codistill.runtimes.network.options import RETURN
from codistill.runtimes.network.own_pace import OwnPace
from codistill.runtimes.network.peer_runtime import PeerRuntime
from codistill.runtimes.round_report import Report
from codistill.runtimes.runtime import Stopped, one_thread
from codistill.wire.state import pack, unpack

_POLL = 0.2  # seconds between checks while a period goes on


class AsynchronousPeer(PeerRuntime):
    """Drives one agent through rounds of its own, whatever its neighbours do."""

    def __init__(self, description: RunDescription, connections: Connections) -> None:
        super().__init__(description, connections)
        assert description.clock is not None
        self._period = description.clock.period
        self._pace = OwnPace(description, connections, connections.transport.limit)
        self._begun = False
        self._saved = b""  # its state at the end of a round, once in a period
        self._scores: Scores = {}
        self._judged = -1  # the period in which it was last evaluated and saved
        self._report, self._lock = Report(), threading.Lock()
        self._thread: threading.Thread | None = None
        self._ends = threading.Event()  # the thread is to end, or has ended
        self._error: BaseException | None = None

    def measure_baseline(self) -> None:  # type: ignore[override]
        """There is none, as under a hub."""

    def run(self, phase: int, present: tuple[str, ...]) -> Report:
        """Wait for the end of a period, while the rounds go on."""
        waited = self._begin(max(0, phase)) if self._thread is None else 0.0
        if phase == BEGIN:
            return Report(waited=waited)
        self._at, end = phase, (phase + 1) * self._period
        while (left := end - self._pace.elapsed) > 0:
            if self._stopping():
                raise Stopped
            self._ends.wait(min(left, _POLL))
            self._raise_error()
        if self.description.plan.is_last(phase):
            self._end()
        with self._lock:
            report, self._report = self._report, Report()
        name = self._agent.name
        report.measures += [(name, "time", end), (name, "own_rounds", float(self._pace.rounds.done))]
        report.waited = waited
        return report

    def _begin(self, phase: int) -> float:
        """Start the rounds, when a quorum of the neighbours is there. Seconds waited."""
        began = time.monotonic()
        self._wait_for_neighbours()
        waited = time.monotonic() - began
        if not self._begun:
            self._pace.begin(sum(self._samples.values()))
        self._save()
        self._pace.set_time(phase * self._period)
        self._thread = threading.Thread(target=self._work, name=f"rounds of {self._agent.name}", daemon=True)
        self._thread.start()
        return waited

    def _are_enough(self, connected: int, possible: int, waited: float) -> bool:
        """A quorum; all of them, if there is a time that the start waits for them. A restarted peer goes on soon."""
        patience = self._connections.network.patience
        if self._at >= 0 and waited > RETURN:
            return True
        share = 1.0 if patience is not None and waited < patience else self._connections.network.quorum
        return connected >= math.ceil(share * possible - 1e-9)

    def _jump(self, to: int, whom: str) -> None:
        """Nobody skips rounds: there are none to be in together."""

    # --- the thread of the rounds -------------------------------------------------------------------

    def _work(self) -> None:
        try:
            with one_thread():  # which is set for each thread
                while not self._ends.is_set():
                    self._pump(0)
                    self._repeat_hellos()
                    if self._pace.advance():
                        self._end_round()
        except BaseException as error:  # raised by whoever waits for the period
            self._error = error
        finally:
            self._ends.set()

    def _end_round(self) -> None:
        for receiver, sender, reason in self._pace.refused:
            if receiver == self._agent.name:
                self._connections.sessions.strike(sender, reason)
        period, plan = self._pace.period, self.description.plan
        if period == self._judged:
            return
        self._judged = period
        if plan.is_evaluated(period):
            self._scores = score(self.description, self._agent, plan.evaluate_samples)
        self._save()
        self._take_report()

    def _take_report(self) -> None:
        with self._lock:
            self._report = self._report.add(self._pace.take_report())
            self._report.events += self._connections.take_events()

    def _save(self) -> None:
        self._saved = pack({**self._pace.rounds.dump(), "own_rounds": self._pace.rounds.done})

    def _end(self) -> None:
        """End the thread; the agent returns to the end of its last completed round."""
        self._ends.set()
        if self._thread is not None and self._thread.is_alive():
            self._thread.join()
        self._raise_error()
        if self._thread is not None:
            self._pace.rounds.abandon()
            self._save()
            self._take_report()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    # --- results ------------------------------------------------------------------------------------

    def evaluate(self, samples: int | None, views: dict[str, View] | None = None) -> dict[str, Scores]:
        """Its newest scores; at the end, those of its last completed round."""
        if views is not None:
            self._scores = score(self.description, self._agent, samples, views)
        return {self._agent.name: self._scores}

    def save(self) -> dict[str, bytes]:
        """Its state of a completed round, and how many there were."""
        return {self._agent.name: self._saved or pack({**self._agent.dump(), "own_rounds": 0})}

    def load(self, saved: dict[str, bytes]) -> None:
        """Return to what was saved."""
        state: dict[str, Any] = unpack(saved[self._agent.name])
        self._agent.resume(state)
        self._pace.rounds.done, self._begun = state["own_rounds"], True

    def finish(self, *, complete: bool) -> None:
        """Say that it is done; nobody waits for it."""
        self._end()
        if complete:
            reached = Turn(int(self._terms["rounds"]))
            self._connections.command(*self._connections.transport.others, reached=reached, do="done")

    def close(self) -> None:
        """Close all connections."""
        self._ends.set()
        if self._thread is not None:
            self._thread.join()
        super().close()
