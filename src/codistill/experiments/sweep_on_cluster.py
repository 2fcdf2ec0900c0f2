"""The runs of a sweep as jobs, each told as it ends; jobs of an earlier attempt are waited for, not started again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from codistill.experiments.cell_job import write_job_files
from codistill.experiments.cluster_options import ClusterOptions
from codistill.experiments.job_systems import SYSTEMS, JobSystem
from codistill.experiments.sweep_jobs import (
    DONE,
    FAILED,
    LOCAL,
    RAY,
    SKIPPED,
    SLURM,
    STOPPED,
    Job,
    alive_jobs,
    job_folder,
    last_lines,
    read_outcome,
    write_job,
)
from codistill.experiments.sweep_run import Cell, Outcome, finished_rows
from codistill.runtimes.interrupt import GentleInterrupt
from codistill.runtimes.processes import default_workers

PAUSE = {LOCAL: 0.2, SLURM: 10.0, RAY: 0.2}  # seconds between two looks at jobs
_LOOK = 0.1  # seconds between two looks at whether somebody has asked to stop


class SweepJobs:
    """Has the runs of a sweep done by jobs; `failed` names those that have not succeeded."""

    def __init__(
        self,
        folder: Path,
        on: str,
        options: ClusterOptions,
        *,
        data_dir: str | None = None,
        tell: Callable[[str], None] = print,
    ) -> None:
        self.failed: list[str] = []
        self._folder, self._on, self._options = folder, on, options
        self._data_dir, self._tell = data_dir, tell

    def run(self, cells: Sequence[Cell]) -> Iterator[tuple[Cell, Outcome]]:
        """The outcome of each run, as they end."""
        system = SYSTEMS[self._on](self._folder, self._options, _at_once(cells))
        waiting: list[Cell] = []
        for cell in cells:
            rows = finished_rows(cell.recipe, cell.place)
            if rows is None:
                waiting.append(cell)
            else:
                yield cell, rows
        by_name = {cell.place.name: cell for cell in waiting}
        earlier = alive_jobs(self._folder, list(by_name))
        running = {name: job for name, job in earlier.items() if system.waits_for(job)}
        waiting = [cell for cell in waiting if cell.place.name not in running]
        if by_name:
            self._tell(
                f"runs: {len(cells)}, of which done: {len(cells) - len(by_name)}, with a job that waits or runs: "
                f"{len(running)}, to be submitted ({self._on}): {len(waiting)}"
            )
            try:
                system.open(self._tell)
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
                if self._is_asked(interrupt, max((PAUSE[job.on] for job in running.values()), default=0)):
                    self._tell(f"Stopped waiting. {system.interrupted(running)}")
                    yield next(iter(by_name.values())), None
                    return
        system.close()

    def _submit(self, system: JobSystem, cells: Sequence[Cell]) -> dict[str, Job]:
        files = {cell.place.name: job_folder(self._folder, cell.place.name) for cell in cells}
        calls = [write_job_files(cell, files[cell.place.name], self._data_dir) for cell in cells]
        jobs = dict(zip(files, system.submit(calls), strict=True))
        for name, job in jobs.items():
            write_job(files[name], job)
        return jobs

    def _outcome_of(self, cell: Cell, job: Job, alive: bool, lost: str) -> Outcome:
        """The outcome of a run whose job has ended, or was `lost` for some reason; None if it has not."""
        ended = read_outcome(job_folder(self._folder, cell.place.name))
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

    def _is_asked(self, interrupt: GentleInterrupt, pause: float) -> bool:
        end = time.monotonic() + pause
        while not interrupt.asked and time.monotonic() < end:
            time.sleep(_LOOK)
        return interrupt.asked


def _at_once(cells: Sequence[Cell]) -> int:
    """Runs at once on this machine: one per core, but only one if it uses several cores itself."""
    own_workers = any(cell.recipe.runtime.kind != "simulation" for cell in cells)
    return 1 if own_workers else default_workers(len(cells))
