"""States of agents in files of their own, which a checkpoint names instead of holding them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from codistill.errors import CheckpointError
from codistill.wire.state import unpack

STATES = "states"  # in a run's folder: the states of agents that are not at work
DIGEST = 32  # bytes of the SHA-256 with which a file of state begins


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
            "another kind of file, or a damaged one: its digest does not match",
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
