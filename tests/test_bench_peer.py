"""The benchmark beside a checkout of HtFLlib: a stand-in that reads, writes and prints where the real one does."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

import codistill as cd
from codistill.core.errors import RuntimeFault

ROOT = Path(__file__).parents[1]
# Reads its data set and evaluates its models as HtFLlib does; what is not as expected ends it before it prints a time.
MAIN = """
import argparse, os
import numpy as np
from flcore.trainmodel.models import network

# if args.model_family == "first" ... elif args.model_family == "second"; if args.algorithm == "{algorithm}"
parser = argparse.ArgumentParser()
for name in ("algo", "m", "data", "dev", "nc", "ncl", "fd", "lbs", "ls", "lr", "gr", "eg", "lam"):
    parser.add_argument("-" + name)
args = parser.parse_args()
assert (args.algo, args.m, args.dev, args.fd, args.lbs, args.ls) == ("{algorithm}", "first", "cpu", "84", "32", "1")
assert os.environ["OMP_NUM_THREADS"] == "2"
for part, each in (("train", 120), ("test", 100)):
    for i in range(int(args.nc)):
        with open(f"../dataset/{{args.data}}/{{part}}/{{i}}.npz", "rb") as file:
            data = np.load(file, allow_pickle=True)["data"].tolist()
        assert data["x"].shape == (each, 1, 28, 28) and data["y"].shape == (each,)
model = network("their own text")
assert sum(p.numel() for p in model.parameters()) == 61706 and model.fc.in_features == 84
os.makedirs("temp")
for path in ("temp/model.pt", "../result.h5"):
    open(path, "w").close()
for i in range(int(args.gr) + 1):
    print(f"-------------Round number: {{i}}-------------")
    print("-" * 50, 0.25 * (i + 1))
print("Average time cost: 9.0s.")
"""


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT)
    from bench import peer

    return peer


def checkout(folder: Path, *, algorithm: str = "FedDistill", first: str = "") -> Path:
    models = folder / "system" / "flcore" / "trainmodel" / "models.py"
    models.parent.mkdir(parents=True)
    models.write_text("def network(text):\n    return eval(text)\n")
    (folder / "system" / "temp").mkdir()  # left by an earlier run
    (folder / "system" / "main.py").write_text(first + MAIN.format(algorithm=algorithm))
    return folder


def test_times_of_rounds_but_the_first_and_the_checkout_stays_as_it_is(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Rounds 0, 1, 2 take 0.25, 0.5 and 0.75 s."""
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    folder = checkout(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    assert bench.times(folder, "fd", threads=2, rounds=2) == [0.5, 0.75]
    assert sorted(tmp_path.rglob("*")) == before


def test_a_missing_package_is_named(bench: ModuleType, tmp_path: Path) -> None:
    folder = checkout(tmp_path, algorithm="FedProto", first="import no_such_package\n")
    with pytest.raises(RuntimeFault, match=r"3 rounds of FedProto\. Found: 0 times, exit code 1, .*'no_such_package'"):
        bench.times(folder, "fedproto", threads=2, rounds=2)


def test_lines_that_end_a_round(bench: ModuleType) -> None:
    lines = ["-" * 50 + " 1.5", "-" * 25 + " time cost " + "-" * 25 + " 2e-05", "-" * 50, "Average time cost: 3.5s."]
    assert bench.TIME.findall("\n".join(lines)) == ["1.5", "2e-05"]


@pytest.mark.parametrize(
    ("text", "found"), [(None, "no such file"), ('model_family == "a"', "1 families, 0 algorithms of that name")]
)
def test_another_layout_is_one_error(bench: ModuleType, tmp_path: Path, text: str | None, found: str) -> None:
    if text is not None:
        (tmp_path / "system").mkdir()
        (tmp_path / "system" / "main.py").write_text(text)
    with pytest.raises(RuntimeFault, match=f"the algorithm FD or FedDistill. Found: {found}. Give the folder"):
        bench.times(tmp_path, "fd", threads=1, rounds=1)


def test_both_sides_and_their_ratio(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Theirs: 0.6 s with one thread, 0.8 s with two; ours, by a clock that counts calls, 0.2 s: three times as fast."""

    def clock(work: object) -> float:
        work()  # type: ignore[operator]
        calls.append(1)
        return 0.2

    calls: list[int] = []
    for name, value in (("AGENTS", 2), ("SAMPLES", 8), ("TESTED", 4), ("default_workers", lambda agents: 2)):
        monkeypatch.setattr(bench, name, value)
    monkeypatch.setattr(bench, "times", lambda folder, protocol, threads, rounds: [0.4 + 0.2 * threads] * rounds)
    monkeypatch.setattr(bench, "seconds", clock)
    ours, theirs, ratio = bench.beside(Path("anywhere"), cd.FD(), rounds=1, repeats=2)
    assert len(calls) == 2 * (1 + 1)
    assert (list(ours.values), list(theirs.values)) == ([0.2] * 2, [pytest.approx(0.6)] * 2)
    assert list(ratio.values) == [pytest.approx(3.0)] * 2
    assert "threads: 1, the faster of 1 and 2" in theirs.name


def table(bench: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    from bench import __main__
    from bench.measure import Figure

    monkeypatch.setattr(__main__, "BENCHES", {"other": lambda: [Figure("another row", [1.0], "x", "", True)]})
    __main__.main(list(arguments))


def test_without_a_folder_there_is_no_row(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table(bench, monkeypatch)
    shown = capsys.readouterr().out
    assert "another row" in shown
    assert "peer" not in shown
    with pytest.raises(SystemExit, match=r"give its folder by --htfllib DIR\.$"):
        table(bench, monkeypatch, "peer")


def test_a_side_that_fails_leaves_the_other_rows(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """fd fails, fedproto is measured, and so is what comes after."""

    def beside(folder: Path, protocol: cd.Protocol) -> list[object]:
        if protocol.name == "fd":
            raise RuntimeFault("It must run.", "[bold]", "Mend it.")
        return [measure.Figure("their row", [1.0], "x", "", True)]

    measure = sys.modules["bench.measure"]
    monkeypatch.setattr(bench, "beside", beside)
    table(bench, monkeypatch, "peer", "other", "--htfllib", str(tmp_path))
    shown = capsys.readouterr().out
    assert "fd beside HtFLlib was not measured. It must run. Found: [bold]. Mend it." in shown
    assert "their row" in shown
    assert "another row" in shown
