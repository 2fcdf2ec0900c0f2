"""Who is asked to stop, and how long others are waited for after a start."""

from __future__ import annotations

RETURN = 10.0  # seconds that a node which was started again waits for others that may be gone for good


def always(done: int) -> bool:
    """Every round is stored."""
    return True


def never() -> bool:
    """Nobody asks to stop."""
    return False


class Stopped(Exception):
    """Somebody asked the hub to stop while it was waiting."""
