"""How much memory a run will take, told before it starts: by the sizes of models, optimisers, agents and rounds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from codistill.federation.runtime_options import RuntimeOptions
from codistill.runtimes.description import RunDescription
from codistill.text import bytes_text

MANY = 100  # agents from which on the memory of a run is told
_ROW = 1000  # bytes of a row of the metrics in memory
_AT_WORK = 4  # weights beside a model's own that an agent at work has: gradients, two messages, the round's start
_CHECKPOINT = 3  # copies of all states while a checkpoint of states in memory is written


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes of memory: what this process holds, what a run adds at its peak, and what there is; None: unknown."""

    held: int | None
    added: int
    available: int | None

    def sentence(self, idle: str) -> str:
        """What is expected and, where that is too much, what to do."""
        held = "" if self.held is None else f"this process holds {bytes_text(self.held)}, and "
        text = f"memory: {held}the run adds about {bytes_text(self.added)} at its peak"
        if self.available is None:
            return text
        text += f"; {bytes_text(self.available)} are available"
        if self.added <= self.available:
            return text
        disk = 'keep agents that are not at work on disk (runtime.idle = "disk", in Python idle="disk"), ' * (
            idle == "memory"
        )
        return f"{text}. That is too much: {disk}let fewer agents take part in a round, or use fewer or smaller models"


def memory_need(description: RunDescription, options: RuntimeOptions, *, saves: bool) -> MemoryNeed:
    """What a run with all agents at hand will need; `saves`: whether it writes checkpoints."""
    plan, agents = description.plan, description.agents
    sizes = [agent.learner.memory() for agent in agents]
    copies = 3 if description.safeguard is not None else 1  # of a model: two more that learn alone
    weights = copies * sum(size for size, _ in sizes)
    moments = copies * sum(size for _, size in sizes)
    share = description.faults.participation
    added = int(share * (_AT_WORK * weights + 2 * moments)) + _ROW * len(agents) * plan.rounds
    if options.idle == "memory":
        worked = min(1.0, share * plan.rounds)  # the share of agents that have worked by the end, at most
        states = weights + int(worked * moments)
        # Models of agents that work are no longer shared with the processes that were forked.
        added += int(worked * moments) + (states if options.kind == "processes" else 0)
        added += _CHECKPOINT * states if saves and plan.checkpoint_every else 0
    if plan.baseline and description.baseline_protocol is not None:
        added += weights + (moments if options.idle == "memory" else 0)  # copies of all agents, trained alone
    return MemoryNeed(_held(), added, _available())


def _held() -> int | None:
    """Bytes of this process in memory, where the system tells."""
    found = _kilobytes(Path("/proc/self/status"), "VmRSS:")
    return None if found is None else 1024 * found


def _available() -> int | None:
    """Bytes that processes may still take, where the system tells: of the machine, or of its container."""
    free = _kilobytes(Path("/proc/meminfo"), "MemAvailable:")
    try:
        limit, used = (int(Path(f"/sys/fs/cgroup/memory.{name}").read_text()) for name in ("max", "current"))
    except (OSError, ValueError):  # no container, or one without a limit
        return None if free is None else 1024 * free
    return limit - used if free is None else min(1024 * free, limit - used)


def _kilobytes(path: Path, key: str) -> int | None:
    try:
        lines = path.read_text().splitlines()
        return next((int(line.split()[1]) for line in lines if line.startswith(key)), None)
    except (OSError, ValueError):
        return None
