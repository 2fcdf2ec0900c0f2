"""Trained agents, and models from files, are fitted estimators to scikit-learn."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
import pytest
from lightgbm import LGBMClassifier
from sklearn.base import clone, is_classifier, is_regressor
from sklearn.calibration import CalibratedClassifierCV, CalibrationDisplay, calibration_curve
from sklearn.datasets import load_breast_cancer, load_diabetes, load_iris
from sklearn.ensemble import (
    HistGradientBoostingClassifier,
    RandomForestClassifier,
    RandomForestRegressor,
    VotingClassifier,
)
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
from sklearn.model_selection import GridSearchCV, cross_val_predict, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler
from sklearn.svm import SVC, LinearSVC
from sklearn.tree import DecisionTreeClassifier
from sklearn.utils import estimator_checks, estimator_html_repr, get_tags
from sklearn.utils.validation import check_is_fitted
from torch import nn

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


# Scikit-learn's own checks fit an estimator to samples of theirs. An agent is trained already: a check applies where it
# does not look at what was fitted, and the agent has as many columns, and classes, as the samples of the check.
ANY, TWO, THREE, FIVE, TEN = (3, 2), (2, 2), (3, 2), (5, 2), (10, 2)  # columns, classes
APPLIES = {
    "check_estimator_cloneable": ANY, "check_estimator_tags_renamed": ANY, "check_valid_tag_types": ANY,
    "check_estimator_repr": ANY, "check_estimators_overwrite_params": ANY, "check_dont_overwrite_parameters": ANY,
    "check_estimators_fit_returns_self": ANY, "check_readonly_memmap_input": ANY, "check_mixin_order": ANY,
    "check_positive_only_tag_during_fit": ANY, "check_estimator_sparse_tag": ANY, "check_set_params": ANY,
    "check_estimators_partial_fit_n_features": ANY, "check_non_transformer_estimators_n_iter": ANY,
    "check_fit2d_1sample": ANY, "check_fit2d_1feature": ANY, "check_get_params_invariance": ANY,
    "check_regressors_no_decision_function": ANY, "check_fit_score_takes_y": THREE, "check_estimators_dtypes": FIVE,
    "check_pipeline_consistency": THREE, "check_estimators_pickle": THREE, "check_dict_unchanged": THREE,
    "check_f_contiguous_array_estimator": THREE, "check_fit_idempotent": TWO,
    "check_methods_sample_order_invariance": THREE, "check_methods_subset_invariance": THREE,
    "check_decision_proba_consistency": TWO, "check_classifier_data_not_an_array": TWO, "check_regressors_int": TEN,
    "check_regressor_data_not_an_array": TEN, "check_estimator_sparse_array": (3, 4),
    "check_estimator_sparse_matrix": (3, 4),
}  # fmt: skip
_FITS, _MADE, _WORDS = "looks at what fit refuses", "makes one without data", "asks for other words in an error"
_FITTED = "looks at what fit has set"
DOES_NOT = {
    "check_no_attributes_set_in_init": _MADE, "check_do_not_raise_errors_in_init_or_set_params": _MADE,
    "check_parameters_default_constructible": _MADE, "check_estimators_unfitted": "wants one that is not fitted",
    "check_fit_check_is_fitted": "wants one that is not fitted", "check_n_features_in": "wants one that is not fitted",
    "check_n_features_in_after_fitting": _FITTED, "check_classifiers_classes": _FITTED,
    "check_classifiers_one_label": _FITTED, "check_classifiers_one_label_sample_weights": _FITTED,
    "check_complex_data": _FITS, "check_dtype_object": _FITS,
    "check_estimators_empty_data_messages": _FITS, "check_classifiers_train": _FITS, "check_regressors_train": _FITS,
    "check_classifiers_regression_target": _FITS, "check_supervised_y_no_nan": _FITS, "check_supervised_y_2d": _FITS,
    "check_fit1d": _FITS, "check_fit2d_predict1d": _WORDS, "check_array_api_input": "needs SCIPY_ARRAY_API=1",
}  # fmt: skip


@functools.cache
def sized(columns: int, classes: int, task: str) -> Any:
    """A trained agent with so many columns and classes."""
    x = np.random.default_rng(0).normal(size=(60, columns))
    y = x[:, 0] if task == "regression" else np.arange(60) % classes
    models: list[Any] = [LogisticRegression(), LogisticRegression()] if task != "regression" else [Ridge(), Ridge()]
    agents = [cd.Agent(name, models.pop(), x[part], y[part]) for name, part in (("a", slice(30)), ("b", slice(30, 60)))]
    federation = cd.Federation(agents, cd.AvgKD(), task=task)
    return federation.run(1, runtime="simulation", progress=False, alone=False).agents["a"]


@pytest.mark.filterwarnings("ignore:Estimator TrainedAgent does not inherit from:UserWarning")
@pytest.mark.parametrize("task", ["classification", "regression"])
def test_scikit_learns_own_checks(task: str) -> None:
    ran = set()
    for _, check in estimator_checks.estimator_checks_generator(sized(*ANY, task)):
        name = getattr(check, "func", check).__name__
        assert (name in APPLIES) != (name in DOES_NOT), name  # new checks of scikit-learn are named here
        if name in APPLIES:
            check(sized(*APPLIES[name], task))
            ran.add(name)
    assert len(ran) > 25


def test_what_shows_an_estimator_takes_it(two: Case) -> None:
    assert get_tags(two.agent).estimator_type == "classifier"
    assert get_tags(two.agent).input_tags.sparse
    assert "TrainedAgent" in estimator_html_repr(two.agent)
    pipeline = make_pipeline(FunctionTransformer(), two.agent)
    assert np.array_equal(pipeline.fit(two.frame, two.y).predict(two.frame), two.agent.predict(two.frame))
    assert "trained agent &#x27;a&#x27;" in pipeline._repr_html_()
    true, predicted = calibration_curve(two.y == "malignant", two.agent.predict_proba(two.frame)[:, 1], n_bins=2)
    assert len(true) == len(predicted) == 2
    assert all(np.diff(true) > 0)  # what it calls likelier happens more often


def test_real_values_have_neither_classes_nor_probabilities() -> None:
    agent = sized(*ANY, "regression")
    for name in ("predict_proba", "decision_function", "classes_"):
        assert not hasattr(agent, name)
        assert hasattr(sized(*ANY, "classification"), name)
        with pytest.raises(DataError, match="for classes"):
            getattr(agent, name)


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
    module: Callable[..., Any] = nn.Sequential(nn.Flatten(), nn.Linear(16, 2))
    agent = cd.Agent("a", module, np.zeros((8, 1, 4, 4), np.float32), np.arange(8) % 2)
    trained = cd.Federation([agent], cd.Alone()).run(1, progress=False).agents["a"]
    assert not hasattr(trained, "n_features_in_")
    assert "shape (1, 4, 4)" in trained._repr_html_()


class Nearest:
    """A model of a user's own: the class of the nearest mean."""

    def fit(self, x: np.ndarray, targets: np.ndarray) -> None:
        self.centres = targets.T @ x / targets.sum(axis=0)[:, None]

    def predict(self, x: np.ndarray) -> np.ndarray:
        nearest = np.square(x[:, None] - self.centres).sum(axis=2).argmin(axis=1)
        return np.eye(len(self.centres), dtype=np.float32)[nearest]


def every_kind() -> dict[str, Any]:
    return {
        "linear": LogisticRegression(), "forest": RandomForestClassifier(3), "machine": SVC(), "ridge": Ridge(),
        "boosting": HistGradientBoostingClassifier(max_iter=2), "vote": VotingClassifier([("l", LogisticRegression())]),
        "trees": LGBMClassifier(n_estimators=2), "kernel": cd.KernelRidge(),
        "search": GridSearchCV(DecisionTreeClassifier(), {"max_depth": [1, 2]}, cv=2), "own": Nearest(),
        "pipeline": make_pipeline(StandardScaler(), LinearSVC()), "module": cd.TorchLearner(nn.Linear(4, 3), epochs=1),
    }  # fmt: skip


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize("safeguard", [False, True])
@pytest.mark.parametrize("protocol", [cd.FedMD(), cd.EKD()], ids=lambda each: each.name)
def test_no_rows_give_no_rows(protocol: cd.Protocol, safeguard: bool, tmp_path: Path) -> None:
    data = load_iris(as_frame=True)
    x, names = data.data, data.target_names[data.target]
    sent = {"linear", "forest"}
    chosen = {name: model for name, model in every_kind().items() if protocol.name == "fedmd" or name in sent}
    agents = [cd.Agent(name, model, x[i % 3 :: 4], names[i % 3 :: 4]) for i, (name, model) in enumerate(chosen.items())]
    public = x[3::4] if protocol.needs_public else None
    federation = cd.Federation(agents, protocol, public=public, safeguard=safeguard)
    result = federation.run(1, runtime="simulation", progress=False, alone=False)
    fresh = every_kind()
    for name, agent in result.agents.items():
        model = fresh[name].module if name == "module" else fresh[name] if name == "own" else None
        loaded = cd.load(agent.save(tmp_path / name), model=model)
        for each in (agent, loaded):
            for none in (x[:0], x[:0].to_numpy()):
                assert each.predict(none).shape == (0,)
                assert each.predict(none).dtype == each.predict(x[:1]).dtype
                assert each.answers(none).shape == each.decision_function(none).shape == (0, 3)
        assert np.array_equal(loaded.predict(x), agent.predict(x))
