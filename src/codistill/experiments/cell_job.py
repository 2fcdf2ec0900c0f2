"""What a job of a sweep does: one run, as the sweep itself would do it, and a file that says how it ended."""

from __future__ import annotations

import json
import signal
import sys
import traceback
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from codistill.errors import CodistillError, RecipeError
from codistill.experiments.recipe import Recipe, code_of, with_code
from codistill.experiments.saved_run import RECIPE, reopen
from codistill.experiments.sweep_jobs import DONE, FAILED, SKIPPED, STOPPED, forget_job, write_outcome
from codistill.experiments.sweep_run import Cell, Outcome, outcome_of
from codistill.experiments.user_code import files_of
from codistill.files import lock, write_atomically, writing
from codistill.text import parse_json

_CODE = "code.json"  # digests of the user's own files


@dataclass(frozen=True)
class CellJob:
    """One run of a sweep, as text: submitit pickles the name of this class and these three."""

    files: str  # the folder of the job's files
    place: str  # the folder of the run
    data_dir: str | None

    def __call__(self) -> None:
        """Run it, or go on with it from its last checkpoint."""
        folder = Path(self.files)
        # submitit ignores SIGTERM; here it ends the job: at once, or at the end of a round while the run handles it.
        before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
        try:
            with closing(lock(folder)):
                self._run(folder)
        except BlockingIOError:
            print("Another job is at this run, and goes on.", file=sys.stderr)
        finally:
            signal.signal(signal.SIGTERM, before)

    def _run(self, folder: Path) -> None:
        try:
            outcome = outcome_of(_checked_recipe(folder), Path(self.place), self.data_dir)
        except Exception as error:  # of the user's or a defect: told in the log, and to whoever waits for this job
            if not isinstance(error, CodistillError):
                traceback.print_exc()
            said = str(error) if isinstance(error, CodistillError) else f"{type(error).__name__}: {error}"
            print(f"error: {said}", file=sys.stderr, flush=True)
            write_outcome(folder, FAILED, said)
            sys.exit(1)  # the cluster's own records then say that it has failed
        write_outcome(folder, *_told(outcome))

    def checkpoint(self) -> Any:
        """Called by submitit before a time limit: put it into the queue again. Runs keep checkpoints by themselves."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


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
