"""The authority's files: readable only by those they are meant for, and changed by one command at a time."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from codistill import files
from codistill.errors import StorageError
from codistill.files import LOCK

PRIVATE, _PUBLIC = 0o600, 0o644
_PATIENCE = 10.0  # seconds to wait for another command
_DO = "Free some space or give permission, then repeat the command; or name another folder with --certs."


def put(path: Path, data: bytes, mode: int = _PUBLIC) -> None:
    """Write a file completely or not at all, with its mode from the first byte on."""
    with writing(path):
        files.replace_file(path, data, path.with_name(f"{path.name}.part"), mode)


def writing(path: Path) -> AbstractContextManager[None]:
    """Turn a failure to write into an error with advice that fits `codistill certs`."""
    return files.writing(path, _DO)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Let one command at a time use a folder. Others take milliseconds, so wait for them."""
    with writing(folder):
        handle = files.open_patiently(folder / LOCK, os.O_RDWR | os.O_CREAT, PRIVATE)
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
                    "Wait until it has ended, or stop it.",
                ) from None
            time.sleep(0.02)
