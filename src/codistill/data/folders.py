"""Texts and images in folders: a folder for each class, whose name is the label."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from codistill.core.errors import DataError
from codistill.data.frames import TEXT, listed
from codistill.data.split import hold_out, scaled, strata, subset
from codistill.data.validation import DENSE_LIMIT, Dataset

KINDS = ("images", TEXT)
ENDINGS = {
    "images": (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp"),
    TEXT: (".txt",),
}
_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP")  # of Pillow; others run programs, or are rarely safe
_MOST_PIXELS = 1 << 26  # of one file, when it is opened: 64 million
_MOST_TEXT = 1 << 24  # bytes of one file
_LISTED = 10
_PARTS = ("train", "test")
_GREY = ("1", "L", "LA", "I;16", "I;16L", "I;16B", "I;16N")


@dataclass(frozen=True)
class Listing:
    """The files of a folder: in the order of their samples, by class and path."""

    folder: Path
    kind: str
    classes: tuple[str, ...]
    train: tuple[tuple[Path, int], ...]  # (file, class)
    test: tuple[tuple[Path, int], ...]  # empty: a part of train is held out
    others: Counter[str]  # files of other kinds, by ending

    @property
    def files(self) -> list[Path]:
        return [path for path, _ in (*self.train, *self.test)]


def list_folder(folder: Path, kind: str | None = None) -> Listing:
    """What is in a folder of classes; folders `train` and `test` in it are the two parts. `kind`: unset: most files."""
    if not folder.is_dir():
        raise DataError("A folder of classes must exist.", f"no folder {folder}", "Check the path.")
    parts = [folder / part for part in _PARTS]
    split = all(part.is_dir() for part in parts) and {each.name for each in _folders(folder)} == set(_PARTS)
    roots = parts if split else [folder]
    classes = sorted({each.name for root in roots for each in _folders(root)})
    endings = Counter(path.suffix.lower() for root in roots for name in classes for path in _files(root / name))
    counts = {each: sum(endings[ending] for ending in ENDINGS[each]) for each in KINDS}
    kind = kind or max(counts, key=lambda each: counts[each])
    found = [
        tuple(
            (path, number)
            for number, name in enumerate(classes)
            for path in _files(root / name)
            if path.suffix.lower() in ENDINGS[kind]
        )
        for root in roots
    ]
    train = found[0]
    empty = [name for number, name in enumerate(classes) if number not in {label for _, label in train}]
    if len(classes) < 2 or empty:
        raise DataError(
            f"{folder} must hold two or more folders, one for each class, each with files {', '.join(ENDINGS[kind])}.",
            f"no such file in {listed(empty)}"
            if empty and len(classes) > 1
            else f"folders {listed(classes)}"
            if classes
            else "no folder in it",
            "Put the files of each class in a folder of its name; remove other folders.",
        )
    others = Counter({ending or "no ending": n for ending, n in endings.items() if ending not in ENDINGS[kind]})
    return Listing(folder, kind, tuple(classes), train, found[1] if split else (), others)


def _folders(folder: Path) -> list[Path]:
    inside = folder.iterdir() if folder.is_dir() else ()
    return [each for each in inside if each.is_dir() and not each.name.startswith((".", "__"))]


def _files(folder: Path) -> list[Path]:
    """All files in a folder and the folders in it, in an order that no file system changes."""
    files = [path for path in folder.rglob("*") if path.is_file()] if folder.is_dir() else []
    shown = [path for path in files if not any(part.startswith(".") for part in path.relative_to(folder).parts)]
    return sorted(shown, key=lambda path: path.relative_to(folder).as_posix())


def read_folder(
    folder: Path,
    *,
    kind: str,
    size: int | None = None,
    channels: int | None = None,
    fit: str | None = None,
    test_fraction: float = 0.2,
    seed: int = 0,
    samples: int | None = None,
    test_samples: int | None = None,
    scale: str | None = None,
) -> Dataset:
    """The texts or images of a folder, with the names of its folders as classes.

    A fraction `test_fraction` of every class, chosen by `seed`, is held out for testing, unless there are folders
    `train` and `test`. `samples` and `test_samples` keep a random subset, and `scale` is as in `load`. Images: see
    `read_images`.
    """
    found = list_folder(folder, kind)
    y = np.array([label for _, label in (*found.train, *found.test)], dtype=np.int64)
    if found.test:
        train, test = np.arange(len(found.train)), np.arange(len(found.train), len(y))
    else:
        train, test = hold_out(strata(y), test_fraction, seed, f"Folder {folder}")
    # Rows are chosen before files are read, so that a subset of a large folder is cheap.
    rows = [np.arange(len(y))[:, None][part] for part in (train, test)]
    chosen = Dataset(folder.name, rows[0], y[train], rows[1], y[test], len(found.classes), found.classes)
    chosen = subset(chosen, samples, test_samples, seed)
    parts = [[found.files[row] for row in part[:, 0]] for part in (chosen.x, chosen.x_test)]
    if kind == TEXT:
        x = read_texts([*parts[0], *parts[1]])
    else:
        x = read_images([*parts[0], *parts[1]], size=size, channels=channels, fit=fit)
    made = Dataset(
        folder.name, x[: len(parts[0])], chosen.y, x[len(parts[0]) :], chosen.y_test, chosen.classes,
        chosen.class_names, text=TEXT if kind == TEXT else None,
    )  # fmt: skip
    return made if kind == TEXT else scaled(made, scale)


def read_texts(files: Sequence[Path]) -> np.ndarray:
    """(n,) the texts of UTF-8 files."""
    texts, problems = [], []
    for path in files:
        try:
            if path.stat().st_size > _MOST_TEXT:
                raise ValueError(f"more than {_MOST_TEXT >> 20} MiB")
            texts.append(path.read_text("utf-8-sig"))
        except (OSError, ValueError) as error:
            problems.append((path, error))
    if problems:
        raise _unreadable("Texts must be readable files in UTF-8.", problems, len(files))
    return np.array([*texts, ""], dtype=object)[:-1]  # an array of strings, whatever their number


def read_images(
    files: Sequence[Path], *, size: int | None = None, channels: int | None = None, fit: str | None = None
) -> np.ndarray:
    """(n, channels, height, width) the images as bytes 0 … 255, turned as their camera says.

    `size`: of squares, cropped around the centre (`fit` "crop", the default), padded with black ("pad") or stretched
    ("stretch"), then resized bilinearly with antialiasing; unset: all images must have one size. `channels`: 1 for
    grey, 3 for colours; unset: 1 if all images are grey. Transparent pixels become white.
    """
    about, problems = look_at(files)
    if problems:
        raise _unreadable("Images must be readable.", problems, len(files))
    channels = channels or (1 if all(mode in _GREY for mode, _ in about) else 3)
    sizes = Counter(each for _, each in about)
    if size is None and len(sizes) > 1:
        common = ", ".join(f"{w} x {h} ({n} times)" for (w, h), n in sizes.most_common(3))
        smallest = min(min(each) for each in sizes)
        raise DataError(
            "Images must have one size, or a size to bring them to.",
            f"{len(sizes)} sizes: {common}{', ...' if len(sizes) > 3 else ''}",
            f'Set size = {min(smallest, 64)} under [data], and fit = "crop", "pad" or "stretch".',
        )
    width, height = (size, size) if size is not None else next(iter(sizes), (1, 1))
    needed = 4 * len(files) * channels * width * height
    if needed > DENSE_LIMIT:
        raise DataError(
            f"All images together must take at most {DENSE_LIMIT >> 30} GiB as 32-bit numbers.",
            f"{len(files)} images of {channels} x {height} x {width}, which take {needed / (1 << 30):.1f} GiB",
            "Set a smaller size, or samples.",
        )
    pixels = np.empty((len(files), channels, height, width), dtype=np.uint8)
    for row, path in enumerate(files):
        try:
            pixels[row] = _pixels(path, channels, size, fit or "crop")
        except _FAULTS as error:
            problems.append((path, error))
    if problems:
        raise _unreadable("Images must be readable.", problems, len(files))
    return pixels


# What Pillow raises for files that are no images, are damaged, or would take too much memory.
_FAULTS = (OSError, ValueError, SyntaxError, EOFError, IndexError, KeyError, TypeError, ArithmeticError, MemoryError)


def look_at(files: Sequence[Path]) -> tuple[list[tuple[str, tuple[int, int]]], list[tuple[Path, Exception]]]:
    """Mode and size (width, height) of each image, by its header alone; and the files that are no images."""
    about: list[tuple[str, tuple[int, int]]] = []
    problems: list[tuple[Path, Exception]] = []
    for path in files:
        try:
            with _opened(path) as image:
                turned = image.getexif().get(0x0112) in (5, 6, 7, 8)  # on its side
                about.append((image.mode, image.size[::-1] if turned else image.size))
        except _FAULTS as error:
            problems.append((path, error))
    return about, problems


def _opened(path: Path) -> Any:
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise DataError(
            "Images in folders need the package 'Pillow'.", "it is not installed", "Run: pip install codistill[images]"
        ) from error
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on large images, which are limited here, and on odd metadata
        try:
            image = Image.open(path, formats=_FORMATS)
        except UnidentifiedImageError:
            raise ValueError(f"not one of {', '.join(_FORMATS)}") from None
        except Image.DecompressionBombError as error:
            raise ValueError(f"{error}") from None
    if image.width * image.height > _MOST_PIXELS:
        image.close()
        raise ValueError(f"{image.width} x {image.height} pixels, more than {_MOST_PIXELS:,}")
    return image


def _pixels(path: Path, channels: int, size: int | None, fit: str) -> np.ndarray:
    """(channels, height, width) one image."""
    from PIL import Image, ImageOps

    with _opened(path) as opened, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        image = ImageOps.exif_transpose(opened)
        if image.mode.startswith("I;16"):
            image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        elif image.mode in ("I", "F"):
            raise ValueError("pixels of 32 bits; convert them to 8 or 16")
        elif image.mode in ("LA", "PA", "RGBA", "RGBa", "La") or "transparency" in image.info:
            image = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        image = image.convert("L" if channels == 1 else "RGB")
        if size is not None:
            image = _square(image, size, fit)
        pixels = np.asarray(image, dtype=np.uint8)
    return pixels[None] if pixels.ndim == 2 else np.moveaxis(pixels, 2, 0)


def _square(image: Any, size: int, fit: str) -> Any:
    from PIL import Image, ImageOps

    if fit == "crop":
        return ImageOps.fit(image, (size, size), Image.Resampling.BILINEAR)
    if fit == "pad":
        return ImageOps.pad(image, (size, size), Image.Resampling.BILINEAR, color=0)
    return image.resize((size, size), Image.Resampling.BILINEAR)


def _unreadable(must: str, problems: Sequence[tuple[Path, Exception]], files: int) -> DataError:
    lines = [f"\n  {path}: {' '.join(str(error).split())[:120] or type(error).__name__}" for path, error in problems]
    more = f"\n  and {len(problems) - _LISTED} more" if len(problems) > _LISTED else ""
    return DataError(
        must,
        f"{len(problems)} of {files} files:{''.join(lines[:_LISTED])}{more}",
        "Repair, convert or remove them.",
    )
