"""The privacy guard: fails a run in which a row of a private shard is in a message."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from codistill.agent import Agent
from codistill.errors import MessageError, RuntimeFault
from codistill.message import Message


class PrivacyGuard:
    """Watches every message of every agent for the agent's own samples, as they are or converted.

    A row counts as found when its numbers stand in sequence in any array of the message, at any offset.
    """

    def __init__(self, agents: Sequence[Agent]) -> None:
        self._rows = {agent.name: agent.shard.x.reshape(len(agent.shard), -1).astype(np.float32) for agent in agents}

    def __call__(self, sender: str, receiver: str, data: bytes) -> None:
        """Look through one message."""
        rows = self._rows.get(sender)
        if rows is None:
            return
        try:
            arrays = Message.decode(data).arrays
        except MessageError:
            return  # the receiver will refuse it
        for name, array in arrays.items():
            found = _first_row_inside(rows, array)
            if found is not None:
                raise RuntimeFault(
                    "Data stays home: no message may hold a private sample.",
                    f"sample {found} of agent '{sender}' is in the array '{name}' sent to '{receiver}'",
                    "Change the protocol, or the model that carries its training data inside.",
                )


def _first_row_inside(rows: np.ndarray, array: np.ndarray) -> int | None:
    flat = array.ravel().astype(np.float32, copy=False)
    width = rows.shape[1]
    if len(flat) < width:
        return None
    windows = np.lib.stride_tricks.sliding_window_view(flat, width)
    # Compare the least common entry of each row first: images are mostly background.
    for index, row in enumerate(rows):
        if not row.any():
            continue  # an empty image is in every array of zeros
        anchor = int(np.argmax(np.abs(row)))
        starts = np.flatnonzero(flat[anchor : anchor + len(windows)] == row[anchor])
        if any(np.array_equal(windows[start], row) for start in starts):
            return index
    return None
