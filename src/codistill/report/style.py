"""The look of all figures: colours, matplotlib's settings, names and numbers."""

from __future__ import annotations

from typing import Any

from codistill.core.text import bytes_text

LONGEST_NAME = 20
MOST_MARKERS = 30  # beyond, markers would run into one another

INK, MUTED, AXIS, GRID = "#1f2328", "#6b7280", "#c4c9d0", "#e6e8ec"
PAPER = "#ffffff"  # the background
BLUE, GREY, WORSE = "#0072b2", "#a3acb8", "#b34700"
HEAT = "#2f8fd0"  # of a full cell: ink can be read on it
# Okabe and Ito's colours that differ for every kind of colour vision, without those of the means.
COLOURS = ("#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9")
DASHES = ("solid", "dashed", "dotted", "dashdot")

STYLE: dict[Any, Any] = {
    "font.family": ["sans-serif"],
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": AXIS,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": AXIS,
    "ytick.color": AXIS,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "lines.solid_capstyle": "round",
}


def series_style(index: int) -> tuple[str, str]:
    """Colour and dash of one line among many; no two of the first 20 are alike."""
    return COLOURS[index % len(COLOURS)], DASHES[index // len(COLOURS) % len(DASHES)]


def plain(name: str, longest: int = LONGEST_NAME) -> str:
    """A name that can be drawn: short, printable, and not read as a formula."""
    short = name if len(name) <= longest else name[: longest - 1] + "…"
    shown = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in short)
    return shown.replace("$", r"\$")


def tick_text(count: float) -> str:
    """2,000,000 -> '2 MB'."""
    return bytes_text(count).replace(".0 ", " ")
