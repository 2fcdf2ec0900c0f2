"""Trackers: what they are sent, that they change nothing, and that a run which goes on is one run there."""

from __future__ import annotations

import importlib.util
import json
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from sklearn.naive_bayes import GaussianNB
from sklearn.tree import DecisionTreeClassifier

import codistill as cd
from codistill.cli import main
from codistill.core.errors import RecipeError
from codistill.experiments import tracking
from codistill.experiments.recipe import make_recipe
from codistill.experiments.saved_run import is_run_of
from codistill.experiments.sweep import read_sweep
from codistill.experiments.tracking import Follower, Track, Tracker, Tracking, as_texts, figures, final_figures
from codistill.results.records import RunFinished
from codistill.results.summary import Summary

pytestmark = pytest.mark.usefixtures("time_limit")

Digits = tuple[np.ndarray, np.ndarray]
QUIET = {"runtime": "simulation", "progress": False}
RECIPE = """
seed = 0
[data]
name = "digits"
samples = 120
test_samples = 60
public = 20
[[agents]]
name = "bayes"
learner = "naive_bayes"
[[agents]]
name = "tree+"
learner = "decision_tree"
[protocol]
name = "fedmd"
rounds = 2
[runtime]
kind = "simulation"
"""


def federation(digits: Digits, **options: Any) -> cd.Federation:
    x, y = digits[0].reshape(-1, 64), digits[1]
    agents = [
        cd.Agent("bayes", GaussianNB(), x[:40], y[:40]),
        cd.Agent("tree+", DecisionTreeClassifier(random_state=0), x[40:80], y[40:80]),
    ]
    given = {"public": x[80:120], "test": (x[120:180], y[120:180]), "classes": 10, **options}
    return cd.Federation(agents, cd.FedMD(), **given)


@pytest.fixture
def small_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """A report takes longer than a small run; it has tests of its own."""

    def write(summary: Summary, path: Path) -> Path:
        path.write_text(f"report of {summary.rounds} rounds")
        return path

    monkeypatch.setattr("codistill.report.pages.write_report", write)


def points(folder: Path, key: str) -> list[tuple[int, float]]:
    """What TensorBoard's own reader finds, by step; it keeps 32 bits of a number."""
    return [(each.step, each.value) for each in _events(folder).Scalars(key.replace("+", "plus"))]


def text(folder: Path, key: str) -> str:
    """The text of a key that was written last."""
    return _events(folder).Tensors(f"{key}/text_summary")[-1].tensor_proto.string_val[0].decode()


def _events(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder))
    read.Reload()
    return read


# --- Settings: what has no effect is refused by name, and what is missing says how to install it.


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"to": "aim"}, "track.to must be one of mlflow, tensorboard, wandb. Found: 'aim'"),
        ({}, "[track] needs 'to'"),
        ({"to": "mlflow", "folder": "x"}, "[track] folder is for tensorboard and wandb. Found: to = 'mlflow'"),
        ({"to": "mlflow", "offline": True}, "[track] offline is for wandb. Found: to = 'mlflow'"),
        ({"to": "tensorboard", "uri": "x"}, "[track] uri is for mlflow and wandb. Found: to = 'tensorboard'"),
        ({"to": "wandb", "run": "x"}, "Unknown option 'run' for [track]"),
        ({"to": "wandb", "params": {"a": 1}}, "track.params must be a table of strings"),
    ],
)
def test_a_setting_without_effect_is_refused(table: dict[str, Any], said: str) -> None:
    from codistill.core.text import parse_toml

    with pytest.raises(RecipeError) as error:
        make_recipe({**parse_toml(RECIPE), "track": table}, Path.cwd())
    assert said in str(error.value)


@pytest.mark.parametrize(("to", "library"), [("mlflow", "mlflow"), ("tensorboard", "tensorboardX"), ("wandb", "wandb")])
def test_a_missing_library_is_named_with_its_extra_and_nothing_is_imported(
    to: str, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == library else there(name))
    with pytest.raises(RecipeError, match=rf"needs the library {library}.*pip install 'codistill\[{to}\]'"):
        cd.track(to)
    monkeypatch.undo()
    cd.track(to)
    assert library not in sys.modules or library == "tensorboardX"


def test_paths_are_those_beside_the_recipe(tmp_path: Path) -> None:
    def made(table: dict[str, str]) -> dict[str, Any]:
        return tracking.absolute(table, tmp_path)

    assert made({"uri": "sqlite:///runs.db"}) == {"uri": f"sqlite:///{tmp_path}/runs.db"}
    assert made({"uri": "sqlite:////srv/runs.db"}) == {"uri": "sqlite:////srv/runs.db"}
    assert made({"uri": "http://host:5000", "folder": "tb"}) == {
        "uri": "http://host:5000", "folder": str(tmp_path / "tb"),
    }  # fmt: skip


def test_a_recipe_with_another_tracker_is_the_same_run(tmp_path: Path) -> None:
    from codistill.core.text import parse_toml

    tables = parse_toml(RECIPE)
    (tmp_path / "recipe.toml").write_text(RECIPE + '[track]\nto = "mlflow"\n')
    assert is_run_of(make_recipe({**tables, "track": {"to": "wandb"}}, tmp_path), tmp_path)
    assert not is_run_of(make_recipe({**tables, "seed": 1}, tmp_path), tmp_path)


def test_the_runs_of_a_sweep_are_named_by_what_they_differ_in(tmp_path: Path) -> None:
    path = tmp_path / "digits.toml"
    axes = '[track]\nto = "mlflow"\n[sweep]\nprotocol = [{ name = "fedmd" }, { name = "alone" }]\nseed = [0, 1]\n'
    path.write_text(RECIPE + axes)
    shown = [recipe.track for _, recipe in read_sweep(path).runs]
    assert [track and (track.experiment, track.name, track.params) for track in shown] == [
        ("digits", f"{protocol}_{seed}", {"protocol": protocol, "seed": str(seed)})
        for protocol in ("fedmd", "alone")
        for seed in (0, 1)
    ]
    path.write_text(RECIPE + axes.replace("[sweep]", 'name = "mine"\n[sweep]'))
    with pytest.raises(RecipeError, match="runs of a sweep are named by their values"):
        read_sweep(path).runs  # noqa: B018


# --- Figures.


def row(agent: str, accuracy: float, **more: Any) -> dict[str, Any]:
    return {"round": 1, "agent": agent, "present": True, "sent": 3, "received": 4, "steps": 10, "accuracy": accuracy,
            "test_samples": 9, **more}  # fmt: skip


def test_figures_are_those_of_agents_and_means_of_honest_ones() -> None:
    rows = [row("a", 0.5, rmse=1.0), row("b", 0.75, rmse=3.0), row("liar", 0.0, lies=True, rmse=9.0)]
    assert figures(rows) == {
        "agents/present": 3, "bytes/sent": 9, "bytes/received": 12, "mean/steps": 10,
        "accuracy/a": 0.5, "accuracy/b": 0.75, "accuracy/liar": 0.0, "mean/accuracy": 0.625, "worst/accuracy": 0.5,
        "rmse/a": 1.0, "rmse/b": 3.0, "rmse/liar": 9.0, "mean/rmse": 2.0, "worst/rmse": 3.0,
    }  # fmt: skip


def test_of_many_agents_there_are_quantiles() -> None:
    rows = [row(f"agent {n}", n / 10_000) for n in range(10_001)]
    found = figures(rows)
    assert len(found) == 9
    assert [round(found[f"{name}/accuracy"], 6) for name in ("quantile_10", "median", "quantile_90", "worst")] == [
        0.1, 0.5, 0.9, 0.0,
    ]  # fmt: skip
    assert f"accuracy/agent {tracking.MOST_CURVES - 1}" in figures(rows[: tracking.MOST_CURVES])
    assert "accuracy/agent 0" not in figures(rows[: tracking.MOST_CURVES + 1])


def test_at_the_end_each_agent_is_held_against_itself_alone() -> None:
    rows = [row("a", 0.5, own_accuracy=0.5), row("b", 0.75, own_accuracy=0.25)]
    alone = [row("a", 0.25, own_accuracy=0.75), row("b", 0.25, own_accuracy=0.25)]
    agents = {"a": "forest", "b": "mlp"}
    found = final_figures(Summary("trial", "fedmd", agents, rows, alone, None, ("0", "1"), 1.0, 9))
    assert found == {
        "alone_accuracy/a": 0.25, "alone_accuracy/b": 0.25, "mean/alone_accuracy": 0.25, "worst/alone_accuracy": 0.25,
        "gain_accuracy/a": 0.25, "gain_accuracy/b": 0.5, "mean/gain_accuracy": 0.375, "worst/gain_accuracy": 0.25,
        "alone_own_accuracy/a": 0.75, "alone_own_accuracy/b": 0.25, "mean/alone_own_accuracy": 0.5,
        "worst/alone_own_accuracy": 0.25, "gain_own_accuracy/a": -0.25, "gain_own_accuracy/b": 0.0,
        "mean/gain_own_accuracy": -0.125, "worst/gain_own_accuracy": -0.25,
        "agents/better_than_alone": 0, "agents/worse_than_alone": 1,
    }  # fmt: skip


def test_settings_are_texts_by_dotted_keys() -> None:
    tables = {"seed": 0, "agents": [{"learner": {"kind": "mlp"}}], "runtime": {"alone": True, "at": (1, 2)}}
    assert as_texts(tables) == {
        "seed": "0", "agents.0.learner.kind": "mlp", "runtime.alone": "true", "runtime.at": "(1, 2)",
    }  # fmt: skip


# --- The process that follows a run: in order, nothing twice, and what fails is tried again.


class Kept(Tracker):
    """A tracker in memory, which fails as often as it is asked to."""

    calls: ClassVar[list[tuple[Any, ...]]] = []
    fails = 0

    def __init__(self, track: Track, name: str, id: str | None, done: int) -> None:
        self.id, self.last = id or name, done if id else 0
        self.calls.append(("open", name, id, done))

    def settings(self, settings: Mapping[str, str]) -> None:
        self.calls.append(("settings", dict(settings)))

    def row(self, step: int, values: Mapping[str, float], at: float) -> None:
        if Kept.fails:
            Kept.fails -= 1
            raise ConnectionError("server away\nfor a moment")
        self.calls.append(("row", step, dict(values)))

    def artefact(self, path: Path) -> None:
        self.calls.append(("artefact", path))

    def end(self, outcome: str, said: Mapping[str, str]) -> None:
        self.calls.append(("end", outcome))


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    monkeypatch.setitem(tracking.TRACKERS, "mlflow", Kept)
    monkeypatch.setattr(Kept, "calls", [])
    monkeypatch.setattr(Kept, "fails", 0)
    return Kept.calls


def follow(folder: Path, *messages: tuple[Any, ...], done: int = 0, **table: str) -> list[str]:
    """Send these messages; what is said of failures."""
    said: list[str] = []
    track = {"to": "mlflow", "uri": None, "folder": None, "experiment": None, **table}
    opened = ("open", track, "trial", str(folder), done)
    Follower(said.append, again=0.0).follow(json.dumps(each) for each in (opened, *messages))
    return said


def rows(first: int, last: int) -> list[tuple[Any, ...]]:
    return [("row", t, {"x": float(t)}, 0.0) for t in range(first, last + 1)]


def test_what_is_sent_arrives_in_order_and_a_killed_run_is_marked(kept: list[Any], tmp_path: Path) -> None:
    assert follow(tmp_path, ("settings", {"seed": "0"}), *rows(1, 2), ("row_at_end", 2, {"gain": 1.0}, 0.0)) == []
    assert kept == [
        ("open", "trial", None, 0), ("settings", {"seed": "0"}), ("row", 1, {"x": 1.0}), ("row", 2, {"x": 2.0}),
        ("row", 2, {"gain": 1.0}), ("end", "killed"),
    ]  # fmt: skip


def test_what_is_there_is_not_sent_again(kept: list[Any], tmp_path: Path) -> None:
    end, gain = ("end", "complete", {}), ("row_at_end", 3, {"gain": 1.0}, 0.0)
    follow(tmp_path, *rows(1, 2))
    kept.clear()
    follow(tmp_path, *rows(1, 3), gain, end, done=2)
    assert kept == [
        ("open", "trial", "trial", 2), ("row", 3, {"x": 3.0}), ("row", 3, {"gain": 1.0}), ("end", "complete"),
    ]  # fmt: skip
    kept.clear()
    follow(tmp_path, *rows(1, 3), gain, end, done=3)
    assert kept == [("open", "trial", "trial", 3), ("end", "complete")]
    kept.clear()
    follow(tmp_path, *rows(1, 1), end, done=3, uri="http://elsewhere")
    assert kept[:2] == [("open", "trial", None, 3), ("row", 1, {"x": 1.0})]


@pytest.mark.parametrize(("fails", "said"), [(2, 0), (4, 2)])
def test_what_fails_is_tried_again_and_said_if_it_goes_on(
    kept: list[Any], tmp_path: Path, fails: int, said: int
) -> None:
    Kept.fails = fails
    assert follow(tmp_path, *rows(1, 3), ("end", "complete", {})) == said * [
        "ConnectionError: server away for a moment"
    ]
    assert [call[1] for call in kept if call[0] == "row"] == [1, 2, 3]


# --- Runs.


@pytest.mark.parametrize("runtime", ["simulation", pytest.param("processes", marks=pytest.mark.long), pytest.param(
    "network", marks=pytest.mark.long)])  # fmt: skip
def test_tensorboard_reads_what_the_rows_say(
    runtime: str, digits: Digits, tmp_path: Path, capsys: pytest.CaptureFixture[str], small_report: None
) -> None:
    plain = federation(digits).run(2, **{**QUIET, "runtime": runtime})
    observer = cd.track("tensorboard", folder=str(tmp_path), experiment="tries", name="first", params={"by": "me"})
    result = federation(digits).run(2, **{**QUIET, "runtime": runtime}, observers=[observer])
    assert result.rows == plain.rows
    folder = tmp_path / "tries" / "first"
    for name in ("bayes", "tree+"):
        for key in ("accuracy", "own_accuracy"):
            expected = [(row["round"], np.float32(row[key])) for row in result.rows if row["agent"] == name]
            assert points(folder, f"{key}/{name}") == expected
    lines = result.summary().lines()
    assert points(folder, "mean/gain_accuracy") == [(2, np.float32((lines[0].gain + lines[1].gain) / 2))]
    assert points(folder, "alone_accuracy/bayes") == [(2, np.float32(lines[0].alone))]
    assert text(folder, "outcome") == "complete after 2 of 2 rounds"
    assert (folder / "report.html").read_text() == "report of 2 rounds"
    settings = text(folder, "settings")
    assert all(f"{line}\n" in f"{settings}\n" for line in ("protocol.name | fedmd", f"runtime.kind | {runtime}"))
    assert "by | me" in settings
    assert capsys.readouterr().err == ""


def test_a_run_that_is_resumed_is_one_tracked_run(digits: Digits, tmp_path: Path, small_report: None) -> None:
    class FailsIn:
        def __init__(self, last: int) -> None:
            self.last = last

        def round_ended(self, record: Any) -> None:
            if record.round == self.last:
                raise ZeroDivisionError

    def run(rounds: int, *observers: Any, **options: Any) -> cd.Result:
        track = cd.track("tensorboard", folder=str(tmp_path / "shown"))
        given = {**QUIET, "folder": tmp_path / "run", "checkpoint_every": 2, "alone": False, **options}
        return federation(digits).run(rounds, **given, observers=[track, *observers])

    with pytest.raises(ZeroDivisionError):
        run(5, FailsIn(3))
    folder = tmp_path / "shown" / "codistill" / "run"
    assert text(folder, "outcome") == "failed after 2 of 5 rounds"
    result = run(5, resume=True)  # from the checkpoint after round 2: the third is done again
    means = [np.float32(np.mean([r["accuracy"] for r in result.rows if r["round"] == t])) for t in range(1, 6)]
    assert dict(found := points(folder, "mean/accuracy")) == pytest.approx(dict(enumerate(means, 1)))
    assert len(found) == 5
    assert text(folder, "outcome") == "complete after 5 of 5 rounds"
    assert [path.name for path in folder.parent.iterdir()] == ["run"]


def test_a_tracker_that_breaks_is_one_warning(
    digits: Digits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tensorboard").write_text("a file in the place of the folder")
    result = federation(digits).run(
        2, **QUIET, alone=False, observers=[cd.track("tensorboard", folder=str(tmp_path / "tensorboard"))]
    )
    assert not result.interrupted
    first = capsys.readouterr().err
    assert first.count("warning: the tracker tensorboard fails: ") == 1
    assert "NotADirectoryError" in first
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    federation(digits).run(1, **QUIET, alone=False, observers=[cd.track("tensorboard", folder=str(tmp_path))])
    assert "FileNotFoundError" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("outcome", "by_operator", "said"),
    [("complete", False, "complete"), ("stopped", False, "stopped"), ("stopped", True, "interrupted"),
     ("failed", False, "failed")],
)  # fmt: skip
def test_how_a_run_has_ended_is_told(
    outcome: str, by_operator: bool, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[Any, ...]] = []
    monkeypatch.setattr(Tracking, "_send", lambda self, *values: sent.append(values))
    cd.track("tensorboard").finished(RunFinished(1, 3, outcome, 0.1, by_operator))
    assert sent == [("end", said, {"outcome": f"{said} after 1 of 3 rounds"})]


KILLED = """
import os, signal, sys
from codistill.experiments.tracking import Track, Tracking
from codistill.results.records import RoundEnded, RunStarted

tracking = Tracking(Track("tensorboard", folder=sys.argv[1]))
tracking.started(RunStarted("fedmd", ("a",), 9))
row = {"round": 1, "agent": "a", "present": True, "sent": 0, "received": 0, "accuracy": 0.5}
tracking.round_ended(RoundEnded(1, [row], [], 0.1))
print(tracking._process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_run_that_is_killed_is_marked_as_killed(tmp_path: Path) -> None:
    import psutil

    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL
    follower = int(done.stdout)
    if psutil.pid_exists(follower):
        psutil.wait_procs([psutil.Process(follower)], timeout=60)
    folder = tmp_path / "codistill" / "fedmd"
    assert text(folder, "outcome") == "killed after round 1"
    assert points(folder, "accuracy/a") == [(1, 0.5)]


def test_a_peer_refuses_a_table_that_would_have_no_effect(tmp_path: Path) -> None:
    from codistill.experiments.networked import AgentFile, join_peers

    x = np.zeros((4, 2))
    mine = AgentFile(cd.Agent("bayes", GaussianNB(), x, np.array([0, 1, 0, 1])))
    from codistill.core.text import parse_toml

    recipe = make_recipe({**parse_toml(RECIPE), "track": {"to": "mlflow"}}, tmp_path)
    with pytest.raises(RecipeError, match=r"'bayes' takes part as a peer. Remove \[track\]"):
        join_peers(mine, recipe, None, "x", {}, tmp_path, should_stop=lambda: False, progress=False, form="text")


# --- The real MLflow, with its own client, and Weights & Biases without a network.


@pytest.fixture
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An MLflow client of a new database; files of runs are put beside it."""
    from mlflow import MlflowClient

    monkeypatch.chdir(tmp_path)
    return MlflowClient(f"sqlite:///{tmp_path}/runs.db")


def runs_of(client: Any, experiment: str) -> dict[str, Any]:
    place = client.get_experiment_by_name(experiment).experiment_id
    return {run.info.run_name: run for run in client.search_runs([place])}


TRACKED = RECIPE + '[track]\nto = "mlflow"\nuri = "sqlite:///runs.db"\n'


@pytest.mark.long
@pytest.mark.filterwarnings("default")  # of MLflow itself
def test_mlflow_reads_what_a_recipe_has_run(tmp_path: Path, database: Any) -> None:
    (tmp_path / "trial.toml").write_text(TRACKED)
    assert main(["run", "trial.toml", "--out", "one", "--quiet"]) == 0
    run = runs_of(database, "codistill")["one"]
    assert (run.info.status, run.data.tags["codistill.outcome"]) == ("FINISHED", "complete after 2 of 2 rounds")
    assert run.data.params["protocol.less_forgetting"] == "0.0"
    assert run.data.params["agents.1.learner"] == "decision_tree"
    assert run.data.params["data.samples"] == "120"
    rows = [json.loads(line) for line in Path("one/metrics.jsonl").read_text().splitlines()]
    expected = [(row["round"], row["accuracy"]) for row in rows if row["agent"] == "tree+"]
    history = database.get_metric_history(run.info.run_id, "accuracy/treeplus")
    assert [(each.step, each.value) for each in history] == expected
    assert {"gain_accuracy/bayes", "alone_own_accuracy/bayes", "worst/gain_own_accuracy"} <= run.data.metrics.keys()
    assert [each.path for each in database.list_artifacts(run.info.run_id)] == ["recipe.toml", "report.html"]
    shown = Path(database.download_artifacts(run.info.run_id, "report.html")).read_bytes()
    assert shown == Path("one/report.html").read_bytes()
    # Again: all rounds are done, and nothing is doubled.
    assert main(["resume", "one", "--quiet"]) == 0
    again = runs_of(database, "codistill")
    assert list(again) == ["one"]
    assert len(database.get_metric_history(run.info.run_id, "accuracy/treeplus")) == 2
    assert len(database.get_metric_history(run.info.run_id, "gain_accuracy/bayes")) == 1


@pytest.mark.long
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("jobs", [[], ["--on", "local"]], ids=["here", "jobs"])
def test_a_sweep_is_one_experiment_with_a_run_for_each_combination(
    jobs: list[str], tmp_path: Path, database: Any
) -> None:
    axes = '[sweep]\nprotocol = [{ name = "fedmd" }, { name = "alone" }]\nseed = [0, 1]\n'
    (tmp_path / "tries.toml").write_text(TRACKED + axes)
    assert main(["sweep", "tries.toml", "--out", "all", *jobs]) == 0
    runs = runs_of(database, "tries")
    assert {name: (run.info.status, run.data.params["protocol"], run.data.params["seed"]) for name, run in runs.items()
            } == {f"{protocol}_{seed}": ("FINISHED", protocol, str(seed))
                  for protocol in ("fedmd", "alone") for seed in (0, 1)}  # fmt: skip


@pytest.mark.long
@pytest.mark.filterwarnings("default")
def test_mlflow_marks_runs_that_fail_and_a_server_that_is_away_is_one_warning(
    digits: Digits, database: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Fails:
        def round_ended(self, record: Any) -> None:
            raise ZeroDivisionError

    observer = cd.track("mlflow", uri="sqlite:///runs.db", name="failing")
    with pytest.raises(ZeroDivisionError):
        federation(digits).run(2, **QUIET, alone=False, observers=[observer, Fails()])
    assert runs_of(database, "codistill")["failing"].info.status == "FAILED"
    assert capsys.readouterr().err == ""
    away = cd.track("mlflow", uri="http://127.0.0.1:9")
    result = federation(digits).run(2, **QUIET, alone=False, observers=[away])
    assert result.rows == federation(digits).run(2, **QUIET, alone=False).rows
    assert capsys.readouterr().err.count("warning: the tracker mlflow fails: MlflowException") == 1


def log_records(data: bytes, start: int = 7) -> Iterator[bytes]:
    """Records of a log as LevelDB writes it: blocks of 32 KiB, in them parts with a checksum, a length and a kind."""
    whole, place = b"", start
    while place - start + 7 <= len(data):
        if (left := -place % 32768) < 7:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place - start)
        whole += data[place - start + 7 : place - start + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or its last part
            yield whole
            whole = b""


@pytest.mark.long
@pytest.mark.filterwarnings("default")
def test_weights_and_biases_keeps_a_run_in_files(digits: Digits, tmp_path: Path, small_report: None) -> None:
    from wandb.proto.wandb_internal_pb2 import Record

    observer = cd.track("wandb", offline=True, folder=str(tmp_path), experiment="tries", name="first")
    result = federation(digits).run(2, **QUIET, observers=[observer])
    (path,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    records = [Record.FromString(data) for data in log_records(path.read_bytes()[7:])]
    runs = [each.run for each in records if each.WhichOneof("record_type") == "run"]
    assert {(run.project, run.display_name) for run in runs} == {("tries", "first")}
    found = {}
    for record in records:
        if record.WhichOneof("record_type") == "history":
            items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            found[items["_step"]] = items
    means = {t: np.mean([row["accuracy"] for row in result.rows if row["round"] == t]) for t in (1, 2)}
    assert {step: items["mean/accuracy"] for step, items in found.items() if step} == pytest.approx(means)
    assert found[2]["mean/gain_accuracy"] == pytest.approx(np.mean([line.gain for line in result.summary().lines()]))
    assert [each.exit.exit_code for each in records if each.WhichOneof("record_type") == "exit"] == [0]
