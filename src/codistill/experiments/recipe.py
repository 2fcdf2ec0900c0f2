"""A recipe: one TOML file that says all there is to say about a run, checked before anything runs."""

from __future__ import annotations

import dataclasses
import re
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from codistill.core.devices import DEVICE_HELP, check_name
from codistill.core.errors import CodistillError, RecipeError, nearest
from codistill.core.settings import OF_THE_MODEL, check_settings, from_table, read_setting, setting
from codistill.core.spec import RunSpec, option
from codistill.core.text import parse_toml
from codistill.data import partition as partitions
from codistill.data.cells import SEPARATORS, check_marks
from codistill.data.columns import Columns
from codistill.data.labels import TASKS, check_label_mapping
from codistill.data.partition import KINDS as PARTITIONS
from codistill.engine.safeguard import Safeguard, as_safeguard
from codistill.experiments.tracking import Track, absolute
from codistill.experiments.user_code import UnreadProtocol, files_of, is_own, protocol_class, shown_files
from codistill.network.options import Network
from codistill.nodes.clock import Clock, clock_from_table
from codistill.nodes.faults import Fault
from codistill.protocol import Protocol
from codistill.protocols import PROTOCOLS
from codistill.results.scores import as_score
from codistill.runtimes.ray_cluster import RayCluster
from codistill.topology import KINDS as TOPOLOGIES
from codistill.topology.graphs import KINDS as GRAPHS
from codistill.topology.graphs import Graph
from codistill.wire.compression import Compression

# --- The tables [data] and [[agents]].

_OF_TABLES = (  # keys of [data]
    "label", "label_above", "label_map", "drop", "ids", "columns", "schema", "missing", "missing_values", "separator",
    "decimal",
)  # fmt: skip
MOST_AGENTS = 100_000  # of a recipe: each takes some 40 KB, whatever its model
_OF_NAMES = ("samples", "test_samples", "size", "channels")
# Keys of [data] that mean nothing for these sources.
_IDLE = {
    "a data set by name": (*_OF_TABLES, "fit", "text"),
    "a table of features": (*_OF_NAMES, "fit", "text"),
    "a table of texts": (*_OF_NAMES, "fit", "columns", "schema", "decimal", "scale", "scale_per_agent"),
    "a folder of texts": (*_OF_TABLES, "size", "channels", "fit", "text", "scale", "scale_per_agent", "task"),
    "a folder of images": (*_OF_TABLES, "text", "scale_per_agent", "task"),
}


@dataclass(frozen=True, kw_only=True)
class Data:
    """[data]: a data set by name, or tables; and how much of it is public."""

    name: str | None = setting(None, "a bundled data set, a file <name>.npz in the data folder, or hf:owner/name")
    sources: tuple[str, ...] | None = setting(
        None, "several such data sets of one task as one; the id 'source' of a sample names its own"
    )
    kind: str = setting(
        "table", "what samples are: rows of a table (or as a data set by name has them), texts, or images in a folder",
        choices=("table", "text", "images"),
    )  # fmt: skip
    file: str | None = setting(None, "a CSV or Parquet file instead of a name")
    files: dict[str, str] | None = setting(None, "one CSV or Parquet file per agent: name = path")
    folder: str | None = setting(
        None, "a folder with a folder for each class: of .txt files (kind = text) or of images (kind = images)"
    )
    label: str | None = setting(None, "the label column of a table")
    text: str | None = setting(
        None, "with kind = text: the column of texts of a table; unset: 'text', or the only one that is left"
    )
    label_above: float | None = setting(None, "two classes: label values above this number, and all others")
    label_map: dict[str, str] | None = setting(None, "the class of each value of the label column: value = class")
    task: str | None = setting(
        None, "whether labels are classes or real values; unset: as the data say, or asked about", choices=TASKS
    )
    drop: tuple[str, ...] = setting((), "columns of a table to leave out")
    ids: tuple[str, ...] = setting((), "columns of a table that say where a sample is from")
    dir: str | None = setting(None, "the data folder; unset: --data-dir or the environment's CODISTILL_DATA")
    samples: int | None = setting(None, "use only this many training samples; of each of sources", at_least=1)
    test_samples: int | None = setting(None, "use only this many test samples; of each of sources", at_least=1)
    size: int | None = setting(
        None, "resize images to squares of so many pixels, bilinearly with antialiasing", at_least=1, at_most=4096
    )
    channels: int | None = setting(
        None, "channels of images: grey ones are repeated, 3 become 1 by their luma; of a folder: 1 or 3; unset: 1 if "
        "all are grey", at_least=1, at_most=64,
    )  # fmt: skip
    fit: str | None = setting(
        None, "how images of a folder become squares: cropped around the centre, padded with black, or stretched; "
        "unset: crop", choices=("crop", "pad", "stretch"),
    )  # fmt: skip
    test_fraction: float = setting(0.2, "test share where there is no test set", above=0, at_most=0.9)
    validation: float = setting(
        0.0, "share of all training samples to measure on in place of the test set, to choose settings", at_least=0,
        at_most=0.9,
    )  # fmt: skip
    columns: dict[str, str | dict[str, Any]] | None = setting(
        None,
        "columns of a table that are no numbers: name = kind (date, category, text), or a table with kind and options",
    )
    schema: str | None = setting(None, "a file that says the same of all columns, agreed on by all organisations")
    missing: str = setting(
        "keep", "empty cells: kept for models that take them and imputed for others; imputed for all; or their rows "
        "dropped; or refused", choices=("keep", "impute", "drop_rows", "refuse"),
    )  # fmt: skip
    missing_values: tuple[str, ...] = setting((), "cells that mean the same as an empty one, such as ?")
    separator: str | None = setting(
        None, "what separates the columns of a CSV file; unset: found, if it is clear", choices=tuple(SEPARATORS)
    )
    decimal: str | None = setting(
        None, 'the decimal mark of numbers in a table, "." or ","; unset: found for each column, if it is clear'
    )
    scale: str | None = setting(
        None, "how samples are scaled; unset: as suits the data", choices=("unit", "standard", "robust", "none")
    )
    scale_per_agent: bool = setting(False, "each agent scales by its own training samples, not all by those of all")
    public: int | float = setting(0, "public samples without labels: a count, or a share below 1", at_least=0)
    held_by_agents: bool = setting(False, "every agent brings its own data; see docs/deploy.md")
    classes: int | None = setting(
        None, "with held_by_agents: how many classes there are; 1 for one real value", at_least=1
    )
    class_names: tuple[str | int | bool, ...] | None = setting(
        None, "with held_by_agents: the classes, where labels are not 0, 1, 2 and so on"
    )
    public_file: str | None = setting(None, "with held_by_agents: a .npy file of public samples, equal on every node")

    def __post_init__(self) -> None:
        check_settings(self, "data")
        given = [key for key in ("name", "sources", "file", "files", "folder") if getattr(self, key) is not None]
        given += ["held_by_agents"] if self.held_by_agents else []
        if len(given) != 1:
            raise RecipeError(
                "[data] needs exactly one of name, sources, file, files, folder, held_by_agents.",
                f"{given or 'none'}",
                "Keep one.",
            )
        of_hub = [key for key in ("classes", "class_names", "public_file") if getattr(self, key) is not None]
        if not self.held_by_agents and of_hub:
            raise RecipeError(
                "[data] classes, class_names and public_file go with held_by_agents.",
                f"'{of_hub[0]}' beside '{given[0]}'",
                "Remove them, or say held_by_agents = true.",
            )
        changed = [f.name for f in dataclasses.fields(self) if getattr(self, f.name) != f.default]
        if self.held_by_agents:  # the hub has no data to split or to scale
            if (self.classes is None) == (self.class_names is None):
                raise RecipeError(
                    "[data] with held_by_agents needs the number of classes, or their names.",
                    "neither" if self.classes is None else "both classes and class_names",
                    'Add classes = 2, or class_names = ["no", "yes"].',
                )
            kept = ("held_by_agents", "classes", "class_names", "public_file", "task")
            idle = [key for key in changed if key not in kept]
            if idle:
                raise RecipeError(
                    "[data] with held_by_agents holds no data.",
                    f"'{idle[0]}' beside 'held_by_agents'",
                    f"Remove '{idle[0]}'.",
                )
            return
        self._check_kind()
        if not self.by_name and self.folder is None and self.label is None:
            raise RecipeError("[data] needs 'label', the label column of a table.", "no label", 'Add label = "column".')
        check_label_mapping(self.label_above, self.label_map)
        check_marks(self.decimal, None, "data")
        if self.columns is not None and self.schema is not None:
            raise RecipeError(
                "The columns of [data] are given twice.", "'columns' beside 'schema'", "Keep one of them."
            )
        Columns(self.columns or {})
        source = "a data set by name" if self.by_name else self._source
        useless = [key for key in _IDLE[source] if key in changed]
        if useless:
            raise RecipeError(
                f"[data] '{useless[0]}' means nothing for {source}.",
                f"'{useless[0]}' beside '{given[0]}'",
                f"Remove '{useless[0]}'.",
            )

    def _check_kind(self) -> None:
        fitting = {"table": ("file", "files"), "text": ("file", "files", "folder"), "images": ("folder",)}[self.kind]
        if self.kind != "table" and not any(getattr(self, key) is not None for key in fitting):
            raise RecipeError(
                f'[data] kind = "{self.kind}" needs {" or ".join(fitting)}.',
                "none of them",
                f'Add {fitting[-1]} = "..."; a data set by name needs no kind.',
            )
        if self.kind == "table" and self.folder is not None:
            raise RecipeError(
                "[data] with a folder needs the kind of its files.",
                'kind = "table"',
                'Add kind = "images", or kind = "text".',
            )
        if self.kind == "images" and (self.channels not in (None, 1, 3) or (self.fit is not None and not self.size)):
            raise RecipeError(
                "[data] channels of images in a folder must be 1 or 3, and 'fit' needs 'size'.",
                f"channels = {self.channels}, size = {self.size}, fit = {self.fit}",
                "Correct them.",
            )

    @property
    def _source(self) -> str:
        place = "a folder" if self.folder is not None else "a table"
        return f"{place} of {'features' if self.kind == 'table' else self.kind.removesuffix('s') + 's'}"

    @property
    def by_name(self) -> bool:
        """Whether it is a data set by name, or several of them; tables and what agents hold are not."""
        return self.name is not None or self.sources is not None


@dataclass(frozen=True, kw_only=True)
class AgentEntry:
    """[[agents]]: one agent, or several of a kind."""

    learner: str | dict[str, Any] | None = setting(
        None, "a learner's name, 'file.py:Name', or a table with kind and options; where agents hold their data: none"
    )
    name: str | None = setting(None, "the agent's name; unset: made from the learner's")
    count: int = setting(1, "how many such agents", at_least=1, at_most=MOST_AGENTS)
    device: str | None = setting(None, f"{DEVICE_HELP}; unset: as [runtime] says")
    choices: dict[str, Any] = setting(factory=dict, help="settings of the protocol that it chooses for itself")

    def __post_init__(self) -> None:
        check_settings(self, "agents")
        if self.device is not None:
            check_name(self.device)
        if isinstance(self.learner, dict) and not isinstance(self.learner.get("kind"), str):
            raise RecipeError(
                "A learner's table needs 'kind', a string.", f"{self.learner}", 'Write kind = "name" in it.'
            )

    @property
    def kind(self) -> str:
        if self.learner is None:
            return "agent"
        return self.learner if isinstance(self.learner, str) else str(self.learner["kind"])

    @property
    def kinds(self) -> list[Any]:
        steps = self.options.get("steps", [])
        inner = steps if isinstance(steps, list) else []
        return [self.kind, *(step.get("kind") if isinstance(step, dict) else step for step in inner)]

    @property
    def options(self) -> dict[str, Any]:
        return {} if not isinstance(self.learner, dict) else {k: v for k, v in self.learner.items() if k != "kind"}


# --- The whole recipe.


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All of a run."""

    data: Data
    agents: tuple[AgentEntry, ...]
    protocol: Protocol
    spec: RunSpec = field(default_factory=RunSpec)  # its fields say where a recipe has each of them
    seed: int = 0
    partition: partitions.Partition = field(default_factory=partitions.Iid)
    faults: tuple[Fault, ...] = ()
    participation: float = option(
        1.0, "share of agents sampled per round", above=0, at_most=1, recipe="runtime.participation"
    )
    scores: tuple[str, ...] = option(
        (), "scores by scikit-learn's names, the most important first; unset: accuracy, or rmse for a regression",
        recipe="evaluation.scores",
    )  # fmt: skip
    validation: float = option(
        0.0, "share of its own training samples that each agent holds out: measured on them, too, to choose a round or "
        "settings", at_least=0, at_most=0.9, recipe="evaluation.validation",
    )  # fmt: skip
    test: bool = option(
        True, "measure on test samples; false: they are dropped as the data are read, and no choice depends on them",
        recipe="evaluation.test",
    )  # fmt: skip
    compression: Compression | None = None
    topology: str | Graph | None = None  # None: that of the protocol
    network: Network = field(default_factory=Network)
    ray: RayCluster = field(default_factory=RayCluster)
    safeguard: Safeguard | None = None
    clock: Clock | None = None
    track: Track | None = None
    source: dict[str, Any] = field(default_factory=dict, compare=False)  # the tables it was made from


# The options in [protocol], [runtime] and [evaluation], by their place: each a field of the run or of the recipe.
PLACES = {
    each.metadata["recipe"] or f"runtime.{each.name}": (cls, each)
    for cls in (RunSpec, Recipe)
    for each in dataclasses.fields(cls)
    if "recipe" in each.metadata
}
# What a recipe may hold, and whether each is a list of tables or a table; None: it may also be something else.
_OF_SETTINGS = ("runtime", "evaluation", "compression", "network", "ray", "clock", "track")
_TABLES: dict[str, type[Any] | None] = {
    **dict.fromkeys(("agents", "faults"), list),
    **dict.fromkeys(("data", "partition", "protocol", *_OF_SETTINGS), dict),
    **dict.fromkeys(("seed", "topology", "safeguard")),
}
# Keys of tables that people look for at the top of a recipe.
_LOOKED_FOR = {
    "learner": "agents.0.learner, for each of the [[agents]]",
    **{f.name: f"data.{f.name}" for f in dataclasses.fields(Data) if f.name not in ("name", "drop")},
    **{each.name: place for place, (_, each) in PLACES.items() if each.name != "runtime"},
    "every": "evaluation.every",
}


def read_recipe(path: Path, overrides: Sequence[str] = (), *, run_code: bool = True) -> Recipe:
    """Read, override and check a recipe file; without `run_code` a protocol in a file of one's own is not read."""
    return make_recipe(read_tables(path, overrides, run_code=run_code), path.resolve().parent, run_code=run_code)


def read_tables(path: Path, overrides: Sequence[str] = (), *, run_code: bool = True) -> dict[str, Any]:
    try:
        tables = parse_toml(path.read_text("utf-8-sig"))
    except OSError as error:
        raise RecipeError(
            "The recipe must be a readable file.", f"{path}: {error.strerror}", "Check the path."
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path} must be valid TOML.", str(error), "Fix the line it names.") from None
    apply_overrides(tables, overrides, path.resolve().parent, run_code=run_code)
    return tables


def with_code(recipe: Recipe) -> Recipe:
    """The same recipe with its protocol, which may be in a file that was not run yet: it is run now."""
    unread = recipe.protocol
    if not isinstance(unread, UnreadProtocol):
        return recipe
    return dataclasses.replace(recipe, protocol=_made_protocol(unread.place, unread.table))


def code_of(recipe: Recipe) -> list[Any]:
    """The names of the protocol, the learners and their steps: files of one's own are among them."""
    return [recipe.source["protocol"]["name"], *(kind for entry in recipe.agents for kind in entry.kinds)]


def code_digests(recipe: Recipe) -> dict[str, str | None]:
    return files_of(code_of(recipe))


def check_trusted(names: Sequence[Any], trusted: bool, what: str) -> None:
    """Files among the names in a recipe are run by a command that inspects only if that is asked for."""
    files = files_of(names)
    if files and not trusted:
        raise RecipeError(
            f"{what} needs code that the recipe names, which is run only if you trust it.",
            f"not run: {shown_files(files)}",
            "Read it; if you trust it, add --trust-code.",
        )


def make_recipe(tables: Mapping[str, Any], folder: Path, *, run_code: bool = True) -> Recipe:
    """Check the tables of a recipe; paths in it are relative to `folder`."""
    source = with_absolute_paths(tables, folder)
    for table in ("sweep", "search"):
        if table in source:
            raise RecipeError(
                f"A recipe with [{table}] is many runs.", f"[{table}]",
                f"Run them by 'codistill {table}', or remove the table.",
            )  # fmt: skip
    for key in source:
        if key not in _TABLES:
            do = f"Write {_LOOKED_FOR[key]}." if key in _LOOKED_FOR else nearest(key, _TABLES)
            raise RecipeError(f"Unknown table '{key}' in the recipe.", "", do)
    for key in ("data", "agents", "protocol"):
        if key not in source:
            raise RecipeError(f"A recipe must have [{key}].", "no such table", "See recipes/ for examples.")
    for key, kind in _TABLES.items():
        value = source.get(key)
        entries = value if isinstance(value, list) else []
        sound = kind is None or (isinstance(value, kind) and all(isinstance(entry, dict) for entry in entries))
        if key in source and not sound:
            head, form = (f"[[{key}]]", f"[[{key}]] tables") if kind is list else (f"[{key}]", f"a [{key}] table")
            raise RecipeError(
                f"'{key}' must be {form}.", f"{value!r}"[:80], f"Write {head} on a line, and its keys below."
            )
    if not source["agents"]:
        raise RecipeError("A recipe must have at least one agent.", "an empty list", "Add an [[agents]] table.")
    protocol, topology = _protocol(source["protocol"], run_code)
    if "topology" in source:
        if topology is not None:
            raise RecipeError(
                "The topology is given twice.", "'topology' beside 'protocol.topology'", "Remove one of them."
            )
        topology = _topology(source["topology"])
    options = _options(source)
    data: Data = from_table(Data, source["data"], "data")
    if data.files is not None and "partition" in source:
        raise RecipeError(
            "With one file per agent the files are the partition.", "[partition] beside files", "Remove [partition]."
        )
    agents = tuple(from_table(AgentEntry, entry, "agents") for entry in source["agents"])
    for entry in agents:  # a learner is named where the data are
        if data.held_by_agents and (entry.learner is not None or entry.name is None or entry.count != 1):
            raise RecipeError(
                "Where agents hold their data an [[agents]] table holds a name: the learner is the agent's own.",
                f"name = {entry.name!r}, learner = {entry.learner!r}, count = {entry.count}",
                'Write name = "hospital-a", and nothing else.',
            )
        if not data.held_by_agents and entry.learner is None:
            raise RecipeError("[agents] needs 'learner'.", "", "Add it: see 'codistill learners'.")
    if sum(entry.count for entry in agents) > MOST_AGENTS:
        raise RecipeError(
            f"A recipe may have at most {MOST_AGENTS:,} agents.",
            f"{sum(entry.count for entry in agents):,}",
            "Make 'count' in [[agents]] smaller.",
        )
    seed, guard = source.get("seed", 0), source.get("safeguard", False)
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise RecipeError("seed must be an integer of at least 0.", repr(seed), "Choose another seed.")
    return Recipe(
        data=data,
        agents=agents,
        protocol=protocol,
        **options,
        seed=seed,
        partition=_partition(source.get("partition", {"kind": "iid"})),
        faults=tuple(from_table(Fault, entry, "faults") for entry in source.get("faults", [])),
        compression=from_table(Compression, source["compression"], "compression") if "compression" in source else None,
        topology=topology,
        network=from_table(Network, source.get("network", {}), "network"),
        ray=from_table(RayCluster, source.get("ray", {}), "ray"),
        safeguard=from_table(Safeguard, guard, "safeguard") if isinstance(guard, dict) else as_safeguard(guard),
        clock=clock_from_table(source["clock"]) if "clock" in source else None,
        track=from_table(Track, source["track"], "track") if "track" in source else None,
        source=source,
    )


def _options(source: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the run, and of the recipe, in [protocol], [runtime] and [evaluation]."""
    for table in ("runtime", "evaluation"):
        known = [place.partition(".")[2] for place in PLACES if place.startswith(f"{table}.")]
        for key in source.get(table, {}):
            if key not in known:
                raise RecipeError(f"Unknown option '{key}' for [{table}].", "", nearest(key, known))
    values: dict[type[Any], dict[str, Any]] = {RunSpec: {}, Recipe: {}}
    for place, (cls, each) in PLACES.items():
        table, _, key = place.partition(".")
        values[cls][each.name] = read_setting(
            cls, each.name, source.get(table, {}).get(key, each.metadata["in_recipe"]), place
        )
    for name in values[Recipe]["scores"]:
        as_score(name)
    _check_validation(source.get("data", {}), values[Recipe]["validation"], values[Recipe]["test"])
    return {"spec": RunSpec(**values[RunSpec]), **values[Recipe]}


def _check_validation(data: Mapping[str, Any], share: float, test: bool) -> None:
    """Each agent's own validation samples, or a common validation set in place of the test set: not both."""
    if share and data.get("validation"):
        raise RecipeError(
            "Validation samples are held out once: by each agent of its own, or of all samples for a common set.",
            "evaluation.validation beside data.validation",
            "Remove data.validation, which takes the place of the test set.",
        )
    if share and data.get("held_by_agents"):
        raise RecipeError(
            "Agents that hold their data hold out what they want to.",
            "evaluation.validation beside data.held_by_agents",
            "Remove it; agents may have test data of their own.",
        )
    if not test and not share:
        raise RecipeError(
            "A run without test samples needs validation samples.",
            "evaluation.test = false without evaluation.validation",
            "Add validation = 0.2 to [evaluation].",
        )


def _protocol(table: Mapping[str, Any], run_code: bool) -> tuple[Protocol, str | Graph | None]:
    rest = {key: value for key, value in table.items() if f"protocol.{key}" not in PLACES}
    name = rest.pop("name", None)
    if not isinstance(name, str):
        raise RecipeError("[protocol] needs 'name'.", repr(name), f"Choose one of {', '.join(PROTOCOLS)}.")
    cls = protocol_class(name) if run_code or not is_own(name) else UnreadProtocol
    topology = rest.pop("topology", None)
    if topology is not None and topology not in list(TOPOLOGIES):
        raise RecipeError(
            "protocol.topology must be a simple one; others go into a table [topology].",
            repr(topology),
            nearest(str(topology), TOPOLOGIES),
        )
    made = UnreadProtocol(place=name, table=rest) if cls is UnreadProtocol else _made_protocol(name, rest)
    return made, topology


def _made_protocol(name: str, rest: Mapping[str, Any]) -> Protocol:
    known = protocol_settings(name)
    for key in rest:
        if key not in known:
            in_learner = f'It belongs to a learner: learner = {{ kind = "mlp", {key} = ... }} in [[agents]].'
            do = in_learner if key in OF_THE_MODEL else nearest(key, known)
            raise RecipeError(f"Unknown option '{key}' for {name}.", "", do)
    made: Protocol = from_table(protocol_class(name), rest, "protocol")
    return made


def protocol_settings(name: str) -> set[str]:
    return _OF_ANY.union(field.name for field in dataclasses.fields(protocol_class(name)))


def _partition(table: Mapping[str, Any]) -> partitions.Partition:
    rest = dict(table)
    kind = rest.pop("kind", None)
    fields = {each: {f.name for f in dataclasses.fields(cls)} for each, cls in partitions.KINDS.items()}
    if kind is None:
        fitting = [each for each in fields if fields[each] >= rest.keys()] or list(fields)
        raise RecipeError("[partition] needs 'kind'.", "none", f'Add kind = "...", one of {", ".join(fitting)}.')
    if kind not in list(fields):
        raise RecipeError(f"Unknown partition {kind!r}."[:100], "", nearest(str(kind), fields))
    for key in sorted(rest.keys() - fields[kind]):
        others = [each for each in fields if key in fields[each]]
        do = f"Remove it, or choose a kind that has it: {', '.join(others)}."
        if not others:
            do = nearest(key, fields[kind]) if fields[kind] else "Remove it."
        raise RecipeError(f"Unknown option '{key}' for the partition '{kind}'.", "", do)
    made: partitions.Partition = from_table(partitions.KINDS[kind], rest, "partition")
    return made


def _topology(given: Any) -> str | Graph:
    if isinstance(given, str) and given in TOPOLOGIES:
        return given
    rest = dict(given) if isinstance(given, dict) else {"kind": given}
    kind = rest.pop("kind", None)
    if not isinstance(kind, str) or kind not in GRAPHS:
        raise RecipeError("topology must be a known kind, or a table that says one.", repr(kind), nearest(kind, GRAPHS))
    made: Graph = from_table(GRAPHS[kind], rest, "topology")
    return made


# --- Paths in a recipe: relative to its own folder as they are written, absolute from there on.


def with_absolute_paths(tables: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """A copy of a recipe's tables in which paths do not depend on where the recipe is."""
    source = {key: dict(value) if isinstance(value, dict) else value for key, value in tables.items()}
    data, protocol, agents, track = (source.get(key) for key in ("data", "protocol", "agents", "track"))
    if isinstance(track, dict):
        source["track"] = absolute(track, folder)
    if isinstance(data, dict):
        for key in ("schema", "public_file", "dir"):
            if isinstance(data.get(key), str):
                data[key] = str(folder / data[key])
        for key in ("file", "folder"):
            if isinstance(data.get(key), str):
                data[key] = _beside(folder, data[key])
        if isinstance(data.get("files"), dict):
            data["files"] = {name: _beside(folder, str(path)) for name, path in data["files"].items()}
    if isinstance(protocol, dict) and is_own(protocol.get("name")):
        protocol["name"] = str(folder / protocol["name"])
    if isinstance(agents, list):
        source["agents"] = [
            {**entry, "learner": _with_absolute_models(entry["learner"], folder)}
            if isinstance(entry, dict) and "learner" in entry
            else entry
            for entry in agents
        ]
    return source


def _with_absolute_models(learner: Any, folder: Path) -> Any:
    """A learner, or a step of a pipeline, with the path of its file."""
    if isinstance(learner, list):
        return [_with_absolute_models(step, folder) for step in learner]
    if isinstance(learner, dict):
        paths = ("kind", "steps")
        return {key: _with_absolute_models(value, folder) if key in paths else value for key, value in learner.items()}
    return str(folder / learner) if is_own(learner) else learner


def _beside(folder: Path, path: str) -> str:
    """A table beside the recipe; what is not there is looked for in the data folder when it is read."""
    beside = (folder / path).absolute()
    return str(beside) if beside.exists() else path


# --- Changes of a recipe's tables by `--set a.b=value`, and what such a change leaves without a meaning.

_OF_ANY = {"name", "rounds", "topology"}  # keys of [protocol] that are no field of a protocol
# The key that says which fields a table has.
_KIND = {"partition": "kind", "protocol": "name", "topology": "kind"}


def apply_overrides(tables: dict[str, Any], changes: Sequence[str], folder: Path, *, run_code: bool = True) -> None:
    """Apply every `--set`, and print notes on what is dropped, because it belonged to the kind that was there before.

    Dropped are fields that the new kind does not have, or has with another meaning, unless they are given with it.
    """
    before = {table: _kind(tables, table) for table in _KIND}
    given: set[tuple[str, ...]] = set()
    for change in changes:
        override(tables, change)
        given.add(tuple(_steps(change.partition("=")[0])))
    for table, old in before.items():
        held, new = tables.get(table, {}), _kind(tables, table)
        if old is None or new is None or new == old or (table,) in given:
            continue  # a table that was given as a whole holds nothing of before
        unread = [kind for kind in (old, new) if table == "protocol" and is_own(kind) and not run_code]
        if new in unread:
            continue  # what it has is not known
        try:
            after = _fields(table, new, folder)
            had = dict.fromkeys(held.keys() - _OF_ANY, "") if old in unread else _fields(table, old, folder)
        except (CodistillError, KeyError):
            continue  # an unknown kind: refused when the recipe is made
        # What two protocols call by one name means the same; what two kinds of partitions do may not.
        same = {key for key in after if table == "protocol" or had.get(key) == after[key]}
        kept = {steps[1] for steps in given if steps[0] == table and len(steps) > 1} | same
        foreign = [key for key in held if key in had and key not in kept]
        if foreign:
            dropped = ", ".join(f"{key} = {held.pop(key)!r}" for key in foreign)
            note = f"note: [{table}] {dropped}: left out, as {new} does not have it as {old} does"
            print(note, file=sys.stderr)


def _kind(tables: dict[str, Any], table: str) -> str | None:
    held = tables.get(table)
    kind = held.get(_KIND[table]) if isinstance(held, dict) else None
    return kind if isinstance(kind, str) else None


def _fields(table: str, kind: str, folder: Path) -> dict[str, str]:
    """The fields of a kind, with their help texts: equal texts say that they mean the same."""
    if table == "protocol":
        cls: type[Any] = protocol_class(str(folder / kind) if is_own(kind) else kind)
    else:
        cls = (PARTITIONS if table == "partition" else GRAPHS)[kind]
    return {field.name: str(field.metadata.get("help", "")) for field in dataclasses.fields(cls)}


def override(tables: dict[str, Any], text: str) -> None:
    """Apply `--set a.b=value`; the value is TOML, or a string as it stands."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise RecipeError("--set must have the form table.key=value.", f"'{text}'", "Example: protocol.rounds=5.")
    try:
        parsed = parse_toml(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value.strip()
    put(tables, key, parsed)


def put(tables: dict[str, Any], key: str, parsed: Any) -> None:
    """Set the value at a dotted key; steps into a list are numbers, a name with dots in it stands in quotes."""
    place: Any = tables
    *path, last = _steps(key) or [""]
    try:
        for step in path:
            place = place[int(step)] if isinstance(place, list) else place.setdefault(step, {})
        if isinstance(place, list):
            place[int(last)] = parsed
        else:
            place[last] = parsed
    except (ValueError, IndexError, TypeError, AttributeError):
        do = "Example: protocol.rounds=5."
        if isinstance(place, list):
            do = f"There is a list of {len(place)}, counted from 0. Example: agents.0.learner=mlp."
        raise RecipeError("A change must name a place in the recipe.", f"'{key}'", do) from None


def _steps(key: str) -> list[str]:
    return [quoted or plain for quoted, plain in re.findall(r'"([^"]+)"|([^."]+)', key.strip())]
