"""Processes that end with the process that has forked them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.tree import DecisionTreeClassifier

import codistill as cd
from codistill.runtimes.workers import ForkedProcess


def in_a_process(work: Callable[[], Any]) -> BaseProcess:
    process = multiprocessing.get_context("fork").Process(target=work)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about forking with several threads
        process.start()
    return process


def kill(process: BaseProcess) -> None:
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()


def is_alive(pid: int) -> bool:
    """Whether a process, not of our own, still runs: a zombie that nobody has fetched does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(true: Callable[[], Any], seconds: float) -> float:
    began = time.monotonic()
    while not true():
        assert time.monotonic() - began < seconds, "it did not happen in time"
        time.sleep(0.002)
    return time.monotonic() - began


class Slow(DecisionTreeClassifier):  # type: ignore[misc]
    """Notes its process, and then does not hear anything for a while."""

    folder = Path()

    def fit(self, x: Any, y: Any, sample_weight: Any = None) -> Any:
        if (self.folder / "slow").exists():
            (self.folder / f"worker-{os.getpid()}").touch()
            time.sleep(30)
        return super().fit(x, y, sample_weight)


def federation() -> cd.Federation:
    x = np.random.default_rng(0).normal(size=(20, 2)).astype("float32")
    agents = [cd.Agent(name, Slow(), x, (x[:, 0] > 0).astype(int)) for name in ("a", "b")]
    return cd.Federation(agents, cd.FedMD(), public=x)


def run(folder: Path, runtime: str, **more: Any) -> cd.Result:
    return federation().run(1, runtime=runtime, folder=folder / "run", alone=False, progress=False, **more)


@pytest.mark.parametrize("by", ["main thread", "another thread"])
def test_a_killed_run_leaves_no_worker_behind_and_is_resumed_at_once(
    by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Slow, "folder", tmp_path)
    (tmp_path / "slow").touch()

    def owner() -> None:
        if by == "main thread":
            run(tmp_path, "processes", workers=2)
        else:
            thread = threading.Thread(target=run, args=(tmp_path, "processes"), kwargs={"workers": 2})
            thread.start()
            thread.join()

    process = in_a_process(owner)
    until(lambda: len(list(tmp_path.glob("worker-*"))) == 2, 20)
    kill(process)
    workers = [int(path.name.partition("-")[2]) for path in tmp_path.glob("worker-*")]
    # The kernel ends them; where the thread that has forked them could end before its process, they look themselves.
    until(lambda: not any(map(is_alive, workers)), 0.2 if by == "main thread" else 2)
    (tmp_path / "slow").unlink()
    assert not run(tmp_path, "simulation", resume=True).interrupted


def test_a_process_forked_by_a_thread_outlives_the_thread() -> None:
    forked: list[ForkedProcess] = []
    gate = multiprocessing.get_context("fork").Event()
    thread = threading.Thread(
        target=lambda: forked.append(ForkedProcess("x", lambda channel, stop: (gate.wait(10), channel.send(well=True))))  # type: ignore[func-returns-value]
    )
    thread.start()
    thread.join()
    time.sleep(0.3)
    assert forked[0].is_alive
    gate.set()
    assert forked[0].receive() == {"well": True}
    forked[0].end()


def test_a_process_whose_parent_has_ended_before_it_started_ends(tmp_path: Path) -> None:
    from codistill.runtimes.workers import Parent

    orphan = in_a_process(lambda: (Parent(1 << 30, True).end_with(), (tmp_path / "went on").touch()))
    orphan.join(10)
    assert orphan.exitcode == 1
    assert not (tmp_path / "went on").exists()
