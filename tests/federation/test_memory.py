"""The memory of a run is told before it starts."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

import codistill as cd
from codistill.core.spec import RunSpec
from codistill.federation import MANY, MemoryNeed, memory_need
from codistill.learners.zoo import build


def federation(count: int, model: Any = None, **options: Any) -> cd.Federation:
    x, y = np.zeros((4, 3), np.float32), np.arange(4) % 2
    models = [model or cd.TorchLearner(build("logistic", (3,), 2)) for _ in range(count)]
    return cd.Federation([cd.Agent(f"a{i}", each, x, y) for i, each in enumerate(models)], cd.FedAvg(), **options)


def test_a_model_tells_its_memory() -> None:
    module = build("logistic", (3,), 2)  # 3 x 2 weights and 2 biases of 4 bytes
    assert cd.TorchLearner(module).memory() == (32, 64)
    assert cd.TorchLearner(module, optimiser="sgd").memory() == (32, 0)
    assert cd.TorchLearner(module, optimiser="sgd", momentum=0.9).memory() == (32, 32)
    assert cd.Agent("a", LogisticRegression(), np.zeros((2, 1)), [0, 1]).learner.memory() == (0, 0)


def test_the_need_follows_from_sizes() -> None:
    """10 agents of 32 bytes with moments of 64, half of them at work, 4 rounds: all have worked by the end."""
    description = federation(10, participation=0.5).description
    description = replace(description, spec=RunSpec(rounds=4, alone=False))
    work = 5 * (4 * 32 + 2 * 64) + 1000 * 10 * 4
    states = 10 * (32 + 64)

    def added(saves: bool = False, **options: Any) -> int:
        return memory_need(replace(description, spec=replace(description.spec, **options)), saves=saves).added

    assert added(runtime="simulation", idle="disk") == added(runtime="processes", idle="disk", saves=True) == work
    assert added(runtime="simulation") == work + 10 * 64
    assert added(runtime="processes", saves=True) == work + 10 * 64 + states + 3 * states
    description = replace(description, spec=RunSpec(rounds=4))
    assert added(runtime="simulation", idle="disk") == work + 10 * 32


def test_too_much_is_said_with_what_to_do() -> None:
    fits, too_much = MemoryNeed(10**9, 10**9, 2 * 10**9), MemoryNeed(10**9, 3 * 10**9, 2 * 10**9)
    assert fits.sentence("memory").endswith("adds about 1.0 GB at its peak; 2.0 GB are available")
    assert 'idle = "disk"' in too_much.sentence("memory")
    assert "That is too much: let fewer agents" in too_much.sentence("disk")
    assert MemoryNeed(None, 10**9, None).sentence("disk") == "memory: the run adds about 1.0 GB at its peak"


@pytest.mark.parametrize(("agents", "told"), [(MANY, 1), (3, 0)])
def test_it_is_told_where_there_are_many_agents(agents: int, told: int, capsys: pytest.CaptureFixture[str]) -> None:
    federation(agents, participation=0.02 if agents == MANY else 1.0).run(
        1, runtime="simulation", alone=False, progress=False
    )
    assert len(re.findall("note: memory: .* the run adds about", capsys.readouterr().err)) == told
