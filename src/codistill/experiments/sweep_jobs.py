"""Jobs of a sweep's runs, from their files alone: which there are, whether one still waits or runs, how it ended.

In a sweep's folder, `.jobs/NAME/` belongs to the run in `NAME/`: the recipe as it was when the job was submitted, its
id, its outcome, and a lock that the job holds while it runs. No run's folder begins with a dot.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from codistill.errors import RecipeError
from codistill.files import lock, write_atomically
from codistill.text import parse_json

JOBS, LOGS = ".jobs", ".logs"  # the first in a sweep's folder, the second in the first
LOCAL, SLURM, RAY = "local", "slurm", "ray"
_JOB, _OUTCOME = "job.json", "outcome.json"
BEFORE_LIMIT = "USR2"  # the signal that Slurm sends before a time limit
DONE, SKIPPED, STOPPED, FAILED = "done", "skipped", "stopped", "failed"


@dataclass(frozen=True)
class Job:
    """A job that was submitted: where, under which id, and the file of what it prints."""

    on: str
    id: str
    log: str


def job_folder(sweep: Path, name: str) -> Path:
    """Where the files of a run's job are."""
    return sweep / JOBS / name


def read_job(folder: Path) -> Job | None:
    """The job that was submitted last; None if there is none, or a file that was not written by this module."""
    try:
        return Job(**{key: str(value) for key, value in _read(folder / _JOB).items()})
    except TypeError:
        return None


def write_job(folder: Path, job: Job) -> None:
    """Keep which job it is."""
    write_atomically(folder / _JOB, json.dumps(asdict(job)).encode())


def write_outcome(folder: Path, status: str, said: str = "") -> None:
    """Keep how a job ended."""
    write_atomically(folder / _OUTCOME, json.dumps({"status": status, "said": said}).encode())


def read_outcome(folder: Path) -> tuple[str, str] | None:
    """How a job ended, and what there is to say about it; None if it has not, or was killed."""
    outcome = _read(folder / _OUTCOME)
    return (str(outcome["status"]), str(outcome.get("said", ""))) if "status" in outcome else None


def forget_job(folder: Path) -> None:
    """Remove the id and the outcome of the job before."""
    (folder / _JOB).unlink(missing_ok=True)
    forget_outcome(folder)


def forget_outcome(folder: Path) -> None:
    """Remove the outcome: of the job before, or of the same job before it was put into the queue again."""
    (folder / _OUTCOME).unlink(missing_ok=True)


def _read(path: Path) -> dict[str, Any]:
    try:
        content = parse_json(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def alive_jobs(sweep: Path, names: Sequence[str]) -> dict[str, Job]:
    """By the name of the run, the jobs that wait or run."""
    jobs = {name: job for name in names if (job := read_job(job_folder(sweep, name))) is not None}
    queued = _in_queue() if any(job.on == SLURM for job in jobs.values()) else None
    return {name: job for name, job in jobs.items() if _is_alive(sweep, name, job, queued)}


def _is_alive(sweep: Path, name: str, job: Job, queued: set[str] | None) -> bool:
    match job.on:
        case "slurm":
            listed = queued is None or job.id in queued
        case "local":
            listed = is_controller(sweep, job.id)
        case _:  # Ray ends the tasks of a command with it; only that command knows which of them still wait
            listed = False
    # A job whose controller was killed may go on by itself; it has its lock.
    return listed or is_locked(job_folder(sweep, name))


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
        words = _command_by_ps(process)
    return "submitit" in words and str(logs_folder(sweep)) in words


def _command_by_ps(process: str) -> str:
    try:
        return subprocess.run(["ps", "-p", process, "-o", "command="], capture_output=True, text=True).stdout
    except OSError:
        return ""


def logs_folder(sweep: Path) -> Path:
    """Where the logs of all jobs are, and the files of submitit."""
    return (sweep / JOBS / LOGS).resolve()


def is_locked(folder: Path) -> bool:
    """Whether a job is at the run whose job files are in this folder."""
    try:
        lock(folder).close()
    except BlockingIOError:
        return True
    except OSError:  # no such folder
        return False
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


def last_lines(log: str, count: int = 6) -> list[str]:
    """The end of a log; empty if there is none."""
    try:
        text = Path(log).read_text("utf-8", errors="replace")
    except OSError:
        return []
    return [line.rstrip() for line in text.splitlines() if line.strip()][-count:]
