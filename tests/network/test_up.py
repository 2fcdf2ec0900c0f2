"""A federation on this machine that is stopped or killed goes on exactly where it was."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
import warnings
from contextlib import redirect_stderr, redirect_stdout
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from codistill.cli import main

RECIPE = """
seed = 5
[data]
name = "digits"
samples = 250
public = 60
[[agents]]
learner = "mlp"
count = 4
[protocol]
name = "{protocol}"
rounds = 14
[evaluation]
alone = false
"""


def start(folder: Path, *command: str) -> BaseProcess:
    """A command in a process group of its own. It is forked, which spares it the imports."""

    def work() -> None:
        os.setsid()
        os.chdir(folder)
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
            code = main([*command, "--quiet"])
        os._exit(code)

    process = multiprocessing.get_context("fork").Process(target=work)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    return process


def ended(process: BaseProcess) -> int | None:
    process.join(timeout=120)
    return process.exitcode


def wait_for(path: Path, rounds: int) -> None:
    end = time.monotonic() + 120
    while not path.exists() or path.read_text().count("\n") < rounds:
        assert time.monotonic() < end, f"{path} has not come to {rounds} lines"
        time.sleep(0.01)


@pytest.mark.long
@pytest.mark.usefixtures("no_report")
@pytest.mark.parametrize("protocol", ["fedmd", "d_distillation"])
def test_killed_with_all_its_processes_it_goes_on_to_the_same_figures(protocol: str, tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(RECIPE.format(protocol=protocol))
    quiet = start(tmp_path, "run", "recipe.toml", "--out", "quiet", "--set", "runtime.kind=simulation")
    assert ended(quiet) == 0
    process = start(tmp_path, "up", "recipe.toml", "--out", "up")
    wait_for(tmp_path / "up" / "metrics.jsonl", 4)
    assert process.pid is not None
    os.killpg(process.pid, signal.SIGKILL)  # the parent and every node, at once
    process.join()
    whole = (tmp_path / "quiet" / "metrics.jsonl").read_bytes()
    path = tmp_path / "up" / "metrics.jsonl"
    assert not path.exists() or path.read_bytes() != whole
    again = start(tmp_path, "up", "recipe.toml", "--out", "up")
    assert ended(again) == 0
    assert path.read_bytes() == whole


@pytest.mark.usefixtures("no_charts")
def test_asked_to_stop_it_ends_its_round_and_leaves_no_process_behind(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(RECIPE.format(protocol="fedmd").replace("rounds = 14", "rounds = 5000"))
    process = start(tmp_path, "up", "recipe.toml", "--out", "up")
    wait_for(tmp_path / "up" / "metrics.jsonl", 8)
    process.terminate()
    assert ended(process) == 130
    lines = (tmp_path / "up" / "metrics.jsonl").read_text().splitlines()
    assert len(lines) % 4 == 0
    assert (tmp_path / "up" / "report.html").exists()
    assert process.pid is not None
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


@pytest.mark.long
@pytest.mark.usefixtures("no_report")
@pytest.mark.parametrize("topology", ["star", "ring"])
def test_a_run_without_rounds_that_was_killed_goes_on_where_it_was(topology: str, tmp_path: Path) -> None:
    recipe = RECIPE.format(protocol="crs").replace("public = 60", "")
    clock = "[clock]\nasynchronous = true\nperiod = 0.4\nslowest = 5\n"
    (tmp_path / "recipe.toml").write_text(f'{recipe}{clock}[topology]\nkind = "{topology}"\n')
    process = start(tmp_path, "up", "recipe.toml", "--out", "up")
    path = tmp_path / "up" / "metrics.jsonl"
    wait_for(path, 4 * 4)
    assert process.pid is not None
    os.killpg(process.pid, signal.SIGKILL)  # the parent and every node, at once
    process.join()
    before = own_rounds(path)
    assert ended(start(tmp_path, "up", "recipe.toml", "--out", "up")) == 0
    after = own_rounds(path)
    assert [(t, name) for t, name in after] == [(t, f"mlp-{n}") for t in range(1, 15) for n in range(1, 5)]
    # The checkpoint is of the last period but one at least, and agents have gone on from their own states.
    assert {key: after[key] for key in before if key[0] <= 2} == {key: before[key] for key in before if key[0] <= 2}
    fastest = max(range(1, 5), key=lambda n: before[3, f"mlp-{n}"])
    assert after[14, f"mlp-{fastest}"] > before[3, f"mlp-{fastest}"] > 0


def own_rounds(path: Path) -> dict[tuple[int, str], float]:
    """Of each row that is there."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {(row["round"], row["agent"]): row["own_rounds"] for row in rows}
