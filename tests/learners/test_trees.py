"""XGBoost and LightGBM models travel as plain trees that predict what the library predicts."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import xgboost_models
from lightgbm import LGBMClassifier, LGBMRegressor
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression, LogisticRegressionCV
from sklearn.multioutput import MultiOutputRegressor
from sklearn.naive_bayes import GaussianNB
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import QuantileTransformer, StandardScaler
from sklearn.svm import LinearSVR

import codistill as cd
from codistill.core.errors import LearnerError
from codistill.learners.ability import Ability
from codistill.learners.portable import open_model
from codistill.learners.portable.trees import LEAF, NODE, TreeEnsemble, as_trees
from codistill.learners.sklearn import SklearnLearner
from codistill.wire.message import Message

SMALL = {"n_estimators": 4, "num_leaves": 7, "min_child_samples": 3}


def data(classes: int, *, missing: bool = False, dtype: type = np.float32) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    labels = np.arange(80) % classes
    x = rng.normal(size=(80, 4)).astype(dtype)
    x[:, 0] += labels
    x[:, 1] = np.round(x[:, 1])  # thresholds lie on values, zero among them
    if missing:
        x[rng.random(x.shape) < 0.2] = np.nan
    return x, 0.8 * np.eye(classes)[labels] + 0.2 / classes


def travelled(learner: SklearnLearner, classes: int) -> TreeEnsemble:
    arrived = open_model(Message.decode(learner.export().encoded), (4,), classes)
    assert isinstance(arrived, TreeEnsemble)
    return arrived


# --- LightGBM -------------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", [False, True], ids=["complete", "missing values"])
@pytest.mark.parametrize(
    ("classes", "options"),
    [
        (2, {}),
        (3, {}),
        (2, {"sigmoid": 0.4}),
        (3, {"objective": "multiclassova", "sigmoid": 2.0}),
        (3, {"boosting_type": "rf", "bagging_fraction": 0.5, "bagging_freq": 1}),
        (3, {"boosting_type": "dart"}),
        (3, {"use_missing": False}),
    ],
    ids=str,
)
def test_lightgbm_predicts_the_same_elsewhere(classes, options, missing):
    x, targets = data(classes, missing=missing)
    learner = SklearnLearner(LGBMClassifier(**SMALL, **options))
    learner.check_travel(x, "Ann")
    learner.fit(x, targets)
    unseen = np.concatenate([x + 0.1, np.full((1, 4), np.nan, np.float32), np.zeros((1, 4), np.float32)])
    for rows in (x, unseen, unseen.astype(np.float64)):
        np.testing.assert_allclose(travelled(learner, classes).predict(rows), learner.predict(rows), atol=1e-6)


def test_lightgbm_regression_of_one_and_of_many_columns():
    x, targets = data(3)
    one = SklearnLearner(LGBMRegressor(**SMALL))
    one.check_travel(x, "Ann")
    one.fit(x, x[:, :1])
    np.testing.assert_allclose(travelled(one, 1).predict(x), one.predict(x), atol=1e-6)
    many = SklearnLearner(MultiOutputRegressor(LGBMRegressor(**SMALL)))
    many.fit(x, targets)
    np.testing.assert_allclose(travelled(many, 3).predict(x), many.predict(x), atol=1e-6)


def test_classes_that_a_model_has_not_seen_have_no_probability():
    x, _ = data(2)
    learner = SklearnLearner(LGBMClassifier(**SMALL))
    learner.fit(x, np.eye(4)[1 + 2 * (np.arange(80) % 2)])
    answer = travelled(learner, 4).predict(x)
    np.testing.assert_allclose(answer, learner.predict(x), atol=1e-6)
    assert not answer[:, [0, 2]].any()


def test_one_class_travels_as_a_constant():
    x, _ = data(2)
    learner = SklearnLearner(LGBMClassifier(**SMALL))
    learner.fit(x, np.eye(3)[np.full(80, 2)])
    assert learner.export().plain["kind"] == "constant"
    assert np.array_equal(open_model(learner.export(), (4,), 3).predict(x), learner.predict(x))


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"linear_tree": True}, "linear_tree = True"),
        ({"zero_as_missing": True}, "zero_as_missing = True"),
        ({"categorical_feature": [1], "min_data_per_group": 1, "cat_smooth": 0}, "splits on categories"),
        ({"objective": lambda y, p: (p - y, np.ones_like(y))}, "an objective of one's own"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_plain_trees_cannot_say_is_told_before_the_first_round(options, found):
    x, _ = data(2)
    model = (LGBMRegressor if "objective" in options else LGBMClassifier)(**SMALL, **options)
    learner = SklearnLearner(model)
    with pytest.raises(LearnerError, match=rf"of agent 'Ann' travels as plain trees.*{found}.*Change that option"):
        learner.check_travel(x, "Ann")


def test_a_model_that_cannot_be_fitted_at_all_is_told_before_the_first_round():
    with pytest.raises(LearnerError, match="LGBMClassifier of agent 'Ann' must be able to learn.*Change its options"):
        SklearnLearner(LGBMClassifier(num_leaves=-3)).check_travel(data(2)[0], "Ann")


def test_a_model_of_lightgbm_takes_part_where_models_travel():
    """The same bits whether a model of its own library or its trees predict: both are the sums of the same leaves."""
    x, targets = data(2)
    y = targets.argmax(axis=1)
    models = {"a": LGBMClassifier(**SMALL), "b": RandomForestClassifier(3, random_state=0)}
    agents = [cd.Agent(name, model, x, y) for name, model in models.items()]
    result = cd.Federation(agents, cd.AvgKD(), test=(x, y)).run(2, runtime="simulation", alone=False, progress=False)
    assert all(row["accuracy"] > 0.6 for row in result.rows)
    assert not np.array_equal(agents[1].state["targets"], agents[1].shard.targets)


# --- XGBoost --------------------------------------------------------------------------------------


def xgboost_model(text: str, name: str = "XGBClassifier", missing: float = np.nan) -> object:
    """A fitted model of XGBoost, as far as it is read."""
    booster = type("Booster", (), {"save_raw": lambda self, form: bytearray(text.encode())})()
    kind = type(name, (), {"__module__": "xgboost.sklearn", "missing": missing, "get_booster": lambda self: booster})
    return kind()


@pytest.mark.parametrize(
    ("name", "labels", "classes"), [("multiclass", [0, 1, 2], 3), ("binary", [2, 0], 3), ("regression", [0, 1], 2)]
)
def test_xgboost_predicts_the_same_elsewhere(name, labels, classes):
    kind = "XGBRegressor" if name == "regression" else "XGBClassifier"
    trees = as_trees(xgboost_model(getattr(xgboost_models, name.upper()), kind), labels, classes)
    arrived = open_model(Message.decode(trees.message().encoded), (3,), classes)
    wanted = np.array(getattr(xgboost_models, f"{name.upper()}_PREDICTIONS"))
    found = arrived.predict(xgboost_models.X[:6])
    np.testing.assert_allclose(found[:, labels], wanted, rtol=1e-6, atol=1e-6)
    # A value of 64 bits just below a threshold is the threshold itself in 32 bits, and goes right.
    root = trees.nodes[0]
    threshold = np.nextafter(np.float32(root["threshold"]), np.float32(np.inf))
    rows = np.tile(xgboost_models.X[1].astype(np.float64), (2, 1))
    rows[:, root["feature"]] = [np.nextafter(np.float64(threshold), -np.inf), threshold]
    first, second = arrived.predict(rows)
    assert np.array_equal(first, second)


def changed(path: str, value: object) -> str:
    """The JSON of a model with another value at a place."""
    model = json.loads(xgboost_models.BINARY)
    place, *steps = [model["learner"], *path.split(".")]
    for step in steps[:-1]:
        place = place[int(step)] if isinstance(place, list) else place[step]
    place[steps[-1]] = value
    return json.dumps(model)


@pytest.mark.parametrize(
    ("path", "value", "found"),
    [
        ("gradient_booster.name", "dart", "booster = 'dart'"),
        ("objective.name", "survival:cox", "objective = 'survival:cox'"),
        ("gradient_booster.model.trees.0.split_type", [1, 0, 0, 0, 0], "splits on categories"),
        ("gradient_booster.model.trees.0.tree_param", {"size_leaf_vector": "2"}, "multi_output_tree"),
    ],
)
def test_what_plain_trees_cannot_say_of_xgboost(path, value, found):
    with pytest.raises(LearnerError, match=found):
        as_trees(xgboost_model(changed(path, value)), [0, 1], 2)


def test_a_marker_for_missing_values_does_not_travel():
    with pytest.raises(LearnerError, match="missing = -999"):
        as_trees(xgboost_model(xgboost_models.BINARY, missing=-999), [0, 1], 2)


def test_trees_after_the_best_iteration_do_not_count():
    stopped = as_trees(xgboost_model(changed("attributes", {"best_iteration": "0"})), [0, 1], 2)
    assert (len(stopped.roots), len(as_trees(xgboost_model(xgboost_models.BINARY), [0, 1], 2).roots)) == (1, 2)


# --- a tree by hand -------------------------------------------------------------------------------


def test_a_tree_by_hand():
    """x0 <= 1, missing to the right: 10, else (x1 <= 0, missing to the left: 20, else 30); and 1 to start from."""
    nodes = np.zeros(5, dtype=NODE)
    nodes["feature"] = [0, LEAF, 1, LEAF, LEAF]
    nodes["threshold"] = [1, 0, 0, 0, 0]
    nodes["left"], nodes["right"], nodes["missing_left"] = [1, 0, 3, 0, 0], [2, 0, 4, 0, 0], [0, 0, 1, 0, 0]
    nodes["value"] = [0, 10, 0, 20, 30]
    trees = TreeEnsemble(nodes, np.array([0]), np.array([0]), (1.0,), "identity", (0,), 1, False)
    x = np.array([[1, 9], [2, 0], [2, 1], [np.nan, 1], [2, np.nan]])
    for model in (trees, open_model(trees.message(), (2,), 1)):
        assert model.predict(x)[:, 0].tolist() == [11, 21, 31, 31, 21]
        assert model.predict(x[:0]).shape == (0, 1)


# --- advice ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (GaussianNB(), "keep training rows inside"),
        (LinearSVR(), "^LinearSVR is not among the estimators that travel"),
        (LogisticRegressionCV(), "^LogisticRegressionCV is not among the estimators that travel"),
        (make_pipeline(StandardScaler(), LGBMClassifier()), "LGBMClassifier travels by itself.*out of Pipeline"),
        (make_pipeline(QuantileTransformer(), LogisticRegression()), "QuantileTransformer does not travel: use Stand"),
        (type("Own", (LogisticRegression,), {})(), "Own is a class of your own, which others do not have"),
    ],
    ids=["rows inside", "linear", "not listed", "in a pipeline", "a step", "own"],
)
def test_a_model_that_cannot_travel_is_told_why(model, said):
    learner = SklearnLearner(model)
    assert Ability.PORTABLE not in learner.abilities
    assert re.search(said, learner.advice(Ability.PORTABLE))
