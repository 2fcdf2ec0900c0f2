"""Every recipe that comes with the project is valid, and those on bundled data run."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
import torch

from codistill.experiments.recipe import read_recipe
from codistill.experiments.run import execute
from codistill.experiments.sweep import read_sweep
from codistill.learners.catalogue import make_learner

ALL = sorted((Path(__file__).parents[1] / "recipes").rglob("*.toml"))
SWEEPS = [path for path in ALL if "[sweep" in path.read_text("utf-8")]
RECIPES = [path for path in ALL if path not in SWEEPS]
BUNDLED = [path for path in RECIPES if path.parent.name == "digits"]


@cache  # many runs of a sweep have the same learners, and drawing the weights of a large one takes a second
def check_learner(kind: str, options: str) -> None:
    """A learner of a recipe can be made for colour images; without memory for its weights, which nobody needs here."""
    with torch.device("meta"):
        make_learner(kind, json.loads(options), (3, 32, 32), 10)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_recipe_is_valid(path: Path) -> None:
    recipe = read_recipe(path)
    assert recipe.spec.rounds >= 5
    assert sum(entry.count for entry in recipe.agents) >= 2


@pytest.mark.parametrize("quick", [True, False], ids=["quick", "full"])
@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_sweep_is_valid_and_has_a_quick_form(path: Path, quick: bool) -> None:
    sweep = read_sweep(path, quick=quick)
    recipes = [recipe for _, recipe in sweep.runs]
    assert max(recipe.spec.rounds for recipe in recipes) >= 5
    assert all(sum(entry.count for entry in recipe.agents) >= 2 for recipe in recipes)
    for entry in (entry for recipe in recipes for entry in recipe.agents):
        check_learner(entry.kind, json.dumps(entry.options))


@pytest.mark.long
@pytest.mark.parametrize("path", BUNDLED, ids=lambda path: path.stem)
def test_a_recipe_on_bundled_data_runs(path: Path, tmp_path: Path) -> None:
    recipe = read_recipe(path, ["protocol.rounds=2", "evaluation.alone=false"])
    summary, complete = execute(recipe, tmp_path / "run", progress=False)
    assert complete
    assert summary.rounds == 2
    assert all(line.together is not None and line.together > 0.05 for line in summary.lines())
    assert (tmp_path / "run" / "report.html").stat().st_size > 10_000
