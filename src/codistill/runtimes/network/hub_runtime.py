"""The hub's side of a federation between machines: it musters the agents, runs the rounds, and keeps the book.

An agent that is gone or late is out of the round in hand. Below the quorum a round is tried again, from the
state before it. What an agent has learnt stays with it: the hub only says which rounds count.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from codistill.errors import MessageError, NetworkError
from codistill.results.outputs import View
from codistill.results.records import Scores
from codistill.runtimes.description import RunDescription
from codistill.runtimes.host import BEGIN, Report
from codistill.runtimes.network.answers import checked_report, checked_scores, checked_view
from codistill.runtimes.network.connections import Connections, Control
from codistill.runtimes.network.frame_header import FrameKind, Turn
from codistill.runtimes.network.options import RETURN, WIRE_VERSION
from codistill.runtimes.network.terms import objection, terms_of
from codistill.runtimes.runtime import Runtime, ShouldStop, Stopped, load_nodes, never, one_thread, save_nodes
from codistill.version import __version__

_LOOK = 0.2  # seconds between looks while the hub waits for agents
_REMIND = 30.0  # seconds between two lines that say who is waited for


@dataclass
class AgentStatus:
    """An agent of the roster, as the hub knows it."""

    ready: bool = False  # it has taken its place: told of the run, and back to a state that counts
    owes: int | None = None  # the command that it has not answered yet
    answered: int = 0  # the last command that it has answered
    samples: int = 0


class HubRuntime(Runtime):
    """Drives the agents of a roster by commands, and the hub's own node here."""

    def __init__(self, description: RunDescription, lines: Connections, *, run: str) -> None:
        """`run`: the name of this run, by which agents know their states of it."""
        super().__init__(description)
        self._lines, self._terms, self._run = lines, terms_of(description), run
        self._host = description.host(description.nodes, lines)
        self.done = 0  # rounds that count
        self.seats = {name: AgentStatus() for name in description.names}
        self._stopping: ShouldStop = never
        self._stores = description.plan.has_checkpoint  # after which rounds agents store their states on disk
        self._number = 0
        self._answers: dict[str, Control] = {}
        self._keeping: dict[str, int] = {}  # who still has to say that it has kept the last round
        self._unstored: set[str] = set()  # who has kept a round in memory only
        self._mustered = False
        self._dismissed: set[str] = set()  # who has been told that it is out
        self._turned_away: set[int] = set()  # lives of agents that were there already
        self._single = ExitStack()
        self._single.enter_context(one_thread())
        lines.on_hello, lines.on_presence, lines.backlog = self._greet, self._notice, self._host.backlog

    # --- the runtime ------------------------------------------------------------------------------

    def start(self, done: int, should_stop: ShouldStop = never) -> None:
        """Say which rounds count; go on when everybody is here, also those whom the next round leaves out."""
        self.done, self._stopping = done, should_stop
        if 0 < done < self.description.plan.rounds:
            self._muster(self.description.names)

    def run(self, phase: int, present: tuple[str, ...]) -> Report:
        """Drive one phase to its end, with whoever is there; as often as it takes to reach the quorum."""
        if phase == BEGIN:  # each agent begins by itself, when it is first told to run
            began = time.monotonic()
            self._muster(self.description.names)  # all of them, also those whom the first rounds leave out
            return Report(waited=time.monotonic() - began)
        attempt, waited = 0, 0.0
        before = save_nodes(self.description.nodes)
        while True:
            began = time.monotonic()
            members = self._muster(present)
            waited += time.monotonic() - began
            report = self._attempt(Turn(phase, attempt), members)
            done = report.present or ()
            if len(done) >= self._quorum(present):
                break
            missing = [name for name in present if name not in done]
            self.tell(f"tried again: it ended without {', '.join(missing)}")
            load_nodes(self.description.nodes, before)
            attempt += 1
            time.sleep(min(1.0, 0.05 * attempt))  # whatever went wrong may need time to get well
        self.done = phase + 1
        store = self._stores(self.done)
        self._unstored = self._unstored - set(done) if store else self._unstored | set(done)
        number = self._ask(done, do="keep", round=self.done, store=store)
        self._keeping = dict.fromkeys(done, number)
        self._dismiss_the_barred()
        report.events = self._lines.noted()
        report.waited = waited
        return report

    def _dismiss_the_barred(self) -> None:
        """Who is out is told so, once: nobody listens to it any more."""
        for name in self._lines.sessions.out.keys() - self._dismissed:
            self._dismissed.add(name)
            self.seats[name].ready = False
            self._lines.command(
                name, do="refused", why=f"it is out of the run: {self._lines.sessions.out[name]}", number=0
            )

    def _attempt(self, turn: Turn, members: tuple[str, ...]) -> Report:
        number = self._ask(
            members, do="run", turn=[turn.phase, turn.attempt], present=list(members), samples=self._samples()
        )
        self._lines.begin(turn, members)
        report = self._host.run(turn.phase, members)
        self._lines.finish()
        for name, why in self._lines.fell.items():
            self.tell(f"goes on without '{name}': {why}")
        done = []
        for _, sender, reason in report.refused:
            if sender in self.seats:
                self._lines.sessions.strike(sender, reason)
        for name, answer in self._collect(number, members).items():
            told = self._checked(name, checked_report, name, answer.content.get("report"), self.description.names)
            if told is not None and name not in self._lines.fell and name not in self._lines.sessions.out:
                report = report.add(told)
                done.append(name)
        report.present = tuple(name for name in members if name in done)
        return report

    def evaluate(self, samples: int | None, views: dict[str, View] | None = None) -> dict[str, Scores]:
        """Let every agent that is there measure itself; only figures come back."""
        free = [name for name in self.description.names if self._is_free(name, keeping=True)]
        number = self._ask(free, do="evaluate", samples=samples, of=self._samples(), views=views is not None)
        scores: dict[str, Scores] = {}
        for name, answer in self._collect(number, free).items():
            scores[name] = self._scores(name, answer)
            if views is not None and self.description.test is not None:
                labels, classes = self.description.test[1], int(self._terms["classes"])
                view = self._checked(name, checked_view, answer.arrays, labels, classes)
                views.update({} if view is None else {name: view})
        self._strike_other_kinds(scores)
        if views:
            ordered = {name: views[name] for name in self.description.names if name in views}
            views.clear()
            views.update(ordered)
        return scores

    def _strike_other_kinds(self, scores: dict[str, Scores]) -> None:
        """Accuracies among errors, or the other way round, are not what was asked for."""
        kinds = {name: any("rmse" in key for key in found) for name, found in scores.items() if found}
        usual = Counter(kinds.values()).most_common(1)
        for name, kind in kinds.items():
            if kind != usual[0][0]:
                self._lines.sessions.strike(name, "scores of another kind than the others'")
                scores[name] = {}

    def measure_baseline(self) -> dict[str, Scores]:
        """Let every agent train a copy of its model alone, and tell its scores."""
        members = self._muster(self.description.names)
        rounds = self.description.plan.rounds
        number = self._ask(members, do="alone", rounds=rounds, samples=self._samples())
        answers = self._collect(number, members, patient=True)
        return {name: self._scores(name, answers.get(name)) for name in self.description.names}

    def save(self) -> dict[str, bytes]:
        """The hub's own state, once every agent has kept its own."""
        for name, number in self._keeping.items():
            self._collect(number, [name])
        self._keeping = {}
        behind = [name for name in self.description.names if name in self._unstored and self._is_free(name)]
        self._unstored -= self._collect(self._ask(behind, do="store"), behind).keys()
        return save_nodes(self.description.nodes)

    def load(self, saved: dict[str, bytes]) -> None:
        """Return the hub to what was saved; agents return when they join."""
        load_nodes(self.description.nodes, saved)

    def finish(self, *, complete: bool) -> None:
        """Tell everybody that the run is over, or that the hub stops for now."""
        if complete:
            self.see_off()
        else:
            self.dismiss("paused")

    def dismiss(self, why: str) -> None:
        """Tell everybody that the run is over, or that the hub stops for now."""
        self._lines.command(*self.description.names, do="stop", why=why, number=0)

    def see_off(self) -> None:
        """Tell everybody that the run is over; who is away is waited for a while."""
        end, told = time.monotonic() + self._lines.network.linger, set(self._lines.sessions.out)
        while True:
            here = [
                name
                for name in self.description.names
                if name not in told and self._is_in(name) and self.seats[name].ready
            ]
            self._lines.command(*here, do="stop", why="done", number=0)
            told.update(here)
            away = [name for name in self.description.names if name not in told]
            if not away or time.monotonic() > end or self._stopping():
                return
            if here or end - time.monotonic() > self._lines.network.linger - _LOOK:
                self._lines.tell(f"done; waits {self._lines.network.linger:g} s to tell {', '.join(away)}")
            self._pump(_LOOK)

    def close(self) -> None:
        """Hang up."""
        self._lines.wire.close()
        self._single.close()

    def tell(self, text: str) -> None:
        """Say something to the operator, and into the log of this round."""
        self._lines.note(text, self.done + 1)

    # --- the book ---------------------------------------------------------------------------------

    def _samples(self) -> int:
        return sum(seat.samples for seat in self.seats.values())

    def _quorum(self, wanted: Sequence[str]) -> int:
        return max(1, math.ceil(self._lines.network.quorum * len(wanted) - 1e-9))

    def _is_free(self, name: str, *, keeping: bool = False) -> bool:
        seat = self.seats[name]
        idle = seat.owes is None or (keeping and seat.owes == self._keeping.get(name))
        return seat.ready and idle and self._is_in(name)

    def _is_in(self, name: str) -> bool:
        return self._lines.is_here(name) and name not in self._lines.sessions.out

    def _muster(self, wanted: Sequence[str]) -> tuple[str, ...]:
        """Who of these is there and free: at first everybody, later a quorum is enough to go on."""
        began = said = time.monotonic()
        patience = self._lines.network.patience
        if patience is None and self.done:
            patience = RETURN
        while True:
            self._bar_the_revoked()
            here = tuple(name for name in wanted if self._is_free(name, keeping=True))
            possible = [name for name in wanted if name not in self._lines.sessions.out]
            waited = time.monotonic() - began
            everybody = not self._mustered and (patience is None or waited < patience)
            if len(here) >= max(1, len(possible) if everybody else self._quorum(wanted)):
                self._mustered = True
                return here
            if self._stopping():
                raise Stopped
            if len(possible) < self._quorum(wanted):
                out = ", ".join(name for name in wanted if name in self._lines.sessions.out)
                raise NetworkError(
                    f"A round needs {self._quorum(wanted)} of {len(wanted)} agents.",
                    f"only {len(possible)} are left: {out} are out of the run",
                    "Start the hub again, which gives everyone another chance; or lower network.quorum.",
                )
            if waited > 1 and (said == began or time.monotonic() - said > _REMIND):
                said = time.monotonic()
                missing = [name for name in wanted if name not in here]
                self._lines.tell(f"waiting for {', '.join(missing)} ({len(here)} of {len(wanted)} are here)")
            self._pump(_LOOK)

    def _bar_the_revoked(self) -> None:
        for name in self._lines.wire.revoked():
            self._lines.sessions.bar(
                name, "its certificate has been revoked; a new one is taken when the hub starts again"
            )

    def _ask(self, names: Sequence[str], **content: Any) -> int:
        self._number += 1
        for name in names:
            self.seats[name].owes = self._number
        self._lines.command(*names, number=self._number, **content)
        return self._number

    def _collect(self, number: int, names: Sequence[str], *, patient: bool = False) -> dict[str, Control]:
        """The answers to a command, of those who answer it before they are gone or late."""
        since, deadline = time.monotonic(), None if patient else self._lines.network.deadline
        before = len(names)
        while True:
            open_ones = [name for name in names if self.seats[name].owes == number and self._is_in(name)]
            late = deadline is not None and time.monotonic() - since > deadline
            if not open_ones or late or (patient and self._stopping()):
                for name in open_ones:
                    self.tell(f"'{name}' is late: it goes on when it has answered")
                found = {name: self._answers.get(name) for name in names}
                return {name: a for name, a in found.items() if a is not None and a.content.get("number") == number}
            if len(open_ones) < before:  # anything but an answer that is waited for gives no more time
                since, before = time.monotonic(), len(open_ones)
            self._pump(_LOOK)

    def _pump(self, timeout: float) -> bool:
        control = self._lines.next_control(timeout)
        if control is None:
            return False
        name, seat = control.sender, self.seats[control.sender]
        match control.do:
            case "ready":
                seat.ready, seat.owes = True, None
                self._lines.tell(f"'{name}' is here")
            case "answer" if not self._is_asked(seat, control.content.get("number")):
                self._lines.sessions.strike(name, "an answer that nobody asked for")
            case "answer":
                if control.content.get("number") == seat.owes:  # not to a command that nobody waits for any more
                    seat.owes = None
                    self._answers[name] = control
                if control.content.get("trouble"):
                    self.tell(f"'{name}': {str(control.content['trouble'])[:300]}")
            case "leaving":
                seat.ready = False
                self.tell(f"'{name}' leaves: {str(control.content.get('why'))[:300]}")
            case _:
                self._lines.sessions.strike(name, f"an unknown command '{control.do[:40]}'")
        return True

    def _is_asked(self, seat: AgentStatus, number: Any) -> bool:
        """Whether this may be a number to answer: each is answered once, in their order."""
        asked = type(number) is int and seat.answered < number <= self._number
        seat.answered = number if asked else seat.answered
        return asked

    def _scores(self, name: str, answer: Control | None) -> Scores:
        return {} if answer is None else self._checked(name, checked_scores, answer.content.get("scores")) or {}

    def _checked(self, name: str, check: Callable[..., Any], *given: Any) -> Any:
        try:
            return check(*given)
        except MessageError as error:
            self._lines.sessions.strike(name, str(error))
            return None

    # --- coming and going -------------------------------------------------------------------------

    def _greet(self, hello: Control) -> None:
        """Let a life of an agent in, or say why not."""
        name, life = hello.sender, hello.head.life
        if (
            self._lines.is_here(name)
            and self._lines.sessions.life(name) != life
            and life not in self._lines.lives[name]
        ):
            return  # of a life that is over
        out = self._lines.sessions.out.get(name)
        why = objection(self._terms, hello.content) if out is None else f"it is out of the run: {out}"
        if why is not None:
            self._lines.tell(f"'{name}' may not join: {why}")
            self._lines.command(name, kind=FrameKind.HELLO, do="refused", why=why, life=life)
            return
        known = self._lines.sessions.life(name)
        if known not in (None, life) and self._lines.is_here(name):
            if life not in self._turned_away:  # it greets again and again, until the other one is gone
                self._turned_away.add(life)
                self.tell(f"'{name}' has come a second time: it has to wait, as its first process is still here")
            return
        self._lines.let_in(name, life, hello.head.number)
        seat = self.seats[name]
        if seat.ready and known == life:  # it greets again: it has lost us, though we have not lost it
            seat.ready, seat.owes = False, None
            self._lines.drop(name, "it has lost the link")
        seat.samples = int(hello.content["samples"])
        if known != life:
            seat.ready, seat.owes = False, None
        if not seat.ready:
            self._lines.command(
                name, kind=FrameKind.HELLO, do="welcome", run=self._run, done=self.done, terms=self._terms,
                version=__version__, wire=WIRE_VERSION, life=life,
            )  # fmt: skip

    def _notice(self, name: str) -> None:
        seat = self.seats[name]
        if seat.ready and not self._lines.is_here(name):
            seat.ready, seat.owes = False, None
            self.tell(f"'{name}' is gone")
