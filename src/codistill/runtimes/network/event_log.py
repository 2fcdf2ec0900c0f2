"""What the operator of a node sees: log lines as text or JSON, and the file `health.json`."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from codistill.errors import StorageError
from codistill.files import write_atomically
from codistill.results.records import RoundEnded, RunFinished, RunStarted
from codistill.results.scores import PREFIXES
from codistill.text import printable

if TYPE_CHECKING:
    from codistill.runtimes.network.hub_runtime import HubRuntime

HEALTH = "health.json"
_EVERY = 10.0  # seconds between two writes of health.json
_WORDS = 1000  # characters of an event
_PROGRESS_EVERY = 5.0  # seconds between two lines of an agent's progress


class EventLog:
    """Writes events to standard error, one line of text or one JSON object each, and keeps `health.json` up to date."""

    def __init__(self, node: str, *, form: str = "text", health: Path | None = None, quiet: bool = False) -> None:
        self._node, self._form, self._health, self._quiet = node, form, health, quiet
        self._state: dict[str, Any] = {"node": node, "status": "starting", "pid": os.getpid(), "round": 0}
        self.hub: HubRuntime | None = None  # whose agents are listed in the health file
        self._last_progress = 0.0
        self._scores: tuple[str, ...] = ("accuracy", "rmse")
        self._closed = threading.Event()
        self._write_lock = threading.Lock()
        self._writes = False  # from the first change on: only then is the folder this process's own

    def tell(self, text: str, level: str = "info", **more: Any) -> None:
        """Write one event."""
        if self._quiet:
            return
        text = printable(text, _WORDS)  # parts come from other nodes: no line breaks, no control characters
        now = timestamp().replace("+00:00", "Z")
        if self._form == "json":
            line = json.dumps({"time": now, "level": level, "node": self._node, "event": text, **more})
        else:
            line = f"{now} {self._node}: {text}"
        with suppress(OSError, ValueError):
            print(line, file=sys.stderr, flush=True)

    def state(self, **changes: Any) -> None:
        """Change fields of `health.json`; by the thread of the rounds only, when they change."""
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
        """Write how many rounds are done."""
        self._scores = record.scores
        for note in record.notes:
            self.tell(note)
        if self.hub is not None:
            agents, of = f"waiting for {len(record.agents)} agents", f"{record.done} of {record.rounds}"
            self.tell(f"{agents}; {of} rounds are done", round=record.done)
        else:  # a hub tells its state itself
            self.state(status="waiting", round=record.done, rounds=record.rounds)

    def round_ended(self, record: RoundEnded) -> None:
        """Write the scores of a round."""
        present = [row["agent"] for row in record.rows if row["present"]]
        if self._form == "json":
            keys = [f"{prefix}{name}" for name in self._scores for prefix in PREFIXES]
            figures = {key: [row[key] for row in record.rows if key in row] for key in keys}
            means = {key: sum(values) / len(values) for key, values in figures.items() if values}
            seconds = round(record.seconds, 3)
            self.tell("round ended", round=record.round, scores=means, present=present, seconds=seconds)
        if self.hub is None:
            self.state(status="running", round=record.round, present=present, moved=timestamp())

    def finished(self, record: RunFinished) -> None:
        """The run is over."""
        self.closed()

    def closed(self) -> None:
        """Write the final status."""
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
    """The time now, as the health file has it."""
    return datetime.now(UTC).isoformat(timespec="seconds")
