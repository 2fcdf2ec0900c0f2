"""Sessions of other nodes: every frame's session and number are checked before its content is read.

A session is one process of a node, known by a random number that the process draws when it starts. A bad message
costs its sender a strike; with the last strike the sender is excluded from the run.
"""

from __future__ import annotations

from collections.abc import Callable

from codistill.runtimes.network.frame_header import FrameHeader, FrameKind
from codistill.text import printable

_IGNORED = 1000  # frames that may be left over from sessions that have ended
_REASON = 300  # characters of why a message is bad: parts of it were written by the sender

Tell = Callable[[str], None]  # takes a sentence for the operator


class Sessions:
    """The open session of each node, the number of its newest frame, its strikes, and who is excluded."""

    def __init__(self, strikes: int, tell: Tell, bar: Callable[[str, str], None]) -> None:
        """`bar`: closes the links of a node that is excluded, and tells it why."""
        self._most, self._tell, self._bar = strikes, tell, bar
        self._open: dict[str, int] = {}
        self._numbers: dict[str, int] = {}  # of the newest frame of the open session
        self._strikes: dict[str, int] = {}
        self._ignored: dict[str, int] = {}  # frames of sessions that are not open
        self.excluded: dict[str, str] = {}  # nodes excluded from the run, and why

    def open(self, name: str, session_id: int, number: int) -> None:
        """Open a session of a node: from now on, frames of any other session of it are ignored."""
        self._open[name], self._numbers[name] = session_id, number

    def current(self, name: str) -> int | None:
        """The open session of a node; None if there is none."""
        return self._open.get(name)

    def close(self, name: str) -> None:
        """The session of a node has ended."""
        self._open.pop(name, None)

    def admit(self, sender: str, data: bytes) -> FrameHeader | None:
        """The header of a frame that may be read; None if the frame is to be ignored."""
        try:
            header = FrameHeader.decode(data)
        except ValueError as error:
            self.strike(sender, f"not a valid frame: {error}")
            return None
        if sender in self.excluded:
            return None  # sent before its links were closed
        is_open = self._open.get(sender) == header.session_id
        if is_open and header.number <= self._numbers[sender]:
            self.strike(sender, f"frame {header.number} received after frame {self._numbers[sender]}: a replay")
            return None
        if not is_open:
            # A hello opens a new session; any other frame is left over from a session that has ended.
            if header.kind is FrameKind.HELLO:
                return header
            self._ignored[sender] = self._ignored.get(sender, 0) + 1
            if self._ignored[sender] > _IGNORED:
                self._ignored[sender] = 0
                self.strike(sender, f"more than {_IGNORED} frames of a session that is not open")
            return None
        self._numbers[sender] = header.number
        return header

    def exclude(self, sender: str, reason: str) -> None:
        """Exclude a node from the rest of the run."""
        if sender not in self.excluded:
            self.excluded[sender] = reason
            self._tell(f"'{sender}' is excluded from the rest of the run: {reason}")
            self._bar(sender, f"it is excluded from the run: {reason}")

    def strike(self, sender: str, reason: str) -> None:
        """Count a bad message of a node that is not excluded already."""
        if sender in self.excluded:
            return
        count = self._strikes[sender] = self._strikes.get(sender, 0) + 1
        self._tell(f"'{sender}': strike {count} of {self._most}: {printable(reason, _REASON)}")
        if count >= self._most:
            self.exclude(sender, f"{count} bad messages")
