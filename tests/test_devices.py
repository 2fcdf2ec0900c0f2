"""Names of devices, who computes where, and what is said of one that is not there; on machines that are made up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import codistill as cd
from codistill.cli import main
from codistill.core import devices
from codistill.core.devices import (
    DeviceRequest,
    OnDevice,
    assign,
    bound_memory,
    check_fork,
    free_memory,
    shares_of,
    spread,
)
from codistill.core.errors import ArgumentError, LearnerError, RecipeError, RuntimeFault
from codistill.engine.placement import devices_of
from codistill.experiments.building import build
from codistill.experiments.networked import read_agent_file
from codistill.experiments.recipe import make_recipe

GIB = 1 << 30


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with two GPUs; no model can be moved there."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: ((index + 2) * GIB, 16 * GIB))


def test_a_device_that_is_not_there_is_a_sentence_that_says_what_there_is() -> None:
    built = "" if torch.version.cuda else " (this torch is built without CUDA)"
    with pytest.raises(RecipeError) as caught:
        cd.TorchLearner(torch.nn.Linear(2, 2), device="cuda")
    assert str(caught.value) == (
        f'This machine must have the device "cuda". Found: torch has cpu{built}. '
        'Choose one of these, or "auto": a GPU if there is one, otherwise the CPU.'
    )


@pytest.mark.usefixtures("gpus")
def test_a_gpu_beyond_those_there_are() -> None:
    with pytest.raises(RecipeError, match="torch has cpu, cuda:0, cuda:1"):
        cd.TorchLearner(torch.nn.Linear(2, 2), device="cuda:2")


@pytest.mark.parametrize("device", ["gpu", "cuda:x", "", "meta", 1, None])
def test_what_is_no_name_of_a_device(device: Any) -> None:
    with pytest.raises(RecipeError, match="device must be the name of a torch device"):
        devices.check_name(device)


def test_the_command_line_says_it_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = Path(__file__).parents[1] / "recipes" / "digits" / "fedmd.toml"
    assert main(["run", str(recipe), "--out", str(tmp_path / "run"), "--set", "runtime.device=cuda"]) == 2
    assert 'This machine must have the device "cuda".' in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("needs", "room", "fixed", "places"),
    [
        ([1, 1, 1, 1], [9, 9], None, [0, 1, 0, 1]),
        ([1, 1, 1, 1], [1, 9], None, [0, 1, 1, 1]),  # the first is full
        ([1, 1, 1], [1, 1], None, [0, 1, None]),
        ([5, 1], [4, 4], None, [None, 0]),  # the second fits, though the first does not
        ([9, 9, 9], [None, 9], None, [0, 1, 0]),  # what is unknown is unbounded
        ([1, 1, 1], [9, 9], [None, None, 0], [1, 0, 0]),  # who has named a device comes first
        ([9, 9], [9, 9], [0, 0], [0, None]),
    ],
)
def test_agents_are_spread_as_far_as_there_is_room(needs: Any, room: Any, fixed: Any, places: Any) -> None:
    assert spread(needs, room, fixed) == places


@pytest.mark.usefixtures("gpus")
def test_devices_of_a_run_on_two_gpus() -> None:
    wishes = [
        DeviceRequest("a", "cuda", 1),
        DeviceRequest("b", "auto", 1),
        DeviceRequest("c", "cpu", 1),
        DeviceRequest("d", "cuda:1", 1),
        DeviceRequest("e", "cuda"),
    ]
    # d is put first; a then goes to the empty one, b to the first of two with one agent each, e to the one with fewer
    assert assign(wishes, free=lambda kind, count: [GIB] * count) == ["cuda:0", "cuda:0", "cpu", "cuda:1", "cuda:1"]


@pytest.mark.usefixtures("gpus")
def test_where_there_is_no_room_auto_is_the_cpu_and_cuda_an_error() -> None:
    """One process: of 2.5 GiB free, half a GiB is its own, and half of the rest is for models: 1 GiB."""

    def free(kind: str, count: int) -> list[int | None]:
        return [2 * GIB + GIB // 2] * count

    assert assign([DeviceRequest(name, "auto", GIB) for name in "abc"], free=free) == ["cuda:0", "cuda:1", "cpu"]
    assert assign([DeviceRequest(name, "auto", GIB + 1) for name in "ab"], free=free) == ["cpu", "cpu"]
    # Four processes, two on each: 1.5 GiB, of which 0.75
    assert assign([DeviceRequest(name, "auto", 3 * GIB // 8) for name in "abcde"], 4, free)[-1] == "cpu"
    with pytest.raises(RuntimeFault) as caught:
        assign([DeviceRequest(name, "cuda", GIB) for name in "abc"], free=free)
    assert "no room for agent 'c': 3 models take 3.00 GiB, and cuda:0 has 2.50 GiB free" in str(caught.value)


@pytest.mark.usefixtures("gpus")
def test_processes_that_share_a_gpu_share_its_room() -> None:
    """Of 3 GiB free, two processes take half a GiB each; half of the rest is for models: 0.5 GiB of each process."""

    def free(kind: str, count: int) -> list[int | None]:
        return [3 * GIB] * count

    def places(need: int, sharing: int) -> list[str]:
        return assign([DeviceRequest("a", "auto", need)], free=free, sharing=sharing)

    assert places(GIB // 2, 2) == ["cuda:0"]
    assert places(GIB // 2 + 1, 2) == ["cpu"]
    assert places(5 * GIB // 4, 1) == ["cuda:0"]  # alone there: half of 2.5 GiB
    with pytest.raises(RuntimeFault, match="no room for agent 'a'"):
        assign([DeviceRequest("a", "cuda", GIB)], free=free, sharing=2)


@pytest.mark.usefixtures("gpus")
def test_free_memory_is_asked_in_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """As asking starts CUDA, and a process that has cannot be forked."""
    asked: list[int] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: asked.append(index) or ((index + 2) * GIB, 0))
    assert free_memory("cuda", 2) == [2 * GIB, 3 * GIB]
    assert asked == []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: 1 / 0)
    assert free_memory("cuda", 2) == [None, None]


def test_workers_share_agents_by_device() -> None:
    assert shares_of(["cpu"] * 5, 2) == [[0, 2, 4], [1, 3]]
    assert shares_of(["cuda:0", "cuda:1", "cuda:0", "cuda:1"], 2) == [[0, 2], [1, 3]]
    assert shares_of(["cuda:1", "cuda:0", "cuda:1", "cuda:0", "cpu"], 3) == [[1, 4], [0, 3], [2]]


def test_a_worker_may_take_its_part_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    bounds: list[tuple[float, str]] = []
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda share, device: bounds.append((share, str(device)))
    )
    used = [["cuda:0", "cuda:0"], ["cuda:0", "cuda:1"], ["cpu"]]
    for mine in used:
        bound_memory(mine, used)
    assert bounds == [(0.5, "cuda:0"), (0.5, "cuda:0"), (1.0, "cuda:1")]


def test_forked_processes_and_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    check_fork(["cpu", "cpu"], "processes")
    with pytest.raises(RuntimeFault, match="the device mps, which cannot be used after a fork"):
        check_fork(["cpu", "mps"], "processes")
    check_fork(["cuda:0"], "processes")
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "device_count", lambda: 1)  # which torch here cannot use
        with pytest.raises(RuntimeFault, match="a forked process"):
            check_fork(["cuda:0"], "processes")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(RuntimeFault, match="CUDA has been used in this process"):
        check_fork(["cuda:0"], "network")


def test_who_says_where_an_agent_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent's own, then the run's; models that are no torch modules stay on the CPU."""
    tables: dict[str, Any] = {
        "data": {"name": "digits", "public": 50},
        "protocol": {"name": "fedmd"},
        "runtime": {"device": "auto"},
        "agents": [{"learner": "mlp", "name": "own", "device": "cpu"}, {"learner": "mlp", "name": "run"},
                   {"learner": "ridge", "name": "ridge"}],
    }  # fmt: skip
    recipe = make_recipe(tables, Path())
    federation, _ = build(recipe)
    assert [getattr(agent.learner, "device", "none") for agent in federation.agents] == ["cpu", None, "none"]
    federation.run(1, runtime="simulation", device=recipe.spec.device, alone=False, progress=False)
    assert devices_of(federation.agents) == ["cpu"] * 3  # "auto", without a GPU
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    federation.agents[1].learner.assigned = None  # type: ignore[attr-defined]
    federation.agents[1].learner.device = "cuda"  # type: ignore[attr-defined]
    assert devices_of(federation.agents) == ["cpu", "cuda:0", "cpu"]
    tables["agents"][2]["device"] = "cuda"
    with pytest.raises(RecipeError, match="agent 'ridge', which has Ridge"):
        build(make_recipe(tables, Path()))
    tables["agents"][2]["device"] = "gpu"
    with pytest.raises(RecipeError, match="device must be"):
        make_recipe(tables, Path())


def test_a_site_says_it_in_its_file(tmp_path: Path) -> None:
    path = tmp_path / "my_agent.py"
    path.write_text(
        "import numpy as np, torch, codistill as cd\n"
        "device = 'auto'\n"
        "def agent(name):\n"
        "    return cd.Agent(name, torch.nn.Linear(2, 2), np.eye(2), [0, 1])\n"
    )
    assert read_agent_file(path, "north").agent.learner.device == "auto"  # type: ignore[attr-defined]
    path.write_text(
        path.read_text().replace("torch.nn.Linear(2, 2)", "cd.TorchLearner(torch.nn.Linear(2, 2), device='cpu')")
    )
    assert read_agent_file(path, "north").agent.learner.device == "cpu"  # type: ignore[attr-defined]
    path.write_text(path.read_text().replace("'auto'", "'gpu'"))
    with pytest.raises(RecipeError, match="device must be"):
        read_agent_file(path, "north")


def test_a_device_said_elsewhere_is_pointed_to_its_place() -> None:
    with pytest.raises(ArgumentError, match=r"codistill.TorchLearner\(module, device=...\)"):
        cd.Agent("a", torch.nn.Linear(2, 2), np.eye(2), [0, 1], device="cuda")  # type: ignore[call-arg]


def test_running_out_of_memory_is_a_sentence() -> None:
    with pytest.raises(LearnerError) as caught, OnDevice(torch.device("cuda", 1)):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    assert "must fit into the memory of cuda:1. Found: CUDA out of memory." in str(caught.value)


def test_mixed_precision_computes_in_bfloat16_and_answers_in_float32() -> None:
    """Of one linear layer: x W, with both rounded to 8 bits."""
    seen: list[torch.dtype] = []
    layer = torch.nn.Linear(3, 2, bias=False)
    layer.register_forward_hook(lambda _, __, outputs: seen.append(outputs.dtype))
    x = np.array([[1.001, 2.002, 3.003]], np.float32)
    learner = cd.TorchLearner(layer, precision="mixed", optimiser="sgd", lr=0.5)
    rounded = torch.from_numpy(x).bfloat16() @ layer.weight.detach().bfloat16().T
    outputs, features = learner.with_features(torch.from_numpy(x))
    assert torch.equal(outputs.detach(), rounded.float())
    assert (outputs.dtype, features.dtype, set(seen)) == (torch.float32, torch.float32, {torch.bfloat16})
    assert torch.equal(learner.snapshot()(torch.from_numpy(x)), rounded.float())
    learner.descend(learner.loss(outputs, torch.tensor([[1.0, 0.0]])))
    assert {array.dtype for array in learner.weights().values()} == {np.dtype(np.float32)}
    assert learner.predict(x).dtype == learner.evaluated_features(x).dtype == np.float32
    exact = cd.TorchLearner(layer)(torch.from_numpy(x))
    assert not torch.equal(exact, outputs)
    with pytest.raises(LearnerError, match="precision must be full or mixed"):
        cd.TorchLearner(layer, precision="half")
