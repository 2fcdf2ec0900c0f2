"""What happens to messages when they are sent: Byzantine changes, compression, byte counts, watchers, and losses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from codistill.base_node import Node
from codistill.effects import Send
from codistill.message import Message
from codistill.runtimes.round_report import Report
from codistill.wire.compression import Compression

if TYPE_CHECKING:
    from codistill.faults import Faults

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
            data = self._encoded(node, told, by)
            report.sent[sender] = report.sent.get(sender, 0) + len(data)
            for watch in self._watchers:
                watch(sender, receiver, told.encoded if getattr(watch, "before_compression", False) else data)
            lost = faulty and self._is_struck(sender, receiver, t, report)
            sent.append((receiver, None if lost else data))
        return sent

    def _encoded(self, node: Node, message: Message, by: int) -> bytes:
        if not self._compression:
            return message.encoded
        return message.compressed(self._compression, node.residue, by=(node.name, by))

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
