"""An agent with a hub: it joins, executes the hub's commands, and keeps its model and state to itself.

It is a long-running process with its model in memory. When the hub disconnects it waits; when the hub is back it
joins again, with the newest of its states that the hub has counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from codistill.errors import CheckpointError, NetworkError, PolicyError, StorageError
from codistill.results.outputs import View
from codistill.results.records import RoundEnded, Scores
from codistill.results.scores import PREFIXES, SAFEGUARD_WEIGHT
from codistill.runtimes.description import RunDescription
from codistill.runtimes.evaluation import score
from codistill.runtimes.host import BEGIN, Host
from codistill.runtimes.network.answers import report_content
from codistill.runtimes.network.connections import Connections
from codistill.runtimes.network.control import Control
from codistill.runtimes.network.frame_header import FrameKind, Turn
from codistill.runtimes.network.inbox import Refusal
from codistill.runtimes.network.limits import derived_limit
from codistill.runtimes.network.policy import ANYTHING, Policy
from codistill.runtimes.network.state_store import START, StateStore
from codistill.runtimes.network.terms import Terms, check_terms
from codistill.runtimes.network.waiting import missed_text
from codistill.runtimes.round_report import Report
from codistill.runtimes.running import measure_alone
from codistill.runtimes.runtime import never, one_thread
from codistill.topology import HUB
from codistill.wire.state import pack, unpack

_RETRY = 1.0  # seconds between two hellos without an answer
_COUNTED = 10.0  # seconds that an agent asked to stop waits for the confirmation that its last round counts
_PROGRESS = 0.5  # seconds between two messages of an agent that trains alone
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
        self._begun = False
        self._uncounted = False  # whether its state includes a round that the hub has not counted
        self._answered = 0.0  # when it last answered
        self._beginning = Report()  # of the phase before the first round; sent with that of the first round
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
            self._host: Host = self._description.host([self._agent], self._connections)
            self._connections.backlog = self._host.backlog
            self._host.message_limit = self._connections.network.message_limit or derived_limit(self._description)
            self._connections.transport.accept(self._host.message_limit)
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
            self._states = StateStore(None if self._folder is None else self._folder / run)
            if self._folder is not None:
                self._states.begin_with(self._folder / START)
        self._states.return_to(done)
        for note in self._states.take_notes():
            self._connections.tell(note)
        at = self._done = self._return_to(done)
        new = "the state that was restored" if self._states.restored else "a new model"
        self._connections.tell(
            f"joined run {run[:8]} after {done} rounds, with {f'the state of round {at}' if at else new}"
        )
        self._joined(run, at)
        self._watch("joined", at, {})
        self._connections.command(HUB, do="ready", at=at)

    def _return_to(self, done: int) -> int:
        """Restore the newest state that counts; the number of its round."""
        found = self._states.newest(done)
        if found is None:
            if self._begun:
                raise NetworkError(
                    "An agent needs a state of a round that the hub has counted.",
                    f"the hub has counted {done} rounds, and all states of this agent are newer",
                    "Join again with a new process: it starts with a new model.",
                )
            self._uncounted = False
            return 0
        try:
            self._agent.resume(unpack(found[1]))
        except Exception as error:  # a state of another model: each library has its own way to say so
            raise CheckpointError(
                "An agent must go on with the model and the protocol of its state.",
                f"{type(error).__name__}: {error}"[:200],
                "Use the model that it was trained with; or choose another state by 'codistill restore'.",
            ) from error
        self._begun, self._uncounted = True, False
        return found[0]

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
            if self._stopping() and (not self._uncounted or time.monotonic() - self._answered > _COUNTED):
                self._connections.command(HUB, do="leaving", why="its operator has stopped it")
                return False
            control = self._connections.next_control(0.2)
            if control is None:
                continue
            if control.do == "refused":
                raise _refusal(control)
            if control.do == "stop":
                if control.content.get("why") == "done":
                    self._watch("done", int(self._terms["rounds"]), {})
                    return True
                self._connections.tell("the hub has paused the run; waiting for it to come back")
                self._watch("paused", self._done, {})
                continue
            if control.do == "missed":
                self._note_missed(control)
                continue
            self._execute(control)
        self._connections.tell("the hub disconnected; waiting for it to come back")
        return None

    def _note_missed(self, control: Control) -> None:
        try:
            told = [control.content[key] for key in ("count", "first", "last")]
            count, first, last = (_integer(number, int(self._terms["rounds"])) for number in told)
        except (KeyError, ValueError) as error:
            self._connections.sessions.strike(HUB, f"an invalid command 'missed': {error!r}"[:300])
            return
        self._missed += count
        self._connections.tell(f"{missed_text(count, first, last)}: counted by the hub without this agent")
        self._watch("running", self._done, {}, missed=self._missed)

    def _execute(self, control: Control) -> None:
        """Check a command of the hub, execute it and answer."""
        try:
            act, number = self._parse(control)
        except (KeyError, TypeError, ValueError) as error:
            self._connections.sessions.strike(HUB, f"an invalid command '{control.do[:40]}': {error!r}"[:300])
            return
        arrays, answer = act()
        self._answered = time.monotonic()
        self._connections.command(HUB, do="answer", number=number, arrays=arrays, **answer)

    def _parse(self, control: Control) -> tuple[Callable[[], tuple[View, dict[str, Any]]], int]:
        """What a command asks for, and its number; all of it is checked before anything is executed."""
        content, rounds = control.content, int(self._terms["rounds"])
        number = _integer(content["number"], 1 << 62)
        match control.do:
            case "run":
                phase, attempt = content["turn"]
                turn = Turn(_integer(phase, rounds - 1), _integer(attempt, (1 << 16) - 1))
                names = frozenset(map(str, list(content["present"])))
                present = tuple(name for name in self._agent.roster if name in names)
                samples = _integer(content["samples"], 1 << 62)
                return lambda: ({}, {"report": self._report(self._round(turn, present, samples))}), number
            case "keep":
                done, store = _integer(content["round"], rounds), content["store"] is True
                return lambda: ({}, {"trouble": self._keep(done, store=store)}), number
            case "store":
                return lambda: ({}, {"trouble": self._store()}), number
            case "evaluate":
                part = None if content["samples"] is None else _integer(content["samples"], 1 << 62)
                samples, views = _integer(content["of"], 1 << 62), content["views"] is True
                return lambda: self._evaluate(part, samples, views=views), number
            case "alone":
                samples = _integer(content["samples"], 1 << 62)
                return lambda: ({}, {"scores": self._alone(samples, number)}), number
        raise ValueError("unknown command")

    @property
    def _the_description(self) -> RunDescription:
        assert self._description is not None
        return self._description

    def _report(self, report: Report) -> dict[str, Any]:
        return self._policy.reported(report_content(report))

    def _alone(self, samples: int, number: int) -> Scores:
        if not self._policy.report.alone:
            return {}
        self._agent.learner.join(samples)
        self._watch("training alone, as a baseline", 0, {})
        progress = _TrainingAlone(self._connections, number)
        scores = measure_alone(self._the_description, self._stopping, [progress]).get(self._agent.name, {})
        return self._told(scores)

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

    def _round(self, turn: Turn, present: tuple[str, ...], samples: int) -> Report:
        self._check_hub()
        if self._uncounted:
            self._return_to(turn.phase)  # its last round was not counted
        self._begin(samples)
        self._uncounted = True
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
            self._states.put(0, pack(self._agent.dump()), store=False)

    def _keep(self, done: int, *, store: bool) -> str | None:
        self._uncounted = False
        self._done = done
        self._watch("running", done, {})
        try:
            self._states.put(done, pack(self._agent.dump()), store=store)
        except StorageError as error:
            self._connections.tell(f"{error.must} Found: {error.found}. Continuing from memory: free some space.")
            return f"it could not store round {done}: {error.found}; it continues from memory"
        return None

    def _store(self) -> str | None:
        try:
            self._states.store_newest()
        except StorageError as error:
            return f"it could not store its state: {error.found}; it continues from memory"
        return None

    def _evaluate(self, part: int | None, samples: int, *, views: bool) -> tuple[View, dict[str, Any]]:
        self._begin(samples)
        seen: dict[str, View] | None = {} if views and self._policy.report.outputs else None
        scores = score(self._the_description, self._agent, part, seen)
        self._watch("running", self._done, scores)
        return (seen or {}).get(self._agent.name, {}), {"scores": self._told(scores)}


class _TrainingAlone:
    """Tells the hub which rounds of training alone are done, so that its deadline is about the next one only."""

    def __init__(self, connections: Connections, number: int) -> None:
        self._connections, self._number = connections, number
        self._told = time.monotonic()

    def round_ended(self, record: RoundEnded) -> None:
        if time.monotonic() - self._told > _PROGRESS:
            self._told = time.monotonic()
            self._connections.command(HUB, do="working", number=self._number, round=record.round)


def _refusal(control: Control) -> NetworkError:
    return NetworkError(
        "The hub must accept this agent.", str(control.content.get("why"))[:300], "Correct that, and join again."
    )


def _integer(value: Any, most: int) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{value!r} instead of an integer from 0 to {most}")
    return value


def _hint(seconds: float, *, visible: bool) -> str:
    if visible:
        return f"no answer from the hub for {seconds:.0f} s: it may be busy, or another process of this agent is joined"
    return f"no hub for {seconds:.0f} s: it may be down, or a firewall is between; trying again until it is there"
