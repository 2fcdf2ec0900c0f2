"""Did you mean: by edit distance, in any order of words, and by shared words."""

import pytest

from codistill.core.errors import closest, edit_distance, nearest

TABLE = ["age at diagnosis", "pressure (blood)", "Hue", "sex", "local_epochs", "cholesterol_mg", "marker 1", "marker 2"]


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("blood_pressure", "pressure (blood)"),  # the same words in another order
        ("pressure", "pressure (blood)"),  # one word of two
        ("bloodpresure", "pressure (blood)"),  # like "blood pressure" without the space, misspelt
        ("presure blood", "pressure (blood)"),
        ("diagnosis age", "age at diagnosis"),
        ("age", None),  # one word of three says too little
        ("epochs", "local_epochs"),
        ("local_epoch", "local_epochs"),
        ("lcoal_epochs", "local_epochs"),
        ("HUE ", "Hue"),
        ("se", "sex"),
        ("sxe", "sex"),
        ("cholesterol", "cholesterol_mg"),
        ("marker 3", "marker 1"),  # both are as similar: the first by name
        ("", None),
        ("weight", None),
    ],
)
def test_the_name_that_was_probably_meant(name, meant):
    assert closest(name, TABLE) == meant
    assert nearest(name, TABLE) == (f"Did you mean '{meant}'?" if meant else f"Known: {', '.join(sorted(TABLE))}.")
    assert closest(name, TABLE[::-1]) == meant


@pytest.mark.parametrize(
    ("one", "other", "edits"),
    [("", "", 0), ("", "abc", 3), ("abc", "abc", 0), ("abc", "abd", 1), ("abc", "bc", 1), ("ab", "ba", 1),
     ("kitten", "sitting", 3), ("abcd", "badc", 2)],
)  # fmt: skip
def test_the_edit_distance_counts_inserted_dropped_replaced_and_swapped_letters(one, other, edits):
    assert edit_distance(one, other) == edit_distance(other, one) == edits


def test_of_equal_words_the_name_that_is_written_more_alike_wins():
    assert closest("blood pressure", ["pressure blood", "blood_pressure"]) == "blood_pressure"


def test_very_long_names_are_compared_by_their_beginning():
    assert closest("a" * 100_000, ["a" * 99_999, "b"]) == "a" * 99_999
