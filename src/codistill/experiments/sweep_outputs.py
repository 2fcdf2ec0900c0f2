"""The average outputs of a sweep's runs in one picture."""

from __future__ import annotations

import io
import itertools
from pathlib import Path

from codistill.experiments.run import read_summary
from codistill.experiments.sweep import Sweep, lines_of, panels_of, slug
from codistill.files import write_atomically
from codistill.plots.heatmaps import Map, draw_grid
from codistill.results.outputs import Outputs, pool
from codistill.runtimes.store import OUTPUTS

Labels = frozenset[tuple[str, str]]  # (field, label) of a combination


def draw_outputs_of(sweep: Sweep, folder: Path, path: Path) -> bool:
    """A map per combination, over all seeds: a column per value of the last panel axis, a row per protocol.

    Runs that kept no outputs are left out; returns whether there was anything to draw.
    """
    found, panels = _found(sweep, folder), panels_of(sweep)
    *down, across = axes = [*panels[:-1], lines_of(sweep), *panels[-1:]]
    grid: list[list[Map | None]] = []
    for chosen in itertools.product(*(axis.values for axis in down)):
        row: list[Map | None] = []
        for last in across.values:
            labelled = list(zip(axes, (*chosen, last), strict=True))
            runs = found.get(frozenset((axis.key, label) for axis, label in labelled), {})
            title = ", ".join(axis.words(label) if axis in panels else label for axis, label in labelled)
            row += [(title, pool(outputs), names) for names, outputs in runs.items()][:1] or [None]
        grid.append(row)
    kept = [place for place in range(len(across.values)) if any(row[place] for row in grid)]
    if not kept:
        return False
    picture = io.BytesIO()
    draw_grid([[row[place] for place in kept] for row in grid if any(row)]).savefig(picture, format="png", dpi=110)
    write_atomically(path, picture.getvalue())
    return True


def _found(sweep: Sweep, folder: Path) -> dict[Labels, dict[tuple[str, ...], list[Outputs]]]:
    """What the runs of each combination have kept, by the names of the classes; seeds together."""
    found: dict[Labels, dict[tuple[str, ...], list[Outputs]]] = {}
    wanted = {axis.key for axis in (lines_of(sweep), *panels_of(sweep))}
    for labels, _ in sweep.runs:
        place = folder / slug(labels)
        summary = read_summary(place) if (place / OUTPUTS).exists() else None
        if summary is not None and summary.outputs is not None:
            alike = found.setdefault(frozenset(item for item in labels.items() if item[0] in wanted), {})
            alike.setdefault(summary.class_names, []).append(summary.outputs)
    return found
