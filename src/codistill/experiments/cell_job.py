"""What a job of a sweep does: one run, as the sweep itself would do it, and a file that says how it ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import tomli_w

from codistill.errors import CodistillError, RecipeError
from codistill.experiments.recipe import Recipe, code_of, with_code
from codistill.experiments.saved_run import RECIPE, reopen
from codistill.experiments.sweep_jobs import (
    BEFORE_LIMIT,
    DONE,
    FAILED,
    SKIPPED,
    SLURM,
    STOPPED,
    forget_job,
    forget_outcome,
    is_locked,
    write_outcome,
)
from codistill.experiments.sweep_run import Cell, Outcome, outcome_of
from codistill.experiments.user_code import files_of
from codistill.files import lock, write_atomically, writing
from codistill.runtimes.parent import Parent
from codistill.text import parse_json

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
                forget_outcome(folder)
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
            outcome = outcome_of(_checked_recipe(folder), Path(self.place), self.data_dir, self.workers)
        except Exception as error:  # of the user's or a defect: told in the log, and to whoever waits for this job
            if not isinstance(error, CodistillError):
                traceback.print_exc()
            said = str(error) if isinstance(error, CodistillError) else f"{type(error).__name__}: {error}"
            print(f"error: {said}", file=sys.stderr, flush=True)
            write_outcome(folder, FAILED, said)
            sys.exit(1)  # the cluster's own records then say that it has failed
        write_outcome(folder, *_told(outcome))

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


def _told(outcome: Outcome) -> tuple[str, str]:
    if outcome is None:
        return STOPPED, "it was stopped, by a signal, at the end of a round"
    return (SKIPPED, outcome) if isinstance(outcome, str) else (DONE, "")


def write_job_files(cell: Cell, folder: Path, data_dir: str | None) -> CellJob:
    """Write what a job needs: its recipe as it is now, whatever becomes of the files that it was read from."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        forget_job(folder)
    write_atomically(folder / RECIPE, tomli_w.dumps(cell.recipe.source).encode())
    write_atomically(folder / _CODE, json.dumps(_code(cell.recipe)).encode())
    data = None if data_dir is None else str(Path(data_dir).resolve())
    return CellJob(str(folder.resolve()), str(cell.place.resolve()), data)


def _checked_recipe(folder: Path) -> Recipe:
    recipe = reopen(folder)  # no code is run before it was compared
    if _code(recipe) != parse_json((folder / _CODE).read_text("utf-8")):
        raise RecipeError(
            "Files of your own protocols and models must stay as they are while jobs wait.",
            "they have changed since this job was submitted",
            "Give the same command again: the job is then submitted with the files as they are.",
        )
    return with_code(recipe)


def _code(recipe: Recipe) -> dict[str, Any]:
    return {str(path): code for path, code in files_of(code_of(recipe)).items()}


def run_for_task(job: str, pid: str, by_main_thread: str) -> None:
    """In the process of a run that a task of Ray has started: run it, and end at once when that task's process ends."""
    Parent(int(pid), by_main_thread == "True").end_with()
    cell = CellJob(**parse_json(job))
    while is_locked(Path(cell.files)):  # by the run's process of before, whose node was cut off or is about to end
        time.sleep(_LOOK)
    cell()


if __name__ == "__main__":
    run_for_task(*sys.argv[1:])
