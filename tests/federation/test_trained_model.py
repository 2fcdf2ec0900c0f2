"""A trained agent's model in a file: the same answers after it is loaded, and nothing else is opened."""

import copy
import hashlib
import io
import re
import subprocess
import sys
import zipfile

import numpy as np
import pandas as pd
import pytest
import skops.io
import torch
from lightgbm import LGBMClassifier
from sklearn.datasets import load_iris
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.naive_bayes import GaussianNB
from sklearn.neighbors import KNeighborsClassifier, KNeighborsRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler
from sklearn.svm import SVC

import codistill as cd
from codistill.core.errors import CheckpointError, DataError, LearnerError, RecipeError
from codistill.federation.result import TrainedAgent
from codistill.learners.zoo import build
from codistill.wire.state import pack, unpack

X, Y = load_iris(return_X_y=True)
X, Y = X[::3], Y[::3]


class Net(torch.nn.Sequential):
    """A module of no registered architecture."""

    def __init__(self):
        super().__init__(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))


class Means:
    """An object with fit and predict, which answers with the mean target."""

    def fit(self, x, targets):
        self.mean = np.asarray(targets).mean(axis=0)

    def predict(self, x):
        return np.tile(self.mean, (len(x), 1))


class Halved(cd.Protocol):
    """A protocol with a predict of its own, which reads its state."""

    name = "halved"
    topology = "silent"

    async def round(self, me, t):
        me.learner.fit(me.shard.x, me.shard.targets)
        me.state["factor"], me.state["secret"] = 0.5, me.shard.targets

    def predict(self, me, x):
        return me.state["factor"] * me.learner.predict(x)


def run(protocol, *models, x=X, y=Y, rounds=1, **more):
    """A short run of agents a, b, ...; returns its result."""
    agents = [cd.Agent("abc"[i], model, x[i::2], y[i::2]) for i, model in enumerate(models)]
    federation = cd.Federation(agents, protocol, seed=0, **more)
    return federation.run(rounds=rounds, runtime="simulation", alone=False, progress=False)


@pytest.mark.parametrize(
    "model",
    [
        RandomForestClassifier(3),
        HistGradientBoostingClassifier(max_iter=2),
        make_pipeline(StandardScaler(), LogisticRegression()),
        KNeighborsClassifier(algorithm="kd_tree"),
        KNeighborsRegressor(algorithm="ball_tree"),
        cd.KernelRidge("rbf", gamma=0.5),
        build("mlp", (4,), 3),
    ],
    ids=lambda model: type(model).__name__,
)
def test_a_model_answers_to_the_bit_as_before(model, tmp_path):
    trained = run(cd.Alone(refit=True), model).agents["a"]
    loaded = cd.load(trained.save(tmp_path / "new" / "a.codistill"))
    assert np.array_equal(loaded.decision_function(X), trained.decision_function(X))
    assert np.array_equal(loaded.predict(X), trained.predict(X))
    assert loaded.name == "a"
    assert loaded.learner.describe() == trained.learner.describe()
    assert trained.learner.describe() in repr(loaded)


@pytest.mark.parametrize("protocol", [cd.EKD(), cd.Backfitting(), cd.EKD(half=False)], ids=["ekd", "sums", "whole"])
def test_an_ensemble_is_saved_whole(protocol, tmp_path):
    trained = run(protocol, Ridge(), Ridge(2.0), rounds=2).agents["b"]
    loaded = cd.load(trained.save(tmp_path / "model"))
    assert np.array_equal(loaded.decision_function(X), trained.decision_function(X))
    assert not np.allclose(loaded.decision_function(X), trained.learner.predict(X))
    # Labels in the protocol's state, which predict does not read, are not in the file.
    assert cd.read_state(tmp_path / "model")["state"].keys() == set(protocol.predicts_with)


def test_a_loaded_model_can_be_saved_again(tmp_path):
    trained = run(cd.Alone(refit=True), RandomForestClassifier(3)).agents["a"]
    once = cd.load(trained.save(tmp_path / "one"))
    again = cd.load(once.save(tmp_path / "two"))
    assert np.array_equal(again.predict_proba(X), trained.predict_proba(X))


def test_an_agent_without_a_model_cannot_be_saved(tmp_path):
    result = run(cd.Alone(refit=True), Ridge(), Ridge(), faults=[cd.Fault(kind="gone", agent="b")])
    with pytest.raises(LearnerError, match="not been trained"):
        result.agents["b"].save(tmp_path / "model")


def test_real_values_stay_real_values(tmp_path):
    y = X[:, :1]
    trained = run(cd.Alone(refit=True), Ridge(), y=y).agents["a"]
    loaded = cd.load(trained.save(tmp_path / "model"))
    assert np.array_equal(loaded.predict(X), trained.predict(X))
    assert not loaded.is_classifier
    with pytest.raises(DataError, match="predicts real values"):
        loaded.predict_proba(X)


def test_columns_of_a_data_frame_are_known_by_name(tmp_path):
    frame = pd.DataFrame(X, columns=["a", "b", "c", "d"])
    agents = [cd.Agent("a", RandomForestClassifier(3), frame, Y)]
    trained = cd.Federation(agents, cd.Alone(refit=True), test=(X, Y)).run(
        1, runtime="simulation", progress=False, alone=False
    )
    loaded = cd.load(trained.agents["a"].save(tmp_path / "model"))
    mixed = frame[["d", "a", "c", "b"]].assign(more=1.0)
    assert np.array_equal(loaded.predict_proba(mixed), loaded.predict_proba(X))
    with pytest.raises(DataError, match="must have the column 'b'"):
        loaded.predict(frame.drop(columns="b"))
    with pytest.raises(DataError, match=r"shape \(4,\)"):
        loaded.predict(X[:, :3])


@pytest.mark.parametrize("safeguard", [False, True])
@pytest.mark.parametrize(
    "model",
    [RandomForestClassifier(3), LogisticRegression(max_iter=500), SVC(), LGBMClassifier(n_estimators=2), Ridge(),
     cd.KernelRidge(), torch.nn.Linear(4, 3)],
    ids=lambda model: type(model).__name__,
)  # fmt: skip
def test_no_rows_are_answered_by_no_rows(model, safeguard, tmp_path):
    """Of the shape and the type that the answers of other samples have."""
    trained = run(cd.Alone(refit=True), copy.deepcopy(model), safeguard=safeguard).agents["a"]
    for each in (trained, cd.load(trained.save(tmp_path / "model"))):
        for answer in (each.predict, each.answers, each.decision_function):
            found, like = answer(X[:0]), answer(X[:2])
            assert found.shape == (0, *like.shape[1:])
            assert found.dtype == like.dtype
    assert trained.learner.predict(X[:0]).shape == (0, 3)
    if trained.learner.probabilistic:
        assert trained.predict_proba(X[:0]).shape == (0, 3)


def test_no_rows_in_other_places(tmp_path):
    ensemble = run(cd.EKD(), LogisticRegression(max_iter=500), Ridge()).agents["a"]
    assert ensemble.decision_function(X[:0]).shape == (0, 3)
    words = run(cd.Alone(refit=True), GaussianNB(), y=np.array(["u", "v", "w"])[Y]).agents["a"]
    assert (words.predict(X[:0]).shape, words.predict(X[:0]).dtype) == ((0,), words.predict(X[:1]).dtype)
    values = run(cd.Alone(refit=True), Ridge(), y=X[:, :1]).agents["a"]
    assert values.predict(X[:0]).shape == (0,)
    one = run(cd.Alone(refit=True), LogisticRegression(), y=np.zeros(len(Y), int), classes=3).agents["a"]
    assert one.predict_proba(X[:0]).shape == (0, 3)  # of a constant
    with pytest.raises(DataError, match=r"shape \(4,\)"):
        values.predict(X[:0, :3])
    frame = pd.DataFrame(X, columns=list("abcd"))
    made = cd.Federation([cd.Agent("a", GaussianNB(), frame, Y)], cd.Alone(refit=True))
    trained = made.run(1, runtime="simulation", progress=False, alone=False).agents["a"]
    for each in (trained, cd.load(trained.save(tmp_path / "model"))):
        assert each.predict_proba(frame[:0]).shape == (0, 3)
        assert each.predict_proba(pd.DataFrame(columns=list("dcba"))).shape == (0, 3)  # of type object


def test_a_module_of_ones_own_opens_as_onnx_or_into_a_new_one(tmp_path):
    trained = run(cd.Alone(refit=True), Net()).agents["a"]
    path = trained.save(tmp_path / "net")
    assert np.allclose(cd.load(path).predict_proba(X), trained.predict_proba(X), atol=1e-5)
    assert np.array_equal(cd.load(path, model=Net()).predict_proba(X), trained.predict_proba(X))
    with pytest.raises(LearnerError, match="Sequential in place of .*Net"):
        cd.load(path, model=torch.nn.Sequential(torch.nn.Linear(4, 3)))


def test_a_named_head_is_saved_with_its_model(tmp_path):
    for make in (Net, lambda: build("mlp", (4,), 3)):
        head = next(name for name, part in make().named_modules() if isinstance(part, torch.nn.Linear))
        trained = run(cd.Alone(refit=True), cd.TorchLearner(make(), head=head)).agents["a"]
        loaded = cd.load(trained.save(tmp_path / "net"), model=make())
        assert loaded.learner.head_name == head
        assert cd.load(trained.save(tmp_path / "net"), model=cd.TorchLearner(make())).learner.head_name == head


def test_an_object_of_ones_own_needs_a_new_one_to_be_loaded_into(tmp_path):
    trained = run(cd.Alone(refit=True), Means()).agents["a"]
    path = trained.save(tmp_path / "means")
    with pytest.raises(LearnerError, match=r"test_trained_model.Means can only.*codistill.load\(path, model=...\)"):
        cd.load(path)
    assert np.array_equal(cd.load(path, model=Means()).predict_proba(X), trained.predict_proba(X))


def test_a_protocol_of_ones_own_with_a_predict_is_passed_to_load(tmp_path):
    trained = run(Halved(), Ridge()).agents["a"]
    path = trained.save(tmp_path / "model")
    with pytest.raises(RecipeError, match=r"test_trained_model.Halved"):
        cd.load(path)
    loaded = cd.load(path, protocol=Halved())
    assert np.array_equal(loaded.decision_function(X), trained.decision_function(X))


# --- files that are not saved models --------------------------------------------------------------


def rewritten(path, change):
    """The file with its content changed by a function, and with the digest that fits."""
    content = unpack(path.read_bytes()[32:])
    change(content)
    body = pack(content)
    path.write_bytes(hashlib.sha256(body).digest() + body)
    return path


@pytest.fixture
def saved(tmp_path):
    return run(cd.Alone(refit=True), RandomForestClassifier(3)).agents["a"].save(tmp_path / "a.codistill")


def test_a_file_that_is_none_is_refused_by_name(saved, tmp_path):
    (tmp_path / "text").write_text("not a model")
    (tmp_path / "empty").touch()
    cut = tmp_path / "cut"
    cut.write_bytes(saved.read_bytes()[:-10])
    for path in (tmp_path / "text", tmp_path / "empty", cut):
        with pytest.raises(CheckpointError, match=f"{path.name} must be a saved model.*digest"):
            cd.load(path)
    with pytest.raises(CheckpointError, match="nowhere must be a saved model.*No such file"):
        cd.load(tmp_path / "nowhere")
    body = b"\xff" * 50
    (tmp_path / "noise").write_bytes(hashlib.sha256(body).digest() + body)
    with pytest.raises(CheckpointError, match="noise must be a saved model"):
        cd.load(tmp_path / "noise")


def tree_outside(content):
    """A forest whose first tree splits on a feature that is not there."""
    forest = skops.io.loads(content["learner"]["state"]["estimator"], trusted=["sklearn.tree._tree.Tree"])
    forest.estimators_[0].tree_.feature[0] = 10**6
    content["learner"]["state"]["estimator"] = skops.io.dumps(forest)


def hostile_function(content):
    """A pipeline that would call a function of numpy on the samples."""
    pipeline = make_pipeline(FunctionTransformer(np.savez), LogisticRegression())
    content["learner"]["state"]["estimator"] = skops.io.dumps(pipeline)


CHANGES = {
    "no learner": (lambda content: content.pop("learner"), "KeyError"),
    "a format of another version": (lambda content: content.update(format="codistill model 9"), "model 9"),
    "a huge sample": (lambda content: content.update(shape=[1 << 50]), "samples of shape"),
    "no classes": (lambda content: content.update(classes=0), "0 classes"),
    "a name that is none": (lambda content: content.update(agent="../../x"), "name must be"),
    "an unknown protocol setting": (lambda c: c["protocol"]["settings"].update(rm=1), "'rm'"),
    "bytes that are no archive": (lambda c: c["learner"]["state"].update(estimator=b"PK"), "corrupted"),
    "a tree that points outside": (tree_outside, "features that do not exist"),
    "a function to call": (hostile_function, "savez"),
    "an unknown kind": (lambda c: c["learner"].update(kind="pickle"), "can only be loaded"),
    "a model for other samples": (lambda c: c.update(shape=[7]), "features"),
}


@pytest.mark.parametrize(("change", "found"), CHANGES.values(), ids=CHANGES)
def test_a_changed_file_is_refused(saved, change, found):
    with pytest.raises(cd.CodistillError, match=found):
        cd.load(rewritten(saved, change))


def test_an_untrusted_function_is_refused_with_model_too(saved):
    path = rewritten(saved, hostile_function)
    path = rewritten(path, lambda c: c["learner"].update({"class": "sklearn.pipeline.Pipeline"}))
    with pytest.raises(CheckpointError, match="a function numpy.*savez"):
        cd.load(path, model=make_pipeline(FunctionTransformer(), LogisticRegression()))


def test_the_loaded_model_is_a_trained_agent(saved):
    assert isinstance(cd.load(saved), TrainedAgent)


def tree_without_dimension(content):
    """A forest whose first tree has nodes of no dimension: a compiled constructor would copy what it does not have."""
    with zipfile.ZipFile(io.BytesIO(content["learner"]["state"]["estimator"])) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    file = re.search(r'"nodes": \{[^{}]*"file": "([^"]*)"', files["schema.json"].decode())[1]
    one, out = io.BytesIO(), io.BytesIO()
    np.save(one, np.load(io.BytesIO(files[file]))[0])
    with zipfile.ZipFile(out, "w") as archive:
        for name, data in {**files, file: one.getvalue()}.items():
            archive.writestr(name, data)
    content["learner"]["state"]["estimator"] = out.getvalue()


def test_an_evil_tree_does_not_kill_predict(saved, tmp_path):
    """In a process of its own, which ended by a signal when skops built the tree before anything was checked."""
    path = rewritten(saved, tree_without_dimension)
    pd.DataFrame(X, columns=list("abcd")).to_csv(tmp_path / "table.csv", index=False)
    command = [sys.executable, "-m", "codistill", "predict", str(path), str(tmp_path / "table.csv")]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == CheckpointError.exit_code, (ended.returncode, ended.stderr)
    assert "corrupted" in ended.stderr
    assert "a tree of the wrong size" in ended.stderr
