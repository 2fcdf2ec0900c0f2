"""A sweep on a real Slurm: a cluster of one node, started in a folder of its own, with keys and ports of its own.

Four runs are jobs of Slurm. In the middle of all of them the submitting command is killed, then one job by a signal
and one by `scancel`; one ends while nobody waits for it, and one reaches its time limit and is put into the queue
again. The same command then continues: its table and all metrics must be those of a sweep without jobs, to the byte.
Last, one of the runs on a Ray cluster that `deploy/ray.sbatch` starts inside a job.

    python -m trials.slurm [--keep DIR]
"""

from __future__ import annotations

import json
import os
import platform
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from rich.console import Console

from codistill.core.errors import RuntimeFault
from trials.namespaces import CODISTILL, end, run_trial, start, undisturbed

DAEMONS = ("munged", "slurmctld", "slurmd")
COMMANDS = ("sbatch", "srun", "squeue", "scontrol", "scancel")
PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"  # of daemons, for users without these in theirs
PATIENCE = 150.0  # seconds that a step may take: the time limit is the longest, and nears after 60 to 90
MINUTES = (
    3  # time limit of a job. Slurm sends the signal 90 s before it, or earlier by the half minute of its own clock
)
ROUNDS, GATE = 6, 3  # jobs wait after so many rounds until the trial lets them go on
CALM, KILLED, CANCELLED, LIMITED = "1", "2", "3", "4"  # runs, by their number of local steps
RUNS = (CALM, KILLED, CANCELLED, LIMITED)

CONFIGURATION = """\
ClusterName=codistill
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
ReturnToService=2
KillWait=5
# As at sites that let no job be put into the queue again, unless it asks for that.
JobRequeue=0
# A node for all jobs at once, whatever this machine has.
SlurmdParameters=config_overrides
NodeName=codistill NodeAddr=127.0.0.1 NodeHostname={host} CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
RECIPE = f"""\
[data]
name = "digits"
samples = 400
test_samples = 200
public = 60

[[agents]]
learner = {{ kind = "mlp", hidden = [16] }}
count = 2

[[agents]]
learner = {{ kind = "logistic_regression", max_iter = 50 }}

[protocol]
name = "gated.py:Gated"
transfer_steps = 2
rounds = {ROUNDS}

[evaluation]
alone = false

[sweep]
"protocol.local_steps" = [{", ".join(RUNS)}]
"""
PROTOCOL = f"""\
import os
import time
from dataclasses import dataclass
from pathlib import Path

from codistill.protocols.fedmd import FedMD


@dataclass(frozen=True, kw_only=True)
class Gated(FedMD):
    name = "gated"

    async def round(self, me, t):
        gates = os.environ.get("GATES")
        while t == {GATE} and gates and not Path(gates, str(self.local_steps)).exists():
            time.sleep(0.05)
        await super().round(me, t)
"""


# --- the cluster ----------------------------------------------------------------------------------


class Cluster:
    """Slurm and munge on one machine, with files in one folder; by `SLURM_CONF` its commands find it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._configuration = folder / "slurm.conf"
        self.environment = {**_outside_slurm(), "PATH": PATH, "SLURM_CONF": str(self._configuration)}
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Cluster:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with undisturbed():
            if any(daemon.poll() is None for daemon in self._daemons):
                with suppress(RuntimeFault, subprocess.TimeoutExpired):
                    self.ask("scancel", f"--user={os.getuid()}")
                    until(lambda: not self.queue(), "an empty queue", patience=15)
            end(self._daemons[::-1])
            for process in self.processes():
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)

    def _start(self) -> None:
        folder = self._folder
        for name in ("state", "spool"):
            (folder / name).mkdir(parents=True)
        key = folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(128))
        host, user = socket.gethostname().partition(".")[0], pwd.getpwuid(os.getuid()).pw_name
        self._configuration.write_text(
            CONFIGURATION.format(folder=folder, host=host, user=user, ports=_free_ports(2), cpus=len(RUNS))
        )
        files = {name: f"{folder}/munge.{name.removesuffix('-file')}" for name in ("key-file", "pid-file", "seed-file")}
        files |= {"log-file": f"{folder}/munge.log", "socket": f"{folder}/munge.socket"}
        # By force: munge would have a folder that all users can enter; here all is one user's.
        options = ("--foreground", "--force", *(f"--{name}={path}" for name, path in files.items()))
        self._daemon("munged", *options)
        until((folder / "munge.socket").exists, "munge's socket", self._said)
        self._daemon("slurmctld", "-D", "-f", str(self._configuration))
        self._daemon("slurmd", "-D", "-N", "codistill", "-f", str(self._configuration))
        until(lambda: "idle" in self.ask("sinfo", "--noheader", "--format=%T", check=False), "a node", self._said)

    def _daemon(self, name: str, *options: str) -> None:
        command = (shutil.which(name, path=PATH) or name, *options)
        with (self._folder / f"{name}.log").open("wb") as log:
            self._daemons.append(start(command, stdout=log, stderr=subprocess.STDOUT, env=self.environment))

    def _said(self) -> str:
        logs = (self._folder / f"{name}.log" for name in DAEMONS)
        return "; ".join(" ".join(log.read_text(errors="replace").split())[-300:] for log in logs if log.exists())

    def ask(self, *command: str, check: bool = True) -> str:
        """What a command of Slurm prints."""
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=60)
        if check and done.returncode:
            raise RuntimeFault(f"'{' '.join(command)}' must work.", done.stderr.strip()[-300:], "See the trial.")
        return done.stdout

    def queue(self) -> dict[str, str]:
        """The state of each job that waits or runs, by its id."""
        lines = self.ask("squeue", "--noheader", "--array", "--format=%i %T").splitlines()
        return dict(line.split() for line in lines)

    def processes(self, *given: str) -> list[int]:
        """Those that belong to this cluster or its jobs, with these variables as well: NAME=VALUE."""
        wanted = {text.encode() for text in (f"SLURM_CONF={self._configuration}", *given)}
        return [process for process, variables in _environments() if wanted <= variables]

    def process_of(self, job: str) -> int:
        """The process of a job that its workers were forked from."""
        array, task = job.split("_")
        found = self.processes("SUBMITIT_EXECUTOR=slurm", f"SLURM_ARRAY_JOB_ID={array}", f"SLURM_ARRAY_TASK_ID={task}")
        python = [process for process in found if b"submitit.core._submit" in _read(process, "cmdline").split(b"\0")]
        python = [process for process in python if b"srun" not in _read(process, "cmdline")]
        parents = {process: int(_read(process, "stat").rpartition(b")")[2].split()[1]) for process in python}
        (first,) = (process for process, parent in parents.items() if parent not in parents)
        return first


def _outside_slurm() -> dict[str, str]:
    """The variables of this process but those of a cluster that it may itself run on."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH", "SQUEUE"))}


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _environments() -> Iterator[tuple[int, set[bytes]]]:
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            yield int(folder.name), set((folder / "environ").read_bytes().split(b"\0"))


def _read(process: int, what: str) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{process}/{what}").read_bytes()
    return b""


def until(
    holds: Callable[[], bool], what: str, said: Callable[[], str] = lambda: "nothing", *, patience: float = PATIENCE
) -> None:
    """Wait until something holds."""
    latest = time.monotonic() + patience
    while not holds():
        if time.monotonic() > latest:
            raise RuntimeFault(f"There must be {what} within {patience:.0f} s.", said(), "See the trial.")
        time.sleep(0.2)


# --- the sweep ------------------------------------------------------------------------------------


class Trial:
    """The figures of a sweep without jobs, and the same sweep as jobs."""

    def __init__(self, folder: Path, cluster: Cluster) -> None:
        self._folder, self._cluster = folder, cluster
        (folder / "recipe.toml").write_text(RECIPE)
        (folder / "gated.py").write_text(PROTOCOL)
        self._gates = folder / "gates"
        self._gates.mkdir()
        self._plain, self._out = folder / "plain", folder / "with jobs"  # Slurm must cope with the space
        self._command = (CODISTILL, "sweep", str(folder / "recipe.toml"), "--out")
        self._attempts = 0
        done = subprocess.run((*self._command, str(self._plain)), capture_output=True, text=True, env=_outside_slurm())
        must(done.returncode == 0, f"the sweep without jobs ended with {done.returncode}: {done.stderr[-300:]}")

    @contextmanager
    def command(self) -> Iterator[tuple[subprocess.Popen[bytes], Callable[[], str]]]:
        """The sweep on Slurm, and what it has printed so far; each job has workers, which get Slurm's signals too."""
        self._attempts += 1
        log = self._folder / f"sweep-{self._attempts}.log"
        on = ("--on", "slurm", "--on-option", f"time={MINUTES}")
        workers = ("--set", "runtime.kind=processes", "--set", "runtime.workers=2")
        environment = {**self._cluster.environment, "GATES": str(self._gates)}
        with log.open("wb") as file:
            command = (*self._command, str(self._out), *on, *workers)
            process = start(command, stdout=file, stderr=subprocess.STDOUT, env=environment)
        try:
            yield process, lambda: log.read_text(errors="replace")
        finally:
            end([process])

    def open(self, run: str) -> None:
        """Let a run go on beyond its gate."""
        (self._gates / run).touch()

    def at_gate(self, run: str) -> bool:
        """Whether a run has its last checkpoint before the gate."""
        return (self._out / run / "checkpoints" / f"round-{GATE:06d}.state").exists()

    def job(self, run: str) -> str:
        """The id of a run's job."""
        return str(json.loads((self._out / ".jobs" / run / "job.json").read_text())["id"])

    def log(self, run: str) -> str:
        """What a run's job has printed."""
        kept = json.loads((self._out / ".jobs" / run / "job.json").read_text())
        return Path(kept["log"]).read_text(errors="replace")

    def is_done(self, run: str) -> bool:
        """Whether a run's job says that it is done."""
        with suppress(OSError):
            return bool(json.loads((self._out / ".jobs" / run / "outcome.json").read_text())["status"] == "done")
        return False

    def times(self, run: str) -> list[str]:
        """A line for each round of a run, with how long it took: no two computations have the same."""
        return (self._out / run / "times.jsonl").read_text().splitlines()

    def on_ray(self) -> None:
        """A run by deploy/ray.sbatch, whose metrics must be those of the same run of the sweep."""
        (self._folder / "one.toml").write_text(RECIPE.partition("[sweep]")[0])
        log, out = self._folder / "ray.log", self._folder / "on-ray"
        settings = ("--set", f"protocol.local_steps={CALM}", "--set", "runtime.kind=ray", "--quiet")
        command = (CODISTILL, "run", str(self._folder / "one.toml"), *settings, "--out", str(out))
        script = Path(__file__).parents[1] / "deploy" / "ray.sbatch"
        path = f"{Path(CODISTILL).parent}:{self._cluster.environment['PATH']}"  # of `ray` and `python`
        job = start(
            ("sbatch", "--wait", "--cpus-per-task=2", f"--output={log}", str(script), *command),
            env={**self._cluster.environment, "PATH": path}, stdout=subprocess.DEVNULL,
        )  # fmt: skip

        def said() -> str:
            return log.read_text(errors="replace")[-600:] if log.exists() else "nothing"

        try:
            until(lambda: job.poll() is not None, "an end of the job with Ray", said)
        finally:
            end([job])
        must(job.returncode == 0, f"the job with Ray ended with {job.returncode}: {said()}")
        same = (out / "metrics.jsonl").read_bytes() == (self._plain / CALM / "metrics.jsonl").read_bytes()
        must(same, "other figures on Ray")

    def different(self) -> list[str]:
        """The files that are not as those of the sweep without jobs."""
        names = ["sweep.csv", *(f"{run}/metrics.jsonl" for run in RUNS)]
        return [name for name in names if (self._plain / name).read_bytes() != (self._out / name).read_bytes()]


def must(holds: bool, found: str) -> None:
    """The trial has failed unless this holds."""
    if not holds:
        raise RuntimeFault("Jobs of Slurm must give the figures of a sweep without jobs.", found, "See the trial.")


def trial(console: Console, folder: Path) -> bool:
    """From the start of the cluster to the last file; an error if anything is not as it must be."""
    began = time.monotonic()

    def done(line: str) -> None:
        console.print(f"{time.monotonic() - began:4.0f} s  {line}", soft_wrap=True)

    cluster = Cluster(folder / "cluster")
    with cluster:
        machine = f"Linux {platform.release()}, {os.cpu_count()} cores, Python {platform.python_version()}"
        console.print(f"{machine}, {cluster.ask('sinfo', '--version').strip()}")
        done(f"a cluster of one node: {', '.join(DAEMONS)}")
        ours = Trial(folder, cluster)
        done(f"a sweep without jobs: {len(RUNS)} runs of {ROUNDS} rounds")
        with ours.command() as (command, said):
            for run in RUNS:
                until(lambda run=run: ours.at_gate(run), f"a checkpoint of run {run}", said)  # type: ignore[misc]
            states = cluster.queue()
            must(list(states.values()) == ["RUNNING"] * len(RUNS), f"jobs: {states}")
            jobs = {run: ours.job(run) for run in RUNS}
            command.kill()
            command.wait()
        done(f"jobs {' '.join(jobs.values())} have done {GATE} rounds each; the submitting command: killed")
        before = {run: ours.times(run) for run in RUNS}
        os.kill(cluster.process_of(jobs[KILLED]), signal.SIGKILL)
        cluster.ask("scancel", jobs[CANCELLED])
        until(lambda: not {jobs[KILLED], jobs[CANCELLED]} & cluster.queue().keys(), "an end of two jobs")
        done(f"job {jobs[KILLED]}: killed by SIGKILL; job {jobs[CANCELLED]}: by scancel")
        ours.open(CALM)
        until(lambda: ours.is_done(CALM), f"an end of job {jobs[CALM]}", lambda: ours.log(CALM)[-300:])
        done(f"job {jobs[CALM]}: done, while nobody waits for it")
        limited = jobs[LIMITED]
        until(
            lambda: cluster.queue().get(limited) == "PENDING",
            "a job that is put into the queue again",
            lambda: ours.log(LIMITED)[-300:],
        )
        must("Near its time limit, and put into the queue again." in ours.log(LIMITED), ours.log(LIMITED)[-300:])
        done(f"job {limited}: near its time limit of {MINUTES} minutes, and put into the queue again")
        with ours.command() as (command, said):
            counts = f"of which done: 1, with a job that waits or runs: 1, to be submitted (slurm): {len(RUNS) - 2}"
            line = f"runs: {len(RUNS)}, {counts}\n"
            until(lambda: "\nruns: " in said() or command.poll() is not None, "a line about jobs", said)
            must(line in said(), said()[-600:])
            done(f"the same command again: {line.strip()}")
            for run in RUNS:
                ours.open(run)
            # Slurm lets such a job wait for two minutes.
            cluster.ask("scontrol", "update", f"JobId={limited}", "StartTime=now")
            until(lambda: command.poll() is not None, "an end of the sweep", said)
            must(command.returncode == 0, f"it ended with {command.returncode}: {said()[-600:]}")
        done("all runs are done")
        anew = [run for run in RUNS if ours.times(run)[:GATE] != before[run]]
        must(not anew, f"begun anew, and not continued from a checkpoint: {', '.join(anew)}")
        different = ours.different()
        must(not different, f"other figures: {', '.join(different)}")
        done(f"every run went on from its checkpoint; sweep.csv and {len(RUNS)} metrics.jsonl: equal to the byte")
        ours.on_ray()
        done("deploy/ray.sbatch: a run on the Ray cluster of a job; metrics.jsonl: equal to the byte")
        must(not cluster.queue(), f"jobs that are left: {cluster.queue()}")
    left = cluster.processes()
    must(not left, f"processes that are left: {left}")
    done("the cluster is stopped, and none of its processes is left")
    return True


def check_machine() -> None:
    """What the trial cannot do without; it installs nothing."""
    missing = [name for name in (*DAEMONS, *COMMANDS) if shutil.which(name, path=PATH) is None]
    if missing or sys.platform != "linux":
        raise RuntimeFault(
            "The trial needs Linux with Slurm and munge.",
            f"no {', '.join(missing) or 'Linux'}",
            "apt-get install slurm-wlm munge",
        )


def main() -> int:
    """0 only if all is as it must be; 77 if this machine cannot run the trial."""
    return run_trial(str(__doc__), trial, check_machine)


if __name__ == "__main__":
    sys.exit(main())
