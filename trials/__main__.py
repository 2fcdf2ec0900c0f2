"""All trials, one after the other: checks that take longer than the tests by their nature.

    python -m trials [NAME ...]

Each trial is a process of its own with a time limit; all limits together are 67 minutes. Exit code 0 of a trial:
passed; 77: this machine cannot run it, and it says why; anything else: failed. A trial that was not run is reported as
such. The exit code of this module is 1 if any trial failed, and 0 otherwise.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
NOT_RUN = 77  # exit code of a trial that cannot run here


@dataclass(frozen=True)
class Trial:
    """One trial: how it is called, and how many seconds it may take."""

    name: str
    command: tuple[str, ...]
    limit: int


TRIALS = (
    Trial("archives", ("-m", "trials.archives", "--cases", "6000"), 180),
    Trial("attacks", ("-m", "trials.attacks"), 240),
    Trial("fuzz", ("-m", "trials.fuzz", "--cases", "20000"), 180),
    Trial("golden", ("-m", "trials.golden"), 900),
    Trial("mutations", ("tests/wire/mutations.py", "50000"), 60),
    Trial("namespaces", ("-m", "trials.namespaces"), 540),
    Trial("ray", ("-m", "trials.ray_nodes"), 480),
    Trial("siege", ("-m", "trials.siege", "--seconds", "90"), 300),
    Trial("tests", ("-m", "pytest", "-m", "long", "-n", "3", "--dist", "loadfile"), 900),
    Trial("slurm", ("-m", "trials.slurm"), 420),
    Trial("storm", ("-m", "trials.storm", "--seed", "0", "--agents", "10", "--rounds", "60"), 600),
)


def run_trial(trial: Trial) -> str:
    """Run one trial to its end or its limit; returns the outcome in words."""
    # A session of its own, so that at the limit all of its processes can be ended.
    process = subprocess.Popen([sys.executable, *trial.command], cwd=ROOT, start_new_session=True)
    try:
        code = process.wait(timeout=trial.limit)
    except subprocess.TimeoutExpired:
        return f"FAILED: not done after {trial.limit} s"
    finally:
        _end(process)
    return {0: "passed", NOT_RUN: "NOT RUN on this machine: see above"}.get(code, f"FAILED with exit code {code}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask first, so that a trial can remove what it has made; then end all of its processes by force."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the trials that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(trial.name for trial in TRIALS)}")
    names = parser.parse_args(arguments).names
    unknown = set(names) - {trial.name for trial in TRIALS}
    if unknown:
        parser.error(f"no such trial: {', '.join(sorted(unknown))}")
    lines = []
    for trial in TRIALS:
        if names and trial.name not in names:
            continue
        print(f"=== {trial.name}: at most {trial.limit} s", flush=True)
        began = time.monotonic()
        outcome = run_trial(trial)
        lines.append((trial.name, outcome, time.monotonic() - began))
    print("=== trials")
    for name, outcome, seconds in lines:
        print(f"{name:12} {seconds:6.0f} s  {outcome}")
    return int(any(outcome.startswith("FAILED") for _, outcome, _ in lines))


if __name__ == "__main__":
    raise SystemExit(main())
