"""Objects with fit and predict of the user's own."""

import numpy as np
import pytest
from sklearn.linear_model import Ridge

from codistill.core.errors import CheckpointError, LearnerError
from codistill.learners import PlainLearner, as_learner
from codistill.learners.ability import Ability
from codistill.wire.state import pack, unpack


class Mean:
    """Predicts the mean of its targets, whatever the sample."""

    def __init__(self, name="mean"):
        self.name, self.history, self.helper = name, [], {"ridge": Ridge(0.5)}

    def fit(self, x, targets):
        self.mean = targets.mean(axis=0)
        self.history.append((len(x), float(self.mean[0])))
        self.helper["ridge"].fit(x, targets)

    def predict(self, x):
        return np.tile(self.mean, (len(x), 1))


class Odd:
    """Answers what it is told to."""

    def __init__(self, answer):
        self.answer = answer

    def fit(self, x, targets):
        pass

    def predict(self, x):
        return self.answer


def toy():
    rng = np.random.default_rng(0)
    return rng.normal(size=(6, 2, 2)), rng.dirichlet(np.ones(3), size=6)


def test_an_object_is_given_the_data_as_it_is():
    x, targets = toy()
    learner = as_learner(Mean())
    assert isinstance(learner, PlainLearner)
    assert learner.abilities == Ability.PREDICT
    assert learner.describe() == "Mean"
    given = []
    learner.model.fit = lambda *data: given.extend(data)
    learner.fit(x, targets)
    assert given[0] is x
    assert given[1] is targets


def test_it_learns_and_predicts():
    x, targets = toy()
    learner = PlainLearner(Mean())
    assert not learner.ready
    learner.fit(x.reshape(6, 4), targets)
    assert learner.ready
    found = learner.predict(x[:2].reshape(2, 4))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, np.tile(targets.mean(axis=0), (2, 1)), rtol=1e-6)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (np.zeros(6), r"shape \(6,\)"),
        (np.zeros((6, 2)), r"shape \(6, 2\)"),
        (np.zeros((5, 3)), r"shape \(5, 3\)"),
        (None, r"shape \(\), dtype object"),
        ([["a", "b", "c"]] * 6, r"dtype <U1"),
        (np.full((6, 3), np.nan), "NaN"),
        (np.full((6, 3), np.inf), "infinity"),
    ],
)
def test_any_other_answer_is_an_error_that_shows_it(answer, said):
    x, targets = toy()
    learner = PlainLearner(Odd(answer))
    learner.fit(x, targets)
    with pytest.raises(LearnerError, match=rf"predict of Odd must return.*\(6, 3\).*{said}.*not labels"):
        learner.predict(x)


def test_lists_and_integers_are_numbers_too():
    x, targets = toy()
    learner = PlainLearner(Odd([[1, 0, 2]] * 6))
    learner.fit(x, targets)
    assert np.array_equal(learner.predict(x), np.tile(np.float32([1, 0, 2]), (6, 1)))


def test_predicting_before_the_first_fit_is_an_error():
    with pytest.raises(LearnerError, match="Mean has not seen any data yet"):
        PlainLearner(Mean()).predict(toy()[0])


def test_its_attributes_return_from_a_checkpoint():
    x, targets = toy()
    x = x.reshape(6, 4)
    one, two = PlainLearner(Mean("one")), PlainLearner(Mean("two"))
    one.fit(x, targets)
    two.restore(unpack(pack(one.state())))
    assert two.ready
    assert (two.model.name, two.model.history) == ("one", one.model.history)
    assert np.array_equal(two.predict(x), one.predict(x))
    assert np.array_equal(two.model.helper["ridge"].predict(x), one.model.helper["ridge"].predict(x))


def test_what_cannot_be_saved_is_named():
    model = Mean()
    model.name = (line for line in "a generator has no attributes")
    with pytest.raises(CheckpointError, match=r"plain attributes to be saved: Mean.*Keep only arrays"):
        PlainLearner(model).state()


def test_a_checkpoint_of_another_class_is_refused():
    with pytest.raises(CheckpointError, match="Odd in place of a Mean"):
        PlainLearner(Mean()).restore(PlainLearner(Odd([1])).state())


@pytest.mark.parametrize("model", [Mean, object(), 7, lambda x: x])
def test_what_is_no_model_is_refused(model):
    with pytest.raises(LearnerError, match=r"The model of agent 'Ann' must be a torch module.*Pass an instance"):
        as_learner(model, "Ann")


def test_a_learner_stays_itself():
    learner = PlainLearner(Mean())
    assert as_learner(learner) is learner


class Separator:
    """An object that needs two classes, as a discriminant does."""

    def fit(self, x, targets):
        labels = targets.argmax(axis=1)
        if len(np.unique(labels)) < 2:
            raise ValueError("needs two classes")
        self.mean = targets.mean(axis=0)

    def predict(self, x):
        return np.tile(self.mean, (len(x), 1))


def test_an_object_that_needs_two_classes_answers_with_the_one_it_has_seen():
    x, targets = toy()
    one_class = np.tile(np.float32([0, 1, 0]), (6, 1))
    learner = PlainLearner(Separator())
    learner.fit(x, one_class)
    assert learner.is_constant
    assert np.array_equal(learner.predict(x), one_class)
    again = PlainLearner(Separator())
    again.restore(unpack(pack(learner.state())))
    assert np.array_equal(again.predict(x), one_class)
    learner.fit(x, targets)
    assert not learner.is_constant
