"""Recipes between machines: the hub's side, an agent's side, and all of it on this machine."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from codistill.certs.credentials import Credentials
from codistill.core.errors import CheckpointError, CodistillError, DataError, NetworkError, RecipeError
from codistill.core.spec import RunSpec
from codistill.data.labels import LabelEncoding
from codistill.data.shard import PublicData
from codistill.engine.description import RunDescription, agree_on_all_columns
from codistill.engine.placement import set_default_device
from codistill.engine.runtime import ShouldStop
from codistill.engine.safeguard import Safeguard, as_safeguard
from codistill.engine.store import check_vacant, read_body
from codistill.experiments.building import agent_names, build, topology_of
from codistill.experiments.recipe import Recipe, make_recipe, read_recipe
from codistill.experiments.run import (
    bring_back,
    check_devices,
    labels_of,
    make_folder,
    newest_state,
    prepare,
    report_on,
    samples_of,
    source_of,
    trackers_of,
)
from codistill.experiments.saved_run import RECIPE, facts_of_code, reopen
from codistill.experiments.user_code import run_file
from codistill.federation import run_on_this_machine
from codistill.federation.checks import checked_run
from codistill.federation.joining import AgentNode, PeerNode, policy_from, with_agent
from codistill.federation.result import TrainedAgent, facts_of
from codistill.federation.serving import HubNode, check_has_hub, describe_hub
from codistill.federation.trained_model import Samples, TrainedModel, is_onnx, known_samples, save_model
from codistill.network.log import HEALTH, EventLog
from codistill.network.options import Network
from codistill.network.policy import ANYTHING, AUDIT, ChainReader, Policy
from codistill.network.state_store import StateFile, find_states
from codistill.network.terms import terms_of
from codistill.nodes.agent import Agent
from codistill.nodes.faults import Faults
from codistill.nodes.record import record_of
from codistill.protocol import Protocol
from codistill.results.summary import Summary


def run_up(
    recipe: Recipe, folder: Path, *, data_dir: str | None, progress: bool, form: str, verbose: bool
) -> tuple[Summary, bool]:
    """A recipe on this machine, one process for each node; goes on with the run that is in the folder."""
    check_devices(recipe)
    trackers = trackers_of(recipe)
    resume = _goes_on(recipe, folder, data_dir)
    federation, _ = prepare(recipe, folder, _spec(recipe), data_dir=data_dir, resume=resume)
    result = run_on_this_machine(
        federation.description,
        network=recipe.network,
        node_logs=form if verbose else None,
        folder=folder,
        resume=True,
        progress=progress and form == "text",
        observers=[EventLog("up", form=form, health=folder / HEALTH, quiet=not verbose), *trackers],
    )
    return report_on(folder, trackers), not result.interrupted


def _spec(recipe: Recipe) -> RunSpec:
    """The options of a recipe whose nodes talk over the network, wherever it says that it is computed."""
    return replace(recipe.spec, runtime="network", idle="memory")


def run_hub(
    recipe: Recipe,
    folder: Path,
    own: Credentials | None,
    listen: str,
    *,
    data_dir: str | None,
    should_stop: ShouldStop,
    progress: bool,
    form: str,
) -> tuple[Summary, bool]:
    """The hub of a recipe; goes on with the run that is in the folder."""
    check_has_hub(recipe.protocol, topology_of(recipe))
    trackers = trackers_of(recipe)
    resume, mode = _goes_on(recipe, folder, data_dir), 0o755
    if recipe.data.held_by_agents:
        description = describe_without_data(recipe)
        if not resume:
            check_vacant(folder)
        make_folder(folder, source_of(recipe, data_dir), _facts(recipe, description), resume=resume, mode=mode)
    else:
        federation, _ = prepare(recipe, folder, _spec(recipe), data_dir=data_dir, resume=resume, mode=mode)
        description = federation.description
    node = HubNode(
        description, listen, own, recipe.network, folder, tuple(trackers), progress=progress, log_format=form
    )
    complete = node.run_here(should_stop).complete
    return report_on(folder, trackers), complete


def check_can_save(mine: AgentFile, save: Path | None) -> None:
    """Before the first round: an agent with a safeguard answers with two models, which ONNX does not take."""
    guarded = mine.safeguard is not None or record_of(mine.agent).safeguard is not None
    if save is not None and is_onnx(save) and guarded:
        raise RecipeError(
            "Only an agent without a safeguard can be saved as ONNX.",
            f"--save {save}, and a safeguard, which mixes the taught model with the agent's own",
            "Name a file such as model.codistill, which holds both; or switch the safeguard off.",
        )


def join_hub(
    mine: AgentFile,
    own: Credentials | None,
    hub: str,
    folder: Path,
    *,
    should_stop: ShouldStop,
    form: str,
    network: Network,
    save: Path | None = None,
) -> bool:
    """Take part under a hub, until the run is over (True) or the operator stops it; `save`: a file for the model."""
    node = AgentNode(
        mine.agent, hub, own, network, folder, mine.public, mine.test, mine.protocol, mine.policy, log_format=form,
        safeguard=mine.safeguard,
    )  # fmt: skip
    complete, description = node.run_here(should_stop)
    if complete:
        _finish(mine, description, save)
    return complete


def join_peers(
    mine: AgentFile,
    recipe: Recipe,
    own: Credentials | None,
    listen: str,
    dial: Mapping[str, str],
    folder: Path,
    *,
    should_stop: ShouldStop,
    progress: bool,
    form: str,
    save: Path | None = None,
) -> bool:
    """Take part as a peer, until all rounds are done (True) or the operator stops it; `save`: as in `join_hub`."""
    if recipe.track is not None:
        raise RecipeError(
            "[track] is for a run that one process sees as a whole: on one machine, or at a hub.",
            f"'{mine.agent.name}' takes part as a peer",
            "Remove [track]; each peer's folder has its own rows.",
        )
    mine.policy.check_protocol(recipe.protocol)
    names = agent_names(recipe)
    if mine.agent.name not in names:
        raise NetworkError(
            "The recipe must have an agent of the certificate's name.",
            f"'{mine.agent.name}'; in the recipe: {', '.join(names)}",
            "Give the certificate of one of these, or add it to the recipe of every peer.",
        )
    description = _describe_peer(mine, recipe)
    node = PeerNode(description, listen, dial, own, recipe.network, folder, progress, form, mine.policy)
    # Before anything else is written: a folder that already holds a health file would not be vacant.
    resume = _goes_on(recipe, folder, None)
    models = {mine.agent.name: mine.agent.learner.describe()}
    facts = {**_facts(recipe, description), "agents": models, "topology": None}
    make_folder(folder, recipe.source, facts, resume=resume, mode=0o700)
    complete = node.run_here(should_stop).complete
    if complete:
        _finish(mine, description, save)
    return complete


def _finish(mine: AgentFile, description: RunDescription | None, save: Path | None) -> None:
    """Save the trained model if its owner asked for that, and call the owner's own code."""
    if save is not None and description is not None:
        named = description if mine.labels is None else replace(description, encoding=mine.labels)
        save_model(TrainedAgent(mine.agent, named), save, samples=mine.samples)
    if mine.finished is not None:
        mine.finished(mine.agent)


# --- What 'codistill join' leaves in the folder of an agent.


def trained_at(folder: Path, name: str, file: Path, *, data_dir: str | None = None) -> tuple[TrainedModel, int]:
    """An agent's model as it stored it last, in the folder of 'codistill join', and the number of rounds done by then.

    `file`: what the agent brought, as in `read_agent_file`. The terms of the hub are in the agent's audit log.
    """
    mine = read_agent_file(file, name, data_dir=data_dir)
    if (folder / RECIPE).exists():
        recipe = reopen(folder)
        protocol = recipe.protocol if mine.recipe is None else mine.recipe.protocol
        description = _describe_peer(mine, replace(recipe, protocol=protocol))
        done, saved = newest_state(folder, name)
    else:
        state = _last_state(folder)
        terms = [entry["terms"] for _, entry in ChainReader(folder / AUDIT) if entry.get("run") == state.run]
        if not terms:
            raise CheckpointError(
                f"{folder / AUDIT} must have the terms of the run whose state is there.",
                f"none of run '{state.run[:20]}'",
                "Name the whole folder that 'codistill join' wrote, --state.",
            )
        node = AgentNode(
            mine.agent, "", None, Network(), None, mine.public, mine.test, mine.protocol, safeguard=mine.safeguard
        )
        description, done = node.describe(terms[-1]), state.done
        saved = read_body(state.path, "a state")
    bring_back(mine.agent, saved, folder)
    named = description if mine.labels is None else replace(description, encoding=mine.labels)
    samples = known_samples(TrainedAgent(mine.agent, named), mine.samples)
    return TrainedModel(mine.agent, named, samples), done


def _last_state(folder: Path) -> StateFile:
    states = [state for state in find_states(folder) if state.back_to is None] if folder.is_dir() else []
    if not states:
        raise CheckpointError(
            f"{folder} must be the folder of an agent that has taken part in a run.",
            "no states of it" if folder.is_dir() else "no such folder",
            "Give the folder that 'codistill join' has as --state, by default agents/NAME.",
        )
    run = max(states, key=lambda each: each.time).run
    return max((state for state in states if state.run == run), key=lambda each: each.done)


def _describe_peer(mine: AgentFile, recipe: Recipe) -> RunDescription:
    if mine.description is not None:
        return checked_run(mine.description, _spec(recipe))
    description = describe_without_data(recipe)
    public = mine.public or description.public
    if public is not None:
        public.seed = recipe.seed
    encoding = description.encoding
    columns = agree_on_all_columns((mine.agent,), description.protocol, mine.test, public)
    columns.take_public(public)
    test = None if encoding is None else columns.take_test(mine.test, encoding)
    shared = replace(description, public=public, test=test, columns=columns.columns, notes=columns.notes)
    return with_agent(replace(shared, safeguard=mine.safeguard), mine.agent)


def describe_without_data(recipe: Recipe) -> RunDescription:
    return describe_hub(
        recipe.protocol,
        agent_names(recipe),
        classes=recipe.data.classes or recipe.data.class_names or (),
        task=recipe.data.task,
        scores=recipe.scores,
        spec=_spec(recipe),
        public=_read_public(recipe),
        seed=recipe.seed,
        topology=topology_of(recipe),
        faults=recipe.faults,
        participation=recipe.participation,
        compression=recipe.compression,
        clock=recipe.clock,
    )


def describe_terms(recipe: Recipe) -> RunDescription:
    """What a recipe says of its run, without any data, to compare it with a policy."""
    return RunDescription(
        protocol=recipe.protocol,
        topology=topology_of(recipe),
        classes=recipe.data.classes or len(recipe.data.class_names or ()),
        seed=recipe.seed,
        spec=recipe.spec,
        faults=Faults(recipe.faults, tuple(agent_names(recipe)), recipe.seed, recipe.participation),
        compression=recipe.compression,
        clock=recipe.clock,
    )


def _read_public(recipe: Recipe) -> PublicData | None:
    path = recipe.data.public_file
    if path is None:
        if recipe.protocol.needs_public:
            raise RecipeError(
                f"{recipe.protocol.name} needs public data on every node.",
                "no [data] public_file",
                'Save them by numpy.save("public.npy", x), and add public_file = "public.npy".',
            )
        return None
    try:
        samples = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise DataError(
            "Public data must be a .npy file.", f"{path}: {error}"[:200], "Write it by numpy.save."
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
    before, now = json.loads(json.dumps([reopen(folder).source, source_of(recipe, data_dir)]))
    for table in ("network", "track"):  # how long nodes wait for one another changes nothing of what is learnt
        before[table] = now[table] = None
    if before != now:
        raise CheckpointError(
            f"{folder} must hold a run of this recipe, or nothing.",
            "a run of another recipe",
            "Name another folder by --out, or bring the recipe back to what it was.",
        )
    return True


def _facts(recipe: Recipe, description: RunDescription) -> dict[str, Any]:
    of_recipe = {"public": terms_of(description)["public"], **facts_of_code(recipe)}
    facts = facts_of(replace(description, agents=()), of_recipe)
    del facts["samples"]  # nobody but the agents knows them
    return facts


# --- An agent's own file: its model and its private data, which never leave its machine.


@dataclass(frozen=True)
class AgentFile:
    """What an operator brings into a federation."""

    agent: Agent
    public: PublicData | None = None
    test: tuple[Any, Any] | None = None  # not yet checked against the number of classes
    protocol: type[Protocol] | None = None
    finished: Callable[[Agent], Any] | None = None
    policy: Policy = ANYTHING  # what it takes part in and what it releases
    recipe: Recipe | None = None
    description: RunDescription | None = None  # where a recipe has made it
    safeguard: Safeguard | None = None
    samples: Samples | None = None  # how a recipe's data were read, to be saved with the model
    labels: LabelEncoding | None = None  # how a recipe's data name the classes


def read_agent_file(
    path: Path,
    name: str,
    *,
    data_dir: str | None = None,
    overrides: list[str] | None = None,
    policy: Path | None = None,
) -> AgentFile:
    """What the file says of the agent of this name; `policy`: a file in place of the policy that it names."""
    if path.suffix == ".toml":
        return _from_recipe(path, name, data_dir, overrides or [], policy)
    if path.suffix != ".py":
        raise RecipeError(
            "An agent's file is a Python file or a recipe.", f"'{path}'", "Name my_agent.py or recipe.toml."
        )
    try:
        module = run_file(path, "agent_file")
    except Exception as error:  # whatever the file does when it is run
        raise RecipeError(
            f"{path} must run.", f"{type(error).__name__}: {error}", "Check the path, and run it by itself."
        ) from error
    if not callable(getattr(module, "agent", None)):
        raise RecipeError(
            f"{path} must define agent(name).",
            "no such function",
            "Write: def agent(name): return codistill.Agent(...).",
        )
    agent = _call(path, module, "agent", name)
    if not isinstance(agent, Agent):
        raise RecipeError(
            f"agent(name) of {path} must return an Agent.", f"{agent!r}"[:80], "Return codistill.Agent(...)."
        )
    if agent.name != name:
        raise NetworkError(
            "An agent's name is its certificate's name.",
            f"'{agent.name}' in {path}, '{name}' in the certificate",
            "Pass the name that agent(name) is given on to codistill.Agent.",
        )
    set_default_device(agent.learner, getattr(module, "device", None))
    public = _call(path, module, "public") if hasattr(module, "public") else None
    test = _call(path, module, "test") if hasattr(module, "test") else None
    own = getattr(module, "protocol", None)
    if own is not None and not (isinstance(own, type) and issubclass(own, Protocol)):
        raise RecipeError(
            f"protocol in {path} must be a class derived from Protocol.", f"{own!r}"[:80], "Name a class."
        )
    accepts = getattr(module, "accepts", None)
    names = None if accepts is None else (accepts,) if isinstance(accepts, str) else tuple(map(str, accepts))
    samples = None if public is None else PublicData(public, 0)
    named = getattr(module, "policy", None)
    if named is not None and not isinstance(named, str | Path):
        raise RecipeError(f"policy in {path} must name a file.", f"{named!r}"[:80], 'Write: policy = "policy.toml".')
    rules = policy_from(policy or (None if named is None else path.parent / named), names, own)
    guard = as_safeguard(getattr(module, "safeguard", True))
    return AgentFile(agent, samples, test, own, getattr(module, "finished", None), rules, safeguard=guard)


def _from_recipe(path: Path, name: str, data_dir: str | None, overrides: list[str], policy: Path | None) -> AgentFile:
    recipe = read_recipe(path, overrides)
    if recipe.data.held_by_agents:
        raise RecipeError(
            "A recipe whose agents hold their data says nothing of this agent's model and data.",
            f"{path} in place of an agent's file",
            "Name your my_agent.py; among peers, give the recipe by --recipe.",
        )
    federation, data = build(recipe, data_dir)
    mine = [agent for agent in federation.agents if agent.name == name]
    if not mine:
        raise NetworkError(
            "The recipe must have an agent of the certificate's name.",
            f"'{name}'; in the recipe: {', '.join(agent.name for agent in federation.agents)}",
            "Make a certificate for one of these: codistill certs agent NAME.",
        )
    set_default_device(mine[0].learner, recipe.spec.device)
    kind = type(recipe.protocol)
    return AgentFile(
        mine[0],
        federation.public,
        federation.test,
        kind,
        policy=policy_from(policy, None, kind),
        recipe=recipe,
        description=federation.description.of_agent(name),
        samples=samples_of(recipe, data),
        labels=labels_of(data),
    )


def _call(path: Path, module: ModuleType, function: str, *given: Any) -> Any:
    try:
        return getattr(module, function)(*given)
    except CodistillError:
        raise
    except Exception as error:  # the operator's own code
        raise DataError(
            f"{function}() of {path} must work.", f"{type(error).__name__}: {error}"[:300], "Run the file by itself."
        ) from error
