"""What Linux is told of workers: where and how they wake up.

Otherwise it may put two of them on one core, beside an idle one; and where the hub answers all workers from a core of
one of them, that one would wake up first, and the hub could go on answering only when it is moved to another core.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext, suppress

_ASKABLE = hasattr(os, "sched_setaffinity")


def own_core(worker: int, workers: int) -> AbstractContextManager[None]:
    """Entered while worker 1, 2, ... waits: it wakes up on a core of its own, where there is one for each worker.

    While it computes, any core may be its: where another program takes one, the scheduler makes room as usual.
    """
    if not _ASKABLE:
        return nullcontext()
    cores = sorted(os.sched_getaffinity(0))
    return _Waiting(cores, cores[worker - 1]) if len(cores) == workers else nullcontext()


def compute_in_the_background() -> None:
    """This process computes for long: when it wakes up, it waits until the process that has woken it waits itself."""
    if _ASKABLE:
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


class _Waiting(AbstractContextManager[None]):
    def __init__(self, cores: list[int], own: int) -> None:
        self._cores, self._own = cores, {own}

    def __enter__(self) -> None:
        self._run_on(self._own)

    def __exit__(self, *_: object) -> None:
        self._run_on(self._cores)

    def _run_on(self, cores: Iterable[int]) -> None:
        with suppress(OSError):  # of a core that was taken from this process meanwhile
            os.sched_setaffinity(0, cores)
