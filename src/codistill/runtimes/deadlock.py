"""A deadlock: every node waits for another one."""

from __future__ import annotations

from codistill.errors import RuntimeFault


def deadlock(waits: dict[str, list[str]]) -> RuntimeFault:
    """The error for a round in which every node waits."""
    shown = "; ".join(f"'{name}' waits for {', '.join(senders)}" for name, senders in list(waits.items())[:5])
    return RuntimeFault(
        "Deadlock: every node is waiting.",
        shown,
        "Check the protocol: each receive needs a send by the other side.",
    )
