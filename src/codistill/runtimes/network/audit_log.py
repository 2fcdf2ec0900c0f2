"""The audit log of an agent: one JSON line for everything that it releases, appended before it is sent.

The lines are chained by hashes. The digest of a line is the SHA-256 of its bytes without the line break; each line
holds the digest of the line before as `previous` (the first one: 64 zeros). A line that was changed, removed, added or
moved breaks the chain. Lines that are missing at the end do not: compare the digest of the last line, the *head*, with
one that was noted elsewhere.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from typing import Any

from codistill.errors import CheckpointError
from codistill.files import open_patiently, replace_file, write_all, writing
from codistill.text import parse_json

AUDIT = "audit.jsonl"
START = "0" * 64  # in place of the digest of a line before the first
_KEEP = "Keep the file: it may be evidence. To go on, move it elsewhere; a new one is begun."
_FREE = "Free some space, and join again: nothing is released that is not in the audit log first."
_LONGEST = 1 << 24  # bytes of a line: terms with a long roster


@dataclass
class Usage:
    """What has been released according to a log: the rounds in all, and rounds and bytes of the last day (UTC)."""

    rounds: int = 0
    day: str = ""
    rounds_of_day: int = 0
    bytes_of_day: int = 0
    stopped: dict[str, int] = field(default_factory=dict)  # limits that were reached that day, by the name of the rule
    _turn: tuple[int, int] | None = None

    def begin(self, day: str) -> None:
        """Count from zero if this is another day."""
        if day != self.day:
            self.day, self.rounds_of_day, self.bytes_of_day, self.stopped = day, 0, 0, {}

    def is_new_round(self, entry: dict[str, Any]) -> bool:
        """Whether this is the first message of a round; a round that is repeated is another one."""
        return entry["round"] > 0 and "attempt" in entry and (entry["round"], entry["attempt"]) != self._turn

    def add(self, entry: dict[str, Any]) -> None:
        """Count a line of the log."""
        self.begin(entry["time"][:10])
        match entry["event"]:
            case "started":
                self._turn = None
            case "stopped":
                self.stopped[entry["rule"]] = entry["limit"]
            case "released":
                self.bytes_of_day += entry["bytes"] * len(entry["to"])
                if self.is_new_round(entry):
                    self._turn = (entry["round"], entry["attempt"])
                    self.rounds, self.rounds_of_day = self.rounds + 1, self.rounds_of_day + 1


class ChainReader:
    """Reads a log line by line and checks the chain; a line that does not fit is a `CheckpointError` that names it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines, self.head = 0, START
        self.cut = 0  # bytes of a last line without its end: the process was killed while it wrote it
        self.size = 0  # bytes of all complete lines

    def __iter__(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """The digest and the content of each line."""
        try:
            with self.path.open("rb") as file:
                while line := file.readline(_LONGEST):
                    if not line.endswith(b"\n") and not file.read(1):
                        self.cut = len(line)
                        return
                    entry = self._checked(line)
                    self.lines, self.size = self.lines + 1, self.size + len(line)
                    self.head = _digest(line[:-1])
                    yield self.head, entry
        except OSError as error:
            raise CheckpointError(
                f"{self.path} must be readable.", f"{error.strerror}", "Name the folder of an agent (--state)."
            ) from None

    def _checked(self, line: bytes) -> dict[str, Any]:
        number = self.lines + 1
        try:
            entry = parse_json(line)
            found, previous = entry["number"], entry["previous"]
            _ = entry["event"], entry["time"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise self._broken(f"line {number} is not a line of an audit log") from None
        if found != number:
            raise self._broken(f"line {number} has the number {found!r}: lines were removed, added or moved")
        if previous != self.head:
            before = f"line {number - 1}" if self.lines else "the start of a log"
            raise self._broken(f"line {number} does not continue {before}: one of them was changed or replaced")
        return dict(entry)

    def _broken(self, found: str) -> CheckpointError:
        return CheckpointError(f"{self.path} must be as it was written.", found[:200], _KEEP)


class AuditLog:
    """Appends lines to the log in an agent's folder, which the caller has locked."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / AUDIT
        self.usage = Usage()
        with writing(self.path, _FREE):
            if not self.path.exists():
                replace_file(self.path, b"", self.path.with_name(f"{AUDIT}.part"), 0o600)
            # Before it is read: a link or a pipe is refused.
            self._file = FileIO(open_patiently(self.path, os.O_WRONLY | os.O_APPEND), "a")
        try:
            self._read_chain()
        except BaseException:
            self._file.close()
            raise
        self._lock = threading.Lock()

    def _read_chain(self) -> None:
        chain = ChainReader(self.path)
        for _, entry in chain:
            self.usage.add(entry)
        self.lines, self.head, self._size, self.cut = chain.lines, chain.head, chain.size, chain.cut
        if chain.cut:
            with writing(self.path, _FREE):
                os.ftruncate(self._file.fileno(), self._size)  # it was never released, see `append`

    def append(self, event: str, **content: Any) -> None:
        """Write a line to disk; when this returns, what it says may be released."""
        with self._lock:
            time = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
            entry = {"number": self.lines + 1, "time": time, "event": event, **content, "previous": self.head}
            line = json.dumps(entry, separators=(",", ":")).encode()
            with writing(self.path, _FREE):
                try:
                    write_all(self._file, line + b"\n")
                except OSError:
                    os.ftruncate(self._file.fileno(), self._size)  # a part of a line
                    raise
            self.lines, self.head, self._size = self.lines + 1, _digest(line), self._size + len(line) + 1
            self.usage.add(entry)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __str__(self) -> str:
        return f"head {self.head} after {self.lines} lines"


def _digest(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()
