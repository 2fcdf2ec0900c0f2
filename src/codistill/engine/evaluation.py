"""How well an agent answers: on the common test set, and on its own mix of classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from codistill.core.errors import RecipeError
from codistill.core.rng import generator, seed_libraries
from codistill.engine.description import RunDescription, rows_of
from codistill.engine.placement import IdleStates, in_memory
from codistill.learners.ability import Ability
from codistill.nodes.agent import Agent
from codistill.nodes.record import record_of
from codistill.results.outputs import FeatureSpace, View, view
from codistill.results.records import Scores
from codistill.results.scores import SAFEGUARD_WEIGHT, VALIDATION, Score, compute_scores


def score(
    description: RunDescription, agent: Agent, samples: int | None, views: dict[str, View] | None = None
) -> Scores:
    """An agent's scores on the common test set, and as "own_..." on its own test data or on its own mix of classes.

    As "validation_..." those on the samples that it holds out of its own.

    From a score that is weighted by class counts, and the predictions that it was measured on, the counts can be
    computed: it is left out unless the description tells the class mix. An agent's own test data are its own choice.
    Under a safeguard "taught_..." are the scores of what the protocol taught, before it is weighed. Where `views` is
    given, what is kept of its answers on the common test set is put there.
    """
    scores: Scores = {}
    taught: Scores = {}
    record = record_of(agent)
    if not agent.learner.ready:
        return scores  # absent so far: it has no model to evaluate
    seed_libraries(description.seed, agent.name, "evaluate")
    if description.test is not None:
        x, y = description.tested(samples)
        answers, by_protocol = description.answers(agent, record.view_of("the test set")(x))
        mix = record.class_mix if record.test is None and description.tells_class_mix else None
        scores.update(_measure(answers, y, mix, description.scores))
        if answers is not by_protocol:
            taught.update(_measure(by_protocol, y, mix, description.scores))
        if views is not None:
            seen = view(answers, y, probabilistic=agent.learner.probabilistic, agents=len(agent.roster))
            views.update({} if seen is None else {agent.name: seen})
    if record.test is not None:
        x, y = record.test
        answers, by_protocol = description.answers(agent, x)
        own = compute_scores(answers, y, description.scores)
        scores.update({f"own_{name}": value for name, value in own.items()})
        if answers is not by_protocol:
            own = compute_scores(by_protocol, y, description.scores)
            taught.update({f"own_{name}": value for name, value in own.items()})
    if record.validation is not None:
        x, y = record.validation
        held_out = compute_scores(description.answer(agent, x), y, description.scores)
        scores.update({f"{VALIDATION}{name}": value for name, value in held_out.items()})
    if taught and description.tells_class_mix:  # what an agent has refused is for its operator alone
        scores.update({f"taught_{name}": value for name, value in taught.items()})
        scores[SAFEGUARD_WEIGHT] = record.safeguard.weight
    return scores


def _measure(answers: np.ndarray, y: np.ndarray, class_mix: np.ndarray | None, scores: Sequence[Score]) -> Scores:
    """Every score of some answers and, where a class mix is given, the same scores on this mix of classes."""
    found = compute_scores(answers, y, scores)
    if class_mix is None or y.ndim == 2:
        return found
    # On the agent's own mix of classes: test samples weighted by how often the agent sees their class.
    tested = np.bincount(y, minlength=len(class_mix))
    weights = np.divide(class_mix, tested, out=np.zeros(len(tested)), where=tested > 0)[y]
    own = compute_scores(answers, y, scores, weights) if weights.sum() > 0 else {}
    both: Scores = {}
    for name, value in found.items():
        both[name] = value
        if name in own:
            both[f"own_{name}"] = own[name]
    return both


# --- The features of agents on the common test samples that are kept for a map.

SAMPLES = 200


def has_features(agent: Agent) -> bool:
    return Ability.FEATURES in agent.learner.abilities


def check_features(description: RunDescription) -> None:
    if not description.spec.features_at:
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
    x, found = rows_of(description.test[0], chosen_samples(description)), {}
    for agent in agents:
        if agent.learner.ready and has_features(agent):
            seed_libraries(description.seed, agent.name, "features")
            with in_memory(idle, agent):
                found[agent.name] = agent.learner.evaluated_features(record_of(agent).view_of("the test set")(x))
    return found


def feature_space(description: RunDescription, done: int, by_agent: Mapping[str, np.ndarray]) -> FeatureSpace:
    """What is kept after `done` rounds."""
    assert description.test is not None
    samples, y = chosen_samples(description), description.test[1]
    return FeatureSpace(done, samples, y[samples] if y.ndim == 1 else None, dict(by_agent))
