"""Folders of runs that were made in Python: compared, reported on and read like those of recipes."""

import json

import numpy as np
import pytest
from sklearn.datasets import load_iris
from sklearn.linear_model import LogisticRegression
from sklearn.tree import DecisionTreeClassifier

import codistill as cd
from codistill.cli import main
from codistill.experiments.saved_run import read_summary, reopen

X, Y = load_iris(return_X_y=True)


def run(folder, protocol=None, rounds=1, resume=False):
    agents = [
        cd.Agent("a", DecisionTreeClassifier(max_depth=2, random_state=0), X[::2], Y[::2]),
        cd.Agent("b", LogisticRegression(max_iter=500), X[1::4], Y[1::4]),
    ]
    faults = [cd.Fault(kind="invert", agent="b")]
    federation = cd.Federation(agents, protocol or cd.AvgKD(), test=(X, Y), seed=3, faults=faults)
    return federation.run(rounds, runtime="simulation", progress=False, folder=folder, resume=resume)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("python") / "mine"
    run(place)
    return place


def test_the_folder_says_what_the_result_says(folder, tmp_path):
    told, kept = run(tmp_path / "again").summary(), read_summary(folder)
    assert kept.title == "mine"
    for name in ("protocol", "agents", "rows", "alone_rows", "class_names", "test_samples", "test_part", "faults"):
        assert getattr(kept, name) == getattr(told, name), name
    assert np.array_equal(kept.counts, told.counts)
    assert kept.topology.neighbours("a") == ("b",)
    assert kept.facts["seed"] == 3
    assert kept.facts["protocol"]["name"] == "avgkd"


def test_it_is_compared_and_reported_on(folder, tmp_path, capsys):
    run(tmp_path / "other", cd.PKD())
    assert main(["compare", str(folder), str(tmp_path / "other"), "--out", str(tmp_path / "page.html")]) == 0
    shown = capsys.readouterr().out
    assert "avgkd" in shown
    assert "pkd" in shown
    assert main(["report", str(folder), "--out", str(tmp_path / "report.html")]) == 0
    assert "DecisionTreeClassifier" in capsys.readouterr().out
    assert "avgkd" in (tmp_path / "report.html").read_text("utf-8")


def test_it_goes_on_in_python_and_stays_comparable(tmp_path):
    run(tmp_path / "run")
    before = (tmp_path / "run" / "run.json").read_bytes()
    run(tmp_path / "run", rounds=2, resume=True)
    assert (tmp_path / "run" / "run.json").read_bytes() == before
    assert read_summary(tmp_path / "run").rounds == 2


def test_a_command_that_needs_the_recipe_says_that_there_is_none(folder, tmp_path):
    with pytest.raises(cd.CodistillError, match="a run from Python.*resume=True"):
        reopen(folder)
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "run.json").write_text(json.dumps({"agents": {}}))
    with pytest.raises(cd.CodistillError, match="run.json is corrupted"):
        read_summary(tmp_path / "old")


def test_a_result_is_text_and_in_a_notebook_a_table():
    result = run(None)
    text, page = repr(result), result._repr_html_()
    assert "\x1b" not in text
    for word in ("agent", "alone", "together", "mean"):
        assert word in text
        assert word in page
    assert page.count("<tr>") == 4  # heading, two agents, mean
    assert "[not dim" not in page


def test_a_checkpoint_is_read_as_arrays_and_plain_values(folder):
    state = cd.read_state(folder)
    assert cd.read_state(folder / "checkpoints" / "round-000001.state")["sizes"] == state["sizes"]
    assert state["round"] == 1
    assert state["nodes"].keys() == {"a", "b"}
    node = state["nodes"]["a"]
    assert node["learner"]["columns"] == 3
    assert node["learner"]["estimator"].startswith(b"PK")  # the skops format: a zip archive
    alone = cd.read_state(folder / "alone")
    assert alone["nodes"].keys() == {"a", "b"}
    with pytest.raises(cd.CodistillError, match="at least one checkpoint"):
        cd.read_state(folder.parent)
