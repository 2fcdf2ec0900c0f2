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
from codistill.outputs import View
from codistill.runtimes.host import BEGIN, Host, Report
from codistill.runtimes.network.answers import as_plain
from codistill.runtimes.network.heads import Kind, Turn
from codistill.runtimes.network.hub import never
from codistill.runtimes.network.lines import Control, Lines
from codistill.runtimes.network.shelf import Shelf
from codistill.runtimes.network.solitude import train_alone
from codistill.runtimes.network.terms import Terms, check_terms
from codistill.runtimes.runtime import Scores, Stage, one_thread, score
from codistill.topology import HUB
from codistill.wire.state import pack, unpack

_AGAIN = 1.0  # seconds between two greetings that nobody answers
_WORRY = 15.0  # seconds after which an operator is told what might be wrong

Settle = Callable[[Terms], Stage]  # brings the agent to life under the hub's terms


Watch = Callable[[str, int, Scores], None]  # is told what the agent does, after how many rounds, and its scores


def ignore(what: str, done: int, scores: Scores) -> None:
    """Nobody watches."""


class Member:
    """One agent's life in a federation."""

    def __init__(
        self,
        lines: Lines,
        hello: dict[str, Any],
        settle: Settle,
        folder: Path | None = None,
        stopping: Callable[[], bool] = never,
        watch: Watch = ignore,
    ) -> None:
        self._lines, self._hello, self._settle, self._folder = lines, hello, settle, folder
        self._stopping, self._watch = stopping, watch
        self._stage: Stage | None = None
        self._terms: Terms = {}
        self._welcome: Control | None = None
        self._run = ""
        self._begun = self._dirty = False
        lines.on_hello = self._welcomed

    # --- joining ----------------------------------------------------------------------------------

    def live(self) -> bool:
        """Take part until the run is over (True), or until asked to stop (False)."""
        with one_thread():
            while True:
                if not self._join():
                    return False
                ended = self._serve()
                if ended is not None:
                    return ended

    def _welcomed(self, welcome: Control) -> None:
        self._lines.gate.open(HUB, welcome.head.life, welcome.head.number)
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
                self._lines.command(HUB, kind=Kind.HELLO, do="hello", **self._hello)
            control = self._lines.next_control(0.05)
            if control is not None and control.do == "refused":
                raise NetworkError(
                    "The hub must let this agent in.",
                    str(control.content.get("why"))[:300],
                    "Change that, and join again.",
                )
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
        if self._stage is None:
            self._terms, self._stage = content["terms"], self._settle(content["terms"])
            self._agent = self._stage.agents()[0]
            self._host: Host = self._stage.host([self._agent], self._lines)
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
            self._shelf = Shelf(None if self._folder is None else self._folder / run)
            for note in self._shelf.notes:
                self._lines.tell(note)
        self._shelf.forget_after(done)
        at = self._return_to(done)
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
            if self._stopping():
                self._lines.command(HUB, do="leaving", why="its operator has stopped it")
                return False
            control = self._lines.next_control(0.2)
            if control is None:
                continue
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
        content: dict[str, Any] = control.content
        arrays: dict[str, Any] = {}
        answer: dict[str, Any] = {}
        match control.do:
            case "run":
                answer["report"] = as_plain(self._round(content))
            case "keep":
                answer["trouble"] = self._keep(int(content["round"]), store=bool(content["store"]))
            case "evaluate":
                answer["scores"], arrays = self._evaluate(content)
            case "alone":
                self._introduce(content)
                answer["scores"] = train_alone(self._the_stage, self._agent, int(content["rounds"]), self._stopping)
            case _:
                self._lines.gate.strike(HUB, f"an unknown command '{control.do[:40]}'")
                return
        self._lines.command(HUB, do="answer", number=content["number"], arrays=arrays, **answer)

    @property
    def _the_stage(self) -> Stage:
        assert self._stage is not None
        return self._stage

    def _introduce(self, content: dict[str, Any]) -> None:
        self._agent.learner.join(int(content["samples"]))

    def _round(self, content: dict[str, Any]) -> Report:
        phase, attempt = map(int, content["turn"])
        present = tuple(name for name in self._agent.roster if name in content["present"])
        if self._dirty:
            self._return_to(phase)  # the last round that it took part in has not counted
        self._introduce(content)
        report = Report()
        if not self._begun:
            self._lines.begin(Turn(BEGIN), ())
            report = self._host.run(BEGIN, self._agent.roster)
            self._begun = True
            self._shelf.put(0, pack(self._agent.dump()), store=False)
        self._dirty = True
        self._lines.begin(Turn(phase, attempt), (HUB,))
        return report.add(self._host.run(phase, present))

    def _keep(self, done: int, *, store: bool) -> str | None:
        self._dirty = False
        try:
            self._shelf.put(done, pack(self._agent.dump()), store=store)
        except StorageError as error:
            self._lines.tell(str(error))
            return f"it could not store round {done}: {error.found}; it goes on from memory"
        return None

    def _evaluate(self, content: dict[str, Any]) -> tuple[Scores, View]:
        views: dict[str, View] | None = {} if content.get("views") else None
        samples = content.get("samples")
        scores = score(self._the_stage, self._agent, samples, views)
        return scores, (views or {}).get(self._agent.name, {})


def _worry(seconds: float, *, seen: bool) -> str:
    if seen:
        return f"the hub has not answered for {seconds:.0f} s: it may be busy"
    return (
        f"no hub for {seconds:.0f} s: it may be down; or it does not expect an agent of this name; or it knows that "
        "this certificate is revoked"
    )
