"""States of agents that are not at work, as files: memory holds only the models of agents that compute.

After an agent's round its state is written to a file of its own, and its memory is freed; before its next round, or to
be evaluated, it is read again. A checkpoint names these files, so it holds nothing twice, and only agents that have
worked since the last one are written. States are those of checkpoints, so the results are equal to the bit.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from codistill.agent import Agent
from codistill.base_node import Node
from codistill.files import open_patiently, subfolder, writing
from codistill.runtimes.host import BEGIN
from codistill.runtimes.runtime import save_nodes
from codistill.runtimes.stored_state import STATES, Saved, StoredState, content_of
from codistill.wire.state import pack


class IdleStates:
    """Keeps the states of some agents in files while these agents are not at work."""

    def __init__(self, folder: Path | None, names: Sequence[str]) -> None:
        self.folder = _temporary_folder(self) if folder is None else folder / STATES
        subfolder(self.folder)
        self._numbers = {name: number for number, name in enumerate(names)}
        self.stored: dict[str, StoredState] = {}
        self._in_checkpoint: set[Path] = set()  # these are removed by the owner of the checkpoints

    def wake(self, agent: Agent) -> None:
        """Bring an agent's state back into memory, if it is in a file."""
        if agent.recall is not None:
            agent.resume(content_of(self.stored[agent.name]))

    def rest(self, agent: Agent, phase: int) -> None:
        """Write an agent's state as it is after a phase, and free its memory."""
        body = pack(agent.dump())
        path = self.folder / f"{self._numbers[agent.name]:06d}-{phase + 1:06d}.state"
        # Neither synced nor renamed: a file counts only when a checkpoint names it, which syncs it first.
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        with writing(path), open(open_patiently(path, flags), "wb", buffering=0) as file:
            file.write(hashlib.sha256(body).digest())
            file.write(body)
            size = file.tell()
        before = self.stored.get(agent.name)
        self.adopt(agent, StoredState(path, size))
        if before is not None and before.path != path and before.path not in self._in_checkpoint:
            before.path.unlink(missing_ok=True)

    def adopt(self, agent: Agent, stored: StoredState, *, in_checkpoint: bool = False) -> None:
        """Free an agent's memory: its state is in this file."""
        self.stored[agent.name] = stored
        if in_checkpoint:
            self._in_checkpoint.add(stored.path)
        self.forget(agent)

    def forget(self, agent: Agent) -> None:
        """Free the memory of an agent that has not changed since it was read."""
        if agent.name in self.stored:
            agent.set_aside()
            agent.recall = partial(self.wake, agent)

    @contextmanager
    def awake(self, agent: Agent) -> Iterator[Agent]:
        """An agent with its state in memory, to be looked at."""
        self.wake(agent)
        yield agent
        self.forget(agent)

    def save(self, agents: Sequence[Agent]) -> dict[str, StoredState]:
        """The files of some agents, for a checkpoint: they stay until its owner removes them."""
        for agent in agents:
            if agent.name not in self.stored:  # it has not been at work yet
                self.rest(agent, BEGIN)
        saved = {agent.name: self.stored[agent.name] for agent in agents}
        self._in_checkpoint |= {each.path for each in saved.values()}
        return saved


def _temporary_folder(owner: IdleStates) -> Path:
    """A folder that is removed with the last agent whose state is there, by the process that made it."""
    folder, process = tempfile.mkdtemp(prefix="codistill-"), os.getpid()

    def remove() -> None:
        if os.getpid() == process:
            shutil.rmtree(folder, ignore_errors=True)

    weakref.finalize(owner, remove)
    return Path(folder)


@contextmanager
def awake(idle: IdleStates | None, agent: Agent) -> Iterator[Agent]:
    """An agent with its state in memory, wherever it is kept."""
    if idle is None:
        yield agent
    else:
        with idle.awake(agent):
            yield agent


def save_with(idle: IdleStates | None, nodes: Sequence[Node]) -> dict[str, bytes | StoredState]:
    """Nodes by name: packed, or agents by their files."""
    if idle is None:
        return {**save_nodes(nodes)}
    agents = [node for node in nodes if isinstance(node, Agent)]
    return {**save_nodes([node for node in nodes if not isinstance(node, Agent)]), **idle.save(agents)}


def load_with(idle: IdleStates | None, nodes: Sequence[Node], saved: Saved) -> None:
    """Return nodes to what was saved, by name."""
    for node in nodes:
        state = saved[node.name]
        if idle is not None and isinstance(node, Agent) and isinstance(state, StoredState):
            idle.adopt(node, state, in_checkpoint=True)
        else:
            node.resume(content_of(state))


def return_memory() -> None:
    """Return what was freed to the system; where the C library cannot, it stays with this process."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
