"""Sweeps whose runs are tasks of Ray: the same files as a sweep's own, whatever ends; requests that cannot be met."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from codistill.cli import main
from codistill.core.errors import CodistillError, RecipeError, RuntimeFault, StorageError
from codistill.core.files import lock
from codistill.experiments import job_systems
from codistill.experiments.job_systems import RayJobs, SweepJobs
from codistill.experiments.sweep import execute_sweep, read_sweep
from codistill.experiments.sweep_jobs import (
    RAY,
    TAKES,
    CellJob,
    ClusterOptions,
    Job,
    alive_jobs,
    cluster_options,
    job_folder,
    outcome_of,
    write_job,
    write_outcome,
)
from codistill.runtimes.ray_cluster import joined

RECIPE = """
seed = 0
[data]
name = "digits"
samples = 60
test_samples = 40
[[agents]]
learner = { kind = "mlp", hidden = [8] }
[[agents]]
learner = "logistic"
[protocol]
name = "alone"
rounds = 2
[evaluation]
alone = false
[runtime]
kind = "processes"
[sweep]
seed = [0]
protocol = [{ name = "alone" }, { name = "fedavg" }]
"""  # fedavg: impossible, as the architectures differ


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "two.toml"
    path.write_text(RECIPE)
    return path


def files_of(folder: Path) -> dict[str, bytes]:
    """What must be equal to the byte."""
    found = [folder / "sweep.csv", *folder.glob("*/metrics.jsonl")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


# --- a real cluster -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A new cluster of this machine, which the command stays in, since this process has joined it."""
    with joined("local", store=job_systems._STORE):
        yield


@pytest.mark.usefixtures("cluster")
def test_tasks_write_what_a_sweep_by_itself_writes(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cores = len(os.sched_getaffinity(0))
    sweep, told = read_sweep(recipe), list[str]()
    # More than a node has: refused before anything is submitted.
    greedy = SweepJobs(tmp_path / "ray", RAY, ClusterOptions(cpus=cores + 1, resources={"fast": 1}), tell=str)
    with pytest.raises(RuntimeFault) as error:
        execute_sweep(sweep, tmp_path / "ray", run=greedy.run, tell=str)
    has = f"1 node with {cores} cores, 0 fast" if cores > 1 else "1 node with 1 core, 0 fast"
    assert error.value.found == f"asked: 1 job with {cores + 1} cores, 1 fast; there is room for 0: {has}"
    assert not (tmp_path / "ray" / ".jobs" / "0_alone").exists()
    # A task that was killed has left its id, and the run is free.
    job_folder(tmp_path / "ray", "0_alone").mkdir(parents=True)
    write_job(job_folder(tmp_path / "ray", "0_alone"), Job(RAY, "f00", ""))
    jobs = SweepJobs(tmp_path / "ray", RAY, ClusterOptions(memory=0.5), tell=told.append)
    execute_sweep(sweep, tmp_path / "ray", run=jobs.run, tell=told.append)
    assert told[0] == "runs: 2, of which done: 0, with a job that waits or runs: 0, to be submitted (ray): 2"
    assert told[1].startswith("Ray cluster at ")
    assert told[1].endswith(f": 1 node, {cores} core{'s' * (cores > 1)}, 0 GPUs")
    assert sum("skipped. fedavg averages weights" in line for line in told) == 1
    assert jobs.failed == []
    monkeypatch.setattr("codistill.report.pages.write_report", lambda summary, path: path)
    execute_sweep(sweep, tmp_path / "one", tell=str)
    assert set(files_of(tmp_path / "one")) == {"sweep.csv", "0_alone/metrics.jsonl"}
    assert files_of(tmp_path / "ray") == files_of(tmp_path / "one")
    log = (tmp_path / "ray" / ".jobs" / ".logs" / "0_alone.log").read_text()
    assert log.startswith("on node ")


# --- what becomes of a task -----------------------------------------------------------------------------------------


class Refs:
    """Ray, as far as jobs use it: every task ends at once, as `ends` says, which is called with its number."""

    def __init__(self, ends: Callable[[int], str]) -> None:
        import ray

        self.exceptions = ray.exceptions
        self._ends = ends
        self.asked: list[Mapping[str, Any]] = []
        self.cancelled = 0

    def remote(self, task: object) -> Any:
        def options(**asked: Any) -> Any:
            self.asked.append(asked)
            return SimpleNamespace(remote=lambda *arguments: Ref(len(self.asked)))

        return SimpleNamespace(options=options)

    def wait(self, refs: list[Any], **_: Any) -> tuple[list[Any], list[Any]]:
        return refs, []

    def get(self, ref: Ref) -> str:
        return self._ends(ref.number)

    def cancel(self, ref: Ref) -> None:
        self.cancelled += 1


class Ref:
    def __init__(self, number: int) -> None:
        self.number = number

    def task_id(self) -> bytes:
        return bytes([self.number])


def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: Callable[[int], str], **options: Any) -> Any:
    """Jobs in a cluster of which each task ends as said; the cluster itself, and what was reported."""
    ray, told = Refs(ends), list[str]()
    monkeypatch.setattr(job_systems, "_ray", lambda: ray)
    monkeypatch.setattr(job_systems, "joined", lambda address, store: nullcontext())
    monkeypatch.setattr(job_systems, "cluster_line", str)
    monkeypatch.setattr(job_systems, "alive_nodes", lambda: [{"CPU": 4.0, "GPU": 1.0, "memory": 8.0 * 2**30}])
    jobs = RayJobs(tmp_path, ClusterOptions(**options), 1)
    jobs.open(told.append)
    told.clear()
    return jobs, ray, told


def test_a_task_asks_for_what_the_options_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"cpus": 2, "memory": 1.5, "gpus": 0.25, "at_once": 3}
    jobs, ray, _ = system(tmp_path, monkeypatch, str, **asked)
    jobs.submit([CellJob("a", "b", None)])
    (task,) = ray.asked
    assert (task["num_cpus"], task["num_gpus"], task["memory"], task["resources"]) == (2, 0.25, 1.5 * 2**30, {})
    assert (jobs.room(1, 9), jobs.room(3, 9)) == (2, 0)
    assert RayJobs(tmp_path, ClusterOptions(), 1).room(5, 9) == 9


@pytest.mark.parametrize("kind", ["WorkerCrashedError", "NodeDiedError", "OutOfMemoryError"])
def test_a_run_whose_worker_or_node_ends_goes_on_in_another_task(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ends(number: int) -> str:
        error = getattr(jobs_ray.exceptions, kind)
        raise error("5 GB of 4 GB") if kind != "WorkerCrashedError" else error()

    jobs, jobs_ray, told = system(tmp_path, monkeypatch, ends)
    (job,) = jobs.submit([CellJob(str(tmp_path / "files"), "place/0_alone", None)])
    assert [list(jobs.alive({"0_alone": job})) for _ in range(3)] == [["0_alone"], ["0_alone"], []]
    assert len(jobs_ray.asked) == 3
    assert len(told) == 2
    assert all(line.startswith("0_alone: ") and "goes on from its last checkpoint" in line for line in told)
    assert "(3 times)" in jobs.why(job)
    assert ("want of memory: 5 GB of 4 GB" in jobs.why(job)) == (kind == "OutOfMemoryError")


def test_a_run_that_has_ended_before_its_worker_did_is_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ends(number: int) -> str:
        raise ray.exceptions.WorkerCrashedError

    jobs, ray, told = system(tmp_path, monkeypatch, ends)
    (job,) = jobs.submit([CellJob(str(tmp_path), "place/0_alone", None)])
    write_outcome(tmp_path, "done")
    assert list(jobs.alive({"0_alone": job})) == []
    assert (len(ray.asked), told) == (1, [])


def test_a_node_without_the_folder_or_with_another_version_ends_the_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_systems, "_LATE", 0.0)
    with pytest.raises(RecipeError, match="same version of codistill.*0.0.1 where the sweep was started"):
        job_systems._check_node("n1 (10.0.0.1)", tmp_path, "0.0.1")

    def ends(number: int) -> str:
        try:
            job_systems._check_node("n1 (10.0.0.1)", tmp_path / "none", job_systems.__version__)
        except StorageError as error:
            raise ray.exceptions.RayTaskError("run_on_node", "", error) from None
        raise AssertionError

    jobs, ray, _ = system(tmp_path, monkeypatch, ends)
    made = jobs.submit([CellJob("a", "b", None), CellJob("c", "d", None)])
    with pytest.raises(StorageError, match="all nodes of the Ray cluster see.*none on node n1"):
        jobs.alive(dict(zip("ab", made, strict=True)))
    assert ray.cancelled == 2


def test_workers_are_those_of_the_task_unless_the_recipe_says_it(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr(
        "codistill.experiments.sweep_jobs.execute",
        lambda recipe, place, **_: (seen.append(recipe.spec.workers), False),
    )
    for changes in ([], ["runtime.workers=5"]):
        (_, made), *_ = read_sweep(recipe, changes).runs
        outcome_of(made, tmp_path / "run", None, 3)
    assert seen == [3, 5]


def test_a_task_that_was_killed_does_not_count_as_alive_but_its_process_does(tmp_path: Path) -> None:
    job, folder = Job(RAY, "f00", ""), job_folder(tmp_path, "0_alone")
    folder.mkdir(parents=True)
    write_job(folder, job)
    assert alive_jobs(tmp_path, ["0_alone"]) == {}
    hold = (
        f"import pathlib, codistill.core.files as f; h = f.lock(pathlib.Path({str(folder)!r}));"
        " print(flush=True); input()"
    )
    with subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        assert alive_jobs(tmp_path, ["0_alone"]) == {"0_alone": job}
        other.kill()
    assert not RayJobs(tmp_path, ClusterOptions(), 1).waits_for(job)  # a new task waits for the lock instead
    assert RayJobs(tmp_path, ClusterOptions(), 1).waits_for(Job("slurm", "41_0", ""))
    lock(folder).close()


# --- options and mistakes -------------------------------------------------------------------------------------------


def test_the_page_says_which_system_takes_an_option() -> None:
    page = (Path(__file__).parents[2] / "docs/how-to/cluster.md").read_text().partition("### Options of jobs")[2]
    rows = [[cell.strip() for cell in line.split("|")[1:4]] for line in page.splitlines() if line.startswith("| `")]
    said = {key.strip("` "): where.lower().split(", ") for keys, _, where in rows for key in keys.split(", ")}
    assert {name: sorted(where) for name, where in said.items()} == {
        name: sorted(system for system in TAKES if name in TAKES[system]) for name in said
    }


@pytest.mark.parametrize(
    ("on", "given", "said"),
    [
        ("ray", "partition=gpu", "Leave out 'partition', or use it with --on slurm"),
        ("ray", "time=30", "'time'"),
        ("ray", "sbatch.nice=5", "'sbatch'"),
        ("ray", "setup=module load python", "'setup', or use it with --on local or --on slurm"),
        ("local", "cpus=2", "'cpus', or use it with --on slurm or --on ray"),
        ("local", "partition=gpu", "takes these options: at_once, gpus, setup"),
        ("local", "gpus=0.5", "whole GPUs"),
        ("slurm", "address=here:1", "'address', or use it with --on ray"),
        ("slurm", "resources.fast=1", "'resources'"),
        ("ray", "resources.fast=many", "resources must be a table of numbers"),
        ("ray", "resources.fast=0", "resources.fast must be above 0"),
        ("ray", "resources.GPU=1", "Use --on-option gpus="),
        ("ray", "memori=1", "Did you mean 'memory'?"),
    ],
)
def test_an_option_that_a_system_does_not_take_is_refused(on: str, given: str, said: str) -> None:
    with pytest.raises(RecipeError) as error:
        cluster_options(None, [given], on)
    assert said in str(error.value)


def test_what_is_asked_for_comes_from_file_and_command_line(tmp_path: Path) -> None:
    (tmp_path / "site.toml").write_text('cpus = 2\naddress = "head:6379"\nresources = { fast = 1, slow = 1 }\n')
    made = cluster_options(tmp_path / "site.toml", ["resources.fast=0.5", "gpus=1"], "ray")
    assert (made.resources, made.address) == ({"fast": 0.5, "slow": 1}, "head:6379")
    assert job_systems._asked(made) == {"CPU": 2, "GPU": 1, "fast": 0.5, "slow": 1}


def test_ray_must_be_installed_and_submitit_need_not(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    with monkeypatch.context() as patch:
        patch.setattr("importlib.util.find_spec", lambda name: None if name == "submitit" else find(name))
        job_systems.check_system("ray")
        with pytest.raises(CodistillError, match=r"codistill\[cluster\]"):
            job_systems.check_system("local")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "ray" else find(name))
    assert main(["sweep", str(recipe), "--out", str(recipe.parent / "out"), "--on", "ray"]) == RecipeError.exit_code
    assert "pip install 'codistill[ray]'" in capsys.readouterr().err
    assert not (recipe.parent / "out").exists()


# --- kills ----------------------------------------------------------------------------------------------------------


def _started(command: list[str], out: Path) -> subprocess.Popen[str]:
    """A sweep whose run has a checkpoint."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    sweep = subprocess.Popen(command, **pipes, start_new_session=True)  # type: ignore[call-overload]
    while not any((out / "0_alone").glob("checkpoints/round-*.state")):
        assert sweep.poll() is None
        time.sleep(0.01)
    return sweep  # type: ignore[no-any-return]


def _run_processes(out: Path) -> list[int]:
    """The processes of runs of a sweep, oldest first."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace")
        except OSError:
            continue
        if "codistill.experiments.sweep_jobs" in words and str(out) in words:
            found.append(int(path.parent.name))
    return sorted(found)


def _parent(process: int) -> int:
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:  # it has just ended
        return 0


@pytest.mark.long
@pytest.mark.usefixtures("time_limit")
def test_a_worker_the_command_and_ctrl_c_end_tasks_and_the_runs_go_on(recipe: Path, tmp_path: Path) -> None:
    """In turn Ray's worker is killed, which is repeated; Ctrl-C ends the command, and a kill; then all is done."""
    out, rounds = tmp_path / "ray", 1000
    changes = ["--set", "sweep.protocol=[{name='alone'}]", "--set", f"protocol.rounds={rounds}"]
    command = [sys.executable, "-m", "codistill", "sweep", str(recipe), *changes]
    ray = [*command, "--out", str(out), "--on", "ray", "--on-option", "address=local"]
    with _started(ray, out) as sweep:
        (process, *_) = _run_processes(out)
        worker = _parent(process)
        raylet = _parent(worker)
        os.kill(worker, signal.SIGKILL)
        # Until it is in another task: processes that the first one has forked may be there for a moment.
        while not any(_parent(_parent(each)) == raylet for each in _run_processes(out) if each != process):
            assert sweep.poll() is None
            time.sleep(0.01)
        os.killpg(sweep.pid, signal.SIGINT)
        said, _ = sweep.communicate()
    assert sweep.returncode == 130
    assert "0_alone: the process or the node of its task has ended; it goes on from its last checkpoint" in said
    assert "Stopped waiting. Jobs that waited or were running and have been ended: 1." in said
    assert _run_processes(out) == []
    with _started(ray, out) as sweep:
        while not _run_processes(out):
            assert sweep.poll() is None
            time.sleep(0.01)
        sweep.kill()
    done = len((out / "0_alone" / "times.jsonl").read_text().splitlines())
    assert 1 <= done < rounds
    assert subprocess.run(ray, stdout=subprocess.DEVNULL).returncode == 0
    assert subprocess.run([*command, "--out", str(tmp_path / "one")], stdout=subprocess.DEVNULL).returncode == 0
    assert files_of(out) == files_of(tmp_path / "one")


@pytest.mark.long
@pytest.mark.usefixtures("time_limit")
def test_a_run_whose_process_is_killed_is_named(recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "ray"
    changes = ["--set", "sweep.protocol=[{name='alone'}]", "--set", "protocol.rounds=100000"]
    command = [sys.executable, "-m", "codistill", "sweep", str(recipe), *changes, "--out", str(out), "--on", "ray"]
    with _started([*command, "--on-option", "address=local"], out) as sweep:
        os.kill(_run_processes(out)[0], signal.SIGKILL)
        said, _ = sweep.communicate()
    assert "failed: its process on node" in said
    assert "was ended by SIGKILL, perhaps for want of memory" in said
    assert f"log: {out}/.jobs/.logs/0_alone.log" in said
    assert json.loads((out / ".jobs" / "0_alone" / "job.json").read_text())["on"] == "ray"
