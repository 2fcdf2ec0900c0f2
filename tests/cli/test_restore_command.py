"""A hub that has lost its checkpoint, and the command by which an agent begins with what it had learnt."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.network.fakes import Centre, Life, Net, describe

from codistill.cli import main
from codistill.core.errors import CheckpointError
from codistill.core.files import locked
from codistill.network.state_store import START, StateStore, find_states, read_state
from codistill.wire.state import pack, unpack

NAMES = ("a", "b")


def _until(true: Callable[[], Any]) -> None:
    end = time.monotonic() + 15
    while not true():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.005)


def _start(net: Net, rounds: int, folder: Path) -> dict[str, Life]:
    return {name: Life(net, name, describe(NAMES, rounds), folder / name) for name in NAMES}


def test_a_hub_without_its_checkpoint_makes_nobody_lose_a_state_and_restore_brings_it_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    net, whole = Net(), describe(NAMES, 9)
    lives = _start(net, 9, tmp_path)
    first = Centre(net, whole)
    first.rounds(0, 5)
    first.runtime.save()
    learnt = {state.done: read_state(state.path) for state in find_states(tmp_path / "a")}
    assert sorted(learnt) == [4, 5]
    first.wire.kill()
    _until(lambda: all(any("hub disconnected" in text for text in life.told) for life in lives.values()))
    second = Centre(net, whole)  # the same run, and no checkpoint
    _until(lambda: (second.runtime.pump(0.01), not any(life.is_alive() for life in lives.values()))[1])
    assert "all states of this agent are newer" in lives["a"].end().found
    assert any(f"codistill restore {tmp_path / 'a'} --round 5" in text for text in lives["a"].told)
    lives = _start(net, 9, tmp_path)
    second.rounds(0, 3)
    second.runtime.save()
    second.wire.kill()
    for life in lives.values():
        life.wire.kill()
        life.end()
    on_disk = {state.done: read_state(state.path) for state in find_states(tmp_path / "a") if state.back_to is not None}
    assert learnt.items() <= on_disk.items()

    assert main(["restore", str(tmp_path / "a")]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert {line.split()[1] for line in listed} == {"2", "3", "4", "5"}
    assert main(["restore", str(tmp_path / "a"), "--round", "5"]) == 0
    assert "The agent begins with this state when it joins next" in capsys.readouterr().out
    lives = _start(net, 9, tmp_path)
    third = Centre(net, whole, done=3)
    third.rounds(3, 4)
    third.runtime.save()
    third.finish()
    assert [life.end() for life in lives.values()] == [True, True]
    assert "joined run run1 after 3 rounds, with the state that was restored" in lives["a"].told
    assert "joined run run1 after 3 rounds, with the state of round 3" in lives["b"].told
    # 4 + t from each of the two agents: the five rounds that it had learnt, and the fourth with the third hub.
    assert unpack(learnt[5] or b"")["state"]["sums"] == [8.0, 10.0, 12.0, 14.0, 16.0]
    assert list(lives["a"].agent.state["sums"]) == [8.0, 10.0, 12.0, 14.0, 16.0, 14.0]
    assert list(lives["b"].agent.state["sums"]) == [8.0, 10.0, 12.0, 14.0]
    assert {2, 3, 4, 5} <= {state.done for state in find_states(tmp_path / "a")}  # nothing is lost by it
    assert not (tmp_path / "a" / START).exists()


def test_a_restored_state_is_equal_to_the_bit_and_serves_another_run_too(tmp_path: Path) -> None:
    StateStore(tmp_path / "run1").put(8, b"learnt", store=True)
    assert main(["restore", str(tmp_path), "--round", "8", "--run", "run1", "--time", "20"]) == 0
    fresh = StateStore(tmp_path / "run2")
    assert fresh.begin_with(tmp_path / START)
    assert fresh.newest(0) == (0, b"learnt")
    assert StateStore(tmp_path / "run2").restored
    assert not StateStore(tmp_path / "run2").begin_with(tmp_path / START)


def test_a_state_of_another_model_is_refused_with_an_error(tmp_path: Path) -> None:
    StateStore(tmp_path / "old").put(8, pack({"learner": "of another kind"}), store=True)
    assert main(["restore", str(tmp_path), "--round", "8"]) == 0
    net, whole = Net(), describe(("a",), 1)
    centre, life = Centre(net, whole), Life(net, "a", whole, tmp_path)
    _until(lambda: (centre.runtime.pump(0.01), not life.is_alive())[1])
    assert isinstance(life.end(), CheckpointError)
    assert {state.done for state in find_states(tmp_path)} == {0, 8}


def test_what_cannot_be_restored_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["restore", str(tmp_path / "nowhere")]) == 6
    assert "no such folder" in capsys.readouterr().err
    assert main(["restore", str(tmp_path)]) == 6
    assert "no states of it" in capsys.readouterr().err
    StateStore(tmp_path / "run1").put(8, b"learnt", store=True)
    assert main(["restore", str(tmp_path), "--round", "7"]) == 6
    assert "none of round 7" in capsys.readouterr().err
    path = tmp_path / "run1" / "state-000008"
    path.write_bytes(path.read_bytes()[:-1])
    assert main(["restore", str(tmp_path), "--round", "8"]) == 6
    assert "it is damaged" in capsys.readouterr().err
    assert not (tmp_path / START).exists()


def test_a_state_is_not_restored_while_the_agent_takes_part(tmp_path: Path) -> None:
    """A POSIX lock is not held against its own process, so that another one tries it."""
    import subprocess
    import sys

    StateStore(tmp_path / "run1").put(8, b"learnt", store=True)
    with locked(tmp_path):
        command = [sys.executable, "-m", "codistill", "restore", str(tmp_path), "--round", "8"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 7
    assert "another run is using it" in done.stderr
