"""Files that are written although descriptors run out."""

from __future__ import annotations

import multiprocessing
import os
import resource
import threading
import time
import warnings
from pathlib import Path

import pytest

from codistill import files
from codistill.errors import StorageError
from codistill.results.records import RoundEnded
from codistill.runtimes.store import RunFolder


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
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks that copy only one thread
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
