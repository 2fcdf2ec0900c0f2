"""How much another node may make this one do: join requests, commands beyond what was asked for, lines of the log."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

_BURST, _PER_SECOND = 60.0, 2.0  # unasked commands: at once, and per second on average
_ANSWERS = 3.0  # commands that one sent command entitles the other side to
# Join requests: an honest node repeats one every second; neighbours whose link comes and goes send three each time.
_JOINS, _JOINS_PER_SECOND = 60.0, 5.0
_SAVED = 1000.0  # that can be saved up
_LINES, _LINES_PER_SECOND = 10.0, 0.1  # lines of one cause
# Messages in a run without rounds: an honest sender keeps to a fifth of what the receiver allows, so that it is never
# refused, also if the receiver was busy and has many of its messages to read at once.
_MESSAGES_PER_SECOND = 500.0
_OWN_MESSAGES, _OWN_PER_SECOND = 100.0, 100.0
_CAUSES = 500  # that are told apart
_ALL_LINES, _ALL_PER_SECOND = 300.0, 20.0  # lines of all causes together
_CALLER_EVERY = 600.0  # seconds between two lines about the same caller
_CALLER_LINES, _CALLER_LINES_PER_SECOND = 20.0, 1 / 30  # lines about all callers

Clock = Callable[[], float]


class Bucket:
    """An allowance that is used up, and grows again with time."""

    def __init__(self, size: float, per_second: float, clock: Clock = time.monotonic) -> None:
        self._size, self._per_second, self._clock = size, per_second, clock
        self._left = size
        self._at: float | None = None  # of the last one

    def take(self, at: float | None = None) -> bool:
        """Whether one more is allowed; `at`: when it came, if that is not now."""
        now = self._clock() if at is None else at
        before = now if self._at is None else self._at
        now = max(now, before)
        self._left = max(self._left, min(self._size, self._left + (now - before) * self._per_second))
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True

    def add(self, amount: float, most: float) -> None:
        """Allow so many more, up to a bound."""
        self._left = max(self._left, min(most, self._left + amount))


class CommandAllowance:
    """What each sender may send besides the messages of the protocol: a few answers for each command it was sent."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._buckets: dict[str, Bucket] = {}

    def take(self, sender: str, at: float | None = None) -> bool:
        """Whether a sender may send one more command or answer, which came at this time."""
        return self._bucket(sender).take(at)

    def grant(self, receiver: str) -> None:
        """A command was sent there, which may be answered."""
        self._bucket(receiver).add(_ANSWERS, _SAVED)

    def _bucket(self, name: str) -> Bucket:
        return self._buckets.setdefault(name, Bucket(_BURST, _PER_SECOND, self._clock))


class JoinAllowance:
    """How many join requests each node may send, in all its sessions: no answer to one entitles to another."""

    def __init__(self, silence: float, clock: Clock = time.monotonic) -> None:
        """`silence`: seconds for which this process may be stopped; then requests of all of them, one in each, are read
        at once."""
        self._size, self._clock = max(_JOINS, silence), clock
        self._buckets: dict[str, Bucket] = {}

    def take(self, sender: str, at: float | None = None) -> bool:
        """Whether a node may send one more join request, which came at this time."""
        bucket = self._buckets.setdefault(sender, Bucket(self._size, _JOINS_PER_SECOND, self._clock))
        return bucket.take(at)


class MessageAllowance:
    """How many messages each sender may send in a run without rounds, where no round bounds their number."""

    def __init__(self, at_once: int, clock: Clock = time.monotonic) -> None:
        """`at_once`: messages of one sender that may have come while this node had no time to read them."""
        self._at_once, self._clock = at_once, clock
        self._buckets: dict[str, Bucket] = {}

    def take(self, sender: str) -> bool:
        """Whether a sender may send one more message."""
        return self._bucket(sender, self._at_once, _MESSAGES_PER_SECOND).take()

    def take_own(self, receiver: str) -> bool:
        """Whether this node may send one more message to a receiver now; if not, it waits a little."""
        return self._bucket(f"to {receiver}", _OWN_MESSAGES, _OWN_PER_SECOND).take()

    def _bucket(self, name: str, size: float, per_second: float) -> Bucket:
        return self._buckets.setdefault(name, Bucket(size, per_second, self._clock))


class LineLimit:
    """Passes lines on; of those with the same cause only some, with the number of those left out."""

    def __init__(self, tell: Callable[[str], None], clock: Clock = time.monotonic) -> None:
        self._tell, self._clock = tell, clock
        self._causes: dict[str, tuple[Bucket, int]] = {}  # and how many lines were left out since the last one
        self._all = Bucket(_ALL_LINES, _ALL_PER_SECOND, clock)

    def __call__(self, text: str) -> None:
        """Tell a line, unless there were too many of its cause."""
        cause = re.sub(r"\d+", "#", text)[:120]  # lines that differ in numbers have one cause
        new = Bucket(_LINES, _LINES_PER_SECOND, self._clock), 0
        bucket, left_out = self._causes.pop(cause, new)
        if len(self._causes) >= _CAUSES:
            self._causes.pop(next(iter(self._causes)))  # the one that has been silent for longest
        if bucket.take() and self._all.take():
            self._tell(f"{text} (and {left_out} more of this kind before)" if left_out else text)
            left_out = 0
        else:
            left_out += 1
        self._causes[cause] = bucket, left_out


class CallerLog:
    """Tells which callers are refused and why: each one now and then, few lines in all, none of them uncounted."""

    def __init__(self, tell: Callable[[str], None], clock: Clock = time.monotonic) -> None:
        self._tell, self._clock = tell, clock
        self._callers: dict[tuple[str, str], tuple[float, int]] = {}  # when it was told, and how many were not since
        self._lines = Bucket(_CALLER_LINES, _CALLER_LINES_PER_SECOND, clock)

    def __call__(self, who: str, why: str) -> None:
        """A connection of this caller was refused."""
        now = self._clock()
        told, left_out = self._callers.pop((who, why), (-_CALLER_EVERY, 0))
        if len(self._callers) >= _CAUSES:
            self._callers.pop(next(iter(self._callers)))  # the one that has been silent for longest
        if now - told >= _CALLER_EVERY and self._lines.take():
            self._tell(f"refused {who}: {why}" + (f" (and {left_out} more times before)" if left_out else ""))
            told, left_out = now, 0
        else:
            left_out += 1
        self._callers[who, why] = told, left_out
