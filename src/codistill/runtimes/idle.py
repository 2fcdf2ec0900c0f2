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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from codistill.agent import Agent
from codistill.base_node import Node
from codistill.files import LOCK, lock, open_patiently, subfolder, writing
from codistill.runtimes.host import BEGIN
from codistill.runtimes.runtime import save_nodes
from codistill.runtimes.stored_state import STATES, Saved, StoredState, content_of
from codistill.wire.state import pack

_PREFIX = "codistill-states-"  # of a folder among the system's temporary files
_held: set[Path] = set()  # such folders of this process, which may lock a folder twice


class IdleStates:
    """Keeps the states of some agents in files while these agents are not at work."""

    def __init__(self, folder: Path | None, names: Sequence[str]) -> None:
        self._remove: Callable[[], object] = lambda: None
        if folder is None:
            self.folder, self._remove = _temporary_folder(self)
        else:
            self.folder = folder / STATES
            subfolder(self.folder)
        self._numbers = {name: number for number, name in enumerate(names)}
        self.stored: dict[str, StoredState] = {}
        self._in_checkpoint: set[Path] = set()  # these are removed by the owner of the checkpoints
        self.unsaved: set[str] = set()  # agents whose states were written here since they were fetched

    def close(self) -> None:
        """Remove a folder that is not that of a run; states in it are lost."""
        self._remove()

    def wake(self, agent: Agent) -> None:
        """Bring an agent's state back into memory, if it is in a file."""
        if agent.recall is not None:
            agent.resume(content_of(self.stored[agent.name]))

    def rest(self, agent: Agent, phase: int) -> None:
        """Write an agent's state as it is after a phase, and free its memory."""
        stored = self._write(agent.name, phase, pack(agent.dump()))
        self.unsaved.add(agent.name)
        before = self.stored.get(agent.name)
        self.adopt(agent, stored)
        if before is not None and before.path != stored.path and before.path not in self._in_checkpoint:
            before.path.unlink(missing_ok=True)

    def take(self, agent: Agent, body: bytes) -> None:
        """Write a state that an agent is to return to, and free its memory."""
        self.adopt(agent, self._write(agent.name, BEGIN, body))
        self.unsaved.discard(agent.name)

    def keep(self, name: str, phase: int, body: bytes) -> None:
        """Write the state that an agent of another machine had after a phase."""
        self.stored[name] = self._write(name, phase, body)

    def _write(self, name: str, phase: int, body: bytes) -> StoredState:
        path = self.folder / f"{self._numbers[name]:06d}-{phase + 1:06d}.state"
        # Neither synced nor renamed: a file counts only when a checkpoint names it, which syncs it first.
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        with writing(path), open(open_patiently(path, flags), "wb", buffering=0) as file:
            file.write(hashlib.sha256(body).digest())
            file.write(body)
            return StoredState(path, file.tell())

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


def _temporary_folder(owner: IdleStates) -> tuple[Path, Callable[[], object]]:
    """A folder that is removed with the last agent whose state is there, by the process that made it; or earlier."""
    folder, process = Path(tempfile.mkdtemp(prefix=_PREFIX)), os.getpid()
    held = lock(folder)
    _held.add(folder)

    def remove() -> None:
        _held.discard(folder)
        held.close()
        if os.getpid() == process:
            shutil.rmtree(folder, ignore_errors=True)

    return folder, weakref.finalize(owner, remove)


def remove_left_behind() -> None:
    """Remove the folders of processes that were killed: those that nobody has locked any more."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if folder not in _held and folder.stat().st_uid == os.getuid() and (folder / LOCK).exists():
                lock(folder).close()  # a BlockingIOError if its process is alive
                shutil.rmtree(folder, ignore_errors=True)


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


def set_aside(agents: Sequence[Agent]) -> None:
    """Free the memory of agents that another process computes with."""
    for agent in agents:
        agent.set_aside()
    return_memory()


def return_memory() -> None:
    """Return what was freed to the system; where the C library cannot, it stays with this process."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
