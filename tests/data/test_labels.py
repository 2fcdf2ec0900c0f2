"""Labels as users give them: classes of any kind, real values, and what is asked about."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from codistill.core.errors import DataError, RecipeError
from codistill.data.labels import CLASSIFICATION, REGRESSION, agree_on_labels, class_names


def agree(*labels, **options):
    return agree_on_labels([(f"agent '{place}'", y) for place, y in enumerate(labels)], **options)


@pytest.mark.parametrize(
    ("labels", "names", "codes"),
    [
        ([["b", "a"], ["c"]], ("a", "b", "c"), [1, 0]),
        ([np.array(["x", "y"], dtype=object)], ("x", "y"), [0, 1]),
        ([pd.Series(["x", "y"], dtype="category")], ("x", "y"), [0, 1]),
        ([[True, True]], (False, True), [1, 1]),
        ([[1, 2], [3]], (1, 2, 3), [0, 1]),
        ([np.array([2.0, 1.0])], (1, 2), [1, 0]),
        ([[-1, 1]], (-1, 1), [0, 1]),
        ([[2, "a"], ["b"]], ("2", "a", "b"), [0, 1]),
    ],
)
def test_labels_that_are_no_numbers_of_classes_are_names(labels, names, codes):
    made = agree(*labels)
    assert (made.task, made.classes, made.names) == (CLASSIFICATION, len(names), names)
    found = made.encode(labels[0], "a")
    assert found.tolist() == codes
    assert made.decode(found).tolist() == [names[code] for code in codes]


@pytest.mark.parametrize(
    ("labels", "options", "classes"),
    [
        ([[0, 1], [2]], {}, 3),
        ([[0, 4]], {}, 5),  # a gap is a class that nobody has
        ([[1, 1]], {}, 2),  # one of 0 and 1
        ([[1, 2]], {"classes": 4}, 4),
        ([np.array([0.0, 2.0])], {}, 3),
    ],
)
def test_integers_from_zero_are_used_as_they_are(labels, options, classes):
    made = agree(*labels, **options)
    assert (made.classes, made.names) == (classes, None)
    assert made.encode(labels[0], "a") is labels[0]
    assert made.shown == tuple(map(str, range(classes)))


def test_a_federation_of_as_many_classes_as_it_is_said_has_no_phantom_class():
    assert agree([1, 2], [3], classes=3).names == (1, 2, 3)
    assert agree([1, 2], classes=["1", "2", "3"]).encode([3, 1], "a").tolist() == [2, 0]


@pytest.mark.parametrize(
    ("labels", "options", "words"),
    [
        ([["benign", "ill"], ["BENIGN"]], {}, ["'BENIGN' and 'benign'"]),
        ([["benign", "benign "]], {}, ["'benign' and 'benign '"]),
        ([["a", None]], {}, ["must have a label", "row 1"]),
        ([["a", " "]], {}, ["must have a label", "row 1"]),
        ([[0.5, 1.0]], {}, ["agent '0' must be classes", "0.5 in row 0", "For a regression"]),
        ([np.arange(60)], {}, ["60 different integers, 0 to 59, among 60 labels", 'task = "classification"']),
        ([np.arange(40).repeat(50)], {"regressors": ["agent 'a' (Ridge)"]}, ["40 different", "agent 'a' (Ridge)"]),
        ([["a", "b"]], {"classes": 3}, ["must be 3 classes", "2: 'a', 'b'"]),
    ],
)
def test_what_is_not_clear_is_asked_about(labels, options, words):
    with pytest.raises(DataError) as caught:
        agree(*labels, **options)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_what_was_said_is_not_asked_about():
    assert agree(np.arange(60), task=CLASSIFICATION).classes == 60
    assert agree(np.arange(40).repeat(50)).classes == 40  # classifiers may have many classes
    assert agree(np.arange(60), classes=60).names is None


def test_real_values_may_be_flat():
    made = agree(np.arange(60), task=REGRESSION)
    assert (made.task, made.classes) == (REGRESSION, 1)
    found = made.encode(np.arange(3), "a")
    assert (found.shape, found.dtype) == ((3, 1), np.float64)
    assert agree(np.zeros((4, 2))).task == REGRESSION
    assert agree(np.zeros((4, 2))).classes == 2


def test_labels_without_names_are_numbers_and_an_error_says_where_names_are_agreed():
    made = agree([0, 1])
    with pytest.raises(DataError, match=r"class_names = .* under \[data\] of its recipe"):
        made.encode(["no", "yes"], "agent 'a'")
    with pytest.raises(DataError, match="among the classes 'no', 'yes'. Found: 'Yes'. Did you mean 'yes'"):
        agree(["no", "yes"]).encode(["Yes"], "agent 'a'")


def test_names_of_classes_are_different_words_or_integers():
    assert class_names([0, 1, 2]) is None
    assert class_names(np.array([3, 5])) == (3, 5)
    for names in ("ab", [], [0.5], ["a", "a"], [1, "1"]):
        with pytest.raises(RecipeError):
            class_names(names)
    with pytest.raises(DataError, match="'a' and 'A'"):
        class_names(["a", "A"])
