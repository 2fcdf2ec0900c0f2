"""An agent's own file: its model and its private data, which never leave its machine.

`my_agent.py` is the operator's own code, run by the operator. It defines

    agent(name)       required: a codistill.Agent with the model and the data (and its own test data, if it has any)
    public()          where the protocol needs public data: the samples, equal on every node
    test()            a common test set, if the federation has one: (samples, labels)
    protocol          a class, where the federation runs a protocol that is not codistill's
    accepts           names of the protocols that this agent takes part in, such as ("fedmd",); unset: any
    policy            a file beside this one, such as "policy.toml": what this agent agrees to and what it releases
    device            where a torch module computes that does not say it itself, such as "auto" or "cuda:1"
    safeguard         False to answer by what the protocol taught alone; or a codistill.Safeguard
    finished(agent)   called at the end, with the trained model in agent.learner

A recipe (`.toml`) can stand in its place: then the agent is the one of that name in the recipe.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from codistill.agent import Agent
from codistill.data.labels import LabelEncoding
from codistill.data.shard import PublicData
from codistill.errors import CodistillError, DataError, NetworkError, RecipeError
from codistill.experiments.export import labels_of, samples_of
from codistill.experiments.recipe import Recipe, read_recipe
from codistill.experiments.recipe_federation import build
from codistill.experiments.user_code import run_file
from codistill.federation.auditing import policy_from
from codistill.federation.saved_samples import Samples
from codistill.protocol import Protocol
from codistill.runtimes.description import RunDescription
from codistill.runtimes.network.policy import ANYTHING, Policy
from codistill.runtimes.placement import set_default_device
from codistill.runtimes.safeguard import Safeguard, as_safeguard


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
    module = _run(path)
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
    rules = policy_from(policy or _policy_beside(path, getattr(module, "policy", None)), names, own)
    guard = as_safeguard(getattr(module, "safeguard", True))
    return AgentFile(agent, samples, test, own, getattr(module, "finished", None), rules, safeguard=guard)


def _policy_beside(path: Path, named: Any) -> Path | None:
    if named is None or isinstance(named, str | Path):
        return None if named is None else path.parent / named
    raise RecipeError(f"policy in {path} must name a file.", f"{named!r}"[:80], 'Write: policy = "policy.toml".')


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
    set_default_device(mine[0].learner, recipe.runtime.device)
    description = federation.description.of_agent(name)
    kind = type(recipe.protocol)
    rules = policy_from(policy, None, kind)
    return AgentFile(
        mine[0], federation.public, federation.test, kind, None, rules, recipe, description,
        samples=samples_of(recipe, data), labels=labels_of(data),
    )  # fmt: skip


def _run(path: Path) -> ModuleType:
    try:
        return run_file(path, "agent_file")
    except Exception as error:  # whatever the file does when it is run
        raise RecipeError(
            f"{path} must run.", f"{type(error).__name__}: {error}", "Check the path, and run it by itself."
        ) from error


def _call(path: Path, module: ModuleType, function: str, *given: Any) -> Any:
    try:
        return getattr(module, function)(*given)
    except CodistillError:
        raise
    except Exception as error:  # the operator's own code
        raise DataError(
            f"{function}() of {path} must work.", f"{type(error).__name__}: {error}"[:300], "Run the file by itself."
        ) from error
