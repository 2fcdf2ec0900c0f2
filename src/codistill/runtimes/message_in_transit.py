"""A message in transit: its bytes, decoded when they are needed, and what they count as while they wait."""

from __future__ import annotations

from functools import cached_property

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


def room_of(parcel: Parcel | None) -> int:
    """Bytes that a message counts as; None stands for a lost one."""
    return EACH if parcel is None else EACH + len(parcel.data)
