"""A recipe: one TOML file that says all there is to say about a run, checked before anything runs."""

from __future__ import annotations

import dataclasses
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from codistill.arguments import OF_THE_MODEL
from codistill.data import partition as partitions
from codistill.data.columns import Columns
from codistill.data.label_mapping import check_label_mapping
from codistill.data.labels import TASKS
from codistill.errors import RecipeError, nearest
from codistill.experiments.overrides import apply_overrides
from codistill.experiments.user_code import is_own, protocol_class
from codistill.faults import Fault
from codistill.federation import RuntimeOptions
from codistill.protocol import Protocol
from codistill.protocols import PROTOCOLS
from codistill.results.scores import as_score
from codistill.runtimes.network.options import Network
from codistill.runtimes.safeguard import Safeguard, as_safeguard
from codistill.settings import check_settings, from_table, setting
from codistill.topology import KINDS as TOPOLOGIES
from codistill.topology.graphs import KINDS as GRAPHS
from codistill.topology.graphs import Graph
from codistill.wire.compression import Compression

_OF_TABLES = (  # keys of [data]
    "label", "label_above", "label_map", "drop", "ids", "columns", "schema", "missing", "missing_values",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Data:
    """[data]: a data set by name, or tables; and how much of it is public."""

    name: str | None = setting(None, "a bundled data set, a file <name>.npz in the data folder, or hf:owner/name")
    file: str | None = setting(None, "a CSV or Parquet file instead of a name")
    files: dict[str, str] | None = setting(None, "one CSV or Parquet file per agent: name = path")
    label: str | None = setting(None, "the label column of a table")
    label_above: float | None = setting(None, "two classes: label values above this number, and all others")
    label_map: dict[str, str] | None = setting(None, "the class of each value of the label column: value = class")
    task: str | None = setting(
        None, "whether labels are classes or real values; unset: as the data say, or asked about", choices=TASKS
    )
    drop: tuple[str, ...] = setting((), "columns of a table to leave out")
    ids: tuple[str, ...] = setting((), "columns of a table that say where a sample is from")
    dir: str | None = setting(None, "the data folder; unset: --data-dir or the environment's CODISTILL_DATA")
    samples: int | None = setting(None, "use only this many training samples", at_least=1)
    test_samples: int | None = setting(None, "use only this many test samples", at_least=1)
    test_fraction: float = setting(0.2, "test share where there is no test set", above=0, at_most=0.9)
    validation: float = setting(
        0.0, "share of the training samples to measure on in place of the test set, to choose settings", at_least=0,
        at_most=0.9,
    )  # fmt: skip
    columns: dict[str, str | dict[str, Any]] | None = setting(
        None, "columns of a table that are no numbers: name = kind (category, text), or a table with kind and options"
    )
    schema: str | None = setting(None, "a file that says the same of all columns, agreed on by all organisations")
    missing: str = setting(
        "keep", "empty cells: kept for models that take them and imputed for others; imputed for all; or their rows "
        "dropped; or refused", choices=("keep", "impute", "drop_rows", "refuse"),
    )  # fmt: skip
    missing_values: tuple[str, ...] = setting((), "cells that mean the same as an empty one, such as ?")
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
        given = [key for key in ("name", "file", "files") if getattr(self, key) is not None]
        given += ["held_by_agents"] if self.held_by_agents else []
        if len(given) != 1:
            raise RecipeError(
                "[data] must say exactly one of name, file, files, held_by_agents.", f"{given or 'none'}", "Keep one."
            )
        of_hub = [key for key in ("classes", "class_names", "public_file") if getattr(self, key) is not None]
        if not self.held_by_agents and of_hub:
            raise RecipeError(
                "[data] classes, class_names and public_file go with held_by_agents.",
                f"'{of_hub[0]}' beside '{given[0]}'",
                "Remove them, or say held_by_agents = true.",
            )
        if self.held_by_agents:
            self._check_held_by_agents()
            return
        if self.name is None and self.label is None:
            raise RecipeError("[data] must say the label column of a table.", "no label", 'Add label = "column".')
        check_label_mapping(self.label_above, self.label_map)
        if self.columns is not None and self.schema is not None:
            raise RecipeError("[data] must say its columns once.", "'columns' beside 'schema'", "Keep one of them.")
        Columns(self.columns or {})
        of_others = _OF_TABLES if self.name is not None else ("samples", "test_samples")
        defaults = {f.name: f.default for f in dataclasses.fields(self)}
        useless = [key for key in of_others if getattr(self, key) != defaults[key]]
        if useless:
            raise RecipeError(
                f"[data] {', '.join(_OF_TABLES)} go with a table (file, files); samples and test_samples with a name.",
                f"'{useless[0]}' beside '{given[0]}'",
                f"Remove '{useless[0]}'.",
            )

    def _check_held_by_agents(self) -> None:
        """The hub has no data to split or to scale."""
        if (self.classes is None) == (self.class_names is None):
            raise RecipeError(
                "[data] with held_by_agents must say how many classes there are, or name them.",
                "neither" if self.classes is None else "both classes and class_names",
                'Add classes = 2, or class_names = ["no", "yes"].',
            )
        kept = {"held_by_agents", "classes", "class_names", "public_file", "task"}
        idle = [f.name for f in dataclasses.fields(self) if f.name not in kept and getattr(self, f.name) != f.default]
        if idle:
            raise RecipeError(
                "[data] with held_by_agents holds no data.",
                f"'{idle[0]}' beside 'held_by_agents'",
                f"Remove '{idle[0]}'.",
            )


@dataclass(frozen=True, kw_only=True)
class AgentEntry:
    """[[agents]]: one agent, or several of a kind."""

    learner: str | dict[str, Any] | None = setting(
        None, "a learner's name, 'file.py:Name', or a table with kind and options; where agents hold their data: none"
    )
    name: str | None = setting(None, "the agent's name; unset: made from the learner's")
    count: int = setting(1, "how many such agents", at_least=1)

    def __post_init__(self) -> None:
        check_settings(self, "agents")
        if isinstance(self.learner, dict) and not isinstance(self.learner.get("kind"), str):
            raise RecipeError(
                "A learner's table must say its kind, a string.", f"{self.learner}", 'Write kind = "name" in it.'
            )

    @property
    def kind(self) -> str:
        """The learner's name."""
        if self.learner is None:
            return "agent"
        kind: str = self.learner if isinstance(self.learner, str) else self.learner["kind"]
        return kind

    @property
    def short_kind(self) -> str:
        """The last part of the learner's name."""
        return self.kind.rpartition(":")[2] if is_own(self.kind) else self.kind.rpartition(".")[2]

    @property
    def kinds(self) -> list[Any]:
        """The names of the learner and of the steps of a pipeline."""
        steps = self.options.get("steps", [])
        inner = steps if isinstance(steps, list) else []
        return [self.kind, *(step.get("kind") if isinstance(step, dict) else step for step in inner)]

    @property
    def options(self) -> dict[str, Any]:
        """The learner's options."""
        return {} if not isinstance(self.learner, dict) else {k: v for k, v in self.learner.items() if k != "kind"}


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """[evaluation]: what is measured, and when."""

    every: int = setting(1, "rounds between evaluations; the last round is always evaluated", at_least=1)
    samples: int | None = setting(
        2000, "test samples per evaluation, the full test set in the last round; 0: always all", at_least=0
    )
    alone: bool = setting(True, "also train every agent alone, so that the gain is known")
    scores: tuple[str, ...] = setting(
        (), "scores by scikit-learn's names, the most important first; unset: accuracy, or rmse for a regression"
    )

    def __post_init__(self) -> None:
        check_settings(self, "evaluation")
        for name in self.scores:
            as_score(name)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All of a run."""

    data: Data
    agents: tuple[AgentEntry, ...]
    protocol: Protocol
    rounds: int = 10
    seed: int = 0
    partition: partitions.Partition = field(default_factory=partitions.Iid)
    runtime: RuntimeOptions = field(default_factory=RuntimeOptions)
    evaluation: Evaluation = field(default_factory=Evaluation)
    faults: tuple[Fault, ...] = ()
    participation: float = 1.0
    compression: Compression | None = None
    topology: str | Graph | None = None  # None: that of the protocol
    network: Network = field(default_factory=Network)
    safeguard: Safeguard | None = None
    source: dict[str, Any] = field(default_factory=dict, compare=False)  # the tables it was made from


# Keys of tables that people look for at the top of a recipe.
_PLACES = {
    "rounds": "protocol.rounds",
    "learner": "agents.0.learner, for each of the [[agents]]",
    **{f.name: f"data.{f.name}" for f in dataclasses.fields(Data) if f.name not in ("name", "drop")},
    **{f.name: f"runtime.{f.name}" for f in dataclasses.fields(RuntimeOptions) if f.name != "kind"},
    **{f.name: f"evaluation.{f.name}" for f in dataclasses.fields(Evaluation) if f.name != "samples"},
}


def read_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read, override and check a recipe file."""
    return make_recipe(read_tables(path, overrides), path.resolve().parent)


def read_tables(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The tables of a recipe file, with what `--set` changes in them."""
    try:
        tables = tomllib.loads(path.read_text("utf-8-sig"))
    except OSError as error:
        raise RecipeError(
            "The recipe must be a readable file.", f"{path}: {error.strerror}", "Check the path."
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path} must be valid TOML.", str(error), "Fix the line it names.") from None
    for note in apply_overrides(tables, overrides, path.resolve().parent):
        print(f"note: {note}", file=sys.stderr)
    return tables


def make_recipe(tables: Mapping[str, Any], folder: Path) -> Recipe:
    """Check the tables of a recipe; paths in it are relative to `folder`."""
    source = _with_absolute_paths(tables, folder)
    known = (
        "seed",
        "data",
        "partition",
        "agents",
        "topology",
        "protocol",
        "runtime",
        "evaluation",
        "faults",
        "compression",
        "network",
        "safeguard",
    )
    if "sweep" in source:
        raise RecipeError(
            "A recipe with [sweep] is many runs.", "[sweep]", "Run them by 'codistill sweep', or remove the table."
        )
    for key in source:
        if key not in known:
            do = f"Write {_PLACES[key]}." if key in _PLACES else nearest(key, known)
            raise RecipeError("A recipe may only hold known tables.", f"'{key}'", do)
    for key in ("data", "agents", "protocol"):
        if key not in source:
            raise RecipeError(f"A recipe must have [{key}].", "no such table", "See recipes/ for examples.")
    _expect(source, list, "agents", "faults")
    _expect(source, dict, "data", "partition", "protocol", "runtime", "evaluation", "compression", "network")
    if not source["agents"]:
        raise RecipeError("A recipe must have at least one agent.", "an empty list", "Add an [[agents]] table.")
    protocol, rounds, topology = _protocol(source["protocol"])
    if "topology" in source:
        if topology is not None:
            raise RecipeError(
                "A recipe must say its topology once.", "'topology' beside 'protocol.topology'", "Remove one of them."
            )
        topology = _topology(source["topology"])
    runtime = dict(source.get("runtime", {}))
    participation = runtime.pop("participation", 1.0)
    if isinstance(participation, bool) or not isinstance(participation, int | float) or not 0 < participation <= 1:
        raise RecipeError(
            "runtime.participation must be above 0 and at most 1.",
            repr(participation),
            "Change it. It is: the share of agents that take part in a round.",
        )
    data: Data = from_table(Data, source["data"], "data")
    if data.files is not None and "partition" in source:
        raise RecipeError(
            "With one file per agent the files are the partition.", "[partition] beside files", "Remove [partition]."
        )
    agents = tuple(from_table(AgentEntry, entry, "agents") for entry in source["agents"])
    _check_learners(data, agents)
    return Recipe(
        data=data,
        agents=agents,
        protocol=protocol,
        rounds=rounds,
        seed=_seed(source.get("seed", 0)),
        partition=_partition(source.get("partition", {"kind": "iid"})),
        runtime=from_table(RuntimeOptions, runtime, "runtime"),
        evaluation=from_table(Evaluation, source.get("evaluation", {}), "evaluation"),
        faults=tuple(from_table(Fault, entry, "faults") for entry in source.get("faults", [])),
        participation=float(participation),
        compression=from_table(Compression, source["compression"], "compression") if "compression" in source else None,
        topology=topology,
        network=from_table(Network, source.get("network", {}), "network"),
        safeguard=_safeguard(source.get("safeguard", False)),
        source=source,
    )


def _safeguard(given: Any) -> Safeguard | None:
    """safeguard = true, or a table of its settings."""
    return from_table(Safeguard, given, "safeguard") if isinstance(given, dict) else as_safeguard(given)


def _check_learners(data: Data, agents: Sequence[AgentEntry]) -> None:
    """A learner is named where the data are."""
    for entry in agents:
        if data.held_by_agents and (entry.learner is not None or entry.name is None or entry.count != 1):
            raise RecipeError(
                "Where agents hold their data an [[agents]] table holds a name: the learner is the agent's own.",
                f"name = {entry.name!r}, learner = {entry.learner!r}, count = {entry.count}",
                'Write name = "hospital-a", and nothing else.',
            )
        if not data.held_by_agents and entry.learner is None:
            raise RecipeError("[agents] must say 'learner'.", "no such key", "Add it: see 'codistill learners'.")


def _seed(seed: Any) -> int:
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise RecipeError("seed must be an integer of at least 0.", repr(seed), "Choose another seed.")
    return seed


def _protocol(table: Mapping[str, Any]) -> tuple[Protocol, int, str | Graph | None]:
    rest = dict(table)
    name = rest.pop("name", None)
    if not isinstance(name, str):
        raise RecipeError("[protocol] must say its name.", repr(name), f"Choose one of {', '.join(PROTOCOLS)}.")
    cls = protocol_class(name)
    rounds = rest.pop("rounds", 10)
    if isinstance(rounds, bool) or not isinstance(rounds, int) or rounds < 1:
        raise RecipeError("protocol.rounds must be an integer of at least 1.", repr(rounds), "Choose another number.")
    topology = rest.pop("topology", None)
    if topology is not None and topology not in list(TOPOLOGIES):
        raise RecipeError(
            "protocol.topology must be a simple one; others go into a table [topology].",
            repr(topology),
            nearest(str(topology), TOPOLOGIES),
        )
    known = protocol_settings(name)
    for key in rest:
        if key not in known:
            in_learner = f'It belongs to a learner: learner = {{ kind = "mlp", {key} = ... }} in [[agents]].'
            do = in_learner if key in OF_THE_MODEL else nearest(key, known)
            raise RecipeError(f"[protocol] may only hold what {name} has.", f"'{key}'", do)
    return from_table(cls, rest, "protocol"), rounds, topology


def protocol_settings(name: str) -> set[str]:
    """What a [protocol] table may hold."""
    return {*(field.name for field in dataclasses.fields(protocol_class(name))), "name", "rounds", "topology"}


def _partition(table: Mapping[str, Any]) -> partitions.Partition:
    rest = dict(table)
    kind = rest.pop("kind", None)
    if kind is None:
        fields = {each: {f.name for f in dataclasses.fields(cls)} for each, cls in partitions.KINDS.items()}
        fitting = [each for each in fields if fields[each] >= rest.keys()] or list(fields)
        raise RecipeError("[partition] must say its kind.", "none", f'Add kind = "...", one of {", ".join(fitting)}.')
    if kind not in list(partitions.KINDS):
        raise RecipeError("[partition] must say a known kind.", repr(kind), nearest(str(kind), partitions.KINDS))
    made: partitions.Partition = from_table(partitions.KINDS[kind], rest, "partition")
    return made


def _topology(given: Any) -> str | Graph:
    """A graph's name, or a table with its kind and options."""
    if isinstance(given, str) and given in TOPOLOGIES:
        return given
    rest = dict(given) if isinstance(given, dict) else {"kind": given}
    kind = rest.pop("kind", None)
    if not isinstance(kind, str) or kind not in GRAPHS:
        raise RecipeError("topology must be a known kind, or a table that says one.", repr(kind), nearest(kind, GRAPHS))
    made: Graph = from_table(GRAPHS[kind], rest, "topology")
    return made


def _expect(tables: Mapping[str, Any], kind: type, *keys: str) -> None:
    for key in keys:
        value = tables.get(key, kind())
        entries = value if isinstance(value, list) else []
        if not isinstance(value, kind) or not all(isinstance(entry, dict) for entry in entries):
            head = f"[[{key}]]" if kind is list else f"[{key}]"
            form = f"{head} tables" if kind is list else f"a {head} table"
            raise RecipeError(
                f"'{key}' must be {form}.", f"{value!r}"[:80], f"Write {head} on a line, and its keys below."
            )


def _with_absolute_paths(tables: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    source = {key: dict(value) if isinstance(value, dict) else value for key, value in tables.items()}
    data = source.get("data")
    if isinstance(data, dict):
        if isinstance(data.get("file"), str):
            data["file"] = _beside(folder, data["file"])
        if isinstance(data.get("schema"), str):
            data["schema"] = str(folder / data["schema"])
        if isinstance(data.get("public_file"), str):
            data["public_file"] = str(folder / data["public_file"])
        if isinstance(data.get("dir"), str):
            data["dir"] = str(folder / data["dir"])
        if isinstance(data.get("files"), dict):
            data["files"] = {name: _beside(folder, str(path)) for name, path in data["files"].items()}
    protocol = source.get("protocol")
    if isinstance(protocol, dict) and is_own(protocol.get("name")):
        protocol["name"] = str(folder / protocol["name"])
    if isinstance(source.get("agents"), list):
        source["agents"] = [
            {**entry, "learner": _with_absolute_models(entry["learner"], folder)}
            if isinstance(entry, dict) and "learner" in entry
            else entry
            for entry in source["agents"]
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
