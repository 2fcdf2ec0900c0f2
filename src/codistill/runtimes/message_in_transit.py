"""A message in transit: its bytes, decoded when they are needed, and what they count as while they wait."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from codistill.base_node import Node
from codistill.effects import Receive
from codistill.errors import MessageError
from codistill.message import Message
from codistill.wire.compression import Compression

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

    def open(self) -> None:
        """Decode the message before it is used."""
        _ = self.message


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
