"""Processes that end at once with the process that has forked them: nothing is left that holds its folder or ports."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass

_PDEATHSIG = 1  # PR_SET_PDEATHSIG of Linux
_LOOK = 0.2  # seconds between two looks, where the system does not tell


@dataclass(frozen=True)
class Parent:
    """The process that is about to fork another one; made before it does."""

    pid: int
    by_main_thread: bool

    @classmethod
    def here(cls) -> Parent:
        """This process and thread."""
        return cls(os.getpid(), threading.current_thread() is threading.main_thread())

    def end_with(self) -> None:
        """In the forked process: end when the parent ends, however it does."""
        # Linux sends the signal when the *thread* that has forked ends; only the main one lives as long as its process.
        if not (self.by_main_thread and _ask_kernel()):
            threading.Thread(target=self._watch, name="parent", daemon=True).start()
        if os.getppid() != self.pid:  # it has ended before the kernel was asked
            os._exit(1)

    def _watch(self) -> None:
        while os.getppid() == self.pid:
            time.sleep(_LOOK)
        os._exit(1)


def _ask_kernel() -> bool:
    """Whether the kernel will kill this process when its parent ends."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        return int(ctypes.CDLL(None).prctl(_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)) == 0
    except (OSError, AttributeError):
        return False
