"""An agent with a hub: it joins, executes the hub's commands, and keeps its model and state to itself.

It is a long-running process with its model in memory. When the hub disconnects it waits; when the hub is back it
joins again, with the newest of its states that the hub has counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from codistill.errors import NetworkError, PolicyError
from codistill.results.outputs import View
from codistill.results.records import Scores
from codistill.results.scores import PREFIXES, SAFEGUARD_WEIGHT
from codistill.runtimes.description import RunDescription
from codistill.runtimes.network.answers import report_content
from codistill.runtimes.network.asynchronous_agent import AsynchronousAgent, OwnReport
from codistill.runtimes.network.commanded_agent import CommandedAgent
from codistill.runtimes.network.connections import Connections
from codistill.runtimes.network.control import Control
from codistill.runtimes.network.frame_header import FrameKind, Turn
from codistill.runtimes.network.hub_commands import read_command, read_go, read_missed
from codistill.runtimes.network.inbox import Refusal
from codistill.runtimes.network.policy import ANYTHING, Policy
from codistill.runtimes.network.state_store import START, StateStore
from codistill.runtimes.network.terms import Terms, check_terms, describe_columns
from codistill.runtimes.network.waiting import missed_text
from codistill.runtimes.runtime import never, one_thread
from codistill.topology import HUB

_RETRY = 1.0  # seconds between two hellos without an answer
_COUNTED = 10.0  # seconds that an agent asked to stop waits for the confirmation that its last round counts
_HINT = 15.0  # seconds after which the operator is told what may be wrong

Describe = Callable[[Terms], RunDescription]  # the run under the hub's terms, with this agent introduced to it
Joined = Callable[[str, int], None]  # takes the name of the run, and the round whose state the agent has


class Watch(Protocol):
    """Takes what the agent does, how many rounds are done, its scores, and other fields of the health file."""

    def __call__(self, what: str, done: int, scores: Scores, **more: Any) -> None:
        """Take it."""


def _ignore(what: str, done: int, scores: Scores, **more: Any) -> None:
    pass


def _unnoticed(run: str, at: int) -> None:
    pass


class RemoteAgent:
    """One agent of a federation with a hub, from its first hello to the end of the run."""

    def __init__(
        self,
        connections: Connections,
        hello: dict[str, Any],
        describe: Describe,
        folder: Path | None = None,
        stopping: Callable[[], bool] = never,
        watch: Watch = _ignore,
        policy: Policy = ANYTHING,
        joined: Joined = _unnoticed,
    ) -> None:
        self._connections, self._hello, self._describe, self._folder = connections, hello, describe, folder
        self._stopping, self._watch = stopping, watch
        self._policy, self._joined = policy, joined
        self._description: RunDescription | None = None
        self._terms: Terms = {}
        self._welcome: Control | None = None
        self._run = ""
        self._answered = 0.0  # when it last answered
        self._done = 0
        self._missed = 0  # rounds that the hub has counted without it
        connections.on_hello, connections.on_refusal = self._on_hello, self._on_refusal

    # --- joining ----------------------------------------------------------------------------------

    def run(self) -> bool:
        """Take part until the run is over (True), or until asked to stop (False)."""
        with one_thread():
            try:
                while True:
                    self._watch("waiting", self._done, {})
                    if not self._join():
                        return False
                    ended = self._serve()
                    if ended is not None:
                        return ended
            except Exception as error:
                why = f"it failed ({type(error).__name__}); its operator sees why"
                if isinstance(error, PolicyError):
                    why = f"its policy does not allow this ({error.rule})"
                self._connections.command(HUB, do="leaving", why=why)
                raise

    def _on_hello(self, welcome: Control) -> None:
        if welcome.content.get("session") != self._connections.transport.session_id:
            return  # sent to another process of this agent
        if welcome.do == "refused":
            raise _refusal(welcome)
        self._connections.open_session(HUB, welcome.header.session_id, welcome.header.number)
        self._welcome = welcome

    def _on_refusal(self, refusal: Refusal) -> None:
        """The hub does not accept the connection itself: this agent is not on its roster, revoked or excluded."""
        if refusal.final:
            raise NetworkError("The hub must accept this agent.", refusal.why, "Correct that, and join again.")
        self._connections.tell(f"the hub does not accept this agent now: {refusal.why}")

    def _join(self) -> bool:
        """Send hellos to the hub until it answers; False if asked to stop before that."""
        began = hinted = time.monotonic()
        last_hello = -_RETRY
        self._welcome = None
        while self._welcome is None or not self._connections.is_connected(HUB):
            if self._stopping():
                return False
            self._check_hub()
            if self._connections.visible.get(HUB) and time.monotonic() - last_hello > _RETRY:
                last_hello = time.monotonic()
                self._connections.command(HUB, kind=FrameKind.HELLO, do="hello", **self._hello)
            self._connections.next_control(0.05)  # discarded: only a welcome is used now
            if time.monotonic() - hinted > _HINT:
                hinted = time.monotonic()
                self._connections.tell(_hint(hinted - began, visible=bool(self._connections.visible.get(HUB))))
        self._enter(self._welcome)
        return True

    def _enter(self, welcome: Control) -> None:
        content = welcome.content
        check_terms(content.get("terms"))
        run, done = content.get("run"), content.get("done")
        if not isinstance(run, str) or not run.isalnum() or len(run) > 64 or type(done) is not int or done < 0:
            raise NetworkError("The hub's welcome must name its run.", f"{run!r}"[:80], "Ask the operator of the hub.")
        if self._description is None:
            self._terms, self._description = content["terms"], self._describe(content["terms"])
            self._agent = self._description.agents[0]
            if self._hello.get("columns") is not None:  # a restarted hub hears the order that was settled
                self._hello = {**self._hello, "columns": describe_columns(self._agent.column_names)}
            make = AsynchronousAgent if self._description.asynchronous else CommandedAgent
            self._work: Any = make(self._description, self._connections)
        elif content["terms"] != self._terms:
            raise NetworkError(
                "A restarted hub must have the same terms.", "different terms", "Join again with a new process."
            )
        if run != self._run:
            if self._run:
                raise NetworkError(
                    "A new run must start with new models.",
                    "the hub has started another run",
                    "Join again with a new process.",
                )
            self._run = run
            self._work.states = StateStore(None if self._folder is None else self._folder / run)
            if self._folder is not None:
                self._work.states.begin_with(self._folder / START)
        if not self._description.asynchronous:  # without rounds, the hub counts none of this agent's
            self._work.states.return_to(done)
        for note in self._work.states.take_notes():
            self._connections.tell(note)
        at = self._done = self._work.return_to(done)
        new = "the state that was restored" if self._work.states.restored else "a new model"
        self._connections.tell(
            f"joined run {run[:8]} after {done} rounds, with {f'the state of round {at}' if at else new}"
        )
        self._joined(run, at)
        self._watch("joined", at, {})
        self._connections.command(HUB, do="ready", at=at)

    # --- taking part ------------------------------------------------------------------------------

    def _serve(self) -> bool | None:
        """Execute commands. True: the run is over. False: asked to stop. None: the hub disconnected."""
        while self._connections.is_connected(HUB):
            if HUB in self._connections.sessions.excluded:
                raise NetworkError(
                    "A hub must send valid commands.",
                    self._connections.sessions.excluded[HUB],
                    "Ask the operator of the hub.",
                )
            # The current round is finished first, unless the hub does not count it for a while.
            if self._stopping() and (not self._work.uncounted or time.monotonic() - self._answered > _COUNTED):
                self._leave_rounds()
                self._connections.command(HUB, do="leaving", why="its operator has stopped it")
                return False
            going = isinstance(self._work, AsynchronousAgent) and self._work.is_going
            control = self._connections.next_control(0.0 if going else 0.2)
            if control is None:
                if going:
                    self._advance()
                continue
            if control.do == "refused":
                raise _refusal(control)
            if control.do == "stop":
                if control.content.get("why") == "done":
                    self._leave_rounds()
                    self._watch("done", int(self._terms["rounds"]), {})
                    return True
                self._connections.tell("the hub has paused the run; waiting for it to come back")
                self._leave_rounds()
                self._watch("paused", self._done, {})
                continue
            if control.do == "missed":
                self._note_missed(control)
                continue
            if control.do == "go" and isinstance(self._work, AsynchronousAgent):
                said = self._checked(control, read_go, control.content)
                if said is not None:
                    self._work.go(**said)
                continue
            self._execute(control)
        self._connections.tell("the hub disconnected; waiting for it to come back")
        return None

    def _note_missed(self, control: Control) -> None:
        missed = self._checked(control, read_missed, control.content, int(self._terms["rounds"]))
        if missed is None:
            return
        self._missed += missed[0]
        self._connections.tell(f"{missed_text(*missed)}: counted by the hub without this agent")
        self._watch("running", self._done, {}, missed=self._missed)

    def _execute(self, control: Control) -> None:
        """Check a command of the hub, execute it and answer."""
        rounds, roster = int(self._terms["rounds"]), self._agent.roster
        read = partial(read_command, asynchronous=self._agent.asynchronous)
        found = self._checked(control, read, control.do, control.content, roster, rounds)
        if found is None:
            return
        said, number = found
        acts: dict[str, Callable[..., tuple[View, dict[str, Any]]]] = {
            "run": self._round, "keep": self._keep, "store": self._store, "evaluate": self._evaluate,
            "alone": lambda **said: ({}, self._alone(**said)),
        }  # fmt: skip
        arrays, answer = acts[control.do](**said)
        self._answered = time.monotonic()
        self._connections.command(HUB, do="answer", number=number, arrays=arrays, **answer)

    def _checked(self, control: Control, read: Callable[..., Any], *given: Any) -> Any:
        """What a command says; None and a strike if it is invalid."""
        try:
            return read(*given)
        except (KeyError, TypeError, ValueError) as error:
            self._connections.sessions.strike(HUB, f"an invalid command '{control.do[:40]}': {error!r}"[:300])
            return None

    # --- without rounds -----------------------------------------------------------------------------

    def _advance(self) -> None:
        self._check_hub()
        told = self._work.advance()
        if told is not None:
            self._done = told.done
            self._watch("running", told.done, told.scores)
            self._send_report(told)

    def _send_report(self, told: OwnReport) -> None:
        report = self._policy.reported(report_content(told.report))
        scores = self._told(told.scores)
        self._connections.command(HUB, do="report", own_rounds=told.done, report=report, scores=scores)

    def _leave_rounds(self) -> None:
        if isinstance(self._work, AsynchronousAgent):
            self._work.end()

    # --- with rounds --------------------------------------------------------------------------------

    def _round(self, turn: Turn, present: tuple[str, ...], samples: int) -> tuple[View, dict[str, Any]]:
        self._check_hub()
        return {}, {"report": self._policy.reported(report_content(self._work.run_round(turn, present, samples)))}

    def _keep(self, done: int, *, store: bool) -> tuple[View, dict[str, Any]]:
        self._done = done
        self._watch("running", done, {})
        return {}, {"trouble": self._work.keep(done, store=store)}

    def _store(self) -> tuple[View, dict[str, Any]]:
        return {}, {"trouble": self._work.store()}

    def _alone(self, samples: int, number: int) -> dict[str, Any]:
        if not self._policy.report.alone:
            return {"scores": {}}
        self._watch("training alone, as a baseline", 0, {})
        alone, name = self._work.train_alone(samples, number, self._stopping), self._agent.name
        return {"scores": self._told(alone.scores.get(name, {})), "steps": alone.steps.get(name)}

    def _told(self, scores: Scores) -> Scores:
        """The scores that the terms ask for (the hub refuses others), and that the policy lets pass."""
        asked = {f"{prefix}{name}" for name in self._terms["scores"] for prefix in PREFIXES}
        asked.add(SAFEGUARD_WEIGHT)
        return self._policy.scored({name: value for name, value in scores.items() if name in asked})

    def _check_hub(self) -> None:
        if HUB in self._connections.transport.revoked():
            raise NetworkError(
                "The hub's certificate must be valid.",
                "it has been revoked",
                "Ask the operator of the certificate authority, and join again.",
            )

    def _evaluate(self, part: int | None, samples: int, *, views: bool) -> tuple[View, dict[str, Any]]:
        view, scores = self._work.evaluate(part, samples, views=views and self._policy.report.outputs)
        if isinstance(self._work, AsynchronousAgent):  # of all its rounds, the last ones included
            self._send_report(self._work.last_report())
        self._watch("running", self._done, scores)
        return view, {"scores": self._told(scores)}


def _refusal(control: Control) -> NetworkError:
    return NetworkError(
        "The hub must accept this agent.", str(control.content.get("why"))[:300], "Correct that, and join again."
    )


def _hint(seconds: float, *, visible: bool) -> str:
    if visible:
        return f"no answer from the hub for {seconds:.0f} s: it may be busy, or another process of this agent is joined"
    return f"no hub for {seconds:.0f} s: it may be down, or a firewall is between; trying again until it is there"
