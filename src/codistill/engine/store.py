"""A run's folder: metrics, log and checkpoints, written so that a kill at any moment loses nothing.

At the end of a round the metrics are appended first, then the checkpoint is put in place by one atomic
rename. It records how long the other files were, so a resumed run cuts them back to that moment and
goes on as if it had never been killed. Times are kept apart from metrics: metrics are equal to the bit.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from codistill.core import files
from codistill.core.errors import CheckpointError, MessageError, RecipeError
from codistill.core.files import LOCK, cut_file, lock, subfolder, write_atomically, writing
from codistill.core.settings import LARGEST
from codistill.core.text import parse_json
from codistill.results.outputs import FeatureSpace, Outputs
from codistill.results.records import RoundEnded, Row
from codistill.wire.state import pack, unpack

METRICS, TIMES, LOG = "metrics.jsonl", "times.jsonl", "log.txt"
BASELINE = "alone"  # in a run's folder: that of the agents alone
OUTPUTS = "outputs.safetensors"
FEATURES = "features-{:06d}.safetensors"  # after a round
_FILES = (METRICS, TIMES, LOG)
_FLAGS = ("present", "lies")
_COUNTED = ("round", "sent", "received", "steps", "exchanges", "test_samples", "time")
_SHARES = ("accuracy", "own_accuracy", "validation_accuracy")
_LARGEST_FIGURE = 1e150  # finite; sums of squares of such figures are so, too
_KEPT = 2  # the newest checkpoint, and the one before in case the newest cannot be read
DIGEST = 32  # bytes of the SHA-256 with which a file of state begins
_MANY_FILES = 500  # from here on, to sync the whole system is faster than to sync each
_Kept = TypeVar("_Kept")


class RunFolder:
    """An observer that keeps a run in its folder; and the checkpoints from which it goes on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._checkpoints = folder / "checkpoints"
        self._synced: set[Path] = set()  # states of agents that are on the disk
        self.notes: list[str] = []  # about damaged checkpoints, for the person who resumes
        subfolder(self._checkpoints)
        with writing(folder):
            self._lock = lock(folder)

    def open(self, *, resume: bool) -> None:
        """Open the run's files; a new run must find none, so that it overwrites nothing."""
        there = [name for name in _FILES if (self.folder / name).exists()] + [path.name for path in self._found()]
        if there and not resume:
            raise occupied(self.folder, there[0])
        with writing(self.folder):
            for name in _FILES:
                os.close(files.open_patiently(self.folder / name, os.O_WRONLY | os.O_CREAT))

    def round_ended(self, record: RoundEnded) -> None:
        if record.outputs is not None:  # before the metrics: whose last round is there, has these too
            write_atomically(self.folder / OUTPUTS, record.outputs.encode())
        if record.features is not None:  # likewise
            write_atomically(self.folder / FEATURES.format(record.round), record.features.encode())
        self._append(METRICS, _lines(record.rows))
        self._append(TIMES, json.dumps({"round": record.round, "seconds": round(record.seconds, 6)}) + "\n")
        self._append(LOG, "".join(event + "\n" for event in record.events))

    def write_baseline(self, rows: Sequence[Row]) -> None:
        subfolder(self.folder / BASELINE)
        write_atomically(self.folder / BASELINE / METRICS, _lines(rows).encode())

    def baseline_rows(self) -> list[Row] | None:
        path = self.folder / BASELINE / METRICS
        return read_rows(path) if path.exists() else None

    def _append(self, name: str, text: str) -> None:
        path = self.folder / name
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        with writing(path), open(files.open_patiently(path, flags), "ab", buffering=0) as file:
            size = file.tell()
            try:
                files.write_all(file, text.encode())
            except BaseException:
                file.truncate(size)  # nothing half-written
                raise

    def write_checkpoint(self, done: int, saved: Saved) -> None:
        stored = {name: state for name, state in saved.items() if isinstance(state, StoredState)}
        self._sync({state.path for state in stored.values()})
        sizes = {name: (self.folder / name).stat().st_size for name in _FILES}
        content = {"round": done, "sizes": sizes, "nodes": {k: v for k, v in saved.items() if k not in stored}}
        if stored:
            content["states"] = {name: [state.path.name, state.size] for name, state in stored.items()}
        write_body(self._checkpoints / f"round-{done:06d}.state", content)
        for old in self._found()[:-_KEPT]:
            old.unlink(missing_ok=True)
        if stored:
            self._remove_states()

    def _sync(self, paths: set[Path]) -> None:
        """Bring the states of agents that have worked since the last checkpoint to the disk."""
        new = sorted(paths - self._synced)
        if len(new) > _MANY_FILES:
            os.sync()
        for path in new if len(new) <= _MANY_FILES else []:
            with writing(path), path.open("rb") as file:
                os.fsync(file.fileno())
        if new:
            files.sync_folder(new[0].parent)
        self._synced = paths

    def _remove_states(self) -> None:
        named: set[str] = set()
        for path in self._found():
            with suppress(CheckpointError):  # what is damaged is not resumed from
                named |= {file for file, _ in read_body(path, "a checkpoint").get("states", {}).values()}
        for path in (self.folder / STATES).iterdir():
            if path.name not in named:
                path.unlink(missing_ok=True)

    def _found(self) -> list[Path]:
        return files.patiently(lambda: sorted(self._checkpoints.glob("round-*.state")))

    def latest(self, wanted: Collection[str] | None = None) -> tuple[int, Saved | None, list[Row]]:
        """Rounds done, what was saved, and the rows up to there; cuts the files back to that moment.

        `wanted`: the nodes that go on. What each of them has kept must be readable; if a checkpoint holds others than
        these, one before it that holds these is used, if there is any.
        """
        with writing(self._checkpoints):
            for path in self._checkpoints.glob("*.part"):
                path.unlink()
        found, of_others = self._found(), None
        for path in reversed(found):
            try:
                content = _checked(path, wanted is not None)
            except CheckpointError as error:
                self.notes.append(f"The checkpoint {path} cannot be used: {error.found}.")
                continue
            if wanted is not None and content["nodes"].keys() != set(wanted):
                of_others = of_others or content
                self.notes.append(f"The checkpoint {path} cannot be used: it is of other agents.")
                continue
            if self.notes:
                self.notes.append(f"Going on from {path.name}, the one before.")
            return self._cut_back(content)
        if of_others is not None:
            self.notes.clear()  # whoever goes on says that these are others
            return self._cut_back(of_others)
        if found:
            raise CheckpointError(
                f"A checkpoint of {self.folder} must be readable.",
                f"{len(found)} damaged: {', '.join(path.name for path in found)}",
                "Start the run again with 'codistill run', in another folder.",
            )
        with writing(self.folder):
            for name in _FILES:  # metrics of rounds after which no checkpoint was reached
                cut_file(self.folder / name, 0)
        return 0, None, []

    def _cut_back(self, content: dict[str, Any]) -> tuple[int, Saved, list[Row]]:
        for name, size in content["sizes"].items():
            path = self.folder / name
            if not path.exists() or path.stat().st_size < size:
                raise CheckpointError(
                    f"{path} must hold what it held at the checkpoint.",
                    "it is missing or shorter",
                    "Restore the file, or start the run again with 'codistill run', in another folder.",
                )
            with writing(path):
                cut_file(path, size)
        return content["round"], content["nodes"], read_rows(self.folder / METRICS)

    def close(self) -> None:
        """Let others use the folder."""
        self._lock.close()


def _lines(rows: Sequence[Row]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def occupied(folder: Path, by: str) -> RecipeError:
    return RecipeError(
        "A new run needs a folder of its own.",
        f"{folder} already holds {by}",
        f"If it is a run, go on with it: codistill resume {folder} (in Python: resume=True); or choose another folder.",
    )


def check_vacant(folder: Path) -> None:
    """A new run needs an empty folder; what an attempt that was killed at once left behind does not count."""
    with writing(folder):
        held = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    held = [name for name in held if name != LOCK and not name.endswith(".part")]
    if held:
        raise occupied(folder, held[0])


def _checked(path: Path, unpacked: bool) -> dict[str, Any]:
    """A checkpoint with the states of all nodes; with `unpacked`, each of those that it holds itself can be read."""
    content = read_body(path, "a checkpoint")
    nodes = nodes_in(content, path)
    if not content["sizes"].keys() <= set(_FILES):  # files that are cut back to these sizes
        raise CheckpointError("The checkpoint is corrupted.", "sizes of other files", "Use an earlier one.")
    for state in nodes.values() if unpacked else ():
        if isinstance(state, bytes):
            unpack(state)
    return {**content, "nodes": nodes}


def whole_lines(path: Path) -> list[str]:
    """All lines that end as lines do."""
    return path.read_text("utf-8").rpartition("\n")[0].splitlines()


def read_rows(path: Path) -> list[Row]:
    """The rows of a metrics file; a last line that was cut off by a kill does not count."""
    try:
        rows = [parse_json(line) for line in whole_lines(path)]
        for row in rows:
            _check_row(row)
        return rows
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} must be a metrics file.", f"{type(error).__name__}: {error}"[:200], "Check the run's folder."
        ) from None


def _check_row(row: Any) -> None:
    if not isinstance(row, dict) or not {"round", "agent", "present", "sent", "received"} <= row.keys():
        raise ValueError(f"a row without what every row has: {row}")
    if not isinstance(row["agent"], str) or not all(isinstance(row.get(key, False), bool) for key in _FLAGS):
        raise ValueError(f"a row whose agent is not a name, or whose {' or '.join(_FLAGS)} is not true or false: {row}")
    for key, value in row.items():
        if key == "agent" or key in _FLAGS:
            continue
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ValueError(f"'{key}' is not a number: {row}")
        share = key in _SHARES and not math.isnan(value)
        lowest, highest = (0, 1) if share else (0, LARGEST) if key in _COUNTED else (-_LARGEST_FIGURE, _LARGEST_FIGURE)
        if not lowest <= value <= highest and (share or key in _COUNTED or math.isfinite(value)):
            raise ValueError(f"'{key}' is out of range: {row}")
    if not isinstance(row["round"], int):
        raise ValueError(f"'round' is not an integer: {row}")


def read_outputs(folder: Path, done: int) -> Outputs | None:
    """The answers of a run's agents after `done` rounds, if they were kept."""
    outputs = _read_kept(folder / OUTPUTS, Outputs.decode)
    return outputs if outputs is not None and outputs.round == done else None


def read_features(folder: Path, done: int) -> tuple[FeatureSpace, ...]:
    """The features of a run's agents, by round; files of rounds after `done` are left from before a kill."""
    paths = sorted(folder.glob("features-*.safetensors"))
    found = [_read_kept(path, FeatureSpace.decode) for path in paths]
    return tuple(features for features in found if features is not None and features.round <= done)


def _read_kept(path: Path, decode: Callable[[bytes], _Kept]) -> _Kept | None:
    """What a file of a run's folder holds, if it is there."""
    try:
        return decode(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, MessageError) as error:
        found = error.found if isinstance(error, MessageError) else f"{error.strerror}"
        raise CheckpointError(
            f"{path} is corrupted.", found, "Remove it: everything else can be shown without it."
        ) from None


# --- Files of state: 32 bytes, the SHA-256 of the rest, and then a safetensors body (see `codistill.wire.state`).


def read_state(path: str | Path) -> dict[str, Any]:
    """What a checkpoint of a run, a state of an agent, or a saved model holds: arrays, bytes and plain values.

    `path` is such a file, or the folder of a run or of an agent, whose newest file is read. Nothing is built or
    executed: models are what their states are made of. The layout is described in `codistill.engine.store`.
    """
    file = _newest(Path(path)) if Path(path).is_dir() else Path(path)
    content = read_body(file, "a checkpoint or state")
    if isinstance(content, dict) and isinstance(content.get("nodes"), dict):
        nodes = {
            name: content_of(state) if isinstance(state, bytes | StoredState) else state
            for name, state in nodes_in(content, file).items()
        }
        content = {**{key: value for key, value in content.items() if key != "states"}, "nodes": nodes}
    plain: dict[str, Any] = _plain(content if isinstance(content, dict) else {"content": content})
    return plain


def write_body(path: Path, content: Any) -> None:
    """Write a file of state, completely or not at all."""
    body = pack(content)
    write_atomically(path, hashlib.sha256(body).digest() + body)


def read_body(path: Path, what: str) -> Any:
    """The content of a file of state; a `CheckpointError` names the file if it is anything else."""
    data = checked_bytes(path, what)
    try:
        return unpack(data)
    except CheckpointError as error:
        raise CheckpointError(
            f"{path} must be {what} as codistill has written it.", error.found, "Use another copy of the file."
        ) from None


def _newest(folder: Path) -> Path:
    """The newest checkpoint of a run's folder, or the newest state of an agent's folder."""
    of_run = sorted((folder / "checkpoints").glob("round-*.state")) or sorted(folder.glob("round-*.state"))
    of_agent = sorted(folder.glob("state-*")) or sorted(folder.glob("*/state-*"), key=lambda path: path.stat().st_mtime)
    found = of_run or of_agent
    if not found:
        raise CheckpointError(
            f"{folder} must be the folder of a run, or of an agent, with at least one checkpoint.",
            "none there",
            "Name a folder that 'codistill run' or 'codistill join --state' made.",
        )
    return found[-1]


def _plain(node: Any) -> Any:
    if isinstance(node, torch.Tensor):
        return np.asarray(node)
    if isinstance(node, dict):
        return {key: _plain(value) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return type(node)(_plain(item) for item in node)
    return node


# --- States of agents in files of their own, which a checkpoint names instead of holding them.

STATES = "states"  # in a run's folder: the states of agents that are not at work


@dataclass(frozen=True)
class StoredState:
    """The state of an agent in a file."""

    path: Path
    size: int  # in bytes


Saved = Mapping[str, bytes | StoredState]  # what lives across rounds, by node


def content_of(state: bytes | StoredState) -> Any:
    """What was dumped; a `CheckpointError` if it is not as it was written."""
    return unpack(packed(state))


def packed(state: bytes | StoredState) -> bytes:
    """The bytes of a state, read from its file if it is in one."""
    return checked_bytes(state.path, "the state of an agent") if isinstance(state, StoredState) else state


def checked_bytes(path: Path, what: str) -> bytes:
    """The bytes of a file of state that its digest is of."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} must be {what}.", f"{error.strerror}", "Check the path.") from None
    body = data[DIGEST:]
    if not body or hashlib.sha256(body).digest() != data[:DIGEST]:
        raise CheckpointError(
            f"{path} must be {what} as codistill has written it.",
            "its digest does not match: another kind of file, or a damaged one",
            "Check the path, or use another copy of the file.",
        )
    return body


def nodes_in(content: Mapping[str, Any], checkpoint: Path) -> dict[str, bytes | StoredState]:
    """The states of all nodes in a checkpoint that was read from this file; a `CheckpointError` if it is not one.

    A digest says only that the file is as somebody has written it: what is in it must be a checkpoint, too.
    """
    problem = _problem_in(content)
    if problem is not None:
        raise CheckpointError(f"{checkpoint} must be a checkpoint.", problem, "Use an earlier one.")
    folder = checkpoint.parent.parent / STATES
    files = {name: StoredState(folder / file, size) for name, (file, size) in content.get("states", {}).items()}
    for name, stored in files.items():
        if not stored.path.is_file() or stored.path.stat().st_size != stored.size:
            raise CheckpointError(
                f"The checkpoint {checkpoint} needs the states of all agents.",
                f"that of '{name}', {stored.path.name} in {folder}, is missing or has another size",
                "Use an earlier checkpoint, or start the run again in another folder.",
            )
    return {**content["nodes"], **files}


def _problem_in(content: Any) -> str | None:
    """Why what was read is not the content of a checkpoint; None if it is."""
    if not isinstance(content, dict) or not {"round", "sizes", "nodes"} <= content.keys():
        return "its content is not that of a checkpoint"
    done, sizes, nodes, states = (content.get(key, {}) for key in ("round", "sizes", "nodes", "states"))
    if not _is_count(done) or not isinstance(sizes, dict) or not all(map(_is_count, sizes.values())):
        return "the number of rounds, or a size of a file, is not one"
    if not isinstance(nodes, dict) or not all(isinstance(state, bytes) for state in nodes.values()):
        return "what the nodes keep is not in bytes"
    if not isinstance(states, dict) or not all(map(_is_file, states.values())):
        return "the states of agents are not files with sizes"
    if not all(isinstance(name, str) for name in (*sizes, *nodes, *states)):
        return "names that are not text"
    return None


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62


def _is_file(entry: Any) -> bool:
    """A name in the folder of states, and a size."""
    if not isinstance(entry, list | tuple) or len(entry) != 2:
        return False
    file, size = entry
    return isinstance(file, str) and file not in ("", ".", "..") and not set("/\\\0") & set(file) and _is_count(size)
