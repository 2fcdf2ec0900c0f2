"""What hosts exchange, and what a host needs for it: frames, and whoever carries them to nodes of other hosts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol


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
        ...


class Carrier(Protocol):
    """What a host needs to exchange frames with nodes of other hosts."""

    def post(self, phase: int, sender: str, receivers: Sequence[str], data: bytes | None) -> None:
        """Send a message to nodes of other hosts; None stands for a lost message."""
        ...

    def post_end(self, phase: int, sender: str, listeners: Iterable[str]) -> None:
        """Tell the nodes that may wait for a node that it will send no more in this phase."""
        ...

    def flush(self) -> None:
        """Send now what is still queued; `wait` does so, too."""
        ...

    def wait(self, host: Waiting) -> list[Frame]:
        """Frames that have arrived; waits for the next if there is none."""
        ...

    def arrived(self) -> list[Frame]:
        """Frames that have arrived, without waiting."""
        ...
