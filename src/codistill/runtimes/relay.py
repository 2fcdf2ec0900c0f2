"""The hub of a run without rounds: a relay that answers each message as it arrives."""

from __future__ import annotations

from codistill.clock import SECOND
from codistill.errors import MessageError
from codistill.hooks import own_files, run_serve
from codistill.hub import Hub
from codistill.message import Message
from codistill.protocol import Protocol
from codistill.runtimes.message_in_transit import Parcel
from codistill.source_lines import add_line
from codistill.verbs import as_message


class Relay:
    """Serves messages one after the other; its randomness derives from (seed, "hub", number of the message)."""

    def __init__(self, hub: Hub, protocol: Protocol) -> None:
        self.hub, self._protocol = hub, protocol
        self.served = 0  # messages so far

    def answer(self, sender: str, parcel: Parcel, now: int) -> Message | None:
        """The answer to a message that has arrived, if there is one."""
        self.served += 1
        self.hub.enter(self.served, self.hub.roster, now / SECOND)
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
