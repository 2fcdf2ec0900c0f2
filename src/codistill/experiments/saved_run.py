"""What is known of a run from its folder alone, finished or not: its recipe, its facts, and its results."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from codistill.core.errors import CheckpointError, RecipeError
from codistill.core.settings import from_table
from codistill.core.text import parse_json, parse_toml
from codistill.data.labels import TASKS
from codistill.engine.store import BASELINE, METRICS, TIMES, read_features, read_outputs, read_rows, whole_lines
from codistill.experiments.recipe import Recipe, code_digests, code_of, make_recipe
from codistill.experiments.user_code import UnreadProtocol, digests_of, is_own, shown_files
from codistill.federation.result import FACTS, faults_in, scores_in
from codistill.network.terms import describe_protocol
from codistill.protocol import Protocol
from codistill.results.records import Row
from codistill.results.scores import DEFAULT_SCORES, Score, as_score
from codistill.results.summary import Summary
from codistill.runtimes.ray_cluster import RayCluster
from codistill.topology import Topology
from codistill.topology.graphs import from_plain

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


def _is_score(value: Any) -> bool:
    kinds = {"name": str, "greater_is_better": bool, "task": str, "title": str, "percent": bool}
    return isinstance(value, dict) and all(isinstance(value.get(key), kind) for key, kind in kinds.items())


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
    "scores": lambda value: isinstance(value, list) and all(map(_is_score, value)),
}


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
            f"{folder / TIMES} is corrupted.", f"{error}", "Run the recipe again, in another folder."
        ) from None
    alone = folder / BASELINE / METRICS
    rows = _rows_of(facts, folder / METRICS)
    done = max((row["round"] for row in rows), default=0)
    # What the report shows as it is: the recipe or, of a run from Python, the protocol with its settings.
    if recipe is None:
        shown: dict[str, Any] = {key: facts[key] for key in ("protocol", "versions", "seed")}
    else:
        text = (folder / RECIPE).read_text("utf-8")
        shown = {"recipe": text, "versions": facts["versions"], "seed": recipe.seed}
    return Summary(
        title=folder.resolve().name,
        protocol=facts["protocol"]["name"] if recipe is None else recipe.source["protocol"]["name"],
        agents=facts["agents"],
        rows=rows,
        alone_rows=_rows_of(facts, alone) if (recipe is None or recipe.spec.alone) and alone.exists() else None,
        counts=None if facts["counts"] is None else np.asarray(facts["counts"]),
        class_names=tuple(facts["class_names"]),
        seconds=sum(seconds),
        test_samples=facts["test_samples"],
        test_part="validation" if recipe is not None and recipe.data.validation else "test",
        facts=shown,
        outputs=read_outputs(folder, done),
        features=read_features(folder, done),
        topology=_read_topology(folder, facts),
        faults=faults_in(facts) if recipe is None else recipe.faults,
        scores=_scores(facts, recipe),
    )


def _rows_of(facts: dict[str, Any], path: Path) -> list[Row]:
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


def _scores(facts: dict[str, Any], recipe: Recipe | None) -> tuple[Score, ...]:
    """What was measured; where none is named, and in folders from before the task was kept, the rows tell it."""
    named = scores_in(facts) if recipe is None else tuple(as_score(name) for name in recipe.scores)
    return named or tuple(score for score in DEFAULT_SCORES if facts.get("task") in (None, score.task))


def _read_topology(folder: Path, facts: dict[str, Any]) -> Topology | None:
    """Who spoke to whom; None for a star, and in folders of runs from before this was kept."""
    if facts.get("topology") is None:
        return None
    try:
        return from_plain(list(facts["agents"]), facts["topology"])
    except (LookupError, ValueError, TypeError, AttributeError, RecipeError) as error:
        raise CheckpointError(
            f"The topology in {folder / FACTS} is corrupted.",
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
            f"{folder / FACTS} is corrupted.", f"{error}", "Run the recipe again, in another folder."
        ) from None


def _facts_there(folder: Path) -> dict[str, Any]:
    """The same; empty where the run has ended before it wrote them."""
    return read_facts(folder) if (folder / FACTS).exists() else {}


# --- Whether a folder holds a run of this recipe: the tables, and the content of one's own files.


def is_run_of(recipe: Recipe, place: Path) -> bool:
    """Whether a folder holds a run of this recipe. A protocol in a file of one's own is compared by the file's content
    and the settings: the class is another object whenever the file is loaded. No code that the folder names is run."""
    there, before, now = reopen(place), _facts_there(place), facts_of_code(recipe)
    if any(before.get(key) not in (None, now.get(key)) for key in ("protocol_code", "learner_code")):
        return False
    protocol = _as_in(recipe, there, before)
    return protocol is not None and _comparable(replace(there, protocol=protocol)) == _comparable(recipe)


def _as_in(recipe: Recipe, there: Recipe, facts: dict[str, Any]) -> Protocol | None:
    """The protocol of the run in a folder; one's own is made from the class of the recipe, if that is the same code."""
    unread, here = there.protocol, recipe.source["protocol"]["name"]
    if not isinstance(unread, UnreadProtocol):
        return unread
    if not is_own(here) or unread.class_name != here.rpartition(":")[2]:
        return None
    codes = [list(digests_of([name]).values()) for name in (unread.place, here)]
    if facts.get("protocol_code") is None and codes[0] != codes[1]:
        return None
    try:
        made: Protocol = from_table(type(recipe.protocol), unread.table, "protocol")
    except RecipeError:
        return None
    return made


def _comparable(recipe: Recipe) -> tuple[Recipe, dict[str, Any]]:
    """Where the data are, what a Ray cluster gives each host, and where a run is shown, is no part of what it is."""
    plain = replace(recipe, data=replace(recipe.data, dir=None), protocol=Protocol(), ray=RayCluster(), track=None)
    return plain, describe_protocol(recipe.protocol)


def check_code_of_run(recipe: Recipe, folder: Path) -> None:
    """Before any code of a run is run again: it must be what it was when the run began, file by file."""
    now = code_digests(recipe)
    if not now:
        return
    before = _facts_there(folder)
    bound = before.get("user_code")
    if bound is None:  # a folder from before helpers were recorded
        digests = {before.get("protocol_code"), *before.get("learner_code", {}).values()} - {None}
        named = digests_of(code_of(recipe))
        now = {path: code for path, code in now.items() if Path(path).name in named}
        bound = {path: code for path, code in now.items() if code in digests}
    changed = {path: code for path, code in now.items() if code is None or code not in bound.values()}
    if changed:
        of_protocol = str(Path(recipe.source["protocol"]["name"].rpartition(":")[0])) in changed
        then = [bound[path] for path in changed if path in bound]
        raise CheckpointError(
            f"Code of your own must be what it was when the run in {folder} began.",
            f"other {'protocol_code' if of_protocol else 'learner_code'}: {shown_files(changed)}"
            + (f"; then SHA-256 {', '.join(map(str, then))}" if then else "; it was not part of the run then"),
            "Bring the data, and the files of your own models, back; or start a new run with 'codistill run'; or, to "
            f"go on with the files as they are now: codistill resume {folder} --trust-code.",
        )


def facts_of_code(recipe: Recipe) -> dict[str, Any]:
    """What binds a run to its protocol: name and settings, and the digest of every file of one's own that is run."""
    described = json.loads(json.dumps(describe_protocol(recipe.protocol), default=str))
    found = {
        "protocol_settings": {key: described[key] for key in ("name", "settings")},
        "user_code": code_digests(recipe),
        "protocol_code": described.get("code"),
        "learner_code": digests_of([kind for entry in recipe.agents for kind in entry.kinds]),
    }
    return {key: value for key, value in found.items() if value}
