"""The trained models of a recipe's run, from its folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from codistill.agent import Agent
from codistill.data.dataset import Dataset
from codistill.data.labels import CLASSIFICATION, LabelEncoding, class_names
from codistill.errors import CheckpointError, CodistillError, RecipeError, nearest
from codistill.experiments.recipe import Recipe, check_trusted, code_of
from codistill.experiments.recipe_federation import agent_names
from codistill.experiments.run import prepare
from codistill.experiments.saved_run import reopen
from codistill.federation.saved_samples import Samples
from codistill.federation.trained_model import TrainedModel
from codistill.runtimes.network.state_store import find_states
from codistill.runtimes.state_file import read_body
from codistill.runtimes.stored_state import content_of, nodes_in


def trained_in(
    folder: Path, name: str, *, data_dir: str | None = None, trust_code: bool = False
) -> tuple[TrainedModel, int]:
    """An agent's model as it was at the last checkpoint of a run, and the number of rounds done by then.

    The recipe says how the model is built and how its data were scaled, so the data must still be there. A protocol or
    a learner in a file of one's own is run only with `trust_code`, and only if it is the file that the run began with.
    """
    recipe = reopen(folder)
    names = agent_names(recipe)
    if name not in names:
        raise RecipeError(f"{folder} must be a run with the agent that is named.", f"'{name}'", nearest(name, names))
    if recipe.data.held_by_agents:
        raise CheckpointError(
            "The models of agents that hold their data stay with them.",
            f"{folder} is the folder of a hub or of a peer",
            "At the agent: codistill join ... --save FILE; in Python: codistill.join(...).save(path).",
        )
    check_trusted(code_of(recipe), trust_code, f"The model of '{name}'")
    done, saved = _newest_state(folder, name)
    federation, data = prepare(recipe, folder, data_dir=data_dir, resume=True)
    agent = next(agent for agent in federation.agents if agent.name == name)
    _restore(agent, saved, folder)
    description = federation.description
    named = replace(description, encoding=labels_of(data) or description.encoding)
    return TrainedModel(agent, named, samples_of(recipe, data)), done


def samples_of(recipe: Recipe, data: Dataset) -> Samples:
    """How samples of a recipe's data are read."""
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


def _newest_state(folder: Path, name: str) -> tuple[int, dict[str, Any]]:
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


def _restore(agent: Agent, saved: dict[str, Any], folder: Path) -> None:
    try:
        agent.resume(saved)
    except CodistillError:
        raise
    except Exception as error:  # a state of another model: each library has its own way to say so
        raise CheckpointError(
            f"The checkpoint of {folder} must be that of its recipe.",
            f"{type(error).__name__}: {error}"[:200],
            "Use the versions of codistill and of the model's library that the run was made with.",
        ) from None
