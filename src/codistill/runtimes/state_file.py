"""Files of state: 32 bytes, the SHA-256 of the rest, and then a safetensors body (see `codistill.wire.state`).

| file | content |
|---|---|
| `checkpoints/round-000005.state` of a run | `round`, `sizes` of the metrics files, `nodes`: what each keeps, by name |
| `states/000017-000005.state` of such a run | what its 18th agent keeps after round 5 (0: after `begin`) |
| `state-000005` in an agent's folder (`--state`) | what the agent keeps |
| a saved model | see `codistill.load` |

With `idle = "disk"` the `states` of a checkpoint are the file of each agent and its size; `nodes` has only the hub.
What an agent keeps: `learner`, its model's state (of a torch module `weights` and `optimiser`; of a scikit-learn
estimator `estimator`, an archive in the skops format); `state`, the protocol's variables; `residue`, what compression
has lost so far.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

from codistill.errors import CheckpointError
from codistill.files import write_atomically
from codistill.runtimes.stored_state import StoredState, checked_bytes, content_of, nodes_in
from codistill.wire.state import pack, unpack


def read_state(path: str | Path) -> dict[str, Any]:
    """What a checkpoint of a run, a state of an agent, or a saved model holds: arrays, bytes and plain values.

    `path` is such a file, or the folder of a run or of an agent, whose newest file is read. Nothing is built or
    executed: models are what their states are made of. The layout is described in `codistill.runtimes.state_file`.
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
    """Tensors as arrays."""
    if isinstance(node, torch.Tensor):
        return np.asarray(node)
    if isinstance(node, dict):
        return {key: _plain(value) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return type(node)(_plain(item) for item in node)
    return node
