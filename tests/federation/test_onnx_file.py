"""Models as ONNX files: the same answers, up to rounding, from samples as they were before they were scaled."""

from dataclasses import replace

import numpy as np
import pytest
from sklearn.datasets import load_iris
from sklearn.decomposition import PCA
from sklearn.ensemble import (
    ExtraTreesClassifier,
    GradientBoostingClassifier,
    HistGradientBoostingClassifier,
    RandomForestRegressor,
)
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.naive_bayes import GaussianNB
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler, RobustScaler, StandardScaler

import codistill as cd
from codistill.core.errors import CheckpointError, LearnerError
from codistill.data.labels import LabelEncoding
from codistill.data.split import Scaling
from codistill.federation.trained_model import Samples, TrainedModel
from codistill.learners.zoo import build

X, Y = load_iris(return_X_y=True)
X = X.astype(np.float32)
BINARY = Y < 2
SCALING = Scaling(X.mean(axis=0, keepdims=True, dtype=float), X.std(axis=0, keepdims=True, dtype=float))


def trained(model, x, y, classes=3):
    federation = cd.Federation([cd.Agent("a", model, x, y)], cd.Alone(refit=True), classes=classes)
    return federation.run(1, runtime="simulation", alone=False, progress=False).agents["a"]


MODELS = {
    "extra trees": lambda: ExtraTreesClassifier(3, random_state=0),
    "forest of values": lambda: RandomForestRegressor(3, random_state=0),
    "boosting": lambda: GradientBoostingClassifier(n_estimators=2),
    "histogram boosting": lambda: HistGradientBoostingClassifier(max_iter=2),
    "logistic": lambda: LogisticRegression(max_iter=500),
    "ridge": Ridge,
    "perceptron": lambda: MLPClassifier((4,), max_iter=400, tol=1e-2),
    "perceptron of values": lambda: MLPRegressor(hidden_layer_sizes=(4, 3), activation="tanh", max_iter=400, tol=1e-2),
    "scaled trees": lambda: make_pipeline(MinMaxScaler(), ExtraTreesClassifier(3, random_state=0)),
    "scaled twice": lambda: make_pipeline(StandardScaler(), RobustScaler(), LogisticRegression()),
    "module": lambda: build("mlp", (4,), 3),
}


@pytest.mark.parametrize("scaling", [None, SCALING], ids=["as it is", "scaled"])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_a_graph_answers_as_the_model(make, scaling, tmp_path):
    agent = trained(make(), X if scaling is None else scaling.apply(X, "x"), Y)
    named = replace(agent._description, encoding=LabelEncoding("classification", 3, ("a", "b", "c")))
    model = TrainedModel(agent._agent, named, Samples(scaling=scaling))
    loaded = cd.load(model.save(tmp_path / "a.onnx"))
    assert np.allclose(loaded.decision_function(X), model.decision_function(X), atol=1e-5)
    assert np.array_equal(loaded.predict(X), model.predict(X))
    assert loaded.class_names == ("a", "b", "c")
    assert loaded.learner.describe() == agent.learner.describe()


@pytest.mark.parametrize("model", [LogisticRegression(), HistGradientBoostingClassifier(max_iter=2)], ids=str)
def test_two_of_three_classes_stand_in_their_columns(model, tmp_path):
    agent = trained(model, X[BINARY], 2 * Y[BINARY])
    answers = cd.load(agent.save(tmp_path / "a.onnx")).predict_proba(X)
    assert np.allclose(answers, agent.predict_proba(X), atol=1e-5)
    assert not answers[:, 1].any()


def test_a_model_without_a_graph_says_which_have_one(tmp_path):
    with pytest.raises(LearnerError, match=r"agent 'a'.*forests.*GaussianNB"):
        trained(GaussianNB(), X, Y).save(tmp_path / "a.onnx")
    with pytest.raises(LearnerError, match=r"with scalers before it. Found: PCA in a pipeline, which has no ONNX form"):
        trained(make_pipeline(StandardScaler(), PCA(2), LogisticRegression()), X, Y).save(tmp_path / "a.onnx")
    agents = [cd.Agent(name, Ridge(), X[i::2], Y[i::2]) for i, name in enumerate("ab")]
    result = cd.Federation(agents, cd.EKD()).run(1, runtime="simulation", alone=False, progress=False)
    with pytest.raises(LearnerError, match="answers with what ekd has collected"):
        result.agents["a"].save(tmp_path / "a.onnx")


def test_a_file_that_is_no_graph_is_refused_by_name(tmp_path):
    path = tmp_path / "noise.onnx"
    for content in (b"noise", b"", b"\x08\x08" * 50):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match="noise.onnx must be an ONNX model"):
            cd.load(path)
    with pytest.raises(CheckpointError, match="must be a readable file"):
        cd.load(tmp_path / "nowhere.onnx")
