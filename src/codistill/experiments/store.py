"""A run's folder: metrics, log and checkpoints, written so that a kill at any moment loses nothing.

At the end of a round the figures are appended first, then the checkpoint is put in place by one atomic
rename. It records how long the other files were, so a resumed run cuts them back to that moment and
goes on as if it had never been killed. Times are kept apart from metrics: metrics are equal to the bit.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from codistill.errors import CheckpointError, StorageError
from codistill.runtimes.observers import Observer, Record, Row
from codistill.wire.state import pack, unpack

METRICS, TIMES, LOG = "metrics.jsonl", "times.jsonl", "log.txt"
_FILES = (METRICS, TIMES, LOG)
_KEPT = 2  # the newest checkpoint, and the one before in case the newest cannot be read
_DIGEST = 32


class Keeper(Observer):
    """Keeps a run in its folder as it goes on."""

    def __init__(self, folder: Path, rounds: int, checkpoint_every: int = 1) -> None:
        self.folder, self._rounds, self._every = folder, rounds, checkpoint_every
        self._checkpoints = folder / "checkpoints"
        self.notes: list[str] = []
        with writing(folder):
            self._checkpoints.mkdir(parents=True, exist_ok=True)
            self._lock = _lock(folder)

    def clear(self) -> None:
        """Start with nothing: an earlier run's figures and checkpoints are removed."""
        with writing(self.folder):
            for path in (*(self.folder / name for name in _FILES), *self._checkpoints.iterdir()):
                path.unlink(missing_ok=True)
            for name in _FILES:
                (self.folder / name).touch()

    def round_ended(self, record: Record, save: Callable[[], dict[str, bytes]]) -> None:
        """Append the figures; then, where due, put a checkpoint in place."""
        self._append(METRICS, "".join(json.dumps(row) + "\n" for row in record.rows))
        self._append(TIMES, json.dumps({"round": record.round, "seconds": round(record.seconds, 6)}) + "\n")
        self._append(LOG, "".join(event + "\n" for event in record.events))
        if self._every and (record.round % self._every == 0 or record.round == self._rounds):
            self._put(record.round, save())

    def _append(self, name: str, text: str) -> None:
        path = self.folder / name
        with writing(path):
            with path.open("ab") as file:
                size = file.tell()
                try:
                    file.write(text.encode())
                    file.flush()
                    os.fsync(file.fileno())
                except OSError:
                    os.truncate(path, size)  # nothing half-written
                    raise

    def _put(self, done: int, saved: dict[str, bytes]) -> None:
        sizes = {name: (self.folder / name).stat().st_size for name in _FILES}
        body = pack({"round": done, "sizes": sizes, "nodes": saved})
        write_atomically(self._path(done), hashlib.sha256(body).digest() + body)
        for old in self._found()[:-_KEPT]:
            old.unlink(missing_ok=True)

    def _path(self, done: int) -> Path:
        return self._checkpoints / f"round-{done:06d}.state"

    def _found(self) -> list[Path]:
        return sorted(self._checkpoints.glob("round-*.state"))

    def latest(self) -> tuple[int, dict[str, bytes] | None, list[Row]]:
        """Rounds done, what was saved, and the figures up to there; cuts the files back to that moment."""
        for path in self._checkpoints.glob("*.part"):
            path.unlink()
        found = self._found()
        for path in reversed(found):
            try:
                content = _read(path)
            except CheckpointError as error:
                self.notes.append(f"{path.name} cannot be used ({error.found}); going back to the one before.")
                continue
            return self._cut_back(content)
        if found:
            raise CheckpointError(
                f"A checkpoint of {self.folder} must be readable.",
                f"{len(found)} damaged: {', '.join(path.name for path in found)}",
                "Start the run again with 'codistill run'.",
            )
        self.clear()
        return 0, None, []

    def _cut_back(self, content: dict[str, Any]) -> tuple[int, dict[str, bytes], list[Row]]:
        for name, size in content["sizes"].items():
            path = self.folder / name
            if not path.exists() or path.stat().st_size < size:
                raise CheckpointError(
                    f"{path} must hold what it held at the checkpoint.",
                    "it is missing or shorter",
                    "Restore the file, or start the run again with 'codistill run'.",
                )
            with writing(path):
                os.truncate(path, size)
        return content["round"], content["nodes"], read_rows(self.folder / METRICS)

    def closed(self) -> None:
        """Let others use the folder."""
        self._lock.close()


def _read(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    if hashlib.sha256(data[_DIGEST:]).digest() != data[:_DIGEST]:
        raise CheckpointError(
            "A checkpoint must be as it was written.", "its digest does not match", "Use an earlier one."
        )
    content: dict[str, Any] = unpack(data[_DIGEST:])
    return content


def read_rows(path: Path) -> list[Row]:
    """The rows of a metrics file."""
    try:
        return [json.loads(line) for line in path.read_text().splitlines()]
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} must be a metrics file.", f"{type(error).__name__}: {error}"[:200], "Check the run's folder."
        ) from None


def write_atomically(path: Path, data: bytes) -> None:
    """All of it or nothing: a file appears under its name only when it is whole and on disk."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    with writing(path):
        try:
            with part.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
            _sync_folder(path.parent)
        except OSError:
            part.unlink(missing_ok=True)
            raise


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a failure to write into a sentence: full disk, read-only folder, no permission."""
    try:
        yield
    except OSError as error:
        reasons = {
            errno.ENOSPC: ("the disk is full", "Free some space; 'codistill resume' then goes on from the last checkpoint."),
            errno.EDQUOT: ("the disk quota is used up", "Free some space, then 'codistill resume'."),
            errno.EROFS: ("the folder is read-only", "Choose another folder with --out."),
            errno.EACCES: ("no permission to write", "Choose another folder with --out."),
            errno.ENOTDIR: ("a file is in the place of a folder", "Choose another folder with --out."),
            errno.EEXIST: ("a file is in the place of a folder", "Choose another folder with --out."),
            errno.EAGAIN: ("another run is writing there", "Wait for it to end, or choose another folder with --out."),
        }  # fmt: skip
        found, do = reasons.get(error.errno or 0, (str(error), "Choose another folder with --out."))
        raise StorageError(f"{path} must be writable.", found, do) from None


def _lock(folder: Path) -> Any:
    """One run per folder at a time. The lock ends with its owner, and forked workers do not inherit it."""
    handle = (folder / ".lock").open("w")
    try:
        import fcntl

        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:
        pass  # a system without this kind of lock
    except OSError:
        handle.close()
        raise BlockingIOError(errno.EAGAIN, "locked") from None
    return handle
