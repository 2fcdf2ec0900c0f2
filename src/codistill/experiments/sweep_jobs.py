"""The runs of a sweep, done here or by jobs: the options that a system takes for jobs, what a job does, and its files.

In a sweep's folder, `.jobs/NAME/` belongs to the run in `NAME/`: the recipe as it was when the job was submitted, its
id, its outcome, and a lock that the job holds while it runs. No run's folder begins with a dot.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import signal
import subprocess
import sys
import time
import traceback
import typing
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import FrameType
from typing import Any

import tomli_w

from codistill.core.errors import CodistillError, LearnerError, RecipeError
from codistill.core.files import lock, write_atomically, writing
from codistill.core.settings import check_settings, from_table, setting
from codistill.core.text import parse_json, parse_toml
from codistill.engine.store import METRICS, read_rows
from codistill.experiments.recipe import Recipe, code_digests, with_code
from codistill.experiments.run import execute
from codistill.experiments.saved_run import RECIPE, is_run_of, reopen
from codistill.results.records import Row
from codistill.runtimes.ray_cluster import ADDRESS_HELP
from codistill.runtimes.workers import Parent

Outcome = list[Row] | str | None  # rows; or why there are none; or None: it was interrupted


@dataclass(frozen=True)
class Cell:
    """One run of a sweep: a combination of values, in words, its recipe, and its folder."""

    labels: dict[str, str]
    words: str
    recipe: Recipe
    place: Path


def outcome_of(
    recipe: Recipe, place: Path, data_dir: str | None, workers: int | None = None, *, report: bool = True
) -> Outcome:
    """The outcome of one run, which is run first if it is not done.

    `workers`: worker processes, where the recipe does not say how many; they change no result, and are not kept.
    `report`: whether a report is written.
    """
    try:
        rows = finished_rows(recipe, place)
        if rows is not None:
            return rows
        begun = (place / RECIPE).exists()
        recipe = replace(recipe, spec=replace(recipe.spec, workers=recipe.spec.workers or workers))
        _, complete = execute(recipe, place, data_dir=data_dir, resume=begun, progress=False, report=report)
        return read_rows(place / METRICS) if complete else None
    except LearnerError as error:  # such as averaging the weights of different architectures
        return f"skipped. {error.must} Found: {error.found}"


def finished_rows(recipe: Recipe, place: Path) -> list[Row] | None:
    if not (place / RECIPE).exists():
        return None
    if not is_run_of(recipe, place):
        raise RecipeError(
            "The folder of a sweep or a search must hold runs of the same recipe.",
            f"{place} holds a run of another",
            "Choose another --out, or remove that folder.",
        )
    rows = read_rows(place / METRICS) if (place / METRICS).exists() else []
    return rows if any(row["round"] == recipe.spec.rounds for row in rows) else None


# --- Options of jobs, and what their files say of each.

JOBS, LOGS = ".jobs", ".logs"  # the first in a sweep's folder, the second in the first
LOCAL, SLURM, RAY = "local", "slurm", "ray"
_JOB, _OUTCOME = "job.json", "outcome.json"
BEFORE_LIMIT = "USR2"  # the signal that Slurm sends before a time limit
DONE, SKIPPED, STOPPED, FAILED = "done", "skipped", "stopped", "failed"
# The options that each system takes; any other is refused.
TAKES = {
    LOCAL: ("at_once", "gpus", "setup"),
    SLURM: (
        "at_once", "partition", "account", "qos", "constraint", "time", "cpus", "memory", "gpus", "setup", "sbatch",
    ),
    RAY: ("at_once", "address", "cpus", "memory", "gpus", "resources"),
}  # fmt: skip
_RAYS_OWN = {"CPU": "cpus", "GPU": "gpus", "memory": "memory"}  # resources of Ray that have an option of their own


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """Options of jobs; `TAKES` says where they can be given."""

    at_once: int | None = setting(
        None, "jobs at once; unset: in Slurm and Ray as there is room, on this machine one per core", at_least=1
    )
    partition: str | None = setting(None, "Slurm's partition")
    account: str | None = setting(None, "the account that is charged")
    qos: str | None = setting(None, "the quality of service")
    constraint: str | None = setting(None, "features that a node must have")
    time: str | int | None = setting(None, 'time limit of a job: minutes, or as Slurm writes it, e.g. "1-12:00:00"')
    cpus: int | None = setting(None, "cores of a job; unset: as the site has it; in Ray one", at_least=1)
    memory: float | None = setting(None, "memory of a job in GB", above=0)
    gpus: int | float | None = setting(None, "GPUs of a job; in Ray also a part of one, e.g. 0.25", at_least=0)
    setup: tuple[str, ...] = setting((), 'shell commands before the job, e.g. ["module load python"]')
    sbatch: dict[str, str] = setting(factory=dict, help="further options of sbatch by their long names")
    address: str | None = setting(None, ADDRESS_HELP)
    resources: dict[str, float] = setting(factory=dict, help="custom resources of Ray that a job needs, by their names")

    def __post_init__(self) -> None:
        check_settings(self, "on-option")
        for name, amount in self.resources.items():
            if not (math.isfinite(amount) and amount > 0):
                raise RecipeError(
                    f"on-option.resources.{name} must be above 0.", f"{amount}", "Leave it out, or change it."
                )
            if name in _RAYS_OWN:
                raise RecipeError(
                    "on-option.resources holds the custom resources of a Ray cluster.",
                    f"'{name}'",
                    f"Use --on-option {_RAYS_OWN[name]}=... instead.",
                )

    def check_for(self, on: str) -> None:
        """Refuse what this system does not take: nothing that was asked for is left out silently."""
        unset = ClusterOptions()
        given = [field.name for field in fields(self) if getattr(self, field.name) != getattr(unset, field.name)]
        others = [name for name in given if name not in TAKES[on]]
        if others:
            where = " or ".join(f"--on {system}" for system in TAKES if others[0] in TAKES[system])
            raise RecipeError(
                f"--on {on} takes these options: {', '.join(sorted(TAKES[on]))}.",
                ", ".join(f"'{name}'" for name in others),
                f"Leave out '{others[0]}', or use it with {where}.",
            )
        if on != RAY and self.gpus is not None and self.gpus != int(self.gpus):
            raise RecipeError(f"--on {on} gives whole GPUs to a job.", f"gpus={self.gpus}", "Or use --on ray.")


def cluster_options(file: Path | None = None, changes: Sequence[str] = (), on: str | None = None) -> ClusterOptions:
    """Options from a TOML file, with those of the command line, KEY=VALUE, in their place; `on`: for this system."""
    table = {} if file is None else _read_options(file)
    for change in changes:
        key, equals, value = (part.strip() for part in change.partition("="))
        if not equals or not key:
            raise RecipeError("--on-option must have the form KEY=VALUE.", f"'{change}'", "Example: partition=gpu.")
        head, dot, name = key.partition(".")
        if dot and name and head in ("sbatch", "resources"):
            before = table.get(head)
            table[head] = {**(before if isinstance(before, dict) else {}), name: _number(head, value)}
        else:
            table[key] = [value] if key == "setup" else _number(key, value)
    made: ClusterOptions = from_table(ClusterOptions, table, "on-option")
    if on is not None:
        made.check_for(on)
    return made


def _read_options(file: Path) -> dict[str, Any]:
    try:
        table = parse_toml(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise RecipeError("--on-file must name a TOML file.", f"{file}: {error}"[:200], "Correct it.") from None
    if isinstance(table.get("time"), datetime.time):  # TOML has times of day, written as Slurm's limits
        table["time"] = str(table["time"])
    if isinstance(table.get("sbatch"), dict):
        table["sbatch"] = {key: str(value) for key, value in table["sbatch"].items()}
    return table


def _number(key: str, value: str) -> Any:
    """The value of a field that is a number as one; any other as it is, also where it looks like a number."""
    kinds = typing.get_args(typing.get_type_hints(ClusterOptions).get(key))  # of a table those of keys and values
    if key == "resources":
        kinds = kinds[1:]
    for kind in (int, float):
        if kind in kinds and str not in kinds:
            with suppress(ValueError):
                return kind(value)
    return value


@dataclass(frozen=True)
class Job:
    """A job that was submitted: where, under which id, and the file of what it prints."""

    on: str
    id: str
    log: str


def job_folder(sweep: Path, name: str) -> Path:
    return sweep / JOBS / name


def read_job(folder: Path) -> Job | None:
    """The job that was submitted last; None if there is none, or a file that was not written by this module."""
    try:
        return Job(**{key: str(value) for key, value in _read(folder / _JOB).items()})
    except TypeError:
        return None


def write_job(folder: Path, job: Job) -> None:
    write_atomically(folder / _JOB, json.dumps(asdict(job)).encode())


def write_outcome(folder: Path, status: str, said: str = "") -> None:
    write_atomically(folder / _OUTCOME, json.dumps({"status": status, "said": said}).encode())


def read_outcome(folder: Path) -> tuple[str, str] | None:
    """How a job ended, and what there is to say about it; None if it has not, or was killed."""
    outcome = _read(folder / _OUTCOME)
    return (str(outcome["status"]), str(outcome.get("said", ""))) if "status" in outcome else None


def _read(path: Path) -> dict[str, Any]:
    try:
        content = parse_json(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def alive_jobs(sweep: Path, names: Sequence[str]) -> dict[str, Job]:
    jobs = {name: job for name in names if (job := read_job(job_folder(sweep, name))) is not None}
    queued = _in_queue() if any(job.on == SLURM for job in jobs.values()) else None
    alive = {}
    for name, job in jobs.items():
        if job.on == SLURM:
            listed = queued is None or job.id in queued
        else:  # Ray ends the tasks of a command with it; only that command knows which of them still wait
            listed = job.on == LOCAL and is_controller(sweep, job.id)
        # A job whose controller was killed may go on by itself; it has its lock.
        if listed or is_locked(job_folder(sweep, name)):
            alive[name] = job
    return alive


def _in_queue() -> set[str] | None:
    """The ids of this user's jobs that wait or run in Slurm; None if it does not say: none is then taken for dead."""
    # By number: LOGNAME may be that of another user. Without SQUEUE_*, by which users choose what squeue shows to them.
    command = ["squeue", "--noheader", "--array", f"--user={os.getuid()}", "--format=%i"]
    plain = {name: value for name, value in os.environ.items() if not name.startswith("SQUEUE_")}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=plain)
        return set(done.stdout.split())
    except (OSError, subprocess.SubprocessError):
        return None


def is_controller(sweep: Path, process: str) -> bool:
    """Whether a process is one by which submitit controls a job of this sweep, and not a later one of the same id."""
    try:
        words = Path(f"/proc/{process}/cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
    except OSError:
        if Path("/proc/self/cmdline").exists():
            return False
        try:
            words = subprocess.run(["ps", "-p", process, "-o", "command="], capture_output=True, text=True).stdout
        except OSError:
            return False
    return "submitit" in words and str(logs_folder(sweep)) in words


def logs_folder(sweep: Path) -> Path:
    """Where the logs of all jobs are, and the files of submitit."""
    return (sweep / JOBS / LOGS).resolve()


def is_locked(folder: Path) -> bool:
    try:
        lock(folder).close()
    except OSError as error:  # it is locked, or there is no such folder
        return isinstance(error, BlockingIOError)
    return False


def check_no_jobs(sweep: Path, names: Sequence[str]) -> None:
    """A run that a job is at must not be run here as well."""
    alive = alive_jobs(sweep, names) if (sweep / JOBS).is_dir() else {}
    if alive:
        name, job = next(iter(alive.items()))
        raise RecipeError(
            f"No job may be at a run of {sweep} that is to be run here.",
            f"{job.id} for '{name}', of {len(alive)} that wait or run",
            f"Wait for them by the same command with --on {job.on}, or cancel them{how_to_cancel(alive)}.",
        )


def how_to_cancel(jobs: Mapping[str, Job]) -> str:
    """The command that cancels jobs in Slurm, arrays as a whole; empty where there are none."""
    ids = dict.fromkeys(job.id.partition("_")[0] for job in jobs.values() if job.on == SLURM)
    return f": scancel {' '.join(ids)}" if ids else ""


def last_lines(log: str) -> list[str]:
    try:
        text = Path(log).read_text("utf-8", errors="replace")
    except OSError:
        return []
    return [line.rstrip() for line in text.splitlines() if line.strip()][-6:]


# --- What a job does: one run, as the sweep itself would do it, and a file that says how it ended.

_CODE = "code.json"  # digests of the user's own files
_LOOK = 0.1  # seconds between two looks at whether another process still has a run


@dataclass(frozen=True)
class CellJob:
    """One run of a sweep, as text: submitit pickles the name of this class and these fields, Ray gets them as JSON."""

    files: str  # the folder of the job's files
    place: str  # the folder of the run
    data_dir: str | None
    workers: int | None = None  # worker processes, where the recipe does not say; None: one per core of this process

    def __call__(self) -> None:
        """Run it, or go on with it from its last checkpoint."""
        folder = Path(self.files)
        # submitit ignores SIGTERM; here it ends the job: at once, or at the end of a round while the run handles it.
        before = {signal.SIGTERM: signal.signal(signal.SIGTERM, signal.SIG_DFL)}
        try:
            with closing(lock(folder)):
                (folder / _OUTCOME).unlink(missing_ok=True)  # of the same job, before it was put into the queue again
                if os.environ.get("SUBMITIT_EXECUTOR") == SLURM:
                    number = signal.Signals[f"SIG{BEFORE_LIMIT}"]
                    before[number] = signal.signal(number, self._requeue())
                self._run(folder)
        except BlockingIOError:
            print("Another job is at this run, and goes on.", file=sys.stderr)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _run(self, folder: Path) -> None:
        try:
            recipe = reopen(folder)  # no code is run before it was compared
            if code_digests(recipe) != parse_json((folder / _CODE).read_text("utf-8")):
                raise RecipeError(
                    "Files of your own protocols and models must stay as they are while jobs wait.",
                    "they have changed since this job was submitted",
                    "Give the same command again: the job is then submitted with the files as they are.",
                )
            outcome = outcome_of(with_code(recipe), Path(self.place), self.data_dir, self.workers)
        except Exception as error:  # of the user's or a defect: told in the log, and to whoever waits for this job
            if not isinstance(error, CodistillError):
                traceback.print_exc()
            said = str(error) if isinstance(error, CodistillError) else f"{type(error).__name__}: {error}"
            print(f"error: {said}", file=sys.stderr, flush=True)
            write_outcome(folder, FAILED, said)
            sys.exit(1)  # the cluster's own records then say that it has failed
        if outcome is None:
            write_outcome(folder, STOPPED, "it was stopped, by a signal, at the end of a round")
        elif isinstance(outcome, str):
            write_outcome(folder, SKIPPED, outcome)
        else:
            write_outcome(folder, DONE)

    def _requeue(self) -> Callable[[int, FrameType | None], None]:
        """What to do before a time limit: put this job into Slurm's queue again. Runs keep checkpoints by themselves.

        submitit would do it, but only if the limit was given to it as a number of minutes.
        """
        owner, begun = os.getpid(), self._checkpoints()

        def handle(number: int, frame: FrameType | None) -> None:
            if os.getpid() != owner:  # Slurm signals all processes of a job; workers are forked with this handler
                return
            same = self._checkpoints() == begun
            refused = "it has made no checkpoint since it was started" if same else _refusal_to_requeue()
            said = f"but not put into the queue again: {refused}" if refused else "and put into the queue again"
            # The signal may come in the middle of a write to the same stream, which then cannot be written to.
            with suppress(RuntimeError, OSError, ValueError):
                print(f"Near its time limit, {said}.", file=sys.stderr, flush=True)
            if not refused:
                sys.exit(1)

        return handle

    def _checkpoints(self) -> list[str]:
        return sorted(path.name for path in Path(self.place).glob("checkpoints/round-*.state"))


def _refusal_to_requeue() -> str:
    """Put this job into Slurm's queue again; why it could not be, or nothing."""
    from submitit import JobEnvironment

    command = ["scontrol", "requeue", JobEnvironment().job_id]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    # Below 0: ended by the signal by which Slurm, having agreed, ends all processes of the job.
    return (done.stderr.strip() or f"scontrol ended with {done.returncode}") if done.returncode > 0 else ""


def write_job_files(cell: Cell, folder: Path, data_dir: str | None) -> CellJob:
    """Write what a job needs: its recipe as it is now, whatever becomes of the files that it was read from."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name in (_JOB, _OUTCOME):  # of the job before
            (folder / name).unlink(missing_ok=True)
    write_atomically(folder / RECIPE, tomli_w.dumps(cell.recipe.source).encode())
    write_atomically(folder / _CODE, json.dumps(code_digests(cell.recipe)).encode())
    data = None if data_dir is None else str(Path(data_dir).resolve())
    return CellJob(str(folder.resolve()), str(cell.place.resolve()), data)


def run_for_task(job: str, pid: str, by_main_thread: str) -> None:
    """In the process of a run that a task of Ray has started: run it, and end at once when that task's process ends."""
    Parent(int(pid), by_main_thread == "True").end_with()
    cell = CellJob(**parse_json(job))
    while is_locked(Path(cell.files)):  # by the run's process of before, whose node was cut off or is about to end
        time.sleep(_LOOK)
    cell()


if __name__ == "__main__":
    run_for_task(*sys.argv[1:])
