"""A deadlock: every node waits for another one."""

from __future__ import annotations

from typing import Any

from codistill.errors import RuntimeFault


class DeadlockDetection:
    """Over several hosts: twice in a row every host reports that it waits, and no frame is in transit."""

    def __init__(self) -> None:
        self._blocked: dict[int, dict[str, Any]] = {}  # what hosts reported since the last check
        self._last_check: dict[int, dict[str, Any]] = {}

    def add(self, host: int, content: dict[str, Any]) -> None:
        """The report of a host: who waits for whom there, and how many frames it has sent and received."""
        self._blocked[host] = content

    def check(self, *, hosts: int) -> None:
        """Raise if no host of the run can continue; `hosts`: how many there are."""
        if len(self._blocked) < hosts:
            return  # a host has not reported since the last check, so it may be computing
        before, self._last_check, self._blocked = self._last_check, self._blocked, {}
        said = self._last_check.values()
        idle = sum(host["sent"] for host in said) == sum(host["received"] for host in said)
        if idle and before == self._last_check and any(host["blocked"] for host in said):
            raise deadlock({name: list(who) for host in said for name, who in host["blocked"].items()})


def deadlock(waits: dict[str, list[str]]) -> RuntimeFault:
    """The error for a round in which every node waits."""
    shown = "; ".join(f"'{name}' waits for {', '.join(senders)}" for name, senders in list(waits.items())[:5])
    return RuntimeFault(
        "Deadlock: every node is waiting.",
        shown,
        "Check the protocol: each receive needs a send by the other side.",
    )
