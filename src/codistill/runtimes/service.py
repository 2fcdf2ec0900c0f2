"""The node service: what the owner of a run asks of the hosts of its nodes, and how they answer; links between hosts.

A command has a name and plain values or arrays. A host does not know who carries commands: the links of worker
processes, calls of Ray actors, a pipe, or TLS links, whose commands are checked before they get here. An error of a
command is its answer, and is raised again by the owner.
"""

from __future__ import annotations

import time
import traceback
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Sized
from functools import partial, reduce
from pathlib import Path
from typing import Any, Protocol

import numpy as np

import codistill.core.errors as errors
from codistill.core.errors import add_line
from codistill.engine.description import RunDescription
from codistill.engine.exchange import Carrier, Frame, Report, Waiting
from codistill.engine.host import deadlock
from codistill.engine.placement import IdleStates
from codistill.engine.runtime import Runtime, ShouldStop, Stopped, load_nodes, never
from codistill.engine.store import Saved, StoredState, packed
from codistill.nodes.node import Node
from codistill.results.outputs import View
from codistill.results.records import Scores
from codistill.runtimes.simulation import LocalRuntime
from codistill.wire.state import pack, unpack

STOP = "stop"  # serve no longer
COMMANDS = {
    "start": "get ready for the round after those that are done",
    "alone": "train copies of the agents alone, as the baseline",
    "run": "run a phase",
    "evaluate": "evaluate the agents",
    "features": "compute features of the chosen test samples",
    "save": "send the states of the nodes",
    "load": "return to these states",
    "finish": "end the run",
    # States that stay with a host: on the disk of a Ray node, or with an agent between organisations.
    "unsaved": "name the states that have changed since they were fetched",
    "fetch": "send some of these states",
    "restore": "write these states to disk, and return to them",
    "keep": "keep the state of a round that counts",
    "store": "store the newest state on disk",
}

Content = dict[str, Any]


def serve(service: Any, receive: Callable[[], Content], answer: Callable[..., None]) -> None:
    while (command := receive())["do"] != STOP:
        do = command.pop("do")
        try:
            if do not in COMMANDS:
                raise ValueError(f"unknown command '{do}'")
            content = getattr(service, do)(**command)  # the method of that name
        except Stopped:
            content = {"stopped": True}
        except Exception as error:
            content = {"error": describe_error(error, traceback.format_exc())}
        answer(**content)


class NodeService:
    """The nodes of one host, as the runtime that drives them there: each command of an owner is a method."""

    def __init__(self, runtime: Runtime, idle: IdleStates | None = None, should_stop: ShouldStop = never) -> None:
        """`idle`: where states of agents that are not at work are kept; None: in memory."""
        self._runtime, self._idle, self._should_stop = runtime, idle, should_stop

    def start(self, done: int) -> Content:
        self._runtime.start(done, self._should_stop)
        return {}

    def alone(self) -> Content:
        measured = self._runtime.measure_baseline()
        return {"measured": None if measured is None else vars(measured)}

    def run(self, phase: int, present: Sequence[str]) -> Content:
        return {"report": vars(self._runtime.run(phase, tuple(present)))}

    def evaluate(self, names: Collection[str] | None, samples: int | None, *, views: bool) -> Content:
        """Evaluate all agents of this host, or those that are named; with `views`, their outputs as well."""
        seen: dict[str, View] | None = {} if views else None
        evaluate = self._runtime.evaluate if names is None else partial(self._runtime.evaluate_some, names)
        return {"scores": evaluate(samples, seen), "views": seen}

    def features(self) -> Content:
        return {"features": self._runtime.features()}

    def save(self) -> Content:
        return {"saved": _sendable(self._runtime.save())}

    def load(self, saved: Mapping[str, Any]) -> Content:
        self._runtime.load_saved(_received(saved, self._idle))
        return {}

    def finish(self, *, complete: bool) -> Content:
        self._runtime.finish(complete=complete)
        return {}


class Commanding(Protocol):
    """What an owner needs to command hosts; they are numbered from 1."""

    def command(self, *hosts: int, **content: Any) -> None:
        """Send a command."""

    def next_control(self) -> tuple[int, Content]:
        """The next answer, and the host that it comes from; raises the error in it."""


class DistributedRuntime(Runtime):
    """The owner's side: `shares[0]`, the hub or nothing, is in this process; agents are with hosts that it commands."""

    def __init__(
        self,
        description: RunDescription,
        hosts: Commanding,
        shares: Sequence[Sequence[Node]],
        links: Carrier | None = None,
        idle: IdleStates | None = None,
    ) -> None:
        """`links`: to the hosts, for messages of nodes in this process, if there are any. `idle`: where the hosts keep
        states of agents that are not at work; None: in memory."""
        super().__init__(description)
        self._hosts, self._shares, self._idle = hosts, shares, idle
        self._own = LocalRuntime(description, None, shares[0], links)

    def run(self, phase: int, present: tuple[str, ...]) -> Report:
        self._tell("run", phase=phase, present=list(present))
        reports = [self._own.run(phase, present), *(Report(**answer["report"]) for answer in self._answers())]
        together = reduce(Report.add, reports)
        together.waited = max(report.waited for report in reports)
        shares = zip(self._shares, reports, strict=True)
        skipped = {node.name for share, report in shares if report.present == () for node in share}
        together.present = tuple(name for name in present if name not in skipped) if skipped else None
        return together

    def evaluate_some(
        self, names: Collection[str] | None, samples: int | None, views: dict[str, View] | None = None
    ) -> dict[str, Scores]:
        self._tell("evaluate", names=None if names is None else list(names), samples=samples, views=views is not None)
        answers = self._answers()
        scores = {name: values for answer in answers for name, values in answer["scores"].items()}
        if views is not None:
            seen = {name: view for answer in answers for name, view in answer["views"].items()}
            views.update({agent.name: seen[agent.name] for agent in self.description.agents if agent.name in seen})
        return {agent.name: scores[agent.name] for agent in self.description.agents if agent.name in scores}

    def features(self) -> dict[str, np.ndarray]:
        self._tell("features")
        found = {name: values for answer in self._answers() for name, values in answer["features"].items()}
        return {agent.name: found[agent.name] for agent in self.description.agents if agent.name in found}

    def save(self) -> dict[str, bytes | StoredState]:
        self._tell("save")
        saved = self._own.save()
        for answer in self._answers():
            saved.update(_received(answer["saved"], self._idle))
        return {node.name: saved[node.name] for node in self.description.nodes}

    def load(self, saved: Saved) -> None:
        """States in files stay there, if agents that are not at work are kept on disk."""
        if self._idle is None:  # then no host may read a file of another one
            saved = {name: packed(state) for name, state in saved.items()}
        self._own.load(saved)
        for host, share in enumerate(self._shares[1:], 1):
            states = _sendable({node.name: saved[node.name] for node in share})
            self._hosts.command(host, do="load", saved=states)
        self._answers()

    def load_saved(self, saved: Saved) -> None:
        self.load(saved)

    def finish(self, *, complete: bool) -> None:
        load_nodes(self.description.nodes, self.save(), self._idle)

    def close(self) -> None:
        self._own.close()

    def _tell(self, do: str, **content: Any) -> None:
        self._hosts.command(*range(1, len(self._shares)), do=do, **content)

    def _answers(self) -> list[Content]:
        """The answers of all hosts; `Stopped`, when all have answered, if one of them was stopped while it waited."""
        answers = dict(self._hosts.next_control() for _ in self._shares[1:])
        if any(answer.get("stopped") for answer in answers.values()):
            raise Stopped
        return [answers[host] for host in sorted(answers)]


def _sendable(saved: Saved) -> Content:
    """States as plain values: bytes, or a file's path and size."""
    return {name: state if isinstance(state, bytes) else (str(state.path), state.size) for name, state in saved.items()}


def _received(sent: Mapping[str, Any], idle: IdleStates | None) -> dict[str, bytes | StoredState]:
    if idle is None:  # then no host may name a file of another one
        return dict(sent)
    return {
        name: state if isinstance(state, bytes) else StoredState(Path(state[0]), state[1])
        for name, state in sent.items()
    }


# --- Links between the hosts of a run: messages of nodes, commands and answers. Sending never blocks.

MESSAGE, LOST, END, CONTROL = range(4)  # kinds of frames
STALL = 1.0  # seconds without a frame after which a host reports that it is blocked


def places_of(description: RunDescription, shares: Sequence[Sequence[Node]]) -> dict[str, int]:
    """The host of each node, in the order of the description's nodes."""
    hosts = {node.name: host for host, share in enumerate(shares) for node in share}
    return {node.name: hosts[node.name] for node in description.nodes}


class Links(ABC):
    """All links of one host. Host 0 is the owner of the run; control messages go to and from it."""

    def __init__(self, me: int, others: Iterable[int], places: Mapping[str, int]) -> None:
        """`others`: the hosts at the other ends; `places`: the host of each node."""
        self.me, self._others = me, set(others)
        self._places = dict(places)
        self._names = list(places)
        self._numbers = {name: number for number, name in enumerate(self._names)}
        self._frames: list[Frame] = []
        self._control: deque[tuple[int, dict[str, Any]]] = deque()
        self._sent = self._received = 0
        # Of the owner of the run: what hosts have reported since the last check for a deadlock, and had at that check.
        self._blocked: dict[int, Content] = {}
        self._last_check: dict[int, Content] = {}

    # --- implemented by each kind of link -------------------------------------------------------

    @abstractmethod
    def _queue(self, host: int, kind: int, phase: int, sender: int, receivers: list[int], data: bytes) -> None:
        """Queue a frame for a host, from one node to some of its nodes."""

    @abstractmethod
    def _pump(self, timeout: float) -> None:
        """Move what can be moved, and wait up to `timeout` seconds if nothing has arrived."""

    @abstractmethod
    def flush(self) -> None:
        """Send as much as the other side accepts now; the rest is sent while waiting."""

    @abstractmethod
    def drain(self) -> None:
        """Send all that is queued, reading meanwhile so that no host blocks on sending to this one."""

    @abstractmethod
    def _fault(self, host: int, told_by: int) -> errors.RuntimeFault:
        """The error for a lost host; `told_by`: the host that reports it."""

    # --- frames of nodes ----------------------------------------------------------------------

    def post(self, phase: int, sender: str, receivers: Sequence[str], data: bytes | None) -> None:
        """Queue a message for nodes of other hosts; once per host, however many of its nodes receive it."""
        by_host: dict[int, list[int]] = {}
        for receiver in receivers:
            by_host.setdefault(self._places[receiver], []).append(self._numbers[receiver])
        self._post({host: by_host[host] for host in by_host if host in self._others}, phase, sender, data)

    def _post(self, by_host: Mapping[int, list[int]], phase: int, sender: str, data: bytes | None) -> None:
        for host, numbers in by_host.items():
            self._queue(host, LOST if data is None else MESSAGE, phase, self._numbers[sender], numbers, data or b"")

    def post_end(self, phase: int, sender: str, listeners: Iterable[str]) -> None:
        for host in {self._places[name] for name in listeners} & self._others:
            self._queue(host, END, phase, self._numbers[sender], [], b"")

    def wait(self, host: Waiting) -> list[Frame]:
        self.flush()
        self._wait_for(self._frames, host.waits)
        return self.arrived()

    def arrived(self) -> list[Frame]:
        frames, self._frames = self._frames, []
        return frames

    def _take(self, host: int, kind: int, phase: int, sender: int, receivers: Iterable[int], payload: bytes) -> None:
        if kind == CONTROL:
            self._take_control(host, unpack(payload))
            return
        self._received += 1
        names = [self._names[number] for number in receivers]
        self._frames.append(Frame(phase, self._names[sender], names, payload, lost=kind == LOST, is_end=kind == END))

    # --- control ------------------------------------------------------------------------------

    def command(self, *hosts: int, **content: Any) -> None:
        """Send a control message, and with it whatever else is queued for these hosts."""
        data = pack(content)
        for host in hosts:
            self._queue(host, CONTROL, 0, 0, [], data)
        self.flush()

    def answer(self, **content: Any) -> None:
        """Send the owner of the run an answer, and with it whatever else is queued."""
        self.command(0, **content)
        self.drain()

    def next_command(self) -> dict[str, Any]:
        return self.next_control()[1]

    def next_control(self) -> tuple[int, dict[str, Any]]:
        self._wait_for(self._control, dict)
        return self._control.popleft()

    def _take_control(self, host: int, content: dict[str, Any]) -> None:
        if "blocked" in content:
            self._blocked[host] = content
        elif "error" in content:
            raise rebuild_error(content["error"])
        elif "lost" in content:
            raise self._fault(content["lost"], host)
        else:
            self._control.append((host, content))

    # --- a deadlock ---------------------------------------------------------------------------

    def _wait_for(self, arrivals: Sized, waits: Callable[[], dict[str, list[str]]]) -> None:
        """Wait until something has arrived; report meanwhile that this host is blocked: such reports are not frames."""
        quiet = time.monotonic()
        while not arrivals:
            self._pump(STALL)
            if arrivals or time.monotonic() - quiet < STALL:
                continue
            content = {"blocked": waits(), "sent": self._sent, "received": self._received}
            if self.me != 0:
                self.command(0, **content)
            else:
                self._blocked[0] = content
                self._check_deadlock()
            quiet = time.monotonic()

    def _check_deadlock(self) -> None:
        """Raise if, twice in a row, every host reports that it waits and no frame is in transit."""
        if len(self._blocked) <= len(self._others):
            return  # a host has not reported since the last check, so it may be computing
        before, self._last_check, self._blocked = self._last_check, self._blocked, {}
        said = self._last_check.values()
        idle = sum(host["sent"] for host in said) == sum(host["received"] for host in said)
        if idle and before == self._last_check and any(host["blocked"] for host in said):
            raise deadlock({name: list(who) for host in said for name, who in host["blocked"].items()})


# --- An error of a host: described there as plain values, and raised again by the owner of the run.


def describe_error(error: BaseException, trace: str) -> Content:
    add_line(error)
    parts = list(error.args) if len(error.args) == 3 and hasattr(error, "exit_code") else None
    notes = list(getattr(error, "__notes__", []))
    return {
        "kind": type(error).__name__,
        "parts": parts,
        "text": f"{type(error).__name__}: {error}",
        "notes": notes,
        "trace": trace,
    }


def rebuild_error(content: Content) -> Exception:
    kind = getattr(errors, content["kind"], None)
    if content["parts"] and isinstance(kind, type) and issubclass(kind, errors.CodistillError):
        error: Exception = kind(*content["parts"])
    else:
        error = RemoteError(content["text"])
        error.add_note(content["trace"])
    for note in content["notes"]:
        error.add_note(note)
    return error


class RemoteError(Exception):
    """An unexpected error on a host; its notes hold the traceback there."""
