"""From a recipe to a run's folder: build the federation, run it, and report its results."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from codistill.agent import Agent
from codistill.data import loading as datasets
from codistill.data import tables
from codistill.data.columns import Columns
from codistill.data.labels import ask_about_values
from codistill.data.partition import ById, counts
from codistill.data.scale import own_scaler
from codistill.data.sources import find_table
from codistill.data.split import with_validation_part
from codistill.data.validation import digest
from codistill.errors import CheckpointError, RecipeError
from codistill.experiments.recipe import Data, Recipe, make_recipe
from codistill.experiments.user_code import digests_of, load_own
from codistill.federation import Federation
from codistill.federation.checks import regressors
from codistill.federation.run_facts import FACTS, faults_in, scores_in, versions
from codistill.files import locked, write_atomically, writing
from codistill.learners.catalogue import make_learner
from codistill.randomness import generator, seed_libraries
from codistill.results.scores import DEFAULT_SCORES, Score, as_score
from codistill.results.summary import Summary
from codistill.runtimes.network.terms import describe_protocol, describe_public
from codistill.runtimes.plan import Plan
from codistill.runtimes.store import BASELINE, METRICS, TIMES, check_vacant, read_outputs, read_rows, whole_lines
from codistill.topology import KINDS as TOPOLOGIES
from codistill.topology import Topology
from codistill.topology.facts import as_plain, from_plain

RECIPE, REPORT, NETWORK = "recipe.toml", "report.html", "network.json"
# Keys of [data] that say how a table is read.
_READING = (
    "label", "label_above", "label_map", "drop", "ids", "missing", "missing_values", "test_fraction", "scale",
    "scale_per_agent", "task",
)  # fmt: skip


def load_data(recipe: Recipe, data_dir: str | None = None) -> datasets.Dataset:
    """The data set that a recipe names, with the part of it that agents are measured on."""
    data, seed = recipe.data, recipe.seed
    if data.held_by_agents:
        raise RecipeError(
            "A recipe whose agents hold their data runs between machines.",
            "[data] held_by_agents",
            "Start it by 'codistill hub', and each agent by 'codistill join': see docs/deploy.md.",
        )
    by = None if data.name is not None else _id_of_agents(recipe)
    whole = _load_whole(data, seed, data_dir, by)
    return with_validation_part(whole, data.validation, seed, by) if data.validation else whole


def _id_of_agents(recipe: Recipe) -> str | None:
    """The id by which samples are divided among the agents; None where they are divided otherwise."""
    if recipe.data.files is not None:
        return "agent"
    by = recipe.partition.id if isinstance(recipe.partition, ById) else None
    return by if recipe.data.file is None or by in recipe.data.ids else None


def _load_whole(data: Data, seed: int, data_dir: str | None, by: str | None) -> datasets.Dataset:
    if data.name is not None:
        return datasets.load(
            data.name,
            data_dir=data.dir or data_dir,
            test_fraction=data.test_fraction,
            seed=seed,
            samples=data.samples,
            test_samples=data.test_samples,
            scale="none" if data.scale_per_agent else data.scale,
            task=data.task,
        )
    columns = Columns(data.columns or {}) if data.schema is None else Columns.read(data.schema)
    options = {key: getattr(data, key) for key in _READING} | {"seed": seed, "columns": columns.columns}
    folder = data.dir or data_dir
    if data.file is not None:
        return tables.read_table(find_table(data.file, folder), **options, by=by)
    assert data.files is not None
    return tables.read_tables({name: find_table(path, folder) for name, path in data.files.items()}, **options)


def agent_names(recipe: Recipe) -> list[str]:
    """The names of all agents, in order."""
    kinds = [entry.short_kind for entry in recipe.agents]
    names: list[str] = []
    for entry, kind in zip(recipe.agents, kinds, strict=True):
        base = kind if entry.name is None else entry.name
        single = entry.count == 1 and (entry.name is not None or kinds.count(kind) == 1)
        taken = sum(name.rpartition("-")[0] == base for name in names)
        names += [base] if single else [f"{base}-{taken + i + 1}" for i in range(entry.count)]
    return names


def topology_of(recipe: Recipe) -> Topology:
    """Who speaks to whom: as the recipe says or, where it does not, as the protocol has it."""
    names, chosen = agent_names(recipe), recipe.topology or recipe.protocol.topology
    return TOPOLOGIES[chosen](names) if isinstance(chosen, str) else chosen.over(names, recipe.seed)


def hand_out(recipe: Recipe, data: datasets.Dataset) -> list[np.ndarray]:
    """Which training samples each agent gets."""
    names = agent_names(recipe)
    if recipe.data.files is not None:
        if sorted(names) != sorted(recipe.data.files):
            raise RecipeError(
                "With one file per agent, the agents must be named as the files.",
                f"agents {', '.join(sorted(names))}; files {', '.join(sorted(recipe.data.files))}",
                "Give every [[agents]] table the name of its file.",
            )
        return [np.flatnonzero(data.ids["agent"] == name) for name in names]
    rng = generator(recipe.seed, "partition")
    parts = recipe.partition.split(data.y, len(names), rng, data.ids, data.classes)
    by = _id_of_agents(recipe)
    if by is not None:
        values = data.ids[by].astype(str)
        if sorted(names) == sorted(np.unique(values)):
            return [np.flatnonzero(values == name) for name in names]
    return parts


def own_tests(
    recipe: Recipe, data: datasets.Dataset, parts: Sequence[np.ndarray]
) -> list[tuple[np.ndarray, np.ndarray] | None]:
    """The test samples that are from where each agent's training samples are from; None where that is not known."""
    by = _id_of_agents(recipe)
    if by is None or by not in data.ids_test:
        return [None] * len(parts)
    rows = [np.flatnonzero(np.isin(data.ids_test[by], data.ids[by][part])) for part in parts]
    return [(data.x_test[own], data.y_test[own]) if len(own) else None for own in rows]


def build(recipe: Recipe, data_dir: str | None = None) -> tuple[Federation, datasets.Dataset]:
    """The federation of a recipe, checked and ready to run, and the data it was made from."""
    data = load_data(recipe, data_dir)
    public = None
    if recipe.data.public:
        public, data = datasets.split_public(data, recipe.data.public, recipe.seed)
    names, parts = agent_names(recipe), hand_out(recipe, data)
    entries = [entry for entry in recipe.agents for _ in range(entry.count)]
    agents = []
    for name, entry, part, test in zip(names, entries, parts, own_tests(recipe, data, parts), strict=True):
        seed_libraries(recipe.seed, name, "model")
        model = make_learner(entry.kind, entry.options, data.x.shape[1:], data.classes, load_own)
        if recipe.data.missing == "impute":
            model.takes_missing = False
        agents.append(Agent(name, model, data.x[part], data.y[part], test=test, prepare=_own_scaler(recipe.data, data)))
    _ask_about_labels(recipe, data, agents)
    federation = Federation(
        agents,
        recipe.protocol,
        public=public,
        test=(data.x_test, data.y_test),
        seed=recipe.seed,
        classes=data.classes,
        scores=recipe.evaluation.scores,
        topology=None if recipe.topology is None else topology_of(recipe),
        faults=recipe.faults,
        participation=recipe.participation,
        compression=recipe.compression,
        safeguard=recipe.safeguard or False,
    )
    return federation, data


def _own_scaler(options: Data, data: datasets.Dataset) -> Any:
    """What an agent scales its samples with, by its own training samples; None where all are scaled together."""
    if not options.scale_per_agent:
        return None
    if data.x.ndim != 2:
        raise RecipeError(
            "[data] scale_per_agent is for tables.", f"samples of shape {data.x.shape[1:]}", "Remove scale_per_agent."
        )
    scaler, numbers = own_scaler(options.scale), data.x.shape[1] if data.columns is None else data.columns.numbers
    if scaler is None or numbers == data.x.shape[1]:
        return scaler
    from sklearn.compose import ColumnTransformer

    return ColumnTransformer([("numbers", scaler, slice(0, numbers))], remainder="passthrough")


def _ask_about_labels(recipe: Recipe, data: datasets.Dataset, agents: list[Agent]) -> None:
    """Integers in a label column may be values to predict; words, and data sets by name, have classes."""
    numbers = all(name.lstrip("-").isdecimal() for name in data.class_names)
    if recipe.data.task is None and recipe.data.name is None and data.y.ndim == 1 and numbers:
        values = np.array([int(name) for name in data.class_names])
        ask_about_values(values, len(data.y) + len(data.y_test), regressors(agents))


def plan_of(recipe: Recipe) -> Plan:
    """Rounds, evaluations and checkpoints of a recipe."""
    evaluation = recipe.evaluation
    return Plan(
        rounds=recipe.rounds,
        evaluate_every=evaluation.every,
        evaluate_samples=evaluation.samples or None,
        baseline=evaluation.alone,
        checkpoint_every=recipe.runtime.checkpoint_every,
    )


def prepare(
    recipe: Recipe, folder: Path, *, data_dir: str | None = None, resume: bool = False
) -> tuple[Federation, datasets.Dataset]:
    """Build a recipe's federation, and write into the folder of its run what it is; to resume, compare."""
    if not resume:
        check_vacant(folder)
    federation, data = build(recipe, data_dir)
    make_folder(folder, source_of(recipe, data_dir), _facts(recipe, federation, data), resume=resume)
    return federation, data


def make_folder(folder: Path, source: dict[str, Any], facts: dict[str, Any], *, resume: bool) -> None:
    """Write a run's recipe and facts into its folder; to resume, compare."""
    if resume:
        _check_facts(folder, facts)
    else:
        _write_new(folder, source, facts)


def execute(
    recipe: Recipe, folder: Path, *, data_dir: str | None = None, resume: bool = False, progress: bool = True
) -> tuple[Summary, bool]:
    """Run a recipe in a folder; returns its results, and whether all rounds were done."""
    elsewhere = (folder / NETWORK).exists() or (folder / "agents").is_dir()
    if resume and elsewhere and recipe.runtime.kind != "network":
        raise CheckpointError(
            "A run between machines is resumed where it ran.",
            f"{folder} is the folder of a hub, or of 'codistill up'",
            "Give the same command again, with the same --out: it goes on from its checkpoint.",
        )
    federation, _ = prepare(recipe, folder, data_dir=data_dir, resume=resume)
    plan = plan_of(recipe)
    result = federation.run(
        plan.rounds,
        runtime=recipe.runtime.kind,
        workers=recipe.runtime.workers,
        network=recipe.network,
        evaluate_every=plan.evaluate_every,
        evaluate_samples=plan.evaluate_samples,
        alone=plan.baseline,
        folder=folder,
        resume=resume,
        checkpoint_every=plan.checkpoint_every,
        progress=progress,
    )
    return report_on(folder), not result.interrupted


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
    if data_dir is None or data.dir is not None or not (data.name or tables_of_folder):
        return recipe.source
    return {**recipe.source, "data": {**recipe.source["data"], "dir": str(Path(data_dir).resolve())}}


def _write_new(folder: Path, source: dict[str, Any], facts: dict[str, Any]) -> None:
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        check_vacant(folder)
        write_atomically(folder / RECIPE, tomli_w.dumps(source).encode())
        write_atomically(folder / FACTS, json.dumps(facts, indent=1).encode())


def _check_facts(folder: Path, facts: dict[str, Any]) -> None:
    """Agents and data must be what they were; a run that was killed before it said so says it now."""
    if not (folder / FACTS).exists():
        write_atomically(folder / FACTS, json.dumps(facts, indent=1).encode())
        return
    before, now = _read_facts(folder), json.loads(json.dumps(facts))
    changed = [key for key in now if key != "versions" and key in before and before[key] != now[key]]
    if changed:
        raise CheckpointError(
            f"Data and agents must be as they were when the run in {folder} began.",
            f"other {', '.join(changed)}",
            "Bring the data, and the files of your own models, back; or start a new run with 'codistill run'.",
        )


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


def _read_facts(folder: Path) -> dict[str, Any]:
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


def reopen(folder: Path) -> Recipe:
    """The recipe of a run's folder."""
    try:
        return make_recipe(tomllib.loads((folder / RECIPE).read_text("utf-8")), folder.resolve())
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
    facts = _read_facts(folder)
    try:
        seconds = [float(json.loads(line)["seconds"]) for line in whole_lines(folder / TIMES)]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{folder / TIMES} must be as it was written.", f"{error}", "Run the recipe again, in another folder."
        ) from None
    alone = folder / BASELINE / METRICS
    rows = read_rows(folder / METRICS)
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
        outputs=read_outputs(folder, max((row["round"] for row in rows), default=0)),
        topology=_read_topology(folder, facts),
        faults=faults_in(facts) if recipe is None else recipe.faults,
        scores=_scores(facts, recipe),
    )


def _is_from_python(folder: Path) -> bool:
    """Whether the folder is that of `Federation.run` or `serve`, which say the protocol in the place of a recipe."""
    return not (folder / RECIPE).exists() and (folder / FACTS).exists() and "protocol" in _read_facts(folder)


def _shown_facts(folder: Path, facts: dict[str, Any], recipe: Recipe | None) -> dict[str, Any]:
    """What the report shows as it is: the recipe or, of a run from Python, the protocol with its settings."""
    if recipe is None:
        return {key: facts[key] for key in ("protocol", "versions", "seed")}
    return {"recipe": (folder / RECIPE).read_text("utf-8"), "versions": facts["versions"], "seed": recipe.seed}


def _scores(facts: dict[str, Any], recipe: Recipe | None) -> tuple[Score, ...]:
    """What was measured; where none is named, and in folders from before the task was kept, the rows tell it."""
    named = scores_in(facts) if recipe is None else tuple(as_score(name) for name in recipe.evaluation.scores)
    return named or tuple(score for score in DEFAULT_SCORES if facts.get("task") in (None, score.task))


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
        **facts_of_protocol(recipe),
        **facts_of_learners(recipe),
        "versions": versions(),
    }


def facts_of_protocol(recipe: Recipe) -> dict[str, str]:
    """Of a protocol in a file of one's own: the digest of that file."""
    code = describe_protocol(recipe.protocol).get("code")
    return {} if code is None else {"protocol_code": code}


def facts_of_learners(recipe: Recipe) -> dict[str, dict[str, str]]:
    """Of learners in files of one's own: the digest of each file."""
    code = digests_of([kind for entry in recipe.agents for kind in entry.kinds])
    return {"learner_code": code} if code else {}


def protocol_code(folder: Path) -> str | None:
    """The digest of the file of a run's own protocol, as it was when the run began."""
    code = _read_facts(folder).get("protocol_code") if (folder / FACTS).exists() else None
    return None if code is None else str(code)


def learner_code(folder: Path) -> dict[str, str] | None:
    """The digests of the files of a run's own learners, as they were when the run began."""
    return _read_facts(folder).get("learner_code") if (folder / FACTS).exists() else None
