"""Byzantine agents count in no mean, and every mean says so."""

from __future__ import annotations

import re
from html import unescape
from io import StringIO
from pathlib import Path

import pandas as pd
import pytest
from rich.console import Console

from codistill.cli import main
from codistill.engine.observers import Progress
from codistill.experiments.sweep import read_sweep
from codistill.experiments.sweep_results import means
from codistill.experiments.sweep_view import score_tables
from codistill.report.pages import write_comparison, write_report
from codistill.results.records import RoundEnded, Row, RunStarted
from codistill.results.rounds import scores_of
from codistill.results.summary import Summary, comparison_table
from codistill.results.tables import Table

SWEEP = """
seed = 0
[data]
name = "wine"
public = 40
[[agents]]
learner = "logistic_regression"
count = 3
[protocol]
name = "fedmd"
rounds = 1
[evaluation]
alone = false
[runtime]
kind = "simulation"
[sweep]
seed = [0]
[sweep.faults]
"none" = []
"one" = [{ kind = "random", agent = "NAME" }]
"""


def row(done: int, agent: str, accuracy: float, **more: object) -> Row:
    scores = {"accuracy": accuracy, "own_accuracy": accuracy, "test_samples": 50}
    return {"round": done, "agent": agent, "present": True, "sent": 100, "received": 10, **scores, **more}


def summary(*byzantine: str, title: str = "trial") -> Summary:
    """Alone 0.1, 0.2, 0.6; in the end 0.2, 0.4, 0.9."""
    scores = {"a": (0.1, 0.2), "b": (0.2, 0.4), "c": (0.6, 0.9)}
    lies = {name: {"lies": True} if name in byzantine else {} for name in scores}
    rows = [row(done + 1, name, both[done], **lies[name]) for done in (0, 1) for name, both in scores.items()]
    return Summary(
        title=title, protocol="fedmd", agents=dict.fromkeys(scores, "mlp"), rows=rows,
        alone_rows=[row(2, name, both[0]) for name, both in scores.items()], counts=None, class_names=("0", "1"),
        seconds=1.0, test_samples=50,
    )  # fmt: skip


def cells(table: Table) -> list[list[str]]:
    out = StringIO()
    Console(file=out, width=160).print(table)
    lines = [line for line in out.getvalue().splitlines() if "│" in line]
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines]


def words(path: Path) -> str:
    """A page's text, without its marks."""
    return " ".join(unescape(re.sub("<[^>]*>", " ", path.read_text())).split())


def test_the_mean_of_a_table_is_of_the_honest() -> None:
    """Of a and b: alone 0.15, together 0.3, gain 0.15; bytes are of all three agents, 2 rounds each."""
    shown = cells(summary("c").table())
    assert [line[1] for line in shown[:3]] == ["mlp", "mlp", "mlp (Byzantine)"]
    assert shown[-3] == [
        "mean of the 2 honest agents",
        "",
        "15.0 %",
        "30.0 %",
        "+15.0",
        "30.0 %",
        "+15.0",
        "600 B",
        "60 B",
    ]
    assert cells(summary("b", "c").table())[-1][0] == "mean of the 1 honest agent"
    assert cells(summary("a", "b", "c").table())[-1][2:7] == ["-"] * 5
    assert cells(summary().table())[-3][:4] == ["mean", "", "30.0 %", "50.0 %"]


def test_runs_side_by_side_leave_byzantine_agents_out() -> None:
    table = comparison_table([summary("c"), summary(title="honest")])
    assert [line[2:8] for line in cells(table)] == [
        ["3 (1 Byzantine)", "2", "15.0 %", "30.0 %", "+15.0", "30.0 %"],
        ["3", "2", "30.0 %", "50.0 %", "+20.0", "50.0 %"],
    ]
    assert table.notes[-1] == "Byzantine agents are left out of all means"
    assert "Byzantine" not in str(comparison_table([summary()]).notes)


@pytest.mark.usefixtures("no_charts")
def test_a_report_draws_byzantine_agents_and_leaves_them_out_of_means(tmp_path: Path) -> None:
    run = scores_of(summary("c"))
    assert (run.alone, run.together, run.gain) == pytest.approx((0.15, 0.3, 0.15))
    assert run.mean.tolist() == pytest.approx([0.15, 0.3])
    assert run.curves["c"][1] == [0.6, 0.9]
    assert run.traffic.tolist() == [330, 660]
    page = words(write_report(summary("c"), tmp_path / "report.html"))
    assert "Byzantine agents (injected faults), left out of all means: c." in page
    assert "15.0 % → 30.0 %" in page
    assert "mean of the 2 honest agents (bytes: sum)" in page
    assert "mlp (Byzantine)" in page
    assert "count neither in the mean nor in the band" in page
    assert "could be evaluated" not in page
    page = words(write_report(summary(), tmp_path / "honest.html"))
    assert "30.0 % → 50.0 %" in page
    assert "Byzantine" not in page
    page = words(write_comparison([summary("c"), summary()], tmp_path / "compare.html"))
    assert page.count("trial: Byzantine agents (injected faults), left out of all means: c.") == 1


def test_a_report_of_byzantine_agents_only_can_be_written(tmp_path: Path) -> None:
    page = words(write_report(summary("a", "b", "c"), tmp_path / "report.html"))
    assert "mean of the 0 honest agents" in page


def test_the_live_line_leaves_byzantine_agents_out(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress()
    progress.started(RunStarted("trial", ("a", "b", "c"), 2))
    progress.round_ended(RoundEnded(2, summary("c").rows[3:], [], 1.0))
    assert "accuracy 0.300" in capsys.readouterr().err


def test_means_of_a_sweep_leave_byzantine_agents_out(tmp_path: Path) -> None:
    """With a Byzantine agent (0.2 + 0.4) / 2; without (0.2 + 0.4 + 0.9) / 3; nobody is honest: nothing."""
    path = tmp_path / "sweep.toml"
    path.write_text(SWEEP.replace("NAME", "b") + '"all" = [{ kind = "invert", agent = "b" }]\n')
    sweep = read_sweep(path)
    runs = {"none": (), "one": ("c",), "all": ("a", "b", "c")}
    rows = [
        {"seed": "0", "faults": label, **each} for label, names in runs.items() for each in summary(*names).rows[3:]
    ]
    table = means(sweep, pd.DataFrame(rows))
    assert dict(zip(table["faults"], table["mean"], strict=True)) == pytest.approx({"none": 0.5, "one": 0.3})
    (drawn,) = score_tables(sweep, table)
    assert drawn.notes == ["means of the honest agents"]
    (drawn,) = score_tables(sweep, means(sweep, pd.DataFrame(rows[:3])))
    assert drawn.notes == []
    (drawn,) = score_tables(sweep, means(sweep, pd.DataFrame(rows[6:])))
    assert not drawn.rows


@pytest.mark.usefixtures("no_report")
def test_a_recipe_can_sweep_over_who_is_byzantine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = tmp_path / "sweep.toml", tmp_path / "out"
    path.write_text(SWEEP.replace("NAME", "logistic_regression-2"))
    assert main(["sweep", str(path), "--out", str(out)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert len(re.findall(r"\(of the 2 honest agents\)", said)) == 1
    assert "means of the honest agents" in said
    frame = pd.read_csv(out / "sweep.csv")
    assert frame[frame["lies"].eq(True)][["faults", "agent"]].to_numpy().tolist() == [["one", "logistic_regression-2"]]
