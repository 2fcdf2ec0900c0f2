"""One federation over several machines: host processes, each in a network namespace and with a host name of its own.

Three and then five machines give the simulation's figures to the byte, with a hub and between peers. Then one machine
of three is killed, and one is cut off from the network without a word: the run ends with its name, and goes on with
two. Nothing touches the network of this machine.

    python -m trials.machines [--keep DIR]
"""

from __future__ import annotations

import ctypes
import io
import multiprocessing
import os
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
from rich.console import Console

from codistill.cli import main as codistill
from codistill.errors import RuntimeFault
from codistill.runtimes.runtime import warm_up
from trials.namespaces import SWITCH, Net, check_machine, run_trial

MACHINES = [f"machine-{i}" for i in range(5)]
PORT = 29500
LEASE = 5.0  # seconds without a sign of life
PATIENCE = 60.0  # seconds that a run may take
_NEWNET, _NEWUTS = 0x40000000, 0x04000000  # namespaces of Linux, for setns and unshare
RECIPE = """\
topology = "{topology}"

[data]
name = "digits"
public = 200

[partition]
kind = "dirichlet"
alpha = 0.5
min_size = 20

[[agents]]
learner = {{ kind = "mlp", hidden = [16] }}
count = 4

[[agents]]
learner = {{ kind = "logistic_regression", max_iter = 100 }}
count = 3

[protocol]
rounds = 6
{protocol}

[machines]
patience = 40
lease = {lease}
"""
RECIPES = {
    "hub": RECIPE.format(topology="star", protocol='name = "fedmd"\nlocal_epochs = 1\ntransfer_steps = 3', lease=LEASE),
    "ring": RECIPE.format(topology="ring", protocol='name = "d_distillation"\nlocal_steps = 6\nevery = 2', lease=LEASE),
}


def enter(net: Net, machine: str) -> None:
    """Move this process to a machine: its network, and its host name."""
    libc = ctypes.CDLL(None, use_errno=True)
    with net.path(machine).open() as namespace:
        if libc.setns(namespace.fileno(), _NEWNET) or libc.unshare(_NEWUTS):
            raise OSError(ctypes.get_errno(), "cannot enter the namespace")
    socket.sethostname(machine)


class Run:
    """The processes of one start, one on each machine."""

    def __init__(self, net: Net, folder: Path, world: int, command: Sequence[str]) -> None:
        self._folder, self._processes = folder, []
        context = multiprocessing.get_context("fork")
        for rank in range(world):
            environment = {"RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": net.addresses[MACHINES[0]]}

            def work(rank: int = rank, environment: dict[str, object] = environment) -> None:
                os.environ.update({name: str(value) for name, value in environment.items()}, MASTER_PORT=str(PORT))
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                log = os.open(self._log(rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                os.dup2(log, 1)
                os.dup2(log, 2)
                enter(net, MACHINES[rank])
                os._exit(codistill(command))

            process = context.Process(target=work, daemon=True)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of forks that copy only one thread
                process.start()
            self._processes.append(process)

    def _log(self, rank: int) -> Path:
        return self._folder / f"rank-{rank}.txt"

    def said(self, rank: int) -> str:
        """What the process of a rank has printed, on one line."""
        return " ".join(self._log(rank).read_text(errors="replace").split())

    def __getitem__(self, rank: int) -> BaseProcess:
        return self._processes[rank]

    def codes(self, *ranks: int) -> list[int | None]:
        """Wait for the end of these ranks, or all; their exit codes."""
        end = time.monotonic() + PATIENCE
        chosen = [self._processes[rank] for rank in ranks] if ranks else self._processes
        for process in chosen:
            process.join(max(0.0, end - time.monotonic()))
        return [process.exitcode for process in chosen]

    def end(self) -> None:
        """End whoever still runs."""
        for process in self._processes:
            with suppress(ProcessLookupError):
                process.kill()
            process.join()


class Trial:
    """The simulation's figures of each recipe, and runs that are compared with them."""

    def __init__(self, folder: Path, net: Net) -> None:
        self._folder, self._net = folder, net
        for name, text in RECIPES.items():
            (folder / f"{name}.toml").write_text(text)
            quiet = ("--quiet", "--out", str(folder / f"{name}-simulation"))
            with redirect_stdout(io.StringIO()):
                code = codistill(["run", str(folder / f"{name}.toml"), "--set", "runtime.kind=simulation", *quiet])
            _must(code == 0, f"the simulation of '{name}' ended with exit code {code}")

    def _start(self, name: str, world: int, out: Path) -> Run:
        out.parent.mkdir(exist_ok=True)
        command = ("run", str(self._folder / f"{name}.toml"), "--set", "runtime.kind=machines", "--out", str(out))
        return Run(self._net, out.parent, world, (*command, "--quiet"))

    def _is_equal(self, name: str, out: Path) -> bool:
        files = ("metrics.jsonl", "alone/metrics.jsonl", "outputs.safetensors", "log.txt")
        simulated = self._folder / f"{name}-simulation"
        return all((out / file).read_bytes() == (simulated / file).read_bytes() for file in files)

    def equal(self, name: str, world: int) -> str:
        """A run on so many machines, from its start to its end."""
        out = self._folder / f"{name}-{world}" / "run"
        run = self._start(name, world, out)
        try:
            codes = run.codes()
        finally:
            run.end()
        _must(codes == [0] * world, f"'{name}' on {world} machines ended with {codes}: {run.said(0)[-400:]}")
        _must(self._is_equal(name, out), f"'{name}' on {world} machines has other figures")
        return f"{name}, {world} machines: equal to the simulation"

    def lost(self, name: str, how: str, lose: Callable[[BaseProcess], None]) -> str:
        """Of three machines the last is lost in the middle; two go on."""
        out = self._folder / f"{name}-{how.replace(' ', '-')}" / "run"
        run = self._start(name, 3, out)
        try:
            end = time.monotonic() + PATIENCE
            while not (out / "checkpoints" / "round-000001.state").exists() and time.monotonic() < end:
                time.sleep(0.005)
            lose(run[2])
            began = time.monotonic()
            codes = run.codes(0, 1)
            seconds = time.monotonic() - began
        finally:
            run.end()
        said = run.said(0).partition(" to do: ")[0]
        rows = len((out / "metrics.jsonl").read_bytes().splitlines())
        _must(codes == [8, 8], f"rank 0 and 1 ended with {codes}: {said[-400:]}")
        _must("rank 2 on machine-2" in said, f"rank 0 said: {said[-400:]}")
        _must(rows < 6 * 7, "the run was already complete")
        again = self._start(name, 2, out)
        try:
            codes = again.codes()
        finally:
            again.end()
        _must(codes == [0, 0], f"resumed on two, it ended with {codes}: {again.said(0)[-400:]}")
        _must(self._is_equal(name, out), "resumed on two, it has other figures")
        return f"{name}, 3 machines, one {how}: ended after {seconds:.1f} s ({said}); on 2: equal to the simulation"


def _must(holds: bool, found: str) -> None:
    if not holds:
        raise RuntimeFault("Machines must give the simulation's figures, or say why not.", found, "See the trial.")


def _kill(process: BaseProcess) -> None:
    process.kill()


def trial(console: Console, folder: Path) -> bool:
    """All runs; an error if one of them is not as it must be."""
    began = time.monotonic()
    torch.set_num_threads(1)  # a fork copies none of OpenMP's threads, and on some processors would wait for them
    warm_up()  # and the simulation below: the processes are forked, and need not import anything
    with Net(MACHINES, with_nat=False) as net:
        ours = Trial(folder, net)

        def done(line: str) -> None:
            console.print(f"{time.monotonic() - began:4.0f} s  {line}", soft_wrap=True)

        done("the simulation's figures")
        for name, world in (("hub", 3), ("hub", 5), ("ring", 3), ("ring", 5)):
            done(ours.equal(name, world))
        done(ours.lost("hub", "killed", _kill))
        # Without a word: no connection is closed, packets only stop.
        done(ours.lost("ring", "cut off", lambda _: net.ip(SWITCH, "link", "set", net.ports[MACHINES[2]], "down")))
    return True


def main() -> int:
    """0 only if all is as it must be; 77 if this machine cannot run the trial."""
    return run_trial(str(__doc__), trial, lambda: check_machine(("ip",)))


if __name__ == "__main__":
    sys.exit(main())
