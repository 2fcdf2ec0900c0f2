"""The last states of an agent, in memory and on disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from codistill.core.errors import StorageError
from codistill.network.state_store import StateStore, read_state, states_aside


def test_the_newest_two_are_on_disk_and_found_again(tmp_path: Path) -> None:
    store = StateStore(tmp_path / "run")
    for done in range(5):
        store.put(done, f"state {done}".encode(), store=True)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["state-000003", "state-000004"]
    again = StateStore(tmp_path / "run")
    assert again.newest(10) == (4, b"state 4")
    assert again.newest(3) == (3, b"state 3")
    assert again.newest(2) is None
    assert (tmp_path / "run").stat().st_mode & 0o077 == 0


def test_rounds_that_have_not_counted_are_set_aside_and_not_deleted(tmp_path: Path) -> None:
    store = StateStore(tmp_path / "run")
    store.put(3, b"three", store=True)
    store.put(4, b"four", store=True)
    store.put(5, b"five", store=False)
    store.return_to(3)
    assert StateStore(tmp_path / "run").newest(10) == (3, b"three")
    assert [(each.done, each.back_to, read_state(each.path)) for each in states_aside(tmp_path / "run")] == [
        (4, 3, b"four"),
        (5, 3, b"five"),
    ]
    note = "the hub has counted 3 rounds: the state of round 4, 5 is set aside; to begin with it: "
    assert store.take_notes() == [f"{note}codistill restore {tmp_path} --round 5"]
    assert store.take_notes() == []


def test_equal_states_are_set_aside_once_and_those_of_lost_rounds_are_bounded(tmp_path: Path) -> None:
    store = StateStore(tmp_path)
    for number in range(40):
        store.put(50, b"fifty", store=True)
        store.put(51, f"attempt {number // 2}".encode(), store=True)
        store.return_to(50)
    aside = states_aside(tmp_path)
    assert [read_state(each.path) for each in aside] == [f"attempt {number}".encode() for number in range(20)]
    store.put(52, b"later", store=True)
    store.return_to(50)
    kept = [read_state(each.path) for each in states_aside(tmp_path)]
    assert kept == [*(f"attempt {number}".encode() for number in range(12, 20)), b"later"]  # and the most rounds


def test_a_hub_that_goes_back_far_again_and_again_deletes_nothing(tmp_path: Path) -> None:
    store = StateStore(tmp_path)
    for number in range(16):
        store.put(60, f"model {number}".encode(), store=True)
        store.return_to(0)
    store.put(60, b"one more", store=True)
    with pytest.raises(StorageError, match="16 states, each of which lost more than 2 rounds"):
        store.return_to(0)
    assert len(states_aside(tmp_path)) == 16
    assert StateStore(tmp_path).newest(60) == (60, b"one more")


def test_a_stored_round_is_not_overwritten_by_another_state_of_it(tmp_path: Path) -> None:
    store = StateStore(tmp_path)
    store.put(7, b"good", store=True)
    store.put(7, b"good", store=True)
    assert states_aside(tmp_path) == []
    store.put(7, b"bad", store=True)
    assert [read_state(each.path) for each in states_aside(tmp_path)] == [b"good"]
    assert StateStore(tmp_path).newest(7) == (7, b"bad")


def test_a_disk_that_fails_does_not_end_an_agent_that_continues_from_memory(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file where the folder should be")
    store = StateStore(tmp_path / "run")
    store.put(1, b"one", store=False)
    store.put(2, b"two", store=False)
    store.return_to(1)
    assert store.newest(5) == (1, b"one")
    assert "the state of round 2 could not be stored before: a file where a folder is expected" in store.take_notes()


def test_a_damaged_state_is_not_used_and_named(tmp_path: Path) -> None:
    store = StateStore(tmp_path)
    store.put(1, b"one", store=True)
    store.put(2, b"two", store=True)
    path = tmp_path / "state-000002"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    again = StateStore(tmp_path)
    assert again.newest(5) == (1, b"one")
    assert again.take_notes() == [f"{path} is damaged and is not used"]


def test_without_a_checkpoint_the_beginning_stays_at_hand() -> None:
    store = StateStore(None)
    for done in range(6):
        store.put(done, f"state {done}".encode(), store=False)
    assert store.newest(5) == (5, b"state 5")
    assert store.newest(3) == (0, b"state 0")  # where a hub without a checkpoint begins again


def test_what_was_kept_in_memory_can_be_stored_later(tmp_path: Path) -> None:
    store = StateStore(tmp_path / "run")
    store.put(7, b"seven", store=False)
    assert not (tmp_path / "run").exists()
    store.store_newest()
    assert StateStore(tmp_path / "run").newest(7) == (7, b"seven")
