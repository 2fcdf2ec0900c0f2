"""A federation in worker processes that runs its rounds on command."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import codistill as cd
from codistill.engine.host import BEGIN
from codistill.engine.runtime import Runtime
from codistill.runtimes.workers import Processes


@contextlib.contextmanager
def started(federation: cd.Federation) -> Iterator[tuple[Runtime, tuple[str, ...]]]:
    """A federation in worker processes, past its first phase."""
    runtime = Processes(federation.description)
    names = tuple(agent.name for agent in federation.agents)
    try:
        runtime.run(BEGIN, names)
        yield runtime, names
    finally:
        runtime.close()


class Rounds:
    """A callable that runs the next `count` rounds."""

    def __init__(self, runtime: Runtime, names: tuple[str, ...], count: int) -> None:
        self._runtime, self._names, self.count, self._next = runtime, names, count, 0

    def __call__(self) -> None:
        for t in range(self._next, self._next + self.count):
            self._runtime.run(t, self._names)
        self._next += self.count
