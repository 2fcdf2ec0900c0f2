"""From a recipe to a run's folder: build the federation, run it, and report its results."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import tomli_w

from codistill.data import loading as datasets
from codistill.data.partition import counts
from codistill.data.validation import digest
from codistill.devices import CPU, check_device
from codistill.errors import CheckpointError
from codistill.experiments.recipe import Recipe, with_code
from codistill.experiments.recipe_federation import build, hand_out, plan_of
from codistill.experiments.same_run import check_code_of_run, facts_of_code
from codistill.experiments.saved_run import RECIPE, read_facts, read_summary
from codistill.federation import Federation
from codistill.federation.clock_checks import check_clock_runtime
from codistill.federation.result import Result
from codistill.federation.run_facts import FACTS
from codistill.files import locked, write_atomically, writing
from codistill.results.summary import Summary
from codistill.runtimes.network.terms import describe_public
from codistill.runtimes.store import check_vacant
from codistill.topology.facts import as_plain
from codistill.version import versions

REPORT, NETWORK = "report.html", "network.json"
_CODE = ("protocol_code", "learner_code", "user_code")  # facts that are digests of one's own files


def prepare(
    recipe: Recipe, folder: Path, *, data_dir: str | None = None, resume: bool = False, trust_code: bool = False
) -> tuple[Federation, datasets.Dataset]:
    """Build a recipe's federation, and write into the folder of its run what it is; to resume, compare.

    `trust_code`: files of one's own may have changed since the run began.
    """
    if not resume:
        check_vacant(folder)
    elif not trust_code:
        check_code_of_run(recipe, folder)
    recipe = with_code(recipe)
    federation, data = build(recipe, data_dir)
    facts = _facts(recipe, federation, data)
    make_folder(folder, source_of(recipe, data_dir), facts, resume=resume, trust_code=trust_code)
    return federation, data


def make_folder(
    folder: Path, source: dict[str, Any], facts: dict[str, Any], *, resume: bool, trust_code: bool = False
) -> None:
    """Write a run's recipe and facts into its folder; to resume, compare."""
    if resume:
        _check_facts(folder, facts, trust_code)
    else:
        _write_new(folder, source, facts)


def execute(
    recipe: Recipe,
    folder: Path,
    *,
    data_dir: str | None = None,
    resume: bool = False,
    progress: bool = True,
    trust_code: bool = False,
) -> tuple[Summary, bool]:
    """Run a recipe in a folder; returns its results, and whether all rounds were done."""
    elsewhere = (folder / NETWORK).exists() or (folder / "agents").is_dir()
    if resume and elsewhere and recipe.runtime.kind != "network":
        raise CheckpointError(
            "A run between machines is resumed where it ran.",
            f"{folder} is the folder of a hub, or of 'codistill up'",
            "Give the same command again, with the same --out: it goes on from its checkpoint.",
        )
    check_clock_runtime(recipe.clock, recipe.runtime.kind)
    check_devices(recipe)
    if recipe.runtime.kind == "network":
        plan_of(recipe).check_for_network()
    federation, _ = prepare(recipe, folder, data_dir=data_dir, resume=resume, trust_code=trust_code)
    result = _run(federation, recipe, folder, resume=resume, progress=progress)
    return report_on(folder), not result.interrupted


def _run(federation: Federation, recipe: Recipe, folder: Path, *, resume: bool, progress: bool) -> Result:
    plan = plan_of(recipe)
    return federation.run(
        plan.rounds,
        runtime=recipe.runtime.kind,
        workers=recipe.runtime.workers,
        device=recipe.runtime.device,
        idle=recipe.runtime.idle,
        network=recipe.network if recipe.runtime.kind == "network" else None,
        ray=recipe.ray if recipe.runtime.kind == "ray" else None,
        evaluate_every=plan.evaluate_every,
        evaluate_samples=plan.evaluate_samples,
        evaluate_agents=plan.evaluate_agents,
        alone=plan.baseline,
        folder=folder,
        resume=resume,
        checkpoint_every=plan.checkpoint_every,
        features_at=plan.features_at,
        progress=progress,
    )


def check_devices(recipe: Recipe) -> None:
    """The devices that a recipe names must be on this machine: for who runs it, before there is a folder."""
    if recipe.runtime.kind == "ray":
        return  # agents compute on other machines, and say so there
    for device in {recipe.runtime.device, *(entry.device or CPU for entry in recipe.agents)}:
        check_device(device)


def new_folder(parent: Path, stem: str) -> Path:
    """A folder that is not there yet."""
    number = 1
    while (parent / f"{stem}-{number}").exists():
        number += 1
    return parent / f"{stem}-{number}"


def report_on(folder: Path) -> Summary:
    """Write the report of a run; returns what it is made from."""
    from codistill.reports.pages import write_report

    summary = read_summary(folder)
    write_report(summary, folder / REPORT)
    return summary


def source_of(recipe: Recipe, data_dir: str | None) -> dict[str, Any]:
    """The recipe's tables, with the data folder that was used: whoever resumes need not name it again."""
    data = recipe.data
    tables_of_folder = [
        path for path in (data.file, *(data.files or {}).values()) if path and not Path(path).is_absolute()
    ]
    if data_dir is None or data.dir is not None or not (data.by_name or tables_of_folder):
        return recipe.source
    return {**recipe.source, "data": {**recipe.source["data"], "dir": str(Path(data_dir).resolve())}}


def _write_new(folder: Path, source: dict[str, Any], facts: dict[str, Any]) -> None:
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        check_vacant(folder)
        write_atomically(folder / RECIPE, tomli_w.dumps(source).encode())
        write_atomically(folder / FACTS, json.dumps(facts, indent=1).encode())


def _check_facts(folder: Path, facts: dict[str, Any], trust_code: bool) -> None:
    """Agents, data and protocol must be what they were; a run that was killed before it said so says it now."""
    if not (folder / FACTS).exists():
        write_atomically(folder / FACTS, json.dumps(facts, indent=1).encode())
        return
    before, now = read_facts(folder), json.loads(json.dumps(facts))
    changed = [key for key in now if key != "versions" and key in before and _differs(key, before[key], now[key])]
    code = [key for key in _CODE if before.get(key) != now.get(key)] if trust_code else []
    others = [key for key in changed if key not in code]
    if others:
        raise CheckpointError(
            f"Data and agents must be as they were when the run in {folder} began.",
            f"other {', '.join(others)}",
            "Bring the data, the recipe, and the files of your own models, back; or start a new run with 'codistill "
            "run'.",
        )
    if code:
        earlier = [*before.get("earlier_code", ()), {key: before.get(key) for key in code}]
        written = {**before, **{key: now[key] for key in code if key in now}, "earlier_code": earlier}
        write_atomically(folder / FACTS, json.dumps(written, indent=1).encode())


def _differs(key: str, before: Any, now: Any) -> bool:
    """Whether a fact has changed. Files are compared by content, and settings that both versions of codistill have."""
    if key == "user_code":
        before, now = sorted(map(str, before.values())), sorted(map(str, now.values()))
    if key == "protocol_settings":
        new = {**now["settings"], **before["settings"]}
        before = {**before, "settings": {name: new[name] for name in now["settings"]}}
    return json.dumps(before, sort_keys=True) != json.dumps(now, sort_keys=True)


def _facts(recipe: Recipe, federation: Federation, data: datasets.Dataset) -> dict[str, Any]:
    shards = [agent.shard for agent in federation.agents]
    labelled = data.y.ndim == 1
    table = counts(data.y, hand_out(recipe, data), data.classes).tolist() if labelled else None
    return {
        "agents": {agent.name: agent.learner.describe() for agent in federation.agents},
        "samples": {agent.name: len(shard) for agent, shard in zip(federation.agents, shards, strict=True)},
        "counts": table,
        "class_names": list(data.class_names),
        "task": federation.description.task,
        "test_samples": len(data.x_test),
        "public": describe_public(federation.public),
        "digests": [digest(part) for part in (data.x, data.y, data.x_test, data.y_test)],
        "topology": None if federation.topology.hub else as_plain(federation.topology),
        "compression": None if recipe.compression is None else dataclasses.asdict(recipe.compression),
        "seed": recipe.seed,
        **facts_of_code(recipe),
        "versions": versions(),
    }
