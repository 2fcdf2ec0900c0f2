"""Whether a folder holds a run of this recipe: the tables, and the content of one's own files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from codistill.experiments.recipe import Recipe
from codistill.experiments.saved_run import RECIPE, learner_code, protocol_code, reopen
from codistill.experiments.user_code import digests_of
from codistill.protocol import Protocol
from codistill.runtimes.machines.machine_options import Machines
from codistill.runtimes.network.terms import describe_protocol


def has_run_of(recipe: Recipe, folder: Path) -> bool:
    """Whether a folder that may be empty, or not there, holds a run of this recipe."""
    return (folder / RECIPE).exists() and is_run_of(recipe, folder)


def is_run_of(recipe: Recipe, place: Path) -> bool:
    """Whether a folder holds a run of this recipe. A protocol in a file of one's own is compared by the file's content
    and the settings: the class is another object whenever the file is loaded."""
    code, models = facts_of_protocol(recipe).get("protocol_code"), facts_of_learners(recipe).get("learner_code")
    same_code = protocol_code(place) in (None, code) and learner_code(place) in (None, models)
    return same_code and _comparable(reopen(place)) == _comparable(recipe)


def _comparable(recipe: Recipe) -> tuple[Recipe, dict[str, Any]]:
    """Where the data are, and how machines meet, is no part of what a run is."""
    plain = replace(recipe, data=replace(recipe.data, dir=None), protocol=Protocol(), machines=Machines())
    return plain, describe_protocol(recipe.protocol)


def facts_of_protocol(recipe: Recipe) -> dict[str, str]:
    """Of a protocol in a file of one's own: the digest of that file."""
    code = describe_protocol(recipe.protocol).get("code")
    return {} if code is None else {"protocol_code": code}


def facts_of_learners(recipe: Recipe) -> dict[str, dict[str, str]]:
    """Of learners in files of one's own: the digest of each file."""
    code = digests_of([kind for entry in recipe.agents for kind in entry.kinds])
    return {"learner_code": code} if code else {}
