"""Where jobs of a sweep run: processes of this machine or Slurm, both through submitit (extra `cluster`)."""

from __future__ import annotations

import importlib.util
import math
import os
import shutil
import signal
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from codistill.errors import RecipeError, RuntimeFault
from codistill.experiments.cell_job import CellJob
from codistill.experiments.cluster_options import ClusterOptions
from codistill.experiments.sweep_jobs import LOCAL, SLURM, Job, how_to_cancel, is_controller, logs_folder

_NO_LIMIT = 366 * 24 * 60  # minutes; submitit would end local jobs after two
_ARRAY = 1000  # jobs in one array: what Slurm allows unless it is told otherwise


class JobSystem(ABC):
    """Submits jobs of one sweep."""

    name: str

    def __init__(self, sweep: Path, options: ClusterOptions) -> None:
        check_system(self.name)
        self._sweep, self._options = sweep, options

    @abstractmethod
    def submit(self, jobs: Sequence[CellJob]) -> list[Job]:
        """Submit jobs, in their order."""

    @abstractmethod
    def room(self, running: int, waiting: int) -> int:
        """How many more jobs to submit now."""

    def close(self) -> None:
        """All jobs have ended."""

    @abstractmethod
    def interrupted(self, jobs: Mapping[str, Job]) -> str:
        """What becomes of jobs when whoever waits for them is interrupted, for a person."""


class LocalJobs(JobSystem):
    """Processes of this machine."""

    name = LOCAL

    def __init__(self, sweep: Path, options: ClusterOptions, default: int) -> None:
        super().__init__(sweep, options)
        import submitit

        self._at_once = options.at_once or default
        self._executor = submitit.LocalExecutor(logs_folder(sweep))
        self._executor.update_parameters(
            timeout_min=_NO_LIMIT, gpus_per_node=options.gpus or 0, stderr_to_stdout=True, setup=list(options.setup)
        )
        self._submitted: list[Any] = []

    def submit(self, jobs: Sequence[CellJob]) -> list[Job]:
        """Start a process for each."""
        # They inherit that SIGINT is blocked: Ctrl-C, which a terminal sends to all, is for whoever waits for them.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            made = [self._executor.submit(job) for job in jobs]
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._submitted += made
        return [Job(LOCAL, job.job_id, str(job.paths.stdout)) for job in made]

    def room(self, running: int, waiting: int) -> int:
        """Up to the number of jobs at once."""
        self._submitted = [job for job in self._submitted if not job.done()]  # which also reaps their processes
        return max(0, min(waiting, self._at_once - running))

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
        super().__init__(sweep, options)
        import submitit

        self._executor = submitit.SlurmExecutor(logs_folder(sweep))
        given = {
            "partition": options.partition, "account": options.account, "qos": options.qos,
            "constraint": options.constraint, "cpus_per_task": options.cpus,
            "mem": None if options.memory is None else f"{math.ceil(1024 * options.memory)}M",
            "gpus_per_node": options.gpus, "setup": list(options.setup) or None,
            "additional_parameters": options.sbatch or None,
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
            with self._executor.batch():
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


SYSTEMS: dict[str, type[LocalJobs] | type[SlurmJobs]] = {LOCAL: LocalJobs, SLURM: SlurmJobs}


def check_system(name: str) -> None:
    """What a system needs must be there."""
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
