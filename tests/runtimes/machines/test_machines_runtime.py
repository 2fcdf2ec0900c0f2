"""A run over several machines: host processes on this one, joined by TCP as they would be between machines."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.tree import DecisionTreeClassifier

import codistill as cd
from codistill.cli import main
from codistill.errors import CodistillError
from codistill.runtimes.machines.machine_options import Machines
from codistill.runtimes.runtime import warm_up

pytestmark = pytest.mark.usefixtures("time_limit", "no_report")

HERE = socket.gethostname()
COMPARED = ("metrics.jsonl", "log.txt", "outputs.safetensors", "alone/metrics.jsonl")
RECIPE = """\
topology = "{topology}"
data = {{ name = "digits", samples = 200, test_samples = 60, public = 40 }}
agents = [{{ learner = "logistic_regression", count = 2 }}, {{ learner = {{ kind = "mlp", hidden = [8] }}, count = 3 }}]
protocol = {{ name = "{protocol}", rounds = 2, {settings} }}
"""
RECIPES = {
    "hub": RECIPE.format(topology="star", protocol="fedmd", settings="local_epochs = 1, transfer_steps = 2"),
    "ring": RECIPE.format(topology="ring", protocol="d_distillation", settings="local_steps = 4, every = 2"),
}


@pytest.fixture(autouse=True, scope="module")
def warm() -> None:
    """What every process would import otherwise."""
    warm_up()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def start(world: int, work: Callable[[int], Any], folder: Path) -> list[BaseProcess]:
    """A process for each rank, which does the work; what it prints is in a file."""
    port = free_port() - 1  # torchrun's own, which is not used

    def rank_of(rank: int) -> None:
        names = {"RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in names.items()})
        log = os.open(folder / f"rank-{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        try:
            code = work(rank)
        except CodistillError as error:
            os.write(2, str(error).encode())
            code = error.exit_code
        os._exit(code or 0)

    context, made = multiprocessing.get_context("fork"), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks that copy only one thread
        for rank in range(world):
            made.append(context.Process(target=rank_of, args=(rank,), daemon=True))
            made[-1].start()
    return made


def codes(processes: Sequence[BaseProcess]) -> list[int | None]:
    for process in processes:
        process.join()
    return [process.exitcode for process in processes]


def said(folder: Path, rank: int) -> str:
    return (folder / f"rank-{rank}.txt").read_text()


# --- equal to the simulation ----------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "world"), [("hub", 3), ("ring", 2)])
def test_the_bits_of_the_simulation(kind: str, world: int, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPES[kind])
    out = {runtime: tmp_path / runtime for runtime in ("simulation", "machines")}

    def run(runtime: str) -> int:
        return main(["run", str(recipe), "--set", f"runtime.kind={runtime}", "--out", str(out[runtime]), "--quiet"])

    assert run("simulation") == 0
    assert codes(start(world, lambda _: run("machines"), tmp_path)) == [0] * world
    for name in COMPARED:
        assert (out["machines"] / name).read_bytes() == (out["simulation"] / name).read_bytes(), name
    assert said(tmp_path, world - 1) == ""  # only rank 0 shows something
    assert not (out["machines"] / "machines.key").exists()


def test_one_machine_needs_no_key_and_the_same_command_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "recipe.toml").write_text(RECIPES["ring"])
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    command = ["run", str(tmp_path / "recipe.toml"), "--set", "runtime.kind=machines", "--quiet"]
    out = ["--out", str(tmp_path / "run")]
    assert main([*command, *out]) == 0
    rows = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    assert main([*command, *out, "--set", "machines.patience=5"]) == 0  # nothing is left to do
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == rows
    assert main(["resume", str(tmp_path / "run"), "--quiet"]) == 0
    assert main([*command, *out, "--set", "protocol.rounds=3"]) == 2  # another run
    assert main(command) == 2
    found = capsys.readouterr().err
    assert "already holds" in found
    assert "found: no --out" in found


# --- a machine that dies or freezes ---------------------------------------------------------------


class Mortal(DecisionTreeClassifier):  # type: ignore[misc]
    """A model whose machine gets a signal in the second round."""

    folder, number = Path(), signal.SIGKILL

    def fit(self, x: Any, y: Any, sample_weight: Any = None) -> Any:
        if (self.folder / "doom").exists() and (self.folder / "run" / "checkpoints" / "round-000001.state").exists():
            os.kill(os.getpid(), self.number)
        return super().fit(x, y, sample_weight=sample_weight)


RNG = np.random.default_rng(0)
X = RNG.normal(size=(120, 4)).astype(np.float32)
Y = (X[:, 0] > 0).astype(int)


def federation() -> cd.Federation:
    models = [Mortal(max_depth=3) if i == 1 else DecisionTreeClassifier(max_depth=2) for i in range(4)]
    agents = [cd.Agent(f"a{i}", model, X[20 * i :][:20], Y[20 * i :][:20]) for i, model in enumerate(models)]
    return cd.Federation(agents, cd.FedMD(), public=X[80:100], test=(X[100:], Y[100:]))


def run_on_machines(folder: Path, **options: Any) -> Callable[[int], None]:
    def work(_: int) -> None:
        federation().run(3, runtime="machines", folder=folder / "run", progress=False, alone=False, **options)

    return work


@pytest.mark.parametrize(("number", "world_after"), [(signal.SIGKILL, 2), (signal.SIGSTOP, 4)])
def test_a_machine_that_ends_or_freezes_ends_the_run_by_its_name_and_others_go_on(
    number: int, world_after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Mortal, "folder", tmp_path)
    monkeypatch.setattr(Mortal, "number", number)
    (tmp_path / "doom").touch()
    started = start(3, run_on_machines(tmp_path, machines=Machines(lease=4)), tmp_path)
    assert codes([started[0], started[2]]) == [8, 8]
    started[1].kill()
    assert said(tmp_path, 0).startswith(
        f"Every machine must stay until the run ends. Found: rank 1 on {HERE} ended, is"
    )
    assert said(tmp_path, 2).startswith("The run has ended at rank 0. Found: rank 1 on")
    assert not (tmp_path / "run" / "machines.key").exists()
    (tmp_path / "doom").unlink()
    assert codes(start(world_after, run_on_machines(tmp_path, resume=True), tmp_path)) == [0] * world_after
    federation().run(3, runtime="simulation", folder=tmp_path / "simulation", progress=False, alone=False)
    for name in COMPARED[:3]:
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "simulation" / name).read_bytes(), name


def test_the_others_end_when_rank_0_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mortal, "folder", tmp_path)
    (tmp_path / "doom").touch()
    monkeypatch.setattr("codistill.runtimes.machines.group.shares_of", _shares_with_the_mortal_first)
    started = start(2, run_on_machines(tmp_path), tmp_path)
    assert codes(started) == [-signal.SIGKILL, 8]
    assert f"rank 0 on {HERE} ended" in said(tmp_path, 1)


def _shares_with_the_mortal_first(description: Any, world: int) -> list[list[Any]]:
    assert world == 2
    return [[*description.agents[:2], description.hub], [*description.agents[2:]]]


def test_an_error_of_an_agent_is_told_by_rank_0_and_names_the_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Any, x: Any, y: Any, sample_weight: Any = None) -> None:
        raise cd.CodistillError("A tree must grow.", "none", "Water it.")

    monkeypatch.setattr(Mortal, "fit", fail)
    started = start(2, run_on_machines(tmp_path), tmp_path)
    assert codes(started) == [1, 8]
    assert "A tree must grow." in said(tmp_path, 0)
    assert said(tmp_path, 1).startswith("The run has ended at rank 0.")


@pytest.mark.long
def test_torchrun_starts_it(tmp_path: Path) -> None:
    """The real command, with the variables that torchrun sets and its own store at MASTER_PORT."""
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPES["ring"])
    command = ["run", str(recipe), "--quiet", "--set"]
    assert main([*command, "runtime.kind=simulation", "--out", str(tmp_path / "simulation")]) == 0
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "codistill",
    ]
    subprocess.run([*torchrun, *command, "runtime.kind=machines", "--out", str(tmp_path / "machines")], check=True)
    for name in COMPARED:
        assert (tmp_path / "machines" / name).read_bytes() == (tmp_path / "simulation" / name).read_bytes(), name
