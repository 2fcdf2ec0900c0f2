"""Digests of every message, of metrics, answers and states of small runs, against those that were recorded.

    python -m trials.golden [--quick] [--only NAME] [--source SRC] [--against FILE] [--record [FILE]]

All protocols in every runtime; resumed, killed, with faults, compression, sampled agents and a safeguard, on graphs and
without rounds: the cases are in golden_cases.py. Two things are compared. Every way of running a case must equal its
simulation, to the bit. And the simulation must equal the recording (golden.json), so that a change of the source that
should change nothing can be shown to do so. Floating-point figures depend on the processor and on the versions of
libraries: where these are others than those of the recording, only the first is compared, and a line says so.

`--quick`: each protocol once, in simulation only. `--source`: the folder `src` of another checkout, whose codistill is
used instead. `--record`: write golden.json, or FILE, instead of comparing with it. Two checkouts, on any machine:

    python -m trials.golden --source ../before/src --record /tmp/before.json
    python -m trials.golden --source ../after/src --against /tmp/before.json
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[1]
RECORDED = Path(__file__).with_name("golden.json")
LANES = ("local", "ray")  # processes that run cases at the same time
REFERENCE = "simulation"
_LINES = 30  # of a failure that are printed


@dataclass
class Outcomes:
    """What the runs gave."""

    fingerprint: dict[str, str] = field(default_factory=dict)
    records: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)  # by case and way
    failures: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def take(self, told: Mapping[str, Any]) -> None:
        """One line of a lane; prints how far it is."""
        if "fingerprint" in told:
            self.fingerprint = dict(told["fingerprint"])
            print(f"source: {told['source']}")
            print(", ".join(f"{name} {value}" for name, value in self.fingerprint.items()), flush=True)
        elif "missing" in told:
            self.notes.append(f"NOT COMPARED: runs on {told['missing']}, which is not installed")
        else:
            case, way, found = told["case"], told["way"], told.get("record")
            if found is None:
                tail = "\n".join(told["error"].splitlines()[-_LINES:])
                self.failures.append(f"{case}: {way}: the run failed\n{tail}")
            else:
                self.records.setdefault(case, {})[way] = found
            sizes = f"{found['count']:5} messages {found['bytes']:9,} bytes" if found and "count" in found else ""
            print(f"{case:40} {way:20} {told['seconds']:6.1f} s {'FAILED' if found is None else sizes}", flush=True)

    def compare_ways(self) -> None:
        """Every way of running a case must give what its simulation gives."""
        for case, ways in self.records.items():
            for way, found in ways.items():
                if REFERENCE in ways:
                    self._differences(case, f"{way} is not equal to the simulation", found, ways[REFERENCE])

    def compare_recording(self, recorded: Mapping[str, Any], *, whole: bool) -> None:
        """The simulation of each case must give what was recorded; `whole`: no case may be missing."""
        for case, found in self.compact().items():
            if case in recorded:
                wanted = dict(recorded[case])
                self._differences(case, "not equal to the recording", {**dict.fromkeys(wanted), **found}, wanted)
            else:
                self.failures.append(f"{case}: not in the recording")
        if whole:
            self.failures += [f"{case}: recorded, but not run" for case in recorded if case not in self.records]

    def _differences(self, case: str, sentence: str, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
        for what, value in found.items():
            expected = wanted.get(what)
            if isinstance(value, dict) and isinstance(expected, dict):  # states: of the nodes that are there
                nodes = [name for name in value if value[name] != expected.get(name)]
                if nodes:
                    self.failures.append(f"{case}: {sentence}: {what} of {', '.join(nodes)}")
            elif value != expected:
                self.failures.append(f"{case}: {sentence}: {what} {value}, expected {expected}")

    def compact(self) -> dict[str, dict[str, Any]]:
        """What is recorded: the simulation of each case. All other ways are equal to it."""
        chosen = {case: ways[REFERENCE] for case, ways in self.records.items() if REFERENCE in ways}
        compact = {}
        for case, found in sorted(chosen.items()):
            compact[case] = {what: value for what, value in found.items() if what != "distinct"}
            if "states" in found:
                compact[case]["states"] = hashlib.sha256(json.dumps(found["states"]).encode()).hexdigest()[:16]
        return compact


def run_lanes(options: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Run all lanes at the same time; what they tell, line by line."""
    environment = os.environ | dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    paths = [str(options.source.resolve())] if options.source else []
    environment["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])
    chosen = [*(["--quick"] if options.quick else []), "--only", options.only]
    lines: queue.Queue[dict[str, Any] | None] = queue.Queue()
    lanes = LANES[:1] if options.quick else LANES
    processes, readers = [], []
    for lane in lanes:
        errors = (folder / f"{lane}.txt").open("w+")
        command = [sys.executable, "-m", "trials.golden_cases", lane, str(folder), *chosen]
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)
        reader = threading.Thread(target=_read, args=(lane, process, errors, lines), daemon=True)
        reader.start()
        processes.append(process)
        readers.append(reader)
    try:
        left = len(lanes)
        while left:
            told = lines.get()
            if told is None:
                left -= 1
            else:
                yield told
    finally:
        for process in processes:
            if process.poll() is None:
                process.terminate()
            process.wait()


def _read(
    lane: str, process: subprocess.Popen[str], errors: IO[str], lines: queue.Queue[dict[str, Any] | None]
) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):
            lines.put(json.loads(line))
    if process.wait() != 0:
        errors.seek(0)
        found = {"case": f"lane {lane}", "way": f"exit code {process.returncode}", "seconds": 0.0}
        lines.put({**found, "error": errors.read()})
    lines.put(None)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, compare, and print what is not equal; 1 if anything is not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="each protocol once, in simulation only")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--source", type=Path, help="folder src of another checkout")
    parser.add_argument("--against", type=Path, default=RECORDED, help="the recording to compare with")
    parser.add_argument("--record", type=Path, nargs="?", const=RECORDED, help="write a recording instead")
    options = parser.parse_args(arguments)
    if options.record == RECORDED and (options.quick or options.only):
        parser.error("a recording needs all cases: leave out --quick and --only, or name another file")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that processes and files are removed
    began, outcomes = time.monotonic(), Outcomes()
    with tempfile.TemporaryDirectory(prefix="golden-") as folder:
        for told in run_lanes(options, Path(folder)):
            outcomes.take(told)
    outcomes.compare_ways()
    if options.record is not None:
        if not outcomes.failures:
            _write(options.record, outcomes)
    else:
        recording = json.loads(options.against.read_text("utf-8"))
        if recording["fingerprint"] == outcomes.fingerprint:
            outcomes.compare_recording(recording["cases"], whole=not (options.quick or options.only))
        else:
            outcomes.notes.append("recorded on another kind of processor: only compared across runtimes")
            outcomes.notes += [
                f"{name}: {outcomes.fingerprint.get(name)} here, {value} in the recording"
                for name, value in recording["fingerprint"].items()
                if outcomes.fingerprint.get(name) != value
            ]
    runs = sum(len(ways) for ways in outcomes.records.values())
    for line in (*outcomes.notes, *outcomes.failures):
        print(line)
    what = f"{len(outcomes.records)} cases, {runs} runs, {len(outcomes.failures)} failures"
    print(f"{what}, {time.monotonic() - began:.0f} s")
    return int(bool(outcomes.failures) or not runs)


def _write(path: Path, outcomes: Outcomes) -> None:
    """One line for each case, so that a difference between two recordings can be read."""
    cases = ",\n".join(f"  {json.dumps(case)}: {json.dumps(found)}" for case, found in outcomes.compact().items())
    text = f'{{\n "fingerprint": {json.dumps(outcomes.fingerprint)},\n "cases": {{\n{cases}\n }}\n}}\n'
    path.write_text(text, "utf-8")
    print(f"written: {path}")


if __name__ == "__main__":
    raise SystemExit(main())
