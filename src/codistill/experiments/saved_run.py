"""What is known of a run from its folder alone, finished or not: its recipe, its facts, and its results."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from codistill.data.labels import TASKS
from codistill.errors import CheckpointError, RecipeError
from codistill.experiments.recipe import Recipe, make_recipe
from codistill.federation.run_facts import FACTS, faults_in, scores_in
from codistill.results.records import Row
from codistill.results.scores import DEFAULT_SCORES, Score, as_score
from codistill.results.summary import Summary
from codistill.runtimes.store import BASELINE, METRICS, TIMES, read_features, read_outputs, read_rows, whole_lines
from codistill.text import parse_json, parse_toml
from codistill.topology import Topology
from codistill.topology.facts import from_plain

RECIPE = "recipe.toml"


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62


def _are_words(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(word, str) for word in value.values())


def _are_counts(value: Any) -> bool:
    rows = isinstance(value, list) and all(isinstance(row, list) for row in value)
    return value is None or (rows and all(_is_count(count) for row in value for count in row))


def _is_protocol(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("name"), str) and isinstance(value.get("settings"), dict)


# What each of the facts in run.json must be.
_SOUND: dict[str, Callable[[Any], bool]] = {
    "agents": _are_words,
    "counts": _are_counts,
    "class_names": lambda value: isinstance(value, list) and all(isinstance(name, str) for name in value),
    "test_samples": _is_count,
    "versions": _are_words,
    "task": lambda value: value is None or value in TASKS,
    "protocol": _is_protocol,
    "protocol_settings": _is_protocol,
    "protocol_code": lambda value: isinstance(value, str),
    "learner_code": _are_words,
    "user_code": _are_words,
    "seed": lambda value: isinstance(value, int),
    "faults": lambda value: isinstance(value, list) and all(isinstance(each, dict) for each in value),
    "scores": lambda value: isinstance(value, list) and all(_is_score(each) for each in value),
}
_OF_A_SCORE = {"name": str, "greater_is_better": bool, "task": str, "title": str, "percent": bool}


def _is_score(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(key), kind) for key, kind in _OF_A_SCORE.items())


def reopen(folder: Path) -> Recipe:
    """The recipe of a run's folder; code that it names is not run: see `recipe.with_code`."""
    try:
        return make_recipe(parse_toml((folder / RECIPE).read_text("utf-8")), folder.resolve(), run_code=False)
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
        seconds = [float(parse_json(line)["seconds"]) for line in whole_lines(folder / TIMES)]
        if not all(map(math.isfinite, seconds)):
            raise ValueError("a time that is not finite")
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise CheckpointError(
            f"{folder / TIMES} must be as it was written.", f"{error}", "Run the recipe again, in another folder."
        ) from None
    alone = folder / BASELINE / METRICS
    rows = _rows_of(facts, folder / METRICS)
    done = max((row["round"] for row in rows), default=0)
    return Summary(
        title=folder.resolve().name,
        protocol=facts["protocol"]["name"] if recipe is None else recipe.source["protocol"]["name"],
        agents=facts["agents"],
        rows=rows,
        alone_rows=_rows_of(facts, alone) if (recipe is None or recipe.evaluation.alone) and alone.exists() else None,
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


def _rows_of(facts: dict[str, Any], path: Path) -> list[Row]:
    """The rows of a metrics file, all of agents that the run has."""
    rows = read_rows(path)
    strangers = {row["agent"] for row in rows} - facts["agents"].keys()
    if strangers:
        raise CheckpointError(
            f"{path} must hold rows of the agents in {FACTS}.",
            f"{sorted(strangers)[0]!r}"[:100],
            "Check the run's folder.",
        )
    return rows


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
        facts: dict[str, Any] = parse_json((folder / FACTS).read_text("utf-8"))
        if not isinstance(facts, dict) or not wanted <= facts.keys():
            raise ValueError(f"no {', '.join(sorted(wanted - set(facts if isinstance(facts, dict) else ())))} in it")
        for key, is_sound in _SOUND.items():
            if key in facts and not is_sound(facts[key]):
                raise ValueError(f"'{key}' is {facts[key]!r}"[:200])
        counts, shape = facts["counts"], (len(facts["agents"]), len(facts["class_names"]))
        if counts is not None and (len(counts) != shape[0] or any(len(row) != shape[1] for row in counts)):
            raise ValueError(f"'counts' must have a row for each of {shape[0]} agents, with {shape[1]} classes")
        return facts
    except (OSError, ValueError) as error:
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
