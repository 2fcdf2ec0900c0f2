"""Files that are written completely or not at all, and folders that one process uses at a time.

No file is written through a symbolic link, which somebody else may have put there.
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
from typing import Any, TypeVar

from codistill.errors import StorageError

LOCK = ".lock"
T = TypeVar("T")
_PATIENCE = 60.0  # seconds that a file waits for a free descriptor
_AGAIN = 0.1  # seconds between two attempts
_WRITES = os.O_WRONLY | os.O_RDWR
_NO_LINK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)  # a pipe without a reader would block


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file completely or not at all: it appears under its name only when all of it is on disk."""
    with writing(path):
        replace_file(path, data, path.with_name(f"{path.name}.{os.getpid()}.part"))


def replace_file(path: Path, data: bytes, part: Path, mode: int = 0o666) -> None:
    """Write `data` to `part`, which has this mode from its first byte on, and rename it to `path`."""
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
    """Do what needs a descriptor; while this process or the system has none left, wait for one.

    Connections of others come and go: a run must not end because a file cannot be opened meanwhile.
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
    """The descriptor of an opened file; what is written is a plain file, never what a symbolic link points to."""
    if not flags & _WRITES:
        return patiently(lambda: os.open(path, flags | os.O_CLOEXEC, mode))
    handle = patiently(lambda: os.open(path, flags | os.O_CLOEXEC | _NO_LINK, mode))
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.ENXIO, "not a plain file")
    return handle


def cut_file(path: Path, size: int) -> None:
    """Cut a file to its first bytes."""
    handle = open_patiently(path, os.O_WRONLY)
    try:
        os.ftruncate(handle, size)
    finally:
        os.close(handle)


def write_all(file: FileIO, data: bytes) -> None:
    """Write and sync without a buffer: a buffer would try again to write what did not fit when the file is closed."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Bring the names of a folder's files to the disk."""
    handle = open_patiently(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def subfolder(folder: Path, mode: int = 0o777) -> None:
    """Make a folder for files of one's own inside of another, unless it is there; a link to a folder is not one."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True, mode=mode)
        if folder.is_symlink():
            raise OSError(errno.ELOOP, "a symbolic link")


def own_folder(folder: Path, mode: int = 0o700) -> None:
    """Make the folder of a node, unless it is there; refuse one that others may write."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True, mode=mode)
    check_own(folder)


def check_own(folder: Path) -> None:
    """Whoever can write in a node's folder can replace its states, and decide where its files are written."""
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
        why, do = "every user of this machine may write there", f"chmod go-w {folder}; or choose another folder."
    elif found.st_mode & stat.S_IWGRP and not _is_private_group(found.st_gid, owner):
        why = f"all members of the group '{_group_name(found.st_gid)}' may write there"
        do = f"chmod g-w {folder}; or choose another folder."
    if why:
        raise StorageError(f"{folder} must be writable by its owner alone.", why, do)


def _is_private_group(group: int, user: str) -> bool:
    """Whether it is the group of this user alone: with these, folders are often made writable for the group."""
    import grp

    try:
        found = grp.getgrgid(group)
    except KeyError:
        return False
    return found.gr_name == user and set(found.gr_mem) <= {user}


def _user_name(user: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)


def _group_name(group: int) -> str:
    import grp

    try:
        return grp.getgrgid(group).gr_name
    except KeyError:
        return str(group)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a folder while it is read and written."""
    with writing(folder):
        handle = lock(folder)
    try:
        yield
    finally:
        handle.close()


@contextmanager
def writing(path: Path, do: str | None = None) -> Iterator[None]:
    """Turn a failure to write (full disk, read-only folder, no permission) into an error; `do`: the advice to give."""
    try:
        yield
    except OSError as error:
        free = "Free some space; 'codistill resume' then continues from the last checkpoint."
        other = "Choose another folder: --out on the command line, folder=... in Python."
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
            errno.ELOOP: ("a symbolic link is in its place", f"Find out who has put it there, and remove it. {other}"),
            errno.ENXIO: ("something that is not a plain file is in its place", f"Remove it. {other}"),
            errno.EAGAIN: ("another run is writing there", f"Wait for it to end. Or: {other}"),
        }
        found, advice = reasons.get(error.errno or 0, (str(error), other))
        raise StorageError(f"{path} must be writable.", found, do or advice) from None


def lock(folder: Path) -> Any:
    """Lock a folder for one run. The lock ends with its owner; forked workers do not inherit it."""
    handle = FileIO(open_patiently(folder / LOCK, os.O_RDWR | os.O_CREAT), "r+")
    try:
        import fcntl

        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:
        pass  # a system without this kind of lock
    except OSError:
        handle.close()
        raise BlockingIOError(errno.EAGAIN, "locked") from None
    return handle
