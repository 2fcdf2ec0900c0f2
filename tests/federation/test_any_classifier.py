"""Classifiers of scikit-learn of every kind as models of agents: on arrays, and in pipelines that get frames."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.compose import make_column_transformer
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis, QuadraticDiscriminantAnalysis
from sklearn.ensemble import (
    AdaBoostClassifier,
    BaggingClassifier,
    ExtraTreesClassifier,
    GradientBoostingClassifier,
    HistGradientBoostingClassifier,
    RandomForestClassifier,
    StackingClassifier,
    VotingClassifier,
)
from sklearn.experimental import enable_halving_search_cv  # noqa: F401
from sklearn.feature_selection import RFE
from sklearn.frozen import FrozenEstimator
from sklearn.gaussian_process import GaussianProcessClassifier
from sklearn.linear_model import LogisticRegression, RidgeClassifier, RidgeClassifierCV, SGDClassifier
from sklearn.model_selection import (
    FixedThresholdClassifier,
    GridSearchCV,
    HalvingGridSearchCV,
    RandomizedSearchCV,
    TunedThresholdClassifierCV,
)
from sklearn.multiclass import OneVsOneClassifier, OneVsRestClassifier, OutputCodeClassifier
from sklearn.multioutput import ClassifierChain, MultiOutputClassifier
from sklearn.naive_bayes import BernoulliNB, GaussianNB
from sklearn.neighbors import KNeighborsClassifier, NearestCentroid, RadiusNeighborsClassifier
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from sklearn.semi_supervised import LabelSpreading, SelfTrainingClassifier
from sklearn.svm import SVC, LinearSVC
from sklearn.tree import DecisionTreeClassifier

import codistill as cd
from codistill.core.errors import LearnerError

random = np.random.default_rng(0)
Y = random.integers(0, 3, 400)
FRAME = pd.DataFrame(
    {
        "age": random.normal(50, 9, 400) + 12 * Y,
        "dose": random.normal(size=400) - 2 * Y,
        "unit": np.where(random.random(400) < 0.8, np.array(["a", "b", "c"])[Y], random.choice(["a", "b", "c"], 400)),
    }
)
NAMES = np.array(["mild", "none", "severe"])[Y]
SIZE = 18

KEEPS, OTHER = "Models that keep training rows inside", "is not among the estimators that travel"
LINEAR = LogisticRegression
# A model, and why it cannot be sent to others; empty: it can.
MODELS: dict[str, tuple[Any, str]] = {
    "logistic regression": (LINEAR(), ""),
    "ridge": (RidgeClassifier(), ""),
    "ridge that chooses": (RidgeClassifierCV(), OTHER),
    "gradient descent": (SGDClassifier(random_state=0), ""),
    "linear machine": (LinearSVC(), ""),
    "vector machine": (SVC(), KEEPS),
    "gaussian bayes": (GaussianNB(), KEEPS),
    "binary bayes": (BernoulliNB(binarize=0.5), KEEPS),
    "linear discriminants": (LinearDiscriminantAnalysis(), OTHER),
    "quadratic discriminants": (QuadraticDiscriminantAnalysis(reg_param=0.1), KEEPS),
    "centroids": (NearestCentroid(), KEEPS),
    "label spreading": (LabelSpreading(), OTHER),
    "gaussian process": (GaussianProcessClassifier(optimizer=None), KEEPS),
    "perceptron": (MLPClassifier(8, max_iter=300, learning_rate_init=0.02, random_state=0), ""),
    "tree": (DecisionTreeClassifier(max_depth=3, random_state=0), ""),
    "forest": (RandomForestClassifier(5), ""),
    "extra trees": (ExtraTreesClassifier(5), ""),
    "boosting": (GradientBoostingClassifier(n_estimators=5), ""),
    "histograms": (HistGradientBoostingClassifier(max_iter=5, min_samples_leaf=3), ""),
    "ada": (AdaBoostClassifier(DecisionTreeClassifier(max_depth=2), n_estimators=3), ""),
    "bagging of neighbours": (BaggingClassifier(KNeighborsClassifier(3), n_estimators=5, random_state=0), KEEPS),
    "soft vote": (VotingClassifier([("l", LINEAR()), ("d", LinearDiscriminantAnalysis())], voting="soft"), OTHER),
    "hard vote": (VotingClassifier([("l", LINEAR()), ("t", DecisionTreeClassifier(max_depth=3))]), OTHER),
    "stack": (StackingClassifier([("l", LINEAR()), ("d", LinearDiscriminantAnalysis())], cv=3), OTHER),
    "calibrated": (CalibratedClassifierCV(LinearSVC(), cv=3), OTHER),
    "search": (GridSearchCV(LINEAR(), {"C": [0.1, 1.0]}, cv=3), OTHER),
    "random search": (RandomizedSearchCV(SVC(), {"C": [0.1, 1.0]}, n_iter=2, cv=3, random_state=0), KEEPS),
    "halving search": (HalvingGridSearchCV(LINEAR(), {"C": [0.1, 1.0]}, cv=2, random_state=0), OTHER),
    "one against the rest": (OneVsRestClassifier(FixedThresholdClassifier(LINEAR())), OTHER),
    "one against one": (OneVsOneClassifier(LINEAR()), OTHER),
    "codes": (OutputCodeClassifier(LINEAR(), random_state=0), OTHER),
    "fewer columns": (RFE(LINEAR(), n_features_to_select=1), OTHER),
    "self-training": (SelfTrainingClassifier(LINEAR()), OTHER),
}


def on_frames(model: Any) -> Any:
    columns = make_column_transformer(
        (OneHotEncoder(handle_unknown="ignore", sparse_output=False), ["unit"]), (StandardScaler(), ["age", "dose"])
    )
    return make_pipeline(columns, model)


def federation(models: dict[str, Any], protocol: cd.Protocol, x: Any) -> cd.Federation:
    agents = []
    for place, (name, model) in enumerate(models.items()):
        rows = np.arange(SIZE) + SIZE * (place % 12)
        agents.append(cd.Agent(name, model, x.iloc[rows], NAMES[rows]))
    public = x[300:316] if protocol.needs_public else None
    return cd.Federation(agents, protocol, public=public, test=(x[330:], NAMES[330:]))


def numbers() -> pd.DataFrame:
    columns = FRAME[["age", "dose"]]
    return (columns - columns.mean()) / columns.std()


@pytest.mark.parametrize("kind", ["arrays", "frames"])
def test_all_learn_the_soft_labels_of_one_federation(kind: str) -> None:
    models = {name: clone(model) for name, (model, _) in MODELS.items()}
    if kind == "frames":
        models = {name: on_frames(model) for name, model in models.items()}
    made = federation(models, cd.FedMD(), FRAME if kind == "frames" else numbers())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what they say of so few rows
        result = made.run(1, runtime="simulation", progress=False, alone=False)
    assert result.events == []
    poor = {row["agent"]: row["accuracy"] for row in result.rows if row["accuracy"] < 0.6}
    assert not poor


@pytest.mark.parametrize("name", MODELS)
def test_it_can_be_sent_or_the_reason_is_named(name: str) -> None:
    model, reason = MODELS[name]
    if not reason:
        federation({"a": model, "b": LINEAR()}, cd.AvgKD(), numbers())
        return
    with pytest.raises(LearnerError, match=reason):
        federation({"a": model, "b": LINEAR()}, cd.AvgKD(), numbers())


def test_what_gets_frames_of_its_own_is_not_sent() -> None:
    with pytest.raises(LearnerError, match="OneHotEncoder does not travel.*transform the data beforehand"):
        federation({"a": on_frames(LINEAR()), "b": on_frames(LINEAR())}, cd.AvgKD(), FRAME)


REFUSED = {
    "neighbours": (KNeighborsClassifier(), "KNeighborsClassifier answers with the labels of the nearest rows"),
    "a radius": (RadiusNeighborsClassifier(), "RadiusNeighborsClassifier answers with the labels of the nearest rows"),
    "a vote of neighbours": (
        VotingClassifier([("l", LINEAR()), ("k", KNeighborsClassifier())]), "KNeighborsClassifier answers with",
    ),
    "a search of neighbours": (GridSearchCV(KNeighborsClassifier(), {"n_neighbors": [1, 3]}), "KNeighborsClassifier a"),
    "no fit": (GridSearchCV(LINEAR(), {"C": [1.0]}, refit=False), "refit=False: it finds options and fits no model"),
    "frozen": (FrozenEstimator(LINEAR()), "a frozen estimator, which stays as it is"),
    "a threshold": (FixedThresholdClassifier(LINEAR()), r"3 classes for a classifier of two.*Wrap it: .*OneVsRest"),
    "a tuned threshold": (TunedThresholdClassifierCV(LINEAR()), "3 classes for a classifier of two"),
    "several outputs": (MultiOutputClassifier(LINEAR()), "one label per sample for a classifier of several"),
    "a chain": (ClassifierChain(LINEAR()), "one label per sample for a classifier of several"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("kind", ["arrays", "frames"])
def test_what_cannot_learn_is_refused_before_the_run_by_its_reason(name: str, kind: str) -> None:
    model, reason = REFUSED[name]
    given = on_frames(model) if kind == "frames" else model
    with pytest.raises(LearnerError, match=reason):
        federation(
            {"a": given, "b": LINEAR() if kind == "arrays" else on_frames(LINEAR())},
            cd.FedMD(),
            FRAME if kind == "frames" else numbers(),
        )


def test_a_threshold_is_for_two_classes() -> None:
    two = FRAME[Y < 2][["age", "dose"]], NAMES[Y < 2]
    agents = [
        cd.Agent(name, model, two[0][part], two[1][part])
        for name, model, part in (("a", FixedThresholdClassifier(LINEAR()), slice(30)), ("b", LINEAR(), slice(30, 60)))
    ]
    made = cd.Federation(agents, cd.FedMD(), public=two[0][60:90], test=(two[0][90:], two[1][90:]))
    assert min(row["accuracy"] for row in made.run(1, runtime="simulation", progress=False, alone=False).rows) > 0.7
