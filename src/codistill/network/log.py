"""What the operator of a node sees: log lines as text or JSON, within limits, and the file `health.json`."""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from codistill.core.errors import StorageError
from codistill.core.files import write_atomically
from codistill.core.text import printable
from codistill.network.options import Bucket, Clock
from codistill.results.records import RoundEnded, RunFinished, RunStarted
from codistill.results.scores import PREFIXES

HEALTH = "health.json"
_EVERY = 10.0  # seconds between two writes of health.json
_WORDS = 1000  # characters of an event
_PROGRESS_EVERY = 5.0  # seconds between two lines of an agent's progress


class EventLog:
    """Writes events to standard error, one line of text or one JSON object each, and keeps `health.json` up to date."""

    def __init__(self, node: str, *, form: str = "text", health: Path | None = None, quiet: bool = False) -> None:
        self._node, self._form, self._health, self._quiet = node, form, health, quiet
        self._state: dict[str, Any] = {"node": node, "status": "starting", "pid": os.getpid(), "round": 0}
        self.is_of_hub = False  # a hub reports its state itself, with its agents
        self._last_progress = 0.0
        self._scores: tuple[str, ...] = ("accuracy", "rmse")
        self._closed = threading.Event()
        self._write_lock = threading.Lock()
        self._writes = False  # from the first change on: only then is the folder this process's own

    def tell(self, text: str, **more: Any) -> None:
        if self._quiet:
            return
        text = printable(text, _WORDS)  # other nodes wrote parts of it: no line breaks, no control characters
        now = timestamp().replace("+00:00", "Z")
        if self._form == "json":
            line = json.dumps({"time": now, "level": "info", "node": self._node, "event": text, **more})
        else:
            line = f"{now} {self._node}: {text}"
        with suppress(OSError, ValueError):
            print(line, file=sys.stderr, flush=True)

    def state(self, **changes: Any) -> None:
        """Change fields of `health.json`; call it from the thread of the rounds only."""
        self._state = self._state | changes
        if self._health is not None and not self._writes:
            self._writes = True
            threading.Thread(target=self._write_regularly, name="health", daemon=True).start()
        self._write()

    def progress(self, what: str, done: int, scores: Mapping[str, float], **more: Any) -> None:
        """Write an agent's progress, at most one line every few seconds."""
        moved = {"moved": timestamp()} if done != self._state["round"] or scores else {}
        self.state(status=what, round=done, **moved, **({"scores": dict(scores)} if scores else {}), **more)
        if scores and (self._form == "json" or time.monotonic() - self._last_progress > _PROGRESS_EVERY):
            self._last_progress = time.monotonic()
            figures = ", ".join(f"{name.replace('_', ' ')} {value:.3f}" for name, value in scores.items())
            self.tell(f"round {done} is done: {figures}", round=done, scores=dict(scores))

    def started(self, record: RunStarted) -> None:
        self._scores = record.scores
        for note in record.notes:
            self.tell(note)
        if self.is_of_hub:
            agents, of = f"waiting for {len(record.agents)} agents", f"{record.done} of {record.rounds}"
            self.tell(f"{agents}; {of} rounds are done", round=record.done)
        else:
            self.state(status="waiting", round=record.done, rounds=record.rounds)

    def round_ended(self, record: RoundEnded) -> None:
        present = [row["agent"] for row in record.rows if row["present"]]
        if self._form == "json":
            keys = [f"{prefix}{name}" for name in self._scores for prefix in PREFIXES]
            figures = {key: [row[key] for row in record.rows if key in row] for key in keys}
            means = {key: sum(values) / len(values) for key, values in figures.items() if values}
            seconds = round(record.seconds, 3)
            self.tell("round ended", round=record.round, scores=means, present=present, seconds=seconds)
        if not self.is_of_hub:
            self.state(status="running", round=record.round, present=present, moved=timestamp())

    def finished(self, record: RunFinished) -> None:
        self.closed()

    def closed(self) -> None:
        if not self._closed.is_set():
            self._closed.set()
            done = self._state["status"] == "done" or self._state.get("rounds") == self._state["round"]
            if self._writes:
                self.state(status="done" if done else "stopped")

    def _write_regularly(self) -> None:
        while not self._closed.wait(_EVERY):
            self._write()

    def _write(self) -> None:
        if self._health is None:
            return
        with self._write_lock, suppress(StorageError, OSError):  # a full disk is reported where checkpoints are written
            write_atomically(self._health, json.dumps(self._state | {"time": timestamp()}).encode())


def timestamp() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


# --- Limits on the lines that other nodes may cause.

_LINES, _LINES_PER_SECOND = 10.0, 0.1  # lines of one cause
_CAUSES = 500  # that are counted separately
_ALL_LINES, _ALL_PER_SECOND = 300.0, 20.0  # lines of all causes together
_CALLER_EVERY = 600.0  # seconds between two lines about the same caller
_CALLER_LINES, _CALLER_LINES_PER_SECOND = 20.0, 1 / 30  # lines about all callers


class LineLimit:
    """Passes log lines on; of those with the same cause only some, with the number of those left out."""

    def __init__(self, tell: Callable[[str], None], clock: Clock = time.monotonic) -> None:
        self._tell, self._clock = tell, clock
        self._causes: dict[str, tuple[Bucket, int]] = {}  # and how many lines were left out since the last one
        self._all = Bucket(_ALL_LINES, _ALL_PER_SECOND, clock)

    def __call__(self, text: str) -> None:
        cause = re.sub(r"\d+", "#", text)[:120]  # lines that differ in numbers have one cause
        new = Bucket(_LINES, _LINES_PER_SECOND, self._clock), 0
        bucket, left_out = self._causes.pop(cause, new)
        if len(self._causes) >= _CAUSES:
            self._causes.pop(next(iter(self._causes)))  # the least recent
        if bucket.take() and self._all.take():
            self._tell(f"{text} (and {left_out} more of this kind before)" if left_out else text)
            left_out = 0
        else:
            left_out += 1
        self._causes[cause] = bucket, left_out


class CallerLog:
    """Logs which callers are refused and why: each of them now and then, few lines in all, and all are counted."""

    def __init__(self, tell: Callable[[str], None], clock: Clock = time.monotonic) -> None:
        self._tell, self._clock = tell, clock
        self._callers: dict[tuple[str, str], tuple[float, int]] = {}  # when it was logged, and how often not since
        self._lines = Bucket(_CALLER_LINES, _CALLER_LINES_PER_SECOND, clock)

    def __call__(self, who: str, why: str) -> None:
        now = self._clock()
        told, left_out = self._callers.pop((who, why), (-_CALLER_EVERY, 0))
        if len(self._callers) >= _CAUSES:
            self._callers.pop(next(iter(self._callers)))  # the least recent
        if now - told >= _CALLER_EVERY and self._lines.take():
            self._tell(f"refused {who}: {why}" + (f" (and {left_out} more times before)" if left_out else ""))
            told, left_out = now, 0
        else:
            left_out += 1
        self._callers[who, why] = told, left_out
