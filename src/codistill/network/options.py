"""[network]: how long nodes wait for one another and how many must take part; what one node may make another do."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from codistill.core.errors import RecipeError
from codistill.core.settings import Settings, check_settings, setting

if TYPE_CHECKING:
    from codistill.engine.description import RunDescription

WIRE_VERSION = 5  # of heads, hellos and commands: raised with every change that others would misread
RETURN = 10.0  # seconds that a node which was started again waits for others that may have left for good


@dataclass(frozen=True, kw_only=True)
class Network(Settings):
    """Settings of a federation between machines, besides its protocol."""

    quorum: float = setting(
        0.5, "share of a round's agents that must complete it; below, the round is retried", above=0, at_most=1
    )
    deadline: float | None = setting(
        None,
        "seconds that a round waits for one agent, all its messages together, before it continues without it; also an "
        "evaluation, and each round of a baseline; unset: drop only disconnected agents",
        above=0,
    )
    patience: float | None = setting(None, "seconds that the start waits for all agents; unset: no limit", above=0)
    grace: float = setting(
        10.0,
        "seconds that a round waits for an agent that was connected a moment ago; what an agent that comes and goes "
        "has used of them grows again by a tenth of the time of the rounds that it completes",
        at_least=0,
    )
    linger: float = setting(
        30.0,
        "seconds that a hub waits at the end for disconnected agents, to tell them that the run is over",
        at_least=0,
    )
    lease: float = setting(
        10.0,
        "seconds after which a link to a machine that does not answer (no power, no network) is closed",
        at_least=0.5,
        at_most=600,
    )
    silence: float = setting(
        300.0,
        "seconds that this process may be silent while its machine answers, as when a model holds Python's lock: then "
        "the other end closes the link; at least the lease",
        at_least=10,
        at_most=600,
    )
    message_limit: int | None = setting(
        None,
        "bytes of the largest message that is accepted; unset: what the protocol needs, 64 MiB where it sends models",
        at_least=1 << 16,
        at_most=1 << 30,
    )
    list_grace: float = setting(
        3600.0,
        "seconds for which nodes are still admitted when the revocation list here is outdated or damaged",
        at_least=0,
    )
    strikes: int = setting(3, "bad messages after which their sender is excluded from the run", at_least=1)

    def __post_init__(self) -> None:
        check_settings(self, "network")
        if self.silence < self.lease:
            raise RecipeError(
                "network.silence must be at least network.lease.",
                f"silence = {self.silence:g}, lease = {self.lease:g}",
                "Raise silence: a machine that does not answer is given up before a process that is silent.",
            )


# --- What each node may send, or be sent: join requests, commands, messages.

COMMANDS = (60.0, 2.0)  # unrequested: at once, and per second on average
_ANSWERS = 3.0  # answers that a command allows
# Join requests: an honest node repeats one every second; neighbours whose link comes and goes send three each time.
_JOINS, _JOINS_PER_SECOND = 60.0, 5.0
_SAVED = 1000.0  # answers that can be saved up
# Messages in a run without rounds: an honest sender sends at most a fifth of what the receiver allows, so that it is
# never refused, even if the receiver was busy and reads many of its messages at once.
MESSAGES_PER_SECOND = 500.0
OWN_MESSAGES = (100.0, 100.0)  # at once, and per second

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
        self._left = max(self._left, min(most, self._left + amount))


class Allowance:
    """What each node may send, or be sent: a bucket of its own."""

    def __init__(self, at_once: float, per_second: float, clock: Clock = time.monotonic) -> None:
        self._buckets: defaultdict[str, Bucket] = defaultdict(partial(Bucket, at_once, per_second, clock))

    def take(self, name: str, at: float | None = None) -> bool:
        return self._buckets[name].take(at)

    def grant(self, name: str) -> None:
        """Let a node send some more: a command was sent to it, which it may answer."""
        self._buckets[name].add(_ANSWERS, _SAVED)


def join_allowance(silence: float, clock: Clock = time.monotonic) -> Allowance:
    """Join requests that each node may send, in all its sessions together.

    `silence`: seconds for which this process may be stopped; afterwards it reads one request for each second at once.
    """
    return Allowance(max(_JOINS, silence), _JOINS_PER_SECOND, clock)


# --- The size of the largest message of a run: a node accepts no larger one.

UNKNOWN = 64 << 20  # for protocols whose messages are as large as the models
_LEAST = 1 << 20
_HEADERS = 1 << 16  # names, shapes and plain values of a message
_OF_AN_AGENT = 256  # bytes about one agent in a command: its name, a fault


def largest_message(description: RunDescription) -> int | None:
    """Bytes of the arrays of the largest message or answer of a run; None: it depends on the models."""
    public = 0 if description.public is None else len(description.public)
    arrays = description.protocol.message_bytes(description.classes, public)
    if arrays is None:
        return None
    # After the last round an agent sends the hub its mean outputs by class, and its predicted classes.
    view = 0 if description.test is None else 8 * description.classes**2 + len(description.test[1])
    return max(arrays, view)


def derived_limit(description: RunDescription) -> int:
    """Bytes of the largest message that a node of this run accepts, where `network.message_limit` is unset."""
    arrays = largest_message(description)
    if arrays is None:
        return UNKNOWN
    return max(_LEAST, arrays + arrays // 4 + _HEADERS + _OF_AN_AGENT * len(description.topology.names))
