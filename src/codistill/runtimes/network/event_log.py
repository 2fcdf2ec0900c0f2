"""What an operator sees of a node: lines for people or for machines, and a file that tells its health."""

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
from codistill.runtimes.network.answers import SCORES
from codistill.text import printable

if TYPE_CHECKING:
    from codistill.runtimes.network.hub_runtime import HubRuntime

HEALTH = "health.json"
_EVERY = 10.0  # seconds between two signs of health
_WORDS = 1000  # characters of an event
_LINE = 5.0  # seconds between two lines of an agent's progress


class EventLog:
    """Tells what happens, on standard error: a sentence each, or a JSON object each; and keeps `health.json`."""

    def __init__(self, node: str, *, form: str = "text", health: Path | None = None, quiet: bool = False) -> None:
        self._node, self._form, self._health, self._quiet = node, form, health, quiet
        self._state: dict[str, Any] = {"node": node, "status": "starting", "pid": os.getpid(), "round": 0}
        self.hub: HubRuntime | None = None  # whose agents are listed in the health file
        self._said = 0.0
        self._closed = threading.Event()
        self._writing = threading.Lock()
        if health is not None:
            threading.Thread(target=self._beat, name="health", daemon=True).start()

    def tell(self, text: str, level: str = "info", **more: Any) -> None:
        """One event, in plain words."""
        if self._quiet:
            return
        text = printable(text, _WORDS)  # others have a say in it: no line breaks, nothing that moves a cursor
        now = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        if self._form == "json":
            line = json.dumps({"time": now, "level": level, "node": self._node, "event": text, **more})
        else:
            line = f"{now} {self._node}: {text}"
        with suppress(OSError, ValueError):
            print(line, file=sys.stderr, flush=True)

    def state(self, **news: Any) -> None:
        """Change what the health file says."""
        self._state |= news
        self._write()

    def progress(self, what: str, done: int, scores: Mapping[str, float]) -> None:
        """How far an agent is; a line now and then."""
        self.state(status=what, round=done, **({"scores": dict(scores)} if scores else {}))
        if scores and (self._form == "json" or time.monotonic() - self._said > _LINE):
            self._said = time.monotonic()
            figures = ", ".join(f"{name.replace('_', ' ')} {value:.3f}" for name, value in scores.items())
            self.tell(f"round {done} is done: {figures}", round=done, scores=dict(scores))

    def started(self, record: RunStarted) -> None:
        """Say how far the run is."""
        for note in record.notes:
            self.tell(note)
        if self.hub is not None:
            agents, of = f"{len(record.agents)} agents are to come", f"{record.done} of {record.rounds}"
            self.tell(f"{agents}; {of} rounds are done", round=record.done)
        self.state(status="waiting", round=record.done, rounds=record.rounds)

    def round_ended(self, record: RoundEnded) -> None:
        """Say how a round went."""
        there = [row["agent"] for row in record.rows if row["present"]]
        if self._form == "json":
            figures = {key: [row[key] for row in record.rows if key in row] for key in SCORES}
            means = {key: sum(values) / len(values) for key, values in figures.items() if values}
            seconds = round(record.seconds, 3)
            self.tell("round ended", round=record.round, scores=means, present=there, seconds=seconds)
        self.state(status="running", round=record.round, present=there)

    def finished(self, record: RunFinished) -> None:
        """The run is over."""
        self.closed()

    def closed(self) -> None:
        """The last sign."""
        if not self._closed.is_set():
            self._closed.set()
            done = self._state["status"] == "done" or self._state.get("rounds") == self._state["round"]
            self.state(status="done" if done else "stopped")

    def _beat(self) -> None:
        while not self._closed.wait(_EVERY):
            self._write()

    def _write(self) -> None:
        if self._health is None:
            return
        now: dict[str, Any] = {
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        if self.hub is not None:
            now["here"] = [name for name, seat in list(self.hub.seats.items()) if seat.ready]
        with self._writing, suppress(StorageError, OSError):  # a full disk is told of where it matters
            write_atomically(self._health, json.dumps(self._state | now).encode())
