"""[network]: how long nodes wait for one another, and how many must take part."""

from __future__ import annotations

from dataclasses import dataclass

from codistill.errors import RecipeError
from codistill.settings import Settings, check_settings, setting

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
