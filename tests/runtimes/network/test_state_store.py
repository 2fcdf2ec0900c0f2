"""The last states of an agent, in memory and on disk."""

from __future__ import annotations

from pathlib import Path

from codistill.runtimes.network.state_store import StateStore


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


def test_rounds_that_have_not_counted_are_forgotten_on_disk_too(tmp_path: Path) -> None:
    store = StateStore(tmp_path)
    store.put(3, b"three", store=True)
    store.put(4, b"four", store=True)
    store.forget_after(3)
    assert StateStore(tmp_path).newest(10) == (3, b"three")


def test_a_damaged_state_is_not_used_and_named(tmp_path: Path) -> None:
    store = StateStore(tmp_path)
    store.put(1, b"one", store=True)
    store.put(2, b"two", store=True)
    path = tmp_path / "state-000002"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    again = StateStore(tmp_path)
    assert again.newest(5) == (1, b"one")
    assert again.notes == [f"{path} is damaged and is not used"]


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
