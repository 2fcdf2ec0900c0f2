"""The hub's side of a federation between machines: it waits for the agents, runs the rounds, and counts them.

An agent that disconnects or is late is dropped from the current round. Below the quorum a round is retried from the
state before it. An agent's model and state stay with the agent: the hub only says which rounds count.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack

from codistill.results.outputs import View
from codistill.results.records import Baseline, Scores
from codistill.runtimes.description import RunDescription
from codistill.runtimes.host import BEGIN
from codistill.runtimes.network.answers import checked_report, checked_steps, checked_view
from codistill.runtimes.network.connections import Connections
from codistill.runtimes.network.control import Control
from codistill.runtimes.network.event_log import timestamp
from codistill.runtimes.network.frame_header import Turn
from codistill.runtimes.network.hub_agents import POLL, HubAgents
from codistill.runtimes.network.imitated_time import Stopwatch
from codistill.runtimes.network.waiting import MissedRounds, Unreliable, missed_text
from codistill.runtimes.round_report import Report
from codistill.runtimes.runtime import Runtime, ShouldStop, load_nodes, never, one_thread, save_nodes
from codistill.topology import HUB


class HubRuntime(Runtime):
    """Drives the agents of a roster by commands, and the hub's own node in this process."""

    def __init__(self, description: RunDescription, connections: Connections, *, run: str) -> None:
        """`run`: the name of this run, by which agents know their states of it."""
        super().__init__(description)
        self._connections = connections
        self.agents = HubAgents(description, connections, run=run)
        self._host = description.host(description.nodes, connections)
        self._stopwatch = Stopwatch()
        self._unstored: set[str] = set()  # who has kept its last round in memory only
        self._missed, self._unreliable = MissedRounds(), Unreliable()
        self._single = ExitStack()
        self._single.enter_context(one_thread())
        connections.backlog = self._host.backlog
        self._host.message_limit = connections.transport.limit

    def start(self, done: int, should_stop: ShouldStop = never) -> None:
        """Set which rounds count; continue when all agents have joined, also those not sampled in the next round."""
        self.agents.done, self.agents.stopping = done, should_stop
        self.agents.tell_state(status="waiting", round=done, rounds=self.description.plan.rounds, moved=timestamp())
        if 0 < done < self.description.plan.rounds:
            self.agents.wait_for(self.description.names)

    def run(self, phase: int, present: tuple[str, ...]) -> Report:
        """Drive one phase to its end with the agents that are connected, as often as it takes to reach the quorum."""
        if phase == BEGIN:  # each agent begins by itself, at its first command
            began = time.monotonic()
            self.agents.wait_for(self.description.names)  # all of them, also those whom the first rounds leave out
            self._stopwatch.start()
            return Report(waited=time.monotonic() - began)
        attempt, waited = 0, 0.0
        self._stopwatch.start()
        before = save_nodes(self.description.nodes)
        while True:
            began = time.monotonic()
            joined = self.agents.wait_for(present)
            waited += time.monotonic() - began
            left_out = self._unreliable.among(joined, phase)
            if len(joined) - len(left_out) >= self.agents.quorum(present):
                joined = tuple(name for name in joined if name not in left_out)
            self._tell_missed(joined)
            began = time.monotonic()
            report = self._attempt(Turn(phase, attempt), joined)
            done = report.present or ()
            if len(done) >= self.agents.quorum(present):
                break
            missing = [name for name in present if name not in done]
            self.agents.tell(f"retried: it ended without {', '.join(missing)}")
            load_nodes(self.description.nodes, before)
            attempt += 1
            time.sleep(min(1.0, 0.05 * attempt))  # the cause may need time to pass
        self.agents.done = phase + 1
        for name, rounds in self._unreliable.ended(phase, joined, done).items():
            self.agents.tell(f"'{name}' has not completed its last rounds: it is left out of the next {rounds}")
        for name in present:
            if name not in done:
                self._missed.add(name, self.agents.done)
        self.agents.grace.completed(done, time.monotonic() - began)
        store = self.description.plan.has_checkpoint(self.agents.done)
        self._unstored = self._unstored - set(done) if store else self._unstored | set(done)
        number = self.agents.commands.ask(done, do="keep", round=self.agents.done, store=store)
        self.agents.keeping = dict.fromkeys(done, number)
        report.events = self._connections.take_events()
        report.waited = waited
        if self.description.clock is not None:
            elapsed = self._stopwatch.elapsed
            report.measures += [(name, "time", elapsed) for name in self.description.names]
        self.agents.tell_state(status="running", round=self.agents.done, present=list(done), moved=timestamp())
        return report

    def _attempt(self, turn: Turn, present: tuple[str, ...]) -> Report:
        number = self.agents.commands.ask(
            present, do="run", turn=[turn.phase, turn.attempt], present=list(present), samples=self.agents.samples()
        )
        self._connections.begin(turn, present)
        report = self._host.run(turn.phase, present)
        self._connections.finish()
        for name, why in self._connections.dropped.items():
            self.agents.tell(f"continues without '{name}': {why}")
        done = []
        for _, sender, reason in report.refused:
            if sender in self.agents.statuses:
                self._connections.sessions.strike(sender, reason)
        for name, answer in self.agents.collect_rounds(number, present).items():
            own = self.agents.commands.checked(
                name, checked_report, name, answer.content.get("report"), self.description.names,
                self.description.scores,
            )  # fmt: skip
            if own is not None and name not in self._connections.dropped and not self.agents.is_excluded(name):
                report = report.add(own)
                done.append(name)
        report.present = tuple(name for name in present if name in done)
        return report

    def evaluate(self, samples: int | None, views: dict[str, View] | None = None) -> dict[str, Scores]:
        """Let every agent that is there measure itself; only figures come back."""
        free = [name for name in self.description.names if self.agents.is_free(name, keeping=True)]
        number = self.agents.commands.ask(
            free, do="evaluate", samples=samples, of=self.agents.samples(), views=views is not None
        )
        scores: dict[str, Scores] = {}
        for name, answer in self.agents.collect(number, free).items():
            scores[name] = self._take_scores(name, answer, views)
        if views:
            ordered = {name: views[name] for name in self.description.names if name in views}
            views.clear()
            views.update(ordered)
        return scores

    def _take_scores(self, name: str, answer: Control, views: dict[str, View] | None) -> Scores:
        """The scores of an answer; its outputs are put into `views`, if that is given."""
        scores = self.agents.commands.scores(name, answer, self.description.task_scores)
        if views is not None and self.description.test is not None:
            labels, classes = self.description.test[1], int(self.agents.terms["classes"])
            view = self.agents.commands.checked(name, checked_view, answer.arrays, labels, classes)
            views.update({} if view is None else {name: view})
        return scores

    def measure_baseline(self) -> Baseline:
        """Let every agent train a copy of its model alone, and tell its scores and steps."""
        joined = self.agents.wait_for(self.description.names)
        for name in joined:
            self.agents.statuses[name].trained = 0
        self.agents.tell_state(status="training alone, as a baseline")
        rounds = self.description.plan.rounds
        self.agents.alone = self.agents.commands.ask(joined, do="alone", rounds=rounds, samples=self.agents.samples())
        answers = self.agents.collect(self.agents.alone, joined, self.agents.stopping)
        for name in joined:
            if name not in answers and not self.agents.stopping():
                self.agents.tell(f"the baseline of '{name}' is missing")
        commands, wanted = self.agents.commands, self.description.task_scores
        steps = {
            name: commands.checked(name, checked_steps, answer.content["steps"], rounds)
            for name, answer in answers.items()
            if answer.content.get("steps") is not None
        }
        return Baseline(
            {name: commands.scores(name, answers.get(name), wanted) for name in self.description.names},
            {name: counts for name, counts in steps.items() if counts is not None},
        )

    def save(self) -> dict[str, bytes]:
        """The hub's own state, once every agent has kept its own."""
        for number in set(self.agents.keeping.values()):
            self.agents.collect(number, [name for name, asked in self.agents.keeping.items() if asked == number])
        self.agents.keeping = {}
        behind = [name for name in self.description.names if name in self._unstored and self.agents.is_free(name)]
        self._unstored -= self.agents.collect(self.agents.commands.ask(behind, do="store"), behind).keys()
        return self._stopwatch.save(self.description)

    def load(self, saved: dict[str, bytes]) -> None:
        """Restore the hub's saved state; agents restore theirs when they join."""
        load_nodes(self.description.nodes, saved)
        self._stopwatch.load(saved[HUB])

    def finish(self, *, complete: bool) -> None:
        """Tell all agents that the run is over, or that the hub pauses it."""
        self.agents.tell_state(status="done" if complete else "stopped")
        if complete:
            self.send_done()
        else:
            self.send_stop("paused")

    def send_stop(self, why: str) -> None:
        """Tell all agents that the run is over, or that the hub pauses it."""
        self._connections.command(*self.description.names, do="stop", why=why, number=0)

    def send_done(self) -> None:
        """Tell all agents that the run is over; wait up to `linger` seconds for those that are disconnected."""
        linger = self._connections.network.linger
        end, told = time.monotonic() + linger, set(self._connections.sessions.excluded)
        while True:
            ready = [name for name in self.description.names if name not in told and self.agents.is_ready(name)]
            self._tell_missed(ready)
            self._connections.command(*ready, do="stop", why="done", number=0)
            told.update(ready)
            missing = [name for name in self._awaited_at_the_end() if name not in told]
            if not missing or time.monotonic() > end or self.agents.stopping():
                return
            if ready or end - time.monotonic() > linger - POLL:
                self._connections.tell(f"done; waiting up to {linger:g} s to tell {', '.join(missing)}")
            self.agents.pump(POLL)

    def _awaited_at_the_end(self) -> Sequence[str]:
        return self.description.names

    def close(self) -> None:
        """Close all connections."""
        self._connections.transport.close()
        self.agents.tell_closed()
        self._single.close()

    def _tell_missed(self, names: Sequence[str]) -> None:
        """Tell agents that are back, and the operator, which rounds they have missed."""
        for name in names:
            missed = self._missed.take(name)
            if missed is not None:
                count, first, last = missed
                self.agents.tell(f"'{name}' is back: it {missed_text(*missed)}")
                self._connections.command(name, do="missed", count=count, first=first, last=last)
