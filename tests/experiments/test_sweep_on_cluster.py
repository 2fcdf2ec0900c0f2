"""Sweeps whose runs are jobs: the same files as a sweep's own, each run once, whatever is killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from codistill.cli import main
from codistill.core.errors import CodistillError, RecipeError, RuntimeFault
from codistill.experiments import job_systems, sweep_jobs
from codistill.experiments import job_systems as sweep_on_cluster
from codistill.experiments.job_systems import JobSystem, SlurmJobs, SweepJobs
from codistill.experiments.sweep import execute_sweep, read_sweep
from codistill.experiments.sweep_jobs import (
    Cell,
    CellJob,
    ClusterOptions,
    Job,
    alive_jobs,
    cluster_options,
    job_folder,
    logs_folder,
    read_job,
    read_outcome,
    write_job,
    write_job_files,
    write_outcome,
)

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
kind = "simulation"
[sweep]
seed = [0, 1]
protocol = [{ name = "alone" }, { name = "fedavg" }]
"""  # fedavg: impossible, as the architectures differ


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "two.toml"
    path.write_text(RECIPE)
    return path


class Here(JobSystem):
    """Does jobs in this process, the last one first."""

    name = "local"
    submitted: list[str]  # the runs that were submitted

    def __init__(self, sweep: Path, options: ClusterOptions, default: int) -> None:
        self._sweep = sweep

    def submit(self, jobs: Sequence[CellJob]) -> list[Job]:
        for job in reversed(jobs):
            self.submitted.append(Path(job.place).name)
            self.do(job)
        return [Job("local", "0", str(self._sweep / f"{Path(job.place).name}.log")) for job in jobs]

    def do(self, job: CellJob) -> None:
        """As submitit's process would."""
        (self._sweep / f"{Path(job.place).name}.log").write_text("line\n" * 9 + "the last line\n")
        with suppress(SystemExit):
            job()

    def room(self, running: int, waiting: int) -> int:
        return waiting

    def interrupted(self, jobs: Mapping[str, Job]) -> str:
        return ""


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> type[Here]:
    monkeypatch.setattr(Here, "submitted", [], raising=False)
    monkeypatch.setitem(job_systems.SYSTEMS, "local", Here)
    return Here


def files_of(folder: Path) -> dict[str, bytes]:
    """What must be equal to the byte."""
    found = [folder / "sweep.csv", *folder.glob("*/metrics.jsonl")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


@pytest.mark.usefixtures("no_report")
def test_jobs_write_what_a_sweep_by_itself_writes(recipe: Path, tmp_path: Path, here: type[Here]) -> None:
    sweep, told = read_sweep(recipe), [[], []]  # type: ignore[var-annotated]
    execute_sweep(sweep, tmp_path / "one", tell=told[0].append)
    jobs = SweepJobs(tmp_path / "jobs", "local", ClusterOptions(), tell=told[1].append)
    # The last one first: the order in which runs end is not that of the table.
    last = read_sweep(recipe, ["sweep.protocol=[{name='alone'}]", "sweep.seed=[1]"])
    execute_sweep(last, tmp_path / "jobs", run=jobs.run, tell=str)
    execute_sweep(sweep, tmp_path / "jobs", run=jobs.run, tell=told[1].append)
    expected = files_of(tmp_path / "one")
    assert set(expected) == {"sweep.csv", "0_alone/metrics.jsonl", "1_alone/metrics.jsonl"}
    assert files_of(tmp_path / "jobs") == expected
    assert here.submitted == ["1_alone", "1_fedavg", "0_fedavg", "0_alone"]
    assert jobs.failed == []
    said = [sorted(line.partition("] ")[2] for line in lines if "] " in line) for lines in told]
    assert said[0] == said[1]
    assert sum("skipped. fedavg averages weights" in line for line in said[1]) == 2
    # Again: what is done is not submitted; what is impossible is looked at again.
    here.submitted.clear()
    execute_sweep(sweep, tmp_path / "jobs", run=jobs.run, tell=str)
    assert here.submitted == ["1_fedavg", "0_fedavg"]
    assert files_of(tmp_path / "jobs") == expected


@pytest.mark.usefixtures("no_report")
def test_a_failed_run_is_named_and_the_others_go_on(
    recipe: Path, tmp_path: Path, here: type[Here], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    execute = sweep_jobs.execute

    def fails(recipe: Any, place: Path, **options: Any) -> Any:
        if place.name == "0_alone":
            raise RuntimeError("out of paper")
        return execute(recipe, place, **options)

    monkeypatch.setattr("codistill.cli.run_commands.make_console", lambda width: None)
    monkeypatch.setattr("codistill.experiments.sweep_view.show_sweep", lambda *arguments: {})
    command = ["sweep", str(recipe), "--out", str(tmp_path / "out"), "--on", "local", "--set"]
    command.append("sweep.protocol=[{name='alone'}]")
    with monkeypatch.context() as patch:
        patch.setattr("codistill.experiments.sweep_jobs.execute", fails)
        assert main(command) == RuntimeFault.exit_code
    out, error = capsys.readouterr()
    log = tmp_path / "out" / "0_alone.log"
    assert "seed=0, protocol=alone: failed: RuntimeError: out of paper\n    line\n" in out
    assert f"    line\n    the last line\n    log: {log}\n" in out
    assert "1 of 2 have failed" in error
    assert "seed=0, protocol=alone" in error
    assert set(pd.read_csv(tmp_path / "out" / "sweep.csv")["seed"]) == {1}
    here.submitted.clear()
    assert main(command) == 0
    assert here.submitted == ["0_alone"]
    assert set(pd.read_csv(tmp_path / "out" / "sweep.csv")["seed"]) == {0, 1}


def test_a_job_that_ends_without_a_word_has_failed(
    recipe: Path, tmp_path: Path, here: type[Here], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(here, "do", lambda self, job: None)
    jobs = SweepJobs(tmp_path / "out", "local", ClusterOptions(), tell=str)
    told: list[str] = []
    with pytest.raises(RecipeError, match="at least one possible run"):
        execute_sweep(read_sweep(recipe), tmp_path / "out", run=jobs.run, tell=told.append)
    assert len(jobs.failed) == 4
    assert all("its job ended without a result" in line for line in told)


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process whose command is that of submitit's controller of a local job."""
    wait = "import sys; print(flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", wait, "submitit.local._local", str(logs_folder(tmp_path / "out"))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


@pytest.mark.usefixtures("no_report")
def test_a_job_from_before_is_waited_for_and_a_dead_one_is_not(
    recipe: Path, tmp_path: Path, here: type[Here], controller: subprocess.Popen[bytes]
) -> None:
    out, sweep = tmp_path / "out", read_sweep(recipe, ["sweep.protocol=[{name='alone'}]"])
    for name, process in (("0_alone", controller.pid), ("1_alone", os.getpid())):  # the second: a later process
        job_folder(out, name).mkdir(parents=True)
        write_job(job_folder(out, name), Job("local", str(process), ""))
    assert list(alive_jobs(out, ["0_alone", "1_alone", "2_alone"])) == ["0_alone"]
    with pytest.raises(RecipeError, match="No job may be at a run of .* --on local"):
        execute_sweep(sweep, out, tell=str)

    def finish(line: str) -> None:
        assert line == "runs: 2, of which done: 0, with a job that waits or runs: 1, to be submitted (local): 1"
        (cell,) = [Cell(labels, "", made, out / "0_alone") for labels, made in sweep.runs if made.seed == 0]
        job = write_job_files(cell, job_folder(out, "0_alone"), None)
        write_job(job_folder(out, "0_alone"), Job("local", str(controller.pid), ""))
        job()

    jobs = SweepJobs(out, "local", ClusterOptions(), tell=finish)
    frame = execute_sweep(sweep, out, run=jobs.run, tell=str)
    assert frame is not None
    assert set(frame["seed"]) == {"0", "1"}
    assert here.submitted == ["1_alone"]
    controller.kill()
    controller.wait()
    assert alive_jobs(out, ["0_alone", "1_alone"]) == {}


HOLD = """
import sys, pathlib, codistill.core.files
handle = codistill.core.files.lock(pathlib.Path(sys.argv[1]))
print(flush=True)
sys.stdin.read()
"""


def test_a_folder_belongs_to_one_sweep_and_a_run_to_one_job(recipe: Path, tmp_path: Path, here: type[Here]) -> None:
    out, held = tmp_path / "out", {"0_alone": Job("local", "0", "")}
    for folder in (out, job_folder(out, "0_alone")):
        folder.mkdir(parents=True)
        command = [sys.executable, "-c", HOLD, str(folder)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
            assert other.stdout is not None
            other.stdout.readline()
            if folder == out:
                assert main(["sweep", str(recipe), "--out", str(out), "--on", "local"]) == 7
                assert main(["sweep", str(recipe), "--out", str(out)]) == 7
            else:  # its controller has been killed, but it goes on
                write_job(folder, held["0_alone"])
                assert alive_jobs(out, ["0_alone"]) == held
                CellJob(str(folder), str(out / "0_alone"), None)()  # a second job does nothing
                assert not (out / "0_alone").exists()
            other.kill()
    assert alive_jobs(out, ["0_alone"]) == {}
    assert here.submitted == []


def test_a_queued_job_runs_the_recipe_as_it_was_submitted(recipe: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text("from codistill.protocols.alone import Alone\nclass Mine(Alone):\n    pass\n")
    text = RECIPE.replace('name = "alone"\nrounds', 'name = "own.py:Mine"\nrounds')
    recipe.write_text(text.partition("protocol = [")[0])
    (labels, made), *_ = read_sweep(recipe).runs
    folder = job_folder(tmp_path / "out", "0")
    job = write_job_files(Cell(labels, "", made, tmp_path / "out" / "0"), folder, None)
    own.write_text(own.read_text() + "# changed\n")
    with pytest.raises(SystemExit):
        job()
    outcome = json.loads((folder / "outcome.json").read_text())
    assert outcome["status"] == "failed"
    assert "changed since this job was submitted" in outcome["said"]
    assert not (tmp_path / "out" / "0").exists()


# --- Slurm, by stand-ins for its commands ---------------------------------------------------------------------------

SBATCH = '#!/bin/sh\necho "$@" >> {log}\ncp "$1" {script}\necho "Submitted batch job 41"\n'


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of stand-ins: sbatch keeps the script, squeue prints the file `queue`, or fails if there is none."""
    folder = tmp_path / "slurm"
    folder.mkdir()
    commands = {
        "sbatch": SBATCH.format(log=folder / "log", script=folder / "script"),
        "squeue": f"#!/bin/sh\n. {folder}/on-squeue 2>/dev/null\nexec cat {folder}/queue\n",
        "srun": "#!/bin/sh\n",
    }
    for name, text in commands.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    (folder / "on-squeue").write_text("")
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setitem(sweep_on_cluster.PAUSE, "slurm", 0.0)
    return folder


def test_slurm_is_asked_for_what_the_options_say(slurm: Path, tmp_path: Path) -> None:
    site = tmp_path / "site.toml"
    site.write_text('partition = "cpu"\ntime = 02:30:00\nsetup = ["module load python"]\nsbatch = { nice = 5 }\n')
    given = ["partition=gpu", "memory=1.5", "cpus=4", "at_once=3", "account=007", "sbatch.mail-user=me@x.org"]
    options = cluster_options(site, given)
    assert (options.time, options.account, options.cpus, options.memory) == ("02:30:00", "007", 4, 1.5)
    jobs = SlurmJobs(tmp_path / "out", options, 1).submit([CellJob("a", "b", None), CellJob("c", "d", None)])
    assert [job.id for job in jobs] == ["41_0", "41_1"]
    lines = (slurm / "script").read_text().splitlines()
    asked = dict(line.removeprefix("#SBATCH --").split("=", 1) for line in lines if line.startswith("#SBATCH"))
    wanted = {
        "partition": "gpu", "time": "02:30:00", "mem": "1536M", "cpus-per-task": "4", "array": "0-1%2",
        "account": "007", "mail-user": "me@x.org", "nice": "5", "job-name": "codistill-out",
    }  # fmt: skip
    assert wanted.items() <= asked.items()
    assert "module load python" in lines
    SlurmJobs(tmp_path / "out", ClusterOptions(), 1).submit([CellJob("a", "b", None)])
    assert not any("--time" in line or "--mem" in line for line in (slurm / "script").read_text().splitlines())


@pytest.mark.usefixtures("no_report")
def test_jobs_go_on_in_slurm_when_one_leaves_and_are_found_again(recipe: Path, tmp_path: Path, slurm: Path) -> None:
    out, sweep, told = tmp_path / "out", read_sweep(recipe, ["sweep.protocol=[{name='alone'}]"]), list[str]()
    jobs = SweepJobs(out, "slurm", ClusterOptions(), tell=told.append)
    # Ctrl-C while it looks at the queue.
    (slurm / "on-squeue").write_text("kill -INT $PPID\n")
    (slurm / "queue").write_text("41_0\n41_1\n")
    assert execute_sweep(sweep, out, run=jobs.run, tell=told.append) is None
    assert told[-1] == "Stopped waiting. Jobs that go on in Slurm: 2. To cancel them: scancel 41"
    assert [read_job(job_folder(out, f"{seed}_alone")).id for seed in (0, 1)] == ["41_0", "41_1"]  # type: ignore[union-attr]
    (slurm / "on-squeue").write_text("")
    with pytest.raises(RecipeError, match="--on slurm"):
        execute_sweep(sweep, out, tell=str)
    # The same command: the jobs are found. One of them ends, the other one vanishes from the queue.
    told.clear()
    CellJob(str(job_folder(out, "0_alone")), str(out / "0_alone"), None)()
    (slurm / "queue").unlink()  # Slurm does not answer: nothing is taken for dead
    assert len(alive_jobs(out, ["0_alone", "1_alone"])) == 2
    (slurm / "on-squeue").write_text(f"[ -e {slurm}/asked ] || echo 41_1; touch {slurm}/asked\n")
    (slurm / "queue").write_text("")
    frame = execute_sweep(sweep, out, run=jobs.run, tell=told.append)
    assert frame is not None
    assert set(frame["seed"]) == {"0"}
    assert told[1] == "runs: 2, of which done: 1, with a job that waits or runs: 1, to be submitted (slurm): 0"
    assert "its job ended without a result" in told[2]
    assert (slurm / "log").read_text().count("\n") == 1  # submitted once


def test_a_job_asks_for_a_signal_before_its_limit_and_may_be_queued_again(
    slurm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inside another job, its variables are not passed on: srun would refuse two ways of asking for memory."""
    (slurm / "sbatch").write_text(
        f"#!/bin/sh\nenv > {slurm}/env\n{SBATCH.format(log='/dev/null', script=slurm / 'script')}"
    )
    for name in ("SLURM_JOB_ID", "SLURM_MEM_PER_CPU", "SLURM_CONF"):
        monkeypatch.setenv(name, "7")
    for given, wanted in (([], "USR2@90"), (["sbatch.signal=USR2@300"], "USR2@300")):
        SlurmJobs(tmp_path / "out", cluster_options(None, given), 1).submit([CellJob("a", "b", None)])
        lines = (slurm / "script").read_text().splitlines()
        assert f"#SBATCH --signal={wanted}" in lines
    passed = {line.partition("=")[0] for line in (slurm / "env").read_text().splitlines()}
    assert {name for name in passed if name.startswith(("SLURM_", "SBATCH_"))} == {"SLURM_CONF", "SBATCH_REQUEUE"}
    assert os.environ["SLURM_MEM_PER_CPU"] == "7"
    assert "SBATCH_REQUEUE" not in os.environ
    monkeypatch.setenv("SBATCH_NO_REQUEUE", "1")  # the user's own choice
    SlurmJobs(tmp_path / "out", ClusterOptions(), 1).submit([CellJob("a", "b", None)])
    assert "SBATCH_REQUEUE" not in (slurm / "env").read_text()


@pytest.mark.parametrize(
    ("checkpoints", "answer", "requeued"),
    [(1, "exit 0", True), (1, "kill -TERM $$", True), (1, "echo disabled >&2; exit 1", False), (0, "exit 0", False)],
    ids=["agreed", "agreed and ended", "refused", "no progress"],
)
def test_a_job_near_its_time_limit_is_put_into_the_queue_again(
    recipe: Path, tmp_path: Path, slurm: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
    checkpoints: int, answer: str, requeued: bool,
) -> None:  # fmt: skip
    """Once it has got further than where it began; otherwise it uses the time that is left, and says why."""
    (labels, made), *_ = read_sweep(recipe, ["sweep.protocol=[{name='alone'}]"]).runs
    place, folder = tmp_path / "out" / "0_alone", job_folder(tmp_path / "out", "0_alone")
    job = write_job_files(Cell(labels, "", made, place), folder, None)
    (place / "checkpoints").mkdir(parents=True)
    (place / "checkpoints" / "round-000001.state").touch()  # of the job before
    write_outcome(folder, "stopped")
    (slurm / "scontrol").write_text(f"#!/bin/sh\necho $@ >> {slurm}/asked\n{answer}\n")
    (slurm / "scontrol").chmod(0o755)
    for name, value in {"SUBMITIT_EXECUTOR": "slurm", "SLURM_JOB_ID": "42", "SLURM_ARRAY_JOB_ID": "41"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "1")

    def run(*_: Any) -> list[Any]:
        assert read_outcome(folder) is None  # that of the job before
        process = os.getpid()
        for number in range(checkpoints):
            (place / "checkpoints" / f"round-{2 + number:06d}.state").touch()
        with monkeypatch.context() as worker:  # Slurm signals workers as well, which have inherited the handler
            worker.setattr(os, "getpid", lambda: -1)
            os.kill(process, signal.SIGUSR2)
        assert not (slurm / "asked").exists()
        os.kill(process, signal.SIGUSR2)
        return []

    monkeypatch.setattr("codistill.experiments.sweep_jobs.outcome_of", run)
    before = signal.getsignal(signal.SIGUSR2)
    with pytest.raises(SystemExit) if requeued else nullcontext():
        job()
    assert signal.getsignal(signal.SIGUSR2) is before
    assert read_outcome(folder) == (None if requeued else ("done", ""))
    assert (slurm / "asked").exists() == bool(checkpoints)
    if checkpoints:
        assert (slurm / "asked").read_text() == "requeue 41_1\n"
    said = capfd.readouterr().err
    assert ("and put into the queue again" in said) == requeued
    assert requeued or ("disabled" if checkpoints else "no checkpoint since it was started") in said


@pytest.mark.usefixtures("no_report", "slurm")
def test_a_job_that_slurm_stops_and_puts_back_is_waited_for(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a job is preempted: it has written that it was stopped, or that a worker was, and is in the queue."""
    out, sweep, told = tmp_path / "out", read_sweep(recipe, ["sweep.protocol=[{name='alone'}]"]), list[str]()
    looks: list[list[str]] = []

    def alive(_: Path, names: list[str]) -> dict[str, Job]:
        looks.append(sorted(names))
        folders = {name: job_folder(out, name) for name in names}
        if len(looks) == 1:  # before they are submitted
            return {}
        if len(looks) == 2:
            for folder, status in zip(folders.values(), ("stopped", "failed"), strict=True):
                write_outcome(folder, status)
            return {name: Job("slurm", "41", "") for name in names}
        for name, folder in folders.items():
            CellJob(str(folder), str(out / name), None)()
        return {}

    for module in (sweep_on_cluster, job_systems):
        monkeypatch.setattr(module, "alive_jobs", alive)
    jobs = SweepJobs(out, "slurm", ClusterOptions(), tell=told.append)
    frame = execute_sweep(sweep, out, run=jobs.run, tell=told.append)
    assert frame is not None
    assert set(frame["seed"]) == {"0", "1"}
    assert looks == [["0_alone", "1_alone"]] * 3
    assert jobs.failed == []


def test_the_queue_is_asked_for_ones_own_jobs_whatever_the_environment_says(
    tmp_path: Path, slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOGNAME", "somebody-else")
    monkeypatch.setenv("SQUEUE_STATES", "running")
    (slurm / "on-squeue").write_text(f'echo "$@" $SQUEUE_STATES > {slurm}/asked\n')
    (slurm / "queue").write_text("41_0\n")
    job_folder(tmp_path, "0_alone").mkdir(parents=True)
    write_job(job_folder(tmp_path, "0_alone"), Job("slurm", "41_0", ""))
    assert list(alive_jobs(tmp_path, ["0_alone"])) == ["0_alone"]
    assert (slurm / "asked").read_text() == f"--noheader --array --user={os.getuid()} --format=%i\n"


def test_the_page_names_every_option(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "cluster.md").read_text()
    (tmp_path / "site.toml").write_text(page.partition("```toml\n")[2].partition("```")[0])
    read = cluster_options(tmp_path / "site.toml", ["time=30"])
    assert (read.account, read.time, read.memory, read.setup) == ("my-group", "30", 8.0, ("module load python/3.11",))
    table = "".join(line.split("|")[1] for line in page.splitlines() if line.startswith("| `"))
    assert sorted(re.findall(r"`(\w+)`", table)) == sorted(field.name for field in fields(ClusterOptions))


def test_what_slurm_refuses_is_told(slurm: Path, tmp_path: Path) -> None:
    (slurm / "sbatch").write_text("#!/bin/sh\necho 'invalid partition specified: gpu' >&2\nexit 1\n")
    with pytest.raises(RuntimeFault, match="invalid partition"):
        SlurmJobs(tmp_path, cluster_options(None, ["partition=gpu"]), 1).submit([CellJob("a", "b", None)])


# --- mistakes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--on", "slurm"], "no sbatch"),
        (["--on-option", "cpus=2"], "Add --on local"),
        (["--on", "local", "--on-option", "cpu=2"], "Did you mean 'cpus'?"),
        (["--on", "local", "--on-option", "cpus"], "KEY=VALUE"),
        (["--on", "local", "--on-option", "cpus=two"], "on-option.cpus must be an integer"),
        (["--on", "local", "--on-file", "none.toml"], "none.toml"),
    ],
)
def test_a_mistake_is_one_sentence(
    recipe: Path, given: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    assert main(["sweep", str(recipe), "--out", str(recipe.parent / "out"), *given]) == RecipeError.exit_code
    assert said in capsys.readouterr().err
    assert not (recipe.parent / "out").exists()


def test_without_submitit_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(CodistillError, match=r"pip install 'codistill\[cluster\]'"):
        job_systems.check_system("local")


# --- the local executor ---------------------------------------------------------------------------------------------


def _stopped_jobs(out: Path, names: list[str], sweep: subprocess.Popen[bytes]) -> dict[str, tuple[int, int]]:
    """The processes of jobs, submitit's first, each stopped as soon as its run has a checkpoint."""
    stopped: dict[str, tuple[int, int]] = {}
    while len(stopped) < len(names):
        assert sweep.poll() is None
        for name in set(names) - set(stopped):
            job = read_job(job_folder(out, name))
            if job is not None and any((out / name).glob("checkpoints/round-*.state")):
                controller = int(job.id)
                (process,) = Path(f"/proc/{controller}/task/{controller}/children").read_text().split()
                stopped[name] = controller, int(process)
                for each in reversed(stopped[name]):
                    os.kill(each, signal.SIGSTOP)
        time.sleep(0.01)
    return stopped


@pytest.mark.long
def test_a_sweep_and_a_job_are_killed_and_it_goes_on(recipe: Path, tmp_path: Path) -> None:
    """Both jobs are stopped in the middle; then the sweep and one job are killed, and the sweep is started again."""
    out, rounds, names = tmp_path / "jobs", 150, ["0_alone", "1_alone"]
    changes = ["--set", "sweep.protocol=[{name='alone'}]", "--set", f"protocol.rounds={rounds}"]
    command = [sys.executable, "-m", "codistill", "sweep", str(recipe), *changes]
    local = [*command, "--out", str(out), "--on", "local", "--on-option", "at_once=2"]
    with subprocess.Popen(local, stdout=subprocess.DEVNULL) as first:
        jobs = _stopped_jobs(out, names, first)
        first.kill()
    for each in jobs["0_alone"]:
        os.kill(each, signal.SIGKILL)
    times = {name: (out / name / "times.jsonl").read_text().splitlines() for name in names}
    assert all(1 <= len(lines) < rounds for lines in times.values())
    with subprocess.Popen(local, stdout=subprocess.PIPE, text=True) as second:
        assert second.stdout is not None
        line = second.stdout.readline()
        assert line == "runs: 2, of which done: 0, with a job that waits or runs: 1, to be submitted (local): 1\n"
        for each in jobs["1_alone"]:
            os.kill(each, signal.SIGCONT)
        assert len(re.findall(r"^\[\d/2\] .*: accuracy ", second.stdout.read(), re.MULTILINE)) == 2
    assert second.returncode == 0
    assert subprocess.run([*command, "--out", str(tmp_path / "one")], stdout=subprocess.DEVNULL).returncode == 0
    assert files_of(out) == files_of(tmp_path / "one")
    # Neither began anew: no two times of a round are the same, and those of the first rounds are the ones from before.
    for name, before in times.items():
        after = (out / name / "times.jsonl").read_text().splitlines()
        assert after[: len(before) - 1] == before[:-1]
        assert len(after) == rounds


@pytest.mark.long
def test_ctrl_c_ends_local_jobs(recipe: Path, tmp_path: Path) -> None:
    """A terminal sends it to the sweep, to submitit's process and to the job."""
    out = tmp_path / "jobs"
    changes = ["--set", "sweep.protocol=[{name='alone'}]", "--set", "sweep.seed=[0]", "--set", "protocol.rounds=100000"]
    command = [sys.executable, "-m", "codistill", "sweep", str(recipe), *changes, "--out", str(out), "--on", "local"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, **pipes, start_new_session=True) as sweep:  # type: ignore[call-overload]
        while not any((out / "0_alone").glob("checkpoints/round-*.state")):
            assert sweep.poll() is None
            time.sleep(0.01)
        os.killpg(sweep.pid, signal.SIGINT)
        said, _ = sweep.communicate()
    assert sweep.returncode == 130
    assert said.splitlines()[1:] == [
        "Stopped waiting. Jobs that were running and have been ended: 1.",
        "stopped; to continue, give the same command again: finished runs are not repeated",
    ]
    assert json.loads((job_folder(out, "0_alone") / "outcome.json").read_text())["status"] == "stopped"
    assert alive_jobs(out, ["0_alone"]) == {}
