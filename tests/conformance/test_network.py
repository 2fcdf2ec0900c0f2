"""Every protocol over real sockets with mutual TLS, one process for each node: equal to the simulation, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.conformance.test_conformance import FIRST, Case, equal, federation  # noqa: F401

import codistill as cd
from codistill.protocol import Agent, Hub, Message, Protocol

ROUNDS = 2
NETWORKED = [case for case in FIRST if not case.protocol.pools_data]


@dataclass(frozen=True, kw_only=True)
class Relay(Protocol):
    """A hub that answers each ask at once, with the mean of what it has been told so far."""

    name = "relay"
    topology = "star"

    async def round(self, me: Agent, t: int) -> None:
        heard = [await me.ask_hub(x=np.full(4, float(len(me.shard) + step))) for step in range(3)]
        me.state["heard"] = [*me.state.get("heard", []), *(float(answer["x"][0]) for answer in heard if answer)]
        me.measure(me.name, last=me.state["heard"][-1])

    def serve(self, me: Hub, sender: str, message: Message) -> Message:
        total, count = me.state.get("total", 0.0) + message["x"], me.state.get("count", 0) + 1
        me.state["total"], me.state["count"] = total, count
        return Message.of(x=total / count)


NETWORKED.append(Case(Relay(), equal))


@pytest.mark.parametrize("case", NETWORKED, ids=[case.protocol.name for case in NETWORKED])
def test_the_network_equals_the_simulation_to_the_bit_and_in_bytes(
    case: Case,
    federation: Callable[..., cd.Federation],  # noqa: F811
    tmp_path: Path,
) -> None:
    federation(case).run(ROUNDS, runtime="simulation", folder=tmp_path / "simulation", progress=False)
    federation(case).run(ROUNDS, runtime="network", folder=tmp_path / "network", progress=False)
    for name in ("metrics.jsonl", "log.txt", "alone/metrics.jsonl", "outputs.safetensors"):
        paths = [tmp_path / runtime / name for runtime in ("simulation", "network")]
        assert [path.exists() for path in paths] in ([True, True], [False, False]), name
        if paths[0].exists():
            assert paths[0].read_bytes() == paths[1].read_bytes(), name


@pytest.mark.parametrize("case", [FIRST[3], FIRST[6]], ids=["fedmd", "d_distillation"])
def test_injected_faults_compression_and_sampling_are_the_same_there(
    case: Case,
    federation: Callable[..., cd.Federation],  # noqa: F811
    tmp_path: Path,
) -> None:
    options: dict[str, Any] = {
        "faults": [cd.Fault(kind="drop", rate=0.3), cd.Fault(kind="gone", agent="agent-1", first=2, last=2)],
        "compression": cd.Compression(bits=8),
        "participation": 0.75,
    }
    federation(case, **options).run(3, runtime="simulation", folder=tmp_path / "simulation", progress=False)
    federation(case, **options).run(3, runtime="network", folder=tmp_path / "network", progress=False)
    metrics = [(tmp_path / runtime / "metrics.jsonl").read_bytes() for runtime in ("simulation", "network")]
    assert metrics[0] == metrics[1]
    assert b'"present": false' in metrics[0]
