"""Learners by name: every name builds, and every mistake is a sentence."""

import numpy as np
import pytest

from codistill.core.errors import CodistillError, LearnerError, RecipeError
from codistill.learners import zoo
from codistill.learners.ability import Ability, Learner
from codistill.learners.catalogue import ALIASES, Training, entries, make_learner
from codistill.learners.portable import open_model
from codistill.learners.torch import TorchLearner

X = np.random.default_rng(0).normal(size=(30, 4)).astype(np.float32)
TARGETS = np.eye(3, dtype=np.float32)[np.arange(30) % 3]
# The zoo's larger ones have tests of their own; xgboost is no development dependency.
HANDY = ("mlp", "logistic", "kernel_ridge", *(name for name in ALIASES if name != "xgboost"))


@pytest.mark.parametrize("name", HANDY)
def test_every_name_is_a_learner_that_learns(name):
    learner = make_learner(name, {}, (4,), 3)
    assert isinstance(learner, Learner)
    learner.fit(X, TARGETS)
    answer = learner.predict(X)
    assert answer.shape == (30, 3)
    assert np.isfinite(answer).all()


def test_the_list_has_every_name_once_with_its_library_and_words():
    listed = entries()
    names = [entry.name for entry in listed]
    assert sorted(names) == sorted({*zoo.names(), *ALIASES, "kernel_ridge", "pipeline"})
    assert len(names) == len(set(names))
    assert all(entry.library and entry.description for entry in listed)


def test_any_estimator_by_its_full_name():
    learner = make_learner("sklearn.discriminant_analysis.LinearDiscriminantAnalysis", {"solver": "lsqr"}, (4,), 3)
    assert learner.describe() == "LinearDiscriminantAnalysis"
    assert learner.estimator.solver == "lsqr"


def test_options_of_training_and_of_the_architecture():
    learner = make_learner("mlp", {"lr": 0.5, "epochs": 2, "batch_size": 8, "hidden": [5]}, (4,), 3)
    assert isinstance(learner, TorchLearner)
    assert (learner.epochs, learner.batch_size) == (2, 8)
    assert learner.optimiser.param_groups[0]["lr"] == 0.5
    assert learner.module.architecture.options["hidden"] == (5,)


def test_options_of_training_are_those_of_the_torch_learner():
    """What is said of them in the catalogue must not fall behind."""
    import inspect

    options = list(inspect.signature(TorchLearner.__init__).parameters)[2:]
    options.remove("device")  # of an agent, not of its learner
    assert list(Training.__dataclass_fields__) == options


@pytest.mark.parametrize(
    ("kind", "options", "error", "words"),
    [
        ("mpl", {}, LearnerError, ["'codistill learners'", "'mpl'", "Did you mean 'mlp'?"]),
        ("torch.nn.Linear", {}, LearnerError, ["'torch.nn.Linear'", "Known: ", "random_forest"]),
        ("os.system", {}, LearnerError, ["'codistill learners'", "'os.system'"]),
        ("sklearn.svm.SVCC", {}, LearnerError, ["no 'SVCC' in sklearn.svm", "Did you mean 'SVC'?"]),
        ("sklearn.smv.SVC", {}, LearnerError, ["must be importable", "sklearn.smv", "Check the spelling"]),
        ("sklearn", {}, LearnerError, ["must be an estimator's full name"]),
        ("sklearn.", {}, LearnerError, ["must be an estimator's full name"]),
        ("sklearn..SVC", {}, LearnerError, ["'sklearn..SVC'"]),
        ("sklearn.svm", {}, LearnerError, ["must be an estimator", "Name a class with fit and predict"]),
        ("sklearn.datasets.load_wine", {}, LearnerError, ["must be an estimator"]),
        ("sklearn.preprocessing.StandardScaler", {}, LearnerError, ["must be a classifier or a regressor"]),
        ("mlp", {"widht": 3}, LearnerError, ["Unknown option 'widht' for mlp."]),
        ("mlp", {"hiden": [3]}, LearnerError, ["'hiden'", "Did you mean 'hidden'?"]),
        ("mlp", {"hidden": "wide"}, LearnerError, ["'mlp' takes these options", "wide"]),
        ("mlp", {"lr": -1.0}, RecipeError, ["learner.lr must be above 0", "-1.0"]),
        ("mlp", {"lr": "fast"}, RecipeError, ["learner.lr must be a number", "'fast'"]),
        ("mlp", {"batch_size": 0}, RecipeError, ["learner.batch_size must be at least 1"]),
        ("mlp", {"epochs": 1.5}, RecipeError, ["learner.epochs must be an integer"]),
        ("mlp", {"optimiser": "rms"}, RecipeError, ["learner.optimiser must be one of adam, adamw, sgd", "'rms'"]),
        ("mlp", {"loss": "hinge"}, RecipeError, ["learner.loss must be one of cross_entropy, squared"]),
        ("cnn", {}, LearnerError, ["takes images", "(4,)", "This shape suits: logistic, mlp"]),
        (
            "random_forest",
            {"n_tree": 3},
            LearnerError,
            ["Unknown option 'n_tree' for RandomForestClassifier."],
        ),
        (
            "random_forest",
            {"n_estimators": 0},
            LearnerError,
            ["cannot use the value of an option", "n_estimators", "[1, inf)"],
        ),
        ("random_forest", {"n_estimators": "many"}, LearnerError, ["cannot use the value of an option", "'many'"]),
        ("sklearn.ensemble.VotingClassifier", {}, LearnerError, ["VotingClassifier cannot be made from these options"]),
        ("kernel_ridge", {"c": "x"}, LearnerError, ["c, the regularisation, must be a number", "'x'"]),
        ("kernel_ridge", {"c": -1}, LearnerError, ["at least 0", "-1"]),
    ],
)
def test_every_mistake_is_a_sentence(kind, options, error, words):
    with pytest.raises(error) as caught:
        make_learner(kind, options, (4,), 3)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert isinstance(caught.value, CodistillError)


def test_a_library_that_is_not_installed_says_how_to_get_it(monkeypatch):
    from codistill.learners import catalogue

    def absent(name):
        raise ModuleNotFoundError(f"No module named '{name}'")

    monkeypatch.setattr(catalogue.importlib, "import_module", absent)
    monkeypatch.setattr(catalogue.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(LearnerError, match=r"Install xgboost: pip install 'codistill\[boosting\]'"):
        make_learner("xgboost", {}, (4,), 3)


# --- pipelines ------------------------------------------------------------------------------------


def test_a_pipeline_by_the_names_of_its_steps():
    steps = [
        "StandardScaler",
        {"kind": "sklearn.decomposition.PCA", "n_components": 2},
        {"kind": "ridge", "alpha": 2.0},
    ]
    learner = make_learner("pipeline", {"steps": steps}, (4,), 3)
    assert [type(step).__name__ for _, step in learner.estimator.steps] == ["StandardScaler", "PCA", "Ridge"]
    assert learner.estimator[-1].alpha == 2.0
    assert Ability.PORTABLE in learner.abilities
    learner.fit(X, TARGETS)
    arrived = open_model(learner.export(), (4,), 3)
    assert np.array_equal(arrived.predict(X), learner.predict(X))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "needs 'steps'.*None.*Example"),
        ({"steps": ["ridge"]}, "at least two"),
        ({"steps": ["StandardScaler", "ridge"], "alpha": 1}, "nothing else.*'alpha'"),
        ({"steps": ["ridge", "StandardScaler"]}, "but the last must transform.*Ridge at place 1 of 2.*Put it last"),
        ({"steps": ["StandardScaller", "ridge"]}, "Did you mean 'StandardScaler'"),
        ({"steps": ["StandardScaler", "mlp"]}, "must be an estimator.*'mlp'.*alone"),
        ({"steps": ["StandardScaler", {"alpha": 1}]}, "a table that says its kind"),
        ({"steps": [{"kind": "StandardScaler", "with_men": True}, "ridge"]}, "Did you mean 'with_mean'"),
    ],
)
def test_a_mistake_in_a_pipeline_is_a_sentence(options, words):
    with pytest.raises(LearnerError, match=words):
        make_learner("pipeline", options, (4,), 3)
