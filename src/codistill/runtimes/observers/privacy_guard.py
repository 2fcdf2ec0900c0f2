"""The privacy guard: fails a run in which a message holds what must stay at home."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from codistill.agent import Agent
from codistill.errors import MessageError, RuntimeFault
from codistill.hub import Hub
from codistill.learners.ability import Ability
from codistill.message import Message
from codistill.topology import HUB

_RUN, _RUN_OF_TWO = 16, 32  # labels in a row that are no coincidence, of several classes and of two
_FEWEST = 8  # numbers in a row that are a part of a model, and no coincidence


class PrivacyGuard:
    """Watches every message of every agent for the agent's own samples, as they are or converted, and labels.

    A row counts as found when its numbers stand in sequence in any array of the message, at any offset. Labels
    count in the order of the shard, as numbers or one-hot, from 31 in a row on (63, if of two classes). With
    `models`, the weights that an agent has at that moment must stay at home as well, and so must what the hub keeps
    for itself: for protocols in which neither models nor weights travel. Weights are seen where the agents live:
    in a simulation.
    It looks at what is meant, before compression: a sample that arrives a little changed has not stayed at home.
    """

    before_compression = True

    def __init__(self, agents: Sequence[Agent], hub: Hub | None = None, *, models: bool = False) -> None:
        self._agents = {agent.name: agent for agent in agents}
        self._hub, self._models = hub, models
        self._private = {agent.name: _private(agent) for agent in agents}

    def __call__(self, sender: str, receiver: str, data: bytes) -> None:
        """Look through one message."""
        try:
            message = Message.decode(data)
        except MessageError:
            return  # the receiver will refuse it
        secrets = [*self._private.get(sender, ()), *(self._secrets(sender) if self._models else ())]
        for name, array in _numbers(message):
            for what, rows in secrets:
                found = _first_row_inside(rows, array)
                if found is not None:
                    raise RuntimeFault(
                        "Data stays home: no message may hold a private sample, label or weight.",
                        f"{what} {found} of {_owner(sender)} is in the array '{name}' sent to '{receiver}'",
                        "Change the protocol, or the model that carries its training data inside.",
                    )

    def _secrets(self, sender: str) -> Iterator[tuple[str, np.ndarray]]:
        """What the sender has learnt, as it is now."""
        if sender == HUB:
            arrays: Iterable[np.ndarray] = _leaves(self._hub.state) if self._hub else ()
        else:
            learner = self._agents[sender].learner
            arrays = learner.weights().values() if Ability.GRADIENTS in learner.abilities else ()
        for array in arrays:
            if array.size >= _FEWEST and len(np.unique(array)) > 2:
                yield "learnt array", array.reshape(1, -1).astype(np.float32)


def _owner(sender: str) -> str:
    return "the hub" if sender == HUB else f"agent '{sender}'"


def _private(agent: Agent) -> list[tuple[str, np.ndarray]]:
    """Samples, and labels as runs of sixteen, in numbers and one-hot."""
    shard = agent.shard
    private = [("sample", shard.x.reshape(len(shard), -1).astype(np.float32))]
    if shard.labels is not None:
        several = len(np.unique(shard.labels)) > 2
        length = _RUN if several else _RUN_OF_TWO
        # Of any 2 length - 1 labels in a row, one of these runs is whole.
        runs = [slice(start, start + length) for start in range(0, len(shard) - length + 1, length)]
        runs = [run for run in runs if len(np.unique(shard.labels[run])) > (2 if several else 1)]
        if runs:
            private.append(("run of labels", np.stack([shard.labels[run] for run in runs]).astype(np.float32)))
            private.append(("run of labels", np.stack([shard.targets[run].ravel() for run in runs])))
    return private


def _numbers(message: Message) -> Iterator[tuple[str, np.ndarray]]:
    """All arrays of a message, and its lists of numbers."""
    yield from message.arrays.items()
    for name, value in message.plain.items():
        if isinstance(value, list) and value and all(isinstance(item, int | float) for item in value):
            yield name, np.asarray(value)


def _leaves(tree: Any) -> Iterator[np.ndarray]:
    """All arrays in nested tables and lists."""
    if isinstance(tree, torch.Tensor):
        yield tree.detach().cpu().numpy()
    elif isinstance(tree, np.ndarray):
        yield tree
    elif isinstance(tree, dict | list | tuple):
        for item in tree.values() if isinstance(tree, dict) else tree:
            yield from _leaves(item)


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
