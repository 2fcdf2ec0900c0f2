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
from codistill.clock import Clock, clock_from_table
from codistill.data import partition as partitions
from codistill.errors import RecipeError, nearest
from codistill.experiments.overrides import apply_overrides
from codistill.experiments.recipe_paths import with_absolute_paths
from codistill.experiments.recipe_tables import MOST_AGENTS, AgentEntry, Data, Evaluation
from codistill.experiments.user_code import UnreadProtocol, files_of, is_own, protocol_class, shown_files
from codistill.faults import Fault
from codistill.federation.runtime_options import RuntimeOptions
from codistill.protocol import Protocol
from codistill.protocols import PROTOCOLS
from codistill.runtimes.network.options import Network
from codistill.runtimes.plan import check_features_at
from codistill.runtimes.ray_cluster import RayCluster
from codistill.runtimes.safeguard import Safeguard, as_safeguard
from codistill.settings import from_table
from codistill.text import parse_toml
from codistill.topology import KINDS as TOPOLOGIES
from codistill.topology.graphs import KINDS as GRAPHS
from codistill.topology.graphs import Graph
from codistill.wire.compression import Compression


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
    ray: RayCluster = field(default_factory=RayCluster)
    safeguard: Safeguard | None = None
    clock: Clock | None = None
    source: dict[str, Any] = field(default_factory=dict, compare=False)  # the tables it was made from


# Keys of tables that people look for at the top of a recipe.
_PLACES = {
    "rounds": "protocol.rounds",
    "learner": "agents.0.learner, for each of the [[agents]]",
    **{f.name: f"data.{f.name}" for f in dataclasses.fields(Data) if f.name not in ("name", "drop")},
    **{f.name: f"runtime.{f.name}" for f in dataclasses.fields(RuntimeOptions) if f.name != "kind"},
    **{f.name: f"evaluation.{f.name}" for f in dataclasses.fields(Evaluation) if f.name not in ("samples", "agents")},
}


def read_recipe(path: Path, overrides: Sequence[str] = (), *, run_code: bool = True) -> Recipe:
    """Read, override and check a recipe file; without `run_code` a protocol in a file of one's own is not read."""
    return make_recipe(read_tables(path, overrides, run_code=run_code), path.resolve().parent, run_code=run_code)


def read_tables(path: Path, overrides: Sequence[str] = (), *, run_code: bool = True) -> dict[str, Any]:
    """The tables of a recipe file, with what `--set` changes in them."""
    try:
        tables = parse_toml(path.read_text("utf-8-sig"))
    except OSError as error:
        raise RecipeError(
            "The recipe must be a readable file.", f"{path}: {error.strerror}", "Check the path."
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path} must be valid TOML.", str(error), "Fix the line it names.") from None
    for note in apply_overrides(tables, overrides, path.resolve().parent, run_code=run_code):
        print(f"note: {note}", file=sys.stderr)
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
        "ray",
        "safeguard",
        "clock",
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
    tables_of_settings = ("runtime", "evaluation", "compression", "network", "ray", "clock")
    _expect(source, dict, "data", "partition", "protocol", *tables_of_settings)
    if not source["agents"]:
        raise RecipeError("A recipe must have at least one agent.", "an empty list", "Add an [[agents]] table.")
    protocol, rounds, topology = _protocol(source["protocol"], run_code)
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
    if sum(entry.count for entry in agents) > MOST_AGENTS:
        raise RecipeError(
            f"A recipe may have at most {MOST_AGENTS:,} agents.",
            f"{sum(entry.count for entry in agents):,}",
            "Make 'count' in [[agents]] smaller.",
        )
    evaluation: Evaluation = from_table(Evaluation, source.get("evaluation", {}), "evaluation")
    check_features_at(evaluation.features_at, rounds)
    return Recipe(
        data=data,
        agents=agents,
        protocol=protocol,
        rounds=rounds,
        seed=_seed(source.get("seed", 0)),
        partition=_partition(source.get("partition", {"kind": "iid"})),
        runtime=from_table(RuntimeOptions, runtime, "runtime"),
        evaluation=evaluation,
        faults=tuple(from_table(Fault, entry, "faults") for entry in source.get("faults", [])),
        participation=float(participation),
        compression=from_table(Compression, source["compression"], "compression") if "compression" in source else None,
        topology=topology,
        network=from_table(Network, source.get("network", {}), "network"),
        ray=from_table(RayCluster, source.get("ray", {}), "ray"),
        safeguard=_safeguard(source.get("safeguard", False)),
        clock=clock_from_table(source["clock"]) if "clock" in source else None,
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


def _protocol(table: Mapping[str, Any], run_code: bool) -> tuple[Protocol, int, str | Graph | None]:
    rest = dict(table)
    name = rest.pop("name", None)
    if not isinstance(name, str):
        raise RecipeError("[protocol] must say its name.", repr(name), f"Choose one of {', '.join(PROTOCOLS)}.")
    cls = protocol_class(name) if run_code or not is_own(name) else UnreadProtocol
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
    if cls is UnreadProtocol:
        return UnreadProtocol(place=name, table=rest), rounds, topology
    return _made_protocol(name, rest), rounds, topology


def _made_protocol(name: str, rest: Mapping[str, Any]) -> Protocol:
    """A protocol with the settings of its table."""
    known = protocol_settings(name)
    for key in rest:
        if key not in known:
            in_learner = f'It belongs to a learner: learner = {{ kind = "mlp", {key} = ... }} in [[agents]].'
            do = in_learner if key in OF_THE_MODEL else nearest(key, known)
            raise RecipeError(f"[protocol] may only hold what {name} has.", f"'{key}'", do)
    made: Protocol = from_table(protocol_class(name), rest, "protocol")
    return made


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
