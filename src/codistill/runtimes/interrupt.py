"""Ctrl-C, gently: once, and the run stops at the end of the round; twice, and it stops at once."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType
from typing import Any


class GentleInterrupt:
    """While active, the first SIGINT or SIGTERM only asks; a second one raises KeyboardInterrupt."""

    def __init__(self, *, quiet: bool = False, signals: Sequence[int] = (signal.SIGINT, signal.SIGTERM)) -> None:
        self.asked = False
        self._quiet, self._signals = quiet, signals
        self._before: dict[int, Any] = {}

    def __enter__(self) -> GentleInterrupt:
        if threading.current_thread() is threading.main_thread():
            for number in self._signals:
                self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        if self._quiet:
            return
        # The signal may come in the middle of a write to the same stream, which then cannot be written to.
        with suppress(RuntimeError, OSError, ValueError):
            print("\nStopping at the end of this round (again: at once) ...", file=sys.stderr, flush=True)
