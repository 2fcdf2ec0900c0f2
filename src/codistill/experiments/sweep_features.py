"""The feature spaces of the runs of a sweep: a row per run, a column per round."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from codistill.experiments.saved_run import read_summary
from codistill.experiments.sweep import Sweep
from codistill.experiments.sweep_run import slug
from codistill.plots.feature_plot import Panel

MOST_RUNS = 12  # a map takes seconds


def features_grid(sweep: Sweep, folder: Path) -> list[list[Panel | None]]:
    """Maps of the first runs that kept features; empty if none did."""
    kept = [(labels, recipe) for labels, recipe in sweep.runs if recipe.evaluation.features_at][:MOST_RUNS]
    found = [
        (sweep.words(labels), read_summary(folder / slug(labels))) for labels, _ in kept if _is_done(folder, labels)
    ]
    rounds = sorted({space.round for _, summary in found for space in summary.features})
    grid: list[list[Panel | None]] = []
    for words, summary in found:
        spaces = {space.round: space for space in summary.features}
        names: Sequence[str] = summary.class_names
        row = [(f"{words}, round {t}", spaces[t], names) if t in spaces else None for t in rounds]
        grid += [row] if spaces else []
    return grid


def _is_done(folder: Path, labels: dict[str, str]) -> bool:
    return (folder / slug(labels)).is_dir()  # impossible combinations are skipped
