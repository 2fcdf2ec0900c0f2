"""Runs without rounds: one driver for an agent, and one for the hub.

A driver does what is due and returns how long to wait until its next step. Its environment knows the time and carries
the messages: that of a simulation has virtual time, the links of a node in a network have real time. All times are
nanoseconds since the start of the run.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Coroutine, Mapping
from typing import Any, Protocol

from codistill.core.errors import MessageError, add_line
from codistill.engine.description import RunDescription
from codistill.engine.exchange import Outgoing, Parcel, Report, opened
from codistill.engine.guard import guarded_round
from codistill.engine.host import resume
from codistill.learners.trained_module import copied
from codistill.nodes.agent import Agent, Hub
from codistill.nodes.clock import SECOND, nanoseconds
from codistill.nodes.node import Effect, Node, Receive, Send, as_message
from codistill.nodes.record import record_of
from codistill.protocol import own_files, run_serve
from codistill.topology import HUB
from codistill.wire.codec import SIZE_LIMIT
from codistill.wire.message import Message


class Environment(Protocol):
    """What a driver needs to know the time, to send, and to report."""

    report: Report  # of the current period

    @property
    def now(self) -> int:
        """The time."""

    def send(self, sender: str, receiver: str, data: bytes | None, *, asks: bool = False) -> bool:
        """Send a message, or None in place of a lost one; False: no answer can follow."""


class AgentEnvironment(Environment, Protocol):
    """The same for an agent, which takes time to compute."""

    def may_send(self, receivers: Collection[str]) -> bool:
        """Whether the receivers accept another message now."""

    def pause(self, driver: AgentDriver, since: int) -> int:
        """How long the agent still takes for what it has computed since a time."""


class Messages:
    """Packs the messages of nodes and sends them; unpacks those that arrive, up to `limit` bytes."""

    def __init__(self, description: RunDescription, environment: Environment, limit: int = SIZE_LIMIT) -> None:
        assert description.clock is not None
        self.period = nanoseconds(description.clock.period)
        self.outgoing = Outgoing(description.faults, description.watchers, description.compression)
        self._environment, self._limit, self._packed = environment, limit, description.compression or False

    def send(self, node: Node, effect: Send, by: int) -> bool:
        """Send what a node's effect says; False: no answer can follow. `by`: see `Outgoing.packed`."""
        environment = self._environment
        packed = self.outgoing.packed(node, effect, environment.now // self.period, by, environment.report)
        self.outgoing.forget_messages()
        sent = [environment.send(node.name, receiver, data, asks=effect.asks) for receiver, data in packed]
        return all(sent)

    def received(self, name: str, data: bytes) -> Parcel:
        self._environment.report.count_received(name, data)
        return self.parcel(data)

    def parcel(self, data: bytes) -> Parcel:
        """A message that may be packed only as the run's compression does."""
        return Parcel(data, self._limit, self._packed)


Entry = tuple[int, dict[str, bytes] | None]  # when a round was resumed, and with which messages; None: after sending


class AgentDriver:
    """Drives one agent from effect to effect, round after round, whatever other nodes do."""

    def __init__(
        self, agent: Agent, description: RunDescription, environment: AgentEnvironment, messages: Messages
    ) -> None:
        assert description.clock is not None
        record_of(agent).place()
        self.agent, self._environment, self._messages = agent, environment, messages
        self._clock, self._faults, self._after = description.clock, description.faults, description.after_round
        self._protocol = description.protocol.chosen(agent.choices)
        self.done = 0  # completed rounds
        self.began = 0  # when the current round began
        self.effect: Effect | None = None  # what the current round has come to; None: its end
        self.waits = False  # for the hub's answer
        self.inbox: dict[str, Parcel] = {}  # the newest message of each sender, if the agent has not used it
        self._coroutine: Coroutine[Effect, Any, None] | None = None
        self._log: list[Entry] = []  # of the current round
        self._start: dict[str, Any] = {}  # learner and state at the start of the current round
        self._reader = copy.copy(agent)  # predicts while the agent is in the middle of a round
        self._reader.learner = copy.deepcopy(agent.learner)

    @property
    def running(self) -> bool:
        return self._coroutine is not None

    def step(self) -> int | None:
        """Do what is due; returns how long to wait until the next step. None: until a message arrives."""
        environment, since, effect = self._environment, self._environment.now, self.effect
        if not self.running:
            wait = self._until_ready(since)
            if wait != 0:
                return wait
            self._begin(since)
        elif effect is None:
            self._end()
        elif isinstance(effect, Send):
            if not environment.may_send(effect.messages):
                return None
            if effect.asks:
                self.inbox.pop(HUB, None)
            sent = self._messages.send(self.agent, effect, by=self.done)
            since = environment.now
            self._resume(since)
            self.waits = self.waits and sent
        elif self.waits:
            return None
        else:
            self._resume(since, {name: self.inbox.pop(name) for name in effect.senders if name in self.inbox})
        return environment.pause(self, since)

    def deliver(self, sender: str, data: bytes | None) -> None:
        """Take a message that has arrived; None: it was lost, or the hub has no answer."""
        if sender == HUB and not self.waits:
            return  # the answer to what was asked before a connection was lost
        self.waits = self.waits and sender != HUB
        if data is not None:
            self.inbox[sender] = self._messages.received(self.agent.name, data)

    # --- a round --------------------------------------------------------------------------------------

    def _until_ready(self, now: int) -> int | None:
        """How long until the agent is online and takes part in the period; None: it never does again."""
        online = self._clock.online_from(self.agent.name, now)
        if online is None or online > now:
            return None if online is None else online - now
        period = now // self._messages.period
        return 0 if self.agent.name in self._faults.present(period) else (period + 1) * self._messages.period - now

    def _begin(self, now: int) -> None:
        agent, record = self.agent, record_of(self.agent)
        self._start = copied({"learner": agent.learner.state(), "state": agent.state})
        self.began, self._log = now, []
        with record.computing():
            record.start(self.done, agent.roster)
        record.work, agent.time = 0, now / SECOND
        self._coroutine = guarded_round(self._protocol, agent, self.done)
        self._compute(None)

    def _resume(self, now: int, parcels: Mapping[str, Parcel] | None = None) -> None:
        """Compute up to the next effect; `parcels`: what the agent receives, by sender."""
        answer = None
        self.waits = isinstance(self.effect, Send) and self.effect.asks
        if isinstance(self.effect, Receive):
            self._log.append((now, {sender: parcel.data for sender, parcel in (parcels or {}).items()}))
            answer = opened(self.agent, self.effect, parcels or {})
        else:
            self._log.append((now, None))
        self.agent.time = now / SECOND
        self._compute(answer)

    def _compute(self, answer: Any) -> None:
        assert self._coroutine is not None
        try:
            self.effect = resume(self.agent, self._coroutine, answer)
        except Exception as error:
            error.add_note(f"This happened at '{self.agent.name}' in its round {self.done + 1}.")
            add_line(error, own_files(self._protocol))
            raise

    def _end(self) -> None:
        self._coroutine = None
        if self._after:
            self._after(self.agent, self.done)
        self.done += 1
        self._environment.report.collect(self.agent)

    def take_work(self) -> int:
        """The gradient steps since the last call."""
        record = record_of(self.agent)
        work, record.work = record.work, 0
        return work

    # --- the last completed round ---------------------------------------------------------------------

    def last_completed(self) -> Agent:
        """The agent as it was at the end of its last completed round; a copy, if it is in another one."""
        if not self.running:
            return self.agent
        reader, start = self._reader, copied(self._start)
        reader.learner.restore(start["learner"])
        reader.state, reader.memo = start["state"], {}
        return reader

    def abandon(self) -> None:
        """Return to the end of the last completed round."""
        if self._coroutine is not None:
            self._coroutine.close()
            self._coroutine = None
            self.agent.learner.restore(self._start["learner"])
            self.agent.state, self.agent.memo = self._start["state"], {}

    def dump(self) -> dict[str, Any]:
        """What the agent keeps, as it was at the end of its last completed round."""
        return {**record_of(self.agent).dump(), **(self._start if self.running else {})}

    def progress(self) -> dict[str, Any]:
        """How far it is: with this and `dump`, the current round can be computed again."""
        return {"done": self.done, "began": self.began, "log": self._log if self.running else None}

    def load(self, progress: Mapping[str, Any], inbox: Mapping[str, bytes]) -> None:
        """Return to such a moment; the agent has returned to what was dumped. Nothing is sent again."""
        parcel, self.done = self._messages.parcel, progress["done"]
        self.inbox = {sender: parcel(data) for sender, data in inbox.items()}
        if progress["log"] is not None:
            self._begin(progress["began"])
            for now, received in progress["log"]:
                self._resume(now, {sender: parcel(data) for sender, data in (received or {}).items()})
            self.take_work()


class RelayDriver:
    """Lets the hub answer messages one by one; its randomness derives from (seed, "hub", number of the message)."""

    def __init__(self, hub: Hub, description: RunDescription, environment: Environment, messages: Messages) -> None:
        self.hub, self._protocol = hub, description.protocol
        self._environment, self._messages = environment, messages
        self.served = 0  # messages so far

    def serve(self, sender: str, data: bytes | None, *, asks: bool) -> None:
        """Serve a message, None if it was lost; a sender that asks gets an answer, or learns that there is none."""
        answer = None if data is None else self._answer(sender, self._messages.received(self.hub.name, data))
        if not asks:
            return
        if answer is None:
            self._environment.send(self.hub.name, sender, None)
        else:
            self._messages.send(self.hub, Send({sender: answer}), by=self.served)

    def _answer(self, sender: str, parcel: Parcel) -> Message | None:
        self.served += 1
        record_of(self.hub).enter(self.served, self.hub.roster, self._environment.now / SECOND)
        if isinstance(parcel.message, MessageError):
            self.hub.refuse(sender, parcel.message)
            return None
        try:
            answer = run_serve(self._protocol, self.hub, sender, parcel.message)
            return None if answer is None else as_message("send", answer, {})
        except Exception as error:
            error.add_note(f"This happened at the hub, with a message of '{sender}'.")
            add_line(error, own_files(self._protocol))
            raise
