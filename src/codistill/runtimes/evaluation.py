"""How well an agent answers: on the common test set, and on its own mix of classes."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from codistill.agent import Agent
from codistill.randomness import seed_libraries
from codistill.results.outputs import View, view
from codistill.results.records import Scores
from codistill.results.scores import SAFEGUARD_WEIGHT, Score, compute_scores
from codistill.runtimes.description import RunDescription
from codistill.runtimes.idle import IdleStates, awake


def score(
    description: RunDescription, agent: Agent, samples: int | None, views: dict[str, View] | None = None
) -> Scores:
    """An agent's scores on the common test set, and as "own_..." on its own test data or on its own mix of classes.

    From a score that is weighted by class counts, and the predictions that it was measured on, the counts can be
    computed: it is left out unless the description tells the class mix. An agent's own test data are its own choice.
    Under a safeguard "taught_..." are the scores of what the protocol taught, before it is weighed. Where `views` is
    given, what is kept of its answers on the common test set is put there.
    """
    scores: Scores = {}
    taught: Scores = {}
    if not agent.learner.ready:
        return scores  # absent so far: it has no model to evaluate
    seed_libraries(description.seed, agent.name, "evaluate")
    if description.test is not None:
        x, y = description.tested(samples)
        answers, by_protocol = description.answers(agent, agent.prepared(x))
        mix = agent.class_mix if agent.test is None and description.tells_class_mix else None
        scores.update(_measure(answers, y, mix, description.scores))
        if answers is not by_protocol:
            taught.update(_measure(by_protocol, y, mix, description.scores))
        if views is not None:
            among = len(agent.roster)
            seen = view(answers, y, probabilistic=agent.learner.probabilistic, agents=among)
            views.update({} if seen is None else {agent.name: seen})
    if agent.test is not None:
        answers, by_protocol = description.answers(agent, agent.test[0])
        own = compute_scores(answers, agent.test[1], description.scores)
        scores.update({f"own_{name}": value for name, value in own.items()})
        if answers is not by_protocol:
            own = compute_scores(by_protocol, agent.test[1], description.scores)
            taught.update({f"own_{name}": value for name, value in own.items()})
    if taught and description.tells_class_mix:  # what an agent has refused is for its operator alone
        scores.update({f"taught_{name}": value for name, value in taught.items()})
        scores[SAFEGUARD_WEIGHT] = agent.safeguard.weight
    return scores


def score_some(
    description: RunDescription,
    agents: Sequence[Agent],
    names: Collection[str],
    samples: int | None,
    views: dict[str, View] | None,
    idle: IdleStates | None,
) -> dict[str, Scores]:
    """The scores of those of the agents that are named."""
    wanted, scores = frozenset(names), {}
    for agent in agents:
        if agent.name in wanted:
            with awake(idle, agent):
                scores[agent.name] = score(description, agent, samples, views)
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
    return {key: value for name in found for key, value in _both(name, found, own)}


def _both(name: str, found: Scores, own: Scores) -> list[tuple[str, float]]:
    return [(name, found[name]), *([(f"own_{name}", own[name])] if name in own else [])]
