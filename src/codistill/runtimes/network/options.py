"""[network]: how long nodes wait for one another, and how many must be there."""

from __future__ import annotations

from dataclasses import dataclass

from codistill.settings import check_settings, setting

WIRE_VERSION = 2  # of heads, hellos and commands: raised with every change that others would misread
RETURN = 10.0  # seconds that a node which was started again waits for others that may have left for good


@dataclass(frozen=True, kw_only=True)
class Network:
    """What a federation between machines needs to know beside its protocol."""

    quorum: float = setting(
        0.5, "share of a round's agents that must end it; below, it is tried again", above=0, at_most=1
    )
    deadline: float | None = setting(
        None,
        "seconds without a message after which a round goes on without those it waits for; absent: only the dead",
        above=0,
    )
    patience: float | None = setting(
        None, "seconds that the start waits for everyone; absent: for as long as it takes", above=0
    )
    linger: float = setting(
        30.0, "seconds that a hub stays at the end for agents that are away, to tell them that it is over", at_least=0
    )
    lease: float = setting(
        10.0,
        "seconds of silence after which the other end gives up this node's link as dead",
        at_least=0.5,
        at_most=600,
    )
    message_limit: int = setting(
        1 << 30, "bytes of the largest message that is taken", at_least=1 << 16, at_most=1 << 30
    )
    strikes: int = setting(3, "bad messages after which their sender is out for the run", at_least=1)

    def __post_init__(self) -> None:
        check_settings(self, "network")
