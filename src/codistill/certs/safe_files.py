"""Files that are whole or not there, readable only for whom they are meant, and changed by one command at a time."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from codistill import files
from codistill.errors import StorageError

LOCK = ".lock"
PRIVATE, _PUBLIC = 0o600, 0o644
_PATIENCE = 10.0  # seconds to wait for another command


def put(path: Path, data: bytes, mode: int = _PUBLIC) -> None:
    """All of it or nothing, and from its first byte on readable only for whom it is meant."""
    part = path.with_name(f"{path.name}.part")
    with writing(path):
        part.unlink(missing_ok=True)  # of a command that was killed
        try:
            with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a failure to write into a sentence that fits `codistill certs`."""
    try:
        yield
    except OSError as error:
        try:
            with files.writing(path):
                raise error
        except StorageError as said:
            do = "Make room or give permission, then give the command again; or name another folder with --certs."
            raise StorageError(said.must, said.found, do) from None


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One command at a time. Others take milliseconds, so wait for them."""
    with writing(folder):
        handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, PRIVATE)
    try:
        _wait_for_lock(handle, folder)
        yield
    finally:
        os.close(handle)


def _wait_for_lock(handle: int, folder: Path) -> None:
    try:
        import fcntl
    except ImportError:
        return  # a system without this kind of lock
    end = time.monotonic() + _PATIENCE
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > end:
                raise StorageError(
                    f"{folder} must be free: one command at a time.",
                    f"another 'codistill certs' has held it for {_PATIENCE:g} seconds",
                    "Wait for it to end, or end it.",
                ) from None
            time.sleep(0.02)
