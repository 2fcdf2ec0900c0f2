"""A peer: an agent without a hub, that speaks to its neighbours only and counts its rounds by itself.

When a link comes up, both ends say how far they are and meet in the round after the further one; whoever is
behind skips the rounds between, and tells its other neighbours. Nobody waits for a neighbour that is gone or
already further. So one fault does not put the peers out of step for good.
"""

from __future__ import annotations

import math
import time
from contextlib import ExitStack
from typing import Any

from codistill.agent import Agent
from codistill.errors import NetworkError
from codistill.results.outputs import View
from codistill.results.records import Scores
from codistill.runtimes.description import RunDescription
from codistill.runtimes.evaluation import score
from codistill.runtimes.host import BEGIN, Report
from codistill.runtimes.network.connections import Connections, Control
from codistill.runtimes.network.frame_header import FrameKind, Turn
from codistill.runtimes.network.options import RETURN
from codistill.runtimes.network.terms import difference, terms_of
from codistill.runtimes.running import measure_alone
from codistill.runtimes.runtime import Runtime, ShouldStop, Stopped, load_nodes, never, one_thread, save_nodes

_LOOK = 0.2  # seconds between looks while waiting for neighbours
_AGAIN = 1.0  # seconds between two greetings that nobody answers
_REMIND = 30.0  # seconds between two lines that say who is waited for
_FAREWELL = 60.0  # seconds that a peer which is done stays for neighbours that are not


class PeerRuntime(Runtime):
    """Drives one agent through its rounds, in step with its neighbours."""

    def __init__(self, description: RunDescription, lines: Connections) -> None:
        super().__init__(description)
        self._lines, self._terms = lines, terms_of(description)
        self._stopping: ShouldStop = never
        self._agent: Agent = description.agents[0]
        self._host = description.host([self._agent], lines)
        self._at = BEGIN - 1  # the last phase that it has entered
        self._resume_at = BEGIN  # phases before this one are skipped
        self._skipped = False
        self._finished: set[str] = set()  # neighbours that are done
        self._single = ExitStack()
        self._single.enter_context(one_thread())
        lines.on_hello, lines.on_presence, lines.backlog = self._greeted, self._noticed, self._host.backlog
        self._met = False
        self._greeted_at = 0.0
        self._samples = {self._agent.name: len(self._agent.shard)}

    def start(self, done: int, should_stop: ShouldStop = never) -> None:
        """Say how far this peer is."""
        self._at, self._stopping = BEGIN - 1 if done == 0 else done - 1, should_stop

    def measure_baseline(self) -> dict[str, Scores]:
        """Train a copy of its model alone."""
        return measure_alone(self.description, self._stopping)

    def run(self, phase: int, present: tuple[str, ...]) -> Report:
        """Drive one phase with the neighbours that are there; skip it if they are already further."""
        for name in self._lines.wire.revoked():
            self._lines.sessions.bar(
                name, "its certificate has been revoked; a new one is taken when this peer starts again"
            )
        began = time.monotonic()
        self._wait_for_neighbours()
        waited = time.monotonic() - began
        self._skipped = phase != BEGIN and phase < self._resume_at
        if self._skipped:
            return Report(present=(), waited=waited)
        gone = {name for name in self._lines.wire.others if not self._is_with_us(name, phase)}
        self._at = phase
        self._lines.begin(Turn(phase), [name for name in self._lines.wire.others if name not in gone])
        report = self._host.run(phase, tuple(name for name in present if name not in gone))
        for name, why in self._lines.fell.items():
            self.tell(f"goes on without '{name}': {why}")
        for receiver, sender, reason in report.refused:
            if receiver == self._agent.name:
                self._lines.sessions.strike(sender, reason)
        if gone and phase != BEGIN:
            report.events.append(f"without {', '.join(name for name in self._lines.wire.others if name in gone)}")
        report.events += self._lines.noted()
        report.waited = waited
        return report

    def evaluate(self, samples: int | None, views: dict[str, View] | None = None) -> dict[str, Scores]:
        """Measure itself."""
        if self._skipped:
            return {}
        return {self._agent.name: score(self.description, self._agent, samples, views)}

    def save(self) -> dict[str, bytes]:
        """Its own state."""
        return save_nodes(self.description.nodes)

    def load(self, saved: dict[str, bytes]) -> None:
        """Return to what was saved."""
        load_nodes(self.description.nodes, saved)

    def finish(self, *, complete: bool) -> None:
        """Say that it is done, and stay for a while until its neighbours have heard all that it said."""
        if not complete:
            return
        self._lines.command(*self._lines.wire.others, reached=Turn(int(self._terms["rounds"])), do="done")
        end = time.monotonic() + _FAREWELL
        while time.monotonic() < end and any(
            self._lines.is_here(name) and name not in self._finished for name in self._lines.wire.others
        ):
            self._pump(_LOOK)

    def close(self) -> None:
        """Hang up."""
        self._lines.wire.close()
        self._single.close()

    def tell(self, text: str) -> None:
        """Say something to the operator, and into the log of this round."""
        self._lines.note(text, max(0, self._at + 1))

    # --- in step ------------------------------------------------------------------------------------

    def _is_with_us(self, name: str, phase: int) -> bool:
        meets = self._lines.meet.get(name, Turn(phase)) <= Turn(phase)
        return self._lines.is_here(name) and meets and name not in self._lines.sessions.out

    def _wait_for_neighbours(self) -> None:
        """At first for all of them, later for the quorum: with nobody there, there is nobody to learn from."""
        began = said = time.monotonic()
        others, patience = self._lines.wire.others, self._lines.network.patience
        if patience is None and self._at >= 0:  # started again: some may be gone for good
            patience = RETURN
        while True:
            self._pump(0)
            self._greet_again()
            possible = [name for name in others if name not in self._lines.sessions.out and name not in self._finished]
            here = [name for name in possible if self._lines.is_here(name)]
            waited = time.monotonic() - began
            everybody = not self._met and (patience is None or waited < patience)
            share = 1.0 if everybody else self._lines.network.quorum
            if len(here) >= math.ceil(share * len(possible) - 1e-9):
                if not self._met:
                    self._agent.learner.join(sum(self._samples.values()))
                self._met = True
                return
            if self._stopping():
                raise Stopped
            if waited > 1 and (said == began or time.monotonic() - said > _REMIND):
                said = time.monotonic()
                self._lines.tell(f"waiting for {', '.join(name for name in possible if name not in here)}")
            self._pump(_LOOK)

    def _pump(self, timeout: float) -> None:
        control = self._lines.next_control(timeout)
        if control is None:
            return
        match control.do:
            case "jump" if type(control.content.get("to")) is int:
                if control.content["to"] < int(self._terms["rounds"]):
                    self._jump(control.content["to"], f"'{control.sender}'")
            case "done":
                self._finished.add(control.sender)
            case _:
                self._lines.sessions.strike(control.sender, f"an unknown command '{control.do[:40]}'")

    def _noticed(self, name: str) -> None:
        """A life of a neighbour has appeared, or is gone: greet whoever is new."""
        new = self._lines.lives.get(name, set()) - {self._lines.sessions.life(name)}
        if new:
            self._greet(name)

    def _greet_again(self) -> None:
        """Whoever can be seen but has not been heard: a greeting may have come before there was an ear for it."""
        if time.monotonic() - self._greeted_at > _AGAIN:
            self._greeted_at = time.monotonic()
            for name in self._lines.wire.others:
                if self._lines.lives.get(name) and not self._lines.is_here(name):
                    self._greet(name)

    def _greet(self, name: str) -> None:
        samples = len(self._agent.shard)
        self._lines.command(name, kind=FrameKind.HELLO, do="hello", at=self._at, samples=samples, terms=self._terms)

    def _greeted(self, hello: Control) -> None:
        name, life, at = hello.sender, hello.head.life, hello.content.get("at")
        if hello.do == "refused" and self._met:
            self._lines.sessions.bar(name, "it refuses to go on with this peer")
            return
        if hello.do == "refused":
            raise NetworkError(
                f"The neighbour '{name}' must agree to the terms.",
                f"it says: {str(hello.content.get('why'))[:300]}",
                "Give all peers the same recipe and the same version of codistill.",
            )
        terms: Any = hello.content.get("terms")
        why = difference(self._terms, terms) if isinstance(terms, dict) else "its greeting is not whole"
        if why is not None or type(at) is not int:
            self.tell(f"'{name}' is not let in: {why}")
            self._lines.command(name, kind=FrameKind.HELLO, do="refused", why=why)
            return
        samples = hello.content.get("samples")
        self._samples[name] = samples if type(samples) is int and 0 < samples < 1 << 48 else 0
        new = self._lines.sessions.life(name) != life
        self._lines.let_in(name, life, hello.head.number)
        if not new:
            return
        self._finished.discard(name)
        meeting = min(max(self._at, at) + 1, int(self._terms["rounds"]))
        self._lines.meet[name] = Turn(meeting)
        self._lines.seen.pop(name, None)
        self._greet(name)  # it may have been here before: then this tells it how far we are
        self._lines.tell(f"'{name}' is here")
        self._jump(meeting, f"'{name}'")

    def _jump(self, to: int, whom: str) -> None:
        """Skip the rounds up to one, and tell the other neighbours, who may have fallen behind as well."""
        if to <= max(self._at + 1, self._resume_at):
            return
        self._resume_at = to
        self.tell(f"skips rounds to meet {whom} in round {to + 1}")
        here = [name for name in self._lines.wire.others if self._lines.is_here(name)]
        self._lines.command(*here, reached=Turn(to), do="jump", to=to)
