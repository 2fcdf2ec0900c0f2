"""Where jobs of a sweep run: processes of this machine or Slurm, both through submitit (extra `cluster`); or Ray."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from codistill.core import __version__
from codistill.core.errors import CodistillError, RecipeError, RuntimeFault, StorageError
from codistill.core.files import open_patiently, subfolder
from codistill.experiments.sweep_jobs import (
    BEFORE_LIMIT,
    DONE,
    FAILED,
    LOCAL,
    RAY,
    SKIPPED,
    SLURM,
    STOPPED,
    Cell,
    CellJob,
    ClusterOptions,
    Job,
    Outcome,
    alive_jobs,
    finished_rows,
    how_to_cancel,
    is_controller,
    job_folder,
    last_lines,
    logs_folder,
    read_outcome,
    write_job,
    write_job_files,
)
from codistill.runtimes.ray_cluster import (
    CPU,
    GPU,
    MEMORY,
    Demand,
    alive_nodes,
    check_installed,
    cluster_line,
    joined,
    room,
    too_little,
)
from codistill.runtimes.workers import GentleInterrupt, Parent, default_workers

_NO_LIMIT = 366 * 24 * 60  # minutes; submitit would end local jobs after two
_ARRAY = 1000  # jobs in one array: what Slurm allows unless it is told otherwise
_WARNING = 90  # seconds before its time limit, at the latest, in which a job is sent BEFORE_LIMIT
_GB = 1 << 30  # bytes, as Slurm counts them
_ATTEMPTS = 3  # tasks for one run, where the process or the node of a task ends
_LATE = 10.0  # seconds that a file may take to appear on another node of a shared file system
_LOOK = 0.1  # seconds between two looks at a process
_STORE = 80 * 10**6  # bytes of Ray's object store, which runs do not use, and for which it would take much memory


class JobSystem(ABC):
    """Submits jobs of one sweep."""

    name: str

    def __init__(self, sweep: Path, options: ClusterOptions, default: int) -> None:
        check_system(self.name)
        self._sweep, self._options = sweep, options
        self._default = default  # jobs at once on this machine

    @abstractmethod
    def submit(self, jobs: Sequence[CellJob]) -> list[Job]:
        """Submit jobs, in their order."""

    @abstractmethod
    def room(self, running: int, waiting: int) -> int:
        """How many more jobs to submit now."""

    def open(self, tell: Callable[[str], None]) -> None:
        """Before the first job is submitted; `tell` reports what happens to jobs."""

    def alive(self, jobs: Mapping[str, Job]) -> Collection[str]:
        """The names of the runs whose jobs wait or run."""
        return alive_jobs(self._sweep, list(jobs))

    def waits_for(self, job: Job) -> bool:
        """Whether a job of an earlier command is waited for; its run is submitted again otherwise."""
        return True

    def why(self, job: Job) -> str:
        """Why a job may have ended without an outcome."""
        return "its job ended without a result: it was killed, or reached a limit of the cluster"

    def close(self) -> None:
        """All jobs have ended."""

    def leave(self) -> None:
        """After the last job, and after an error."""

    @abstractmethod
    def interrupted(self, jobs: Mapping[str, Job]) -> str:
        """What becomes of jobs when whoever waits for them is interrupted, for a person."""


class LocalJobs(JobSystem):
    """Processes of this machine."""

    name = LOCAL

    def __init__(self, sweep: Path, options: ClusterOptions, default: int) -> None:
        super().__init__(sweep, options, default)
        import submitit

        self._executor = submitit.LocalExecutor(logs_folder(sweep))
        self._executor.update_parameters(
            timeout_min=_NO_LIMIT, gpus_per_node=options.gpus or 0, stderr_to_stdout=True, setup=list(options.setup)
        )
        self._submitted: list[Any] = []

    def submit(self, jobs: Sequence[CellJob]) -> list[Job]:
        # They inherit that SIGINT is blocked: Ctrl-C, which a terminal sends to all, is for whoever waits for them.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            made = [self._executor.submit(job) for job in jobs]
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._submitted += made
        return [Job(LOCAL, job.job_id, str(job.paths.stdout)) for job in made]

    def room(self, running: int, waiting: int) -> int:
        self._submitted = [job for job in self._submitted if not job.done()]  # which also reaps their processes
        return max(0, min(waiting, (self._options.at_once or self._default) - running))

    def interrupted(self, jobs: Mapping[str, Job]) -> str:
        """They are ended: nobody expects processes that go on after Ctrl-C on one's own machine."""
        ended = [job for job in jobs.values() if job.on == LOCAL and is_controller(self._sweep, job.id)]
        for job in ended:
            with suppress(ProcessLookupError):
                os.kill(int(job.id), signal.SIGTERM)  # to submitit's controller, which passes it on
        self.close()
        return f"Jobs that were running and have been ended: {len(ended)}."

    def close(self) -> None:
        """Wait for the processes, which end a moment after their outcome is there."""
        for job in self._submitted:
            job._process.wait()
        self._submitted = []


class SlurmJobs(JobSystem):
    """The queue of a cluster."""

    name = SLURM

    def __init__(self, sweep: Path, options: ClusterOptions, default: int) -> None:
        super().__init__(sweep, options, default)
        import submitit

        self._executor = submitit.SlurmExecutor(logs_folder(sweep))
        given = {
            "partition": options.partition, "account": options.account, "qos": options.qos,
            "constraint": options.constraint, "cpus_per_task": options.cpus,
            "mem": None if options.memory is None else f"{math.ceil(1024 * options.memory)}M",
            "gpus_per_node": options.gpus, "setup": list(options.setup) or None,
            "additional_parameters": {"signal": f"{BEFORE_LIMIT}@{_WARNING}", **options.sbatch},
        }  # fmt: skip
        # submitit's own defaults, five minutes and a key for accounting, are left out by None.
        self._executor.update_parameters(
            job_name=f"codistill-{sweep.resolve().name}", time=options.time, wckey=None, stderr_to_stdout=True,
            array_parallelism=options.at_once or _ARRAY,
            **{key: value for key, value in given.items() if value is not None},
        )  # fmt: skip

    def submit(self, jobs: Sequence[CellJob]) -> list[Job]:
        """Submit them as one array, of which the scheduler runs so many at once."""
        made = []
        try:
            with _variables_of_jobs(), self._executor.batch():
                made = [self._executor.submit(job) for job in jobs]
        except Exception as error:  # whatever sbatch, and submitit, say
            raise RuntimeFault(
                "Slurm must accept the jobs of a sweep.",
                " ".join(str(error).split())[-300:],
                "Check --on-option and --on-file, or ask your site which options it needs.",
            ) from None
        return [Job(SLURM, job.job_id, str(job.paths.stdout)) for job in made]

    def room(self, running: int, waiting: int) -> int:
        """All that wait: how many run at once is up to the scheduler."""
        return min(waiting, _ARRAY)

    def interrupted(self, jobs: Mapping[str, Job]) -> str:
        """They stay in the queue, as jobs do when one logs out."""
        return f"Jobs that go on in Slurm: {len(jobs)}. To cancel them{how_to_cancel(jobs)}"


@contextmanager
def _variables_of_jobs() -> Iterator[None]:
    """The environment that jobs get.

    Inside a job (`salloc`, `srun --pty`) without its variables, which srun in a new job would take for options. With
    `--requeue`, without which a site may forbid that a job is put into the queue again.
    """
    before = dict(os.environ)
    for name in before:
        if "SLURM_JOB_ID" in before and name.startswith("SLURM_") and name != "SLURM_CONF":
            del os.environ[name]
    if "SBATCH_NO_REQUEUE" not in before:
        os.environ["SBATCH_REQUEUE"] = "1"
    try:
        yield
    finally:
        os.environ.pop("SBATCH_REQUEUE", None)
        os.environ.update(before)


@dataclass
class _Task:
    """The newest task of a run: what it does, its reference, and how many of its tasks there were."""

    job: CellJob
    log: str
    ref: Any
    attempt: int = 1


class RayJobs(JobSystem):
    """Tasks of a Ray cluster. Each starts a process for its run, which is where everything is computed.

    Not in the worker of Ray itself: the runtime `processes` forks, which is unsafe in a process with Ray's threads, and
    a worker is used again, with what earlier runs have left in it. Tasks end with the command that submitted them.
    """

    name = RAY

    def __init__(self, sweep: Path, options: ClusterOptions, default: int) -> None:
        super().__init__(sweep, options, default)
        self._tasks: dict[str, _Task] = {}  # by id of the job; those that have not ended
        self._ended: dict[str, str] = {}  # why the others may have no outcome
        self._tell: Callable[[str], None] = print
        self._joined = ExitStack()

    def open(self, tell: Callable[[str], None]) -> None:
        """Join the cluster, or start one; a node must have all that a job asks for."""
        self._tell = tell
        subfolder(logs_folder(self._sweep))
        self._joined.enter_context(joined(self._options.address, store=_STORE))
        tell(cluster_line())
        job, nodes = Demand(1, _asked(self._options), "job"), alive_nodes()
        if room(nodes, job.each) < 1:  # Ray would wait for such a node, without a word
            raise too_little(job, nodes, do="Ask for less by --on-option or in --on-file, or add a node that has it.")

    def submit(self, jobs: Sequence[CellJob]) -> list[Job]:
        """Submit a task for each; Ray starts it when a node has room."""
        made = []
        for job in jobs:
            job = replace(job, workers=self._options.cpus or 1)
            log = str(logs_folder(self._sweep) / f"{Path(job.place).name}.log")
            task = _Task(job, log, self._start(job, log))
            made.append(Job(RAY, task.ref.task_id().hex(), log))
            self._tasks[made[-1].id] = task
        return made

    def _start(self, job: CellJob, log: str) -> Any:
        asked = _asked(self._options)
        options = {"num_cpus": asked.pop(CPU), "num_gpus": asked.pop(GPU, 0), "memory": asked.pop(MEMORY, None)}
        name = f"codistill {Path(job.place).name}"
        # Attempts are counted here, where they can be reported: Ray would repeat a task that lacks memory for ever.
        task = _ray().remote(run_on_node).options(**options, resources=asked, max_retries=0, name=name)
        return task.remote(json.dumps(asdict(job)), job.files, log, bool(self._options.gpus), __version__)

    def room(self, running: int, waiting: int) -> int:
        """All that wait, unless the number of jobs at once is limited."""
        at_once = self._options.at_once
        return waiting if at_once is None else max(0, min(waiting, at_once - running))

    def alive(self, jobs: Mapping[str, Job]) -> Collection[str]:
        """Those whose tasks Ray has not ended; a task whose process or node has ended is started again."""
        ids = {task.ref: id for id, task in self._tasks.items()}
        ended = _ray().wait(list(ids), num_returns=len(ids), timeout=0, fetch_local=False)[0] if ids else []
        for ref in ended:
            self._look_at(ids[ref])
        others = [name for name, job in jobs.items() if job.id not in self._tasks and job.id not in self._ended]
        return {name for name, job in jobs.items() if job.id in self._tasks} | alive_jobs(self._sweep, others).keys()

    def _look_at(self, id: str) -> None:
        """A task has ended: with an outcome in its run's files, with a reason that it has none, or to be repeated."""
        exceptions = _ray().exceptions
        task, again = self._tasks[id], False
        try:
            reason = _ray().get(task.ref)
        except exceptions.OutOfMemoryError as error:
            reason, again = f"Ray has ended it for want of memory: {_first(error)}", True
        except (exceptions.WorkerCrashedError, exceptions.NodeDiedError, exceptions.LocalRayletDiedError):
            reason, again = "the process or the node of its task has ended", True
        except exceptions.RayTaskError as error:
            if isinstance(error.cause, CodistillError):
                self._cancel()
                raise error.cause from None
            reason = f"its task has failed: {_first(error.cause or error)}"
        except exceptions.RayError as error:
            reason = f"Ray has ended its task: {_first(error)}"
        if again and read_outcome(Path(task.job.files)) is None and task.attempt < _ATTEMPTS:
            name = Path(task.job.place).name
            self._tell(f"{name}: {reason}; it goes on from its last checkpoint in a new task")
            self._tasks[id] = replace(task, ref=self._start(task.job, task.log), attempt=task.attempt + 1)
            return
        del self._tasks[id]
        self._ended[id] = f"{reason} ({task.attempt} times)" if again else reason

    def waits_for(self, job: Job) -> bool:
        """Not for a task of an earlier command, which ends with it; a new task waits until the run is free."""
        return job.on != RAY

    def why(self, job: Job) -> str:
        return self._ended.get(job.id) or super().why(job)

    def interrupted(self, jobs: Mapping[str, Job]) -> str:
        """They are ended, each at the end of its round: Ray has no tasks without the command that submitted them."""
        return f"Jobs that waited or were running and have been ended: {self._cancel()}."

    def _cancel(self) -> int:
        count = len(self._tasks)
        for task in self._tasks.values():
            _ray().cancel(task.ref)
        self.close()
        return count

    def close(self) -> None:
        """Wait for the tasks, which end a moment after the outcomes of their runs are there."""
        refs = [task.ref for task in self._tasks.values()]
        if refs:
            _ray().wait(refs, num_returns=len(refs), fetch_local=False)
        self._tasks = {}

    def leave(self) -> None:
        self._joined.close()


def _ray() -> Any:
    import ray

    return ray


def _asked(options: ClusterOptions) -> dict[str, float]:
    """What a job asks of a node, by Ray's names of resources."""
    memory = None if options.memory is None else math.ceil(_GB * options.memory)
    given = {CPU: options.cpus or 1, GPU: options.gpus, MEMORY: memory, **options.resources}
    return {name: amount for name, amount in given.items() if amount}


def _first(error: BaseException, length: int = 220) -> str:
    """The beginning of what an error says, in one line."""
    words = " ".join(str(error).split())
    return words if len(words) <= length else f"{words[:length]} ..."


def run_on_node(job: str, files: str, log: str, gpus: bool, version: str) -> str:
    """A task of Ray: run a job, by a process of its own; returns why there may be no outcome."""
    node = f"{platform.node()} ({_ray().util.get_node_ip_address()})"
    _check_node(node, Path(files), version)
    parent = Parent.here()
    command = [sys.executable, "-u", "-m", "codistill.experiments.sweep_jobs"]
    command += [job, str(parent.pid), str(parent.by_main_thread)]
    environment = os.environ if gpus else {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    # `ray.cancel` calls the handler of SIGINT: the run then ends at the end of its round.
    with GentleInterrupt(quiet=True, signals=(signal.SIGINT,)) as interrupt:
        with open(open_patiently(Path(log), os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab", buffering=0) as output:
            output.write(f"on node {node}\n".encode())
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True
            )
        asked = False
        while process.poll() is None:
            if interrupt.asked and not asked:
                asked = True
                process.terminate()
            time.sleep(_LOOK)
    if process.returncode >= 0:
        return f"its process on node {node} ended with exit code {process.returncode}"
    by = signal.Signals(-process.returncode)
    perhaps = ", perhaps for want of memory" if by == signal.SIGKILL else ""
    return f"its process on node {node} was ended by {by.name}{perhaps}"


def _check_node(node: str, files: Path, version: str) -> None:
    if version != __version__:
        raise RecipeError(
            "All nodes of a Ray cluster must have the same version of codistill.",
            f"{__version__} on node {node}, {version} where the sweep was started",
            "Install the same version on all of them.",
        )
    end = time.monotonic() + _LATE
    while not (files / "recipe.toml").exists():
        if time.monotonic() > end:
            raise StorageError(
                "The folder of a sweep must be on a file system that all nodes of the Ray cluster see.",
                f"no {files} on node {node}",
                "Choose such a folder by --out.",
            )
        time.sleep(_LOOK)


SYSTEMS: dict[str, type[JobSystem]] = {LOCAL: LocalJobs, SLURM: SlurmJobs, RAY: RayJobs}


def check_system(name: str) -> None:
    if name == RAY:
        check_installed()
        return
    if importlib.util.find_spec("submitit") is None:
        raise RecipeError(
            "--on needs the library submitit.", "it is not installed", "Install it: pip install 'codistill[cluster]'."
        )
    missing = [command for command in ("sbatch", "squeue", "srun") if name == SLURM and shutil.which(command) is None]
    if missing:
        raise RecipeError(
            "--on slurm must be given on a machine that has Slurm's commands.",
            f"no {missing[0]}",
            "Log in to the cluster and give the command there; or use --on local.",
        )


# --- The runs of a sweep as jobs, each told as it ends; jobs of an earlier attempt are waited for, not started again.

PAUSE = {LOCAL: 0.2, SLURM: 10.0, RAY: 0.2}  # seconds between two looks at jobs


@dataclass
class SweepJobs:
    """Has the runs of a sweep done by jobs; `failed` names those that have not succeeded."""

    folder: Path
    on: str
    options: ClusterOptions
    data_dir: str | None = field(default=None, kw_only=True)
    tell: Callable[[str], None] = field(default=print, kw_only=True)
    failed: list[str] = field(default_factory=list, init=False)

    def run(self, cells: Sequence[Cell]) -> Iterator[tuple[Cell, Outcome]]:
        # One job per core of this machine, but only one if a run uses several cores itself.
        own_workers = any(cell.recipe.spec.runtime != "simulation" for cell in cells)
        at_once = 1 if own_workers else default_workers(len(cells))
        system = SYSTEMS[self.on](self.folder, self.options, at_once)
        by_name: dict[str, Cell] = {}
        for cell in cells:
            rows = finished_rows(cell.recipe, cell.place)
            if rows is None:
                by_name[cell.place.name] = cell
            else:
                yield cell, rows
        earlier = alive_jobs(self.folder, list(by_name))
        running = {name: job for name, job in earlier.items() if system.waits_for(job)}
        waiting = [cell for name, cell in by_name.items() if name not in running]
        if by_name:
            self.tell(
                f"runs: {len(cells)}, of which done: {len(cells) - len(by_name)}, with a job that waits or runs: "
                f"{len(running)}, to be submitted ({self.on}): {len(waiting)}"
            )
            try:
                system.open(self.tell)
                yield from self._run(system, by_name, running, waiting)
            finally:
                system.leave()

    def _run(
        self, system: JobSystem, by_name: Mapping[str, Cell], running: dict[str, Job], waiting: list[Cell]
    ) -> Iterator[tuple[Cell, Outcome]]:
        missing: set[str] = set()  # jobs that were neither there nor ended when they were looked at last
        with GentleInterrupt(quiet=True) as interrupt:
            while running or waiting:
                now = waiting[: system.room(len(running), len(waiting))]
                running |= self._submit(system, now) if now else {}
                waiting = waiting[len(now) :]
                # Before their outcomes: a job that is not alive any more has written its outcome, if it has one.
                alive = system.alive(running)
                for name, job in list(running.items()):
                    lost = system.why(job) if name not in alive and name in missing else ""
                    outcome = self._outcome_of(by_name[name], job, name in alive, lost)
                    if outcome is not None:
                        del running[name]
                        yield by_name[name], outcome
                missing = running.keys() - set(alive)
                end = time.monotonic() + max((PAUSE[job.on] for job in running.values()), default=0)
                while not interrupt.asked and time.monotonic() < end:
                    time.sleep(_LOOK)
                if interrupt.asked:
                    self.tell(f"Stopped waiting. {system.interrupted(running)}")
                    yield next(iter(by_name.values())), None
                    return
        system.close()

    def _submit(self, system: JobSystem, cells: Sequence[Cell]) -> dict[str, Job]:
        files = {cell.place.name: job_folder(self.folder, cell.place.name) for cell in cells}
        calls = [write_job_files(cell, files[cell.place.name], self.data_dir) for cell in cells]
        jobs = dict(zip(files, system.submit(calls), strict=True))
        for name, job in jobs.items():
            write_job(files[name], job)
        return jobs

    def _outcome_of(self, cell: Cell, job: Job, alive: bool, lost: str) -> Outcome:
        """The outcome of a run whose job has ended, or was `lost` for some reason; None if it has not."""
        ended = read_outcome(job_folder(self.folder, cell.place.name))
        if ended is None and not lost:
            return None
        if alive and ended is not None and ended[0] in (STOPPED, FAILED):
            return None  # it is about to end; or Slurm has stopped it, and has put it into the queue again
        status, said = ended or ("", lost)
        if status == SKIPPED:
            return said
        rows = finished_rows(cell.recipe, cell.place) if status == DONE else None
        if rows is not None:
            return rows
        self.failed.append(cell.words)
        return "\n".join([f"failed: {said}", *(f"    {line}" for line in last_lines(job.log)), f"    log: {job.log}"])
