"""W1 beside a checkout of HtFLlib that the user has: its time of a round, as it prints it, against ours."""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

import codistill as cd
from bench.measure import Figure, seconds
from bench.running import Rounds, started
from bench.workloads import images, lenets
from codistill.core.errors import RuntimeFault
from codistill.runtimes.workers import default_workers

AGENTS, SAMPLES, BATCH, TESTED, FEATURES, RATE = 10, 1200, 32, 100, 84, 0.01
ROUNDS, REPEATS, TRIAL, PATIENCE = 10, 3, 3, 900.0
NAMES = {"fd": ("FD", "FedDistill"), "fedproto": ("FedProto",)}  # of the same algorithm in versions of HtFLlib
WRITTEN = {"temp", "__pycache__"}  # what HtFLlib writes next to its code
# A line that ends a round: dashes, in some versions with words between them, and seconds.
TIME = re.compile(r"^-{20,}(?: time cost -+)? ([0-9.e+-]+)$", re.MULTILINE)


def peer(folder: Path, tell: Callable[[str], object]) -> list[Figure]:
    """Rounds of fd and of fedproto; a side of HtFLlib that fails is told, and has no rows."""
    figures: list[Figure] = []
    for protocol in (cd.FD(batch_size=BATCH), cd.FedProto(batch_size=BATCH)):
        try:
            figures += beside(folder, protocol)
        except RuntimeFault as fault:
            tell(f"{protocol.name} beside HtFLlib was not measured. {fault}")
    return figures


def beside(folder: Path, protocol: cd.Protocol, rounds: int = ROUNDS, repeats: int = REPEATS) -> list[Figure]:
    """Turn by turn, a run of HtFLlib and as many rounds of ours; both sides leave out the first round of a turn."""
    counts = sorted({1, default_workers(AGENTS)})  # it has one process: one thread, or as many as we have workers
    trials = {threads: statistics.median(times(folder, protocol.name, threads, TRIAL)) for threads in counts}
    best = min(trials, key=trials.__getitem__)
    theirs, ours = [], []
    # HtFLlib has no optimiser but plain SGD.
    federation = lenets(protocol, agents=AGENTS, samples=SAMPLES, test=TESTED, optimiser="sgd", lr=RATE)
    with started(federation) as (runtime, names):
        train = Rounds(runtime, names, 1)

        def one() -> None:
            runtime.evaluate(None)
            train()

        for _ in range(repeats):
            theirs.append(statistics.median(times(folder, protocol.name, best, rounds)))
            ours.append(statistics.median([seconds(one) for _ in range(rounds + 1)][1:]))
    label = f"threads: {best}, the faster of {' and '.join(map(str, counts))}" if len(counts) > 1 else "threads: 1"
    return [
        Figure(f"{protocol.name}: W1 round with SGD and evaluation", ours, "s", "", True),
        Figure(f"  the same of HtFLlib ({label})", theirs, "s", "", True),
        Figure("  HtFLlib against codistill", [b / a for a, b in zip(ours, theirs, strict=True)], "x", "", True),
    ]


def times(folder: Path, protocol: str, threads: int, rounds: int) -> list[float]:
    """Seconds of each of `rounds` rounds of HtFLlib after its first one, which is left out."""
    family, algorithm = _words(folder, protocol)
    settings = {
        "algo": algorithm, "m": family, "data": "W1", "dev": "cpu", "nc": AGENTS, "ncl": 10, "fd": FEATURES,
        "lbs": BATCH, "ls": 1, "lr": RATE, "gr": rounds, "eg": 1, "lam": 1.0,
    }  # fmt: skip
    command = [sys.executable, str(Path(__file__).with_name("peer_start.py"))]
    command += [text for key, value in settings.items() for text in (f"-{key}", str(value))]
    env = os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "PYTHONPATH": os.pathsep.join(sys.path),
        "PYTHONDONTWRITEBYTECODE": "1",  # its folder stays as it is
        "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1",  # it reads whole models, from files that it has just written
    }
    with tempfile.TemporaryDirectory() as place:
        system = _arranged(folder, Path(place))
        try:
            done = subprocess.run(command, cwd=system, env=env, capture_output=True, text=True, timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            raise _fault(folder, algorithm, rounds, f"no end after {PATIENCE:.0f} s") from None
    found = [float(value) for value in TIME.findall(done.stdout)]
    if len(found) != rounds + 1:
        last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise _fault(folder, algorithm, rounds, f"{len(found)} times, exit code {done.returncode}, {last.rstrip('.')}")
    return found[1:]


def _words(folder: Path, protocol: str) -> tuple[str, str]:
    """A family of models and the algorithm, by the names that this version has for them."""
    main = folder / "system" / "main.py"
    text = main.read_text("utf-8", "replace") if main.is_file() else ""
    families = re.findall(r"""model_family == ["']([^"']+)["']""", text)
    known = [name for name in NAMES[protocol] if re.search(rf"""algorithm == ["']{name}["']""", text)]
    if not families or not known:
        raise RuntimeFault(
            f"{main} must be HtFLlib's, with families of models and the algorithm {' or '.join(NAMES[protocol])}.",
            f"{len(families)} families, {len(known)} algorithms of that name" if text else "no such file",
            "Give the folder of a checkout of github.com/TsingZ0/HtFLlib by --htfllib.",
        )
    return families[0], known[0]


def _arranged(folder: Path, place: Path) -> Path:
    """A working directory with links to its code; the data set is where it looks for it, and it writes only here."""
    system = place / "system"
    system.mkdir()
    for path in (folder / "system").resolve().iterdir():
        if path.name not in WRITTEN:
            (system / path.name).symlink_to(path)
    data = place / "dataset" / "W1"
    for part, count in (("train", SAMPLES), ("test", AGENTS * TESTED)):
        (data / part).mkdir(parents=True)
        x, y = images(count)
        for i, chosen in enumerate(np.array_split(np.arange(count), AGENTS)):
            np.savez_compressed(data / part / f"{i}.npz", data=np.array({"x": x[chosen], "y": y[chosen]}, dtype=object))
    (data / "config.json").write_text(json.dumps({"num_clients": AGENTS, "num_classes": 10}), encoding="utf-8")
    return system


def _fault(folder: Path, algorithm: str, rounds: int, found: str) -> RuntimeFault:
    return RuntimeFault(
        f"HtFLlib must print the times of {rounds + 1} rounds of {algorithm}.",
        found,
        f"Check that {sys.executable} has the packages that {folder} needs, and that its main.py runs on the CPU.",
    )
