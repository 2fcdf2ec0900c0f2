"""Whether a folder holds a run of this recipe: the tables, and the content of one's own files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from codistill.errors import CheckpointError, RecipeError
from codistill.experiments.recipe import Recipe, code_of
from codistill.experiments.saved_run import RECIPE, learner_code, protocol_code, read_facts, reopen
from codistill.experiments.user_code import UnreadProtocol, digests_of, files_of, is_own, shown_files
from codistill.federation.run_facts import FACTS
from codistill.protocol import Protocol
from codistill.runtimes.network.terms import describe_protocol
from codistill.runtimes.ray_cluster import RayCluster
from codistill.settings import from_table


def has_run_of(recipe: Recipe, folder: Path) -> bool:
    """Whether a folder that may be empty, or not there, holds a run of this recipe."""
    return (folder / RECIPE).exists() and is_run_of(recipe, folder)


def is_run_of(recipe: Recipe, place: Path) -> bool:
    """Whether a folder holds a run of this recipe. A protocol in a file of one's own is compared by the file's content
    and the settings: the class is another object whenever the file is loaded. No code that the folder names is run."""
    there = reopen(place)
    code, models = facts_of_protocol(recipe).get("protocol_code"), facts_of_learners(recipe).get("learner_code")
    same_code = protocol_code(place) in (None, code) and learner_code(place) in (None, models)
    protocol = _as_in(recipe, there, place)
    return same_code and protocol is not None and _comparable(replace(there, protocol=protocol)) == _comparable(recipe)


def _as_in(recipe: Recipe, there: Recipe, place: Path) -> Protocol | None:
    """The protocol of the run in a folder; one's own is made from the class of the recipe, if that is the same code."""
    unread, kind = there.protocol, type(recipe.protocol)
    if not isinstance(unread, UnreadProtocol):
        return unread
    here = recipe.source["protocol"]["name"]
    if not is_own(here) or unread.class_name != here.rpartition(":")[2]:
        return None
    if protocol_code(place) is None and list(digests_of([unread.place]).values()) != list(digests_of([here]).values()):
        return None
    try:
        made: Protocol = from_table(kind, unread.table, "protocol")
    except RecipeError:
        return None
    return made


def _comparable(recipe: Recipe) -> tuple[Recipe, dict[str, Any]]:
    """Where the data are, and what a Ray cluster gives each host, is no part of what a run is."""
    plain = replace(recipe, data=replace(recipe.data, dir=None), protocol=Protocol(), ray=RayCluster())
    return plain, describe_protocol(recipe.protocol)


def check_code_of_run(recipe: Recipe, folder: Path) -> None:
    """Before any code of a run is run again: it must be what it was when the run began, file by file."""
    now = files_of(code_of(recipe))
    if not now:
        return
    before = read_facts(folder) if (folder / FACTS).exists() else {}
    bound = before.get("user_code")
    if bound is None:  # a folder from before helpers were recorded
        digests = {before.get("protocol_code"), *before.get("learner_code", {}).values()} - {None}
        named = digests_of(code_of(recipe))
        now = {path: code for path, code in now.items() if path.name in named}
        bound = {str(path): code for path, code in now.items() if code in digests}
    changed = {path: code for path, code in now.items() if code is None or code not in bound.values()}
    if changed:
        of_protocol = Path(recipe.source["protocol"]["name"].rpartition(":")[0]) in changed
        then = [bound[str(path)] for path in changed if str(path) in bound]
        raise CheckpointError(
            f"Code of your own must be what it was when the run in {folder} began.",
            f"other {'protocol_code' if of_protocol else 'learner_code'}: {shown_files(changed)}"
            + (f"; then SHA-256 {', '.join(map(str, then))}" if then else "; it was not part of the run then"),
            "Bring the data, and the files of your own models, back; or start a new run with 'codistill run'; or, to "
            f"go on with the files as they are now: codistill resume {folder} --trust-code.",
        )


def facts_of_protocol(recipe: Recipe) -> dict[str, str]:
    """Of a protocol in a file of one's own: the digest of that file."""
    code = describe_protocol(recipe.protocol).get("code")
    return {} if code is None else {"protocol_code": code}


def facts_of_learners(recipe: Recipe) -> dict[str, dict[str, str]]:
    """Of learners in files of one's own: the digest of each file."""
    code = digests_of([kind for entry in recipe.agents for kind in entry.kinds])
    return {"learner_code": code} if code else {}


def facts_of_code(recipe: Recipe) -> dict[str, Any]:
    """What binds a run to its protocol: name and settings, and the digest of every file of one's own that is run."""
    described = json.loads(json.dumps(describe_protocol(recipe.protocol), default=str))
    bound = {"protocol_settings": {key: described[key] for key in ("name", "settings")}}
    files = {str(path): code for path, code in files_of(code_of(recipe)).items()}
    return {
        **bound,
        **({"user_code": files} if files else {}),
        **facts_of_protocol(recipe),
        **facts_of_learners(recipe),
    }
