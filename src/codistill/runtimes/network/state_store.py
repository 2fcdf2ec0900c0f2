"""The last states of an agent, in memory and on its own disk."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from codistill.files import write_atomically, writing

_KEPT = 2  # states: the hub may have counted one round less than this agent
_DIGEST = 32


class StateStore:
    """States of one agent in one run, by rounds done. No other node reads them."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._states: dict[int, bytes] = {}
        self._stored: set[int] = set()
        self._checkpoints: list[int] = [0]  # rounds that the hub may go back to, stored on disk here or not
        self.notes: list[str] = []
        if folder is not None and folder.is_dir():
            for path in folder.glob("state-*"):
                found = re.fullmatch(r"state-(\d{6,})", path.name)
                data = self._read(path) if found else None
                if found and data is not None:
                    self._states[int(found[1])] = data
                    self._stored.add(int(found[1]))
        self._checkpoints = sorted({0, *self._stored})[-_KEPT:]

    def _read(self, path: Path) -> bytes | None:
        data = path.read_bytes()
        if hashlib.sha256(data[_DIGEST:]).digest() == data[:_DIGEST]:
            return data[_DIGEST:]
        self.notes.append(f"{path} is damaged and is not used")
        return None

    def put(self, done: int, state: bytes, *, store: bool) -> None:
        """Keep a state in memory and, if `store`, on disk; raises `StorageError` if the disk fails."""
        self._states[done] = state
        if store:
            self._checkpoints = [*(each for each in self._checkpoints if each != done), done][-_KEPT:]
        for old in sorted(self._states)[:-_KEPT]:
            if old not in self._checkpoints and old not in self._stored:
                del self._states[old]
        if store and self._folder is not None:
            with writing(self._folder):
                self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_atomically(self._path(done), hashlib.sha256(state).digest() + state)
            self._stored.add(done)
            for old in sorted(self._stored)[:-_KEPT]:
                self._path(old).unlink(missing_ok=True)
                self._stored.discard(old)

    def store_newest(self) -> None:
        """Store the newest state on disk, if it is not there yet."""
        if self._states and (newest := max(self._states)) not in self._stored:
            self.put(newest, self._states[newest], store=True)

    def newest(self, at_most: int) -> tuple[int, bytes] | None:
        """The newest state of at most this many rounds, and its number of rounds."""
        fitting = [done for done in self._states if done <= at_most]
        return (max(fitting), self._states[max(fitting)]) if fitting else None

    def forget_after(self, done: int) -> None:
        """Delete the states of rounds after this one: they were not counted."""
        for later in [number for number in self._states if number > done]:
            del self._states[later]
            if later in self._stored:
                self._stored.discard(later)
                self._path(later).unlink(missing_ok=True)

    def _path(self, done: int) -> Path:
        assert self._folder is not None
        return self._folder / f"state-{done:06d}"
