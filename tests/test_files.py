"""Files that are written although descriptors run out."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from codistill import files
from codistill.errors import StorageError

# A process that may have 40 descriptors and uses up all of them, as by connections; a thread closes some later.
SCRIPT = """
    import os, resource, sys, threading, time
    from pathlib import Path
    from codistill.files import lock, write_atomically
    from codistill.results.records import RoundEnded
    from codistill.runtimes.store import RunFolder

    folder = Path(sys.argv[1])
    store = RunFolder(folder)
    store.open(resume=False)
    row = {"round": 1, "agent": "a", "present": True, "sent": 0, "received": 0}
    resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
    taken = []

    def exhaust():
        while True:
            try:
                taken.append(os.open("/dev/null", os.O_RDONLY))
            except OSError:
                return

    def free():
        time.sleep(0.3)
        while taken:
            os.close(taken.pop())

    began = time.monotonic()
    for act in (
        lambda: store.round_ended(RoundEnded(1, [row], ["event"], 0.1)),
        lambda: store.write_checkpoint(1, {"hub": b"state"}),
        lambda: write_atomically(folder / "health.json", b"{}"),
    ):
        exhaust()
        thread = threading.Thread(target=free)
        thread.start()
        act()
        thread.join()
    assert time.monotonic() - began > 0.8
    print(*sorted(path.name for path in folder.iterdir()), (folder / "metrics.jsonl").read_text())
"""


def test_what_must_be_written_waits_for_a_free_descriptor(tmp_path: Path) -> None:
    script = [sys.executable, "-c", textwrap.dedent(SCRIPT), str(tmp_path)]
    done = subprocess.run(script, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "checkpoints health.json log.txt metrics.jsonl times.jsonl" in done.stdout
    assert '"agent": "a"' in done.stdout
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["round-000001.state"]


def test_the_wait_for_a_descriptor_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_PATIENCE", 0.0)

    def full(*_: object) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(files.os, "open", full)
    with pytest.raises(StorageError, match="Too many open files"):
        files.write_atomically(tmp_path / "x", b"")
