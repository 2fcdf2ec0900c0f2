"""An agent under a hub: it joins, does what it is told in each round, and keeps what it has learnt to itself.

It is a long-lived process with its model in memory. When the hub is gone it waits; when the hub is back it
joins again, with the newest of its states that counts there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from codistill.errors import NetworkError, StorageError
from codistill.results.outputs import View
from codistill.results.records import Scores
from codistill.runtimes.description import RunDescription
from codistill.runtimes.evaluation import score
from codistill.runtimes.host import BEGIN, Host, Report
from codistill.runtimes.network.answers import as_plain
from codistill.runtimes.network.connections import Connections, Control
from codistill.runtimes.network.frame_header import FrameKind, Turn
from codistill.runtimes.network.state_store import StateStore
from codistill.runtimes.network.terms import Terms, check_terms
from codistill.runtimes.running import measure_alone
from codistill.runtimes.runtime import never, one_thread
from codistill.topology import HUB
from codistill.wire.state import pack, unpack

_AGAIN = 1.0  # seconds between two greetings that nobody answers
_COUNTED = 10.0  # seconds that an agent which is to stop waits to hear that its last round counts
_WORRY = 15.0  # seconds after which an operator is told what might be wrong

Settle = Callable[[Terms], RunDescription]  # the run under the hub's terms, with this agent introduced to it


Watch = Callable[[str, int, Scores], None]  # is told what the agent does, after how many rounds, and its scores


def ignore(what: str, done: int, scores: Scores) -> None:
    """Nobody watches."""


class RemoteAgent:
    """One agent's life in a federation."""

    def __init__(
        self,
        lines: Connections,
        hello: dict[str, Any],
        settle: Settle,
        folder: Path | None = None,
        stopping: Callable[[], bool] = never,
        watch: Watch = ignore,
    ) -> None:
        self._lines, self._hello, self._settle, self._folder = lines, hello, settle, folder
        self._stopping, self._watch = stopping, watch
        self._description: RunDescription | None = None
        self._terms: Terms = {}
        self._welcome: Control | None = None
        self._run = ""
        self._begun = self._dirty = False
        self._answered = 0.0  # when it last had something to say
        self._beginning = Report()  # what happened before the first round, told with it
        self._done = 0
        lines.on_hello = self._welcomed

    # --- joining ----------------------------------------------------------------------------------

    def live(self) -> bool:
        """Take part until the run is over (True), or until asked to stop (False)."""
        with one_thread():
            try:
                while True:
                    if not self._join():
                        return False
                    ended = self._serve()
                    if ended is not None:
                        return ended
            except Exception as error:
                self._lines.command(HUB, do="leaving", why=f"it failed ({type(error).__name__}); its operator sees why")
                raise

    def _welcomed(self, welcome: Control) -> None:
        mine = welcome.content.get("life") == self._lines.wire.life
        if mine and welcome.do == "refused":
            raise _refusal(welcome)
        if not mine:
            return  # said to another process of this agent
        self._lines.let_in(HUB, welcome.head.life, welcome.head.number)
        self._welcome = welcome

    def _join(self) -> bool:
        """Greet the hub until it answers; False if asked to stop before that."""
        began = said = time.monotonic()
        greeted = -_AGAIN
        self._welcome = None
        while self._welcome is None or not self._lines.is_here(HUB):
            if self._stopping():
                return False
            if self._lines.lives.get(HUB) and time.monotonic() - greeted > _AGAIN:
                greeted = time.monotonic()
                self._lines.command(HUB, kind=FrameKind.HELLO, do="hello", **self._hello)
            self._lines.next_control(0.05)  # of a life that is over: only a welcome counts now
            if time.monotonic() - said > _WORRY:
                said = time.monotonic()
                self._lines.tell(_worry(said - began, seen=bool(self._lines.lives.get(HUB))))
        self._enter(self._welcome)
        return True

    def _enter(self, welcome: Control) -> None:
        content = welcome.content
        check_terms(content.get("terms"))
        run, done = content.get("run"), content.get("done")
        if not isinstance(run, str) or not run.isalnum() or len(run) > 64 or type(done) is not int or done < 0:
            raise NetworkError("A welcome must name its run.", f"{run!r}"[:80], "Ask whoever runs the hub.")
        if self._description is None:
            self._terms, self._description = content["terms"], self._settle(content["terms"])
            self._agent = self._description.agents[0]
            self._host: Host = self._description.host([self._agent], self._lines)
            self._lines.backlog = self._host.backlog
        elif content["terms"] != self._terms:
            raise NetworkError("A hub must come back with the same terms.", "others", "Join anew, with a new process.")
        if run != self._run:
            if self._run:
                raise NetworkError(
                    "A new run must begin with new models.",
                    "the hub has begun another run",
                    "Join anew, with a new process.",
                )
            self._run = run
            self._shelf = StateStore(None if self._folder is None else self._folder / run)
            for note in self._shelf.notes:
                self._lines.tell(note)
        self._shelf.forget_after(done)
        at = self._done = self._return_to(done)
        self._lines.tell(
            f"joined run {run[:8]} after {done} rounds, with {f'the state of round {at}' if at else 'a new model'}"
        )
        self._lines.command(HUB, do="ready", at=at)

    def _return_to(self, done: int) -> int:
        """Go back to the newest state that counts; rounds done in it."""
        found = self._shelf.newest(done)
        if found is None:
            if self._begun:
                raise NetworkError(
                    "An agent must have a state from before what the hub counts.",
                    f"the hub has counted {done} rounds, this agent has no state from then",
                    "Join anew, with a new process: it starts with a new model.",
                )
            self._dirty = False
            return 0
        self._agent.resume(unpack(found[1]))
        self._begun, self._dirty = True, False
        return found[0]

    # --- taking part ------------------------------------------------------------------------------

    def _serve(self) -> bool | None:
        """Do as told. True: the run is over. False: asked to stop. None: the hub is gone, or back anew."""
        while self._lines.is_here(HUB):
            if HUB in self._lines.sessions.out:
                raise NetworkError(
                    "A hub must send commands that make sense.",
                    self._lines.sessions.out[HUB],
                    "Ask whoever runs the hub.",
                )
            # A round in hand is finished first, if the hub says within a while that it counts.
            if self._stopping() and (not self._dirty or time.monotonic() - self._answered > _COUNTED):
                self._lines.command(HUB, do="leaving", why="its operator has stopped it")
                return False
            control = self._lines.next_control(0.2)
            if control is None:
                continue
            if control.do == "refused":
                raise _refusal(control)
            if control.do == "stop":
                if control.content.get("why") == "done":
                    self._watch("done", int(self._terms["rounds"]), {})
                    return True
                self._lines.tell("the hub stops for now; waiting for it to come back")
                continue
            self._obey(control)
        self._lines.tell("the hub is gone; waiting for it to come back")
        return None

    def _obey(self, control: Control) -> None:
        """Do what the hub says, if it is a command of the right form; then answer."""
        try:
            act, number = self._understood(control)
        except (KeyError, TypeError, ValueError) as error:
            self._lines.sessions.strike(HUB, f"a command '{control.do[:40]}' that makes no sense: {error!r}"[:300])
            return
        arrays, answer = act()
        self._answered = time.monotonic()
        self._lines.command(HUB, do="answer", number=number, arrays=arrays, **answer)

    def _understood(self, control: Control) -> tuple[Callable[[], tuple[View, dict[str, Any]]], int]:
        """What a command asks for; it is held to its form before anything is done."""
        content, rounds = control.content, int(self._terms["rounds"])
        number = _whole(content["number"], 1 << 62)
        match control.do:
            case "run":
                phase, attempt = content["turn"]
                turn = Turn(_whole(phase, rounds - 1), _whole(attempt, (1 << 16) - 1))
                there = frozenset(map(str, list(content["present"])))
                present = tuple(name for name in self._agent.roster if name in there)
                samples = _whole(content["samples"], 1 << 62)
                return lambda: ({}, {"report": as_plain(self._round(turn, present, samples))}), number
            case "keep":
                done, store = _whole(content["round"], rounds), content["store"] is True
                return lambda: ({}, {"trouble": self._keep(done, store=store)}), number
            case "store":
                return lambda: ({}, {"trouble": self._store()}), number
            case "evaluate":
                part = None if content["samples"] is None else _whole(content["samples"], 1 << 62)
                samples, views = _whole(content["of"], 1 << 62), content["views"] is True
                return lambda: self._evaluate(part, samples, views=views), number
            case "alone":
                samples = _whole(content["samples"], 1 << 62)
                return lambda: ({}, {"scores": self._alone(samples)}), number
        raise ValueError("unknown")

    @property
    def _the_description(self) -> RunDescription:
        assert self._description is not None
        return self._description

    def _alone(self, samples: int) -> Scores:
        self._agent.learner.join(samples)
        self._watch("training alone, as a baseline", 0, {})
        return measure_alone(self._the_description, self._stopping).get(self._agent.name, {})

    def _check_hub(self) -> None:
        if HUB in self._lines.wire.revoked():
            raise NetworkError(
                "The hub's certificate must be valid.",
                "it has been revoked",
                "Ask whoever runs the authority, and join anew.",
            )

    def _round(self, turn: Turn, present: tuple[str, ...], samples: int) -> Report:
        self._check_hub()
        if self._dirty:
            self._return_to(turn.phase)  # the last round that it took part in has not counted
        self._begin(samples)
        self._dirty = True
        self._lines.begin(turn, (HUB,))
        before, self._beginning = self._beginning, Report()
        report = before.add(self._host.run(turn.phase, present))
        self._lines.finish()
        return report

    def _begin(self, samples: int) -> None:
        """What comes before its first round, whether it is to take part in a round or only to be measured."""
        self._agent.learner.join(samples)
        if not self._begun:
            self._lines.begin(Turn(BEGIN), ())
            self._beginning = self._host.run(BEGIN, self._agent.roster)
            self._begun = True
            self._shelf.put(0, pack(self._agent.dump()), store=False)

    def _keep(self, done: int, *, store: bool) -> str | None:
        self._dirty = False
        self._done = done
        self._watch("running", done, {})
        try:
            self._shelf.put(done, pack(self._agent.dump()), store=store)
        except StorageError as error:
            self._lines.tell(f"{error.must} Found: {error.found}. Going on from memory: make room.")
            return f"it could not store round {done}: {error.found}; it goes on from memory"
        return None

    def _store(self) -> str | None:
        try:
            self._shelf.store_newest()
        except StorageError as error:
            return f"it could not store its state: {error.found}; it goes on from memory"
        return None

    def _evaluate(self, part: int | None, samples: int, *, views: bool) -> tuple[View, dict[str, Any]]:
        self._begin(samples)
        seen: dict[str, View] | None = {} if views else None
        scores = score(self._the_description, self._agent, part, seen)
        self._watch("running", self._done, scores)
        return (seen or {}).get(self._agent.name, {}), {"scores": scores}


def _refusal(control: Control) -> NetworkError:
    return NetworkError(
        "The hub must let this agent in.", str(control.content.get("why"))[:300], "Change that, and join again."
    )


def _whole(value: Any, most: int) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{value!r} where a number from 0 to {most} is meant")
    return value


def _worry(seconds: float, *, seen: bool) -> str:
    if seen:
        return f"no answer from the hub for {seconds:.0f} s: it may be busy, or another process of this agent is there"
    return (
        f"no hub for {seconds:.0f} s: it may be down; or it does not expect an agent of this name; or it knows that "
        "this certificate is revoked"
    )
