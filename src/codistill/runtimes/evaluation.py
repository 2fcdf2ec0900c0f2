"""How well an agent answers: on the common test set, and on its own mix of classes."""

from __future__ import annotations

import numpy as np

from codistill.agent import Agent
from codistill.randomness import generator, seed_libraries
from codistill.results.outputs import View, view
from codistill.results.records import Scores
from codistill.runtimes.description import RunDescription

WORST = 1e100  # the largest error that is reported: sums of many of them are still finite


def score(
    description: RunDescription, agent: Agent, samples: int | None, views: dict[str, View] | None = None
) -> Scores:
    """An agent's accuracy (or error, for real-valued targets) on the common test set and on its own mix.

    From an accuracy that is weighted by class counts, and the predictions that it was measured on, the counts can be
    computed: it is left out unless the description tells the class mix. An agent's own test data are its own choice.
    Where `views` is given, what is kept of its answers on the common test set is put there.
    """
    scores: Scores = {}
    if not agent.learner.ready:
        return scores  # absent so far: it has no model to evaluate
    seed_libraries(description.seed, agent.name, "evaluate")
    if description.test is not None:
        x, y = _part(description.test, description.seed, samples)
        answers = description.answer(agent, agent.prepared(x))
        scores.update(_measure(answers, y, agent.class_mix if description.tells_class_mix else None))
        if views is not None:
            among = len(agent.roster)
            seen = view(answers, y, probabilistic=agent.learner.probabilistic, agents=among)
            views.update({} if seen is None else {agent.name: seen})
    if agent.test is not None:
        own = _measure(description.answer(agent, agent.test[0]), agent.test[1], None)
        scores["own_accuracy" if "accuracy" in own else "own_rmse"] = own.get("accuracy", own.get("rmse", 0.0))
    return scores


def _part(test: tuple[np.ndarray, np.ndarray], seed: int, samples: int | None) -> tuple[np.ndarray, np.ndarray]:
    x, y = test
    if samples is None or samples >= len(x):
        return x, y
    chosen = np.sort(generator(seed, "evaluation").choice(len(x), samples, replace=False))
    return x[chosen], y[chosen]


def _measure(answers: np.ndarray, y: np.ndarray, class_mix: np.ndarray | None) -> Scores:
    if y.ndim == 2:
        with np.errstate(over="ignore", invalid="ignore"):
            error = float(np.sqrt(np.mean((answers - y) ** 2)))
        return {"rmse": error if error <= WORST else WORST}  # also of a model whose predictions are not finite
    right = answers.argmax(axis=1) == y
    scores = {"accuracy": float(np.mean(right))}
    if class_mix is not None:
        # On the agent's own mix of classes: test samples weighted by how often the agent sees their class.
        tested = np.bincount(y, minlength=len(class_mix))
        weights = np.divide(class_mix, tested, out=np.zeros(len(tested)), where=tested > 0)[y]
        if weights.sum() > 0:
            scores["own_accuracy"] = float(np.average(right, weights=weights))
    return scores
