"""Trained agents, and models from files, are fitted estimators to scikit-learn."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone, is_classifier, is_regressor
from sklearn.calibration import CalibratedClassifierCV, CalibrationDisplay
from sklearn.datasets import load_breast_cancer, load_diabetes, load_iris
from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor
from sklearn.frozen import FrozenEstimator
from sklearn.inspection import DecisionBoundaryDisplay, PartialDependenceDisplay, permutation_importance
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import (
    ConfusionMatrixDisplay,
    DetCurveDisplay,
    PrecisionRecallDisplay,
    PredictionErrorDisplay,
    RocCurveDisplay,
    accuracy_score,
    get_scorer,
    r2_score,
)
from sklearn.model_selection import cross_val_predict, cross_val_score
from sklearn.utils import estimator_checks
from sklearn.utils.validation import check_is_fitted

import codistill as cd
from codistill.core.errors import DataError

matplotlib.use("Agg")
TASKS = {
    "two classes": (load_breast_cancer, np.array(["malignant", "benign"])),
    "three classes": (load_iris, np.array(["x", "y", "z"])),
    "real values": (load_diabetes, None),
}


class Case:
    """A trained agent, with samples that it has not seen."""

    def __init__(self, task: str) -> None:
        data, names = TASKS[task]
        x, y = data(return_X_y=True)
        order = np.random.default_rng(0).permutation(len(x))
        x, y = ((x - x.mean(axis=0)) / x.std(axis=0))[order], y[order]
        self.frame = pd.DataFrame(x, columns=[f"column {i}" for i in range(x.shape[1])])
        self.y = y if names is None else names[y]
        classifies = names is not None
        models: list[Any] = [LogisticRegression(), RandomForestClassifier(10, random_state=0)]
        agents = [
            cd.Agent(name, model, self.frame[start : start + 40], self.y[start : start + 40])
            for name, start, model in zip(
                "ab", (0, 40), models if classifies else [Ridge(), RandomForestRegressor(10)], strict=True
            )
        ]
        options: dict[str, Any] = {} if classifies else {"task": "regression"}
        federation = cd.Federation(agents, cd.AvgKD(), **options)
        self.agent = federation.run(2, runtime="simulation", progress=False, alone=False).agents["a"]
        self.frame, self.y = self.frame[80:150], self.y[80:150]


@pytest.fixture(scope="module", params=TASKS)
def case(request: pytest.FixtureRequest) -> Case:
    return Case(request.param)


@pytest.fixture(scope="module")
def two() -> Case:
    return Case("two classes")


def test_what_scikit_learn_asks_of_a_fitted_estimator(case: Case, tmp_path: Path) -> None:
    case.agent.save(tmp_path / "model")
    for each in (case.agent, cd.load(tmp_path / "model")):
        check_is_fitted(each)
        assert each.n_features_in_ == case.frame.shape[1]
        assert list(each.feature_names_in_) == list(case.frame.columns)
        assert is_classifier(each) == each.is_classifier == (case.y.dtype.kind != "f")
        assert is_regressor(each) != is_classifier(each)
        assert clone(each) is each
        assert each.predict(case.frame[:0]).shape == (0, *each.predict(case.frame[:1]).shape[1:])
        score = accuracy_score if each.is_classifier else r2_score
        assert each.score(case.frame, case.y) == score(case.y, each.predict(case.frame)) > 0.3
        weights = np.arange(len(case.y))
        weighted = score(case.y, each.predict(case.frame), sample_weight=weights)
        assert each.score(case.frame, case.y, sample_weight=weights) == weighted


# Of scikit-learn's own checks those that fit an estimator, or change its options, do not apply.
@pytest.mark.parametrize(
    "name",
    [
        "check_estimator_repr", "check_estimator_tags_renamed",
        "check_get_params_invariance", "check_valid_tag_types",
    ],
)  # fmt: skip
def test_scikit_learns_own_checks(name: str, case: Case) -> None:
    getattr(estimator_checks, name)("TrainedAgent", case.agent)


def test_what_inspects_an_estimator_takes_it(case: Case) -> None:
    found = permutation_importance(case.agent, case.frame, case.y, n_repeats=2, random_state=0)
    assert found.importances_mean.max() > 0.01
    options = {"target": case.agent.classes_[0]} if case.agent.is_classifier else {}
    PartialDependenceDisplay.from_estimator(case.agent, case.frame, ["column 2"], **options)
    predicted = cross_val_predict(case.agent, case.frame, case.y, cv=3)
    assert np.array_equal(predicted, case.agent.predict(case.frame))  # each fold by the agent as it is
    parts = np.array_split(np.arange(len(case.y)), 3)
    if not case.agent.is_classifier:
        scores = cross_val_score(case.agent, case.frame, case.y, cv=3)
        expected = [case.agent.score(case.frame.iloc[rows], case.y[rows]) for rows in parts]
        np.testing.assert_allclose(scores, expected)
        PredictionErrorDisplay.from_estimator(case.agent, case.frame, case.y)


@pytest.mark.parametrize("name", ["accuracy", "balanced_accuracy", "f1_macro", "neg_log_loss", "roc_auc_ovr"])
def test_scorers_of_classes(name: str, two: Case) -> None:
    assert get_scorer(name)(two.agent, two.frame, two.y) > {"neg_log_loss": -1}.get(name, 0.8)
    three = Case("three classes")
    assert get_scorer(name)(three.agent, three.frame, three.y) > {"neg_log_loss": -1}.get(name, 0.8)


def test_of_two_classes_the_decision_function_is_for_the_second(two: Case) -> None:
    decision, answers = two.agent.decision_function(two.frame), two.agent.answers(two.frame)
    assert answers.shape == (len(two.y), 2)
    np.testing.assert_allclose(decision, answers[:, 1] - answers[:, 0])
    assert np.array_equal(two.agent.classes_[(decision > 0).astype(int)], two.agent.predict(two.frame))
    assert get_scorer("roc_auc")(two.agent, two.frame, two.y) > 0.9


@pytest.mark.parametrize(
    "display",
    [RocCurveDisplay, PrecisionRecallDisplay, DetCurveDisplay, CalibrationDisplay, ConfusionMatrixDisplay],
    ids=lambda each: each.__name__,
)
def test_displays_of_two_classes(display: Any, two: Case) -> None:
    options = {} if display is ConfusionMatrixDisplay else {"pos_label": "malignant"}
    display.from_estimator(two.agent, two.frame, two.y, **options)


def test_probabilities_can_be_calibrated(two: Case) -> None:
    calibrated = CalibratedClassifierCV(FrozenEstimator(two.agent)).fit(two.frame, two.y)
    assert np.mean(calibrated.predict(two.frame) == two.y) > 0.8


def test_a_boundary_is_drawn_on_two_columns() -> None:
    x, y = load_iris(return_X_y=True)
    federation = cd.Federation([cd.Agent("a", LogisticRegression(), x[:, :2], y)], cd.Alone())
    agent = federation.run(1, runtime="simulation", progress=False).agents["a"]
    DecisionBoundaryDisplay.from_estimator(agent, x[:, :2], response_method="predict", grid_resolution=10)


def test_it_stays_as_it_is_and_says_so(two: Case, capsys: pytest.CaptureFixture[str]) -> None:
    before = two.agent.answers(two.frame)
    capsys.readouterr()
    two.agent._noted.clear()
    assert two.agent.fit(two.frame, two.y) is two.agent.fit(two.frame, two.y) is two.agent
    assert capsys.readouterr().err == "note: agent 'a' is trained and stays as it is: fit does nothing\n"
    assert np.array_equal(two.agent.answers(two.frame), before)
    assert two.agent.get_params() == {}
    assert two.agent.set_params() is two.agent
    with pytest.raises(DataError, match="has no options"):
        two.agent.set_params(C=1)


def test_what_it_shows(case: Case, tmp_path: Path) -> None:
    case.agent.save(tmp_path / "model")
    kind = {2: "2 classes", 3: "3 classes"}.get(len(case.agent.classes_)) if case.agent.is_classifier else "real values"
    model = case.agent.learner.describe()
    assert repr(case.agent) == f"<trained agent 'a' (avgkd): {model}, {kind}>"
    assert repr(cd.load(tmp_path / "model")) == f"<loaded agent 'a' (avgkd): {model}, {kind}>"
    page = case.agent._repr_html_()
    assert f"<tr><th>model</th><td>{model}</td></tr>" in page
    assert f"{case.frame.shape[1]} features" in page


def test_names_on_a_page_are_text() -> None:
    x, y = np.eye(6), np.array(["<b>", "&"] * 3)
    agent = cd.Federation([cd.Agent("a", LogisticRegression(), x, y)], cd.Alone()).run(1, progress=False).agents["a"]
    assert "&lt;b&gt;" in agent._repr_html_()
    assert "<b>" not in agent._repr_html_()


def test_images_have_no_number_of_columns() -> None:
    from torch import nn

    module: Callable[..., Any] = nn.Sequential(nn.Flatten(), nn.Linear(16, 2))
    agent = cd.Agent("a", module, np.zeros((8, 1, 4, 4), np.float32), np.arange(8) % 2)
    trained = cd.Federation([agent], cd.Alone()).run(1, progress=False).agents["a"]
    assert not hasattr(trained, "n_features_in_")
    assert "shape (1, 4, 4)" in trained._repr_html_()
