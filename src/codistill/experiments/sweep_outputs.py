"""The average outputs of the runs of a sweep, by combination."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path

from codistill.experiments.saved_run import read_summary
from codistill.experiments.sweep import Sweep, lines_of, panels_of
from codistill.experiments.sweep_fields import ABSENT
from codistill.experiments.sweep_run import slug
from codistill.plots.heatmaps import Map
from codistill.results.outputs import Outputs, pool
from codistill.runtimes.store import OUTPUTS

Labels = frozenset[tuple[str, str]]  # (field, label) of a combination


def outputs_grid(sweep: Sweep, folder: Path) -> list[list[Map | None]]:
    """A map per combination, over all seeds: a column per value of the last panel axis, a row per line.

    Runs that kept no outputs are left out; empty if none kept any.
    """
    found, panels = _found(sweep, folder), panels_of(sweep)
    *down, across = axes = [*panels[:-1], lines_of(sweep), *panels[-1:]]
    grid: list[list[Map | None]] = []
    for chosen in itertools.product(*(axis.values for axis in down)):
        row: list[Map | None] = []
        for last in across.values:
            labelled = list(zip(axes, (*chosen, last), strict=True))
            runs = found.get(frozenset((axis.key, label) for axis, label in labelled), {})
            title = ", ".join(axis.words(label) for axis, label in labelled)
            row += [(title, pool(outputs), names) for names, outputs in runs.items()][:1] or [None]
        grid.append(row)
    kept = [place for place in range(len(across.values)) if any(row[place] for row in grid)]
    return [[row[place] for place in kept] for row in grid if any(row)]


def _found(sweep: Sweep, folder: Path) -> dict[Labels, dict[tuple[str, ...], list[Outputs]]]:
    """The outputs of the runs of each combination, by the names of the classes; seeds together."""
    found: dict[Labels, dict[tuple[str, ...], list[Outputs]]] = {}
    wanted = {axis.key for axis in (lines_of(sweep), *panels_of(sweep))}
    for labels, _ in sweep.runs:
        place = folder / slug(labels)
        summary = read_summary(place) if (place / OUTPUTS).exists() else None
        if summary is not None and summary.outputs is not None:
            for shown in _places(sweep, {key: label for key, label in labels.items() if key in wanted}):
                found.setdefault(shown, {}).setdefault(summary.class_names, []).append(summary.outputs)
    return found


def _places(sweep: Sweep, labels: Mapping[str, str]) -> Iterator[Labels]:
    """Where the outputs of a run are shown: at every value of a field that its protocol does not have."""
    values = {axis.key: axis.values for axis in sweep.axes}
    choices = [values[key] if label == ABSENT else (label,) for key, label in labels.items()]
    for chosen in itertools.product(*choices):
        yield frozenset(zip(labels, chosen, strict=True))
