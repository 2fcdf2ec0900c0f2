"""The federation that a recipe describes: its data, who holds which of them, its agents, and who speaks to whom."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from codistill.core.errors import DataError, RecipeError
from codistill.core.rng import generator, seed_libraries
from codistill.data import datasets, tables
from codistill.data.columns import Columns
from codistill.data.datasets import SOURCE, data_folder, find_folder, find_table
from codistill.data.folders import read_folder
from codistill.data.labels import ask_about_values
from codistill.data.partition import ById
from codistill.data.split import own_scaler, with_validation_part, without_test_part
from codistill.data.validation import Dataset
from codistill.engine.placement import set_device
from codistill.experiments.recipe import AgentEntry, Data, Recipe, code_digests, make_recipe, with_code
from codistill.experiments.user_code import is_own, load_own
from codistill.federation import Federation
from codistill.federation.checks import regressors
from codistill.learners.catalogue import make_learner
from codistill.nodes.agent import Agent
from codistill.protocol import Protocol
from codistill.topology import KINDS as TOPOLOGIES
from codistill.topology import Topology

_DIGITS = 19  # of an integer; longer labels, such as keys, are names
# Keys of [data] that say how a table is read.
_READING = (
    "label", "label_above", "label_map", "drop", "ids", "missing", "missing_values", "test_fraction", "scale",
    "scale_per_agent", "task", "separator", "decimal", "text",
)  # fmt: skip


def load_data(recipe: Recipe, data_dir: str | None = None) -> Dataset:
    """The data set that a recipe names, with the part of it that agents are measured on."""
    data, seed = recipe.data, recipe.seed
    if data.held_by_agents:
        raise RecipeError(
            "A recipe whose agents hold their data runs between machines.",
            "[data] held_by_agents",
            "Start it by 'codistill hub', and each agent by 'codistill join': see docs/deploy.md.",
        )
    by = None if data.name is not None else _id_of_agents(recipe)
    folder, named = data.dir or data_dir, data.name if data.sources is None else data.sources
    if named is not None:
        whole = datasets.load(
            named,
            data_dir=folder,
            test_fraction=data.test_fraction,
            seed=seed,
            samples=data.samples,
            test_samples=data.test_samples,
            scale="none" if data.scale_per_agent else data.scale,
            task=data.task,
            size=data.size,
            channels=data.channels,
        )
    elif data.folder is not None:
        whole = read_folder(
            find_folder(data.folder, folder),
            kind=data.kind,
            size=data.size,
            channels=data.channels,
            fit=data.fit,
            test_fraction=data.test_fraction,
            seed=seed,
            samples=data.samples,
            test_samples=data.test_samples,
            scale=data.scale,
        )
    else:
        columns = Columns(data.columns or {}) if data.schema is None else Columns.read(data.schema)
        options = {key: getattr(data, key) for key in _READING} | {"seed": seed, "columns": columns.columns}
        options["is_text"] = data.kind == "text"
        if data.file is not None:
            whole = tables.read_table(find_table(data.file, folder), **options, by=by)
        else:
            files = {name: find_table(path, folder) for name, path in (data.files or {}).items()}
            whole = tables.read_tables(files, **options)
    if not recipe.test:
        whole = without_test_part(whole)
    return with_validation_part(whole, data.validation, seed, by) if data.validation else whole


def _id_of_agents(recipe: Recipe) -> str | None:
    """The id by which samples are divided among the agents; None where they are divided otherwise."""
    if recipe.data.files is not None:
        return "agent"
    by = recipe.partition.id if isinstance(recipe.partition, ById) else None
    if recipe.data.sources is not None:
        return by if by == SOURCE else None
    return by if recipe.data.file is None or by in recipe.data.ids else None


def agent_names(recipe: Recipe) -> list[str]:
    """The names of all agents, in order; agents without a name that hold a source each are named as the sources."""
    sources = recipe.data.sources if _id_of_agents(recipe) == SOURCE else None
    if sources is not None and [entry.name for entry in _entries(recipe)] == [None] * len(sources):
        return list(sources)
    # The last part of the learner's name.
    kinds = [entry.kind.rpartition(":" if is_own(entry.kind) else ".")[2] for entry in recipe.agents]
    names: list[str] = []
    for entry, kind in zip(recipe.agents, kinds, strict=True):
        base = kind if entry.name is None else entry.name
        single = entry.count == 1 and (entry.name is not None or kinds.count(kind) == 1)
        taken = sum(name.rpartition("-")[0] == base for name in names)
        names += [base] if single else [f"{base}-{taken + i + 1}" for i in range(entry.count)]
    return names


def _entries(recipe: Recipe) -> list[AgentEntry]:
    return [entry for entry in recipe.agents for _ in range(entry.count)]


def topology_of(recipe: Recipe) -> Topology:
    """Who speaks to whom: as the recipe says or, where it does not, as the protocol has it."""
    names, chosen = agent_names(recipe), recipe.topology or recipe.protocol.topology
    return TOPOLOGIES[chosen](names) if isinstance(chosen, str) else chosen.over(names, recipe.seed)


def hand_out(recipe: Recipe, data: Dataset) -> list[np.ndarray]:
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


@dataclass(frozen=True)
class RecipeAgents:
    """Makes the agents of a recipe, or some of them, wherever its data are: they depend on recipe and seed alone."""

    source: dict[str, Any]
    data_dir: str | None  # where it is on the machine that has read the recipe
    code: dict[str, str | None]  # digests of one's own files

    def __call__(self, names: Sequence[str]) -> tuple[Protocol, list[Agent]]:
        """The protocol, and the agents of these names; not yet part of a federation."""
        recipe = make_recipe(self.source, Path(), run_code=False)
        found = code_digests(recipe)
        if found != self.code:
            raise RecipeError(
                "Files of your own protocols and models must be the same on every machine.",
                f"another, or none: {next(path for path in self.code if found.get(path) != self.code[path])}",
                "Keep them on a file system that all machines share, or copy them to the same place.",
            )
        recipe = with_code(recipe)
        here = self.data_dir if self.data_dir and Path(self.data_dir).is_dir() else None  # None: as set on this machine
        return recipe.protocol, _make_agents(recipe, load_and_split(recipe, here)[0], frozenset(names))


def load_and_split(recipe: Recipe, data_dir: str | None = None) -> tuple[Dataset, Any]:
    """What the agents divide among themselves, and what they share."""
    data = load_data(recipe, data_dir)
    if not recipe.data.public:
        return data, None
    public, data = datasets.split_public(data, recipe.data.public, recipe.seed)
    return data, as_given(data, public)


def as_given(data: Dataset, x: np.ndarray) -> Any:
    """Samples as agents take them: texts as a series with the name of their column."""
    return x if data.text is None else pd.Series(x, name=data.text)


def _make_agents(recipe: Recipe, data: Dataset, wanted: frozenset[str] | None = None) -> list[Agent]:
    names, parts, by = agent_names(recipe), hand_out(recipe, data), _id_of_agents(recipe)
    agents = []
    for name, entry, part in zip(names, _entries(recipe), parts, strict=True):
        if wanted is not None and name not in wanted:
            continue
        test = None
        if by is not None and by in data.ids_test:  # test samples from where its training samples are from
            own = np.isin(data.ids_test[by], data.ids[by][part])
            test = (as_given(data, data.x_test[own]), data.y_test[own]) if own.any() else None
        if data.text is not None and entry.kind != "pipeline" and not is_own(entry.kind):
            raise RecipeError(
                "A learner of texts must be a pipeline that begins with a vectoriser, or a file of your own.",
                f"'{entry.kind}' for agent '{name}'",
                'Write learner = { kind = "pipeline", steps = ["TfidfVectorizer", "logistic_regression"] }.',
            )
        seed_libraries(recipe.seed, name, "model")
        model = make_learner(entry.kind, entry.options, data.x.shape[1:], data.classes, load_own)
        set_device(model, entry.device, name)
        if recipe.data.missing == "impute":
            model.takes_missing = False
        scaler = _own_scaler(recipe.data, data)
        x, y = as_given(data, data.x[part]), data.y[part]
        agents.append(Agent(name, model, x, y, test=test, prepare=scaler, choices=entry.choices))
    return agents


def build(recipe: Recipe, data_dir: str | None = None) -> tuple[Federation, Dataset]:
    """The federation of a recipe, checked and ready to run, and the data it was made from."""
    data, public = load_and_split(recipe, data_dir)
    agents = _make_agents(recipe, data)
    # Integers in a label column may be values to predict; words, and data sets by name, have classes.
    numbers = all(name.removeprefix("-").isdecimal() and len(name) <= _DIGITS for name in data.class_names)
    named = recipe.data.by_name or recipe.data.folder is not None
    if recipe.data.task is None and not named and data.y.ndim == 1 and numbers:
        values = np.array([int(name) for name in data.class_names])
        ask_about_values(values, len(data.y) + len(data.y_test), regressors(agents))
    federation = Federation(
        agents,
        recipe.protocol,
        public=public,
        test=(as_given(data, data.x_test), data.y_test) if recipe.test else None,
        seed=recipe.seed,
        classes=data.classes,
        scores=recipe.scores,
        topology=None if recipe.topology is None else topology_of(recipe),
        faults=recipe.faults,
        participation=recipe.participation,
        compression=recipe.compression,
        safeguard=recipe.safeguard or False,
        validation=recipe.validation,
        clock=recipe.clock,
    )
    folder = None
    with suppress(DataError):  # no such folder: the data did not need one
        folder = data_folder(data_dir)
    anew = RecipeAgents(recipe.source, None if folder is None else str(folder.resolve()), code_digests(recipe))
    federation.description = replace(federation.description, build=anew)
    return federation, data


def _own_scaler(options: Data, data: Dataset) -> Any:
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
