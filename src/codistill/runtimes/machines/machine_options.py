"""[machines]: where the machines of a run meet, and how long they wait for one another."""

from __future__ import annotations

from dataclasses import dataclass

from codistill.settings import Settings, check_settings, setting


@dataclass(frozen=True, kw_only=True)
class Machines(Settings):
    """Settings of the runtime 'machines'."""

    port: int | None = setting(
        None,
        "where rank 0 listens; unset: the first free one of the eight ports after MASTER_PORT",
        at_least=1,
        at_most=65535,
    )
    patience: float = setting(300.0, "seconds that the start waits for all machines", above=0)
    lease: float = setting(
        60.0, "seconds without a sign of life after which a machine counts as dead", at_least=1, at_most=86400
    )

    def __post_init__(self) -> None:
        check_settings(self, "machines")
