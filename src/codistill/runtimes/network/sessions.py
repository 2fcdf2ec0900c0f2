"""The gate: every frame is held to its sender's life and number before anybody looks into it.

A bad message costs its sender a strike; with the last one it is out for the run.
"""

from __future__ import annotations

from collections.abc import Callable

from codistill.runtimes.network.frame_header import FrameHeader, FrameKind
from codistill.text import printable

_REASON = 300  # characters of why a message is bad: parts of it were written by whoever sent it

Tell = Callable[[str], None]  # takes a sentence for the operator


class Sessions:
    """Who has been let in, how far each has come in what it says, and who has struck out."""

    def __init__(self, strikes: int, tell: Tell) -> None:
        self._most, self._tell = strikes, tell
        self._lives: dict[str, int] = {}
        self._numbers: dict[str, int] = {}  # of the newest frame of this life
        self._strikes: dict[str, int] = {}
        self.out: dict[str, str] = {}  # who is out for the run, and why

    def open(self, name: str, life: int, number: int) -> None:
        """Let a life of a node in: from now on, frames of any other life of it do not count."""
        self._lives[name], self._numbers[name] = life, number

    def life(self, name: str) -> int | None:
        """Which life of a node has been let in."""
        return self._lives.get(name)

    def close(self, name: str) -> None:
        """A life is over."""
        self._lives.pop(name, None)

    def admit(self, sender: str, data: bytes) -> FrameHeader | None:
        """The head of a frame that counts; None if it does not."""
        try:
            head = FrameHeader.decode(data)
        except ValueError as error:
            self.strike(sender, f"what it sent is no frame: {error}")
            return None
        if sender in self.out:
            return head if head.kind is FrameKind.HELLO and head.life != self._lives.get(sender) else None
        known = self._lives.get(sender) == head.life
        if known and head.number <= self._numbers[sender]:
            self.strike(sender, f"frame {head.number} came again, after frame {self._numbers[sender]}: a replay")
            return None
        if not known:
            # A first word opens a new life; anything else is left over from one that is over.
            return head if head.kind is FrameKind.HELLO else None
        self._numbers[sender] = head.number
        return head

    def bar(self, sender: str, reason: str) -> None:
        """Put a node out for the run."""
        if sender not in self.out:
            self.out[sender] = reason
            self._tell(f"'{sender}' is out for the rest of the run: {reason}")

    def strike(self, sender: str, reason: str) -> None:
        """Count a bad message, of a node that is not out already."""
        if sender in self.out:
            return
        count = self._strikes[sender] = self._strikes.get(sender, 0) + 1
        self._tell(f"'{sender}': strike {count} of {self._most}: {printable(reason, _REASON)}")
        if count >= self._most:
            self.bar(sender, f"{count} bad messages")
