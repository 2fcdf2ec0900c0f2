"""Atomic writes, file locks and checks of folder permissions.

Nothing is written through a symbolic link: another user may have placed it.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import TypeVar

from codistill.core.errors import StorageError

LOCK = ".lock"
T = TypeVar("T")
_PATIENCE = 60.0  # seconds that a file waits for a free descriptor
_AGAIN = 0.1  # seconds between two attempts
_WRITES = os.O_WRONLY | os.O_RDWR
_NO_LINK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)  # a pipe without a reader would block


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file completely or not at all: it gets its name once all bytes are on disk."""
    with writing(path):
        replace_file(path, data, path.with_name(f"{path.name}.{os.getpid()}.part"))


def replace_file(path: Path, data: bytes, part: Path, mode: int = 0o666) -> None:
    """Write `data` to `part`, created with this mode, and rename it to `path`."""
    part.unlink(missing_ok=True)  # left by a process that was killed
    try:
        with open(open_patiently(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb", buffering=0) as file:
            write_all(file, data)
        part.replace(path)
        sync_folder(path.parent)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def patiently(act: Callable[[], T]) -> T:
    """Call `act`; retry while no file descriptor is free.

    Connections come and go: a run must not end because a file cannot be opened meanwhile.
    """
    end = time.monotonic() + _PATIENCE
    while True:
        try:
            return act()
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE) or time.monotonic() > end:
                raise
        time.sleep(_AGAIN)


def open_patiently(path: Path, flags: int, mode: int = 0o666) -> int:
    """Open a file and return its descriptor; for writing, only a regular file that is not a symbolic link."""
    if not flags & _WRITES:
        return patiently(lambda: os.open(path, flags | os.O_CLOEXEC, mode))
    handle = patiently(lambda: os.open(path, flags | os.O_CLOEXEC | _NO_LINK, mode))
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.ENXIO, "not a regular file")
    return handle


def cut_file(path: Path, size: int) -> None:
    with FileIO(open_patiently(path, os.O_WRONLY), "w") as file:
        file.truncate(size)


def write_all(file: FileIO, data: bytes) -> None:
    """Write and sync without a buffer, which would retry failed writes when the file is closed."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Sync the directory entry, so that new file names survive a crash."""
    handle = open_patiently(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def subfolder(folder: Path, mode: int = 0o777) -> None:
    """Create a folder unless it exists; refuse a symbolic link."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True, mode=mode)
        if folder.is_symlink():
            raise OSError(errno.ELOOP, "a symbolic link")


def own_folder(folder: Path, mode: int = 0o700) -> None:
    """Create the folder of a node unless it exists; refuse one that others can write to."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True, mode=mode)
    check_own(folder)


def check_own(folder: Path) -> None:
    """Refuse a folder that others can write to: they could replace its states or redirect its files."""
    if not hasattr(os, "geteuid"):
        return
    with writing(folder):
        found = folder.stat()
    owner = _user_name(found.st_uid)
    why = do = ""
    if found.st_uid not in (0, os.geteuid()):
        why = f"it belongs to '{owner}', and this process runs as '{_user_name(os.geteuid())}'"
        do = f"Run this as '{owner}', or choose a folder of your own."
    elif found.st_mode & stat.S_IWOTH:
        why, do = "all users of this machine can write to it", f"chmod go-w {folder}; or choose another folder."
    elif found.st_mode & stat.S_IWGRP:
        group, members = _group(found.st_gid)
        if group != owner or not members <= {owner}:  # private groups often come with group-writable folders
            why = f"all members of group '{group}' can write to it"
            do = f"chmod g-w {folder}; or choose another folder."
    if why:
        raise StorageError(f"Only its owner may be able to write to {folder}.", why, do)


def _user_name(user: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)


def _group(number: int) -> tuple[str, set[str]]:
    """Name and members; of an unknown group its number, which is no user's name."""
    import grp

    try:
        found = grp.getgrgid(number)
    except KeyError:
        return str(number), {""}
    return found.gr_name, set(found.gr_mem)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    with writing(folder):
        handle = lock(folder)
    with handle:
        yield


@contextmanager
def writing(path: Path, do: str | None = None) -> Iterator[None]:
    """Turn an `OSError` (full disk, read-only folder, no permission) into a `StorageError`; `do`: other advice."""
    try:
        yield
    except OSError as error:
        free = "Free some space; 'codistill resume' then continues from the last checkpoint."
        other = "Choose another folder: --out on the command line, folder=... in Python."
        reasons = {
            errno.ENOSPC: ("the disk is full", free),
            errno.EDQUOT: ("the disk quota is used up", free),
            errno.EFBIG: ("the file exceeds the size limit", free),
            errno.EROFS: ("the folder is read-only", other),
            errno.EACCES: ("no permission to write", other),
            errno.EPERM: ("no permission to write", other),
            errno.ENOENT: ("no such folder", other),
            errno.ENOTDIR: ("a file where a folder is expected", other),
            errno.EEXIST: ("a file where a folder is expected", other),
            errno.EISDIR: ("a folder where a file is expected", "Choose another name."),
            errno.ELOOP: ("a symbolic link", f"Find out who created it, and remove it. {other}"),
            errno.ENXIO: ("not a regular file", f"Remove it. {other}"),
            errno.EAGAIN: ("another run is using it", f"Wait until that run ends. Or: {other}"),
        }
        found, advice = reasons.get(error.errno or 0, (str(error), other))
        raise StorageError(f"{path} must be writable.", found, do or advice) from None


def lock(folder: Path) -> FileIO:
    """Lock a folder for one run. The lock ends with the process; forked workers do not inherit it."""
    handle = FileIO(open_patiently(folder / LOCK, os.O_RDWR | os.O_CREAT), "r+")
    try:
        import fcntl

        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:
        pass  # Windows
    except OSError:
        handle.close()
        raise BlockingIOError(errno.EAGAIN, "locked") from None
    return handle
