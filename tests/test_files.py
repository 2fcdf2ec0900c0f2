"""Files that are written although descriptors run out, and never through links that somebody else has put there."""

from __future__ import annotations

import multiprocessing
import os
import resource
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.dummy import DummyClassifier

import codistill as cd
from codistill.certs import files as safe_files
from codistill.core import files
from codistill.core.errors import StorageError
from codistill.engine.placement import IdleStates
from codistill.engine.store import RunFolder
from codistill.network.policy import AuditLog
from codistill.network.state_store import StateStore
from codistill.results.records import RoundEnded


def _write_without_descriptors(folder: Path) -> None:
    """In a process of its own: connections, as it were, hold all descriptors, and are closed after a while."""
    store = RunFolder(folder)
    store.open(resume=False)
    row = {"round": 1, "agent": "a", "present": True, "sent": 0, "received": 0}
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
    taken: list[int] = []

    def free() -> None:
        time.sleep(0.3)
        while taken:
            os.close(taken.pop())

    for write in (
        lambda: store.round_ended(RoundEnded(1, [row], ["event"], 0.1)),
        lambda: store.write_checkpoint(1, {"hub": b"state"}),
        lambda: files.write_atomically(folder / "health.json", b"{}"),
    ):
        try:
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            assert taken
        thread = threading.Thread(target=free)
        thread.start()
        began = time.monotonic()
        write()
        assert time.monotonic() - began > 0.2
        thread.join()


def test_what_must_be_written_waits_for_a_free_descriptor(tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=_write_without_descriptors, args=(tmp_path,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about forking with several threads
        process.start()
    process.join(60)
    assert process.exitcode == 0
    assert '"agent": "a"' in (tmp_path / "metrics.jsonl").read_text()
    assert (tmp_path / "health.json").read_bytes() == b"{}"
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["round-000001.state"]


def test_the_wait_for_a_descriptor_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_PATIENCE", 0.0)

    def full(*_: object) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(files.os, "open", full)
    with pytest.raises(StorageError, match="Too many open files"):
        files.write_atomically(tmp_path / "x", b"")


# --- links that somebody else has put there -----------------------------------------------------------------

PRECIOUS = b"not to be touched"


def _append_metrics(folder: Path) -> None:
    store = RunFolder(folder)
    try:
        store.open(resume=True)
        store.round_ended(RoundEnded(1, [{"round": 1, "agent": "a", "present": True}], ["event"], 0.1))
    finally:
        store.close()


def _cut_metrics(folder: Path) -> None:
    store = RunFolder(folder)
    try:
        store.latest()
    finally:
        store.close()


def _rest(folder: Path) -> None:
    agent = cd.Agent("a", DummyClassifier(), np.zeros((2, 1), np.float32), np.arange(2))
    IdleStates(folder, ["a"]).offload(agent, 0)


def _checkpoint(folder: Path) -> None:
    store = RunFolder(folder)
    store.open(resume=True)
    store.write_checkpoint(1, {"hub": b"state"})
    store.close()


def _lock_certificates(folder: Path) -> None:
    with safe_files.locked(folder):
        pass


WRITERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "lock": (".lock", files.lock),
    "lock of a run": (".lock", RunFolder),
    "lock of certificates": (".lock", _lock_certificates),
    "metrics": ("metrics.jsonl", _append_metrics),
    "times": ("times.jsonl", _append_metrics),
    "log": ("log.txt", _append_metrics),
    "metrics of a run that goes on": ("metrics.jsonl", _cut_metrics),
    "state of an idle agent": ("states/000000-000001.state", _rest),
    "audit log": ("audit.jsonl", AuditLog),
}


@pytest.mark.parametrize("kind", ["a link to a file", "a link to nothing", "a pipe"])
@pytest.mark.parametrize("writer", WRITERS)
def test_nothing_is_written_through_a_link(writer: str, kind: str, tmp_path: Path) -> None:
    """The target of the link keeps its bytes, and one that does not exist is not made; a pipe does not block."""
    name, write = WRITERS[writer]
    folder, target = tmp_path / "node", tmp_path / "precious"
    place = folder / name
    place.parent.mkdir(parents=True)
    if kind == "a pipe":
        os.mkfifo(place)
    else:
        place.symlink_to(target)
    if kind == "a link to a file":
        target.write_bytes(PRECIOUS)
        before = target.stat()
    if writer == "audit log" and kind == "a link to nothing":
        write(folder).close()  # as a whole: the link is replaced by a new log
        assert not place.is_symlink()
    else:
        with pytest.raises((OSError, StorageError), match=r"(?i)symbolic link|regular file|no such device"):
            write(folder)
    if kind == "a link to a file":
        after = target.stat()
        assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert target.exists() == (kind == "a link to a file")


@pytest.mark.parametrize("name", ["checkpoints/round-000001.state", "health.json"])
def test_a_file_that_is_written_as_a_whole_replaces_a_link(name: str, tmp_path: Path) -> None:
    target, place = tmp_path / "precious", tmp_path / "node" / name
    target.write_bytes(PRECIOUS)
    place.parent.mkdir(parents=True)
    place.symlink_to(target)
    files.write_atomically(place, b"{}")
    assert target.read_bytes() == PRECIOUS
    assert place.read_bytes() == b"{}"
    assert not place.is_symlink()


def test_a_folder_inside_of_a_run_is_not_a_link_to_another_one(tmp_path: Path) -> None:
    """Otherwise checkpoints would be written there, and old ones removed."""
    elsewhere, folder = tmp_path / "elsewhere", tmp_path / "node"
    elsewhere.mkdir()
    (elsewhere / "round-000000.state").write_bytes(PRECIOUS)
    folder.mkdir()
    (folder / "checkpoints").symlink_to(elsewhere)
    with pytest.raises(StorageError, match="a symbolic link"):
        RunFolder(folder)
    with pytest.raises(StorageError, match="a symbolic link"):
        StateStore(folder / "checkpoints").put(1, b"state", store=True)
    assert [path.name for path in elsewhere.iterdir()] == ["round-000000.state"]


def test_a_run_may_be_in_a_folder_that_its_user_has_linked(tmp_path: Path) -> None:
    (tmp_path / "large disk").mkdir()
    (tmp_path / "runs").symlink_to(tmp_path / "large disk")
    _checkpoint(tmp_path / "runs" / "first")
    assert (tmp_path / "large disk" / "first" / "checkpoints" / "round-000001.state").exists()
    (tmp_path / "second").symlink_to(tmp_path / "large disk")
    _checkpoint(tmp_path / "second")
    files.own_folder(tmp_path / "second")


# --- folders that others may write ------------------------------------------------------------------------------


@dataclass
class Group:
    gr_name: str
    gr_mem: list[str]


@pytest.mark.parametrize(
    ("mode", "group", "found"),
    [
        (0o700, Group("staff", ["bob"]), None),
        (0o755, Group("staff", ["bob"]), None),
        (0o777, Group("ann", []), "all users of this machine can write to it"),
        (0o1777, Group("ann", []), "all users of this machine can write to it"),
        (0o702, Group("ann", []), "all users of this machine can write to it"),
        (0o775, Group("staff", []), "all members of group 'staff' can write to it"),
        (0o2775, Group("staff", ["ann"]), "all members of group 'staff' can write to it"),
        (0o775, Group("ann", ["ann", "bob"]), "all members of group 'ann' can write to it"),
        (0o775, Group("ann", []), None),  # a group of its own: umask 002
        (0o775, Group("ann", ["ann"]), None),
    ],
)
def test_a_node_refuses_a_folder_that_others_may_write(
    mode: int, group: Group, found: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_user_name", lambda _: "ann")
    monkeypatch.setattr("grp.getgrgid", lambda _: group)
    folder = tmp_path / "node"
    folder.mkdir()
    folder.chmod(mode)
    if found is None:
        files.own_folder(folder)
        return
    with pytest.raises(StorageError) as error:
        files.own_folder(folder)
    assert str(error.value.must) == f"Only its owner may be able to write to {folder}."
    assert error.value.found == found
    assert error.value.do.startswith("chmod g")


def test_a_node_refuses_a_folder_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files.own_folder(tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    real = Path.stat
    if os.stat(tmp_path).st_uid == 0:  # a folder of root is nobody else's; so it has another owner here
        monkeypatch.setattr(os, "geteuid", lambda: 1)
        monkeypatch.setattr(Path, "stat", lambda path: os.stat_result((0o40700, *real(path)[1:4], 2, *real(path)[5:])))
    with pytest.raises(StorageError, match="it belongs to "):
        files.own_folder(tmp_path)


def test_folders_that_nodes_make_are_their_own_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        files.own_folder(tmp_path / "agent")
        files.own_folder(tmp_path / "hub", 0o755)
    finally:
        os.umask(before)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("agent", "hub")] == [0o700, 0o755]
