"""The runs of a sweep, one after the other: what is done is not run again, what is impossible is reported."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

import pandas as pd

from codistill.errors import LearnerError, RecipeError
from codistill.experiments.recipe import Recipe
from codistill.experiments.recipe_federation import topology_of
from codistill.experiments.run import execute
from codistill.experiments.same_run import is_run_of
from codistill.experiments.saved_run import RECIPE
from codistill.experiments.sweep import Sweep
from codistill.results.metric_text import metric_name, score_text
from codistill.results.records import Row
from codistill.results.scores import as_score
from codistill.runtimes.store import METRICS, read_rows

TABLE = "sweep.csv"


def execute_sweep(
    sweep: Sweep, folder: Path, *, data_dir: str | None = None, tell: Callable[[str], None] = print
) -> pd.DataFrame | None:
    """Run what is not done yet; returns a row per run, round and agent, or None if it was interrupted.

    Impossible combinations are reported and skipped.
    """
    for note in sweep.notes:
        tell(f"note: {note}")
    frames = []
    for number, (labels, recipe) in enumerate(sweep.runs, 1):
        words = sweep.words(labels)
        try:
            rows = _rows_of(recipe, folder / slug(labels), data_dir)
        except LearnerError as error:  # such as averaging the weights of different architectures
            tell(f"[{number}/{len(sweep)}] {words}: skipped. {error.must} Found: {error.found}")
            continue
        if rows is None:
            return None
        honest = [row for row in rows if row["round"] == recipe.rounds and not row.get("lies")]
        metric = recipe.evaluation.scores[0] if recipe.evaluation.scores else "accuracy"
        metric = as_score(metric).name
        key, where = (f"own_{metric}", " on own data") if sweep.compare.own else (metric, "")
        last = [row[key] for row in honest if key in row]
        said = f"{metric_name(metric)} {score_text(metric, sum(last) / len(last))}{where}" if last else "done"
        said += f" (of the {len(honest)} honest agents)" if any(row.get("lies") for row in rows) else ""
        tell(f"[{number}/{len(sweep)}] {words}: {said}")
        # With a hub, all that agents receive is from it; between peers every message is in somebody's `sent`.
        frame = pd.DataFrame([{**labels, **row} for row in rows])
        frames.append(frame.assign(from_hub=frame["received"]) if topology_of(recipe).hub else frame)
    if not frames:
        raise RecipeError("A sweep must hold at least one possible run.", "none", "See what was said above.")
    frame = pd.concat(frames, ignore_index=True)
    frame.to_csv(folder / TABLE, index=False)
    return frame


def _rows_of(recipe: Recipe, place: Path, data_dir: str | None) -> list[Row] | None:
    """The rows of one run, which is run first if it is not done; None if it was interrupted."""
    if recipe.runtime.kind == "machines":
        raise RecipeError(
            "The runs of a sweep are computed on one machine, one after the other.",
            "runtime.kind = 'machines'",
            "Use the runtime 'processes', or start each run by itself.",
        )
    begun = (place / RECIPE).exists()
    if begun:
        if not is_run_of(recipe, place):
            raise RecipeError(
                "A sweep's folder must hold runs of the same recipe.",
                f"{place} holds a run of another",
                "Choose another --out, or remove that folder.",
            )
        rows = read_rows(place / METRICS) if (place / METRICS).exists() else []
        if any(row["round"] == recipe.rounds for row in rows):
            return rows
    _, complete = execute(recipe, place, data_dir=data_dir, resume=begun, progress=False)
    return read_rows(place / METRICS) if complete else None


def slug(labels: Mapping[str, str]) -> str:
    """The name of a combination's folder."""
    return "_".join(re.sub(r"[^\w.+-]+", "", label) for label in labels.values()).lstrip(".") or "run"
