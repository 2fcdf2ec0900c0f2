"""Scores: each against its formula or scikit-learn's, scores of one's own, and what cannot be computed."""

from __future__ import annotations

import numpy as np
import pytest
import sklearn.metrics
from sklearn.metrics import fbeta_score, make_scorer, matthews_corrcoef

from codistill.core.errors import RecipeError
from codistill.results.scores import (
    ACCURACY,
    DEFAULT_SCORES,
    RMSE,
    WORST,
    Score,
    as_score,
    as_scores,
    compute_scores,
    find_score,
)  # fmt: skip

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("classes", [2, 4])
def test_scores_of_classes_are_those_of_scikit_learn(classes):
    y, p = RNG.integers(0, classes, 120), RNG.dirichlet(np.ones(classes), 120)
    chosen = p.argmax(axis=1)
    expected = {
        "accuracy": sklearn.metrics.accuracy_score(y, chosen),
        "balanced_accuracy": sklearn.metrics.balanced_accuracy_score(y, chosen),
        "f1_macro": sklearn.metrics.f1_score(y, chosen, average="macro"),
        "roc_auc": sklearn.metrics.roc_auc_score(y, p[:, 1] if classes == 2 else p, multi_class="ovr"),
        "log_loss": sklearn.metrics.log_loss(y, p),
        "recall_macro": sklearn.metrics.recall_score(y, chosen, average="macro"),
        "brier_score": sklearn.metrics.brier_score_loss(y, p[:, 1] if classes == 2 else p),
    }
    found = compute_scores(p, y, ["neg_log_loss" if name == "log_loss" else name for name in expected])
    assert found == pytest.approx(expected)


def test_scores_of_values_are_those_of_scikit_learn():
    y = RNG.normal(size=(30, 1))
    answers = y + RNG.normal(size=(30, 1))
    found = compute_scores(answers, y, ["neg_root_mean_squared_error", "mae", "r2", "neg_max_error", "accuracy"])
    assert found == pytest.approx({
        "rmse": sklearn.metrics.root_mean_squared_error(y, answers),
        "mae": sklearn.metrics.mean_absolute_error(y, answers),
        "r2": sklearn.metrics.r2_score(y, answers),
        "max_error": sklearn.metrics.max_error(y, answers),
    })  # fmt: skip
    assert compute_scores(np.full((3, 1), np.nan), np.zeros((3, 1)), ["rmse", "mae", "r2"]) == {
        "rmse": WORST, "mae": WORST, "r2": -WORST,
    }  # fmt: skip


def test_the_calibration_error_is_the_mean_gap_between_confidence_and_accuracy():
    """Two bins: three samples of confidence 0.8, of which two are right; one of 0.6, wrong.

    ECE = 3/4 |2/3 - 0.8| + 1/4 |0 - 0.6| = 0.1 + 0.15.
    """
    answers = np.array([[0.8, 0.2], [0.8, 0.2], [0.2, 0.8], [0.4, 0.6]])
    y = np.array([0, 0, 0, 0])
    assert compute_scores(answers, y, ["calibration_error"]) == {"calibration_error": pytest.approx(0.25)}


def test_weights_stand_for_copies_of_samples():
    y, p = RNG.integers(0, 3, 40), RNG.dirichlet(np.ones(3), 40)
    weights = RNG.integers(0, 3, 40)
    names = ["accuracy", "balanced_accuracy", "f1_macro", "roc_auc", "log_loss", "calibration_error"]
    copies = np.repeat(np.arange(40), weights)
    assert compute_scores(p, y, names, weights.astype(float)) == pytest.approx(
        compute_scores(p[copies], y[copies], names)
    )
    assert compute_scores(p, y, ["recall_macro"], weights.astype(float)) == {}


def test_what_cannot_be_computed_is_left_out():
    """An AUC of one class, a log loss of real values, R2 of one sample."""
    names = ["accuracy", "roc_auc", "log_loss", "calibration_error"]
    assert set(compute_scores(np.array([[0.9, 0.1], [0.2, 0.8]]), np.array([1, 1]), names)) == {
        "accuracy", "log_loss", "calibration_error",
    }  # fmt: skip
    assert set(compute_scores(np.array([[2.0, -1], [0, 3.0]]), np.array([0, 1]), names)) == {"accuracy", "roc_auc"}
    assert compute_scores(np.zeros((1, 1)), np.zeros((1, 1)), ["r2"]) == {}
    # Classes that no test sample has are left out of the mean over the classes.
    p = RNG.dirichlet(np.ones(3), 20)
    y = np.arange(20) % 2
    mean = np.mean([sklearn.metrics.roc_auc_score(y == c, p[:, c]) for c in (0, 1)])
    assert compute_scores(p, y, ["roc_auc"]) == {"roc_auc": pytest.approx(mean)}


def test_a_gain_is_positive_when_it_is_better():
    assert ACCURACY.gain(0.5, 0.75) == 0.25
    assert RMSE.gain(63.6, 55.4) == pytest.approx(8.2)
    assert RMSE.gain(None, 1.0) is None


def test_one_word_for_one_thing():
    assert {find_score(name).name for name in ("neg_log_loss", "log_loss")} == {"log_loss"}
    assert {find_score(name).name for name in ("roc_auc", "roc_auc_ovr")} == {"roc_auc"}
    assert find_score("neg_mean_squared_error").name == "mean_squared_error"
    assert not find_score("neg_mean_squared_error").greater_is_better
    assert find_score("gain") is None


def cost(y, answers):
    """Five times as bad to miss class 1."""
    return np.mean(np.where(y == 1, 5, 1) * (answers.argmax(axis=1) != y))


def test_scores_of_ones_own():
    y, answers = np.array([0, 1, 1, 0]), np.eye(2)[[0, 0, 1, 1]]
    own = Score("cost", cost, greater_is_better=False)
    beta = make_scorer(fbeta_score, beta=2, pos_label="ill")
    scores = as_scores([own, beta, "accuracy"], "classification", 2, ("healthy", "ill"), y)
    assert [(score.name, score.greater_is_better) for score in scores] == [
        ("cost", False), ("fbeta_score", True), ("accuracy", True),
    ]  # fmt: skip
    assert compute_scores(answers, y, scores) == pytest.approx({
        "cost": (5 + 1) / 4, "fbeta_score": fbeta_score(y, [0, 0, 1, 1], beta=2), "accuracy": 0.5,
    })  # fmt: skip
    assert as_score(cost).name == "cost"
    assert as_scores([], "classification", 2) == DEFAULT_SCORES


@pytest.mark.parametrize(
    ("scores", "task", "words"),
    [
        (["auccuracy"], "classification", "Did you mean 'accuracy'"),
        (["r2"], "classification", "suit the task, which is classification"),
        (["roc_auc"], "regression", "suit the task, which is regression"),
        (["f1"], "classification", "defined for 3 classes"),
        (["accuracy", "accuracy"], "classification", "'accuracy' more than once"),
        ([3], "classification", "must be a name, a Score"),
        (5, "classification", "must be a list"),
        ([lambda y, answers: 1.0], "classification", "A score must have a name. Found: a lambda"),
        ([lambda y: 1.0], "classification", "A score must have a name. Found: a lambda"),
    ],
)
def test_scores_are_checked_before_anything_runs(scores, task, words):
    with pytest.raises(RecipeError, match=words):
        as_scores(scores, task, 3)


def test_a_metric_of_scikit_learn_is_no_function_of_answers_and_that_is_said_before_anything_runs():
    y = np.array([0, 1, 0, 1])
    with pytest.raises(RecipeError, match=r"'matthews_corrcoef'.*ValueError.*answers \(4, 2\).*make_scorer"):
        as_scores([matthews_corrcoef], "classification", 2, None, y)
    assert as_scores([matthews_corrcoef], "classification", 2, None, y[::2])  # one class: perhaps it needs both


def test_a_list_of_known_names_has_each_once():
    with pytest.raises(RecipeError) as caught:
        as_score("xyz")
    assert caught.value.do.count(" accuracy,") == 1


def test_a_function_that_fails_is_named_before_anything_runs():
    def wrong(y):
        return 0.0

    with pytest.raises(RecipeError, match=r"Score 'wrong' must return a number for \(y, answers\)"):
        as_scores([wrong], "classification", 2, None, np.array([0, 1]))
    for name in ("own_f1", "round", "time", "1st", ""):
        with pytest.raises(RecipeError, match="name"):
            Score(name, cost)
