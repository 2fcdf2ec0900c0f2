"""What a hub remembers of agents that it waits for, or has gone on without."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

_LONGEST = 10  # an agent is left out of at most 2^10 rounds at a time
_REFILL = 0.1  # part of the time of a completed round by which an agent's allowance grows again


@dataclass
class AgentStatus:
    """What the hub knows of an agent of the roster."""

    ready: bool = False  # it has joined: it knows the terms and has restored a state that counts
    unanswered: int | None = None  # the number of the command that it has not answered yet
    answered: int = 0  # the number of the last command that it has answered
    samples: int = 0
    trained: int = 0  # rounds that it has trained alone, as far as it has said
    progressed: float = 0.0  # when it last said so
    joining: float = 0.0  # seconds that it has been connected without being ready

    def progress(self, rounds: object, most: int) -> bool:
        """Note how many rounds it has trained alone; False unless it is more than before, and at most all of them."""
        if not isinstance(rounds, int) or isinstance(rounds, bool) or not self.trained < rounds <= most:
            return False
        self.trained, self.progressed = rounds, time.monotonic()
        return True


class Grace:
    """How long a round waits for agents that were connected a moment ago.

    An agent that comes and goes must not delay every round: waiting for it uses up its allowance of `seconds`, which
    grows again by a tenth of the time of each round that it completes.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._left: dict[str, float] = {}  # when each disconnected
        self._allowance: dict[str, float] = {}  # where it is not all of `seconds`

    def disconnected(self, name: str) -> None:
        """An agent that was ready is no longer there."""
        self._left[name] = time.monotonic()

    def returned(self, name: str) -> None:
        """An agent is ready, or has said that it leaves."""
        self._left.pop(name, None)

    def covers(self, name: str) -> bool:
        """Whether a round still waits for an agent."""
        left = self._left.get(name)
        in_time = left is not None and time.monotonic() - left < self._seconds
        return in_time and self._allowance.get(name, self._seconds) > 0

    def waited(self, names: Sequence[str], seconds: float) -> None:
        """A round has waited for these agents."""
        for name in names:
            self._allowance[name] = self._allowance.get(name, self._seconds) - seconds

    def completed(self, names: Sequence[str], seconds: float) -> None:
        """A round that took so long was completed by these agents."""
        for name in names:
            if name in self._allowance:
                self._allowance[name] = min(self._seconds, self._allowance[name] + _REFILL * seconds)


class Unreliable:
    """Agents that take part in rounds and do not complete them: each such round costs the others a deadline.

    After k of them in a row an agent is left out of the next 2^(k-1) - 1 rounds: of none after the first.
    """

    def __init__(self) -> None:
        self._failed: dict[str, int] = {}  # rounds in a row
        self._until: dict[str, int] = {}  # the first round in which it takes part again

    def ended(self, number: int, asked: Sequence[str], done: Sequence[str]) -> dict[str, int]:
        """A round has ended; returns who is left out of the next rounds, and of how many."""
        left_out = {}
        for name in asked:
            self._failed[name] = 0 if name in done else self._failed.get(name, 0) + 1
            rounds = 2 ** min(self._failed[name] - 1, _LONGEST) - 1 if self._failed[name] else 0
            self._until[name] = number + 1 + rounds
            if rounds:
                left_out[name] = rounds
        return left_out

    def among(self, names: Sequence[str], number: int) -> list[str]:
        """Those that are left out of a round."""
        return [name for name in names if self._until.get(name, 0) > number]


class MissedRounds:
    """The rounds that each agent has missed since it last took part: how many, the first and the last."""

    def __init__(self) -> None:
        self._missed: dict[str, tuple[int, int, int]] = {}

    def add(self, name: str, number: int) -> None:
        """An agent has missed a round."""
        count, first, _ = self._missed.get(name, (0, number, number))
        self._missed[name] = count + 1, first, number

    def take(self, name: str) -> tuple[int, int, int] | None:
        """What an agent that is back has missed; it is told once."""
        return self._missed.pop(name, None)


def missed_text(count: int, first: int, last: int) -> str:
    """'missed 55 rounds: 6 to 60'."""
    if count == 1:
        return f"missed round {first}"
    joint = f": {first} to {last}" if last - first + 1 == count else f" from {first} to {last}"
    return f"missed {count} rounds{joint}"
