"""Scikit-learn learners: soft targets, unseen classes, refusals that name a way out, state to the bit."""

import warnings

import numpy as np
import pytest
from lightgbm import LGBMClassifier, LGBMRegressor
from sklearn.base import BaseEstimator, ClassifierMixin, clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.cluster import KMeans
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.ensemble import (
    AdaBoostClassifier,
    BaggingClassifier,
    BaggingRegressor,
    ExtraTreesClassifier,
    GradientBoostingClassifier,
    GradientBoostingRegressor,
    HistGradientBoostingClassifier,
    HistGradientBoostingRegressor,
    RandomForestClassifier,
    RandomForestRegressor,
    StackingClassifier,
    VotingClassifier,
)
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process import GaussianProcessClassifier
from sklearn.linear_model import LogisticRegression, Ridge, RidgeClassifier, SGDClassifier
from sklearn.model_selection import GridSearchCV, RandomizedSearchCV
from sklearn.multioutput import MultiOutputRegressor
from sklearn.naive_bayes import GaussianNB
from sklearn.neighbors import KNeighborsClassifier, KNeighborsRegressor
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC, SVR, LinearSVC
from sklearn.tree import DecisionTreeClassifier

import codistill as cd
from codistill.core.errors import CheckpointError, LearnerError
from codistill.core.rng import seed_libraries
from codistill.learners import as_learner
from codistill.learners.ability import Ability
from codistill.learners.portable import open_model
from codistill.learners.sklearn import SklearnLearner, labelled_copies
from codistill.wire.state import pack, unpack


def toy(n=40, d=4, classes=3, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, d)).astype(np.float32)
    x[:, 0] += np.arange(n) % classes
    return x, np.eye(classes, dtype=np.float32)[np.arange(n) % classes]


def soft(hard, seed=0):
    noise = np.random.default_rng(seed).dirichlet(np.ones(hard.shape[1]), size=len(hard))
    return (0.7 * hard + 0.3 * noise).astype(np.float32)


class Recorder(ClassifierMixin, BaseEstimator):
    """A classifier that remembers what it was given."""

    def fit(self, x, y, sample_weight=None):
        self.given_ = x, y, sample_weight
        self.classes_ = np.unique(y)
        return self

    def predict_proba(self, x):
        return np.full((len(x), len(self.classes_)), 1 / len(self.classes_))


class NoGaps(Recorder):
    """A classifier that takes no labels but 0 .. k-1, as XGBoost does."""

    def fit(self, x, y, sample_weight=None):
        if not np.array_equal(np.unique(y), np.arange(len(np.unique(y)))):
            raise ValueError(f"Expected: {np.arange(len(np.unique(y)))}, got {np.unique(y)}")
        return super().fit(x, y, sample_weight)


class Passing(LogisticRegression):
    """A sub-class that passes everything on."""

    def fit(self, *args, **options):
        return super().fit(*args, **options)


def test_a_sub_class_that_passes_everything_on_takes_sample_weights_as_its_parent_does():
    x, hard = toy()
    learner, parent = SklearnLearner(Passing()), SklearnLearner(LogisticRegression())
    assert Ability.PREDICT in learner.abilities
    for each in (learner, parent):
        each.fit(x, soft(hard))
    assert np.array_equal(learner.predict(x), parent.predict(x))


def test_options_that_a_sub_class_hides_are_asked_for():
    class Hiding(LogisticRegression):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)

    with pytest.raises(LearnerError, match=r"Hiding must name its options in __init__.*Write them out"):
        SklearnLearner(Hiding(C=2.0))


@pytest.mark.parametrize(
    "model",
    [
        LGBMClassifier(n_estimators=2),
        make_pipeline(StandardScaler(), LGBMClassifier(n_estimators=2)),
        MultiOutputRegressor(LGBMRegressor(n_estimators=2)),
    ],
    ids=["classifier", "pipeline", "wrapped"],
)
def test_lightgbm_writes_and_warns_nothing_unless_it_is_told_to(model, capfd):
    x, hard = toy(n=12)  # too few for a split
    learner = SklearnLearner(model)
    learner.fit(x, soft(hard))
    learner.predict(x)
    assert capfd.readouterr() == ("", "")
    assert SklearnLearner(LGBMClassifier(verbose=0)).estimator.get_params().get("verbosity") is None


# --- what an estimator is given -------------------------------------------------------------------


def test_labels_are_passed_straight():
    x, hard = toy(n=6)
    recorder = Recorder()
    SklearnLearner(recorder).fit(x, hard)
    rows, labels, weights = recorder.given_
    assert np.array_equal(rows, x)
    assert labels.tolist() == [0, 1, 2, 0, 1, 2]
    assert weights is None


def test_soft_labels_become_weighted_copies():
    x = np.array([[1.0], [2.0], [3.0]], dtype=np.float32)
    targets = np.array([[0.25, 0.75, 0], [1, 0, 0], [0, 0.5, 0.5]])
    recorder = Recorder()
    SklearnLearner(recorder).fit(x, targets)
    rows, labels, weights = recorder.given_
    copies = [(1, 0, 0.25), (1, 1, 0.75), (2, 0, 1.0), (3, 1, 0.5), (3, 2, 0.5)]
    assert list(zip(rows[:, 0].tolist(), labels.tolist(), weights.tolist(), strict=True)) == copies


def test_weighted_copies_minimise_the_soft_cross_entropy():
    """A tree of depth 0 predicts the mean of the soft labels, which is what minimises Σ CE(tᵢ, p)."""
    x, hard = toy()
    targets = soft(hard)
    learner = SklearnLearner(DecisionTreeClassifier(min_samples_leaf=10**6))
    learner.fit(x, targets)
    np.testing.assert_allclose(learner.predict(x[:2]), np.tile(targets.mean(axis=0), (2, 1)), rtol=1e-5)


def test_images_are_flattened():
    recorder = Recorder()
    images = np.arange(24, dtype=np.float32).reshape(2, 3, 2, 2)
    learner = SklearnLearner(recorder)
    learner.fit(images, np.eye(2))
    assert recorder.given_[0].shape == (2, 12)
    assert learner.predict(images).shape == (2, 2)


def test_a_pipeline_passes_the_weights_to_its_last_step():
    x, hard = toy(n=6)
    pipeline = make_pipeline(StandardScaler(), Recorder())
    learner = SklearnLearner(pipeline)
    assert Ability.PREDICT in learner.abilities
    learner.fit(x, soft(hard))
    rows, _, weights = pipeline[-1].given_
    assert len(rows) == 18
    np.testing.assert_allclose(weights, soft(hard).ravel())
    np.testing.assert_allclose(rows.mean(axis=0), 0, atol=1e-6)
    assert learner.describe() == "Recorder"


@pytest.mark.parametrize(
    "regressor",
    [
        Ridge(1e-9),
        RandomForestRegressor(3, random_state=0),
        KNeighborsRegressor(1),
        MLPRegressor(hidden_layer_sizes=4, solver="lbfgs", max_iter=2000, random_state=0),
        BaggingRegressor(n_estimators=3, random_state=0),
        MultiOutputRegressor(GradientBoostingRegressor(n_estimators=3)),
        make_pipeline(StandardScaler(), Ridge()),
        MultiOutputRegressor(LGBMRegressor(n_estimators=3, min_child_samples=2, verbose=-1)),
    ],
    ids=lambda model: str(model)[:30],
)
def test_regressors_learn_all_columns(regressor):
    x, _ = toy()
    targets = np.stack([x[:, 0], -x[:, 0], 2 * x[:, 0]], axis=1)
    learner = SklearnLearner(regressor)
    assert Ability.PREDICT in learner.abilities
    learner.fit(x, targets)
    found = learner.predict(x)
    assert (found.dtype, found.shape) == (np.float32, (40, 3))
    assert np.corrcoef(found[:, 0], targets[:, 0])[0, 1] > 0.5
    assert np.corrcoef(found[:, 1], targets[:, 1])[0, 1] > 0.5


@pytest.mark.parametrize(
    "regressor", [RandomForestRegressor(2), MLPRegressor(hidden_layer_sizes=2, solver="lbfgs", tol=0.1), Ridge(), SVR()]
)
def test_a_single_real_value_is_a_column_too(regressor):
    x, _ = toy()
    learner = SklearnLearner(regressor)
    learner.check(x, x[:, :1], "Ann")
    learner.fit(x, x[:, :1])
    assert learner.predict(x).shape == (40, 1)


# --- what it predicts -----------------------------------------------------------------------------


def test_every_class_has_a_column_seen_or_not():
    x, _ = toy()
    hard = np.eye(5, dtype=np.float32)[1 + 2 * (np.arange(40) % 2)]  # classes 1 and 3 of 5
    forest = RandomForestClassifier(3, random_state=0)
    learner = SklearnLearner(forest)
    learner.fit(x, hard)
    found = learner.predict(x)
    assert (found.dtype, found.shape) == (np.float32, (40, 5))
    assert (found[:, [0, 2, 4]] == 0).all()
    np.testing.assert_allclose(found[:, [1, 3]], forest.predict_proba(x), rtol=1e-6)


@pytest.mark.parametrize(
    "classifier", [LinearSVC(), RidgeClassifier(), SVC(), SGDClassifier(), make_pipeline(StandardScaler(), LinearSVC())]
)
def test_without_probabilities_the_predicted_label_gets_all(classifier):
    x, hard = toy()
    learner = SklearnLearner(classifier)
    learner.fit(x, soft(hard)[:, [0, 2, 1]])
    found = learner.predict(x)
    assert np.array_equal(found, np.eye(3)[classifier.predict(x)])
    assert found.dtype == np.float32


def test_a_shard_with_one_class_is_certain_of_it():
    x, _ = toy()
    for model in (RandomForestClassifier(2), LGBMClassifier(n_estimators=2, verbose=-1)):
        learner = SklearnLearner(model)
        hard = np.eye(3)[np.ones(40, dtype=int)]
        learner.check(x, hard, "Ann")
        learner.fit(x, hard)
        assert np.array_equal(learner.predict(x), hard)


def test_labels_without_gaps_for_those_that_insist():
    x, _ = toy(n=6)
    hard = np.eye(4)[[1, 3, 1, 3, 1, 3]]
    model = NoGaps()
    learner = SklearnLearner(model)
    learner.fit(x, hard)
    assert model.given_[1].tolist() == [0, 1, 0, 1, 0, 1]
    assert np.array_equal(learner.predict(x), np.tile([0, 0.5, 0, 0.5], (6, 1)))
    restored = SklearnLearner(NoGaps())
    restored.restore(unpack(pack(learner.state())))
    assert np.array_equal(restored.predict(x), learner.predict(x))
    learner.fit(x, np.full((6, 4), 0.25))  # later, all classes
    assert np.array_equal(learner.predict(x), np.full((6, 4), 0.25))


def test_a_forest_draws_from_the_global_seed():
    x, hard = toy()
    learners = [SklearnLearner(ExtraTreesClassifier(3, max_depth=2)) for _ in range(3)]
    for learner, seed in zip(learners, [1, 1, 2], strict=True):
        seed_libraries(seed, "agent", 0)
        learner.fit(x, soft(hard))
    one, same, other = (learner.predict(x) for learner in learners)
    assert np.array_equal(one, same)
    assert not np.array_equal(one, other)


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model",
    [
        KNeighborsClassifier(3),
        make_pipeline(StandardScaler(), KNeighborsClassifier(3)),
        VotingClassifier([("near", KNeighborsClassifier(3)), ("bayes", GaussianNB())], voting="soft"),
        CalibratedClassifierCV(KNeighborsClassifier(3)),
    ],
    ids=lambda model: str(model)[:50],
)
def test_nearest_neighbours_learn_labels_and_no_soft_targets(model):
    x, hard = toy()
    learner = SklearnLearner(model)
    assert Ability.PREDICT not in learner.abilities
    learner.fit(x, hard)
    assert learner.predict(x).shape == hard.shape
    with pytest.raises(LearnerError, match=r"copies of a row.*its nearest neighbours.*KNeighborsRegressor"):
        learner.fit(x, soft(hard))
    assert "KNeighborsRegressor" in learner.advice(Ability.PREDICT)


@pytest.mark.parametrize(
    "model",
    [
        MLPClassifier(8, max_iter=2000, random_state=0),
        GaussianProcessClassifier(),
        make_pipeline(StandardScaler(), LinearDiscriminantAnalysis()),
        BaggingClassifier(KNeighborsClassifier(3), random_state=0),
        CalibratedClassifierCV(LinearDiscriminantAnalysis()),
        VotingClassifier([("lda", LinearDiscriminantAnalysis()), ("bayes", GaussianNB())], voting="soft"),
        StackingClassifier([("lda", LinearDiscriminantAnalysis()), ("bayes", GaussianNB())]),
        GridSearchCV(LinearDiscriminantAnalysis(), {"tol": [1e-4, 1e-2]}),
        GridSearchCV(LogisticRegression(), {"C": [0.1, 1.0]}),
        make_pipeline(StandardScaler(), RandomizedSearchCV(GaussianNB(), {"var_smoothing": [1e-9, 1e-3]}, n_iter=2)),
    ],
    ids=lambda model: str(model)[:50],
)
def test_every_classifier_learns_soft_labels(model):
    x, hard = toy()
    x[:, 0] += 3 * hard.argmax(axis=1)
    learner = SklearnLearner(model)
    assert Ability.PREDICT in learner.abilities
    wrong = np.roll(hard, 1, axis=1)  # soft labels of other classes than the hard ones: what it has learnt is these
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        learner.fit(x, hard)
        learner.fit(x, 0.7 * wrong + 0.1)
    answers = learner.predict(x)
    assert answers.shape == hard.shape
    np.testing.assert_allclose(answers.sum(axis=1), 1, rtol=1e-5)
    assert np.mean(answers.argmax(axis=1) == wrong.argmax(axis=1)) > 0.6
    assert answers.max(axis=1).mean() < 0.9


def test_copies_share_labels_out_by_the_largest_remainders():
    targets = np.array([[0.5, 0.5, 0.0], [0.34, 0.33, 0.33], [0.04, 0.0, 0.96], [1.0, 0.0, 0.0]], np.float32)
    row, label = labelled_copies(targets)
    counts = np.zeros((4, 3), int)
    np.add.at(counts, (row, label), 1)
    assert counts.tolist() == [[5, 5, 0], [4, 3, 3], [0, 0, 10], [10, 0, 0]]


def test_a_search_is_done_on_single_rows_and_what_it_finds_learns_the_soft_labels():
    rows_of_fits = []

    class Counting(GaussianNB):
        def fit(self, x, y, sample_weight=None):
            rows_of_fits.append((len(x), sample_weight is not None))
            return super().fit(x, y, sample_weight)

    x, hard = toy()
    learner = SklearnLearner(GridSearchCV(Counting(), {"var_smoothing": [1e-9, 1e-6]}, cv=3))
    learner.fit(x, soft(hard))
    n, copies = len(x), int((soft(hard) > 0).sum())
    assert rows_of_fits[-2:] == [(n, False), (copies, True)]
    assert all(rows < n for rows, _ in rows_of_fits[:-2])
    expected = GaussianNB(**learner.estimator.best_params_).fit(
        x[np.nonzero(soft(hard))[0]], np.nonzero(soft(hard))[1], soft(hard)[np.nonzero(soft(hard))]
    )
    np.testing.assert_allclose(learner.predict(x), expected.predict_proba(x), rtol=1e-6)


@pytest.mark.parametrize(
    "model",
    [
        GradientBoostingRegressor(),
        HistGradientBoostingRegressor(),
        SVR(),
        BaggingRegressor(SVR()),
        LGBMRegressor(),
        make_pipeline(StandardScaler(), SVR()),
    ],
    ids=lambda model: str(model)[:30],
)
def test_single_output_regressors_are_refused_before_the_first_round(model):
    x, hard = toy()
    learner = SklearnLearner(model)
    assert Ability.PREDICT not in learner.abilities
    for act in (lambda: learner.fit(x, hard), lambda: learner.check(x, hard, "Ann")):
        with pytest.raises(LearnerError, match=r"its fit takes one output column only.*MultiOutputRegressor\(\.\.\.\)"):
            act()
    assert "MultiOutputRegressor" in learner.advice(Ability.PREDICT)


def test_negative_targets_are_for_regressors():
    x, hard = toy()
    with pytest.raises(LearnerError, match=r"classifier and needs targets of at least 0.*-0\.5.*Use a regressor"):
        SklearnLearner(LogisticRegression()).fit(x, hard - 0.5)
    SklearnLearner(Ridge()).fit(x, hard - 0.5)


class Unusable(Recorder):
    """A classifier that cannot be fitted to anything."""

    def fit(self, x, y, sample_weight=None):
        raise ValueError("solver='lbfgs' does not support penalty='l1'")


ONE_CLASS = np.eye(3, dtype=np.float32)[np.full(40, 2)]


@pytest.mark.parametrize(
    "model",
    [
        LogisticRegression(),
        make_pipeline(StandardScaler(), LogisticRegression()),
        SVC(),
        SGDClassifier(),
        GradientBoostingClassifier(n_estimators=2),
        CalibratedClassifierCV(LogisticRegression(), cv=2),
    ],
    ids=lambda model: type(model).__name__,
)
def test_a_model_that_needs_two_classes_answers_with_the_one_it_has_seen_and_learns_the_rest(model):
    x, hard = toy()
    learner = SklearnLearner(model)
    learner.check(x, ONE_CLASS, "Ann")
    assert not learner.ready
    learner.fit(x, ONE_CLASS)
    assert learner.is_constant
    assert np.array_equal(learner.predict(x[:5]), ONE_CLASS[:5])

    restored = SklearnLearner(clone(model))
    restored.restore(unpack(pack(learner.state())))
    assert restored.is_constant
    assert np.array_equal(restored.predict(x[:5]), ONE_CLASS[:5])

    if Ability.PORTABLE in learner.abilities:
        assert np.array_equal(open_model(learner.export(), x.shape[1:], 3).predict(x[:5]), ONE_CLASS[:5])

    seed_libraries(0)
    learner.fit(x, soft(hard))
    assert not learner.is_constant
    assert "frequencies" not in learner.state()
    seed_libraries(0)
    fresh = SklearnLearner(clone(model))
    fresh.fit(x, soft(hard))
    assert np.array_equal(learner.predict(x), fresh.predict(x))


def test_too_few_samples_of_a_class_leave_their_frequencies():
    """Five folds need five samples of each class; there are 39 of one and a single one of another."""
    x, _ = toy()
    targets = ONE_CLASS.copy()
    targets[0] = [1, 0, 0]
    learner = SklearnLearner(CalibratedClassifierCV(LogisticRegression(), cv=5))
    learner.fit(x, targets)
    np.testing.assert_allclose(learner.predict(x[:1]), [[1 / 40, 0, 39 / 40]], rtol=1e-6)


def test_a_model_that_cannot_be_fitted_at_all_says_so_although_there_is_one_class():
    x, hard = toy()
    with pytest.raises(LearnerError, match=r"Unusable of agent 'Ann' must be able to learn.*lbfgs.*Change its options"):
        SklearnLearner(Unusable()).check(x, ONE_CLASS, "Ann")
    for targets in (ONE_CLASS, hard, soft(hard)):
        with pytest.raises(ValueError, match="lbfgs"):
            SklearnLearner(Unusable()).fit(x, targets)


def test_a_model_that_can_start_from_one_class_is_fitted_to_it():
    x, _ = toy()
    for model in (RandomForestClassifier(2), MLPClassifier(3), LGBMClassifier(n_estimators=1, verbose=-1)):
        learner = SklearnLearner(model)
        learner.check(x, ONE_CLASS, "Ann")  # an unconverged trial does not warn
        assert not learner.ready
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            learner.fit(x, ONE_CLASS)
        assert not learner.is_constant


def test_check_accepts_ordinary_shards():
    x, hard = toy()
    for model in (LogisticRegression(), KNeighborsClassifier(), Ridge()):
        SklearnLearner(model).check(x, hard, "Ann")


def test_predicting_before_the_first_fit_is_an_error():
    learner = SklearnLearner(LogisticRegression())
    assert not learner.ready
    with pytest.raises(LearnerError, match="must be fitted before it predicts"):
        learner.predict(toy()[0])


@pytest.mark.parametrize("model", [StandardScaler(), KMeans(), make_pipeline(StandardScaler())])
def test_only_classifiers_and_regressors_are_models(model):
    with pytest.raises(LearnerError, match=r"must be a classifier or a regressor"):
        as_learner(model)


def test_as_learner_knows_estimators():
    assert isinstance(as_learner(LGBMClassifier()), SklearnLearner)
    with pytest.raises(LearnerError, match=r"agent 'Ann'.*the class Ridge itself.*Pass an instance"):
        as_learner(Ridge, "Ann")


def test_advice_names_what_would_work():
    assert "tree" in SklearnLearner(KNeighborsClassifier()).advice(Ability.PORTABLE)
    assert "torch" in SklearnLearner(KNeighborsClassifier()).advice(Ability.GRADIENTS)


# --- threads --------------------------------------------------------------------------------------


def jobs(model):
    return {name: value for name, value in model.get_params().items() if name.endswith("n_jobs")}


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (RandomForestClassifier(n_jobs=-1), {"n_jobs": 1}),
        (RandomForestClassifier(), {"n_jobs": None}),
        (LGBMClassifier(), {"n_jobs": 1}),
        (MultiOutputRegressor(LGBMRegressor()), {"n_jobs": None, "estimator__n_jobs": 1}),
        (make_pipeline(StandardScaler(), LGBMClassifier(n_jobs=4)), {"lgbmclassifier__n_jobs": 1}),
        (make_pipeline(RandomForestRegressor(n_jobs=2)), {"randomforestregressor__n_jobs": 1}),
    ],
    ids=lambda value: str(value)[:30],
)
def test_an_agent_computes_with_one_thread(model, expected):
    SklearnLearner(model)
    assert jobs(model) == expected


# --- state ----------------------------------------------------------------------------------------

MODELS = {
    "forest": lambda: RandomForestClassifier(4, random_state=0),
    "hist": lambda: HistGradientBoostingClassifier(max_iter=3, random_state=0),
    "categories": lambda: HistGradientBoostingClassifier(max_iter=2, categorical_features=[3]),
    "boosting": lambda: GradientBoostingClassifier(n_estimators=2, random_state=0),
    "logistic": lambda: LogisticRegression(),
    "mlp": lambda: MLPClassifier(4, max_iter=50, tol=1, random_state=0),
    "svm": lambda: SVC(),
    "pipeline": lambda: make_pipeline(StandardScaler(), LogisticRegression()),
    "ridge": lambda: Ridge(),
    "multi-output": lambda: MultiOutputRegressor(HistGradientBoostingRegressor(max_iter=2)),
    "lightgbm": lambda: LGBMClassifier(n_estimators=3, min_child_samples=2, verbose=-1),
    "lightgbm multi-output": lambda: MultiOutputRegressor(
        LGBMRegressor(n_estimators=3, min_child_samples=2, verbose=-1)
    ),
    "lightgbm pipeline": lambda: make_pipeline(StandardScaler(), LGBMClassifier(n_estimators=2, verbose=-1)),
    "recorder": Recorder,
}


@pytest.mark.parametrize("name", MODELS)
def test_a_fitted_model_returns_from_its_checkpoint_to_the_bit(name):
    x, hard = toy()
    x[:, 3] = np.arange(40) % 4
    learner, other = SklearnLearner(MODELS[name]()), SklearnLearner(MODELS[name]())
    learner.fit(x, soft(hard))
    other.restore(unpack(pack(learner.state())))
    assert other.ready
    assert np.array_equal(other.predict(x), learner.predict(x))
    assert other.predict(x).shape == hard.shape
    for each in (learner, other):  # and can be fitted again
        seed_libraries(3)
        each.fit(x, soft(hard, seed=1))
    assert np.array_equal(other.predict(x), learner.predict(x))


def test_an_unfitted_model_has_a_state_too():
    learner, other = (SklearnLearner(RandomForestClassifier(2)) for _ in range(2))
    x, hard = toy()
    other.fit(x, hard)
    other.restore(unpack(pack(learner.state())))
    assert not other.ready


def test_a_checkpoint_of_another_class_is_refused():
    x, hard = toy()
    learner = SklearnLearner(DecisionTreeClassifier())
    learner.fit(x, hard)
    with pytest.raises(CheckpointError, match=r"DecisionTreeClassifier in place of a Ridge.*Resume with the recipe"):
        SklearnLearner(Ridge()).restore(learner.state())


def test_what_lies_in_a_checkpoint_must_be_the_owners():
    x, hard = toy()
    learner = SklearnLearner(MultiOutputRegressor(LGBMRegressor(n_estimators=1, verbose=-1)))
    learner.fit(x, hard)
    with pytest.raises(CheckpointError, match=r"foreign types lightgbm"):
        SklearnLearner(MultiOutputRegressor(Ridge())).restore(learner.state())


# --- class weights by the names of the classes ------------------------------------------------------------------------

WORDS = ("ill", "odd", "well")
WEIGHTS = {"ill": 9.0, "odd": 1.0, "well": 0.2}


def weighted(model, weights, names):
    """Answers of an agent alone, whose labels have these names."""
    x, targets = toy(60)
    y = np.array(names)[targets.argmax(axis=1)]
    made = cd.Federation([cd.Agent("a", model(weights), x, y)], cd.Alone(refit=True))
    return made.run(1, runtime="simulation", alone=False, progress=False).agents["a"].decision_function(x)


@pytest.mark.parametrize(
    "model",
    [
        lambda w: LogisticRegression(class_weight=w),
        lambda w: make_pipeline(StandardScaler(), LogisticRegression(class_weight=w)),
        lambda w: RandomForestClassifier(4, class_weight=w, random_state=0),
        lambda w: SVC(class_weight=w, random_state=0),
        lambda w: RidgeClassifier(class_weight=w),
        lambda w: SGDClassifier(class_weight=w, loss="log_loss", random_state=0),
        lambda w: AdaBoostClassifier(
            DecisionTreeClassifier(max_depth=2, class_weight=w), n_estimators=2, random_state=0
        ),
        lambda w: CalibratedClassifierCV(LogisticRegression(class_weight=w), cv=2),
        lambda w: GridSearchCV(LogisticRegression(), {"class_weight": [w], "C": [1.0]}, cv=2),
        lambda w: LGBMClassifier(n_estimators=2, class_weight=w, min_child_samples=2),
    ],
    ids=["linear", "pipeline", "forest", "svc", "ridge", "sgd", "boosted trees", "calibrated", "search", "lightgbm"],
)
def test_class_weights_are_by_the_names_of_the_labels(model):
    """As with labels 0, 1, 2 and weights by these, which scikit-learn takes itself; and not as without weights."""
    expected = weighted(model, dict(enumerate(WEIGHTS.values())), (0, 1, 2))
    np.testing.assert_array_equal(weighted(model, WEIGHTS, WORDS), expected)
    numbers = dict(zip((1, 2, 3), WEIGHTS.values(), strict=True))
    np.testing.assert_array_equal(weighted(model, numbers, (1, 2, 3)), expected)
    assert not np.array_equal(weighted(model, None, WORDS), expected)


def test_weights_that_are_left_out_are_1_also_where_an_agent_lacks_the_class():
    def model(weights):
        return LogisticRegression(class_weight=weights)

    np.testing.assert_array_equal(
        weighted(model, {"ill": 9.0}, WORDS), weighted(model, {"ill": 9.0, "odd": 1.0, "well": 1.0}, WORDS)
    )
    x, targets = toy(60)
    y = np.array(WORDS)[targets.argmax(axis=1)]
    some = y != "ill"
    agents = [
        cd.Agent("a", model({"ill": 9.0}), x, y),
        cd.Agent("b", model({"ill": 9.0}), x[some], y[some]),
        cd.Agent("c", model(None), x[some], y[some]),
    ]
    result = cd.Federation(agents, cd.Alone(refit=True)).run(1, runtime="simulation", alone=False, progress=False)
    assert not result.agents["b"].learner.is_constant
    np.testing.assert_array_equal(*(result.agents[name].decision_function(x) for name in "bc"))


def test_class_weights_of_a_model_stay_as_its_owner_wrote_them():
    estimator = make_pipeline(StandardScaler(), LogisticRegression(class_weight={1: 2.0, 3: 4.0}))
    for _ in range(2):  # so a second federation of the same estimator finds names again
        weighted(lambda _: estimator, None, (1, 2, 3))
        assert estimator[-1].class_weight == {1: 2.0, 3: 4.0}


@pytest.mark.parametrize(
    ("weights", "names", "found", "do"),
    [
        ({"il": 2.0}, WORDS, "'il'", "Did you mean 'ill'?"),
        ({0: 2.0, 1: 1.0}, (1, 2, 3), "0", "Known: 1, 2, 3."),
        ({"ill": 2.0}, (0, 1, 2), "'ill'", "Known: 0, 1, 2."),
        ({0: 2.0, 7: 1.0}, WORDS, "0", "Known: ill, odd, well."),
    ],
)
def test_class_weights_of_unknown_classes_are_refused(weights, names, found, do):
    for make in (LogisticRegression, lambda **options: make_pipeline(StandardScaler(), SVC(**options))):
        with pytest.raises(LearnerError, match="class_weight of .* of agent 'a' names an unknown class") as caught:
            weighted(lambda each, make=make: make(class_weight=each), weights, names)
        assert (caught.value.found, caught.value.do) == (found, do)
