"""Agents that are not at work can be kept on disk: the same results to the bit, and memory only for those at work."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

import codistill as cd
from codistill.core.errors import CheckpointError, RecipeError
from codistill.engine.store import STATES
from codistill.learners.zoo import build
from codistill.nodes.record import record_of
from codistill.results.agents import mean_label
from codistill.results.records import RoundEnded
from codistill.wire.state import pack, unpack

ROUNDS, AGENTS, SHARE = 3, 6, 0.5
QUIET: dict[str, Any] = {"progress": False, "alone": False}


def federation(protocol: cd.Protocol, *, safeguard: bool = False, other: Any = None) -> cd.Federation:
    """Six agents of which three take part in a round, with momentum: a model that was not restored would show."""
    rng = np.random.default_rng(0)
    agents = []
    for i in range(AGENTS):
        x = rng.random((24, 1, 8, 8), dtype=np.float32)
        torch.manual_seed(i)
        layers = torch.nn.Conv2d(1, 2, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(72, 3)
        model: Any = cd.TorchLearner(torch.nn.Sequential(*layers), batch_size=8, lr=0.01)
        agents.append(cd.Agent(f"a{i}", other if other is not None and i == 0 else model, x, np.arange(24) % 3))
    tested = rng.random((30, 1, 8, 8), dtype=np.float32), np.arange(30) % 3
    public = rng.random((16, 1, 8, 8), dtype=np.float32)
    return cd.Federation(
        agents, protocol, public=public, test=tested, participation=SHARE, seed=3, safeguard=safeguard, classes=3
    )


def assert_equal(ours: cd.Result, wanted: cd.Result) -> None:
    assert ours.rows == wanted.rows
    x = np.random.default_rng(1).random((5, 1, 8, 8), dtype=np.float32)
    for name, agent in wanted.agents.items():
        np.testing.assert_array_equal(ours.agents[name].decision_function(x), agent.decision_function(x))


class StopAfter:
    """Stops a run."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds

    def round_ended(self, record: RoundEnded) -> bool:
        return record.round == self.rounds


@pytest.mark.parametrize(
    ("protocol", "safeguard"),
    [
        (cd.FedAvg(batch_size=8), False),
        (cd.FedAvg(batch_size=8), True),
        (cd.FD(batch_size=8), False),
        (cd.FedMD(batch_size=8), False),
        (cd.CRS(batch_size=8, average_over=3), True),
    ],
)
def test_on_disk_equals_in_memory_also_when_it_was_resumed(
    protocol: cd.Protocol, safeguard: bool, tmp_path: Path
) -> None:
    kind = {"runtime": "simulation", **QUIET}
    wanted = federation(protocol, safeguard=safeguard).run(ROUNDS, **kind)
    federation(protocol, safeguard=safeguard).run(
        ROUNDS, idle="disk", folder=tmp_path, observers=[StopAfter(2)], **kind
    )
    ours = federation(protocol, safeguard=safeguard).run(ROUNDS, idle="disk", folder=tmp_path, resume=True, **kind)
    assert_equal(ours, wanted)


def test_worker_processes_are_equal_and_leave_states_in_files(tmp_path: Path) -> None:
    protocol = cd.FedAvg(batch_size=8)
    wanted = federation(protocol).run(ROUNDS, runtime="simulation", **QUIET)
    federation(protocol).run(ROUNDS, idle="disk", workers=2, folder=tmp_path, observers=[StopAfter(2)], **QUIET)
    ours = federation(protocol).run(ROUNDS, idle="disk", workers=2, folder=tmp_path, resume=True, **QUIET)
    agents = ours._description.agents
    assert all(record_of(agent).reload is not None for agent in agents)
    assert all(not len(parameter) for agent in agents for parameter in agent.learner.module.parameters())  # type: ignore[attr-defined]
    assert_equal(ours, wanted)


def test_only_agents_at_work_take_memory_and_files_that_no_checkpoint_names_are_removed(tmp_path: Path) -> None:
    made = federation(cd.FedAvg(batch_size=8))

    class Sizes:
        def round_ended(self, record: RoundEnded) -> None:
            learners: list[Any] = [agent.learner for agent in made.agents]
            assert not any(p.numel() for learner in learners for p in learner.module.parameters())

    made.run(ROUNDS, runtime="simulation", idle="disk", folder=tmp_path, observers=[Sizes()], **QUIET)
    # Two checkpoints are kept, after rounds 2 and 3: of each agent its state at the first of them and, of those that
    # took part in the last round, another.
    assert len(list((tmp_path / STATES).iterdir())) == AGENTS + SHARE * AGENTS
    state = cd.read_state(tmp_path)
    assert state["nodes"].keys() == {*(agent.name for agent in made.agents), "hub"}
    weights = made.agents[2].learner
    assert record_of(made.agents[2]).reload is not None
    record_of(made.agents[2]).reload()
    for name, value in state["nodes"]["a2"]["learner"]["weights"].items():
        np.testing.assert_array_equal(weights.weights()[name], value)


def test_a_run_continues_in_memory_from_files_and_on_disk_from_a_checkpoint_without_files(tmp_path: Path) -> None:
    protocol = cd.FedAvg(batch_size=8)
    kind = {"runtime": "simulation", **QUIET}
    wanted = federation(protocol).run(ROUNDS, **kind)
    for first, second in (("disk", "memory"), ("memory", "disk")):
        folder = tmp_path / first
        federation(protocol).run(ROUNDS, idle=first, folder=folder, observers=[StopAfter(2)], **kind)
        assert_equal(federation(protocol).run(ROUNDS, idle=second, folder=folder, resume=True, **kind), wanted)


def test_without_a_folder_files_are_temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    result = federation(cd.FD(batch_size=8)).run(2, runtime="simulation", idle="disk", **QUIET)
    (folder,) = tmp_path.iterdir()
    assert len(list(folder.glob("*.state"))) == AGENTS  # one each: what is replaced is removed
    assert result.agents["a0"].predict(np.zeros((2, 1, 8, 8), np.float32)).shape == (2,)
    del result
    gc.collect()
    assert not list(tmp_path.iterdir())


def test_a_damaged_state_is_noticed_and_the_checkpoint_before_is_used(tmp_path: Path) -> None:
    protocol = cd.FedAvg(batch_size=8)
    kind = {"runtime": "simulation", "idle": "disk", "folder": tmp_path, **QUIET}
    federation(protocol).run(ROUNDS, observers=[StopAfter(2)], **kind)
    newest = max((tmp_path / STATES).glob("*-000002.state"))
    newest.write_bytes(newest.read_bytes()[:-1])
    wanted = federation(protocol).run(ROUNDS, runtime="simulation", **QUIET)
    assert_equal(federation(protocol).run(ROUNDS, resume=True, **kind), wanted)
    for path in (tmp_path / STATES).iterdir():
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(CheckpointError, match="digest"):
        federation(protocol).run(ROUNDS, resume=True, **kind).agents["a0"].predict(np.zeros((1, 1, 8, 8)))


def test_models_that_cannot_be_freed_stay_in_memory(tmp_path: Path) -> None:
    protocol = cd.FedMD(batch_size=8)
    rows = [
        federation(protocol, other=LogisticRegression()).run(2, runtime="simulation", idle=idle, **QUIET).rows
        for idle in ("memory", "disk")
    ]
    assert rows[0] == rows[1]


def test_a_federation_whose_states_are_in_files_can_be_resumed_in_memory(tmp_path: Path) -> None:
    protocol, kind = cd.FedAvg(batch_size=8), {"runtime": "simulation", "folder": tmp_path, **QUIET}
    wanted = federation(protocol).run(ROUNDS, runtime="simulation", **QUIET)
    same = federation(protocol)
    same.run(ROUNDS, idle="disk", observers=[StopAfter(1)], **kind)
    assert_equal(same.run(ROUNDS, resume=True, **kind), wanted)


def test_where_it_does_not_apply_it_is_refused() -> None:
    with pytest.raises(RecipeError, match="idle must be one of memory, disk"):
        federation(cd.FedAvg()).run(1, idle="tape", **QUIET)
    with pytest.raises(RecipeError, match="the runtime 'network'"):
        federation(cd.FedAvg()).run(1, idle="disk", runtime="network", **QUIET)
    with pytest.raises(RecipeError, match="evaluates itself"):
        federation(cd.FedAvg()).run(1, evaluate_agents="present", runtime="network", **QUIET)


@pytest.mark.parametrize("runtime", ["simulation", "processes"])
def test_only_those_who_took_part_are_evaluated(runtime: str) -> None:
    protocol = cd.FedAvg(batch_size=8)
    every = federation(protocol).run(2, runtime=runtime, **QUIET)
    some = federation(protocol).run(2, runtime=runtime, idle="disk", evaluate_agents="present", **QUIET)
    for row, wanted in zip(some.rows, every.rows, strict=True):
        assert ("accuracy" in row) == row["present"]
        assert {**wanted, **row} == wanted
    assert sum(row["present"] for row in some.rows) == 2 * SHARE * AGENTS
    assert mean_label(some.summary().lines()) == "mean of the 3 agents at the end"
    assert "left out of all means: 3 of 6 agents" in " ".join(repr(some).split())


def test_first_values_are_kept_only_of_what_layers_do_not_reset() -> None:
    class HalfReset(torch.nn.Linear):
        def reset_parameters(self) -> None:
            torch.nn.init.ones_(self.weight)

    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.full((1,), 2.0))
            self.layers = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
            self.partly = HalfReset(3, 3)
            torch.nn.init.zeros_(self.partly.bias)

        def forward(self, x: torch.Tensor) -> Any:
            return self.partly(self.scale * self.layers(x))

    learner = cd.TorchLearner(Scaled())
    assert learner._initial.keys() == {"scale", "partly.weight", "partly.bias"}
    with torch.no_grad():
        for tensor in learner.module.state_dict().values():
            tensor.add_(1)
    torch.manual_seed(0)
    learner.reset()
    torch.manual_seed(0)
    fresh = Scaled().state_dict()
    for name, value in learner.module.state_dict().items():
        torch.testing.assert_close(value, fresh[name], rtol=0, atol=0)


def test_tensors_are_allocated_as_they_lay_in_memory() -> None:
    learner = cd.TorchLearner(build("cnn", (1, 8, 8), 3))
    x, targets = torch.rand(6, 1, 8, 8), torch.eye(3)[[0, 1, 2, 0, 1, 2]]
    learner.descend(learner.loss(learner(x), targets))
    layouts = {name: tensor.stride() for name, tensor in learner.module.state_dict().items()}
    kept = pack(learner.state())
    learner.offload()
    learner.offload()  # once more changes nothing
    assert not any(tensor.numel() for tensor in learner.module.state_dict().values())
    learner.restore(unpack(kept))
    assert {name: tensor.stride() for name, tensor in learner.module.state_dict().items()} == layouts
    assert pack(learner.state()) == kept
