"""Texts and images in folders, a folder for each class."""

import struct
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from codistill.cli import main
from codistill.core.errors import DataError
from codistill.data import folders
from codistill.data.folders import list_folder, read_folder, read_images


def picture(path, pixels, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.asarray(pixels, dtype=np.uint8)).save(path, **options)
    return path


def photos(folder, per_class=5, classes=("cat", "dog")):
    for number, name in enumerate(classes):
        for i in range(per_class):
            picture(folder / name / f"{i}.png", np.full((4, 6, 3), 100 * number + i))
    return folder


def test_the_names_of_folders_are_the_classes(tmp_path):
    data = read_folder(photos(tmp_path / "photos"), kind="images", scale="none")
    assert (data.name, data.classes, data.class_names) == ("photos", 2, ("cat", "dog"))
    assert (data.x.shape, data.x_test.shape, data.x.dtype) == ((8, 3, 4, 6), (2, 3, 4, 6), np.float32)
    for x, y in ((data.x, data.y), (data.x_test, data.y_test)):
        np.testing.assert_array_equal(x[:, 0, 0, 0] >= 100, y == 1)
    unit = read_folder(tmp_path / "photos", kind="images")
    np.testing.assert_allclose(unit.x, data.x / 255, rtol=1e-6)


def test_the_order_does_not_depend_on_the_file_system(tmp_path, monkeypatch):
    first = list_folder(photos(tmp_path)).train
    real = Path.rglob
    monkeypatch.setattr(Path, "rglob", lambda self, pattern: sorted(real(self, pattern), reverse=True))
    assert list_folder(tmp_path).train == first
    assert [path.name for path, label in first if label == 0] == ["0.png", "1.png", "2.png", "3.png", "4.png"]


def test_folders_train_and_test_are_the_parts(tmp_path):
    photos(tmp_path / "train")
    photos(tmp_path / "test", per_class=3)
    data = read_folder(tmp_path, kind="images")
    assert (len(data.x), len(data.x_test)) == (10, 6)
    few = read_folder(tmp_path, kind="images", samples=4, test_samples=2)
    assert (len(few.x), len(few.x_test)) == (4, 2)


def test_texts_are_read_as_they_are(tmp_path):
    for name in ("up", "down"):
        for i in range(5):
            (tmp_path / name / "deep").mkdir(parents=True, exist_ok=True)
            (tmp_path / name / "deep" / f"{i}.txt").write_text(f"{name} é {i}\n", "utf-8")
    data = read_folder(tmp_path, kind="text")
    assert (data.text, data.x.shape, data.class_names) == ("text", (8,), ("down", "up"))
    assert set(data.x) | set(data.x_test) == {f"{name} é {i}\n" for name in ("up", "down") for i in range(5)}
    assert all((text.startswith("up")) == (y == 1) for text, y in zip(data.x, data.y, strict=True))
    (tmp_path / "up" / "bad.txt").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(DataError, match=r"(?s)in UTF-8.*1 of 11 files:.*up/bad\.txt: .*decode"):
        read_folder(tmp_path, kind="text", test_fraction=0.5)


# --- sizes and colours


@pytest.mark.parametrize(
    ("fit", "expected"),
    [
        ("crop", [[1, 1], [1, 1]]),  # the middle half
        ("pad", [[0, 0.5, 0.5, 0], [0, 0.5, 0.5, 0]]),
        ("stretch", None),
    ],
)
def test_images_become_squares(tmp_path, fit, expected):
    wide = np.zeros((4, 8), dtype=np.uint8)
    wide[:, 2:6] = 200
    tall = picture(tmp_path / "a.png", wide.T)
    flat = picture(tmp_path / "b.png", wide)
    made = read_images([flat, tall], size=4, fit=fit)
    assert (made.shape, made.dtype) == ((2, 1, 4, 4), np.uint8)
    np.testing.assert_array_equal(made[1, 0], made[0, 0].T)
    if fit == "crop":
        np.testing.assert_array_equal(made[0, 0], 200)
    elif fit == "pad":
        assert not made[0, 0, [0, 3]].any()  # black above and below
        assert made[0, 0, 1:3, 1:3].min() > 100
    else:
        assert made[0, 0, :, 1:3].min() > 100
        assert made[0, 0, :, [0, 3]].max() < 100


def test_one_size_needs_no_setting_and_several_do(tmp_path):
    files = [picture(tmp_path / "a.png", np.zeros((4, 6))), picture(tmp_path / "b.png", np.zeros((5, 6)))]
    assert read_images(files[:1]).shape == (1, 1, 4, 6)
    with pytest.raises(DataError, match=r"2 sizes: 6 x 4 \(1 times\), 6 x 5 \(1 times\)\. Set size = 4 "):
        read_images(files)


def test_colours_and_grey(tmp_path):
    colour = picture(tmp_path / "c.png", np.tile(np.uint8([200, 100, 50]), (2, 2, 1)))
    grey = picture(tmp_path / "g.png", np.full((2, 2), 77))
    both = read_images([colour, grey])
    np.testing.assert_array_equal(both[:, :, 0, 0], [[200, 100, 50], [77, 77, 77]])
    assert read_images([grey]).shape[1] == 1
    luma = 0.299 * 200 + 0.587 * 100 + 0.114 * 50
    np.testing.assert_allclose(read_images([colour], channels=1)[0, 0], luma, atol=1)
    clear = picture(tmp_path / "t.png", np.tile(np.uint8([9, 9, 9, 0]), (2, 2, 1)))
    np.testing.assert_array_equal(read_images([clear]), 255)
    deep = tmp_path / "d.png"
    Image.fromarray(np.full((2, 2), 300 * 256, dtype=np.uint32).astype(np.uint16)).save(deep)
    np.testing.assert_array_equal(read_images([deep])[0, 0], (300 * 256 % 65536) >> 8)


def test_an_image_is_turned_as_its_camera_says(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # on its side
    upright = picture(tmp_path / "a.jpg", np.zeros((4, 8)), exif=exif)
    assert read_images([upright]).shape == (1, 1, 8, 4)


# --- what cannot be read


def claimed(width, height):
    """A PNG whose header claims a size."""

    def chunk(kind, body):
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"\0" * 64)) + chunk(b"IEND", b"")


def test_all_unreadable_files_are_named(tmp_path):
    folder = photos(tmp_path)
    (folder / "cat" / "words.png").write_text("no image")
    (folder / "cat" / "empty.jpg").write_bytes(b"")
    (folder / "dog" / "bomb.png").write_bytes(claimed(60_000, 60_000))
    (folder / "dog" / "script.png").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")  # no PostScript
    with pytest.raises(DataError) as error:
        read_folder(folder, kind="images", test_fraction=0.4)
    for phrase in ("4 of 14 files", "words.png: not one of PNG, JPEG", "empty.jpg", "script.png: not one of"):
        assert phrase in error.value.found
    assert (
        "bomb.png: 60000 x 60000 pixels, more than" in error.value.found or "bomb.png: Image size" in error.value.found
    )
    for i in range(20):
        (folder / "cat" / f"x{i:02d}.png").write_text("")
    with pytest.raises(DataError, match=r"(?s)24 of 34 files.*and 14 more"):
        read_folder(folder, kind="images", test_fraction=0.4)


def test_a_file_that_is_cut_off_is_named(tmp_path):
    path = picture(tmp_path / "a.png", np.random.default_rng(0).integers(0, 255, (40, 40)))
    path.write_bytes(path.read_bytes()[:-900])
    with pytest.raises(DataError, match=r"(?s)1 of 1 files:.*a\.png: "):
        read_images([path])


def test_a_large_image_and_many_images_are_refused_before_they_are_decoded(tmp_path, monkeypatch):
    path = picture(tmp_path / "a.png", np.zeros((20, 20)))
    monkeypatch.setattr(folders, "_MOST_PIXELS", 399)
    with pytest.raises(DataError, match="20 x 20 pixels, more than 399"):
        read_images([path])
    monkeypatch.undo()
    monkeypatch.setattr(folders, "DENSE_LIMIT", 1599)
    monkeypatch.setattr(folders, "_pixels", None)
    with pytest.raises(DataError, match=r"1 images of 1 x 20 x 20.*smaller size, or samples"):
        read_images([path])


@pytest.mark.parametrize(
    ("make", "phrase"),
    [
        (lambda folder: None, "must exist"),
        (lambda folder: folder.mkdir(), "no folder in it"),
        (lambda folder: photos(folder, classes=("cat",)), "folders 'cat'"),
        (lambda folder: (photos(folder), (folder / "eel").mkdir()), "no such file in 'eel'"),
    ],
)
def test_a_folder_without_classes_is_refused(tmp_path, make, phrase):
    make(tmp_path / "photos")
    with pytest.raises(DataError) as error:
        read_folder(tmp_path / "photos", kind="images")
    assert phrase in str(error.value)


def test_without_pillow_the_extra_is_named(tmp_path, monkeypatch):
    path = picture(tmp_path / "a.png", np.zeros((2, 2)))
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(DataError, match=r"pip install codistill\[images\]"):
        read_images([path])


def test_the_command_shows_what_is_in_a_folder(tmp_path, capsys):
    folder = photos(tmp_path / "photos")
    picture(folder / "dog" / "z.png", np.zeros((9, 9)))
    (folder / "dog" / "notes.md").write_text("")
    (folder / "dog" / ".hidden.png").write_text("")
    (folder / ".git").mkdir()
    (folder / "dog" / "bad.png").write_text("")
    assert main(["data", str(folder)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for phrase in (
        "12 images", "left out: 1 of .md", "sizes: 6 x 4 (10), 9 x 9 (1)", "pixels: RGB (10), L (1)", "unreadable: 1",
        'kind = "images"', f'folder = "{folder}"', "size = 64",
    ):  # fmt: skip
        assert phrase in shown
