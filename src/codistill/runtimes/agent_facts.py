"""What must be equal where agents are built anew, each under the name by which a person knows it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from codistill.agent import Agent
from codistill.data.validation import digest
from codistill.learners.ability import Ability
from codistill.runtimes.network.terms import code_digest

# Of a learner: on which device it computes may differ between machines.
_OF_THE_MACHINE = ("assigned", "_place", "_placed_by")


def facts_of_agents(agents: Sequence[Agent]) -> dict[str, str]:
    """The data and the model of each agent, by a digest."""
    facts: dict[str, Any] = {}
    for agent in agents:
        y = agent.shard.targets if agent.shard.labels is None else agent.shard.labels
        facts[f"the data of '{agent.name}'"] = [_samples((agent.shard.x, y)), _samples(agent.test)]
        facts[f"the model of '{agent.name}'"] = _model(agent)
    return {what: hashlib.sha256(json.dumps(value).encode()).hexdigest() for what, value in facts.items()}


def _samples(pair: tuple[np.ndarray, np.ndarray] | None) -> list[str] | None:
    return None if pair is None else [digest(part) for part in pair]


def _model(agent: Agent) -> list[Any]:
    """Its class, code and settings, and its weights if it has some before it learns."""
    learner = agent.learner
    weights = learner.weights() if Ability.WEIGHTS in learner.abilities else {}
    inner = [each for each in map(vars(learner).get, ("module", "estimator", "model")) if each is not None]
    settings = {name: value for name, value in vars(learner).items() if name not in _OF_THE_MACHINE}
    options = [each.get_params() for each in inner if callable(getattr(each, "get_params", None))]
    return [
        learner.describe(),
        [code_digest(type(each)) for each in (learner, *inner)],
        [_plain(each) for each in (settings, *options, agent.choices)],
        {name: digest(array) for name, array in weights.items()},
    ]


def _plain(value: Any) -> Any:
    """Plain values as they are, of others the class: how an object is written may hold its place in memory."""
    if isinstance(value, dict):
        return [[str(key), _plain(each)] for key, each in value.items()]
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value if value is None or isinstance(value, str | int | float | bool) else type(value).__qualname__
