"""How large a message of a run can be, from what the run is; so that a node accepts no more than that."""

from __future__ import annotations

from codistill.runtimes.description import RunDescription

UNKNOWN = 64 << 20  # for protocols whose messages are as large as the models
_LEAST = 1 << 20
_HEADERS = 1 << 16  # names, shapes and plain values of a message
_OF_AN_AGENT = 256  # bytes about one agent in a command: its name, a fault


def largest_message(description: RunDescription) -> int | None:
    """Bytes of the arrays of the largest message or answer of a run; None: that depends on the models."""
    public = 0 if description.public is None else len(description.public)
    arrays = description.protocol.message_bytes(description.classes, public)
    if arrays is None:
        return None
    # After the last round the hub is told an agent's mean outputs by class, and its predicted classes.
    view = 0 if description.test is None else 8 * description.classes**2 + len(description.test[1])
    return max(arrays, view)


def derived_limit(description: RunDescription) -> int:
    """Bytes of the largest message that a node of this run accepts, where `network.message_limit` is unset."""
    arrays = largest_message(description)
    if arrays is None:
        return UNKNOWN
    return max(_LEAST, arrays + arrays // 4 + _HEADERS + _OF_AN_AGENT * len(description.topology.names))
