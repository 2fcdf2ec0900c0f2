"""What stands around a model is saved with it: transformers, filled-in values, labels and the safeguard."""

import numpy as np
import pandas as pd
import pytest
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.compose import ColumnTransformer
from sklearn.datasets import load_iris
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler
from sklearn.tree import DecisionTreeClassifier

import codistill as cd
from codistill.core.errors import LearnerError

X, Y = load_iris(return_X_y=True)
FRAME = pd.DataFrame(X[::3], columns=["a", "b", "c", "d"]).mask(np.random.default_rng(0).random((50, 4)) < 0.2)
LABELS = np.array(["setosa", "versicolor", "virginica"])[Y[::3]]


class Doubled(TransformerMixin, BaseEstimator):
    """A transformer of one's own."""

    def fit(self, x, y=None):
        """Note how many features there are."""
        self.n_features_in_ = x.shape[1]
        return self

    def transform(self, x):
        """Twice the features."""
        return np.concatenate([x, x], axis=1)


def trained(prepare=None, model=None, labels=LABELS, **options):
    """The first of two agents after one round of AvgKD."""
    agents = [
        cd.Agent("a", model or LogisticRegression(max_iter=500), FRAME[::2], labels[::2], prepare=prepare),
        cd.Agent("b", DecisionTreeClassifier(random_state=0), FRAME[1::2], labels[1::2]),
    ]
    federation = cd.Federation(agents, cd.AvgKD(), seed=0, **options)
    return federation.run(1, runtime="simulation", alone=False, progress=False).agents["a"]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"safeguard": True},
        {"prepare": StandardScaler(), "safeguard": True},
        {"prepare": ColumnTransformer([("two", StandardScaler(), slice(0, 2))], remainder="passthrough")},
        {"labels": 1 + Y[::3]},
        {"labels": Y[::3] > 0, "safeguard": True},
        {"labels": np.where(np.arange(50) % 2, LABELS, "setosa"), "safeguard": True},  # agent a holds one class
    ],
    ids=["filled in", "safeguard", "scaler", "columns", "labels from 1", "booleans", "one class"],
)
def test_samples_as_they_were_given_are_answered_to_the_bit(options, tmp_path):
    agent = trained(**options)
    loaded = cd.load(agent.save(tmp_path / "a.codistill"))
    mixed = FRAME[["d", "b", "a", "c"]].assign(more=1.0)
    for given in (FRAME, mixed, FRAME.to_numpy()):
        assert np.array_equal(loaded.decision_function(given), agent.decision_function(FRAME))
    assert np.array_equal(loaded.predict(FRAME), agent.predict(FRAME))
    assert loaded.predict(FRAME).dtype == agent.predict(FRAME).dtype
    assert np.array_equal(loaded.classes_, agent.classes_)
    again = cd.load(loaded.save(tmp_path / "again.codistill"))
    assert np.array_equal(again.decision_function(FRAME), agent.decision_function(FRAME))


def test_a_transformer_of_ones_own_is_passed_to_load(tmp_path):
    agent = trained(Doubled())
    path = agent.save(tmp_path / "a.codistill")
    with pytest.raises(LearnerError, match=r"not trusted: .*Doubled.*prepare="):
        cd.load(path)
    with pytest.raises(LearnerError, match="a StandardScaler in place of a Doubled"):
        cd.load(path, prepare=StandardScaler())
    loaded = cd.load(path, prepare=Doubled())
    assert np.array_equal(loaded.decision_function(FRAME), agent.decision_function(FRAME))


def test_onnx_fills_in_missing_values_as_the_agent(tmp_path):
    agent = trained()
    loaded = cd.load(agent.save(tmp_path / "a.onnx"))
    assert np.allclose(loaded.decision_function(FRAME), agent.decision_function(FRAME), atol=1e-5)
    assert np.array_equal(loaded.predict(FRAME), agent.predict(FRAME))


@pytest.mark.parametrize(
    ("options", "found"),
    [({"safeguard": True}, "mixes two models"), ({"prepare": StandardScaler()}, "a transformer of its own")],
    ids=["safeguard", "transformer"],
)
def test_onnx_refuses_what_it_does_not_hold(options, found, tmp_path):
    with pytest.raises(LearnerError, match=found):
        trained(**options).save(tmp_path / "a.onnx")
