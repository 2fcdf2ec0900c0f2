"""Recipes between machines: the hub's side, an agent's side, and all of it on this machine."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from codistill.certs.credentials import Credentials
from codistill.data.shard import PublicData
from codistill.data.validation import encoded_samples
from codistill.errors import CheckpointError, DataError, NetworkError, RecipeError
from codistill.experiments.agent_file import AgentFile
from codistill.experiments.recipe import Recipe, make_recipe
from codistill.experiments.recipe_federation import agent_names, plan_of, topology_of
from codistill.experiments.run import check_devices, make_folder, prepare, report_on, source_of
from codistill.experiments.same_run import facts_of_code
from codistill.experiments.saved_run import RECIPE, reopen
from codistill.faults import Faults
from codistill.federation.clock_checks import check_clock_runtime
from codistill.federation.joining import AgentNode, PeerNode
from codistill.federation.nodes import check_has_hub, with_agent
from codistill.federation.result import ELSEWHERE, TrainedAgent
from codistill.federation.serving import HubNode, describe_hub
from codistill.federation.trained_model import is_onnx, save_model
from codistill.files import own_folder
from codistill.results.summary import Summary
from codistill.runtimes.description import RunDescription, agree_on_all_columns
from codistill.runtimes.network.event_log import HEALTH, EventLog
from codistill.runtimes.network.options import Network
from codistill.runtimes.network.terms import terms_of
from codistill.runtimes.runtime import ShouldStop
from codistill.runtimes.store import check_vacant
from codistill.topology.facts import as_plain
from codistill.version import versions


def run_up(
    recipe: Recipe, folder: Path, *, data_dir: str | None, progress: bool, form: str, verbose: bool
) -> tuple[Summary, bool]:
    """A recipe on this machine, one process for each node; goes on with the run that is in the folder."""
    check_clock_runtime(recipe.clock, "network")
    check_devices(recipe)
    plan = plan_of(recipe)
    plan.check_for_network()
    federation, _ = prepare(recipe, folder, data_dir=data_dir, resume=_goes_on(recipe, folder, data_dir))
    result = federation.run(
        plan.rounds,
        runtime="network",
        device=recipe.runtime.device,
        network=recipe.network,
        node_logs=form if verbose else None,
        evaluate_every=plan.evaluate_every,
        evaluate_samples=plan.evaluate_samples,
        alone=plan.baseline,
        folder=folder,
        resume=True,
        checkpoint_every=plan.checkpoint_every,
        progress=progress and form == "text",
        observers=[EventLog("up", form=form, health=folder / HEALTH, quiet=not verbose)],
    )
    return report_on(folder), not result.interrupted


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
    check_clock_runtime(recipe.clock, "network")
    plan_of(recipe).check_for_network()
    resume = _goes_on(recipe, folder, data_dir)
    own_folder(folder, 0o755)
    if recipe.data.held_by_agents:
        description = describe_without_data(recipe)
        if not resume:
            check_vacant(folder)
        make_folder(folder, source_of(recipe, data_dir), _facts(recipe, description), resume=resume)
    else:
        federation, _ = prepare(recipe, folder, data_dir=data_dir, resume=resume)
        description = replace(federation.description, plan=plan_of(recipe))
    node = HubNode(description, listen, own, recipe.network, folder, progress=progress, log_format=form)
    complete = node.run_here(should_stop).complete
    return report_on(folder), complete


def check_can_save(mine: AgentFile, save: Path | None) -> None:
    """Before the first round: an agent with a safeguard answers with two models, which ONNX does not take."""
    guarded = mine.safeguard is not None or mine.agent.safeguard is not None
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
    mine.policy.check_protocol(recipe.protocol)
    check_clock_runtime(recipe.clock, "network")
    plan_of(recipe).check_for_network()
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
    own_folder(folder)
    models = {mine.agent.name: mine.agent.learner.describe()}
    make_folder(
        folder, recipe.source, {**_facts(recipe, description), "agents": models, "topology": None}, resume=resume
    )
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


def _describe_peer(mine: AgentFile, recipe: Recipe) -> RunDescription:
    if mine.description is not None:
        return replace(mine.description, plan=plan_of(recipe))
    description = describe_without_data(recipe)
    public = mine.public or description.public
    if public is not None:
        public.seed = recipe.seed
    encoding = description.encoding
    columns, notes = agree_on_all_columns((mine.agent,), mine.test, public)
    if public is not None:
        public.order_columns(columns)
    test = None
    if mine.test is not None and encoding is not None:
        test = encoded_samples(*mine.test, encoding, "the test set", columns)
    shared = replace(description, public=public, test=test, columns=columns, notes=tuple(notes))
    return with_agent(replace(shared, safeguard=mine.safeguard), mine.agent)


def describe_without_data(recipe: Recipe) -> RunDescription:
    """The run of a recipe whose agents hold their data."""
    return describe_hub(
        recipe.protocol,
        agent_names(recipe),
        classes=recipe.data.classes or recipe.data.class_names or (),
        task=recipe.data.task,
        scores=recipe.evaluation.scores,
        plan=plan_of(recipe),
        public=read_public(recipe),
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
        plan=plan_of(recipe),
        faults=Faults(recipe.faults, tuple(agent_names(recipe)), recipe.seed, recipe.participation),
        compression=recipe.compression,
        clock=recipe.clock,
    )


def read_public(recipe: Recipe) -> PublicData | None:
    """The public data of a recipe whose agents hold their data."""
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


def _facts(recipe: Recipe, description: RunDescription) -> dict[str, Any]:
    return {
        "agents": dict.fromkeys(agent_names(recipe), ELSEWHERE),
        "counts": None,
        "class_names": list(description.class_names),
        "task": description.task,
        "test_samples": 0 if description.test is None else len(description.test[0]),
        "public": terms_of(description)["public"],
        "topology": None if description.topology.hub else as_plain(description.topology),
        "compression": None if recipe.compression is None else dataclasses.asdict(recipe.compression),
        "seed": recipe.seed,
        **facts_of_code(recipe),
        "versions": versions(),
    }
