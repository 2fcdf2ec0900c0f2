"""Atomic writes, and folders that one process uses at a time."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

from codistill.errors import StorageError

LOCK = ".lock"


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file that appears under its name only once it is complete and on disk."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    with writing(path):
        try:
            with part.open("wb", buffering=0) as file:
                write_all(file, data)
            part.replace(path)
            _sync_folder(path.parent)
        except BaseException:
            part.unlink(missing_ok=True)
            raise


def write_all(file: FileIO, data: bytes) -> None:
    """Write without a buffer, which would try to write the rest again when the file is closed."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]
    os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a folder while reading and writing there."""
    with writing(folder):
        handle = lock(folder)
    try:
        yield
    finally:
        handle.close()


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a failure to write into a `StorageError`: full disk, read-only folder, no permission."""
    try:
        yield
    except OSError as error:
        free = "Free some space; 'codistill resume' then continues from the last checkpoint."
        other = "Choose another folder, by --out on the command line."
        reasons = {
            errno.ENOSPC: ("the disk is full", free),
            errno.EDQUOT: ("the disk quota is used up", free),
            errno.EFBIG: ("the file is larger than is allowed here", free),
            errno.EROFS: ("the folder is read-only", other),
            errno.EACCES: ("no permission to write", other),
            errno.EPERM: ("no permission to write", other),
            errno.ENOENT: ("no such folder", other),
            errno.ENOTDIR: ("a file is in the place of a folder", other),
            errno.EEXIST: ("a file is in the place of a folder", other),
            errno.EISDIR: ("a folder is in the place of a file", "Choose another name."),
            errno.EAGAIN: ("another run is writing there", f"Wait for it to end. Or: {other}"),
        }
        found, do = reasons.get(error.errno or 0, (str(error), other))
        raise StorageError(f"{path} must be writable.", found, do) from None


def lock(folder: Path) -> Any:
    """Lock a folder for one run. The lock ends with its owner; forked workers do not inherit it."""
    handle = (folder / LOCK).open("w")
    try:
        import fcntl

        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:
        pass  # a system without this kind of lock
    except OSError:
        handle.close()
        raise BlockingIOError(errno.EAGAIN, "locked") from None
    return handle
