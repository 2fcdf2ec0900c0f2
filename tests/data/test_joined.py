"""Several data sets as one, and images of one size and number of channels."""

import numpy as np
import pytest
import torch

from codistill.core.errors import DataError
from codistill.data.datasets import load


@pytest.fixture(autouse=True)
def no_data_folder(monkeypatch):
    monkeypatch.delenv("CODISTILL_DATA", raising=False)


def write(folder, name, shape=(4, 4), train=12, test=6, seed=0, dtype=np.uint8, top=256, **changes):
    rng = np.random.default_rng(seed)
    arrays = {
        "x_train": rng.integers(0, top, (train, *shape)).astype(dtype),
        "y_train": np.arange(train) % 3,
        "x_test": rng.integers(0, top, (test, *shape)).astype(dtype),
        "y_test": np.arange(test) % 3,
    } | changes
    np.savez(folder / f"{name}.npz", **arrays)
    return arrays


def refused(*arguments, **options):
    with pytest.raises(DataError) as caught:
        load(*arguments, **options)
    return str(caught.value)


def bilinear(before, after):
    """The matrix of bilinear interpolation of a line of pixels: a triangle around each new pixel's centre, as wide as
    a pixel of the coarser line at each side, normalised, without what is beyond the ends."""
    step = before / after
    reach = max(step, 1.0)
    centres = (np.arange(after) + 0.5) * step
    distances = np.abs(np.arange(before) + 0.5 - centres[:, None]) / reach
    weights = np.maximum(1 - distances, 0)
    return weights / weights.sum(axis=1, keepdims=True)


# --- images -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "size"), [((4, 4), 7), ((7, 5), 3), ((16, 16), 28), ((32, 32), 28)])
def test_pixels_are_interpolated_bilinearly_with_antialiasing(tmp_path, shape, size):
    arrays = write(tmp_path, "toy", shape)
    data = load("toy", tmp_path, size=size, scale="none")
    rows, columns = (bilinear(side, size) for side in shape)
    for x, raw in ((data.x, arrays["x_train"]), (data.x_test, arrays["x_test"])):
        np.testing.assert_allclose(x[:, 0], rows @ raw @ columns.T, atol=1e-3)
        assert x.dtype == np.float32


def test_a_resized_image_is_divided_by_the_range_of_its_type(tmp_path):
    """Not by its largest value, which interpolation lowers."""
    image = np.zeros((12, 4, 4), np.uint8)
    image[:, 1, 1] = 255
    write(tmp_path, "toy", x_train=image)
    data = load("toy", tmp_path, size=2)
    # The bright pixel is the second of four in both directions.
    expected = bilinear(4, 2)[:, 1]
    np.testing.assert_allclose(data.x[0, 0], np.outer(expected, expected), rtol=1e-5)


def test_pixels_do_not_depend_on_the_number_of_threads(tmp_path):
    write(tmp_path, "toy", (32, 32), train=60)
    before = torch.get_num_threads()
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found.append(load("toy", tmp_path, size=28).x)
    torch.set_num_threads(before)
    np.testing.assert_array_equal(*found)


def test_grey_images_are_repeated_and_colours_become_their_luma(tmp_path):
    grey = write(tmp_path, "grey")["x_train"]
    data = load("grey", tmp_path, channels=3, scale="none")
    np.testing.assert_array_equal(data.x, np.stack([grey] * 3, axis=1))
    colours = write(tmp_path, "colours", (4, 4, 3))["x_train"]
    data = load("colours", tmp_path, channels=1, scale="none")
    red, green, blue = np.moveaxis(colours.astype(float), 3, 0)
    np.testing.assert_allclose(data.x[:, 0], 0.299 * red + 0.587 * green + 0.114 * blue, rtol=1e-5)
    same = load("colours", tmp_path, channels=3, size=4)
    np.testing.assert_array_equal(same.x, load("colours", tmp_path).x)


def test_what_has_no_pixels_or_other_channels_is_refused(tmp_path):
    assert "need images. Found: samples of shape (13,) in data set 'wine'. Remove" in refused("wine", size=8)
    write(tmp_path, "colours", (4, 4, 3))
    assert "4 for the 3 channels of data set 'colours'. Set channels = 3" in refused("colours", tmp_path, channels=4)


# --- several data sets --------------------------------------------------------------------------------


def test_every_sample_says_which_data_set_it_is_from(tmp_path):
    grey = write(tmp_path, "grey", seed=1, writer_train=np.arange(12))
    colours = write(tmp_path, "colours", (4, 4, 3), train=9, test=3, seed=2)
    data = load(["grey", "colours"], tmp_path, channels=3, scale="none")
    assert (data.name, data.classes, data.class_names) == ("grey + colours", 3, ("0", "1", "2"))
    assert data.ids.keys() == data.ids_test.keys() == {"source"}
    for part, x, y, ids in (("train", data.x, data.y, data.ids), ("test", data.x_test, data.y_test, data.ids_test)):
        mine = ids["source"] == "grey"
        np.testing.assert_array_equal(x[mine], np.stack([grey[f"x_{part}"]] * 3, axis=1))
        np.testing.assert_array_equal(y[mine], grey[f"y_{part}"])
        np.testing.assert_array_equal(x[~mine], np.moveaxis(colours[f"x_{part}"], 3, 1))
        np.testing.assert_array_equal(y[~mine], colours[f"y_{part}"])
        assert set(ids["source"]) == {"grey", "colours"}


def test_numbers_of_samples_count_for_each_data_set(tmp_path):
    write(tmp_path, "one", seed=1)
    write(tmp_path, "two", train=300, test=100, seed=2)
    data = load(("one", "two"), tmp_path, samples=10, test_samples=5)
    assert {name: int((data.ids["source"] == name).sum()) for name in ("one", "two")} == {"one": 10, "two": 10}
    assert [int((data.ids_test["source"] == name).sum()) for name in ("one", "two")] == [5, 5]
    alone = load("two", tmp_path, samples=10, test_samples=5)
    np.testing.assert_array_equal(data.x[data.ids["source"] == "two"], alone.x)


@pytest.mark.parametrize("scale", [None, "standard", "none"])
def test_values_get_the_range_of_the_first_data_set_and_are_scaled_together(tmp_path, scale):
    bright = write(tmp_path, "bright", seed=1)["x_train"]
    unit = write(tmp_path, "unit", seed=2, dtype=np.float64, top=2)["x_train"]  # 0 and 1, the range of floats
    data = load(["bright", "unit"], tmp_path, scale=scale)
    both = np.concatenate([bright, unit * 255.0])
    shift, divisor = {None: (0, 255), "none": (0, 1), "standard": (both.mean(), both.std())}[scale]
    np.testing.assert_allclose(data.x[:, 0], (both - shift) / divisor, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(data.scaling.apply(both[:, None], "both"), data.x, atol=1e-5)


def test_tables_of_the_same_columns_are_joined_as_they_are(tmp_path):
    one, two = (write(tmp_path, name, (3,), seed=seed) for name, seed in (("one", 1), ("two", 2)))
    data = load(["one", "two"], tmp_path, scale="none")
    np.testing.assert_array_equal(data.x, np.concatenate([one["x_train"], two["x_train"]]))


def test_data_sets_that_do_not_belong_together_are_refused(tmp_path):
    write(tmp_path, "toy")
    write(tmp_path, "large", (5, 5))
    write(tmp_path, "two", y_train=np.arange(12) % 2, y_test=np.arange(6) % 2)
    text = refused(["toy", "large"], tmp_path)
    assert "(1, 4, 4) in 'toy', (1, 5, 5) in 'large'" in text
    assert "size = 28 and channels = 3" in text
    assert "(30,) in 'breast_cancer'. Choose data sets of one shape." in refused(["wine", "breast_cancer"])
    text = refused(["toy", "two"], tmp_path)
    assert "3 classes (0, 1, 2) in 'toy', 2 classes (0, 1) in 'two'" in text
    assert "26 classes (0, 1, ..., 25)" in refused(["toy", _letters(tmp_path)], tmp_path)
    assert "one or more different data sets. Found: []" in refused([], tmp_path)
    assert "['toy', 'toy']" in refused(["toy", "toy"], tmp_path)
    assert "Unknown data set 'svhn'" in refused(["toy", "svhn"], tmp_path)


def _letters(folder):
    write(folder, "letters", train=52, y_train=np.arange(52) % 26)
    return "letters"
