import sys

import numpy as np
import pandas as pd
import pytest

from codistill.core.errors import CodistillError, DataError, RecipeError
from codistill.data.partition import ById
from codistill.data.tables import read_table, read_tables


def toy_frame(rows=20, offset=0):
    number = np.arange(rows) + offset
    return pd.DataFrame(
        {
            "height": number * 1.5,
            "kind": np.array(["dog", "cat", "ant"])[number % 3],
            "count": number,
            "city": np.array(["Rome", "Oslo"])[number % 2],
            "note": ["free text"] * rows,
        }
    )


def write(frame, path):
    if path.suffix == ".csv":
        frame.to_csv(path, index=False)
    else:
        frame.to_parquet(path, index=False)
    return path


@pytest.mark.parametrize("suffix", [".csv", ".parquet", ".CSV"])
def test_a_table_comes_back_with_labels_ids_and_features(tmp_path, suffix):
    path = tmp_path / f"pets{suffix}"
    write(toy_frame(), path.with_suffix(suffix.lower())).rename(path)
    data = read_table(path, "kind", scale="none", drop=["note"], ids=["city"])
    assert (data.name, data.classes, data.class_names) == ("pets", 3, ("ant", "cat", "dog"))
    assert (data.x.dtype, data.y.dtype) == (np.float32, np.int64)
    assert (len(data.x), len(data.x_test)) == (16, 4)
    assert set(data.ids) == {"city"}
    for x, y in ((data.x, data.y), (data.x_test, data.y_test)):
        number = x[:, 1].astype(int)
        np.testing.assert_array_equal(x[:, 0], number * 1.5)
        # The rows are dog, cat, ant in turn, and the sorted class names are ant, cat, dog.
        np.testing.assert_array_equal(y, np.array([2, 1, 0])[number % 3])
    np.testing.assert_array_equal(data.ids["city"], np.array(["Rome", "Oslo"])[data.x[:, 1].astype(int) % 2])
    assert not data.ids["city"].dtype.hasobject


def test_features_are_standardised_by_default_and_the_split_follows_the_seed(tmp_path):
    path = write(toy_frame(), tmp_path / "pets.csv")
    data = read_table(path, "kind", drop=["note", "city"])
    np.testing.assert_allclose(data.x.mean(axis=0), 0, atol=1e-6)
    np.testing.assert_allclose(data.x.std(axis=0), 1, atol=1e-6)
    same, other = (read_table(path, "kind", drop=["note", "city"], seed=seed) for seed in (0, 1))
    np.testing.assert_array_equal(data.x, same.x)
    assert not np.array_equal(data.x, other.x)


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        ([10, 2, 30, 2], ("2", "10", "30")),
        ([1.0, 0.0, 1.0, 0.0], ("0", "1")),
        ([True, False, True, False], ("False", "True")),
        (["b", "a", "10", "2"], ("10", "2", "a", "b")),
    ],
)
def test_class_names_are_the_sorted_labels(tmp_path, labels, names):
    path = write(pd.DataFrame({"x": range(16), "label": labels * 4}), tmp_path / "t.csv")
    data = read_table(path, "label", scale="none")
    assert data.class_names == names
    read_names = np.array(data.class_names)[data.y]
    expected = [name.removesuffix(".0") for name in map(str, labels * 4)]
    np.testing.assert_array_equal(read_names, np.array(expected)[data.x[:, 0].astype(int)])


def test_nullable_and_categorical_columns_of_parquet_are_read(tmp_path):
    frame = pd.DataFrame(
        {
            "x": pd.array([1, 2, 3, 4] * 2, dtype="Int64"),
            "person": np.array([2**64 - 1, 5] * 4, dtype=np.uint64),
            "label": pd.Categorical(["b", "a"] * 4),
        }
    )
    data = read_table(write(frame, tmp_path / "t.parquet"), "label", ids=["person"])
    assert data.class_names == ("a", "b")
    assert set(data.ids["person"]) == {2**64 - 1, 5}


def test_a_named_parquet_index_is_a_column(tmp_path):
    frame = toy_frame().drop(columns=["note", "city"]).set_index("count")
    frame.to_parquet(tmp_path / "t.parquet")
    assert read_table(tmp_path / "t.parquet", "kind").x.shape[1] == 2


def changed(column, value, row=3):
    frame = toy_frame().astype({column: object})
    frame.loc[row, column] = value
    return frame


@pytest.mark.parametrize(
    ("frame", "options", "kind", "phrases"),
    [
        (toy_frame(), {"ids": []}, DataError, ["column 'city'", "'drop' or 'ids'", 'city = "category"']),
        (toy_frame(), {"label": "kin"}, DataError, ["the column 'kin'", "Did you mean 'kind'?"]),
        (toy_frame(), {"drop": ["nope"]}, DataError, ["the column 'nope'", "'height', 'kind'"]),
        (toy_frame(), {"ids": ["citty"]}, DataError, ["the column 'citty'", "Did you mean 'city'?"]),
        (toy_frame(), {"drop": ["kind"]}, RecipeError, ["only one of label, drop and ids", "'kind'"]),
        (changed("height", None), {"missing": "refuse"}, DataError, ["nan in column 'height', data row 4", "'drop'"]),
        (
            changed("height", None),
            {"missing": "skip"},
            RecipeError,
            ["one of keep, impute,", "'skip'"],
        ),
        (changed("height", np.inf), {}, DataError, ["inf in column 'height', data row 4"]),
        (changed("height", 1e300), {}, DataError, ["1e+300 in column 'height', data row 4", "32 bits"]),
        (changed("kind", None, 0), {}, DataError, ["column 'kind', data row 1 (the first row is 1)"]),
        (changed("city", None), {}, DataError, ["column 'city', data row 4"]),
        (
            changed("height", "tall"),
            {},
            DataError,
            ["'height': numbers and 'tall' in data row 4", 'missing_values = ["tall"]'],
        ),
        (
            toy_frame(),
            {"label": "height", "drop": ["note", "kind"]},
            DataError,
            ["strings or integers", "1.5"],
        ),
        (
            toy_frame(),
            {"drop": ["note", "height", "count"]},
            DataError,
            ["20 rows and 0 feature columns", "Check the file"],
        ),
        (toy_frame(0), {}, DataError, ["0 rows and"]),
        (toy_frame(3), {}, DataError, ["Table 't'", "3 samples in 3 groups", "raise test_fraction"]),
        (toy_frame(), {"test_fraction": 2.0}, RecipeError, ["data.test_fraction"]),
        (toy_frame(), {"scale": "big"}, RecipeError, ["data.scale", "'big'"]),
    ],
)
def test_a_faulty_table_names_the_file_column_and_row(tmp_path, frame, options, kind, phrases):
    path = write(frame, tmp_path / "t.csv")
    options = {"label": "kind", "drop": ["note"], "ids": ["city"]} | options
    with pytest.raises(CodistillError) as error:
        read_table(path, **options)
    assert type(error.value) is kind
    for phrase in phrases:
        assert phrase in str(error.value)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("t.csv", b""),
        ("t.csv", b"a,label\n1,2,3\n4,5,6\n"),
        ("t.csv", b"a,label\n1,2\n4,5,6\n"),
        ("t.csv", b"\xff\xfe\xfa"),
        ("t.parquet", b"no parquet"),
        ("t.parquet", b""),
    ],
)
def test_an_unreadable_file_is_named(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=f"Table .*{name} must be a readable .* Check the path and the file."):
        read_table(tmp_path / name, "label")


def test_a_missing_file_and_an_unknown_kind_of_file_are_named(tmp_path):
    with pytest.raises(DataError, match=r"must be a readable \.csv file.*nowhere.csv"):
        read_table(tmp_path / "nowhere.csv", "label")
    with pytest.raises(DataError, match=r"\.csv, \.tsv or \.parquet file. Found: .*t\.xlsx"):
        read_table(tmp_path / "t.xlsx", "label")


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    path = write(toy_frame(), tmp_path / "t.parquet")

    def without_pyarrow(path):
        raise ImportError("pyarrow")

    monkeypatch.setattr(sys.modules["pandas"], "read_parquet", without_pyarrow)
    with pytest.raises(DataError) as error:
        read_table(path, "kind")
    assert "pip install codistill[parquet]" in str(error.value)


# Labels and rows


@pytest.mark.parametrize(
    ("options", "names", "second"),
    [
        ({"label_above": 1}, ("above 1", "at most 1"), 1),
        ({"label_above": 1.5}, ("above 1.5", "at most 1.5"), 1),
        ({"label_map": {"0": "no", "1": "yes", "2": "yes"}}, ("no", "yes"), 1),
    ],
)
def test_classes_can_be_made_from_a_threshold_or_a_map(tmp_path, options, names, second):
    frame = pd.DataFrame({"x": np.arange(18), "num": [0.0, 1.0, 2.0] * 6})
    data = read_table(write(frame, tmp_path / "t.csv"), "num", scale="none", **options)
    assert data.class_names == names
    made = np.array(names)[data.y]
    for x, name in zip(data.x[:, 0].astype(int), made, strict=True):
        value = x % 3
        expected = options["label_map"][str(value)] if "label_map" in options else None
        above = options.get("label_above", 0)
        assert name == (expected or (f"above {above:g}" if value > above else f"at most {above:g}"))


@pytest.mark.parametrize(
    ("options", "phrases"),
    [
        ({"label_above": 1}, ["needs a numeric label column", "'dog'", "label_map"]),
        ({"label_map": {"dog": "pet", "cat": "pet"}}, ["contain every value", "'ant' in data row 3", "Add 'ant'"]),
    ],
)
def test_a_map_that_does_not_fit_is_refused(tmp_path, options, phrases):
    with pytest.raises(DataError) as error:
        read_table(write(toy_frame(), tmp_path / "t.csv"), "kind", drop=["note", "city"], **options)
    for phrase in phrases:
        assert phrase in str(error.value)


def test_incomplete_rows_can_be_dropped(tmp_path):
    frame = changed("height", None).assign(gaps=[None] * 10 + [1.0] * 10)
    path = write(frame, tmp_path / "t.csv")
    for drop, rows in ((["note", "gaps"], 19), (["note"], 10)):
        data = read_table(path, "kind", drop=drop, ids=["city"], missing="drop_rows")
        assert len(data.x) + len(data.x_test) == rows


def test_test_rows_are_held_out_of_every_class_of_every_id(tmp_path):
    frame = toy_frame(60)
    data = read_table(write(frame, tmp_path / "t.csv"), "kind", drop=["note"], ids=["city"], by="city")
    for city in ("Rome", "Oslo"):
        assert np.bincount(data.y_test[data.ids_test["city"] == city], minlength=3).tolist() == [2, 2, 2]
    many = frame.assign(city=[f"c{row}" for row in range(60)])
    data = read_table(write(many, tmp_path / "t.csv"), "kind", drop=["note"], ids=["city"], by="city")
    assert np.bincount(data.y_test).tolist() == [4, 4, 4], "an id of one row each has nothing to hold out"


# One file per agent


def agent_files(tmp_path, **changes):
    frames = {name: toy_frame(rows, offset) for name, rows, offset in (("zoe", 12, 0), ("abe", 9, 100))}
    frames |= changes
    return {name: write(frame, tmp_path / f"{name}.csv") for name, frame in frames.items()}


def test_the_partition_by_agent_gives_every_agent_its_own_file_back(tmp_path):
    data = read_tables(agent_files(tmp_path), "kind", scale="none", drop=["note"], ids=["city"])
    assert (len(data.x) + len(data.x_test), len(data.x_test)) == (21, 4)
    abe, zoe = ById(id="agent").split(data.y, 2, np.random.default_rng(0), ids=data.ids)
    assert set(data.x[abe, 1]) <= set(range(100, 109))
    assert set(data.x[zoe, 1]) <= set(range(12))
    assert set(data.ids) == {"city", "agent"}
    # Of each agent's rows about a fifth is held out: 2.4 of 12 and 1.8 of 9.
    assert (len(zoe), len(abe)) in {(10, 7), (9, 8)}


def test_tables_may_list_their_columns_in_another_order(tmp_path):
    turned = toy_frame(9, 100)[["note", "count", "city", "height", "kind"]]
    straight = read_tables(agent_files(tmp_path), "kind", drop=["note", "city"])
    shuffled = read_tables(agent_files(tmp_path, abe=turned), "kind", drop=["note", "city"])
    np.testing.assert_array_equal(straight.x, shuffled.x)


def test_labels_that_are_numbers_in_one_file_and_strings_in_another_are_strings(tmp_path):
    numbers = toy_frame(9).assign(kind=[7, 8, 9] * 3)
    data = read_tables(agent_files(tmp_path, abe=numbers), "kind", drop=["note", "city"])
    assert data.class_names == ("7", "8", "9", "ant", "cat", "dog")


@pytest.mark.parametrize(
    ("abe", "phrases"),
    [
        (
            toy_frame(9).assign(extra=1),
            ["must have the same columns", "'extra' only in the table of agent 'zoe' or 'abe'"],
        ),
        (toy_frame(9).drop(columns="height"), ["'height' only in the table"]),
        (toy_frame(9).assign(height="tall"), ["abe.csv", "column 'height'"]),
        (toy_frame(0), ["abe.csv", "0 rows"]),
        (toy_frame(9).assign(kind=0.5), ["the table of agent 'abe'", "0.5 in data row 1"]),
    ],
)
def test_a_faulty_table_of_one_agent_names_it(tmp_path, abe, phrases):
    with pytest.raises(DataError) as error:
        read_tables(agent_files(tmp_path, abe=abe), "kind", drop=["note"], ids=["city"])
    for phrase in phrases:
        assert phrase in str(error.value)


def test_a_column_called_agent_is_refused(tmp_path):
    files = agent_files(tmp_path, zoe=toy_frame(9).assign(agent=1), abe=toy_frame(9).assign(agent=1))
    with pytest.raises(DataError, match=r"a column 'agent' in the table of agent 'zoe'\. Rename it"):
        read_tables(files, "kind", drop=["note"], ids=["city"])


def test_no_files_is_an_error():
    with pytest.raises(RecipeError, match="at least one file"):
        read_tables({}, "kind")
