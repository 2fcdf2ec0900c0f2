"""Recipes between machines: the hub's side, an agent's side, and all of it on this machine."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from codistill.certs.credentials import Credentials
from codistill.data.shard import PublicData
from codistill.errors import CheckpointError, DataError, NetworkError, RecipeError
from codistill.experiments.recipe import Recipe, make_recipe
from codistill.experiments.run import (
    RECIPE,
    agent_names,
    move_in,
    reopen,
    report_on,
    settle_in,
    source_of,
    topology_of,
    versions,
)
from codistill.experiments.site import Site
from codistill.faults import Faults
from codistill.files import locked, writing
from codistill.results.summary import Summary
from codistill.runtimes.drive import Plan
from codistill.runtimes.network.charter import Charter
from codistill.runtimes.network.conduct import conduct
from codistill.runtimes.network.connections import Connections
from codistill.runtimes.network.diagnosis import probe
from codistill.runtimes.network.event_log import HEALTH, EventLog
from codistill.runtimes.network.options import Network
from codistill.runtimes.network.peers import walk
from codistill.runtimes.network.remote_agent import RemoteAgent
from codistill.runtimes.network.terms import Terms, hello_of
from codistill.runtimes.network.transport import Transport
from codistill.runtimes.network.up import Trial
from codistill.runtimes.runtime import Stage, warm_up
from codistill.runtimes.store import check_vacant
from codistill.topology import HUB
from codistill.topology.facts import as_plain

Stopping = Callable[[], bool]


def plan_of(recipe: Recipe) -> Plan:
    """Rounds and evaluations of a recipe."""
    evaluation = recipe.evaluation
    return Plan(rounds=recipe.rounds, evaluate_every=evaluation.every, evaluate_samples=evaluation.samples or None)


def run_up(
    recipe: Recipe, folder: Path, *, data_dir: str | None, stopping: Stopping, progress: bool, form: str, verbose: bool
) -> tuple[Summary, bool]:
    """A recipe on this machine, one process for each node; goes on with the run that is in the folder."""
    federation, _ = move_in(recipe, folder, data_dir=data_dir, resume=_goes_on(recipe, folder, data_dir))
    if recipe.protocol.pools_data:
        raise _pools(recipe)
    trial = Trial(
        federation, plan_of(recipe), folder, recipe.network, recipe.runtime.checkpoint_every, recipe.evaluation.alone,
        progress and form == "text", form, verbose,
    )  # fmt: skip
    complete = trial.run(stopping)
    return report_on(folder), complete


def run_hub(
    recipe: Recipe,
    folder: Path,
    own: Credentials | None,
    listen: str,
    *,
    data_dir: str | None,
    stopping: Stopping,
    progress: bool,
    form: str,
) -> tuple[Summary, bool]:
    """The hub of a recipe; goes on with the run that is in the folder."""
    topology = topology_of(recipe)
    if not topology.hub:
        raise NetworkError(
            "A hub is for protocols with a hub.",
            f"{recipe.protocol.name} on a topology of the kind {topology.kind}",
            "Start every agent by 'codistill join RECIPE --listen HOST:PORT --peer NAME=HOST:PORT'.",
        )
    resume = _goes_on(recipe, folder, data_dir)
    if recipe.data.sites:
        charter = charter_of_sites(recipe)
        if not resume:
            check_vacant(folder)
        settle_in(folder, source_of(recipe, data_dir), _facts_of_sites(recipe, charter), resume=resume)
    else:
        federation, _ = move_in(recipe, folder, data_dir=data_dir, resume=resume)
        charter = Charter.of(federation, recipe.rounds)
    journal = EventLog(HUB, form=form, health=folder / HEALTH)
    wire = Transport(HUB, topology.names, recipe.network, own, listen=listen)
    journal.tell(f"listens at {listen}" + ("" if own else ", without certificates: anyone who gets there can join"))
    complete = conduct(
        charter, plan_of(recipe), wire, recipe.network, folder, journal,
        checkpoint_every=recipe.runtime.checkpoint_every, alone=recipe.evaluation.alone, stopping=stopping,
        progress=progress and form == "text",
    )  # fmt: skip
    return report_on(folder), complete


def join_hub(
    site: Site, own: Credentials | None, hub: str, folder: Path, *, stopping: Stopping, form: str, network: Network
) -> bool:
    """Take part under a hub, until the run is over (True) or the operator stops it."""
    name = site.agent.name
    journal = EventLog(name, form=form, health=folder / HEALTH)
    warm_up()
    trouble = probe(hub, HUB, own)
    if trouble:
        journal.tell(f"{trouble}; trying again until somebody does")
    wire = Transport(name, (HUB,), network, own, dial=[hub])
    shape, samples = site.hello()
    hello = hello_of(site.agent, site.public, shape, samples)

    def settle(terms: Terms) -> Stage:
        if site.public is not None:
            site.public.seed = int(terms["seed"])
        charter = Charter.under(terms, site.public, site.common_test(int(terms["classes"])), site.protocol)
        site.check_accepted(charter.protocol)
        return charter.stage(site.agent)

    def watch(what: str, done: int, scores: Mapping[str, float]) -> None:
        journal.progress(what, done, scores)

    try:
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with locked(folder):  # one process per agent: two would write over each other's states
            member = RemoteAgent(Connections(wire, network, journal.tell), hello, settle, folder, stopping, watch)
            complete = member.run()
    finally:
        journal.closed()
        wire.close()
    if complete:
        journal.tell("the run is over")
        if site.finished is not None:
            site.finished(site.agent)
    return complete


def join_peers(
    site: Site,
    recipe: Recipe,
    own: Credentials | None,
    listen: str,
    dial: Mapping[str, str],
    folder: Path,
    *,
    stopping: Stopping,
    progress: bool,
    form: str,
) -> bool:
    """Take part as a peer, until all rounds are done (True) or the operator stops it."""
    name = site.agent.name
    charter = _charter_for(site, recipe)
    topology = charter.topology
    site.check_accepted(recipe.protocol)
    if recipe.protocol.pools_data:
        raise _pools(recipe)
    if name not in topology.names:
        raise NetworkError(
            "The recipe must have an agent of the certificate's name.",
            f"'{name}'; in the recipe: {', '.join(topology.names)}",
            "Give the certificate of one of these, or add it to the recipe of every peer.",
        )
    if topology.hub:
        raise NetworkError(f"{recipe.protocol.name} has a hub.", "--listen and --peer", "Join it by --hub HOST:PORT.")
    linked = {*topology.neighbours(name), *topology.sources(name)}
    for other in dial:
        if other not in linked:
            raise NetworkError(
                f"A peer of '{name}' must be its neighbour in the topology.",
                f"'{other}'",
                f"Its neighbours are: {', '.join(n for n in topology.names if n in linked) or 'none'}.",
            )
    warm_up()
    # First of all: a folder that already holds a sign of health would not be vacant.
    resume = _goes_on(recipe, folder, None)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    settle_in(folder, recipe.source, _facts_of_peer(recipe, charter, site), resume=resume)
    journal = EventLog(name, form=form, health=folder / HEALTH)
    for other, address in dial.items():
        trouble = probe(address, other, own)
        if trouble:
            journal.tell(f"{trouble}; trying again until '{other}' does")
    others = [other for other in topology.names if other in linked]
    wire = Transport(name, others, recipe.network, own, listen=listen, dial=list(dial.values()))
    complete = walk(
        charter, site.agent, plan_of(recipe), wire, recipe.network, folder, journal,
        checkpoint_every=recipe.runtime.checkpoint_every, alone=recipe.evaluation.alone, stopping=stopping,
        progress=progress and form == "text",
    )  # fmt: skip
    if complete and site.finished is not None:
        site.finished(site.agent)
    return complete


def _pools(recipe: Recipe) -> RecipeError:
    return RecipeError(
        f"{recipe.protocol.name} pools the data of all agents, which never leave their machines here.",
        recipe.protocol.name,
        "Run it by 'codistill run', as a yardstick.",
    )


def _charter_for(site: Site, recipe: Recipe) -> Charter:
    if site.federation is not None:
        return Charter.of(site.federation, recipe.rounds)
    charter = charter_of_sites(recipe)
    public = site.public or charter.public
    if public is not None:
        public.seed = recipe.seed
    return dataclasses.replace(charter, public=public, test=site.common_test(charter.classes))


def charter_of_sites(recipe: Recipe) -> Charter:
    """The charter of a recipe whose data are at the sites."""
    assert recipe.data.classes is not None
    names = agent_names(recipe)
    return Charter(
        recipe.protocol, topology_of(recipe), recipe.seed, recipe.data.classes,
        Faults(recipe.faults, names, recipe.seed, recipe.participation), recipe.rounds,
        read_reference(recipe), None, None, recipe.compression,
    )  # fmt: skip


def read_reference(recipe: Recipe) -> PublicData | None:
    """The reference data of a recipe with data at sites."""
    path = recipe.data.reference
    if path is None:
        if recipe.protocol.needs_public:
            raise RecipeError(
                f"{recipe.protocol.name} needs reference data on every node.",
                "no [data] reference",
                'Save them by numpy.save("reference.npy", x), and add reference = "reference.npy".',
            )
        return None
    try:
        samples = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise DataError(
            "Reference data must be a .npy file.", f"{path}: {error}"[:200], "Write it by numpy.save."
        ) from None
    return PublicData(samples, recipe.seed)


def spread(recipe: Recipe, agents: int) -> Recipe:
    """The same recipe with so many agents: its [[agents]] tables take turns."""
    entries = recipe.source["agents"]
    if sum(entry.count for entry in recipe.agents) == agents:
        return recipe
    if agents < 1:
        raise RecipeError("A federation must have at least one agent.", f"--agents {agents}", "Give a larger number.")
    counts = [len(range(place, agents, len(entries))) for place in range(len(entries))]
    tables = [{**entry, "count": count} for entry, count in zip(entries, counts, strict=True) if count]
    return make_recipe({**recipe.source, "agents": tables}, Path.cwd())


def _goes_on(recipe: Recipe, folder: Path, data_dir: str | None) -> bool:
    """Whether the folder holds this very run; another one is not touched."""
    if not (folder / RECIPE).exists():
        return False
    before, now = (
        {key: value for key, value in json.loads(json.dumps(source)).items() if key != "network"}
        for source in (reopen(folder).source, source_of(recipe, data_dir))
    )  # how long nodes wait for one another changes nothing of what is learnt
    if before != now:
        raise CheckpointError(
            f"{folder} must hold a run of this recipe, or nothing.",
            "a run of another recipe",
            "Name another folder by --out, or bring the recipe back to what it was.",
        )
    return True


def _facts_of_sites(recipe: Recipe, charter: Charter) -> dict[str, Any]:
    names = agent_names(recipe)
    return {
        "agents": dict.fromkeys(names, "at its site"),
        "counts": None,
        "class_names": [str(number) for number in range(charter.classes)],
        "test_samples": 0 if charter.test is None else len(charter.test[0]),
        "reference": charter.terms()["reference"],
        "topology": None if charter.topology.hub else as_plain(charter.topology),
        "compression": None if recipe.compression is None else dataclasses.asdict(recipe.compression),
        "seed": recipe.seed,
        "versions": versions(),
    }


def _facts_of_peer(recipe: Recipe, charter: Charter, site: Site) -> dict[str, Any]:
    return {
        **_facts_of_sites(recipe, charter),
        "agents": {site.agent.name: site.agent.learner.describe()},
        "topology": None,
    }
