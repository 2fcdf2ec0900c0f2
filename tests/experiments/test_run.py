"""From a recipe to a run's folder, and back after a kill at any moment: the same to the byte."""

import json
import os
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path

import numpy as np
import pytest
import tomli_w

from codistill.cli import main
from codistill.core import files
from codistill.core.errors import CheckpointError, CodistillError, DataError, RecipeError
from codistill.data.partition import counts
from codistill.experiments import run as module
from codistill.experiments.building import agent_names, build, hand_out, load_data
from codistill.experiments.recipe import make_recipe
from codistill.experiments.run import execute, source_of
from codistill.experiments.saved_run import read_summary, reopen
from codistill.nodes.record import record_of

TABLES = {
    "seed": 1,
    "data": {"name": "wine", "public": 12},
    "agents": [{"name": "a", "learner": "mlp"}, {"name": "b", "learner": {"kind": "random_forest", "n_estimators": 2}}],
    "protocol": {"name": "fedmd", "rounds": 3},
    "runtime": {"kind": "simulation"},
    "faults": [{"kind": "drop", "rate": 0.2}],
}


def recipe(**tables):
    return make_recipe({**TABLES, **tables}, Path())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of the recipe that nothing has happened to."""
    return run_of(tmp_path_factory.mktemp("whole"))


def run_of(folder, **tables):
    execute(recipe(**tables), folder / "run", progress=False)
    return folder / "run"


@pytest.fixture
def no_report(monkeypatch):
    """A report takes longer than such a run; it has tests of its own."""
    plain = lambda summary, path: files.write_atomically(path, b"a report")  # noqa: E731
    monkeypatch.setattr("codistill.report.pages.write_report", plain)


def figures(folder):
    names = ("metrics.jsonl", "alone/metrics.jsonl", "outputs.safetensors", "log.txt")
    return {name: (folder / name).read_bytes() for name in names}


# --- building ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entries", "names"),
    [
        ([{"learner": "mlp"}], ["mlp"]),
        ([{"learner": "mlp", "name": "x"}], ["x"]),
        ([{"learner": "mlp", "count": 2}], ["mlp-1", "mlp-2"]),
        ([{"learner": "mlp", "name": "x", "count": 2}], ["x-1", "x-2"]),
        ([{"learner": "mlp"}, {"learner": "ridge"}, {"learner": "mlp"}], ["mlp-1", "ridge", "mlp-2"]),
        ([{"learner": "mlp", "count": 2}, {"learner": "mlp"}], ["mlp-1", "mlp-2", "mlp-3"]),
        ([{"learner": "sklearn.svm.SVC"}], ["SVC"]),
    ],
)
def test_agents_get_names(entries, names):
    assert agent_names(recipe(agents=entries)) == names


def test_the_partition_is_that_of_the_seed():
    made = recipe(partition={"kind": "dirichlet", "alpha": 0.5})
    data = load_data(made)
    first, second = hand_out(made, data), hand_out(made, data)
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    assert sorted(np.concatenate(first)) == list(range(len(data.x)))


def test_a_federation_is_built_from_the_recipe():
    federation, data = build(recipe())
    assert [agent.name for agent in federation.agents] == ["a", "b"]
    assert [agent.learner.describe() for agent in federation.agents] == ["mlp", "RandomForestClassifier"]
    assert len(federation.public) == 12
    assert sum(len(agent.shard) for agent in federation.agents) == len(data.x)
    assert len(federation.test[0]) == len(data.x_test)


def test_equal_recipes_begin_with_equal_models():
    first, second = (build(recipe())[0].agents[0].learner.weights() for _ in range(2))
    assert all(np.array_equal(first[name], second[name]) for name in first)


def test_a_topology_that_the_protocol_cannot_use_is_refused_before_the_run():
    with pytest.raises(RecipeError, match="fedmd needs a topology with a hub"):
        build(recipe(protocol={"name": "fedmd", "topology": "ring"}))


def tables_per_agent(folder, seed=0):
    rng = np.random.default_rng(seed)
    for name in ("north", "south"):
        rows = [f"{x:.4f},{y:.4f},{label}" for x, y, label in zip(*rng.normal(size=(2, 40)), "uv" * 20, strict=True)]
        (folder / f"{name}.csv").write_text("\n".join(["x,y,kind", *rows]) + "\n")
    return {"files": {"north": str(folder / "north.csv"), "south": str(folder / "south.csv")}, "label": "kind"}


def test_one_file_per_agent(tmp_path):
    data = tables_per_agent(tmp_path)
    agents = [{"name": "south", "learner": "naive_bayes"}, {"name": "north", "learner": "ridge"}]
    made = recipe(data=data, agents=agents, protocol={"name": "alone"}, faults=[])
    federation, dataset = build(made)
    for agent, part in zip(federation.agents, hand_out(made, dataset), strict=True):
        assert set(dataset.ids["agent"][part]) == {agent.name}
        assert np.array_equal(agent.shard.x, dataset.x[part])


def by_hospital(folder, **changes):
    """A table of three hospitals: 20 rows each, the third with a single row of class 0."""
    rows = np.arange(60)
    kind = np.where((rows >= 41), 3, rows % 2)
    where = np.repeat(["east", "north", "west"], 20)
    lines = [f"{row},{row % 7},{w},{k}" for row, w, k in zip(rows, where, kind, strict=True)]
    (folder / "patients.csv").write_text("\n".join(["number,other,hospital,kind", *lines]))
    learners = [{"name": name, "learner": "random_forest"} for name in ("west", "east", "north")]
    data = {"file": "patients.csv", "label": "kind", "label_above": 0, "ids": ["hospital"], "scale": "none"}
    partition = {"kind": "by", "id": "hospital"}
    tables = {"data": {**data, **changes}, "agents": learners, "partition": partition, "protocol": {"name": "avgkd"}}
    return make_recipe(tables, folder)


@pytest.mark.parametrize("validation", [0.0, 0.25])
def test_agents_by_an_id_are_tested_on_held_out_rows_of_their_own(tmp_path, validation):
    federation, data = build(by_hospital(tmp_path, test_fraction=0.3, validation=validation))
    rows = {"east": range(20), "north": range(20, 40), "west": range(40, 60)}
    held = 0
    for agent in federation.agents:
        numbers = set(agent.shard.x[:, 0]) | set(record_of(agent).test[0][:, 0])
        assert numbers <= set(rows[agent.name]), "agents named as the values of the id hold their rows"
        assert not set(agent.shard.x[:, 0]) & set(record_of(agent).test[0][:, 0])
        assert len(np.unique(agent.shard.labels)) == 2, "of every class of an agent one row stays in training"
        held += len(record_of(agent).test[0])
    assert held == len(data.x_test) == len(federation.test[0])
    assert data.class_names == ("above 0", "at most 0")
    assert 40 in {*federation.agents[0].shard.x[:, 0]}, "the single row of its class"


def by_source(folder, agents, **changes):
    """Three sources of images; the brightness of an image says which one it is from."""
    for value, name in enumerate(("mine", "yours", "theirs"), 1):
        x, y = np.full((40, 2 + value, 2 + value), value, np.uint8), np.arange(40) % 2
        np.savez(folder / f"{name}.npz", x_train=x, y_train=y, x_test=x[:20], y_test=y[:20])
    data = {"sources": ["yours", "mine", "theirs"], "size": 4, "samples": 20, "test_samples": 12, "scale": "none"}
    partition = {"kind": "by", "id": "source"}
    tables = {"data": {**data, **changes}, "agents": agents, "partition": partition, "protocol": {"name": "fedavg"}}
    return make_recipe(tables, folder)


@pytest.mark.parametrize("validation", [0.0, 0.2])
def test_agents_by_source_are_named_and_tested_as_their_sources(tmp_path, validation):
    made = by_source(tmp_path, [{"learner": "logistic", "count": 3}], validation=validation)
    federation, _ = build(made, str(tmp_path))
    assert [agent.name for agent in federation.agents] == ["yours", "mine", "theirs"]
    held = round(20 * validation) if validation else 12
    for agent, value in zip(federation.agents, (2, 1, 3), strict=True):
        assert set(agent.shard.x.round().ravel()) == set(record_of(agent).test[0].round().ravel()) == {value}
        assert len(agent.shard) == 20 - round(20 * validation)
        assert len(record_of(agent).test[0]) == held
    assert len(federation.test[0]) == 3 * held
    assert source_of(made, str(tmp_path))["data"]["dir"] == str(tmp_path)


def test_agents_by_source_may_have_names_of_their_own(tmp_path):
    named = [{"learner": "logistic", "name": name} for name in ("theirs", "mine", "yours")]
    federation, _ = build(by_source(tmp_path, named), str(tmp_path))
    assert {agent.name: round(agent.shard.x.max()) for agent in federation.agents} == {
        "theirs": 3,
        "mine": 1,
        "yours": 2,
    }
    other = [{"learner": "logistic", "name": "first"}, {"learner": "logistic", "count": 2}]
    federation, _ = build(by_source(tmp_path, other), str(tmp_path))
    names = ["first", "logistic-1", "logistic-2"]
    assert [agent.name for agent in federation.agents] == names, "the sources in alphabetical order"
    assert [round(agent.shard.x.max()) for agent in federation.agents] == [1, 3, 2]


def test_sources_have_no_other_id(tmp_path):
    made = by_source(tmp_path, [{"learner": "logistic", "count": 3}], validation=0.2)
    other = make_recipe({**made.source, "partition": {"kind": "by", "id": "writer"}}, tmp_path)
    with pytest.raises(DataError, match=r"needs an id of the data set.*'writer'.*source"):
        build(other, str(tmp_path))


def test_a_table_is_looked_for_in_the_data_folder(tmp_path, monkeypatch):
    (tmp_path / "recipes").mkdir()
    tables = by_hospital(tmp_path).source
    tables["data"]["file"] = "patients.csv"
    made = make_recipe(tables, tmp_path / "recipes")
    with pytest.raises(
        CodistillError, match=r"'patients.csv' must be beside the recipe or in the data folder.*not set"
    ):
        load_data(made)
    assert len(load_data(made, str(tmp_path)).y) == 48
    assert source_of(made, str(tmp_path))["data"]["dir"] == str(tmp_path)
    monkeypatch.setenv("CODISTILL_DATA", str(tmp_path / "recipes"))
    with pytest.raises(CodistillError, match=r"no such file; the data folder is .*recipes"):
        load_data(made)
    monkeypatch.setenv("CODISTILL_DATA", str(tmp_path))
    assert len(load_data(made).y) == 48


def test_agents_must_be_named_as_their_files(tmp_path):
    made = recipe(data=tables_per_agent(tmp_path), protocol={"name": "alone"}, faults=[])
    with pytest.raises(RecipeError, match=r"named as the files.*agents a, b; files north, south"):
        build(made)


# --- a run and its folder -----------------------------------------------------------------------------


def test_what_a_run_leaves_behind(whole):
    names = (
        "alone checkpoints log.txt metrics.jsonl outputs.safetensors recipe.toml report.html run.json times.jsonl .lock"
    )
    assert {path.name for path in whole.iterdir()} == set(names.split())
    assert not list(whole.rglob("*.part"))
    assert reopen(whole) == recipe()


def test_a_run_in_figures(whole):
    rows = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert [(row["round"], row["agent"]) for row in rows] == [(done, name) for done in (1, 2, 3) for name in "ab"]
    summary = read_summary(whole)
    alone = [json.loads(line) for line in (whole / "alone" / "metrics.jsonl").read_text().splitlines()]
    a, b = summary.lines()
    assert (a.together, b.together) == (rows[-2]["accuracy"], rows[-1]["accuracy"])
    assert (a.alone, b.alone) == (alone[-2]["accuracy"], alone[-1]["accuracy"])
    assert b.sent == sum(row["sent"] for row in rows if row["agent"] == "b")
    made = recipe()
    federation, data = build(made)
    assert np.array_equal(summary.counts, counts(data.y, hand_out(made, data), 3))
    assert summary.test_samples == len(federation.test[0])
    assert summary.class_names == data.class_names
    times = [json.loads(line)["seconds"] for line in (whole / "times.jsonl").read_text().splitlines()]
    assert summary.seconds == pytest.approx(sum(times))
    assert "fedmd" in summary.facts["recipe"]


def test_the_same_recipe_gives_the_same_bytes_in_worker_processes(whole, tmp_path, no_report):
    assert figures(run_of(tmp_path, runtime={"kind": "processes", "workers": 2})) == figures(whole)


def test_a_finished_run_may_be_resumed_and_stays_as_it_is(whole, tmp_path, no_report):
    import shutil

    folder = tmp_path / "copy"
    shutil.copytree(whole, folder)
    summary, complete = execute(reopen(folder), folder, resume=True, progress=False)
    assert complete
    assert summary.rounds == 3
    assert figures(folder) == figures(whole)


def test_the_folder_of_the_data_is_remembered(tmp_path, monkeypatch, no_report):
    """What the recipe says comes first; otherwise whoever resumes need not say --data-dir again."""
    rng = np.random.default_rng(0)
    for place in ("one", "two"):
        (tmp_path / place).mkdir()
        x, y = rng.normal(size=(30, 3)), np.arange(30) % 2
        np.savez(tmp_path / place / "own.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    options = {"agents": [{"learner": "naive_bayes"}], "protocol": {"name": "alone", "rounds": 1}, "faults": []}
    monkeypatch.chdir(tmp_path)
    execute(recipe(data={"name": "own"}, **options), tmp_path / "r1", data_dir="one", progress=False)
    assert reopen(tmp_path / "r1").data.dir == str(tmp_path / "one")
    both = recipe(data={"name": "own", "dir": str(tmp_path / "two")}, **options)
    execute(both, tmp_path / "r2", data_dir="one", progress=False)
    assert reopen(tmp_path / "r2").data.dir == str(tmp_path / "two")
    monkeypatch.chdir("/")
    assert execute(reopen(tmp_path / "r1"), tmp_path / "r1", resume=True, progress=False)[1]


def test_a_run_is_not_resumed_on_other_data(tmp_path, no_report):
    data = tables_per_agent(tmp_path)
    agents = [{"name": "north", "learner": "naive_bayes"}, {"name": "south", "learner": "ridge"}]
    folder = run_of(tmp_path, data=data, agents=agents, protocol={"name": "alone", "rounds": 1}, faults=[])
    tables_per_agent(tmp_path, seed=1)
    with pytest.raises(CheckpointError, match=r"Data and agents must be as they were.*other digests"):
        execute(reopen(folder), folder, resume=True, progress=False)


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("recipe.toml", None, "no recipe.toml there"),
        ("recipe.toml", b"[data", "recipe.toml: "),
        ("recipe.toml", b"\xff", "recipe.toml: "),
        ("run.json", None, "run.json"),
        ("run.json", b"{}", "no agents, class_names"),
        ("run.json", b"[]", "run.json"),
        ("times.jsonl", b"x\n", "times.jsonl"),
        ("times.jsonl", b"5\n", "times.jsonl"),
        ("metrics.jsonl", b"{}\n", "metrics.jsonl"),
        ("metrics.jsonl", None, "metrics.jsonl"),
    ],
)
def test_a_folder_that_is_no_run(whole, tmp_path, file, content, words):
    for name in ("recipe.toml", "run.json", "times.jsonl", "metrics.jsonl"):
        (tmp_path / name).write_bytes((whole / name).read_bytes())
    if content is None:
        (tmp_path / file).unlink()
    else:
        (tmp_path / file).write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_summary(tmp_path)
    assert words in str(caught.value)


def test_a_run_is_read_while_it_goes_on(whole, tmp_path):
    for name in ("recipe.toml", "run.json", "times.jsonl"):
        (tmp_path / name).write_bytes((whole / name).read_bytes())
    (tmp_path / "metrics.jsonl").write_bytes((whole / "metrics.jsonl").read_bytes()[:-30])
    summary = read_summary(tmp_path)
    assert summary.rounds == 3
    assert len(summary.rows) == 5
    assert summary.alone_rows is None


# --- killed, interrupted, resumed -----------------------------------------------------------------------


def started(folder, arguments, prepare=lambda: None):
    """The command line in a process of its own, with all that is imported already; output goes to a file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of threads, which are not used
        pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        os.setsid()
        out = os.open(folder / "output.txt", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(out, 1)
        os.dup2(out, 2)
        sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1, closefd=False)
        prepare()
        code = main(arguments)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def ended(pid, within=60.0):
    """The exit code, or minus the signal."""
    until = time.monotonic() + within
    while time.monotonic() < until:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError(f"still running after {within} s")


def members(session):
    """Processes of a session that are alive."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, _, _, of = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            except OSError:
                continue
            if int(of) == session and state != "Z":
                found.append(int(entry.name))
    return found


def left_over(session, within=10.0):
    """Processes of a session that do not end by themselves; they are ended now."""
    until = time.monotonic() + within
    while members(session) and time.monotonic() < until:
        time.sleep(0.01)
    found = members(session)
    for pid in found:
        os.kill(pid, signal.SIGKILL)
    return found


def at_write(number, act):
    """Do something in the middle of the n-th write of the run."""

    def prepare():
        real, seen = files.write_all, [0]

        def write(file, data):
            seen[0] += 1
            if seen[0] == number:
                act(file, data)
            real(file, data)

        files.write_all = write

    return prepare


def kill(file, data):
    file.write(data[: len(data) // 2])
    os.kill(os.getpid(), signal.SIGKILL)


def interrupt(file, data):
    os.kill(os.getpid(), signal.SIGINT)


def command(folder, **tables):
    path = folder / "recipe.toml"
    path.write_text(tomli_w.dumps({**TABLES, **tables}))
    return ["run", str(path), "--quiet", "--out", str(folder / "run")]


KINDS = {"simulation": {"kind": "simulation"}, "processes": {"kind": "processes", "workers": 2}}

# The writes of this run: recipe 1, facts 2; alone: rows, times, log, checkpoint of three rounds, and before the last
# the outputs, 3 to 15; together: the same, 16 to 28; report 29.
MOMENTS = {
    "facts": 2,
    "first figures alone, before any checkpoint": 3,
    "a checkpoint alone": 10,
    "first figures, before the first checkpoint": 16,
    "first checkpoint": 19,
    "times of the second round": 21,
    "outputs": 24,
    "last checkpoint": 28,
    "report": 29,
}


@pytest.mark.parametrize("moment", MOMENTS.values(), ids=list(MOMENTS))
def test_killed_at_any_moment_and_resumed_gives_the_same_bytes(whole, tmp_path, no_report, moment, capsys):
    pid = started(tmp_path, command(tmp_path), at_write(moment, kill))
    assert ended(pid) == -signal.SIGKILL
    assert main(["resume", str(tmp_path / "run"), "--quiet"]) == 0
    assert figures(tmp_path / "run") == figures(whole)
    assert (tmp_path / "run" / "report.html").exists()
    assert json.loads((tmp_path / "run" / "run.json").read_text()) == json.loads((whole / "run.json").read_text())
    assert "cannot be used" not in capsys.readouterr().err, "half a checkpoint is no checkpoint"


def test_killed_before_anything_was_written_the_folder_is_free(whole, tmp_path, no_report):
    arguments = command(tmp_path)
    assert ended(started(tmp_path, arguments, at_write(1, kill))) == -signal.SIGKILL
    assert main(["resume", str(tmp_path / "run"), "--quiet"]) == 6
    assert main(arguments) == 0
    assert figures(tmp_path / "run") == figures(whole)


@pytest.mark.parametrize("moment", [3, 19, 25])
def test_when_the_owner_is_killed_its_workers_end_too(whole, tmp_path, no_report, moment):
    def look_and_kill(file, data):
        (tmp_path / "members.txt").write_text(str(len(members(os.getpid()))))
        kill(file, data)

    pid = started(tmp_path, command(tmp_path, runtime=KINDS["processes"]), at_write(moment, look_and_kill))
    assert ended(pid) == -signal.SIGKILL
    assert (tmp_path / "members.txt").read_text() == "3", "the owner and two workers"
    assert left_over(pid) == []
    assert main(["resume", str(tmp_path / "run"), "--quiet"]) == 0
    assert figures(tmp_path / "run") == figures(whole)


def test_killed_from_outside_again_and_again(whole, tmp_path, no_report):
    """Wherever it is by then: the run, and the resumed run, are killed as soon as they get any further."""
    arguments = command(tmp_path, runtime=KINDS["processes"])
    kept = tmp_path / "run" / "checkpoints"
    for goal in (0, 1, 2):
        pid = started(tmp_path, arguments)
        while not (kept.exists() and (goal == 0 or list(kept.glob(f"round-*{goal}.state")))):
            time.sleep(0.002)
        os.kill(pid, signal.SIGKILL)
        assert ended(pid) == -signal.SIGKILL
        arguments = ["resume", str(tmp_path / "run"), "--quiet"]
    assert main(arguments) == 0
    assert figures(tmp_path / "run") == figures(whole)


@pytest.mark.usefixtures("no_charts")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("moment", "rounds"), [(4, 0), (14, 0), (17, 1), (21, 2)], ids=["alone", "end of alone", "round 1", "round 2"]
)
def test_ctrl_c_ends_cleanly_with_what_was_reached(whole, tmp_path, kind, moment, rounds, capsys):
    pid = started(tmp_path, command(tmp_path, runtime=KINDS[kind]), at_write(moment, interrupt))
    assert ended(pid) == 130
    said = (tmp_path / "output.txt").read_text()
    assert "Stopping at the end of this round (again: at once)" in said
    assert "┃ agent " in said
    assert f"stopped after {rounds} rounds; to continue: codistill resume {tmp_path / 'run'}" in said
    assert (tmp_path / "run" / "report.html").stat().st_size > 1000
    assert "Traceback" not in said
    assert (tmp_path / "run" / "metrics.jsonl").read_text().count("\n") == 2 * rounds
    assert main(["resume", str(tmp_path / "run"), "--quiet"]) == 0
    assert figures(tmp_path / "run") == figures(whole)


def test_ctrl_c_in_the_last_round_is_a_whole_run(whole, tmp_path, no_report):
    assert ended(started(tmp_path, command(tmp_path), at_write(25, interrupt))) == 0
    assert figures(tmp_path / "run") == figures(whole)


@pytest.mark.parametrize("kind", KINDS)
def test_ctrl_c_twice_stops_at_once(whole, tmp_path, no_report, kind):
    def twice(file, data):
        interrupt(file, data)
        interrupt(file, data)

    pid = started(tmp_path, command(tmp_path, runtime=KINDS[kind]), at_write(20, twice))
    assert ended(pid) == 130
    said = (tmp_path / "output.txt").read_text()
    assert "Stopped at once." in said
    assert "Traceback" not in said
    assert left_over(pid) == []
    assert main(["resume", str(tmp_path / "run"), "--quiet"]) == 0
    assert figures(tmp_path / "run") == figures(whole)


def test_ctrl_c_at_a_terminal_reaches_the_whole_group(whole, tmp_path, no_report):
    pid = started(tmp_path, command(tmp_path, runtime=KINDS["processes"], protocol={"name": "fedmd", "rounds": 60}))
    metrics = tmp_path / "run" / "metrics.jsonl"
    while not metrics.exists() or metrics.stat().st_size == 0:
        time.sleep(0.005)
    os.killpg(pid, signal.SIGINT)
    assert ended(pid) == 130
    assert (tmp_path / "output.txt").read_text().count("Stopping at the end of this round") == 1
    assert 0 < read_summary(tmp_path / "run").rounds < 60
    assert left_over(pid) == []


# --- one run per folder -----------------------------------------------------------------------------------


def test_two_runs_in_one_folder_at_once_are_refused(whole, tmp_path, no_report, capsys):
    """While the first is held in the middle of a write, others find the folder taken, and nothing is lost."""
    go_on = tmp_path / "go on"

    def hold(file, data):
        (tmp_path / "held").touch()
        while not go_on.exists():
            time.sleep(0.005)

    arguments = command(tmp_path)
    pid = started(tmp_path, arguments, at_write(7, hold))
    while not (tmp_path / "held").exists():
        time.sleep(0.005)
    assert main(["resume", str(tmp_path / "run"), "--quiet"]) == 7
    assert "another run is using it" in capsys.readouterr().err
    assert main([*arguments, "--set", "seed=5"]) == 2
    assert "A new run needs a folder of its own." in capsys.readouterr().err
    go_on.touch()
    assert ended(pid) == 0
    assert figures(tmp_path / "run") == figures(whole)


def test_a_folder_taken_while_the_data_was_read_is_left_to_its_owner(whole, tmp_path, monkeypatch, no_report):
    """Two runs may find the same folder empty; the second to write finds it taken."""
    made = recipe(protocol={"name": "alone", "rounds": 1}, faults=[])
    first = build

    def slowly(recipe, data_dir=None):
        monkeypatch.setattr(module, "build", first)
        execute(made, tmp_path / "run", progress=False)
        return first(recipe, data_dir)

    monkeypatch.setattr(module, "build", slowly)
    with pytest.raises(RecipeError, match=r"A new run needs a folder of its own"):
        execute(recipe(), tmp_path / "run", progress=False)
    assert reopen(tmp_path / "run") == made
