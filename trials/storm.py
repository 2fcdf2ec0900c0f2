"""A storm: agents are killed and frozen all the time, the hub is killed twice, and the run must come through.

    python -m trials.storm --seed 0 --agents 10 --rounds 60

Real commands in processes of their own, over loopback with mutual TLS. Every few seconds an agent is killed
(and started again after a while) or frozen (and let go on). Which, and when, is drawn from the seed. A round takes
about two seconds, so that a fault costs its agent some rounds and not most of them. At the end: all rounds are there,
each once; accuracy beside that of the same recipe run in quiet.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

RECIPE = """
seed = {seed}
[data]
name = "digits"
public = 200
[partition]
kind = "dirichlet"
alpha = 1.0
[[agents]]
learner = "cnn"
count = {agents}
[protocol]
name = "fedmd"
rounds = {rounds}
local_epochs = 15
[evaluation]
alone = false
[network]
lease = 3
deadline = 4
quorum = 0.5
"""
CODISTILL = [sys.executable, "-m", "codistill"]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}
LONGEST = 3600.0  # seconds until the storm is called off
# Kills, freezes and restarts of this machine's processes take the place of a lifetime of trouble.
EVERY, FROZEN, DOWN = (2.0, 6.0), (1.0, 8.0), (1.0, 10.0)  # seconds, drawn between these


@dataclass
class Storm:
    """The federation under trial, and what is done to it."""

    folder: Path
    agents: int
    rounds: int
    seed: int
    port: int = 0
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    due: list[tuple[float, str, Callable[[], None]]] = field(default_factory=list)
    troubled: set[str] = field(default_factory=set)
    told: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        (self.folder / "recipe.toml").write_text(
            RECIPE.format(seed=self.seed, agents=self.agents, rounds=self.rounds), "utf-8"
        )
        self.names = [f"cnn-{number + 1}" for number in range(self.agents)]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]

    def quiet(self) -> float:
        """The same recipe without a storm."""
        self._call("run", "recipe.toml", "--out", "quiet", "--quiet")
        return accuracy(self.folder / "quiet")

    def blow(self) -> float:
        """Run the federation while things happen to it; its accuracy at the end."""
        self._call("certs", "init")
        self._call("certs", "hub", "127.0.0.1")
        for name in self.names:
            self._call("certs", "agent", name)
        self._start_hub()
        for name in self.names:
            self._start(name)
        began, next_blow = time.monotonic(), None
        hub_falls = sorted(self.random.sample(range(self.rounds // 5, 4 * self.rounds // 5), 2))
        while self.processes["hub"].poll() is None or "hub" in self.troubled:
            if time.monotonic() - began > LONGEST:
                raise SystemExit(f"the run has not ended after {LONGEST:g} s: see {self.folder}")
            for item in [item for item in self.due if item[0] <= time.monotonic()]:
                self.due.remove(item)
                item[2]()
            done = self.done()
            if hub_falls and done >= hub_falls[0] and "hub" not in self.troubled:
                hub_falls.pop(0)
                self._kill("hub", self._start_hub)
            if done and (next_blow is None or time.monotonic() > next_blow):  # once all have met
                next_blow = time.monotonic() + self.random.uniform(*EVERY)
                self._strike()
            self._show(done)
            time.sleep(0.05)
        for name in list(self.troubled):
            self._go_on(name)
        if self.processes["hub"].returncode != 0:
            raise SystemExit(f"the hub ended with {self.processes['hub'].returncode}: see {self.folder / 'hub.log'}")
        return accuracy(self.folder / "stormy")

    def _strike(self) -> None:
        calm = [name for name in self.names if name not in self.troubled]
        if not calm:
            return
        name = self.random.choice(calm)
        if self.random.random() < 0.5:
            self._kill(name, lambda: self._start(name))
        else:
            self.told["agents frozen"] += 1
            self.troubled.add(name)
            self.processes[name].send_signal(signal.SIGSTOP)
            self._later(FROZEN, name, lambda: self._go_on(name))

    def _kill(self, name: str, restart: Callable[[], None]) -> None:
        self.told["hub killed" if name == "hub" else "agents killed"] += 1
        self.troubled.add(name)
        self.processes[name].kill()
        self.processes[name].wait()
        self._later(DOWN, name, restart)

    def _go_on(self, name: str) -> None:
        self.troubled.discard(name)
        if self.processes[name].poll() is None:
            self.processes[name].send_signal(signal.SIGCONT)

    def _later(self, span: tuple[float, float], name: str, what: Callable[[], None]) -> None:
        self.due.append((time.monotonic() + self.random.uniform(*span), name, what))

    def _start_hub(self) -> None:
        self._spawn("hub", "hub", "recipe.toml", "--listen", f"127.0.0.1:{self.port}", "--certs", "certs/127.0.0.1",
                    "--out", "stormy", "--log-format", "json")  # fmt: skip

    def _start(self, name: str) -> None:
        self._spawn(name, "join", "recipe.toml", "--hub", f"127.0.0.1:{self.port}", "--certs", f"certs/{name}")

    def _spawn(self, name: str, *command: str) -> None:
        self.troubled.discard(name)
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [*CODISTILL, *command],
                cwd=self.folder,
                stdout=log,
                stderr=log,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )

    def _call(self, *command: str) -> None:
        done = subprocess.run([*CODISTILL, *command], cwd=self.folder, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}: {done.stderr}")

    def done(self) -> int:
        """Rounds that the hub has counted."""
        rows = rows_of(self.folder / "stormy")
        return int(rows[-1]["round"]) if rows else 0

    def _show(self, done: int) -> None:
        troubles = ", ".join(sorted(self.troubled)) or "nobody"
        if sys.stderr.isatty():
            print(f"\rround {done}/{self.rounds} · in trouble: {troubles}".ljust(100)[:100], end="", file=sys.stderr)

    def end(self) -> None:
        """Leave nothing behind."""
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
                process.wait()


def rows_of(folder: Path) -> list[dict[str, object]]:
    """Whole rows of a run's metrics."""
    try:
        text = (folder / "metrics.jsonl").read_text("utf-8")
    except OSError:
        return []
    return [json.loads(line) for line in text.rpartition("\n")[0].splitlines()]


def accuracy(folder: Path) -> float:
    """Mean over the agents, of the newest measurement of each."""
    newest = {row["agent"]: row["accuracy"] for row in rows_of(folder) if "accuracy" in row}
    return fmean(float(str(value)) for value in newest.values())


def main() -> int:
    """Blow, and say what is left standing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--agents", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--folder", type=Path, help="kept afterwards (default: a temporary one)")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="storm-"))
    folder.mkdir(parents=True, exist_ok=True)
    storm = Storm(folder, options.agents, options.rounds, options.seed)
    quiet = storm.quiet()
    began = time.monotonic()
    try:
        stormy = storm.blow()
    finally:
        storm.end()
    rows = rows_of(folder / "stormy")
    counted = Counter((row["round"], row["agent"]) for row in rows)
    wanted = {(t + 1, name) for t in range(options.rounds) for name in storm.names}
    missed = sum(not row["present"] for row in rows)
    once = set(counted) == wanted and set(counted.values()) == {1}
    print(
        f"\nseed {options.seed}: {options.agents} agents, {options.rounds} rounds in {time.monotonic() - began:.0f} s"
    )
    print(", ".join(f"{count} {what}" for what, count in sorted(storm.told.items())))
    print(f"every round counted once: {'yes' if once else 'NO'}; rounds that agents missed: {missed} of {len(rows)}")
    print(f"accuracy: quiet {100 * quiet:.2f} %, storm {100 * stormy:.2f} %, {100 * (stormy - quiet):+.2f} points")
    print(f"folder: {folder}")
    return 0 if once and stormy >= quiet - 0.02 else 1


if __name__ == "__main__":
    raise SystemExit(main())
