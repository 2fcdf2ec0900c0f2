"""The last states of an agent, in memory and on its own disk.

A state leaves the disk only when later rounds of the run have been stored. A state of a round that the hub does not
count is set aside, and `codistill restore` brings it back: no hub can make an agent delete what it has learnt.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from codistill.core.errors import StorageError
from codistill.core.files import subfolder, write_atomically, writing

ASIDE = "aside"  # in the folder of a run: states that the hub does not count
START = "start-state"  # in the folder of an agent: the state with which it begins when it joins next
_KEPT = 2  # states: the hub may have counted one round less than this agent
_BRIEF = 8  # states set aside that lost at most `_KEPT` rounds; older ones are removed
_LONG = 16  # states set aside that lost more; they are never removed, and there may not be more
_DIGEST = 32
_TIME = "%Y%m%dT%H%M%S.%fZ"
_NAME = re.compile(r"state-(\d{6,})")
_ASIDE_NAME = re.compile(r"state-(\d{6,})-back-to-(\d{6,})-(\d{8}T\d{6}\.\d{6}Z)")


class StateStore:
    """States of one agent in one run, by rounds done. No other node reads them."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._states: dict[int, bytes] = {}
        self._stored: set[int] = set()
        self._notes: list[str] = []  # for the operator
        if folder is not None and folder.is_dir():
            for path in folder.glob("state-*"):
                found = _NAME.fullmatch(path.name)
                data = read_state(path) if found else None
                if found and data is None:
                    self._notes.append(f"{path} is damaged and is not used")
                elif found and data is not None:
                    self._states[int(found[1])] = data
                    self._stored.add(int(found[1]))
        self._checkpoints = sorted({0, *self._stored})[-_KEPT:]  # rounds that the hub may go back to, on disk or not

    def put(self, done: int, state: bytes, *, store: bool) -> None:
        """Keep a state in memory and, if `store`, on disk; raises `StorageError` if the disk fails."""
        if done in self._stored and self._states[done] != state:
            self._set_aside(done, back_to=0)  # another state of a counted round: no honest run has one
        self._states[done] = state
        if store:
            self._checkpoints = [*(each for each in self._checkpoints if each != done), done][-_KEPT:]
        for old in sorted(self._states)[:-_KEPT]:
            if old not in self._checkpoints and old not in self._stored:
                del self._states[old]
        if store and self._folder is not None:
            subfolder(self._folder, mode=0o700)
            write_state(self._path(done), state)
            self._stored.add(done)
            for old in sorted(self._stored)[:-_KEPT]:
                self._path(old).unlink(missing_ok=True)
                self._stored.discard(old)

    def store_newest(self) -> None:
        if self._states and (newest := max(self._states)) not in self._stored:
            self.put(newest, self._states[newest], store=True)

    def take_notes(self) -> list[str]:
        notes, self._notes = self._notes, []
        return notes

    def newest(self, at_most: int) -> tuple[int, bytes] | None:
        """The newest state of at most this many rounds, and its number of rounds."""
        return max(((done, state) for done, state in self._states.items() if done <= at_most), default=None)

    def begin_with(self, start: Path) -> bool:
        """Start the run with the state in a file, if there is one: all others are set aside."""
        if self._folder is None or not start.exists():
            return False
        state = read_state(start)
        if state is None:
            raise StorageError(f"{start} is corrupted.", "its digest does not match", "Repeat 'codistill restore'.")
        for done in sorted(self._states):
            self._set_aside(done, back_to=0)
        self.put(0, state, store=True)
        with writing(start):
            start.unlink()
        return True

    @property
    def restored(self) -> bool:
        """Whether the run started with a restored state."""
        return 0 in self._stored

    def return_to(self, done: int) -> None:
        """Set the states of later rounds aside: they are not counted."""
        found = self.newest(done)
        later = sorted(number for number in self._states if number > done)
        for number in later:
            self._set_aside(number, back_to=0 if found is None else found[0])
        if later and self._folder is not None:
            rounds = ", ".join(map(str, later))
            self._notes.append(
                f"the hub has counted {done} rounds: the state of round {rounds} is set aside; to begin with it: "
                f"codistill restore {self._folder.parent} --round {later[-1]}"
            )

    # --- states that are set aside ------------------------------------------------------------------

    def _set_aside(self, done: int, *, back_to: int) -> None:
        """Keep a state in the folder for those that do not count, also one that was in memory only."""
        if self._folder is not None:
            folder, state = self._folder / ASIDE, self._states[done]
            aside = states_aside(self._folder)
            if any(each.done == done and read_state(each.path) == state for each in aside):
                self._path(done).unlink(missing_ok=True)  # it is stored there already
            else:
                long = sum(each.lost > _KEPT for each in aside)
                if done - back_to > _KEPT and long >= _LONG:
                    raise StorageError(
                        f"{folder} must have room for states that are no longer counted.",
                        f"{long} states, each of which lost more than {_KEPT} rounds",
                        "Ask the operator of the hub why it keeps going back. Move the states that you need to another "
                        "folder, remove the others, and join again.",
                    )
                path = folder / f"state-{done:06d}-back-to-{back_to:06d}-{datetime.now(UTC):{_TIME}}"
                try:
                    subfolder(folder, mode=0o700)
                    with writing(folder):
                        if done in self._stored:
                            self._path(done).replace(path)  # needs no space on the disk
                        else:
                            write_state(path, state)
                    # The oldest of those that lost at most a few rounds go, never the one with the most rounds.
                    aside = states_aside(self._folder)
                    most = max(each.done for each in aside)
                    for each in [each for each in aside if each.lost <= _KEPT and each.done < most][:-_BRIEF]:
                        each.path.unlink(missing_ok=True)
                except StorageError as error:
                    if done in self._stored:
                        raise
                    self._notes.append(f"the state of round {done} could not be stored before: {error.found}")
        self._stored.discard(done)
        del self._states[done]

    def _path(self, done: int) -> Path:
        assert self._folder is not None
        return self._folder / f"state-{done:06d}"


@dataclass(frozen=True)
class StateFile:
    """A state on disk; `back_to`: the round at which the agent went on when it was set aside, None if it is in use."""

    path: Path
    run: str
    done: int
    time: str  # UTC, as 20261117T010203.000000Z
    back_to: int | None = None

    @property
    def lost(self) -> int:
        """Rounds that the agent went back by."""
        return 0 if self.back_to is None else self.done - self.back_to


def states_aside(folder: Path) -> list[StateFile]:
    """The states that are set aside in the folder of a run, the oldest first."""
    found = [(path, _ASIDE_NAME.fullmatch(path.name)) for path in (folder / ASIDE).glob("state-*")]
    files = [StateFile(path, folder.name, int(name[1]), name[3], int(name[2])) for path, name in found if name]
    return sorted(files, key=lambda each: (each.time, each.done))


def find_states(folder: Path) -> Iterator[StateFile]:
    for run in sorted(path for path in folder.iterdir() if path.is_dir()):
        for path in sorted(run.glob("state-*")):
            if name := _NAME.fullmatch(path.name):
                written = datetime.fromtimestamp(path.stat().st_mtime, UTC)
                yield StateFile(path, run.name, int(name[1]), f"{written:{_TIME}}")
        yield from states_aside(run)


def write_state(path: Path, state: bytes) -> None:
    """Write a state with its digest."""
    write_atomically(path, hashlib.sha256(state).digest() + state)


def read_state(path: Path) -> bytes | None:
    """A state as it was written; None if it is damaged or cannot be read."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    return data[_DIGEST:] if hashlib.sha256(data[_DIGEST:]).digest() == data[:_DIGEST] else None
