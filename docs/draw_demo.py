"""Draws docs/demo.png, and keeps its figures in docs/demo.json: `codistill demo --out RUN`, then this file with RUN.

README's sentence about the demo is held to docs/demo.json by a test, and docs/demo.json to the demo's first round.
"""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import matplotlib.image
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from codistill.experiments.saved_run import read_summary
from codistill.report.score_plots import draw_gains, draw_rounds
from codistill.report.style import series_style
from codistill.results.rounds import scores_of

HERE = Path(__file__).parent
_DOTS_PER_INCH = 85


def main(folder: Path) -> None:
    """Draw a finished run of the demo, and keep its figures."""
    summary = read_summary(folder)
    run = scores_of(summary)
    lines = summary.lines()
    rounds, gains = draw_rounds(run), draw_gains(run.lines, run.metric, run.axis_label())
    _name_lines(rounds.axes[0], {line.name: line.together or 0.0 for line in lines}, run.rounds[-1])
    matplotlib.image.imsave(HERE / "demo.png", np.hstack([_pixels(rounds, 8.8), _pixels(gains, 6.2)]))
    figures = {
        "alone": float(np.mean([line.alone for line in lines])),
        "together": float(np.mean([line.together for line in lines])),
        "bytes": sum(row["sent"] + row["received"] for row in summary.rows),
        "first_round": {row["agent"]: row["accuracy"] for row in summary.rows if row["round"] == 1},
    }
    (HERE / "demo.json").write_text(json.dumps(figures, indent=2) + "\n", "utf-8")


def _name_lines(axes: Axes, ends: dict[str, float], last: int) -> None:
    """The agents' names beside the ends of their lines, apart from one another."""
    place = 1.0
    for name, end in sorted(ends.items(), key=lambda item: -item[1]):
        place = min(end, place - 0.045)
        colour, _ = series_style(list(ends).index(name))
        line = {"arrowstyle": "-", "color": colour}
        axes.annotate(name, (last, end), (last + 0.6, place), va="center", annotation_clip=False, arrowprops=line)


def _pixels(figure: Figure, width: float) -> np.ndarray:
    figure.set_size_inches(width, 4.6)
    with io.BytesIO() as held:
        figure.savefig(held, format="png", dpi=_DOTS_PER_INCH, facecolor="white")
        held.seek(0)
        return matplotlib.image.imread(held)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
