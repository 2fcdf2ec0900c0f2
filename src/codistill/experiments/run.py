"""From a recipe to a run's folder: build the federation, run it, and report its results."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import tomli_w

from codistill.core.devices import CPU, check_device
from codistill.core.errors import CheckpointError, CodistillError, RecipeError, nearest
from codistill.core.files import locked, own_folder, write_atomically, writing
from codistill.core.spec import RunSpec
from codistill.data.labels import CLASSIFICATION, LabelEncoding, class_names
from codistill.data.partition import counts
from codistill.data.validation import Dataset, digest
from codistill.engine.store import check_vacant, content_of, nodes_in, read_body
from codistill.experiments.building import agent_names, build, hand_out
from codistill.experiments.recipe import Recipe, check_trusted, code_of, with_code
from codistill.experiments.saved_run import RECIPE, check_code_of_run, facts_of_code, read_facts, read_summary, reopen
from codistill.experiments.tracking import Tracking, as_texts
from codistill.federation import Federation, run_on_this_machine
from codistill.federation.checks import checked_run
from codistill.federation.result import FACTS, facts_of
from codistill.federation.trained_model import Samples, TrainedModel
from codistill.network.policy import AUDIT
from codistill.network.state_store import find_states
from codistill.nodes.agent import Agent
from codistill.nodes.record import record_of
from codistill.results.summary import Summary

REPORT, NETWORK = "report.html", "network.json"
_CODE = ("protocol_code", "learner_code", "user_code")  # facts that are digests of one's own files


def prepare(
    recipe: Recipe,
    folder: Path,
    spec: RunSpec | None = None,
    *,
    data_dir: str | None = None,
    resume: bool = False,
    trust_code: bool = False,
    mode: int | None = None,
) -> tuple[Federation, Dataset]:
    """Build a recipe's federation, and write the facts of its run into the folder; to resume, compare them.

    `spec`: the options with which it will run, checked here; None: it will not run. `trust_code`: files of one's own
    may have changed since the run began. `mode`: see `make_folder`.
    """
    if not resume:
        check_vacant(folder)
    elif not trust_code:
        check_code_of_run(recipe, folder)
    recipe = with_code(recipe)
    federation, data = build(recipe, data_dir)
    if spec is not None:
        federation.description = checked_run(federation.description, spec)
    # What its federation does not know, or not as the recipe says it.
    of_recipe = {
        "counts": counts(data.y, hand_out(recipe, data), data.classes).tolist() if data.y.ndim == 1 else None,
        "class_names": list(data.class_names),
        "digests": [digest(part) for part in (data.x, data.y, data.x_test, data.y_test)],
        **facts_of_code(recipe),
    }
    facts = facts_of(federation.description, of_recipe)
    make_folder(folder, source_of(recipe, data_dir), facts, resume=resume, trust_code=trust_code, mode=mode)
    return federation, data


def make_folder(
    folder: Path,
    source: dict[str, Any],
    facts: dict[str, Any],
    *,
    resume: bool,
    trust_code: bool = False,
    mode: int | None = None,
) -> None:
    """Write a run's recipe and facts into its folder; to resume, compare them.

    `mode`: of the folder of a hub or a peer, which nobody else may write to.
    """
    if mode is not None:
        own_folder(folder, mode)
    if resume:
        _check_facts(folder, facts, trust_code)
        return
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        check_vacant(folder)
        write_atomically(folder / RECIPE, tomli_w.dumps(source).encode())
        write_atomically(folder / FACTS, json.dumps(facts, indent=1).encode())


def execute(
    recipe: Recipe,
    folder: Path,
    *,
    data_dir: str | None = None,
    resume: bool = False,
    progress: bool = True,
    trust_code: bool = False,
    report: bool = True,
) -> tuple[Summary, bool]:
    """Run a recipe in a folder; returns its results, and whether all rounds were done."""
    elsewhere = (folder / NETWORK).exists() or (folder / "agents").is_dir()
    if resume and elsewhere and recipe.spec.runtime != "network":
        raise CheckpointError(
            "A run between machines is resumed where it ran.",
            f"{folder} is the folder of a hub, or of 'codistill up'",
            "Give the same command again, with the same --out: it goes on from its checkpoint.",
        )
    check_devices(recipe)
    trackers = trackers_of(recipe)
    federation, _ = prepare(recipe, folder, recipe.spec, data_dir=data_dir, resume=resume, trust_code=trust_code)
    result = run_on_this_machine(
        federation.description, network=recipe.network, ray=recipe.ray, folder=folder, resume=resume, progress=progress,
        observers=trackers,
    )  # fmt: skip
    return report_on(folder, trackers) if report else read_summary(folder), not result.interrupted


def trackers_of(recipe: Recipe) -> list[Tracking]:
    """The observer that [track] asks for, which must be installed; it shows the recipe's own tables as well."""
    if recipe.track is None:
        return []
    return [Tracking(recipe.track, as_texts({key: table for key, table in recipe.source.items() if key != "track"}))]


def check_devices(recipe: Recipe) -> None:
    """The devices that a recipe names must be on this machine: for who runs it, before there is a folder."""
    if recipe.spec.runtime == "ray":
        return  # agents compute on other machines, and say so there
    for device in {recipe.spec.device, *(entry.device or CPU for entry in recipe.agents)}:
        check_device(device)


def new_folder(parent: Path, stem: str) -> Path:
    number = 1
    while (parent / f"{stem}-{number}").exists():
        number += 1
    return parent / f"{stem}-{number}"


def report_on(folder: Path, trackers: Sequence[Tracking] = ()) -> Summary:
    """Write the report of a run, unless a tracker of it just has; returns what it is made from."""
    from codistill.report.pages import write_report

    summary = read_summary(folder)
    if not any(each.page == folder / REPORT for each in trackers):
        write_report(summary, folder / REPORT)
    return summary


def source_of(recipe: Recipe, data_dir: str | None) -> dict[str, Any]:
    """The recipe's tables, with the data folder that was used: whoever resumes need not name it again."""
    data = recipe.data
    tables = filter(None, (data.file, data.folder, *(data.files or {}).values()))
    was_used = data.by_name or any(not Path(path).is_absolute() for path in tables)
    if data_dir is None or data.dir is not None or not was_used:
        return recipe.source
    return {**recipe.source, "data": {**recipe.source["data"], "dir": str(Path(data_dir).resolve())}}


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


# --- The trained models of a recipe's run, from its folder.


def trained_in(
    folder: Path, name: str, *, data_dir: str | None = None, trust_code: bool = False
) -> tuple[TrainedModel, int]:
    """An agent's model as it was at the last checkpoint of a run, and the number of rounds done by then.

    The recipe says how the model is built and how its data were scaled, so the data must still be there. A protocol or
    a learner in a file of one's own is run only with `trust_code`, and only if it is the file that the run began with.
    """
    if (folder / AUDIT).exists() and not (folder / RECIPE).exists():
        raise CheckpointError(
            "The folder of an agent that has joined a hub holds its state, and not how its model is built.",
            f"{folder}, without the agent's file",
            "Add --file my_agent.py: the file that 'codistill join' was given.",
        )
    recipe = reopen(folder)
    names = agent_names(recipe)
    if name not in names:
        raise RecipeError(f"{folder} must be a run with the agent that is named.", f"'{name}'", nearest(name, names))
    if recipe.data.held_by_agents:
        raise CheckpointError(
            "The models of agents that hold their data stay with them.",
            f"{folder} is the folder of a hub or of a peer",
            "At the agent: codistill export FOLDER NAME --file my_agent.py; the folder is that of 'codistill join'.",
        )
    check_trusted(code_of(recipe), trust_code, f"The model of '{name}'")
    done, saved = newest_state(folder, name)
    federation, data = prepare(recipe, folder, data_dir=data_dir, resume=True)
    agent = next(agent for agent in federation.agents if agent.name == name)
    bring_back(agent, saved, folder)
    description = federation.description
    named = replace(description, encoding=labels_of(data) or description.encoding)
    return TrainedModel(agent, named, samples_of(recipe, data)), done


def samples_of(recipe: Recipe, data: Dataset) -> Samples:
    return Samples(
        columns=data.columns,
        label=recipe.data.label,
        unused=(*recipe.data.drop, *recipe.data.ids),
        missing_values=tuple(recipe.data.missing_values),
        scaling=data.scaling,
    )


def labels_of(data: Dataset) -> LabelEncoding | None:
    """The classes named as in the data: a saved model answers with these names; None: they are no classes."""
    if data.y.ndim != 1:
        return None
    short = all(len(name) <= 19 for name in data.class_names)  # integers of 64 bits; what is longer stays text
    numbers = short and all(name.removeprefix("-").isdecimal() and str(int(name)) == name for name in data.class_names)
    names = class_names([int(name) for name in data.class_names] if numbers else data.class_names)
    return LabelEncoding(CLASSIFICATION, data.classes, names)


def bring_back(agent: Agent, saved: dict[str, Any], folder: Path) -> None:
    """Give an agent the state that was found in a folder."""
    try:
        record_of(agent).resume(saved)
    except CodistillError:
        raise
    except Exception as error:  # a state of another model: each library has its own way to say so
        raise CheckpointError(
            f"The checkpoint in {folder} must be of the same model as its recipe, or the agent's file, makes.",
            f"{type(error).__name__}: {error}"[:200],
            "Use the versions of codistill and of the model's library that the run was made with.",
        ) from None


def newest_state(folder: Path, name: str) -> tuple[int, dict[str, Any]]:
    """What an agent kept at the last checkpoint; of two, the newest that can be read."""
    problem = "no checkpoint there"
    for path in sorted((folder / "checkpoints").glob("round-*.state"), reverse=True):
        try:
            content = read_body(path, "a checkpoint")
            nodes = nodes_in(content, path)
            if name in nodes:
                return content["round"], content_of(nodes[name])
        except CheckpointError as error:
            problem = error.found
    # Under a hub, such as in 'codistill up', agents keep their own states.
    home = folder / "agents" / name
    states = [state for state in find_states(home) if state.back_to is None] if home.is_dir() else []
    for state in sorted(states, key=lambda each: each.done, reverse=True):
        return state.done, read_body(state.path, "a state")
    raise CheckpointError(
        f"{folder} must hold a checkpoint with the model of agent '{name}'.",
        problem,
        "Run it with checkpoints: --set runtime.checkpoint_every=1.",
    )
