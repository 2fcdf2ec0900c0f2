"""A host drives the coroutines of its nodes and passes messages between them.

The simulation is one host with all nodes; in `processes` every worker has a host, joined by links. A
node's result depends only on the messages it gets, and those are passed on per sender in the order
sent, so it does not matter where a node runs or which node is faster.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from codistill.core.errors import ProtocolError, RuntimeFault, add_line
from codistill.engine.exchange import Carrier, Frame, Outgoing, Parcel, Report, RoundTime, Watcher, opened, room_of
from codistill.engine.guard import guarded_round, hub_round
from codistill.nodes.agent import Agent, Hub
from codistill.nodes.faults import Faults
from codistill.nodes.node import Effect, Node, Receive, Send
from codistill.nodes.record import record_of
from codistill.protocol import Protocol, own_files, run_hook
from codistill.topology import HUB
from codistill.wire.codec import SIZE_LIMIT
from codistill.wire.compression import Compression
from codistill.wire.message import Message

if TYPE_CHECKING:
    from codistill.engine.placement import IdleStates

BEGIN = -1  # the phase before round 0


class _Task:
    """A node's coroutine and what it waits for."""

    def __init__(self, node: Node, coroutine: Coroutine[Effect, Any, None]) -> None:
        self.node, self.coroutine = node, coroutine
        self.wish = Receive(())
        self.pending: set[str] = set()
        self.parcels: dict[str, Parcel] = {}
        self.started = False


class Host:
    """Drives some of the federation's nodes through one phase (begin, or a round) at a time."""

    def __init__(
        self,
        nodes: Sequence[Node],
        protocol: Protocol,
        faults: Faults,
        links: Carrier | None = None,
        watchers: Sequence[Watcher] = (),
        compression: Compression | None = None,
        message_limit: int = SIZE_LIMIT,
    ) -> None:
        self.compression = compression
        self.message_limit = message_limit  # bytes of a message, as it arrives and decoded
        self.nodes = {node.name: node for node in nodes}
        for node in nodes:
            if isinstance(node, Agent):
                record_of(node).place()
        self.protocol, self.links = protocol, links
        self._outgoing = Outgoing(faults, watchers, compression)
        self.after: Callable[[Agent, int], Any] | None = None  # called when an agent has ended a round
        self.idle: IdleStates | None = None  # where the states of agents are that are not at work; None: in memory
        self.time: RoundTime | None = None  # of a run with a clock; `begin` takes no time
        self._early: list[Frame] = []
        self._queues: dict[tuple[str, str], deque[Parcel | None]] = {}
        self._unused: dict[str, int] = {}  # bytes in the queues, by sender

    def run(self, phase: int, present: tuple[str, ...]) -> Report:
        """Drive all local nodes that are present through a phase, to its end; the last frames may still be queued."""
        self._open(phase, present)
        try:
            self._loop()
        finally:
            for task in self._tasks.values():
                task.coroutine.close()
        if self._time:
            self._time.end_round()
        for node in self.nodes.values():
            self._report.collect(node)
        return self._report

    def _open(self, phase: int, present: tuple[str, ...]) -> None:
        self._phase, self._present, self._is_present = phase, present, frozenset(present)
        self._report = Report()
        self._time = None if phase == BEGIN else self.time
        if self._time:
            self._time.begin_round()
        self._queues, self._unused = {}, {}
        self._outgoing.begin_phase()
        self._waiting: dict[str, set[str]] = {}  # sender -> local nodes that wait for it
        self._tasks: dict[str, _Task] = {}
        for name, node in self.nodes.items():
            coroutine = self._coroutine(node)
            if coroutine is not None:
                self._tasks[name] = _Task(node, coroutine)
        # Nodes do not wait for absent ones, nor for a hub that has nothing to do in this phase.
        self._ended = set() if phase != BEGIN else {HUB}
        self._ready = deque(self._tasks.values())
        frames, self._early = self._early + (self.links.arrived() if self.links else []), []
        for frame in frames:
            self._take(frame)

    def _coroutine(self, node: Node) -> Coroutine[Effect, Any, None] | None:
        if isinstance(node, Hub):
            return hub_round(self.protocol, node, self._phase) if self._phase != BEGIN else None
        if node.name not in self._is_present or not isinstance(node, Agent):
            return None
        protocol = self.protocol.chosen(node.choices)
        if self._phase == BEGIN:
            return run_hook(node, protocol.begin)
        return guarded_round(protocol, node, self._phase)

    def _loop(self) -> None:
        running = len(self._tasks)
        while running:
            while self._ready:
                running -= self._advance(self._ready.popleft())
            if not running:
                return
            if self.links is None:
                raise deadlock(self.waits())
            for frame in self.links.wait(self):
                self._take(frame)

    def _advance(self, task: _Task) -> bool:
        """Run a node until it waits or ends; True if it ended."""
        node, record = task.node, record_of(task.node)
        answer: Any = None
        if not task.started:
            task.started = True
            record.work = 0
            if self.idle and isinstance(node, Agent):
                self.idle.reload(node)
            with record.computing():
                record.start("begin" if self._phase == BEGIN else self._phase, self._present)
        else:
            answer = self._open_parcels(task)
        try:
            while True:
                effect = resume(node, task.coroutine, answer)
                if self._time:
                    self._time.computed(node)
                if effect is None:
                    break
                if isinstance(effect, Send):
                    self._post(node.name, effect)
                    answer = None
                    continue
                task.wish, task.pending, task.parcels = effect, set(effect.senders), {}
                for sender in effect.senders:
                    self._resolve(task, sender, wake=False)
                if task.pending:
                    return False
                answer = self._open_parcels(task)
        except Exception as error:
            where = "before round 1" if self._phase == BEGIN else f"in round {self._phase + 1}"
            error.add_note(f"This happened at '{node.name}' {where}.")
            add_line(error, own_files(self.protocol))
            raise
        self._end(node.name)
        if self.links:
            self.links.post_end(self._phase, node.name, node.topology.receivers(node.name))
        if self.after and self._phase != BEGIN and isinstance(node, Agent):
            self.after(node, self._phase)
        if self.idle and isinstance(node, Agent):
            self.idle.offload(node, self._phase)
        return True

    # --- sending ------------------------------------------------------------------------------

    def _post(self, sender: str, effect: Send) -> None:
        """To local nodes at once, to others by their host's link; None stands for a lost message."""
        groups: dict[int, tuple[bytes | None, list[str]]] = {}
        for receiver, data in self._outgoing.packed(self.nodes[sender], effect, self._phase, self._phase, self._report):
            groups.setdefault(id(data), (data, []))[1].append(receiver)
        for data, receivers in groups.values():
            here = [name for name in receivers if name in self.nodes]
            self._arrive(sender, here, None if data is None else self._parcel(data))
            if self.links and len(here) < len(receivers):
                self.links.post(self._phase, sender, [name for name in receivers if name not in self.nodes], data)
        if self.links and sender == HUB:  # all wait for its answers, whatever else it may do before it waits itself
            self.links.flush()

    # --- receiving ----------------------------------------------------------------------------

    def _parcel(self, data: bytes) -> Parcel:
        """A message in transit; it may be packed only as the run's compression does."""
        return Parcel(data, self.message_limit, self.compression or False)

    def _take(self, frame: Frame) -> None:
        if frame.phase > self._phase:
            self._early.append(frame)
        elif frame.phase == self._phase:
            if frame.is_end:
                self._end(frame.sender)
            else:
                parcel = None if frame.lost else self._parcel(frame.payload)
                if parcel and not any(self._queues.get((frame.sender, name)) for name in frame.receivers):
                    # Decode now, while other nodes still compute; but no second message of a sender, since a packed
                    # message takes more memory once it is decoded.
                    _ = parcel.message
                self._arrive(frame.sender, frame.receivers, parcel)

    def _arrive(self, sender: str, receivers: Sequence[str], parcel: Parcel | None) -> None:
        for receiver in receivers:
            self._queues.setdefault((sender, receiver), deque()).append(parcel)
            if self._time:
                self._time.sent(sender, receiver)
            self._unused[sender] = self._unused.get(sender, 0) + room_of(parcel)
            task = self._tasks.get(receiver)
            if task and sender in task.pending:
                self._resolve(task, sender)

    def _end(self, sender: str) -> None:
        self._ended.add(sender)
        for receiver in sorted(self._waiting.pop(sender, ())):
            task = self._tasks[receiver]
            if sender in task.pending:
                self._resolve(task, sender)

    def _resolve(self, task: _Task, sender: str, *, wake: bool = True) -> None:
        queue = self._queues.get((sender, task.node.name))
        if queue:
            parcel = queue.popleft()
            self._unused[sender] -= room_of(parcel)
            if self._time:
                self._time.received(sender, task.node.name)
            if parcel is not None:
                task.parcels[sender] = parcel
        elif sender not in self._ended and (sender == HUB or sender in self._is_present):
            self._waiting.setdefault(sender, set()).add(task.node.name)
            return
        elif self._time:
            self._time.ended(sender, task.node.name)
        task.pending.discard(sender)
        if wake and not task.pending:
            self._ready.append(task)

    def _open_parcels(self, task: _Task) -> dict[str, Message]:
        for parcel in task.parcels.values():
            self._report.count_received(task.node.name, parcel.data)
        return opened(task.node, task.wish, task.parcels)

    def backlog(self, sender: str) -> int:
        """Bytes of a sender that have arrived here and have not been used yet, with some for each message."""
        return self._unused.get(sender, 0)

    def waits(self) -> dict[str, list[str]]:
        return {name: sorted(task.pending) for name, task in self._tasks.items() if task.pending}


def resume(node: Node, coroutine: Coroutine[Effect, Any, None], answer: Any) -> Effect | None:
    """Let a node compute until its next effect; None: until its coroutine ends."""
    try:
        with record_of(node).computing():
            effect = coroutine.send(answer)
        if not isinstance(effect, Send | Receive):
            error = ProtocolError(
                "A protocol may only await the verbs of 'me'.",
                f"something else that waits ({type(effect).__name__})",
                "A runtime has no event loop: do not await asyncio, tasks or files.",
            )
            coroutine.throw(error)
        return effect
    except StopIteration:
        return None


# --- A deadlock: every node waits for another one.


def deadlock(waits: dict[str, list[str]]) -> RuntimeFault:
    shown = "; ".join(f"'{name}' waits for {', '.join(senders)}" for name, senders in list(waits.items())[:5])
    return RuntimeFault(
        "Deadlock: every node is waiting.",
        shown,
        "Check the protocol: each receive needs a send by the other side.",
    )
