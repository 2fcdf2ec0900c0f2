"""A message in transit: its bytes, decoded when they are needed, and what they count as while they wait."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

from codistill.core.errors import MessageError
from codistill.nodes.faults import Faults
from codistill.nodes.node import Node, Receive, Send
from codistill.nodes.record import record_of
from codistill.wire.compression import Compression
from codistill.wire.message import Message

EACH = 512  # bytes counted for each message besides its content: many empty ones take memory, too


class Parcel:
    """The bytes of a message in transit; decoded once, however many local nodes receive it."""

    def __init__(self, data: bytes, limit: int, packed: bool | Compression) -> None:
        self.data, self._limit, self._packed = data, limit, packed

    @cached_property
    def message(self) -> Message | MessageError:
        """The message, or the error if it is malformed."""
        try:
            return Message.decode(self.data, limit=self._limit, packed=self._packed)
        except MessageError as error:
            return error


def opened(node: Node, wish: Receive, parcels: Mapping[str, Parcel]) -> dict[str, Message]:
    """The valid messages, in the order of the senders asked for; the others are refused."""
    arrived: dict[str, Message] = {}
    for sender in wish.senders:
        parcel = parcels.get(sender)
        if parcel is None:
            continue
        try:
            if isinstance(parcel.message, MessageError):
                raise parcel.message
            parcel.message.check(wish.expect)
            arrived[sender] = parcel.message
        except MessageError as error:
            node.refuse(sender, error)
    return arrived


def room_of(parcel: Parcel | None) -> int:
    """Bytes that a message counts as; None stands for a lost one."""
    return EACH if parcel is None else EACH + len(parcel.data)


# --- What happens to messages when they are sent: Byzantine changes, compression, byte counts, watchers, and losses.

Watcher = Callable[[str, str, bytes], None]  # sender, receiver, encoded message


class Outgoing:
    """Makes the bytes of messages, as they leave their senders, and decides by the injected faults which are lost."""

    def __init__(self, faults: Faults, watchers: Sequence[Watcher], compression: Compression | None) -> None:
        self._faults, self._watchers, self._compression = faults, watchers, compression
        self.numbers: dict[tuple[str, str], int] = {}  # messages so far, by sender and receiver; where there are faults
        self.lies: dict[str, int] = {}  # Byzantine messages so far, by sender
        self._told: dict[tuple[str, int], tuple[Message, Message]] = {}  # by sender and id: (honest, sent)

    def begin_phase(self) -> None:
        """Number messages from 1 again."""
        self.numbers, self.lies, self._told = {}, {}, {}

    def forget_messages(self) -> None:
        """Messages that are sent from now on are others than those before, whatever their ids."""
        self._told = {}

    def packed(self, node: Node, effect: Send, t: int, by: int, report: Report) -> list[tuple[str, bytes | None]]:
        """For each receiver the bytes that it is sent, in the same object for many; None: the message is lost.

        `t`: the round (or period) whose faults apply. A message that is sent again is compressed anew only `by`
        another number: its compression error is counted once.
        """
        sent: list[tuple[str, bytes | None]] = []
        sender, faulty = node.name, bool(self._faults)
        for receiver, message in effect.messages.items():
            told = self._tell(sender, message, t) if faulty else message
            if self._compression:
                data = told.compressed(self._compression, record_of(node).residue, by=(sender, by))
            else:
                data = told.encoded
            report.sent[sender] = report.sent.get(sender, 0) + len(data)
            for watch in self._watchers:
                watch(sender, receiver, told.encoded if getattr(watch, "before_compression", False) else data)
            lost = faulty and self._is_struck(sender, receiver, t, report)
            sent.append((receiver, None if lost else data))
        return sent

    def _tell(self, sender: str, message: Message, t: int) -> Message:
        """The message, or a Byzantine one instead: the same for all who receive it."""
        if not self._faults.is_byzantine(t, sender):
            return message
        key = sender, id(message)
        if key not in self._told:  # kept until messages are forgotten, so that no other message gets its id
            self.lies[sender] = self.lies.get(sender, 0) + 1
            self._told[key] = message, self._faults.as_sent(t, sender, self.lies[sender], message)
        return self._told[key][1]

    def _is_struck(self, sender: str, receiver: str, t: int, report: Report) -> bool:
        number = self.numbers[sender, receiver] = self.numbers.get((sender, receiver), 0) + 1
        fate = self._faults.strikes(t, sender, receiver, number)
        if fate not in (None, "split"):  # a split has one event, when it begins
            what = "was lost on the way" if fate == "drop" else "came too late"
            report.refused.append((receiver, sender, f"The message {what} (injected fault)."))
        return fate is not None


# --- What hosts exchange, and what a host needs for it: frames, and what carries them to nodes of other hosts.


@dataclass(frozen=True, slots=True)
class Frame:
    """A message of one node to some nodes of a host, or the notice that a node's round has ended."""

    phase: int
    sender: str
    receivers: list[str]
    payload: bytes
    lost: bool = False
    is_end: bool = False
    asks: bool = False  # its sender waits for the answer; in a run without rounds


class Waiting(Protocol):
    """A host that waits on its links can say for which nodes."""

    def waits(self) -> dict[str, list[str]]:
        """Who waits for whom."""


class Carrier(Protocol):
    """What a host needs to exchange frames with nodes of other hosts."""

    def post(self, phase: int, sender: str, receivers: Sequence[str], data: bytes | None) -> None:
        """Send a message to nodes of other hosts; None stands for a lost message."""

    def post_end(self, phase: int, sender: str, listeners: Iterable[str]) -> None:
        """Tell the nodes that may wait for a node that it will send no more in this phase."""

    def flush(self) -> None:
        """Send now what is still queued; `wait` does so, too."""

    def wait(self, host: Waiting) -> list[Frame]:
        """Frames that have arrived; waits for the next if there is none."""

    def arrived(self) -> list[Frame]:
        """Frames that have arrived, without waiting."""


class RoundTime(Protocol):
    """The clock of a run with rounds: a host reports to it what its nodes do in a round."""

    def begin_round(self) -> None:
        """A round begins."""

    def end_round(self) -> None:
        """The round has ended for all."""

    def computed(self, node: Node) -> None:
        """A node has computed until it sends, receives or ends."""

    def sent(self, sender: str, receiver: str) -> None:
        """A message is on its way, or is lost."""

    def received(self, sender: str, receiver: str) -> None:
        """The receiver takes the next message of the sender."""

    def ended(self, sender: str, receiver: str) -> None:
        """The receiver learns that the sender has ended its round without another message."""


# --- What happened in a round, as the hosts of its nodes report it.


@dataclass
class Report:
    """What happened in a round on a host: bytes, refused messages, and the protocol's remarks and measures."""

    sent: dict[str, int] = field(default_factory=dict)
    received: dict[str, int] = field(default_factory=dict)
    refused: list[tuple[str, str, str]] = field(default_factory=list)  # (receiver, sender, reason)
    remarks: list[tuple[str, str]] = field(default_factory=list)  # (node, text)
    measures: list[tuple[str, str, float]] = field(default_factory=list)  # (agent, name, value)
    present: tuple[str, ...] | None = None  # who took part to the end; None: everyone expected
    events: list[str] = field(default_factory=list)  # other events, as sentences
    waited: float = 0.0  # seconds spent waiting for agents, before any work
    steps: dict[str, int] = field(default_factory=dict)  # gradient steps
    exchanges: dict[str, int] = field(default_factory=dict)  # how often a node waited for messages of others

    def collect(self, node: Node) -> None:
        name, record = node.name, record_of(node)
        if not (record.steps or record.exchanges or record.rejected or record.remarks or record.measures):
            return  # most nodes, where a few of many take part
        self.steps[name] = self.steps.get(name, 0) + record.steps
        self.exchanges[name] = self.exchanges.get(name, 0) + record.exchanges
        self.refused += [(name, sender, reason) for sender, reason in record.rejected]
        self.remarks += [(name, text) for text in record.remarks]
        self.measures += record.measured()
        record.steps = record.exchanges = 0
        record.rejected, record.remarks, record.measures = [], [], []

    def count_received(self, name: str, data: bytes) -> None:
        self.received[name] = self.received.get(name, 0) + len(data)

    def add(self, other: Report) -> Report:
        return Report(
            _sum(self.sent, other.sent),
            _sum(self.received, other.received),
            self.refused + other.refused,
            self.remarks + other.remarks,
            self.measures + other.measures,
            other.present if self.present is None else self.present,
            self.events + other.events,
            self.waited + other.waited,
            _sum(self.steps, other.steps),
            _sum(self.exchanges, other.exchanges),
        )


def _sum(left: dict[str, int], right: dict[str, int]) -> dict[str, int]:
    return {name: left.get(name, 0) + right.get(name, 0) for name in {**left, **right}}
