import io
import sys
import types
import zipfile
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from codistill.core.errors import CodistillError, DataError, RecipeError
from codistill.data import datasets as datasets
from codistill.data.datasets import catalogue, load
from codistill.data.partition import Unequal
from codistill.data.split import hold_out, scaled, split_public, with_validation_part
from codistill.data.validation import Dataset, digest, validate_samples


@pytest.fixture(autouse=True)
def no_data_folder(monkeypatch):
    monkeypatch.delenv("CODISTILL_DATA", raising=False)


def assert_says(error, *phrases):
    """Each phrase is in the message, which is made of whole sentences."""
    text = str(error.value)
    for phrase in phrases:
        assert phrase in text
    assert error.value.must.endswith(".")
    assert error.value.must[0].isupper() or error.value.must.startswith("data.")
    assert error.value.do.endswith((".", "?", "]"))


def toy_arrays(train=12, test=6, shape=(4, 5), dtype=np.uint8, classes=3):
    rng = np.random.default_rng(0)
    return {
        "x_train": rng.integers(0, 256, (train, *shape)).astype(dtype),
        "y_train": np.arange(train) % classes,
        "x_test": rng.integers(0, 256, (test, *shape)).astype(dtype),
        "y_test": np.arange(test) % classes,
    }


def write_toy(folder, name="toy", without=(), **changes):
    arrays = {**toy_arrays(), **changes}
    np.savez(folder / f"{name}.npz", **{key: value for key, value in arrays.items() if key not in without})
    return arrays


# Bundled data


@pytest.mark.parametrize(
    ("name", "total", "shape", "classes"),
    [("digits", 1797, (1, 8, 8), 10), ("breast_cancer", 569, (30,), 2), ("wine", 178, (13,), 3)],
)
def test_bundled_sets_have_their_known_sizes_and_types(name, total, shape, classes):
    data = load(name)
    assert len(data.x) + len(data.x_test) == total
    assert len(data.x_test) == round(0.2 * total)
    assert data.x.shape[1:] == data.x_test.shape[1:] == shape
    assert (data.x.dtype, data.y.dtype, data.y_test.dtype) == (np.float32, np.int64, np.int64)
    assert data.x.flags.c_contiguous
    assert data.x_test.flags.c_contiguous
    assert data.classes == len(data.class_names) == classes
    assert set(data.y) == set(data.y_test) == set(range(classes))
    assert data.ids == {}


def test_bundled_sets_lose_and_repeat_no_sample():
    from sklearn.datasets import load_digits

    data = load("digits", scale="none")
    rows = np.concatenate([data.x, data.x_test]).reshape(1797, 64)
    labelled = np.column_stack([rows, np.concatenate([data.y, data.y_test])])
    expected = np.column_stack([load_digits().data, load_digits().target])
    assert sorted(map(tuple, labelled)) == sorted(map(tuple, expected))


def test_digits_are_divided_by_sixteen_even_in_a_small_subset():
    raw = load("digits", samples=3, scale="none")
    assert raw.x.max() > 1
    np.testing.assert_array_equal(load("digits", samples=3).x, raw.x / np.float32(16))


def test_tables_are_standardised_by_the_training_part():
    raw, data = load("wine", scale="none"), load("wine")
    mean, std = raw.x.astype(float).mean(axis=0), raw.x.astype(float).std(axis=0)
    np.testing.assert_allclose(data.x, (raw.x - mean) / std, atol=1e-4)
    np.testing.assert_allclose(data.x_test, (raw.x_test - mean) / std, atol=1e-4)


def test_the_same_seed_gives_the_same_split_and_another_seed_another():
    assert digest(load("wine", seed=3).x) == digest(load("wine", seed=3).x)
    assert digest(load("wine", seed=3).x) != digest(load("wine", seed=4).x)


def test_subsets_are_random_nested_and_do_not_move_the_test_part():
    whole, large, small = (load("digits", samples=count) for count in (None, 60, 20))
    assert (len(large.x), len(small.x)) == (60, 20)
    rows = {row.tobytes() for row in large.x}
    assert all(row.tobytes() in rows for row in small.x)
    np.testing.assert_array_equal(whole.x_test, small.x_test)
    assert not np.array_equal(small.x, whole.x[:20])
    assert not np.array_equal(small.x, load("digits", samples=20, seed=1).x)
    assert len(load("digits", test_samples=7).x_test) == 7
    assert small.classes == 10


# Splits and scales


@settings(max_examples=30, deadline=None)
@given(
    labels=st.lists(st.integers(0, 4), min_size=2, max_size=80),
    fraction=st.floats(0.05, 0.95),
    seed=st.integers(0, 2**40),
)
def test_holding_out_is_disjoint_complete_and_proportional(labels, fraction, seed):
    strata = np.array(labels)
    try:
        train, test = hold_out(strata, fraction, seed, "Data set 'd'")
    except DataError:
        # Only when no stratum can give a sample away, or the whole share rounds to nothing.
        sizes = np.bincount(strata)
        spare = np.floor(fraction * sizes[sizes > 1])
        assert spare.sum() == 0
        return
    assert sorted([*train, *test]) == list(range(len(labels)))
    assert set(strata[test]) <= set(strata[train])
    for label in set(labels):
        held, size = np.sum(strata[test] == label), np.sum(strata == label)
        assert held <= fraction * size + 1
        assert held >= min(fraction * size - 1, size - 1)


def test_a_validation_part_is_of_training_samples_of_every_class():
    """A fifth of each class, none of it left for training; the test samples are not there any more."""
    whole = load("digits")
    part = with_validation_part(whole, 0.2, seed=1)
    rows = {sample.tobytes() for sample in whole.x}
    held, kept = ({sample.tobytes() for sample in x} for x in (part.x_test, part.x))
    assert held | kept == rows
    assert not held & kept
    np.testing.assert_allclose(np.bincount(part.y_test), 0.2 * np.bincount(whole.y), atol=1)
    assert len(part.x_test) == len(part.y_test) == round(0.2 * len(whole.x))
    linear = with_validation_part(load("linear"), 0.2, seed=1)
    assert linear.y_test.shape == (30, 1)


def test_a_validation_part_needs_samples():
    tiny = replace(load("digits"), x=np.zeros((3, 1, 8, 8), np.float32), y=np.arange(3))
    with pytest.raises(DataError, match=r"out for validation.*raise validation"):
        with_validation_part(tiny, 0.1, seed=0)


def test_many_small_strata_still_give_a_test_part():
    train, test = hold_out(np.repeat(np.arange(50), 2), 0.2, 0, "Data set 'd'")
    assert (len(train), len(test)) == (80, 20)


def raw_dataset(x, x_test):
    labels = np.zeros(len(x), np.int64), np.zeros(len(x_test), np.int64)
    return Dataset("raw", x, labels[0], x_test, labels[1], 1, ("a",), {})


def test_standard_images_have_mean_zero_and_deviation_one_per_channel():
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (50, 3, 4, 4)).astype(np.uint8)
    x[:, 2] = 7
    data = scaled(raw_dataset(x, x[:5]), "standard")
    for channel in (0, 1):
        values = x[:, channel].astype(float)
        np.testing.assert_allclose(data.x[:, channel], (values - values.mean()) / values.std(), atol=1e-5)
    assert np.all(data.x[:, 2] == 0)
    np.testing.assert_array_equal(data.x_test, data.x[:5])


@pytest.mark.parametrize(
    ("values", "divisor"),
    [
        (np.array([0, 10], np.uint8), 255),
        (np.array([0, 10], np.uint16), 65535),
        (np.array([0.0, 0.5]), 1),
        (np.array([-8.0, 4.0]), 8),
        (np.array([0, 200], np.int64), 200),
    ],
)
def test_unit_images_are_divided_by_their_range(values, divisor):
    x = values.reshape(2, 1, 1, 1)
    data = scaled(raw_dataset(x, x), "unit")
    np.testing.assert_allclose(data.x.ravel(), values / divisor, rtol=1e-6)


def test_unit_tables_reach_from_zero_to_one_and_constant_columns_are_zero():
    x = np.array([[1.0, 5.0], [3.0, 5.0], [2.0, 5.0]])
    data = scaled(raw_dataset(x, x + 2), "unit")
    np.testing.assert_array_equal(data.x, [[0, 0], [1, 0], [0.5, 0]])
    np.testing.assert_array_equal(data.x_test, [[1, 2], [2, 2], [1.5, 2]])


def test_columns_that_differ_in_late_digits_keep_their_difference():
    x = np.array([[1e9], [1e9 + 1]])
    np.testing.assert_allclose(scaled(raw_dataset(x, x), "standard").x, [[-1], [1]])


def test_a_constant_column_is_not_blown_up_by_rounding():
    x = np.full((10, 1), 0.1)
    data = scaled(raw_dataset(x, np.array([[0.2]])), "standard")
    np.testing.assert_allclose(data.x, 0, atol=1e-15)
    np.testing.assert_allclose(data.x_test, 0.1, rtol=1e-6)


def test_a_scaled_value_beyond_32_bits_is_an_error():
    x = np.array([[0.0], [1e-30]])
    with pytest.raises(DataError) as error:
        scaled(raw_dataset(x, np.array([[0.0], [1e30]])), "unit")
    assert_says(error, "the scaled x_test of data set 'raw'", "in row 1")


# Files of the data folder


@pytest.mark.parametrize(
    ("shape", "expected", "order"),
    [
        ((7,), (7,), (0, 1)),
        ((4, 5), (1, 4, 5), None),
        ((4, 5, 3), (3, 4, 5), (0, 3, 1, 2)),
        ((4, 5, 1), (1, 4, 5), (0, 3, 1, 2)),
        ((3, 5, 6), (3, 5, 6), (0, 1, 2, 3)),
        ((1, 5, 3), (1, 5, 3), (0, 1, 2, 3)),
        ((3, 2, 3), (3, 3, 2), (0, 3, 1, 2)),
    ],
)
def test_npz_files_come_back_channel_first(tmp_path, shape, expected, order):
    arrays = toy_arrays(shape=shape)
    write_toy(tmp_path, **arrays)
    data = load("toy", data_dir=tmp_path, scale="none")
    assert data.x.shape == (12, *expected)
    wanted = arrays["x_train"][:, None] if order is None else arrays["x_train"].transpose(order)
    np.testing.assert_array_equal(data.x, wanted)
    np.testing.assert_array_equal(data.y, arrays["y_train"])
    np.testing.assert_array_equal(data.y_test, arrays["y_test"])
    assert data.x.flags.c_contiguous
    assert (data.name, data.classes, data.class_names) == ("toy", 3, ("0", "1", "2"))


def test_npz_images_are_unit_and_the_folder_may_come_from_the_environment(tmp_path, monkeypatch):
    arrays = write_toy(tmp_path)
    monkeypatch.setenv("CODISTILL_DATA", str(tmp_path))
    data = load("toy")
    np.testing.assert_allclose(data.x[:, 0], arrays["x_train"] / 255, rtol=1e-6)
    np.testing.assert_allclose(data.x_test[:, 0], arrays["x_test"] / 255, rtol=1e-6)


def test_npz_ids_follow_their_samples_into_a_subset(tmp_path):
    arrays = toy_arrays()
    writers = arrays["x_train"][:, 0, 0].astype(np.int64) + 1000
    write_toy(tmp_path, writer_train=writers, writer_test=np.arange(6), mask_train=np.zeros((3, 2)))
    data = load("toy", data_dir=tmp_path, samples=5, scale="none")
    assert set(data.ids) == {"writer"}
    np.testing.assert_array_equal(data.ids["writer"], data.x[:, 0, 0, 0] + 1000)
    np.testing.assert_array_equal(data.ids_test["writer"], np.arange(6))


def test_label_gaps_and_whole_float_labels_are_allowed(tmp_path):
    write_toy(tmp_path, y_train=np.repeat([0.0, 4.0], 6), y_test=np.repeat([4, 0], 3))
    data = load("toy", data_dir=tmp_path)
    assert (data.classes, data.y.dtype) == (5, np.int64)


@pytest.mark.parametrize(
    ("changes", "phrases"),
    [
        ({"y_train": np.zeros(11)}, ["the training part of data set 'toy'", "12 samples and 11 labels"]),
        ({"y_test": np.zeros(5)}, ["the test part of data set 'toy'", "6 samples and 5 labels"]),
        ({"y_train": np.r_[np.arange(11), -1]}, ["y_train of data set 'toy'", "-1 in row 11"]),
        ({"y_test": np.r_[0, 1.5, np.zeros(4)]}, ["y_test of data set 'toy'", "1.5 in row 1"]),
        ({"y_train": np.r_[np.nan, np.zeros(11)]}, ["y_train", "nan in row 0"]),
        ({"y_train": np.r_[np.zeros(11, dtype=np.int64), 2**62]}, ["must be the class numbers", f"{2**62}"]),
        ({"y_train": np.zeros((12, 1))}, ["one label for each sample", "(12, 1)", "y.ravel()"]),
        ({"y_train": np.array(["a", "A "] * 6)}, ["must differ in more than case or blanks", "'A ' and 'a'"]),
        ({"y_test": np.full(6, 3)}, ["must also be in its training part", "label 3 only in y_test"]),
        ({"y_train": np.repeat([0, 2], 6)}, ["label 1 only in y_test"]),
        ({"x_train": np.full((12, 4, 5), np.nan)}, ["x_train of data set 'toy'", "nan in row 0"]),
        ({"x_test": np.full((6, 4, 5), -np.inf)}, ["x_test of data set 'toy'", "-inf in row 0"]),
        ({"x_train": np.full((12, 4, 5), 1e300)}, ["finite 32-bit numbers", "1e+300 in row 0"]),
        ({"x_train": np.full((12, 4, 5), "a")}, ["x_train of data set 'toy'", "must be numbers"]),
        ({"x_train": np.full((12, 4, 5), 1j)}, ["must be numbers", "complex128"]),
        ({"x_train": np.zeros(12)}, ["at least one sample and one feature", "(12,)"]),
        ({"x_train": np.zeros((0, 4, 5))}, ["at least one sample", "(0, 4, 5)"]),
        ({"x_train": np.zeros((12, 4, 6))}, ["the training part, (1, 4, 6)", "has (1, 4, 5)"]),
        ({"x_train": np.zeros((12, 5, 5, 2))}, ["1, 3 or 4 channels", "(12, 5, 5, 2)"]),
        ({"x_train": np.zeros((12, 1, 1, 1, 1))}, ["(N, H, W, C)", "(12, 1, 1, 1, 1)"]),
        ({"x_train": np.full((12, 2), None)}, ["without Python objects", "x_train: Object arrays"]),
        ({"writer_train": np.full(12, None)}, ["without Python objects", "writer_train: Object arrays"]),
        ({"writer_train": np.zeros(11)}, ["writer_train of data set 'toy'", "11 ids for 12 samples"]),
        (
            {"writer_train": np.zeros(12), "writer_test": np.zeros(5)},
            ["writer_test of data set 'toy'", "one id per test sample", "5 ids for 6 samples", "as long as y_test"],
        ),
        ({"without": ["x_test", "y_test"]}, ["must hold the arrays x_train,", "no x_test, no y_test in"]),
    ],
)
def test_a_faulty_npz_file_says_what_is_wrong(tmp_path, changes, phrases):
    write_toy(tmp_path, **changes)
    with pytest.raises(DataError) as error:
        load("toy", data_dir=tmp_path)
    assert_says(error, *phrases)


def npy_bytes():
    stream = io.BytesIO()
    np.save(stream, np.zeros(3))
    return stream.getvalue()


def zip_bytes(content):
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for key in datasets.ARRAYS:
            archive.writestr(f"{key}.npy", content)
    return stream.getvalue()


@pytest.mark.parametrize("content", [b"", b"no zip", npy_bytes(), zip_bytes(b""), zip_bytes(b"no array")])
def test_a_file_that_is_no_npz_is_unreadable(tmp_path, content):
    (tmp_path / "toy.npz").write_bytes(content)
    with pytest.raises(DataError) as error:
        load("toy", data_dir=tmp_path)
    assert_says(error, "Data set 'toy' must be a readable .npz file", "toy.npz", "numpy.savez")
    (info,) = [each for each in catalogue(tmp_path) if each.where == "folder"]
    assert info.problem


def test_a_cut_off_file_is_unreadable(tmp_path):
    write_toy(tmp_path)
    path = tmp_path / "toy.npz"
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(DataError, match="must be a readable"):
        load("toy", data_dir=tmp_path)


def test_an_unknown_name_lists_what_there_is(tmp_path):
    write_toy(tmp_path, "letters")
    with pytest.raises(DataError) as error:
        load("leters", data_dir=tmp_path)
    assert_says(
        error,
        "'leters'",
        "bundled are breast_cancer, digits, linear, wine",
        f"the data folder {tmp_path} holds letters",
        "Did you mean 'letters'?",
        "--data-dir or CODISTILL_DATA",
    )
    with pytest.raises(DataError) as error:
        load("dgits")
    assert_says(error, "no data folder is set", "Did you mean 'digits'?", "--data-dir")


def test_a_folder_without_files_says_so(tmp_path):
    with pytest.raises(DataError, match=r"holds no \.npz file"):
        load("toy", data_dir=tmp_path)


@pytest.mark.parametrize("name", ["../toy", "a/b", "/etc/passwd", "a\\b", "", ".."])
def test_a_name_with_a_path_is_refused(tmp_path, name):
    write_toy(tmp_path)
    (tmp_path / "inner").mkdir()
    with pytest.raises(DataError):
        load(name, data_dir=tmp_path / "inner")


def test_the_refusal_of_a_path_says_how_to_give_the_folder(tmp_path):
    with pytest.raises(DataError) as error:
        load("../toy", data_dir=tmp_path)
    assert_says(error, "must not contain a path", "'../toy'", "--data-dir or CODISTILL_DATA")


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(DataError) as error:
        load("toy", data_dir=tmp_path / "nowhere")
    assert_says(error, "The data folder must exist.", str(tmp_path / "nowhere"), "--data-dir")


@pytest.mark.parametrize(
    ("setting", "kind", "phrases"),
    [
        ({"samples": 0}, RecipeError, ["data.samples must be an integer, 1 or more", "0"]),
        ({"samples": 2.5}, RecipeError, ["data.samples", "2.5"]),
        ({"samples": True}, RecipeError, ["data.samples", "True"]),
        ({"samples": 10**6}, DataError, ["data.samples", "'wine'", "must not exceed the 142 samples"]),
        ({"test_samples": 37}, DataError, ["data.test_samples", "must not exceed the 36 samples"]),
        ({"test_fraction": 0.0}, RecipeError, ["data.test_fraction must be between 0 and 1"]),
        ({"test_fraction": 1.0}, RecipeError, ["data.test_fraction must be between 0 and 1"]),
        ({"test_fraction": 0.001}, DataError, ["Data set 'wine'", "hold some", "raise test_fraction"]),
        ({"seed": -1}, RecipeError, ["The seed of the data", "-1"]),
        ({"seed": 0.5}, RecipeError, ["The seed of the data", "0.5"]),
        ({"scale": "standrd"}, RecipeError, ["data.scale", "'standrd'", "Did you mean 'standard'?"]),
    ],
)
def test_a_faulty_setting_is_named(setting, kind, phrases):
    with pytest.raises(CodistillError) as error:
        load("wine", **setting)
    assert type(error.value) is kind
    assert_says(error, *phrases)


# The catalogue


def test_the_catalogue_describes_bundled_sets_and_files(tmp_path):
    write_toy(tmp_path, "grey")
    write_toy(tmp_path, "colour", **toy_arrays(train=9, shape=(6, 7, 3), classes=2))
    write_toy(tmp_path, "digits")
    write_toy(tmp_path, "partial", without=["x_test"])
    infos = {(info.where, info.name): info for info in catalogue(tmp_path)}
    assert list(infos)[:4] == [("bundled", name) for name in ("breast_cancer", "digits", "linear", "wine")]
    digits = infos["bundled", "digits"]
    assert (digits.train, digits.test, digits.shape, digits.classes) == (1438, 359, (1, 8, 8), 10)
    grey, colour = infos["folder", "grey"], infos["folder", "colour"]
    assert (grey.train, grey.test, grey.shape, grey.classes, grey.problem) == (12, 6, (1, 4, 5), 3, "")
    assert (colour.train, colour.test, colour.shape, colour.classes) == (9, 6, (3, 6, 7), 2)
    assert "rename the file" in infos["folder", "digits"].problem
    assert "x_test" in infos["folder", "partial"].problem


def test_the_catalogue_agrees_with_what_is_loaded(tmp_path):
    write_toy(tmp_path)
    for info in catalogue(tmp_path):
        data = load(info.name, data_dir=tmp_path)
        assert (info.train, info.test) == (len(data.x), len(data.x_test))
        assert (info.shape, info.classes) == (data.x.shape[1:], data.classes)


def test_the_catalogue_does_not_read_the_images(tmp_path, monkeypatch):
    write_toy(tmp_path)
    read = []
    original = datasets._read_array
    monkeypatch.setattr(datasets, "_read_array", lambda archive, key: read.append(key) or original(archive, key))
    catalogue(tmp_path)
    assert read == ["y_train"]


# Hugging Face


class Image:
    pass


class ClassLabel:
    def __init__(self, names):
        self.names = names


class Value:
    def __init__(self, dtype):
        self.dtype = dtype


class Split(dict):
    def __init__(self, features, **columns):
        super().__init__(columns)
        self.features = features


def hugging_face(monkeypatch, splits):
    module = types.ModuleType("datasets")

    def load_dataset(name):
        if name != "owner/name":
            raise FileNotFoundError(f"no {name}")
        return splits

    module.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", module)


def image_split(count, shape=(4, 5, 3)):
    features = {"id": Value("int64"), "img": Image(), "label": ClassLabel(["cat", "dog"])}
    images = [np.full(shape, index, np.uint8) for index in range(count)]
    return Split(features, id=range(count), img=images, label=[index % 2 for index in range(count)])


def test_hugging_face_images_and_their_class_names(monkeypatch):
    hugging_face(monkeypatch, {"train": image_split(6), "test": image_split(4)})
    data = load("hf:owner/name")
    assert data.x.shape == (6, 3, 4, 5)
    np.testing.assert_allclose(data.x[:, 0, 0, 0], np.arange(6) / 255, rtol=1e-6)
    assert (data.y_test.tolist(), data.class_names) == ([0, 1, 0, 1], ("cat", "dog"))


def test_hugging_face_tables_without_a_test_part_are_split(monkeypatch):
    features = {"a": Value("float64"), "t": Value("string"), "b": Value("int32"), "label": Value("int64")}
    split = Split(features, a=np.arange(20) / 2, t=["x"] * 20, b=range(20), label=[0, 1] * 10)
    hugging_face(monkeypatch, {"train": split})
    data = load("hf:owner/name", scale="none")
    assert (data.x.shape, data.x_test.shape, data.classes) == ((16, 2), (4, 2), 2)
    np.testing.assert_array_equal(data.x[:, 0] * 2, data.x[:, 1])
    np.testing.assert_array_equal(data.x[:, 1] % 2, data.y)


@pytest.mark.parametrize(
    ("splits", "phrases"),
    [
        (
            {"train": image_split(4), "validation": image_split(2, (3, 3, 3))},
            ["the test part of data set 'hf:owner/name' has"],
        ),
        ({"all": image_split(4)}, ["must have a split 'train'", "all"]),
        ({"train": Split({"text": Value("string"), "label": Value("int64")})}, ["text (Value), label"]),
        ({"train": Split({"a": Value("int64")})}, ["must have a label column", "a (Value)", ".npz"]),
        (
            {"train": Split({"img": Image(), "y": Value("int64")}, img=[np.ones(2), np.ones(3)], y=[0, 1])},
            ["All samples of data set 'hf:owner/name' must have the same shape", "(2,), (3,)"],
        ),
    ],
)
def test_unusable_hugging_face_sets_say_why(monkeypatch, splits, phrases):
    hugging_face(monkeypatch, splits)
    with pytest.raises(DataError) as error:
        load("hf:owner/name")
    assert_says(error, "hf:owner/name", *phrases)


def test_hugging_face_problems_are_passed_on(monkeypatch):
    hugging_face(monkeypatch, {})
    with pytest.raises(DataError) as error:
        load("hf:owner/other")
    assert_says(error, "'hf:owner/other'", "FileNotFoundError: no owner/other", "the network")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError) as error:
        load("hf:owner/name")
    assert_says(error, "needs the package 'datasets'", "pip install codistill[huggingface]")


# Arrays of users


@pytest.mark.parametrize(
    "x",
    [
        [[1, 0], [0, 1]],
        np.eye(2, dtype=bool),
        np.eye(2, dtype=np.uint8),
        np.asfortranarray(np.eye(2, dtype=np.float32)),
        pd.DataFrame(np.eye(2, dtype=np.float32)),
        np.eye(2, dtype=np.float16),
    ],
)
def test_samples_of_any_numeric_kind_become_float32(x):
    features, labels = validate_samples(x, pd.Series([0, 1]), 2, "agent 'a'")
    assert (features.dtype, labels.dtype) == (np.float32, np.int64)
    assert features.flags.c_contiguous
    np.testing.assert_array_equal(features, np.eye(2))
    np.testing.assert_array_equal(labels, [0, 1])


@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_the_precision_that_is_given_is_kept(kind):
    """Kernel regression is exact to more digits than float32 has."""
    x, y = np.full((2, 3), 0.1, dtype=kind), np.array([[0.1, 0.75], [-1, 2]], dtype=kind)
    features, targets = validate_samples(np.asfortranarray(x), y, 2, "agent 'a'")
    assert (features.dtype, targets.dtype) == (kind, kind)
    assert features.flags.c_contiguous
    np.testing.assert_array_equal(features, x)
    np.testing.assert_array_equal(targets, y)


def test_whole_numbers_as_targets_become_float32():
    _, targets = validate_samples(np.ones((2, 3)), [[0, 1], [-1, 2]], 2, "agent 'a'")
    assert targets.dtype == np.float32
    np.testing.assert_array_equal(targets, [[0, 1], [-1, 2]])


def test_linear_regression_is_what_it_says():
    data = load("linear", scale="none", seed=3)
    assert data.x.shape == (150, 100)
    assert data.x_test.shape == (1000, 100)
    truth, *_ = np.linalg.lstsq(data.x.astype(np.float64), data.y, rcond=None)
    np.testing.assert_allclose(data.x_test @ truth, data.y_test, atol=1e-5)
    assert 0.8 < data.y.std() < 1.2
    assert not np.array_equal(data.x, load("linear", scale="none", seed=4).x)


def test_in_the_order_of_the_targets():
    y = np.random.default_rng(0).normal(size=(50, 1))
    low, high = Unequal(weights=(0.6, 0.4), sort=True).split(y, 2, np.random.default_rng(1))
    assert (len(low), len(high)) == (30, 20)
    assert y[low].max() < y[high].min()


GOOD_X = np.ones((3, 2))


@pytest.mark.parametrize(
    ("x", "y", "phrases"),
    [
        (GOOD_X, [0, 1], ["as many labels as samples in agent 'a'", "3 samples and 2 labels"]),
        (GOOD_X, [0, 1, 2], ["from 0 to 1", "2 in row 2"]),
        (GOOD_X, [0, -1, 1], ["the labels y of agent 'a'", "-1 in row 1"]),
        (GOOD_X, [0, 0.5, 1], ["0.5 in row 1"]),
        (GOOD_X, ["a", "b", "c"], ["the labels y of agent 'a'", "must be numbers"]),
        (GOOD_X, np.ones((3, 3)), ["one column for each of 2 classes", "(3, 3)", "y.ravel()"]),
        (GOOD_X, [[0, 1], [0, 1], [0, np.inf]], ["the targets y of agent 'a'", "inf in row 2"]),
        (GOOD_X, np.ones((3, 2, 1)), ["one label for each sample", "(3, 2, 1)"]),
        (np.array([[1, 2], [3, np.inf]]), [0, 1], ["the samples x of agent 'a'", "inf in row 1"]),
        (np.full((2, 1, 3, 3), np.nan), [0, 1], ["the samples x of agent 'a'", "nan in row 0"]),
        ([[1.0], [1e39]], [0, 1], ["finite 32-bit", "1e+39 in row 1"]),
        ([["a"], ["b"]], [0, 1], ["the samples x of agent 'a'", "must be numbers"]),
        (pd.DataFrame({"a": ["u"], "b": [1]}), [0], ["must be numbers", "column 'a'", "codistill.Columns"]),
        ([[1], [1, 2]], [0, 1], ["read the samples x of agent 'a' as one array", "equally long"]),
        (np.ones((0, 2)), [], ["at least one sample", "(0, 2)"]),
        ([1.0, 2.0], [0, 1], ["(2,)", "(n, 1)"]),
    ],
)
def test_faulty_samples_name_their_owner_and_row(x, y, phrases):
    with pytest.raises(DataError) as error:
        validate_samples(x, y, 2, "agent 'a'")
    assert_says(error, *phrases)


# Digests and public data


def test_a_digest_is_the_sha256_of_type_shape_and_bytes():
    import hashlib

    x = np.array([[1, 2], [3, 4]], dtype="<i2")
    expected = hashlib.sha256(b"<i2 (2, 2)\n" + bytes([1, 0, 2, 0, 3, 0, 4, 0])).hexdigest()
    assert digest(x) == expected
    assert digest(np.asfortranarray(x)) == expected
    assert digest(x.astype(">i2")) == expected
    assert digest(np.stack([x, x], axis=-1)[..., 0]) == expected


def test_digests_differ_with_type_shape_and_values():
    x = np.zeros((2, 3), np.float32)
    changed = x.copy()
    changed[1, 2] = 1e-30
    others = [x, changed, x.astype(np.int32), x.reshape(3, 2), x.ravel(), x[:0]]
    assert len({digest(each) for each in others}) == len(others)


def test_objects_have_no_digest():
    with pytest.raises(DataError, match="plain values"):
        digest(np.array([None]))


@settings(max_examples=20, deadline=None)
@given(size=st.one_of(st.integers(1, 29), st.floats(0.05, 0.95)), seed=st.integers(0, 1000))
def test_the_reference_set_is_disjoint_from_the_rest(size, seed):
    x = np.arange(30, dtype=np.float32)[:, None]
    data = Dataset("d", x, np.arange(30) % 3, x[:2], np.arange(2), 3, ("a", "b", "c"), {"n": np.arange(30)})
    public, rest = split_public(data, size, seed)
    assert len(public) == (size if isinstance(size, int) else round(size * 30))
    assert sorted([*public.ravel(), *rest.x.ravel()]) == list(range(30))
    np.testing.assert_array_equal(rest.x[:, 0], rest.ids["n"])
    np.testing.assert_array_equal(rest.ids["n"] % 3, rest.y)
    np.testing.assert_array_equal(rest.x_test, data.x_test)
    again, _ = split_public(data, size, seed)
    np.testing.assert_array_equal(again, public)


def test_another_seed_gives_another_reference_set():
    data = load("wine")
    assert digest(split_public(data, 50, 0)[0]) != digest(split_public(data, 50, 1)[0])


def test_the_reference_set_is_chosen_independently_of_a_subset():
    """Of 1438 samples two independent choices of 100 share 7 on average, deviation below sqrt(7)."""
    subset = {row.tobytes() for row in load("digits", samples=100).x}
    public, _ = split_public(load("digits"), 100, 0)
    assert sum(row.tobytes() in subset for row in public) < 7 + 5 * 7**0.5


@pytest.mark.parametrize("size", [0, 142, -3, 1.0, 0.0, 2.5, 0.001, True, float("nan"), "50"])
def test_an_impossible_reference_size_is_named(size):
    with pytest.raises(DataError) as error:
        split_public(load("wine"), size, 0)
    assert_says(error, "data set 'wine'", "142 training samples", f"size {size!r}", "a fraction")
