"""The features of agents on the common test samples that are kept for a map."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from codistill.agent import Agent
from codistill.errors import RecipeError
from codistill.learners.ability import Ability
from codistill.randomness import generator, seed_libraries
from codistill.results.feature_space import FeatureSpace
from codistill.runtimes.description import RunDescription
from codistill.runtimes.idle import IdleStates, awake

SAMPLES = 200


def has_features(agent: Agent) -> bool:
    """Whether the agent's model has features."""
    return Ability.FEATURES in agent.learner.abilities


def check_features(description: RunDescription) -> None:
    """Where features are to be kept there must be samples, and a model that has features."""
    if not description.plan.features_at:
        return
    if description.test is None or not len(description.test[0]):
        raise RecipeError("features_at needs a common test set.", "none", "Pass test=(x, y), or remove features_at.")
    if not any(map(has_features, description.agents)):
        models = ", ".join(sorted({agent.learner.describe() for agent in description.agents}))
        raise RecipeError(
            "features_at needs an agent whose model has features.",
            f"{models}"[:200],
            "Use a network that ends in a linear layer, such as mlp, or remove features_at.",
        )


def chosen_samples(description: RunDescription) -> np.ndarray:
    """Places in the common test set: the same for all agents and rounds."""
    assert description.test is not None
    there = len(description.test[0])
    drawn = generator(description.seed, "features").choice(there, min(SAMPLES, there), replace=False)
    return np.sort(drawn)


def features_of(
    description: RunDescription, agents: Sequence[Agent], idle: IdleStates | None = None
) -> dict[str, np.ndarray]:
    """Features (n, d) of the chosen samples by agent; without agents that have no features, or no model yet."""
    assert description.test is not None
    x, found = description.test[0][chosen_samples(description)], {}
    for agent in agents:
        if agent.learner.ready and has_features(agent):
            seed_libraries(description.seed, agent.name, "features")
            with awake(idle, agent):
                found[agent.name] = agent.learner.evaluated_features(agent.prepared(x))
    return found


def feature_space(description: RunDescription, done: int, by_agent: Mapping[str, np.ndarray]) -> FeatureSpace:
    """What is kept after `done` rounds."""
    assert description.test is not None
    samples, y = chosen_samples(description), description.test[1]
    return FeatureSpace(done, samples, y[samples] if y.ndim == 1 else None, dict(by_agent))
