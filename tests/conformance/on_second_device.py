"""Every protocol on the second device, in short; and what is said of devices. Run by test_second_device.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.conformance import test_conformance as suite
from tests.conformance.second_device_runs import Elsewhere, Make, on_second_device
from tests.second_device import KIND, Counted, Device, SecondTensor

import codistill as cd
from codistill.cli import main
from codistill.core.devices import OnDevice, in_host_memory
from codistill.core.errors import RecipeError, RuntimeFault

HERE = torch.device(KIND, 0)
QUIET: dict[str, Any] = {"progress": False, "alone": False}
TINY = suite.Size(samples=24, public=20, test=20, epochs=1, trees=2)


@pytest.fixture(scope="module")
def make(digits: Any) -> Make:
    """The suite's federations, on the CPU."""
    maker: Make = suite.federation.__wrapped__(digits)  # type: ignore[attr-defined]
    return maker


@pytest.fixture(scope="module")
def elsewhere(make: Make) -> Elsewhere:
    """Made first: this process has trained nothing yet."""
    return Elsewhere(on_second_device(make))


def check_equal(here: cd.Result, there: cd.Result, x: np.ndarray) -> None:
    """In metrics, and in what trained agents answer, to the bit."""
    assert here.rows == there.rows
    for name, agent in here.agents.items():
        np.testing.assert_array_equal(agent.decision_function(x), there.agents[name].decision_function(x))


def test_processes_compute_there_and_the_process_that_forks_them_does_not(
    make: Make, elsewhere: Elsewhere, digits: Any
) -> None:
    """The parent of workers may not start CUDA: here, it may not run a single operation on the device."""
    case, before = suite.NAMED["fedmd"], Counted.operations
    there = elsewhere.federation(case, agents=3).run(2, runtime="processes", workers=2, **QUIET)
    assert Counted.operations == before
    here = make(case, agents=3).run(2, runtime="simulation", **QUIET)
    check_equal(here, there, digits[0][:20])


def devices_in(folder: Path) -> dict[str, str] | None:
    """What the folder of a run says of its agents' devices."""
    told: dict[str, str] | None = json.loads((folder / "run.json").read_text()).get("devices")
    return told


@suite.rows_of([*suite.CASES, suite.RELAY])
def test_a_protocol_gives_the_same_bits_there(case: suite.Case, make: Make, digits: Any) -> None:
    """Two rounds of two agents; whatever was drawn on the device, or not copied to it, would make a difference."""
    here = make(case, agents=2, size=TINY).run(2, runtime="simulation", **QUIET)
    federation = on_second_device(make)(case, agents=2, size=TINY)
    before = Counted.operations
    there = federation.run(2, runtime="simulation", **QUIET)
    learners = [agent.learner for agent in federation.agents if isinstance(agent.learner, cd.TorchLearner)]
    assert {weight.device for learner in learners for weight in learner.parameters().values()} == {HERE}
    assert Counted.operations > before
    check_equal(here, there, digits[0][:20])


def test_inside_a_step_nothing_goes_to_host_memory(make: Make) -> None:
    """Twice the steps, as many copies: those are of predictions, to be scored."""

    def copies(protocol: cd.Protocol) -> list[int]:
        federation = on_second_device(make)(suite.Case(protocol, suite.equal), agents=2)
        Counted.to_host.clear()
        federation.run(2, runtime="simulation", **QUIET)
        return list(Counted.to_host)

    few = copies(cd.SiloSGD(local_steps=3, batch_size=16))
    assert few == copies(cd.SiloSGD(local_steps=6, batch_size=16))
    assert set(few) == {60 * 10}  # of 60 test samples
    prox = [copies(cd.FedProx(local_epochs=epochs, batch_size=16)) for epochs in (1, 2)]
    assert prox[0] == prox[1]


def test_a_run_goes_on_from_its_checkpoint_on_another_device(make: Make, tmp_path: Path) -> None:
    case = suite.Case(cd.FedAvg(batch_size=16), suite.normalised)
    folder: dict[str, Any] = {"folder": tmp_path, **QUIET}
    whole = make(case).run(4, runtime="simulation", **QUIET)
    names = [agent.name for agent in make(case).agents]
    make(case).run(1, runtime="simulation", **folder)
    assert devices_in(tmp_path) is None  # nothing is said of the CPU
    before = json.loads((tmp_path / "run.json").read_text())
    on_second_device(make)(case).run(2, runtime="simulation", resume=True, **folder)
    there = dict.fromkeys(names, f"{KIND}:0")
    assert json.loads((tmp_path / "run.json").read_text()) == {**before, "devices": there}
    make(case).run(3, runtime="simulation", resume=True, **folder)
    federation = on_second_device(make)(case)
    federation.agents[0].learner.device = "cpu"  # type: ignore[attr-defined]
    last = federation.run(4, runtime="simulation", resume=True, **folder)
    assert devices_in(tmp_path) == there  # as at first
    assert last.rows == whole.rows


@pytest.mark.usefixtures("no_report")
def test_a_recipe_goes_on_where_its_device_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ "auto" on a machine that has the device, and then on one that has not."""
    recipe, folder = tmp_path / "recipe.toml", tmp_path / "run"
    recipe.write_text(
        'data = { name = "digits", samples = 40, test_samples = 20 }\n'
        'agents = [{ learner = "mlp", name = "net" }, { learner = "ridge", name = "ridge" }]\n'
        'protocol = { name = "alone", rounds = 1 }\n'
        'runtime = { kind = "simulation", device = "auto" }\n'
    )
    monkeypatch.setattr("codistill.core.devices._PREFERRED", (KIND,))
    assert main(["run", str(recipe), "--out", str(folder), "--quiet"]) == 0
    assert devices_in(folder) == {"net": f"{KIND}:0", "ridge": "cpu"}
    monkeypatch.setattr("codistill.core.devices._PREFERRED", ())
    assert main(["resume", str(folder), "--quiet"]) == 0
    assert devices_in(folder) == {"net": f"{KIND}:0", "ridge": "cpu"}  # where it began, like versions


@pytest.mark.long
def test_an_agent_under_a_safeguard_and_one_that_goes_at_its_own_pace(make: Make) -> None:
    case = suite.NAMED["crs"]
    options: dict[str, Any] = {
        "safeguard": True,
        "clock": cd.Clock(asynchronous=True, step=1.0, period=5.0),
        "agents": 2,
    }
    here, there = (
        each(case, **options).run(2, runtime="simulation", **QUIET).rows for each in (make, on_second_device(make))
    )
    assert here == there


@pytest.mark.long
def test_a_model_of_its_own_kind_travels_from_there(make: Make) -> None:
    """As ONNX: the graph is written, and its predictions are compared, in host memory."""

    def models(size: suite.Size) -> list[Any]:
        layers = [torch.nn.Flatten(), torch.nn.Linear(64, 8), torch.nn.Dropout(0.0), torch.nn.Linear(8, 10)]
        return [cd.TorchLearner(torch.nn.Sequential(*layers), epochs=1), suite._torch("mlp", size)]

    case = suite.Case(cd.AvgKD(), models)
    here, there = (
        each(case, agents=2).run(2, runtime="simulation", **QUIET).rows for each in (make, on_second_device(make))
    )
    assert here == there


def test_layers_that_draw_there_are_seeded(make: Make) -> None:
    """Dropout draws from the device's own generator: equal when repeated, whatever state that one was in."""

    def models(size: suite.Size) -> list[Any]:
        layers = [torch.nn.Flatten(), torch.nn.Linear(64, 16), torch.nn.Dropout(0.5), torch.nn.Linear(16, 10)]
        return [cd.TorchLearner(torch.nn.Sequential(*layers), lr=3e-3) for _ in range(2)]

    case, weights = suite.Case(cd.FedMD(batch_size=16), models), []
    for each, seed in ((on_second_device(make), 1), (on_second_device(make), 2), (make, 3)):
        federation = each(case, agents=2)
        Device.manual_seed_all(seed)
        federation.run(2, runtime="simulation", **QUIET)
        weights.append(federation.agents[0].learner.weights()["1.weight"])
    np.testing.assert_array_equal(weights[0], weights[1])
    assert not np.array_equal(weights[0], weights[2])  # the CPU draws other masks


@dataclass(frozen=True, kw_only=True)
class Careless(cd.Protocol):
    """Makes and draws tensors in every way that a protocol written for the CPU may."""

    name = "careless"
    needs = cd.Ability.GRADIENTS
    topology = "silent"

    async def round(self, me: Any, t: int) -> None:
        for x, y in me.shard.batches(t, 16):
            f = me.learner(x)
            received = torch.from_numpy(np.full((len(f), me.classes), 0.1, np.float32))
            mask = torch.bernoulli(torch.full(f.shape, 0.5)) * torch.rand_like(f) + torch.empty(1).uniform_()
            kept = torch.zeros(len(f), me.classes)
            kept[torch.randperm(len(f))[:4]] = f.detach()[:4]
            host = torch.from_numpy(np.zeros((len(f), me.classes), np.float32))
            host += f.detach()
            layer = torch.nn.Linear(me.classes, 3)
            loss = (mask * (f - received) ** 2).mean() + layer(f).square().mean() + (kept * f + host * f).mean()
            loss = loss + torch.stack([f.mean(), torch.tensor(0.5), received.mean()]).sum()
            me.learner.descend(me.learner.loss(f, y) + loss)
            me.state["f"] = np.concatenate([f.detach(), np.asarray(f.detach())]).sum() + float(f.detach().sum())


def test_a_protocol_of_ones_own_need_not_know_of_devices(make: Make) -> None:
    case = suite.Case(Careless(), suite.equal)
    states = []
    for each in (make, on_second_device(make)):
        federation = each(case, agents=2)
        federation.run(2, runtime="simulation", **QUIET)
        states.append([(agent.state, agent.learner.weights()) for agent in federation.agents])
    np.testing.assert_equal(states[0], states[1])


def test_a_learner_by_itself_computes_there(digits: Any) -> None:
    x, targets = digits[0][:64], np.eye(10, dtype=np.float32)[digits[1][:64]]
    learners = []
    for device in (None, KIND):
        torch.manual_seed(3)
        learners.append(suite._torch("cnn", suite.SMALL, device=device))
        learners[-1].fit(x, targets)
    here, there = learners
    assert there.head.weight.device == HERE
    np.testing.assert_array_equal(here.predict(x), there.predict(x))
    there.load(here.weights())
    np.testing.assert_array_equal(here.evaluated_features(x), there.evaluated_features(x))
    moved = cd.TorchLearner(torch.nn.Linear(3, 2).to(KIND))  # its owner has moved it there
    assert (moved.device, moved.head.weight.device.type) == (f"{KIND}:0", "cpu")
    moved.fit(np.ones((4, 3), np.float32), np.ones((4, 2), np.float32) / 2)
    assert moved.head.weight.device == HERE


def test_a_process_that_has_trained_cannot_fork_workers(make: Make) -> None:
    """torch differentiates in threads where there is a device: they do not survive a fork."""
    torch.ones(1, requires_grad=True).sum().backward()  # type: ignore[no-untyped-call]
    with pytest.raises(
        RuntimeFault, match="a forked process cannot compute on cpu: Unable to handle autograd"
    ) as caught:
        on_second_device(make)(suite.NAMED["fedmd"]).run(1, runtime="processes", **QUIET)
    assert 'Use runtime="simulation"' in str(caught.value)


def test_a_missing_one_is_named_with_what_there_is() -> None:
    with pytest.raises(RecipeError, match=f"torch has cpu, {KIND}:0"):
        cd.TorchLearner(torch.nn.Linear(2, 2), device=f"{KIND}:1")


@pytest.mark.parametrize(
    "mixed",
    [
        lambda there, here: there + here,
        lambda there, here: torch.nn.functional.linear(here, there),
        lambda there, here: here.index_select(0, torch.tensor([0], device=KIND)),
        lambda there, here: there.numpy(),
        lambda there, here: np.asarray(there),
    ],
)
def test_the_device_refuses_what_a_gpu_would(mixed: Callable[[Any, Any], Any]) -> None:
    """Or nothing above would be proof. While an agent computes there, the same is copied."""
    there, here = torch.ones(2, 2, device=KIND), torch.ones(2, 2)
    assert type(there) is SecondTensor
    with pytest.raises((RuntimeError, TypeError, NotImplementedError)):
        mixed(there, here)
    with OnDevice(HERE):
        copied = mixed(there, here)
        with in_host_memory(), pytest.raises((RuntimeError, TypeError, NotImplementedError)):
            mixed(there, here)
    assert isinstance(copied, np.ndarray) or copied.device == HERE
