"""Federations of any labels, tasks and scores, from Python and from tables."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import torch
from sklearn.ensemble import GradientBoostingRegressor
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.naive_bayes import GaussianNB
from sklearn.tree import DecisionTreeClassifier, DecisionTreeRegressor

import codistill as cd
from codistill.core.errors import DataError, LearnerError, NetworkError, RecipeError
from codistill.data.validation import checked_dataset
from codistill.network.terms import description_under, terms_of
from codistill.report.pages import further_section

RNG = np.random.default_rng(0)
X = RNG.normal(size=(60, 3))
CODES = (X[:, 0] > 0).astype(int) + (X[:, 1] > 0.5)
WORDS = np.array(["benign", "odd", "severe"])[CODES]
QUIET = {"runtime": "simulation", "progress": False}


def federation(y, models=None, protocol=None, **options):
    first, second = models or (DecisionTreeClassifier(random_state=0), LogisticRegression())
    agents = [cd.Agent("a", first, X[:20], y[:20]), cd.Agent("b", second, X[20:40], y[20:40])]
    return cd.Federation(agents, protocol or cd.AvgKD(), test=(X[40:], y[40:]), **options)


def test_any_names_of_the_classes_give_the_same_run_and_come_back():
    results = {
        name: federation(y).run(1, **QUIET)
        for name, y in {"codes": CODES, "words": WORDS, "from one": CODES + 1, "floats": CODES.astype(float)}.items()
    }
    assert all(result.rows == results["codes"].rows for result in results.values())
    predicted = {name: result.agents["a"].predict(X[:5]) for name, result in results.items()}
    assert predicted["words"].tolist() == np.array(["benign", "odd", "severe"])[predicted["codes"]].tolist()
    assert predicted["from one"].tolist() == (predicted["codes"] + 1).tolist()
    assert results["words"].agents["b"].classes_.tolist() == ["benign", "odd", "severe"]
    assert results["from one"].summary().class_names == ("1", "2", "3")
    assert "classification, 3 classes" in repr(results["from one"])


def test_columns_of_zeros_and_one_are_classes_to_a_classifier():
    result = federation(np.eye(3)[CODES]).run(1, **QUIET)
    assert result.rows == federation(CODES).run(1, **QUIET).rows
    assert "classification, 3 classes" in repr(result)
    said = federation(np.eye(3)[CODES], (Ridge(), DecisionTreeRegressor()), task="classification").run(1, **QUIET)
    assert "accuracy" in said.rows[-1]
    values = federation(np.eye(3)[CODES], (Ridge(), DecisionTreeRegressor())).run(1, **QUIET)
    assert "rmse" in values.rows[-1]  # a regressor may predict them as they are


MANY = np.stack([CODES > 0, CODES > 1, X[:, 2] > 0], axis=1).astype(int)  # rows of several ones, and of none


@pytest.mark.parametrize(
    "form",
    [
        np.asarray, np.ndarray.tolist, torch.tensor, scipy.sparse.csr_array, scipy.sparse.csr_matrix,
        lambda y: y.astype(bool), lambda y: y.astype(float), lambda y: y * 3 - 1, lambda y: np.where(y, "yes", "no"),
        lambda y: pd.DataFrame(y, columns=list("abc")), lambda y: pd.DataFrame(y).astype(object),
    ],
    ids=["array", "list", "tensor", "sparse array", "sparse matrix", "booleans", "floats", "integers", "words", "frame",
         "frame of objects"],
)  # fmt: skip
def test_several_labels_per_sample_are_refused(form):
    said = "Every sample of agent 'a' must have one label: multi-label classification is not supported"
    modules = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    for two in (None, modules, (Ridge(), GaussianNB())):
        with pytest.raises(DataError, match=said):
            federation(form(MANY), two)
    for options in ({"task": "classification"}, {"classes": 3}, {"classes": ["a", "b", "c"]}):
        with pytest.raises(DataError, match=said):
            federation(form(MANY), **options)


def test_several_labels_per_sample_are_refused_in_every_place():
    agent = cd.Agent("a", LogisticRegression(), X[:20], CODES[:20])
    with pytest.raises(DataError, match="Every sample of the test set must have one label"):
        cd.Federation([agent], cd.Alone(refit=True), test=(X, MANY))
    own = cd.Agent("a", LogisticRegression(), X[:20], CODES[:20], test=(X, MANY))
    with pytest.raises(DataError, match="Every sample of the test data of agent 'a' must have one label"):
        cd.Federation([own], cd.Alone(refit=True))
    with pytest.raises(DataError, match="Every sample of agent 'a' must have one label"):
        federation(MANY, task="regression")  # of classifiers
    pairs = torch.utils.data.TensorDataset(torch.tensor(X, dtype=torch.float32), torch.tensor(MANY))
    with pytest.raises(DataError, match="Every sample of agent 'a' must have one label"):
        cd.Federation([cd.Agent("a", torch.nn.Linear(3, 3), pairs)], cd.Alone())
    with pytest.raises(DataError, match="Every sample of the test set must have one label"):
        cd.serve(cd.FedAvg(), ["a"], classes=3, listen="127.0.0.1:7447", insecure=True, test=(X, MANY))
    terms = terms_of(federation(CODES, None, cd.FedMD(), public=X[:5]).description)
    joined = description_under(terms, cd.Agent("a", LogisticRegression(), X, MANY), None, None)
    with pytest.raises(DataError, match="Every sample of agent 'a' must have one label"):
        joined.bind_nodes()
    with pytest.raises(DataError, match="Every sample of y_train of data set 'own' must have one label"):
        checked_dataset("own", X, MANY, X, MANY, {})


def test_real_values_may_be_whole_numbers_and_soft_labels_may_have_several_columns():
    regressors = DecisionTreeRegressor(random_state=0), Ridge()
    assert "rmse" in federation(MANY, regressors).run(1, **QUIET).rows[-1]
    assert "rmse" in federation(MANY * 5, regressors, task="regression").run(1, **QUIET).rows[-1]
    assert federation(0.8 * np.eye(3)[CODES] + 0.2 / 3).run(1, **QUIET).rows
    with pytest.raises(LearnerError, match=r"give one label per sample, e.g. y.ravel\(\)"):
        federation(CODES.reshape(-1, 1))


def test_negative_labels_are_asked_about_and_can_be_named():
    with pytest.raises(DataError, match=r"agent 'a' must not be negative.*If -1 marks missing.*classes=\[-1, 0, 1\]"):
        federation(CODES - 1)
    named = federation(CODES - 1, classes=[-1, 0, 1]).run(1, **QUIET)
    assert named.rows == federation(CODES).run(1, **QUIET).rows


def test_booleans_come_back_as_booleans():
    result = federation(CODES > 0).run(1, **QUIET)
    assert result.agents["a"].predict(X[:3]).dtype == bool
    assert result.summary().class_names == ("False", "True")


def test_a_regression_with_flat_targets_and_any_regressor():
    y = 100 * X[:, 0] + RNG.normal(size=60)
    models = (GradientBoostingRegressor(n_estimators=5, random_state=0), Ridge())
    result = federation(y, models, task="regression", scores=["rmse", "r2"]).run(1, **QUIET)
    summary = result.summary()
    last, alone = result.rows[-2], result.alone_rows[-2]
    assert summary.lines()[0].gain == alone["rmse"] - last["rmse"]
    assert summary.lines(summary.shown_scores[1])[0].gain == last["r2"] - alone["r2"]
    assert "regression" in summary.scope()
    assert "R2" in repr(result)
    assert "R2, alone" in further_section(summary).table.headings
    assert result.agents["a"].predict(X[:4]).shape == (4,)


def test_many_scores_are_in_the_rows_and_a_missing_one_is_told():
    """Agent b is tested on a single class, of which there is no AUC."""
    one_class = np.flatnonzero(CODES == 0)[:6]
    agents = [
        cd.Agent("a", DecisionTreeClassifier(random_state=0), X[:20], WORDS[:20], test=(X[40:], WORDS[40:])),
        cd.Agent("b", LogisticRegression(), X[20:40], WORDS[20:40], test=(X[one_class], WORDS[one_class])),
    ]
    made = cd.Federation(agents, cd.AvgKD(), scores=["roc_auc", "accuracy", "neg_log_loss"])
    result = made.run(1, **QUIET)
    assert [key for key in result.rows[0] if key.startswith("own_")] == ["own_roc_auc", "own_accuracy", "own_log_loss"]
    assert "own_roc_auc" not in result.rows[1]
    text = " ".join(repr(result).split())
    assert "AUC: no value for b, left out of its means (it needs test samples of at least two classes)" in text
    assert "log loss ↓" in text
    assert result.summary().lines()[1].gain is None


def test_default_rows_are_as_they_always_were():
    row = federation(CODES).run(1, **QUIET).rows[0]
    assert list(row) == [
        "round", "agent", "present", "sent", "received", "steps", "exchanges", "accuracy", "own_accuracy",
        "test_samples",
    ]  # fmt: skip
    more = federation(CODES, scores=["accuracy", "f1_macro"]).run(1, **QUIET).rows[0]
    assert {key: more[key] for key in row} == row
    assert {*more} - {*row} == {"f1_macro", "own_f1_macro"}


def test_a_hub_names_the_classes_and_the_scores():
    made = federation(WORDS, None, cd.FedMD(), public=X[:5], scores=["accuracy", "log_loss"]).description
    terms = terms_of(made)
    assert (terms["task"], terms["scores"]) == ("classification", ["accuracy", "log_loss"])
    joined = cd.Agent("a", DecisionTreeClassifier(), X[:2], ["severe", "benign"])
    description = description_under(terms, joined, made.public, (X[:1], ["odd"])).bind_nodes()
    assert joined.shard.labels.tolist() == [2, 0]
    assert description.test[1].tolist() == [1]
    assert [score.name for score in description.scores] == ["accuracy", "log_loss"]
    with pytest.raises(NetworkError, match="must have the task of the federation"):
        description_under(terms, cd.Agent("a", Ridge(), X[:2], [1.0, 2.0], task="regression"), None, None)


def test_all_agents_have_one_task():
    agents = [
        cd.Agent("a", Ridge(), X[:9], X[:9, 0], task="regression"),
        cd.Agent("b", DecisionTreeRegressor(), X[:9], X[:9, 0]),
    ]
    assert cd.Federation(agents, cd.AvgKD()).description.task == "regression"
    with pytest.raises(RecipeError, match="must have one task"):
        cd.Federation(agents, cd.AvgKD(), task="classification")
