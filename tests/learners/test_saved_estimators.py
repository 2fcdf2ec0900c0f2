"""What can be saved can be loaded: every estimator of scikit-learn, fitted to missing values and to text."""

from __future__ import annotations

import functools
import io
import json
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from archived_models import SAVED, answers, fitted, rows
from sklearn.base import BaseEstimator, TransformerMixin, clone
from sklearn.cluster import Birch
from sklearn.compose import ColumnTransformer, TransformedTargetRegressor, make_column_transformer
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
from sklearn.experimental import enable_iterative_imputer  # noqa: F401
from sklearn.feature_selection import SelectFromModel
from sklearn.impute import IterativeImputer, KNNImputer, MissingIndicator, SimpleImputer
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.model_selection import GridSearchCV, RandomizedSearchCV
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline, make_union
from sklearn.preprocessing import (
    FunctionTransformer,
    KBinsDiscretizer,
    OneHotEncoder,
    OrdinalEncoder,
    PolynomialFeatures,
    SplineTransformer,
    StandardScaler,
    TargetEncoder,
)
from sklearn.svm import SVC
from sklearn.utils import all_estimators
from sklearn.utils._test_common.instance_generator import _construct_instances

import codistill as cd
from codistill.core.errors import CheckpointError, LearnerError
from codistill.learners.portable.saved_learner import load_transformer, save_transformer
from codistill.learners.portable.skops_archive import load_own_estimator, unzipped

LABELS = np.arange(60) % 3
X = np.abs(np.random.default_rng(0).normal(size=(60, 5))) + LABELS[:, None]
GAPS = np.where(np.random.default_rng(1).random(X.shape) < 0.1, np.nan, X)
WORDS = np.array(["red", "green", "blue", "grey"], dtype=object)[np.arange(120).reshape(60, 2) % 4]
HOLES = np.where(np.arange(120).reshape(60, 2) % 7 == 0, None, WORDS)  # missing words

# Not for rows of numbers (text, images, dicts, labels, square matrices), or not for others than those of fit (TSNE).
OTHER_SAMPLES = {
    "DictVectorizer", "FeatureHasher", "HashingVectorizer", "PatchExtractor", "KernelCenterer",
    "LabelBinarizer", "LabelEncoder", "MultiLabelBinarizer", "SparseCoder", "TSNE",
}  # fmt: skip
REFUSED = {"Birch"}  # which skops cannot write
EVERY = {
    name: cls
    for kind in ("classifier", "regressor", "transformer")
    for name, cls in all_estimators(kind)
    if name not in OTHER_SAMPLES | REFUSED and cls.__module__.startswith("sklearn.")
}


def fit(estimator: Any, x: Any, y: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # too few rows, too few iterations
        return estimator.fit(x, y)


def alike(one: np.ndarray, other: np.ndarray) -> bool:
    """Equal to the bit, also in text."""
    return one.dtype == other.dtype and one.shape == other.shape and (
        one.tobytes() == other.tobytes() if one.dtype != object else bool((one == other).all())
    )  # fmt: skip


def check_loads(estimator: Any, x: Any) -> None:
    """Saved and loaded without the estimator at hand, it answers the same to the bit."""
    again = load_transformer(save_transformer(estimator, "Ann"))
    assert type(again) is type(estimator)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted, found = answers(estimator, x), answers(again, x)
    assert wanted
    assert all(map(alike, wanted, found))


def seeded(estimator: Any) -> Any:
    """Those that draw at random when they are asked draw the same."""
    named = [name for name in estimator.get_params() if name.endswith("random_state")]
    return estimator.set_params(**dict.fromkeys(named, 0))


@pytest.mark.parametrize("name", EVERY)
def test_every_estimator_answers_the_same_from_its_file(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # deprecated classes
        made = seeded(clone(next(iter(_construct_instances(EVERY[name])))))
    two = (LABELS > 0).astype(int)
    columns = np.stack([two, 1 - two], axis=1)
    for x, y in ((X, LABELS), (X, two), (X, columns), (X[:, :1], LABELS), (X, LABELS + 1.0)):
        try:
            fit(made, x, y)
            break
        except (ValueError, IndexError):  # two classes only, several outputs only, one feature only, values above 0
            continue
    check_loads(made, x[::-1].copy())


@pytest.mark.parametrize("name", SAVED)
def test_saved_estimators_with_codes_and_missing_values(name: str) -> None:
    check_loads(fitted(name), rows(name).copy())


def with_gaps(transformer: Any) -> Any:
    """A model after a transformer that fills in what is missing."""
    return make_pipeline(transformer, LogisticRegression())


MESSY = {
    "imputer": (with_gaps(SimpleImputer()), GAPS),
    "imputer, median": (with_gaps(SimpleImputer(strategy="median", add_indicator=True)), GAPS),
    "imputer, constant": (with_gaps(SimpleImputer(strategy="constant", fill_value=-1.0)), GAPS.astype(np.float32)),
    "imputer of neighbours": (with_gaps(KNNImputer()), GAPS),
    "imputer, iterative": (with_gaps(IterativeImputer(max_iter=2, random_state=0)), GAPS),
    "imputer, sampling": (IterativeImputer(max_iter=2, sample_posterior=True, random_state=0), GAPS),
    "indicator": (make_union(SimpleImputer(), MissingIndicator()), GAPS),
    "forest with gaps": (RandomForestClassifier(3, random_state=0), GAPS),
    "boosting with gaps": (HistGradientBoostingClassifier(max_iter=2), GAPS),
    "bins": (with_gaps(make_pipeline(SimpleImputer(), KBinsDiscretizer(4))), GAPS),
    "splines": (with_gaps(make_pipeline(SimpleImputer(), SplineTransformer(4, extrapolation="periodic"))), GAPS),
    "polynomials": (with_gaps(make_pipeline(SimpleImputer(), StandardScaler(), PolynomialFeatures())), GAPS),
    "words, most frequent": (SimpleImputer(strategy="most_frequent", missing_values=None), HOLES),
    "words, constant": (SimpleImputer(strategy="constant", fill_value="none", missing_values=None), HOLES),
    "words, one-hot": (with_gaps(OneHotEncoder(handle_unknown="ignore")), WORDS),
    "words, text dtype": (with_gaps(OneHotEncoder(drop="first", sparse_output=False)), WORDS.astype(str)),
    "words, rare": (with_gaps(OneHotEncoder(max_categories=2)), WORDS),
    "words, ordinal": (OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=-1), WORDS),
    "words, target": (with_gaps(TargetEncoder(cv=2, random_state=0)), WORDS),
    "words and numbers": (
        with_gaps(make_column_transformer((OneHotEncoder(), slice(0, 2)), remainder=SimpleImputer())),
        np.concatenate([WORDS, GAPS.astype(object)], axis=1),
    ),
    "a frame": (
        with_gaps(make_column_transformer((OneHotEncoder(), ["colour"]), (SimpleImputer(), ["size"]))),
        pd.DataFrame({"colour": WORDS[:, 0].astype(object), "size": GAPS[:, 0]}),
    ),
    "text labels": (make_pipeline(StandardScaler(), SVC()), X),
    "search": (GridSearchCV(LogisticRegression(), {"C": [0.1, 1.0]}, scoring="accuracy"), X),
    "random search": (RandomizedSearchCV(with_gaps(SimpleImputer()), {"logisticregression__C": [1]}, n_iter=1), GAPS),
    "functions of numpy": (make_pipeline(FunctionTransformer(np.log1p), LogisticRegression()), X),
    "a choice of features": (make_pipeline(SelectFromModel(RandomForestClassifier(3)), SVC()), X),
    "manhattan": (KNeighborsClassifier(algorithm="ball_tree", metric="manhattan"), X),
    "a metric with numbers": (
        KNeighborsClassifier(algorithm="ball_tree", metric="seuclidean", metric_params={"V": np.arange(1.0, 6.0)}), X,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MESSY)
def test_missing_values_and_text(name: str) -> None:
    estimator, x = MESSY[name]
    labels = np.array(["a", "b", "c"])[LABELS] if name == "text labels" else LABELS
    check_loads(fit(clone(estimator), x, labels), x.copy())


def test_the_target_may_be_transformed() -> None:
    made = TransformedTargetRegressor(Ridge(), func=np.log1p, inverse_func=np.expm1)
    check_loads(fit(made, X, X[:, 0]), X + 1)


# --- through an agent ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prepare",
    [
        SimpleImputer(),
        make_pipeline(SimpleImputer(strategy="median"), StandardScaler()),
        ColumnTransformer([("codes", OneHotEncoder(handle_unknown="ignore"), [0])], remainder=SimpleImputer()),
        KBinsDiscretizer(3),
    ],
    ids=["imputer", "pipeline", "columns", "bins"],
)
def test_an_agent_with_missing_values_answers_the_same_from_its_file(prepare: Any, tmp_path: Any) -> None:
    x = X.copy() if isinstance(prepare, KBinsDiscretizer) else GAPS.copy()
    x[:, 0] = np.arange(60) % 4
    names = np.array(["low", "middle", "high"])[LABELS]
    models = [make_pipeline(SimpleImputer(), LogisticRegression()), RandomForestClassifier(3)]
    agents = [cd.Agent("ab"[i], model, x[i::2], names[i::2], prepare=prepare) for i, model in enumerate(models)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = cd.Federation(agents, cd.Alone(refit=True), seed=0).run(
            1, runtime="simulation", alone=False, progress=False
        )
    for name in "ab":
        loaded = cd.load(result.agents[name].save(tmp_path / name))
        assert np.array_equal(loaded.decision_function(x), result.agents[name].decision_function(x))
        assert np.array_equal(loaded.predict(x), result.agents[name].predict(x))


def halved(x: np.ndarray) -> np.ndarray:
    """A function of one's own."""
    return x / 2


def test_a_transformer_that_cannot_be_loaded_is_refused_on_save() -> None:
    with pytest.raises(LearnerError, match=r"prepare of Ann must be.*read again.*Birch"):
        save_transformer(fit(Birch(), X, LABELS), "Ann")


def divided(x: np.ndarray, by: float) -> np.ndarray:
    return x / by


@pytest.mark.parametrize(
    "function", [halved, lambda x: x / 2, functools.partial(divided, by=2)], ids=["named", "lambda", "partial"]
)
def test_functions_of_the_owner_are_not_in_a_file_and_come_from_the_model_that_it_is_loaded_into(
    function: Any, tmp_path: Any
) -> None:
    data = save_transformer(fit(FunctionTransformer(function), X, LABELS), "Ann")
    assert not {b"halved", b"divided"} & set(b"".join(unzipped(data).values()).split(b'"'))
    with pytest.raises(LearnerError, match="a function of its owner's, which is not in the file"):
        load_transformer(data)
    own = load_transformer(data, FunctionTransformer(function))
    np.testing.assert_array_equal(own.transform(X), X / 2)
    model = make_pipeline(FunctionTransformer(function), LogisticRegression())
    federation = cd.Federation([cd.Agent("a", model, X, LABELS)], cd.Alone(refit=True))
    trained = federation.run(1, runtime="simulation", alone=False, progress=False).agents["a"]
    path = trained.save(tmp_path / "model")
    fresh = make_pipeline(FunctionTransformer(function), LogisticRegression())
    np.testing.assert_array_equal(cd.load(path, model=fresh).predict_proba(X), trained.predict_proba(X))
    with pytest.raises(CheckpointError, match="foreign types"):
        cd.load(path, model=make_pipeline(FunctionTransformer(), LogisticRegression()))


class Halver:
    def halve(self, x: np.ndarray) -> np.ndarray:
        return x / 2


def test_a_model_that_cannot_be_loaded_is_refused_on_save(tmp_path: Any) -> None:
    model = make_pipeline(FunctionTransformer(Halver().halve), LogisticRegression())
    federation = cd.Federation([cd.Agent("a", model, X, LABELS)], cd.Alone(refit=True))
    result = federation.run(1, runtime="simulation", alone=False, progress=False)
    with pytest.raises(LearnerError, match=r"can be loaded again: LogisticRegression.*Halver"):
        result.agents["a"].save(tmp_path / "model")
    assert not (tmp_path / "model").exists()


class Renamed(TransformerMixin, BaseEstimator):
    """A transformer of one's own."""

    def fit(self, x: np.ndarray, y: Any = None) -> Renamed:
        self.made_, self.arguments_ = 3, ("touch called",)
        return self

    def transform(self, x: np.ndarray) -> np.ndarray:
        return x


KEY_TYPES = {"__class__": "list", "__module__": "builtins", "__loader__": "ListNode", "content": [], "__id__": 2}
EMPTY = {**KEY_TYPES, "__class__": "dict", "__loader__": "DictNode", "content": {}, "key_types": KEY_TYPES}


@pytest.mark.parametrize("called", ["os.system", "subprocess.Popen"])
def test_a_file_for_a_transformer_of_ones_own_calls_nothing(
    called: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    data = save_transformer(Renamed().fit(X), "Ann")
    assert isinstance(load_transformer(data, Renamed()), Renamed)
    attributes = outline_of(data)["content"]["content"]
    call = {"__reduce__": {"args": attributes["arguments_"]}, "content": EMPTY, "__id__": 1}
    hostile = with_made(data, called, "LossNode", call)
    with pytest.raises(LearnerError, match=f"foreign types {called}"):
        load_transformer(hostile, Renamed())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("loader", "rest"),
    [
        ("ListNode", {"content": []}),
        ("SetNode", {"content": []}),
        ("TupleNode", {"content": []}),
        ("DictNode", {"content": {}, "key_types": KEY_TYPES}),
        ("ConstructorFromReduceNode", {"content": {**KEY_TYPES, "__class__": "tuple", "__loader__": "TupleNode"}}),
    ],
)
def test_a_file_for_a_model_of_ones_own_calls_no_function(loader: str, rest: dict[str, Any]) -> None:
    data = save_transformer(Renamed().fit(X), "Ann")
    assert isinstance(load_own_estimator(data, Renamed()), Renamed)
    with pytest.raises(CheckpointError, match=r"a call of numpy\.show_config"):
        load_own_estimator(with_made(data, "numpy.show_config", loader, {**rest, "__id__": 1}), Renamed())


def outline_of(data: bytes) -> dict[str, Any]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        found: dict[str, Any] = json.loads(archive.read("schema.json"))
    return found


def with_made(data: bytes, called: str, loader: str, rest: dict[str, Any]) -> bytes:
    """An archive of `Renamed` in which the attribute made_ is what some loader makes by a call."""
    outline = outline_of(data)
    module, _, name = called.rpartition(".")
    outline["content"]["content"]["made_"] = {"__class__": name, "__module__": module, "__loader__": loader, **rest}
    hostile = io.BytesIO()
    with zipfile.ZipFile(hostile, "w") as archive:
        archive.writestr("schema.json", json.dumps(outline))
    return hostile.getvalue()
