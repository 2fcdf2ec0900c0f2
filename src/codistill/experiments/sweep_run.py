"""The runs of a sweep and their table: what is done is not run again, what is impossible is reported."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from codistill.errors import LearnerError, RecipeError
from codistill.experiments.recipe import Recipe
from codistill.experiments.recipe_federation import topology_of
from codistill.experiments.run import execute
from codistill.experiments.same_run import is_run_of
from codistill.experiments.saved_run import RECIPE
from codistill.experiments.sweep import Sweep
from codistill.experiments.sweep_jobs import check_no_jobs
from codistill.files import lock, write_atomically, writing
from codistill.results.metric_text import metric_name, score_text
from codistill.results.records import Row
from codistill.results.scores import as_score
from codistill.runtimes.store import METRICS, read_rows
from codistill.text import csv_text

TABLE = "sweep.csv"

Outcome = list[Row] | str | None  # rows; or why there are none; or None: it was interrupted


@dataclass(frozen=True)
class Cell:
    """One run of a sweep: a combination of values, in words, its recipe, and its folder."""

    labels: dict[str, str]
    words: str
    recipe: Recipe
    place: Path


RunCells = Callable[[Sequence[Cell]], Iterable[tuple[Cell, Outcome]]]


def execute_sweep(
    sweep: Sweep,
    folder: Path,
    *,
    data_dir: str | None = None,
    tell: Callable[[str], None] = print,
    run: RunCells | None = None,
) -> pd.DataFrame | None:
    """Run what is not done yet; returns a row per run, round and agent, or None if it was interrupted.

    Impossible combinations are reported and skipped. `run` has the runs done, in any order; by default they are done
    here, one after the other.
    """
    for note in sweep.notes:
        tell(f"note: {note}")
    cells = [Cell(labels, sweep.words(labels), recipe, folder / slug(labels)) for labels, recipe in sweep.runs]
    for cell in cells:
        _check_one_machine(cell.recipe)
    _check_places(cells)
    found: dict[Path, list[Row]] = {}
    with _only_sweep(folder):
        run = run or (lambda cells: _one_after_the_other(cells, folder, data_dir))
        for ended, (cell, outcome) in enumerate(run(cells), 1):
            if outcome is None:
                return None
            said = outcome if isinstance(outcome, str) else _score_words(sweep, cell, outcome)
            tell(f"[{ended}/{len(cells)}] {cell.words}: {said}")
            if not isinstance(outcome, str):
                found[cell.place] = outcome
        if not found:
            raise RecipeError("A sweep must hold at least one possible run.", "none", "See what was said above.")
        frame = pd.concat([_frame(cell, found[cell.place]) for cell in cells if cell.place in found], ignore_index=True)
        write_atomically(folder / TABLE, csv_text(frame).encode())
    return frame


@contextmanager
def _only_sweep(folder: Path) -> Iterator[None]:
    """While it is active, no other sweep uses the folder."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with writing(folder, "Wait for the sweep that uses it to end, or choose another --out."):
        handle = lock(folder)
    try:
        yield
    finally:
        handle.close()


def _check_one_machine(recipe: Recipe) -> None:
    if recipe.runtime.kind == "ray":
        raise RecipeError(
            "Each run of a sweep is computed on one machine.",
            "runtime.kind = 'ray'",
            "Use the runtime 'processes', or start each run by itself.",
        )


def _check_places(cells: Sequence[Cell]) -> None:
    seen: dict[Path, Cell] = {}
    for cell in cells:
        other = seen.setdefault(cell.place, cell)
        if other is not cell:
            raise RecipeError(
                "The runs of a sweep must have folders of their own.",
                f"'{cell.place.name}' for both {other.words} and {cell.words}",
                "Name the values by labels that differ in their letters or digits.",
            )


def _one_after_the_other(cells: Sequence[Cell], folder: Path, data_dir: str | None) -> Iterator[tuple[Cell, Outcome]]:
    check_no_jobs(folder, [cell.place.name for cell in cells])
    for cell in cells:
        yield cell, outcome_of(cell.recipe, cell.place, data_dir)


def outcome_of(recipe: Recipe, place: Path, data_dir: str | None, workers: int | None = None) -> Outcome:
    """The outcome of one run, which is run first if it is not done.

    `workers`: worker processes, where the recipe does not say how many; they change no result, and are not kept.
    """
    try:
        rows = finished_rows(recipe, place)
        if rows is not None:
            return rows
        begun = (place / RECIPE).exists()
        runtime = replace(recipe.runtime, workers=recipe.runtime.workers or workers)
        recipe = replace(recipe, runtime=runtime)
        _, complete = execute(recipe, place, data_dir=data_dir, resume=begun, progress=False)
        return read_rows(place / METRICS) if complete else None
    except LearnerError as error:  # such as averaging the weights of different architectures
        return f"skipped. {error.must} Found: {error.found}"


def finished_rows(recipe: Recipe, place: Path) -> list[Row] | None:
    """The rows of a run that is done; None if it is not."""
    if not (place / RECIPE).exists():
        return None
    if not is_run_of(recipe, place):
        raise RecipeError(
            "A sweep's folder must hold runs of the same recipe.",
            f"{place} holds a run of another",
            "Choose another --out, or remove that folder.",
        )
    rows = read_rows(place / METRICS) if (place / METRICS).exists() else []
    return rows if any(row["round"] == recipe.rounds for row in rows) else None


def _score_words(sweep: Sweep, cell: Cell, rows: list[Row]) -> str:
    """The score of the agents after the last round, for a person."""
    recipe = cell.recipe
    honest = [row for row in rows if row["round"] == recipe.rounds and not row.get("lies")]
    metric = recipe.evaluation.scores[0] if recipe.evaluation.scores else "accuracy"
    metric = as_score(metric).name
    key, where = (f"own_{metric}", " on own data") if sweep.compare.own else (metric, "")
    last = [row[key] for row in honest if key in row]
    said = f"{metric_name(metric)} {score_text(metric, sum(last) / len(last))}{where}" if last else "done"
    return said + (f" (of the {len(honest)} honest agents)" if any(row.get("lies") for row in rows) else "")


def _frame(cell: Cell, rows: list[Row]) -> pd.DataFrame:
    # With a hub, all that agents receive is from it; between peers every message is in somebody's `sent`.
    frame = pd.DataFrame([{**cell.labels, **row} for row in rows])
    return frame.assign(from_hub=frame["received"]) if topology_of(cell.recipe).hub else frame


def slug(labels: Mapping[str, str]) -> str:
    """The name of a combination's folder."""
    return "_".join(re.sub(r"[^\w.+-]+", "", label) for label in labels.values()).lstrip(".") or "run"
