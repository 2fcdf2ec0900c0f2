"""What must be equal on all machines of a run, each under the name by which a person knows it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any

import numpy as np

from codistill.agent import Agent
from codistill.data.validation import digest
from codistill.federation.run_facts import versions
from codistill.learners.ability import Ability
from codistill.runtimes.description import RunDescription
from codistill.runtimes.network.terms import code_digest, terms_of

# Of a learner: on which device it computes may differ between machines.
_OF_THE_MACHINE = ("assigned", "_place", "_placed_by")


def facts_of_machine(description: RunDescription) -> dict[str, str]:
    """Versions as they are, everything else by its digest."""
    terms = {what: value for what, value in terms_of(description).items() if what not in ("version", "wire", "public")}
    facts: dict[str, Any] = {f"the {what.replace('_', ' ')}": value for what, value in terms.items()}
    facts |= {
        "the plan of evaluations and checkpoints": dataclasses.asdict(description.plan),
        "the public data": None if description.public is None else description.public.digest,
        "the test data": _samples(description.test),
        "the safeguard": None if description.safeguard is None else dataclasses.asdict(description.safeguard),
        "the scores": [score.name for score in description.scores],
    }
    for agent in description.agents:
        y = agent.shard.targets if agent.shard.labels is None else agent.shard.labels
        facts[f"the data of '{agent.name}'"] = [_samples((agent.shard.x, y)), _samples(agent.test)]
        facts[f"the model of '{agent.name}'"] = _model(agent)
    told = {what: hashlib.sha256(json.dumps(value).encode()).hexdigest() for what, value in facts.items()}
    return {f"version of {name}": each for name, each in versions().items()} | told


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
