"""Effects: what a verb yields to whoever drives its coroutine, which resumes it with the answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from codistill.message import Expectation, Message


@dataclass(frozen=True, slots=True)
class Send:
    """Deliver each message to its receiver; the same object to many is encoded once."""

    messages: Mapping[str, Message]
    asks: bool = False  # the sender waits for an answer at once: what it receives next


@dataclass(frozen=True, slots=True)
class Receive:
    """Wait for the next message of each sender; those who will send none this round are left out."""

    senders: tuple[str, ...]
    expect: Expectation = field(default_factory=dict)


Effect = Send | Receive
