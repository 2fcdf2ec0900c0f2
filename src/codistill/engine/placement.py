"""Where agents are: on which device each computes, and in which file its state is while it is not at work."""

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
from typing import Any

from codistill.core.devices import AUTO, CPU, DeviceRequest, assign, check_device, resolved
from codistill.core.errors import RecipeError
from codistill.core.files import LOCK, lock, open_patiently, subfolder, writing
from codistill.engine.description import RunDescription
from codistill.engine.host import BEGIN
from codistill.engine.store import STATES, StoredState, content_of
from codistill.learners.torch import TorchLearner
from codistill.nodes.agent import Agent
from codistill.nodes.record import record_of
from codistill.wire.state import pack

# In units of its weights: the weights, their gradient, two moments of an optimiser, and a copy of weights and moments
# that the guard against divergence keeps; one more for what protocols keep, such as a model to be held to.
_COPIES = 8
_UNDER_SAFEGUARD = 3  # models of an agent


def place_agents(description: RunDescription, device: str, processes: int, sharing: int = 1) -> None:
    """Choose a device for each agent of a run in so many processes: its own, or else that of the run.

    Nothing is moved yet: that is done in the process in which an agent computes. `sharing`: processes with agents of
    their own that share a device.
    """
    models = 1 if description.safeguard is None else _UNDER_SAFEGUARD
    mine: list[tuple[Agent, TorchLearner]] = [
        (agent, agent.learner) for agent in description.agents if isinstance(agent.learner, TorchLearner)
    ]
    requests = [
        DeviceRequest(agent.name, learner.device or device, models * int(_COPIES * learner.memory()[0]))
        for agent, learner in mine
    ]
    chosen = assign(requests, processes, sharing=sharing)
    for (agent, _), place in zip(mine, chosen, strict=True):
        for each in record_of(agent).models:
            each.learner.assigned = place


def devices_of(agents: Sequence[Agent]) -> list[str]:
    of_torch = [agent.learner if isinstance(agent.learner, TorchLearner) else None for agent in agents]
    return [str(resolved((learner.assigned or learner.device) if learner else None)) for learner in of_torch]


def devices_by_name(agents: Sequence[Agent]) -> dict[str, str]:
    return {agent.name: device for agent, device in zip(agents, devices_of(agents), strict=True)}


def set_device(learner: Any, device: str | None, owner: str) -> None:
    """Give an agent's model the device that its owner has chosen; whether there is one is checked when it is used."""
    if device is None or (not isinstance(learner, TorchLearner) and device in (AUTO, CPU)):
        return
    if not isinstance(learner, TorchLearner):
        raise RecipeError(
            "device is for torch modules; other models compute on the CPU.",
            f"device = {device!r} for agent '{owner}', which has {learner.describe()}",
            "Remove it.",
        )
    learner.device = device


def set_default_device(learner: Any, device: Any) -> None:
    """Give a torch module of this machine that has no device of its own this one, if it is there."""
    if device is not None:
        check_device(device)
    if isinstance(learner, TorchLearner):
        learner.device = learner.device or device
        check_device(learner.device or CPU)


# --- States of agents that are not at work, as files: memory holds only the models of agents that compute.
#
# After an agent's round its state is written to a file of its own, and its memory is freed; before its next round, or
# to be evaluated, it is read again. A checkpoint names these files, so it holds nothing twice, and only agents that
# have worked since the last one are written. States are those of checkpoints, so the results are equal to the bit.

_PREFIX = "codistill-states-"  # of a folder among the system's temporary files
_held: set[Path] = set()  # such folders of this process, which may lock a folder twice


class IdleStates:
    """Keeps the states of some agents in files while these agents are not at work."""

    def __init__(self, folder: Path | None, names: Sequence[str]) -> None:
        self.close: Callable[[], object] = lambda: None  # removes a folder that is not a run's; states in it are lost
        if folder is None:
            self.folder, self.close = _temporary_folder(self)
        else:
            self.folder = folder / STATES
            subfolder(self.folder)
        self._numbers = {name: number for number, name in enumerate(names)}
        self.stored: dict[str, StoredState] = {}
        self._in_checkpoint: set[Path] = set()  # these are removed by the owner of the checkpoints
        self.unsaved: set[str] = set()  # agents whose states were written here since they were fetched

    def reload(self, agent: Agent) -> None:
        """Bring an agent's state back into memory, if it is in a file."""
        if record_of(agent).reload is not None:
            record_of(agent).resume(content_of(self.stored[agent.name]))

    def offload(self, agent: Agent, phase: int) -> None:
        """Write an agent's state as it is after a phase, and free its memory."""
        stored = self._write(agent.name, phase, pack(record_of(agent).dump()))
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
            record = record_of(agent)
            record.offload()
            record.reload = partial(self.reload, agent)

    def save(self, agents: Sequence[Agent]) -> dict[str, StoredState]:
        """The files of some agents, for a checkpoint: they stay until its owner removes them."""
        for agent in agents:
            if agent.name not in self.stored:  # it has not been at work yet
                self.offload(agent, BEGIN)
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
def in_memory(idle: IdleStates | None, agent: Agent) -> Iterator[Agent]:
    """An agent with its state in memory, to be looked at, wherever it is kept."""
    if idle is not None:
        idle.reload(agent)
    yield agent
    if idle is not None:
        idle.forget(agent)


def offload(agents: Sequence[Agent]) -> None:
    """Free the memory of agents that another process computes with."""
    for agent in agents:
        record_of(agent).offload()
    return_memory()


def return_memory() -> None:
    """Return what was freed to the system; where the C library cannot, it stays with this process."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
