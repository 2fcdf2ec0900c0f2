"""What is known of a run from its folder alone, finished or not: its recipe, its facts, and its results."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np

from codistill.errors import CheckpointError, RecipeError
from codistill.experiments.recipe import Recipe, make_recipe
from codistill.federation.run_facts import FACTS, faults_in, scores_in
from codistill.results.scores import DEFAULT_SCORES, Score, as_score
from codistill.results.summary import Summary
from codistill.runtimes.store import BASELINE, METRICS, TIMES, read_features, read_outputs, read_rows, whole_lines
from codistill.topology import Topology
from codistill.topology.facts import from_plain

RECIPE = "recipe.toml"


def reopen(folder: Path) -> Recipe:
    """The recipe of a run's folder; code that it names is not run: see `recipe.with_code`."""
    try:
        return make_recipe(tomllib.loads((folder / RECIPE).read_text("utf-8")), folder.resolve(), run_code=False)
    except (OSError, ValueError) as error:
        missing = isinstance(error, FileNotFoundError | NotADirectoryError)
        if missing and _is_from_python(folder):
            raise CheckpointError(
                f"{folder} must be the folder of a recipe's run.",
                f"a run from Python: no {RECIPE} there",
                "Go on with it in Python, by run(folder=..., resume=True), and save its models by agent.save(path).",
            ) from None
        raise CheckpointError(
            f"{folder} must be the folder of a run.",
            f"no {RECIPE} there" if missing else f"{RECIPE}: {error}",
            "Name a folder that 'codistill run' made, or Federation.run(folder=...).",
        ) from None


def read_summary(folder: Path) -> Summary:
    """What is known of a run from its folder alone, finished or not."""
    recipe = None if _is_from_python(folder) else reopen(folder)
    facts = read_facts(folder)
    try:
        seconds = [float(json.loads(line)["seconds"]) for line in whole_lines(folder / TIMES)]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{folder / TIMES} must be as it was written.", f"{error}", "Run the recipe again, in another folder."
        ) from None
    alone = folder / BASELINE / METRICS
    rows = read_rows(folder / METRICS)
    done = max((row["round"] for row in rows), default=0)
    return Summary(
        title=folder.resolve().name,
        protocol=facts["protocol"]["name"] if recipe is None else recipe.source["protocol"]["name"],
        agents=facts["agents"],
        rows=rows,
        alone_rows=read_rows(alone) if (recipe is None or recipe.evaluation.alone) and alone.exists() else None,
        counts=None if facts["counts"] is None else np.asarray(facts["counts"]),
        class_names=tuple(facts["class_names"]),
        seconds=sum(seconds),
        test_samples=facts["test_samples"],
        test_part="validation" if recipe is not None and recipe.data.validation else "test",
        facts=_shown_facts(folder, facts, recipe),
        outputs=read_outputs(folder, done),
        features=read_features(folder, done),
        topology=_read_topology(folder, facts),
        faults=faults_in(facts) if recipe is None else recipe.faults,
        scores=_scores(facts, recipe),
    )


def _is_from_python(folder: Path) -> bool:
    """Whether the folder is that of `Federation.run` or `serve`, which say the protocol in the place of a recipe."""
    return not (folder / RECIPE).exists() and (folder / FACTS).exists() and "protocol" in read_facts(folder)


def _shown_facts(folder: Path, facts: dict[str, Any], recipe: Recipe | None) -> dict[str, Any]:
    """What the report shows as it is: the recipe or, of a run from Python, the protocol with its settings."""
    if recipe is None:
        return {key: facts[key] for key in ("protocol", "versions", "seed")}
    return {"recipe": (folder / RECIPE).read_text("utf-8"), "versions": facts["versions"], "seed": recipe.seed}


def _scores(facts: dict[str, Any], recipe: Recipe | None) -> tuple[Score, ...]:
    """What was measured; where none is named, and in folders from before the task was kept, the rows tell it."""
    named = scores_in(facts) if recipe is None else tuple(as_score(name) for name in recipe.evaluation.scores)
    return named or tuple(score for score in DEFAULT_SCORES if facts.get("task") in (None, score.task))


def _read_topology(folder: Path, facts: dict[str, Any]) -> Topology | None:
    """Who spoke to whom; None for a star, and in folders of runs from before this was kept."""
    if facts.get("topology") is None:
        return None
    try:
        return from_plain(list(facts["agents"]), facts["topology"])
    except (LookupError, ValueError, TypeError, AttributeError, RecipeError) as error:
        raise CheckpointError(
            f"The topology in {folder / FACTS} must be as it was written.",
            f"{type(error).__name__}: {error}"[:200],
            "Remove it there: everything else can be shown without it.",
        ) from None


def read_facts(folder: Path) -> dict[str, Any]:
    """What a run began with: its agents, their data and the versions of the software."""
    wanted = {"agents", "counts", "class_names", "test_samples", "versions"}
    try:
        facts: dict[str, Any] = json.loads((folder / FACTS).read_text("utf-8"))
        if not wanted <= facts.keys():
            raise ValueError(f"no {', '.join(sorted(wanted - facts.keys()))} in it")
        return facts
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{folder / FACTS} must be as it was written.", f"{error}", "Run the recipe again, in another folder."
        ) from None


def protocol_code(folder: Path) -> str | None:
    """The digest of the file of a run's own protocol, as it was when the run began."""
    code = read_facts(folder).get("protocol_code") if (folder / FACTS).exists() else None
    return None if code is None else str(code)


def learner_code(folder: Path) -> dict[str, str] | None:
    """The digests of the files of a run's own learners, as they were when the run began."""
    return read_facts(folder).get("learner_code") if (folder / FACTS).exists() else None
