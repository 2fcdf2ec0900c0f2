"""Bad input: one row per kind. Each gets a sentence (what must hold, what was found, what to do) and an exit
code, before anything runs; nothing half-written is left, and nothing that was there is lost."""

import errno
import hashlib
import json
import os
import resource
import shutil
import signal
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import tomli_w
import torch
from sklearn.cluster import KMeans
from sklearn.datasets import load_wine
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.neighbors import KNeighborsClassifier
from torch import nn

import codistill as cd
from codistill.cli import main
from codistill.core import files
from codistill.core.errors import (
    CheckpointError,
    CodistillError,
    DataError,
    LearnerError,
    NetworkError,
    RecipeError,
    RuntimeFault,
    StorageError,
)
from codistill.report import pages
from codistill.wire.state import pack, unpack

# --- through the command line ---------------------------------------------------------------------------

TABLES = {
    "seed": 1,
    "data": {"name": "wine", "public": 12},
    "agents": [{"name": "clinic", "learner": "logistic"}, {"name": "lab", "learner": "naive_bayes"}],
    "protocol": {"name": "fedmd", "rounds": 2},
    "runtime": {"kind": "simulation"},
}


def recipe(**tables):
    return {key: value for key, value in {**TABLES, **tables}.items() if value is not None}


def agents(*learners, **more):
    return [{"name": name, "learner": learner, **more} for name, learner in zip("abc", learners, strict=False)]


def csv(text):
    return "table.csv", ("x,y,kind\n" + text).encode()


TABLE = {"file": "table.csv", "label": "kind"}
GOOD_ROWS = "".join(f"{i}.5,{i % 7},{'uv'[i % 2]}\n" for i in range(20))
ALONE = {"name": "alone", "rounds": 1}
TWO = agents("naive_bayes", "ridge")


def npz(**changes):
    import io

    arrays = {
        "x_train": np.zeros((12, 3)),
        "y_train": np.arange(12) % 3,
        "x_test": np.zeros((3, 3)),
        "y_test": np.arange(3),
    }
    out = io.BytesIO()
    np.savez(out, **{key: value for key, value in {**arrays, **changes}.items() if value is not None})
    return "own.npz", out.getvalue()


def holed(value):
    x = np.zeros((12, 3))
    x[4, 1] = value
    return x


OWN = {"name": "own", "dir": "."}

# name: (recipe, more arguments, a file beside it, exit code, words of the sentence)
ROWS = {
    # recipes
    "no [protocol]": (recipe(protocol=None), [], None, 2, ["must have [protocol]"]),
    "agents is a number": (recipe(agents=3), [], None, 2, ["'agents' must be [[agents]] tables", "3"]),
    "no agents": (recipe(agents=[]), [], None, 2, ["at least one agent", "Add an [[agents]] table"]),
    "protocol is a string": (recipe(protocol="fedmd"), [], None, 2, ["'protocol' must be a [protocol] table"]),
    "learner is a number": (recipe(agents=agents(5)), [], None, 2, ["agents.learner must be a string or a table", "5"]),
    "negative seed": (recipe(seed=-1), [], None, 2, ["seed must be an integer of at least 0", "-1"]),
    "true as seed": (recipe(seed=True), [], None, 2, ["seed must be an integer of at least 0", "True"]),
    "no rounds": (recipe(), ["protocol.rounds=0"], None, 2, ["protocol.rounds must be at least 1"]),
    "unknown table": (recipe(), ["protocl.rounds=2"], None, 2, ["'protocl'", "Did you mean 'protocol'?"]),
    "unknown key": (recipe(), ["protocol.round=2"], None, 2, ["'round'", "Did you mean 'rounds'?"]),
    "unknown protocol": (recipe(), ["protocol.name=fedmdd"], None, 2, ["'fedmdd'", "Did you mean 'fedmd'?"]),
    "unknown partition": (recipe(partition={"kind": "irichlet"}), [], None, 2, ["Did you mean 'dirichlet'?"]),
    "unknown data set": (recipe(), ["data.name=wyne"], None, 3, ["'wyne'", "Did you mean 'wine'?", "--data-dir"]),
    "unknown learner": (recipe(), ["agents.0.learner=mpl"], None, 4, ["'mpl'", "Did you mean 'mlp'?"]),
    "unknown estimator": (recipe(), ["agents.0.learner=sklearn.svm.SVCC"], None, 4, ["Did you mean 'SVC'?"]),
    "unknown option": (recipe(), ['agents.0.learner={kind="mlp", hiden=[3]}'], None, 4, ["Did you mean 'hidden'?"]),
    "option of wrong value": (recipe(), ['agents.0.learner={kind="random_forest", n_estimators=0}'], None, 4,
        ["RandomForestClassifier cannot use the value of an option", "n_estimators"]),
    "step size of a wrong sign": (recipe(), ['agents.0.learner={kind="mlp", lr=-1}'], None, 2,
        ["learner.lr must be above 0"]),
    "step size of a wrong type": (recipe(), ['agents.0.learner={kind="mlp", lr="fast"}'], None, 2,
        ["lr must be a number"]),
    "malformed --set": (recipe(), ["protocol.rounds"], None, 2,
        ["--set must have the form table.key=value", "Example"]),
    "--set to nowhere": (recipe(), ["agents.7.learner=mlp"], None, 2, ["A change must name a place in the recipe"]),
    "duplicate names": (recipe(), ["agents.1.name=clinic"], None, 2, ["a name of its own", "'clinic' more than once"]),
    "a name that is none": (recipe(), ["agents.1.name=../x"], None, 2, ["An agent's name must be", "'../x'"]),
    "agent called hub": (recipe(), ["agents.1.name=hub"], None, 2, ["and not 'hub'"]),
    "fault of a stranger": (recipe(faults=[{"agent": "clinik"}]), [], None, 2, ["'clinik'", "Did you mean 'clinic'?"]),
    "no public data": (recipe(), ["data.public=0"], None, 2,
        ["fedmd needs unlabelled public data", "set [data] public"]),
    "a ring for a hub": (recipe(), ["protocol.topology=ring"], None, 2,
        ["fedmd needs a topology with a hub", "Use a star"]),
    "own protocol missing": (recipe(), ["protocol.name=mine.py:P"], None, 2, ["must be importable", "No such file"]),
    "a hundred million agents": (recipe(), ["agents.0.count=100_000_000"], None, 2,
        ["agents.count must be at most 100000", "how many such agents"]),
    "many agents in several tables": (
        recipe(agents=[{"learner": "logistic", "count": 60_000}, {"learner": "ridge", "count": 60_000}]), [], None, 2,
        ["at most 100,000 agents", "120,000"]),
    "a number that no array can count to": (recipe(), [f"data.samples={10**30}"], None, 2,
        ["data.samples must be at most", f"{10**30}"]),
    "a layer that no memory holds": (recipe(), ["agents.0.learner={kind='mlp', hidden=[9223372036854775808]}"], None, 4,
        ["'mlp' cannot use the value of an option", "Change the value"]),
    "a table in the place of a list": (recipe(), ["evaluation.scores={a=1}"], None, 2,
        ["evaluation.scores must be a list of strings"]),
    # data
    "as much public data as there are numbers": (recipe(), ["data.public=1e308"], None, 3, ["size 1e+308", "fraction"]),
    "a number of 400 digits": (recipe(data=TABLE, protocol=ALONE), [], csv(
        "".join(f"{i},{i % 7},{'uv'[i % 2]}\n" for i in range(20)) + f"1,{'9' * 400},u\n"), 3,
        ["must be finite in 32 bits", "a number of 400 digits in column 'y', data row 21"]),
    "a number of 400 digits among fractions": (recipe(data=TABLE, protocol=ALONE), [], csv(
        GOOD_ROWS + f"{'9' * 400},1,u\n"), 3, ["must be finite in 32 bits", "inf in column 'x', data row 21"]),
    "too much public data": (recipe(), ["data.public=500"], None, 3, ["1 to 141 of its 142", "500"]),
    "more agents than samples": (recipe(), ["agents.0.count=200"], None, 3, ["201 agents and 130 samples"]),
    "more samples than there are": (recipe(), ["data.samples=9999"], None, 3,
        ["must not exceed the 142 samples", "9999", "Lower it"]),
    "empty shard": (recipe(partition={"kind": "unequal", "weights": [1, 100000]}), [], None, 3,
        ["must get at least one sample", "none for agent 0"]),
    "impossible partition": (recipe(partition={"kind": "dirichlet", "alpha": 0.01, "min_size": 70}), [], None, 3,
        ["at least 70 samples", "Raise alpha"]),
    "one-class shard, a model that cannot be fitted at all": (
        recipe(partition={"kind": "labels"}, agents=agents(*[
            {"kind": "logistic_regression", "solver": "newton-cholesky", "penalty": "l1"}] * 3)), [], None, 4,
        ["LogisticRegression of agent 'a' must be able to learn", "newton-cholesky", "Change its options"]),
    "data file missing": (recipe(data=TABLE, protocol=ALONE), [], None, 3,
        ["The table 'table.csv' must be beside the recipe or in the data folder", "no such file", "--data-dir"]),
    "label column missing": (recipe(data={**TABLE, "label": "knd"}, protocol=ALONE), [], csv(GOOD_ROWS), 3,
        ["must have the column 'knd'", "Did you mean 'kind'?"]),
    "no label said": (recipe(data={"file": "table.csv"}), [], csv(GOOD_ROWS), 2, ["needs 'label', the label column"]),
    "an empty cell that is refused": (recipe(data={**TABLE, "missing": "refuse"}, protocol=ALONE), [],
        csv(GOOD_ROWS + "1,,u\n"), 3, ["nan in column 'y', data row 21"]),
    "infinity in a table": (recipe(data=TABLE, protocol=ALONE), [], csv(GOOD_ROWS + "1,inf,u\n"), 3,
        ["inf in column 'y', data row 21"]),
    "words in a table": (recipe(data=TABLE, protocol=ALONE), [], csv(GOOD_ROWS + "1,many,u\n"), 3,
        ["must be usable as features", "column 'y': numbers and 'many' in data row 21", "in 'drop' or 'ids'"]),
    "table of another kind": (recipe(data={**TABLE, "file": "table.xlsx"}), [], ("table.xlsx", b""), 3,
        [".csv, .tsv or .parquet"]),
    "empty table": (recipe(data=TABLE, protocol=ALONE), [], csv(""), 3, ["at least one row"]),
    "NaN in an archive": (recipe(data=OWN, protocol=ALONE, agents=TWO), [], npz(x_train=holed(np.nan)), 3,
        ["nan in row 4"]),
    "infinity in an archive": (recipe(data=OWN, protocol=ALONE, agents=TWO), [], npz(x_train=holed(np.inf)), 3,
        ["inf in row 4"]),
    "fewer labels than samples": (recipe(data=OWN, protocol=ALONE, agents=TWO), [], npz(y_train=np.zeros(11)), 3,
        ["12 samples and 11 labels"]),
    "test samples of another shape": (recipe(data=OWN, protocol=ALONE, agents=TWO), [], npz(x_test=np.zeros((3, 4))), 3,
        ["the training part, (3,)", "the test part of data set 'own' has (4,)"]),
    "negative label": (recipe(data=OWN, protocol=ALONE, agents=TWO), [], npz(y_train=np.arange(12) - 1), 3,
        ["must not be negative", "-1 in row 0"]),
    "array missing": (recipe(data=OWN, protocol=ALONE, agents=TWO), [], npz(y_test=None), 3, ["no y_test"]),
    "not an archive": (recipe(data=OWN, protocol=ALONE, agents=TWO), [], ("own.npz", b"no archive"), 3,
        ["must be a readable .npz"]),
    "data folder missing": (recipe(data={"name": "own", "dir": "nowhere"}), [], None, 3,
        ["data folder must exist", "nowhere"]),
    "files and agents of other names": (
        recipe(data={"files": {"x": "table.csv"}, "label": "kind"}, protocol=ALONE), [], csv(GOOD_ROWS), 2,
        ["named as the files", "agents clinic, lab; files x"]),
    # models
    "images for a table": (recipe(), ["agents.0.learner=cnn"], None, 4, ["takes images", "(13,)", "This shape suits"]),
    "fedavg with a forest": (
        recipe(protocol={"name": "fedavg"}), ["agents.1.learner=random_forest"], None, 4,
        ["fedavg needs", "agent 'lab' has RandomForestClassifier", "lacks 'gradients + weights'", "avgkd", "fedmd"]),
    "avgkd with neighbours": (
        recipe(protocol={"name": "avgkd"}, agents=agents("random_forest", "nearest_neighbours")), [], None, 4,
        ["avgkd needs", "agent 'b' has KNeighborsRegressor", "lacks 'portable'", "must not travel", "alone", "fedmd"]),
    "fedavg of two architectures": (
        recipe(protocol={"name": "fedavg"}, agents=agents("mlp", "logistic")), [], None, 4,
        ["same architecture", "agent 'b' has logistic, agent 'a' has mlp", "fedmd, avgkd"]),
    "a scaler is no model": (recipe(), ["agents.0.learner=sklearn.preprocessing.StandardScaler"], None, 4,
        ["must be a classifier or a regressor", "StandardScaler"]),
}  # fmt: skip


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CODISTILL_DATA", raising=False)
    # Pictures take longest, and are not looked at here: `whole` draws them once.
    monkeypatch.setattr(pages, "write_report", lambda summary, path: files.write_atomically(path, b"<html></html>\n"))
    return tmp_path


def content(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def folders(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_dir()}


def complaint(capsys, arguments, code, words, *, out=""):
    """Run a command that must fail: it says what is wrong, what it found unless that says it, and what to do."""
    assert main(arguments) == code
    said = capsys.readouterr()
    assert said.out == out
    lines = said.err.splitlines()
    starts = [line.partition(": ")[0] for line in lines]
    unknown = lines[0].startswith("error: Unknown") and starts[1] == "to do"
    parts = ["error", "to do"] if unknown else ["error", "found", "to do"]
    assert starts[: len(parts)] == parts, said.err
    assert all(line.partition(": ")[2].strip() for line in lines[: len(parts)]), said.err
    assert all(word in said.err for word in words), said.err
    assert "Traceback" not in said.err
    return said.err


@pytest.mark.parametrize("name", list(ROWS))
def test_before_anything_runs(here, capsys, name):
    tables, changes, beside, code, words = ROWS[name]
    (here / "recipe.toml").write_text(tomli_w.dumps(tables))
    if beside:
        (here / beside[0]).write_bytes(beside[1])
    before = content(here)
    sets = [part for change in changes for part in ("--set", change)]
    complaint(capsys, ["run", "recipe.toml", "--quiet", "--out", "out", *sets], code, words)
    assert (content(here), folders(here)) == (before, set())


FILES = {
    "recipe missing": (None, 2, ["The recipe must be a readable file", "No such file"]),
    "recipe not TOML": (b"[data\n", 2, ["must be valid TOML", "at line 1"]),
    "recipe not text": (b"\xff\xfe\x00", 2, ["must be valid TOML", "utf-8"]),
    "recipe nested deeply": (b"seed = " + b"[" * 3000 + b"]" * 3000, 2, ["must be valid TOML", "nested more than 64"]),
    "recipe nested 100 deep": (b"seed = " + b"[" * 100 + b"]" * 100, 2, ["must be valid TOML", "nested more than 64"]),
    "recipe with an integer of 5,000 digits": (b"seed = " + b"9" * 5000, 2, ["must be valid TOML", "4300 digits"]),
    "recipe with a long hexadecimal integer": (b"seed = 0x" + b"f" * 9000, 2, ["must be valid TOML", "1024 bits"]),
    "recipe empty": (b"", 2, ["A recipe must have [data]"]),
}


@pytest.mark.parametrize("name", list(FILES))
@pytest.mark.parametrize("command", [["run"], ["data"]])
def test_a_recipe_that_cannot_be_read(here, capsys, name, command):
    data, code, words = FILES[name]
    if data is not None:
        (here / "recipe.toml").write_bytes(data)
    before = content(here)
    complaint(capsys, [*command, "recipe.toml"], code, words)
    assert content(here) == before


def test_one_class_is_enough_for_a_forest(here, capsys):
    forests = agents(*[{"kind": "random_forest", "n_estimators": 2}] * 3)
    (here / "recipe.toml").write_text(tomli_w.dumps(recipe(partition={"kind": "labels"}, agents=forests)))
    assert main(["run", "recipe.toml", "--quiet", "--out", "out"]) == 0


WILD = {"kind": "logistic", "optimiser": "sgd", "lr": 1e38}


def test_a_model_that_goes_to_infinity_comes_back_and_stops_nobody(here, capsys):
    (here / "recipe.toml").write_text(tomli_w.dumps(recipe(agents=agents(WILD, "naive_bayes", "ridge"))))
    assert main(["run", "recipe.toml", "--quiet", "--out", "out"]) == 0
    log = (here / "out" / "log.txt").read_text()
    assert "round 1: 'a': diverged: its outputs were not finite, or far beyond what they were; the model" in log
    assert "continues without" not in log


def test_weights_that_go_to_infinity_are_never_sent(here, capsys):
    """The model returns to its weights at the start of the round, and the hub has nothing to reject."""
    made = recipe(
        agents=agents(WILD, "logistic", "logistic"), protocol={"name": "fedavg", "rounds": 2, "local_epochs": 9}
    )
    (here / "recipe.toml").write_text(tomli_w.dumps(made))
    assert main(["run", "recipe.toml", "--quiet", "--out", "out"]) == 0
    log = (here / "out" / "log.txt").read_text()
    assert [line.partition(": diverged: ")[0] for line in log.splitlines()] == ["round 1: 'a'", "round 2: 'a'"]


@pytest.mark.parametrize("ending", ["picture.doc", "picture"])
def test_a_picture_of_no_kind(here, capsys, ending):
    (here / "recipe.toml").write_text(tomli_w.dumps(TABLES))
    assert main(["data", "recipe.toml", "--out", ending]) == 2
    assert "A picture must be one of png, svg, pdf." in capsys.readouterr().err
    assert set(content(here)) == {"recipe.toml"}


# --- folders, disks, checkpoints ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A finished run."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "recipe.toml").write_text(tomli_w.dumps(TABLES))
    assert main(["run", str(folder / "recipe.toml"), "--quiet", "--out", str(folder / "out")]) == 0
    return folder / "out"


@pytest.fixture
def ran(whole, here):
    """A copy of the finished run, and its recipe."""
    shutil.copytree(whole, here / "out")
    (here / "recipe.toml").write_text(tomli_w.dumps(TABLES))
    return here / "out"


RUN = ["run", "recipe.toml", "--quiet", "--out", "out"]
RESUME = ["resume", "out", "--quiet"]


def test_run_into_a_folder_that_holds_a_run(ran, capsys):
    before = content(ran)
    complaint(capsys, RUN, 2, ["A new run needs a folder of its own", "codistill resume out"])
    assert content(ran) == before


def test_run_into_a_folder_of_ones_own_files(here, capsys):
    (here / "recipe.toml").write_text(tomli_w.dumps(TABLES))
    (here / "out" / "checkpoints").mkdir(parents=True)
    (here / "out" / "checkpoints" / "model.pt").write_text("mine")
    (here / "out" / "log.txt").write_text("mine too")
    before = content(here)
    complaint(capsys, RUN, 2, ["A new run needs a folder of its own", "already holds checkpoints"])
    assert content(here) == before


@pytest.mark.parametrize("place", ["missing", "empty", "file"])
@pytest.mark.parametrize("command", [["resume"], ["compare"]])
def test_resume_or_compare_of_what_is_no_run(here, capsys, place, command):
    if place == "empty":
        (here / "out").mkdir()
    if place == "file":
        (here / "out").write_text("mine")
    before = content(here)
    complaint(capsys, [*command, "out"], 6, ["out must be the folder of a run", "no recipe.toml there"])
    assert content(here) == before


def test_a_file_in_the_place_of_the_folder(here, capsys):
    (here / "recipe.toml").write_text(tomli_w.dumps(TABLES))
    (here / "out").write_text("mine")
    complaint(capsys, RUN, 7, ["out must be writable", "a file where a folder is expected", "Choose another folder"])
    assert (here / "out").read_text() == "mine"


@pytest.mark.parametrize(
    ("number", "found"), [(errno.EROFS, "the folder is read-only"), (errno.EACCES, "no permission to write")]
)
def test_a_folder_that_may_not_be_written_to(here, capsys, monkeypatch, number, found):
    """As root there is nothing that may not be written to: so the system's answer is played."""
    real = Path.mkdir

    def refuse(self, *args, **options):
        if self.name == "out":
            raise OSError(number, os.strerror(number), str(self))
        real(self, *args, **options)

    (here / "recipe.toml").write_text(tomli_w.dumps(TABLES))
    monkeypatch.setattr(Path, "mkdir", refuse)
    complaint(capsys, RUN, 7, ["out must be writable", found, "Choose another folder"])
    assert set(content(here)) == {"recipe.toml"}


# The writes of this run: recipe 1, facts 2; alone 3 to 10, together 11 to 18: rows, times, log, checkpoint.
@pytest.mark.parametrize("moment", [1, 2, 3, 6, 11, 14, 15, 18, 19])
def test_a_full_disk_loses_nothing(whole, here, capsys, monkeypatch, moment):
    """The write in question is cut short; once there is room again the run goes on to the same figures."""
    real, seen = files.write_all, [0]

    def write(file, data):
        seen[0] += 1
        if seen[0] == moment:
            file.write(data[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(file, data)

    (here / "recipe.toml").write_text(tomli_w.dumps(TABLES))
    with monkeypatch.context() as patch:
        patch.setattr(files, "write_all", write)
        complaint(capsys, RUN, 7, ["must be writable", "the disk is full", "Free some space; 'codistill resume'"])
    assert not list(here.rglob("*.part"))
    assert all(data.endswith(b"\n") for name, data in content(here).items() if data and name.endswith(".jsonl"))
    assert main(RUN if moment == 1 else RESUME) == 0
    assert (here / "out" / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()


def test_a_limit_on_the_size_of_files(whole, here, capsys):
    """Checkpoints are some kilobytes, all else is smaller."""
    (here / "recipe.toml").write_text(tomli_w.dumps(TABLES))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of threads, which are not used
        pid = os.fork()
    if pid == 0:
        code = 70
        try:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (3000, resource.RLIM_INFINITY))
            sys.stderr = (here / "error.txt").open("w")
            code = main(RUN)
        finally:
            sys.stderr.flush()
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    said = (here / "error.txt").read_text()
    assert "round-000001.state must be writable" in said
    assert "the file exceeds the size limit" in said
    assert main(RESUME) == 0
    assert (here / "out" / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()


def checkpoints(folder):
    return sorted((folder / "checkpoints").glob("*.state"))


def test_the_newest_checkpoint_damaged(whole, ran, capsys):
    """The one before is used, and the user gets to know."""
    checkpoints(ran)[-1].write_bytes(b"damaged")
    assert main(RESUME) == 0
    said = capsys.readouterr().err
    assert "round-000002.state cannot be used: its digest does not match" in said
    assert "Going on from round-000001.state" in said
    assert (ran / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()


def test_all_checkpoints_damaged(ran, capsys):
    for path in checkpoints(ran):
        path.write_bytes(path.read_bytes()[:-1])
    before = content(ran)
    complaint(
        capsys, RESUME, 6, ["must be readable", "2 damaged: round-000001.state, round-000002.state", "another folder"]
    )
    assert content(ran) == before


@pytest.mark.parametrize(
    ("file", "data", "code", "words"),
    [
        ("recipe.toml", b"[data", 6, ["must be the folder of a run", "recipe.toml"]),
        ("recipe.toml", b"seed = -1", 2, ["A recipe must have [data]"]),
        ("run.json", b"{", 6, ["run.json is corrupted"]),
        ("metrics.jsonl", b"", 6, ["metrics.jsonl must hold what it held at the checkpoint"]),
    ],
)
def test_a_run_folder_that_was_tampered_with(ran, capsys, file, data, code, words):
    (ran / file).write_bytes(data)
    before = content(ran)
    complaint(capsys, RESUME, code, words)
    assert content(ran) == before


ROW = {"round": 2, "agent": "lab", "present": True, "sent": 1, "received": 1, "accuracy": 0.5, "test_samples": 4}
TAMPERED = {
    "metrics.jsonl": [
        b"\xff\xfe\n", b"[" * 100_000 + b"\n", b"9" * 5000 + b"\n", b"null\n",
        *({key: value} for key, value in [
            ("agent", []), ("agent", 3), ("agent", "nobody"), ("round", "x"), ("round", None), ("round", -1),
            ("round", 10**30), ("present", 1), ("sent", "much"), ("sent", float("nan")), ("accuracy", "good"),
            ("accuracy", None), ("accuracy", [0.5]), ("accuracy", 1e308), ("loss", 10**400), ("test_samples", {}),
        ]),
    ],
    "times.jsonl": [b'{"seconds": NaN}\n', b'{"seconds": []}\n', b"{}\n", b"\xff\n", b"[" * 100_000 + b"\n"],
    "run.json": [
        b"[]", b"", b"\xff", b'{"a":' * 100_000,
        *({key: value} for key, value in [
            ("agents", []), ("agents", {"lab": 3}), ("counts", [[1]]), ("counts", "x"), ("counts", [[-1] * 3] * 2),
            ("class_names", {}), ("class_names", ["a", "b", -5]),
            ("test_samples", None), ("test_samples", 1.5), ("versions", "x"), ("task", "other"),
            ("topology", 3), ("protocol_settings", []), ("seed", "x"), ("learner_code", []), ("user_code", 7),
        ]),
    ],
    "recipe.toml": [
        b"seed = " + b"9" * 5000, b"seed = " + b"[" * 3000 + b"]" * 3000, b"seed = 0x" + b"f" * 9000, b"\xff",
        b"seed = " + b"[" * 100 + b"]" * 100,
    ],
    "outputs.safetensors": [b"\x00", b""],
}  # fmt: skip


@pytest.mark.parametrize(
    ("file", "data"),
    [(file, data) for file, kinds in TAMPERED.items() for data in kinds],
    ids=lambda each: f"{each}"[:40],
)
def test_a_run_folder_with_values_that_were_not_written_by_a_run(ran, capsys, file, data):
    """Whatever is in it now: commands that read it name the file, or resume as if it were as before."""
    path, before = ran / file, content(ran)
    if isinstance(data, dict) and file == "metrics.jsonl":
        data = path.read_bytes() + (json.dumps({**ROW, **data}) + "\n").encode()
    elif isinstance(data, dict):
        data = json.dumps({**json.loads(path.read_text()), **data}).encode()
    path.write_bytes(data)
    for command in (["report", "out"], ["compare", "out", "out"]):
        said = complaint(capsys, command, 6, [])
        assert path.name in said or "topology" in said
    path.write_bytes(data)
    if file in ("run.json", "recipe.toml") and b"topology" not in data:
        complaint(capsys, RESUME, 6, [])
    assert {**content(ran), file: before[file]} == before


@pytest.mark.parametrize("file", ["metrics.jsonl", "times.jsonl", "run.json", "recipe.toml", "outputs.safetensors"])
def test_a_folder_in_the_place_of_a_file_of_a_run(ran, capsys, file):
    (ran / file).unlink()
    (ran / file).mkdir()
    complaint(capsys, ["report", "out"], 6, [file])


def outlines():
    """Contents of a checkpoint whose digest is right and that are none, by what is wrong with them."""
    good = {"round": 2, "sizes": {"metrics.jsonl": 0}, "nodes": {"clinic": pack({}), "lab": pack({}), "hub": pack({})}}
    return {
        "a number": 5,
        "a list": [],
        "nothing": {},
        "no nodes": {key: good[key] for key in ("round", "sizes")},
        "nodes of another kind": {**good, "nodes": []},
        "states that are no bytes": {**good, "nodes": {"clinic": 1, "lab": 2, "hub": 3}},
        "states without an outline": {**good, "nodes": dict.fromkeys(good["nodes"], b"x")},
        "other nodes": {**good, "nodes": {"clinic": pack({})}},
        "a round that is none": {**good, "round": "2"},
        "a negative size": {**good, "sizes": {"metrics.jsonl": -1}},
        "the size of another file": {**good, "sizes": {"../recipe.toml": 0}},
        "states in another folder": {**good, "states": {"lab": ["../../recipe.toml", 3]}},
        "states that are no files": {**good, "states": {"lab": 3}},
    }


@pytest.mark.parametrize("wrong", list(outlines()))
def test_the_newest_checkpoint_with_a_right_digest_and_a_wrong_outline(whole, ran, capsys, wrong):
    """The one before is used, and the user gets to know; no other file is touched."""
    body = pack(outlines()[wrong])
    checkpoints(ran)[-1].write_bytes(hashlib.sha256(body).digest() + body)
    recipe_before = (ran.parent / "recipe.toml").read_bytes()
    assert main(["export", "out", "clinic", "--out", "model.codistill"]) in (0, 6)
    capsys.readouterr()
    assert main(RESUME) == 0
    said = capsys.readouterr().err
    assert "round-000002.state cannot be used: " in said
    assert "Going on from round-000001.state" in said
    assert (ran / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    assert (ran.parent / "recipe.toml").read_bytes() == recipe_before


def test_checkpoints_of_other_agents_only(ran, capsys):
    """That is no damage: the run is not thrown back to an earlier round, and nothing is lost."""
    for path in checkpoints(ran):
        content_before = unpack(path.read_bytes()[32:])
        body = pack({**content_before, "nodes": {"clinic": content_before["nodes"]["clinic"]}})
        path.write_bytes(hashlib.sha256(body).digest() + body)
    before = (ran / "metrics.jsonl").read_bytes()
    complaint(capsys, RESUME, 6, ["agents and models that it began with", "a run of clinic"])
    assert (ran / "metrics.jsonl").read_bytes() == before


def test_a_run_folder_of_another_seed(ran, capsys):
    text = (ran / "recipe.toml").read_text()
    (ran / "recipe.toml").write_text(text.replace("seed = 1", "seed = 2"))
    complaint(capsys, RESUME, 6, ["Data and agents must be as they were", "seed", "start a new run"])


# --- through Python ---------------------------------------------------------------------------------------

X, Y = load_wine(return_X_y=True)
ORDER = np.random.default_rng(0).permutation(len(X))
X, Y = ((X - X.mean(axis=0)) / X.std(axis=0))[ORDER].astype(np.float32), Y[ORDER]
PUBLIC, TEST = X[80:110], (X[110:], Y[110:])
QUIET = {"runtime": "simulation", "progress": False}
BAD = X[:40].copy()
BAD[3, 2] = np.inf


def net(inputs=13, outputs=3):
    return nn.Sequential(nn.Linear(inputs, 4), nn.ReLU(), nn.Linear(4, outputs))


def pair():
    return [cd.Agent("clinic", RandomForestClassifier(2), X[:40], Y[:40]), cd.Agent("lab", net(), X[40:80], Y[40:80])]


def federation(members=None, protocol=None, **options):
    return cd.Federation(members or pair(), protocol or cd.FedMD(), **{"public": PUBLIC, "test": TEST, **options})


def one(x=X[:40], y=Y[:40], model=None, test=None, **options):
    return federation([cd.Agent("a", model or net(), x, y, test=test)], **options)


def untested(y, model=None, **options):
    """An agent without any test data."""
    return federation([cd.Agent("a", net() if model is None else model, X[: len(y)], y)], test=None, **options)


class Odd:
    """A model of one's own whose answers have the wrong shape."""

    def fit(self, x, targets):
        pass

    def predict(self, x):
        return np.zeros(len(x))


class Branching(nn.Module):
    """A module whose code looks at the data, which no graph can express."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(13, 3)

    def forward(self, x):
        return self.layer(x) if x.sum() == 0 else -self.layer(x)


class Rude(cd.Protocol):
    """Waits for a message that nobody sends."""

    name = "rude"

    async def round(self, me, t):
        await me.receive("hub")

    async def hub(self, me, t):
        await me.gather()


# name: (what the user does, the error, words of the sentence)
CALLS = {
    # data
    "infinity": (lambda: one(BAD), DataError, ["agent 'a'", "finite", "inf in row 3"]),
    "too large for 32 bits": (lambda: one(np.where(np.isinf(BAD), 1e300, BAD.astype(float))), DataError, ["1e+300"]),
    "one flat row": (lambda: one(X[0], Y[:1]), DataError, ["with samples along the first axis", "(13,)"]),
    "fewer labels": (lambda: one(y=Y[:39]), DataError, ["40 samples and 39 labels"]),
    "ragged samples": (lambda: one([[1.0], [1.0, 2.0]], [0, 1]), DataError, ["as one array", "equally long"]),
    "ragged labels": (lambda: one(X[:2], [[0], [0, 1]]), DataError, ["The labels y of agent 'a'", "as one array"]),
    "no labels": (lambda: one(X[:2], None), DataError, ["agent 'a' must have one label y each", "None"]),
    "a label is missing": (lambda: one(X[:2], ["a", None]), DataError, ["must have a label", "None in row 1"]),
    "words as samples": (lambda: one([["a"] * 13] * 2, [0, 1]), DataError, ["must be numbers"]),
    "two spellings": (lambda: federation([
        cd.Agent("a", net(), X[:2], ["benign", "ill"]), cd.Agent("b", net(), X[:2], ["ill", "BENIGN "])], test=None),
        DataError, ["'BENIGN ' and 'benign'", "Use one spelling"]),
    "labels in a column": (lambda: one(X[:2], [["a"], ["b"]]), DataError, ["must be one-dimensional", "y.ravel()"]),
    "negative label": (lambda: one(y=Y[:40] - 1), DataError, ["must not be negative", "-1 in row"]),
    "label out of range": (lambda: federation(classes=2), DataError, ["from 0 to 1", "2 in row"]),
    "fractions as labels": (lambda: one(y=Y[:40] + 0.5), DataError,
        ["must be classes", "2.5 in row 0", 'task="regression"']),
    "identifiers as labels": (lambda: one(y=Y[:40] + 30_000), DataError,
        ["a label 30002 among 108 labels", "classes=[...]"]),
    "empty shard": (lambda: one(X[:0], Y[:0]), DataError, ["at least one sample", "(0, 13)"]),
    "shards of two shapes": (
        lambda: federation([pair()[0], cd.Agent("b", net(5), X[:9, :5], Y[:9])]), DataError,
        ["shape of those of agent 'clinic', (13,)", "agent 'b' has (5,)"]),
    "public of another shape": (lambda: federation(public=X[:9, :5]), DataError, ["the public data has (5,)"]),
    "public with infinity": (lambda: federation(public=BAD), DataError, ["the public data", "inf in row 3"]),
    "public as a count": (lambda: federation(public=400), DataError, ["must be samples", "400"]),
    "public empty": (lambda: federation(public=X[:0]), DataError, ["the public data", "(0, 13)"]),
    "test of another shape": (lambda: federation(test=(X[:9, :5], Y[:9])), DataError, ["the test set has (5,)"]),
    "test without labels": (lambda: federation(test=X[:9]), DataError, ["a pair of samples and labels", "test=(x, y)"]),
    "test of three": (lambda: federation(test=(X, Y, Y)), DataError, ["a pair of samples and labels", "tuple of 3"]),
    "own test without labels": (lambda: one(test=X[:9]), DataError, ["test data of agent 'a' must be a pair"]),
    "own test of another shape": (lambda: one(test=(X[:9, :5], Y[:9])), DataError, ["test data of agent 'a' has (5,)"]),
    "real values of other columns": (lambda: one(y=np.zeros((40, 2)), test=None), DataError,
        ["one column for each of 3"]),
    # models
    "one class, a model that cannot be fitted at all": (
        lambda: one(X[Y == 0], Y[Y == 0], LogisticRegression(solver="newton-cholesky", penalty="l1")), LearnerError,
        ["LogisticRegression of agent 'a' must be able to learn", "newton-cholesky", "Change its options"]),
    "a class for a model": (lambda: cd.Agent("a", RandomForestClassifier, X, Y), LearnerError,
        ["the class RandomForestClassifier itself", "Pass an instance"]),
    "a string for a model": (lambda: cd.Agent("a", "forest", X, Y), LearnerError, ["must be a torch module", "str"]),
    "a clustering for a model": (lambda: cd.Agent("a", KMeans(), X, Y), LearnerError, ["a classifier or a regressor"]),
    "too many outputs": (lambda: one(model=net(outputs=4)), LearnerError, ["agent 'a' must give 3 outputs", "(2, 4)"]),
    "too many inputs": (lambda: one(model=net(inputs=5)), LearnerError,
        ["agent 'a' must accept samples of shape (13,)"]),
    "one model for two": (lambda: federation([cd.Agent(n, m, X[:9], Y[:9]) for m in [net()] for n in "ab"]),
        LearnerError,
        ["agents 'a' and 'b' share one"]),
    "a model that cannot learn soft labels": (
        lambda: one(model=KNeighborsClassifier()), LearnerError,
        ["agent 'a' has KNeighborsClassifier", "lacks 'predict'", "KNeighborsRegressor", "alone"]),
    "weights of a forest": (lambda: federation(protocol=cd.FedAvg()), LearnerError,
        ["'clinic' has RandomForestClassifier", "lacks 'gradients + weights'", "avgkd"]),
    "a module that cannot travel": (lambda: one(model=Branching(), protocol=cd.AvgKD()), LearnerError,
        ["The module of agent 'a' must be of a registered architecture, or such that ONNX can express it.",
         "branch on the data", "register_architecture"]),
    "an object that cannot travel": (lambda: one(model=Odd(), protocol=cd.AvgKD()), LearnerError,
        ["agent 'a' has Odd", "lacks 'portable'", "to_onnx()", "codistill[onnx]"]),
    "answers of a wrong shape": (lambda: one(model=Odd()).run(1, **QUIET), LearnerError,
        ["predict of Odd must return", "Found: shape (68,), dtype float64. Return"]),
    "real values for labels": (lambda: one(y=X[:40, 0]), DataError,
        ["agent 'a' must be classes", "For a regression", 'task="regression"']),
    "large real values for labels": (lambda: one(y=X[:40, 0] * 1e6), DataError,
        ["agent 'a' must be classes", "For a regression"]),
    "values of a regression for labels": (lambda: untested(np.arange(178), Ridge()), DataError,
        ["178 different integers, 0 to 177", "agent 'a' (Ridge) predicts real values", "For a regression"]),
    "a classifier for real values": (lambda: untested(X[:40, :1], RandomForestClassifier()), LearnerError,
        ["agent 'a' must be one for real values", "RandomForestClassifier", "Use RandomForestRegressor"]),
    "a module with cross-entropy for real values": (lambda: untested(X[:40, 0], task="regression"),
        LearnerError, ["agent 'a' must be one for real values", 'loss = "squared"']),
    "another task": (lambda: one(task="clustering"), RecipeError, ["classification or regression", "'clustering'"]),
    "words for a regression": (lambda: untested(["a", "b"], task="regression"), DataError,
        ["must be numeric for a regression", "'a'"]),
    "a score of another task": (lambda: federation(scores=["rmse"]), RecipeError,
        ["suit the task, which is classification", "'rmse'"]),
    "a score that is not known": (lambda: federation(scores=["acuracy"]), RecipeError, ["Did you mean 'accuracy'?"]),
    "a score of two classes for three": (lambda: federation(scores=["f1"]), RecipeError,
        ["defined for 3 classes", "'f1' is not", "f1_macro"]),
    "a score that cannot be computed": (lambda: federation(scores=[lambda y, answers: y + "a"]), RecipeError,
        ["name"]),
    "a label that is no class": (lambda: federation(classes=["a", "b"]), DataError, ["among the classes 'a', 'b'"]),
    # protocols and settings
    "a class for a protocol": (lambda: federation(protocol=cd.FedMD), RecipeError,
        ["an instance", "codistill.FedMD()"]),
    "a string for a protocol": (lambda: federation(protocol="fedmd"), RecipeError, ["an instance", "'fedmd'"]),
    "a hyper-parameter out of bounds": (lambda: cd.FedMD(temperature=0.0), RecipeError,
        ["temperature must be above 0"]),
    "no public data": (lambda: federation(public=None), RecipeError,
        ["fedmd needs unlabelled public data", "public="]),
    "no agents": (lambda: cd.Federation([], cd.FedMD()), RecipeError, ["at least one agent"]),
    "an agent for a list": (lambda: cd.Federation(pair()[0], cd.FedMD()), RecipeError, ["as a list", "'clinic' alone"]),
    "a number for agents": (lambda: cd.Federation(3, cd.FedMD()), RecipeError, ["as a list", "3"]),
    "a model for an agent": (lambda: cd.Federation([net()], cd.FedMD()), RecipeError,
        ["must be an Agent", "Found: Sequential( (0): Linear(in_features=13", " .... Write codistill.Agent"]),
    "duplicate names": (lambda: federation([pair()[0], pair()[0]]), RecipeError, ["'clinic' more than once"]),
    "a name that is none": (lambda: cd.Agent("a/b", net(), X, Y), RecipeError, ["An agent's name must be", "'a/b'"]),
    "a number for a name": (lambda: cd.Agent(3, net(), X, Y), RecipeError, ["An agent's name must be", "3"]),
    "no classes": (lambda: federation(classes=0), RecipeError, ["classes must be an integer of at least 1"]),
    "negative seed": (lambda: federation(seed=-1), RecipeError, ["seed must be an integer of at least 0"]),
    "nobody takes part": (lambda: federation(participation=0), RecipeError, ["participation must be above 0"]),
    "fault of a stranger": (lambda: federation(faults=[cd.Fault(agent="clinik")]), RecipeError,
        ["Did you mean 'clinic'?"]),
    "one fault for a list": (lambda: federation(faults=cd.Fault()), RecipeError, ["Faults must be a list"]),
    "links to a stranger": (lambda: cd.Topology(["a"], [("a", "b")]), RecipeError, ["must join two agents", "'b'"]),
    "no rounds": (lambda: federation().run(0), RecipeError, ["rounds must be at least 1"]),
    "rounds as a string": (lambda: federation().run("3"), RecipeError, ["rounds must be an integer"]),
    "unknown runtime": (lambda: federation().run(1, runtime="cloud"), RecipeError, ["one of processes, simulation"]),
    "no workers": (lambda: federation().run(1, workers=0), RecipeError, ["workers must be at least 1"]),
    "resume from nowhere": (lambda: federation().run(1, resume=True), RecipeError, ["needs its folder"]),
    # at work
    "deadlock": (lambda: federation(protocol=Rude()).run(1, **QUIET), RuntimeFault,
        ["Deadlock: every node is waiting", "'hub' waits"]),
    "folder is a file": (lambda: federation().run(1, folder=__file__, **QUIET), StorageError,
        ["a file where a folder"]),
}  # fmt: skip


@pytest.mark.parametrize("name", list(CALLS))
def test_in_python_too(name):
    call, kind, words = CALLS[name]
    torch.manual_seed(0)
    with pytest.raises(CodistillError) as caught:
        call()
    error = caught.value
    assert type(error) is kind
    assert all(word in str(error) for word in words), str(error)
    assert error.must.endswith((".", "...")), "a sentence"
    assert error.found
    assert error.do


def test_a_report_in_the_place_of_a_folder(tmp_path):
    (tmp_path / "report").mkdir()
    result = one(protocol=cd.Alone()).run(1, **QUIET)
    with pytest.raises(StorageError, match="a folder where a file is expected"):
        result.report(tmp_path / "report")
    assert [path.name for path in tmp_path.iterdir()] == ["report"]


def test_every_error_has_an_exit_code_of_its_own():
    kinds = [RecipeError, DataError, LearnerError, CheckpointError, StorageError, RuntimeFault, NetworkError]
    codes = [kind.exit_code for kind in kinds]
    assert codes == sorted(set(codes))
    assert not {0, 1, 130} & set(codes)
