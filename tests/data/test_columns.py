"""Columns of tables as features: kinds, schemas, and what each mistake says."""

import numpy as np
import pandas as pd
import pytest

from codistill import Columns
from codistill.core.errors import CodistillError, DataError, RecipeError
from codistill.data.tables import read_table, read_tables


def patients():
    return pd.DataFrame(
        {
            "thal": [3.0, 7.0, np.nan, 3.0],
            "age": [63, 41, 70, 55],
            "note": ["chest pain", None, "pain at night", "no complaint"],
            "sex": ["m", "f", "f", None],
        }
    )


def test_numbers_come_first_then_categories_then_text():
    columns = Columns({"thal": "category", "sex": "category", "note": {"kind": "text", "features": 8}}).fit(patients())
    assert columns.feature_names() == ["age", "thal=3", "thal=7", "sex=f", "sex=m", *(f"note[{i}]" for i in range(8))]
    assert columns.numbers == 1
    x = columns.transform(patients())
    # Of a missing category no column is 1; a missing text has no words.
    np.testing.assert_array_equal(x[:, :5], [[63, 1, 0, 0, 1], [41, 0, 1, 1, 0], [70, 0, 0, 1, 0], [55, 1, 0, 0, 0]])
    assert not x[1, 5:].any()
    np.testing.assert_allclose(np.linalg.norm(x[[0, 2, 3], 5:], axis=1), 1)
    assert columns.describe()[1] == ("thal", "category", "one_hot of 2: 3, 7")


def test_a_schema_that_lists_everything_needs_nobodys_data(tmp_path):
    (tmp_path / "columns.toml").write_text(
        'age = "number"\n[thal]\nkind = "category"\nvalues = [3, 6, 7]\nencode = "ordinal"\n'
        '[sex]\nkind = "category"\nvalues = ["f", "m"]\nunknown = "ignore"\n'
    )
    columns = Columns.read(tmp_path / "columns.toml")
    here = columns.transform(patients())
    np.testing.assert_array_equal(here, [[63, 0, 0, 1], [41, 2, 1, 0], [70, np.nan, 1, 0], [55, 0, 0, 0]])
    elsewhere = columns.transform(pd.DataFrame({"sex": ["x"], "thal": ["6"], "age": [np.nan], "other": ["left out"]}))
    np.testing.assert_array_equal(elsewhere, [[np.nan, 1, 0, 0]])


def test_tfidf_has_the_vocabulary_of_the_training_rows():
    columns = Columns({"note": {"kind": "text", "encode": "tfidf"}})
    fitted = columns.fit(patients()[["note"]], training=np.array([0, 1]))
    x = fitted.transform(patients())
    assert x.shape == (4, 2)  # chest, pain
    np.testing.assert_allclose(x, [[2**-0.5, 2**-0.5], [0, 0], [0, 1], [0, 0]])
    with pytest.raises(DataError, match=r"needs a fitted vocabulary.*hashing, which needs no vocabulary"):
        columns.transform(patients())


@pytest.mark.parametrize(
    ("kinds", "phrases"),
    [
        ({"sex": "categry"}, ["kind of column 'sex'", "number, date, category, text", "Did you mean 'category'?"]),
        ({"sex": 3}, ["Column 'sex' must have a kind", 'sex = "category"']),
        ({"sex": {"kind": "category", "value": ["m"]}}, ["'value'", "Did you mean 'values'?"]),
        ({"sex": {"kind": "category", "values": ["m", "m"]}}, ["each once"]),
        ({"age": {"kind": "number", "values": ["1"]}}, ["values of a category", "for a number column"]),
        ({"sex": {"kind": "category", "encode": "tfidf"}}, ["must be one_hot or ordinal", "'tfidf'"]),
        ({"note": {"kind": "text", "features": 0}}, ["features must be at least 1"]),
        (
            {"sex": {"kind": "category", "values": ["m"]}, "note": "text"},
            ["'sex' of the frame must be in the schema", "'f' in data row 2", "or set unknown"],
        ),
        (
            {"sex": "category", "note": "number"},
            ["'note' of the frame must hold numbers", "'chest pain' in data row 1", '"category"'],
        ),
        ({"sex": "category"}, ["'note': 3 different texts, such as 'chest pain'", 'Columns({"note": "category"})']),
        ({"sexe": "category"}, ["must have the column 'sexe' of the schema", "Did you mean 'sex'?"]),
    ],
)
def test_a_mistake_is_named(kinds, phrases):
    with pytest.raises(CodistillError) as error:
        Columns(kinds).fit(patients()).transform(patients())
    for phrase in phrases:
        assert phrase in str(error.value)


def test_an_unreadable_schema_is_named(tmp_path):
    with pytest.raises(RecipeError, match="must be readable"):
        Columns.read(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("age = ")
    with pytest.raises(RecipeError, match=r"bad\.toml must be valid TOML"):
        Columns.read(tmp_path / "bad.toml")
    with pytest.raises(DataError, match=r"The values of category 'sex' must be known"):
        Columns({"sex": "category"}).transform(patients())


# --- in a table ------------------------------------------------------------------------------------


def table(path, rows=40, **changes):
    number = np.arange(rows)
    frame = pd.DataFrame(
        {
            "sex": np.array(["m", "f"])[number % 2],
            "height": np.where(number % 5 == 0, np.nan, number * 2.0),
            "label": number // 2 % 2,
        }
    ).assign(**changes)
    frame.to_csv(path, index=False)
    return path


def test_missing_numbers_stay_missing_and_only_numbers_are_scaled(tmp_path):
    data = read_table(table(tmp_path / "t.csv"), "label", columns={"sex": "category"})
    assert data.columns.feature_names() == ["height", "sex=f", "sex=m"]
    assert np.isnan(data.x[:, 0]).sum() + np.isnan(data.x_test[:, 0]).sum() == 8
    np.testing.assert_allclose([np.nanmean(data.x[:, 0]), np.nanstd(data.x[:, 0])], [0, 1], atol=1e-6)
    assert set(np.unique(data.x[:, 1:])) == {0, 1}
    robust = read_table(tmp_path / "t.csv", "label", columns={"sex": "category"}, scale="robust")
    low, centre, high = np.nanquantile(robust.x[:, 0], (0.25, 0.5, 0.75))
    np.testing.assert_allclose([centre, high - low], [0, 1], atol=1e-6)


def test_other_cells_can_mean_an_empty_one(tmp_path):
    height = [f"{row}" if row % 4 else "?" for row in range(40)]
    path = table(tmp_path / "t.csv", height=height)
    with pytest.raises(DataError, match=r"(?s)'\?' in data row 1.*missing_values = \[\"\?\"\]"):
        read_table(path, "label", columns={"sex": "category"})
    data = read_table(path, "label", columns={"sex": "category"}, missing_values=["?"])
    assert np.isnan(data.x[:, 0]).sum() + np.isnan(data.x_test[:, 0]).sum() == 10


def test_a_column_may_be_empty_for_one_agent_but_not_for_all(tmp_path):
    north, south = table(tmp_path / "n.csv"), table(tmp_path / "s.csv", height=np.nan, sex=np.nan)
    data = read_tables({"n": north, "s": south}, "label", columns={"sex": "category"})
    assert np.isnan(data.x[data.ids["agent"] == "s", 0]).all()
    with pytest.raises(DataError, match=r"at least one value in the training rows.*none in column 'height'"):
        read_tables({"s": south}, "label", columns={"sex": {"kind": "category", "values": ["f", "m"]}})
    with pytest.raises(DataError, match=r"category 'sex' of table 'tables' must have at least one value"):
        read_tables({"s": south}, "label", columns={"sex": "category"}, drop=["height"])


@pytest.mark.parametrize(
    ("columns", "phrase"),
    [({"label": "category"}, "'label', which is the label, dropped or an id"), ({"sx": "text"}, "Did you mean 'sex'?")],
)
def test_kinds_of_other_columns_are_refused(tmp_path, columns, phrase):
    with pytest.raises(CodistillError) as error:
        read_table(table(tmp_path / "t.csv"), "label", columns=columns)
    assert phrase in str(error.value)
