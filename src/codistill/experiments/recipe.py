"""A recipe: one TOML file that says all there is to say about a run, checked before anything runs."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from codistill.data import partition as partitions
from codistill.errors import RecipeError, nearest
from codistill.experiments.user_code import run_file
from codistill.faults import Fault
from codistill.federation import RuntimeOptions
from codistill.protocol import Protocol
from codistill.protocols import PROTOCOLS
from codistill.runtimes.network.options import Network
from codistill.settings import check_settings, from_table, setting
from codistill.topology import KINDS as TOPOLOGIES
from codistill.topology.graphs import KINDS as GRAPHS
from codistill.topology.graphs import Graph
from codistill.wire.compression import Compression


@dataclass(frozen=True, kw_only=True)
class Data:
    """[data]: a data set by name, or tables; and how much of it is public."""

    name: str | None = setting(None, "a bundled data set, a file <name>.npz in the data folder, or hf:owner/name")
    file: str | None = setting(None, "a CSV or Parquet file instead of a name")
    files: dict[str, str] | None = setting(None, "one CSV or Parquet file per agent: name = path")
    label: str | None = setting(None, "the label column of a table")
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
    scale: str | None = setting(
        None, "how samples are scaled; unset: as suits the data", choices=("unit", "standard", "none")
    )
    public: int | float = setting(0, "public samples without labels: a count, or a share below 1", at_least=0)
    held_by_agents: bool = setting(False, "every agent brings its own data; see docs/deploy.md")
    classes: int | None = setting(
        None, "with held_by_agents: how many classes there are; 1 for one real value", at_least=1
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
        if not self.held_by_agents and (self.classes is not None or self.public_file is not None):
            raise RecipeError(
                "[data] classes and public_file go with held_by_agents.",
                f"beside '{given[0]}'",
                "Remove them, or say held_by_agents = true.",
            )
        if self.held_by_agents:
            self._check_held_by_agents()
            return
        if self.name is None and self.label is None:
            raise RecipeError("[data] must say the label column of a table.", "no label", 'Add label = "column".')
        of_others = ("label", "drop", "ids") if self.name is not None else ("samples", "test_samples", "dir")
        useless = [key for key in of_others if getattr(self, key)]
        if useless:
            raise RecipeError(
                "[data] label, drop and ids go with a table (file, files); samples, test_samples and dir with a name.",
                f"'{useless[0]}' beside '{given[0]}'",
                f"Remove '{useless[0]}'.",
            )

    def _check_held_by_agents(self) -> None:
        """The hub has no data to split or to scale."""
        if self.classes is None:
            raise RecipeError(
                "[data] with held_by_agents must say how many classes there are.", "none", "Add classes = 2."
            )
        kept = {"held_by_agents", "classes", "public_file"}
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
        None, "a learner's name, or a table with kind and options; where agents hold their data: none"
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

    def __post_init__(self) -> None:
        check_settings(self, "evaluation")


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
    source: dict[str, Any] = field(default_factory=dict, compare=False)  # the tables it was made from


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
    for change in overrides:
        override(tables, change)
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
    )
    if "sweep" in source:
        raise RecipeError(
            "A recipe with [sweep] is many runs.", "[sweep]", "Run them by 'codistill sweep', or remove the table."
        )
    for key in source:
        if key not in known:
            raise RecipeError("A recipe may only hold known tables.", f"'{key}'", nearest(key, known))
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
        source=source,
    )


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
    cls = _protocol_class(name)
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
            raise RecipeError(f"[protocol] may only hold what {name} has.", f"'{key}'", nearest(key, known))
    return from_table(cls, rest, "protocol"), rounds, topology


def protocol_settings(name: str) -> set[str]:
    """What a [protocol] table may hold."""
    return {*(field.name for field in dataclasses.fields(_protocol_class(name))), "name", "rounds", "topology"}


def _protocol_class(name: str) -> type[Protocol]:
    if name in PROTOCOLS:
        return PROTOCOLS[name]
    path, _, attribute = name.rpartition(":")
    if not path.endswith(".py"):
        raise RecipeError(
            "A protocol must be on the list of 'codistill protocols', or be your own as 'file.py:Class'.",
            f"'{name}'",
            nearest(name, PROTOCOLS),
        )
    try:
        cls = getattr(run_file(Path(path), "own"), attribute)
    except Exception as error:  # whatever the file does when it is run
        raise RecipeError(
            f"'{name}' must be importable.",
            f"{type(error).__name__}: {error}",
            "Check the path, the file and the name of the class in it.",
        ) from error
    if not (isinstance(cls, type) and issubclass(cls, Protocol)):
        raise RecipeError(f"'{name}' must be a class derived from Protocol.", f"{cls!r}"[:80], "Name such a class.")
    return cls


def _partition(table: Mapping[str, Any]) -> partitions.Partition:
    rest = dict(table)
    kind = rest.pop("kind", None)
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
            data["file"] = str(folder / data["file"])
        if isinstance(data.get("public_file"), str):
            data["public_file"] = str(folder / data["public_file"])
        if isinstance(data.get("dir"), str):
            data["dir"] = str(folder / data["dir"])
        if isinstance(data.get("files"), dict):
            data["files"] = {name: str(folder / str(path)) for name, path in data["files"].items()}
    protocol = source.get("protocol")
    if isinstance(protocol, dict) and ".py:" in str(protocol.get("name")):
        protocol["name"] = str(folder / protocol["name"])
    return source


def override(tables: dict[str, Any], text: str) -> None:
    """Apply `--set a.b=value`; the value is TOML, or a string as it stands."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise RecipeError("--set must have the form table.key=value.", f"'{text}'", "Example: protocol.rounds=5.")
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value.strip()
    put(tables, key, parsed)


def put(tables: dict[str, Any], key: str, parsed: Any) -> None:
    """Set the value at a dotted key; steps into a list are numbers, a name with dots in it stands in quotes."""
    place: Any = tables
    steps = [quoted or plain for quoted, plain in re.findall(r'"([^"]+)"|([^."]+)', key.strip())]
    *path, last = steps or [""]
    try:
        for step in path:
            place = place[int(step)] if isinstance(place, list) else place.setdefault(step, {})
        if isinstance(place, list):
            place[int(last)] = parsed
        else:
            place[last] = parsed
    except (ValueError, IndexError, TypeError, AttributeError):
        raise RecipeError(
            "A change must name a place in the recipe.", f"'{key}'", "Example: protocol.rounds=5."
        ) from None
