"""An agent with a hub: it joins, executes the hub's commands, and keeps its model and state to itself.

It is a long-running process with its model in memory. When the hub disconnects it waits; when the hub is back it
joins again, with the newest of its states that the hub has counted.
"""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from codistill.certs.credentials import Credentials
from codistill.core.errors import NetworkError, PolicyError
from codistill.engine.description import RunDescription
from codistill.engine.runtime import never, one_thread
from codistill.network.agent_rounds import AgentWithoutRounds, AgentWithRounds, AgentWork
from codistill.network.commands import missed_text, read_command, read_go, read_missed, report_content
from codistill.network.connections import Connections, Control
from codistill.network.frames import FrameKind, Refusal, Turn
from codistill.network.link import wrapped
from codistill.network.listener import split
from codistill.network.policy import ANYTHING, Policy
from codistill.network.state_store import START, StateStore
from codistill.network.terms import Terms, check_terms, describe_columns
from codistill.network.transport import ignore
from codistill.nodes.record import record_of
from codistill.results.outputs import View
from codistill.results.records import Scores
from codistill.results.scores import PREFIXES, SAFEGUARD_WEIGHT
from codistill.topology import HUB

_RETRY = 1.0  # seconds between two hellos without an answer
_COUNTED = 10.0  # seconds that an agent asked to stop waits for the confirmation that its last round counts
_JOIN_AGAIN = "Join again with a new process."
_HINT = 15.0  # seconds after which the log says what may be wrong

Describe = Callable[[Terms], RunDescription]  # the run under the hub's terms, with this agent in it
Joined = Callable[[str, int], None]  # called with the name of the run, and the round of the agent's state
Watch = Callable[..., None]  # called with what the agent does, the rounds done, its scores, and fields of health.json


class RemoteAgent:
    """One agent of a federation with a hub, from its first hello to the end of the run."""

    def __init__(
        self,
        connections: Connections,
        hello: dict[str, Any],
        describe: Describe,
        folder: Path | None = None,
        stopping: Callable[[], bool] = never,
        watch: Watch = ignore,
        policy: Policy = ANYTHING,
        joined: Joined = ignore,
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
            raise _refusal(welcome.content.get("why"))
        self._connections.open_session(HUB, welcome.header.session_id, welcome.header.number)
        self._welcome = welcome

    def _on_refusal(self, refusal: Refusal) -> None:
        """The hub does not accept the connection itself: this agent is not on its roster, revoked or excluded."""
        if refusal.final:
            raise _refusal(refusal.why)
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
            self._connections.next_control(0.05)  # discarded: only a welcome matters now
            if time.monotonic() - hinted > _HINT:
                hinted = time.monotonic()
                seconds = f"{hinted - began:.0f} s"
                if self._connections.visible.get(HUB):
                    why = f"no answer from the hub for {seconds}: it may be busy, or this agent has joined already"
                else:
                    why = f"no hub for {seconds}: it may be down or behind a firewall; still trying"
                self._connections.tell(why)
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
            if self._hello.get("columns") is not None:  # so that a restarted hub learns the agreed order
                self._hello = {**self._hello, "columns": describe_columns(record_of(self._agent).column_names)}
            make = AgentWithoutRounds if self._description.asynchronous else AgentWithRounds
            self._work: AgentWork = make(self._description, self._connections)
        elif content["terms"] != self._terms:
            raise NetworkError("A restarted hub must have the same terms.", "different terms", _JOIN_AGAIN)
        if run != self._run:
            if self._run:
                raise NetworkError(
                    "A new run must start with new models.", "the hub has started another run", _JOIN_AGAIN
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
                why = self._connections.sessions.excluded[HUB]
                raise NetworkError("A hub must send valid commands.", why, "Ask the operator of the hub.")
            # The current round is finished first, unless the hub does not count it for a while.
            if self._stopping() and (not self._work.uncounted or time.monotonic() - self._answered > _COUNTED):
                self._work.leave()
                self._connections.command(HUB, do="leaving", why="its operator has stopped it")
                return False
            control = self._connections.next_control(0.0 if self._work.is_going else 0.2)
            if control is None:
                if self._work.is_going:
                    self._advance()
                continue
            match control.do:
                case "refused":
                    raise _refusal(control.content.get("why"))
                case "stop":
                    if self._stop(control):
                        return True
                case "missed":
                    missed = self._checked(control, read_missed, control.content, int(self._terms["rounds"]))
                    if missed is not None:
                        self._missed += missed[0]
                        self._connections.tell(f"{missed_text(*missed)}: counted by the hub without this agent")
                        self._watch("running", self._done, {}, missed=self._missed)
                case "go" if isinstance(self._work, AgentWithoutRounds):
                    said = self._checked(control, read_go, control.content)
                    if said is not None:
                        self._work.go(**said)
                case _:
                    self._execute(control)
        # It may have said that the run is over, and left, while this agent waited for an answer in its round.
        while (control := self._connections.next_control(0.0)) is not None:
            if control.do == "stop" and self._stop(control):
                return True
        self._connections.tell("the hub disconnected; waiting for it to come back")
        return None

    def _stop(self, control: Control) -> bool:
        """Whether the run is over; otherwise the hub pauses it."""
        self._work.leave()
        if control.content.get("why") == "done":
            self._watch("done", int(self._terms["rounds"]), {})
            return True
        self._connections.tell("the hub has paused the run; waiting for it to come back")
        self._watch("paused", self._done, {})
        return False

    def _execute(self, control: Control) -> None:
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
        assert isinstance(self._work, AgentWithoutRounds)
        scores = self._work.advance()
        if scores is not None:
            self._done = self._work.done
            self._watch("running", self._done, scores)
            self._send_report(self._work, scores)

    def _send_report(self, work: AgentWithoutRounds, scores: Scores) -> None:
        report = self._policy.reported(report_content(work.take_report()))
        self._connections.command(HUB, do="report", own_rounds=work.done, report=report, scores=self._told(scores))

    # --- with rounds --------------------------------------------------------------------------------

    @property
    def _rounds(self) -> AgentWithRounds:
        """Its work; the commands below are read only in a run with rounds."""
        assert isinstance(self._work, AgentWithRounds)
        return self._work

    def _round(self, turn: Turn, present: tuple[str, ...], samples: int) -> tuple[View, dict[str, Any]]:
        self._check_hub()
        return {}, {"report": self._policy.reported(report_content(self._rounds.run_round(turn, present, samples)))}

    def _keep(self, done: int, *, store: bool) -> tuple[View, dict[str, Any]]:
        self._done = done
        self._watch("running", done, {})
        return {}, {"trouble": self._rounds.keep(done, store=store)}

    def _store(self) -> tuple[View, dict[str, Any]]:
        return {}, {"trouble": self._rounds.store()}

    def _alone(self, samples: int, number: int) -> dict[str, Any]:
        if not self._policy.report.alone:
            return {"scores": {}}
        self._watch("training alone, as a baseline", 0, {})
        alone, name = self._rounds.train_alone(samples, number, self._stopping), self._agent.name
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
        if isinstance(self._work, AgentWithoutRounds):  # of all its rounds, the last ones included
            self._send_report(self._work, {})
        self._watch("running", self._done, scores)
        return view, {"scores": self._told(scores)}


def _refusal(why: object) -> NetworkError:
    return NetworkError("The hub must accept this agent.", str(why)[:300], "Fix that and join again.")


# --- A test connection, which says what is wrong where a link would only retry ---------------------------

_TIMEOUT = 5.0
_ANSWER = 2.0  # seconds in which its preface arrives, after our side of the handshake


def probe(address: str, expected: str, own: Credentials | None) -> str | None:
    """Why a node cannot be reached now; None if it can be. Raises `NetworkError` if waiting does not help."""
    host, port = split(address)
    try:
        with socket.create_connection((host, port), timeout=_TIMEOUT) as plain:
            if own is not None and not _handshake(plain, address, expected, own):
                return (
                    f"{address} closed the connection: it may be too busy, or does not accept this certificate (one "
                    "that has expired there, or of another authority)"
                )
    except socket.gaierror as error:
        return f"the name '{host}' cannot be resolved ({error.strerror})"
    except ConnectionRefusedError:
        return f"no process listens at {address}"
    except TimeoutError:
        return f"{address} does not answer: a firewall, or another machine"
    except OSError as error:
        return f"{address} cannot be reached: {error.strerror or error}"
    return None


def _handshake(plain: socket.socket, address: str, expected: str, own: Credentials) -> bool:
    """Whether the other end accepts the connection; raises if it is the wrong one."""
    try:
        with wrapped(plain, own) as secure:
            secure.do_handshake()
            _check_name(secure.getpeercert(binary_form=True) or b"", address, expected, own)
            secure.settimeout(_ANSWER)
            return bool(secure.recv(1))  # the first byte of its preface
    except (TimeoutError, ConnectionError):
        return False
    except ssl.SSLCertVerificationError as error:
        raise NetworkError(
            f"{address} must have a certificate of this federation's authority.",
            error.verify_message,
            "Use certificates of one authority on both sides, and check the clocks of both machines.",
        ) from None
    except ssl.SSLError as error:
        # A node that rejects a certificate sends a TLS alert. One that closes without an alert makes room for others.
        if isinstance(error, ssl.SSLEOFError) or error.reason == "UNEXPECTED_EOF_WHILE_READING":
            return False
        raise NetworkError(
            f"{address} must accept this node's certificate.",
            str(error.reason or error).lower().replace("_", " "),
            "Renew it by 'codistill certs renew', or get one of the same authority. Is the other side --insecure?",
        ) from None


def _check_name(der: bytes, address: str, expected: str, own: Credentials) -> None:
    """Raise unless the certificate is admitted and names the expected node; an outdated list may be renewed later."""
    try:
        found = own.admitted_name(der)
    except NetworkError as error:
        if own.admits_nobody():
            return
        found, why = "", error.found
    if found != expected:
        raise NetworkError(
            f"The node at {address} must be '{expected}'.",
            f"'{found}'" if found else why,
            "Check the address and the certificates.",
        )
