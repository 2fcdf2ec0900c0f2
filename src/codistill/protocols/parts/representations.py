"""Mean features by class: an agent's own, the mean of many, and a random draw of them; where there is one is said."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from codistill.agent import Node
from codistill.errors import RecipeError, nearest
from codistill.protocol import Agent, LearnerError, Message, MessageError
from codistill.protocols.parts.aggregation import Aggregation
from codistill.protocols.parts.classes import named_classes
from codistill.randomness import generator


def own_representations(
    me: Agent,
    average_over: int,
    observations: int,
    classes: Sequence[int] | None = None,
    share: float = 1.0,
    smallest: int = 1,
) -> tuple[np.ndarray, np.ndarray]:
    """(1 + M, C, d): the mean features of each class, then M observations of it; (C,): which classes there are.

    An observation is the mean over `average_over` samples of a class drawn at random, or all if there are fewer.
    `classes`: those that are released, None for all; `share`: of the samples that are used, always the same ones.
    `smallest`: samples of a class that is released, of an observation, and of what an observation leaves out of the
    class: the mean of the class and an observation of all but one sample would give that one.
    """
    rows = np.arange(len(me.shard))
    if share < 1.0:
        order = generator(me.seed, me.name, "released").permutation(len(me.shard))
        rows = np.sort(order[: int(np.ceil(share * len(order)))])
    label, rng = me.shard.targets[rows].argmax(axis=1), me.rng("observations")
    features = me.learner.evaluated_features(me.shard.x[rows]) if len(rows) else np.zeros((0, 1), np.float32)
    own = np.zeros((1 + observations, me.classes, features.shape[1]), np.float32)
    held = named_classes(me, np.bincount(label, minlength=me.classes), smallest, classes)
    for c in np.flatnonzero(held):
        of_class, count = features[label == c], max(average_over, smallest)
        own[0, c] = of_class.mean(axis=0)
        if len(of_class) - count < smallest:
            count = len(of_class)
        for m in range(observations):
            own[1 + m, c] = of_class[rng.permutation(len(of_class))[:count]].mean(axis=0)
    return own, held


def random_representations(me: Agent, observations: int) -> tuple[np.ndarray, np.ndarray]:
    """(1 + M, C, d): standard normal, the same for all agents of a run; (1 + M, C): there is one of each."""
    shape = 1 + observations, me.classes, int(me.learner.head.in_features)
    drawn = generator(me.seed, "initial representations").standard_normal(shape).astype(np.float32)
    return drawn, np.ones(shape[:2], dtype=bool)


def mean_representations(values: np.ndarray, held: np.ndarray, aggregation: Aggregation | None = None) -> np.ndarray:
    """(C, d): for each class the mean, or another aggregate, of the rows of (K, C, d) that hold it; else zeros."""
    if aggregation is None or aggregation.kind == "mean":
        sums = np.einsum("kcd,kc->cd", values, held, dtype=np.float64)
        return np.asarray(sums / np.maximum(held.sum(axis=0), 1)[:, None], dtype=np.float32)
    means = np.zeros(values.shape[1:], np.float32)
    for c in np.flatnonzero(held.any(axis=0)):
        means[c] = aggregation.of_all(values[held[:, c], c][:, None, :])[0]
    return means


def recent(given: Mapping[str, Mapping[str, Any]], now: float, oldest: float | None) -> dict[str, Mapping[str, Any]]:
    """What was sent no longer ago than `oldest`, by sender; None: at any time."""
    return {name: each for name, each in given.items() if oldest is None or now - each["time"] <= oldest}


def drawn_representations(
    rng: np.random.Generator,
    given: Sequence[Mapping[str, Any]],
    count: int,
    now: float,
    mean: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """(1 + M, C, d): t̄, and M = `count` observations of each class at random; (1 + M, C): their ages, -1: no such one.

    `given`: of each sender its "observations" (m, C, d), which classes it "held" (C,) and at which "time" they came.
    The observations of a class are different ones, if there are enough. `mean`: t̄, if not the mean of all of them.
    """
    observed = np.concatenate([each["observations"] for each in given])
    sizes = [len(each["observations"]) for each in given]
    held = np.repeat(np.stack([each["held"] for each in given]), sizes, axis=0)
    ages = np.repeat([now - each["time"] for each in given], sizes)
    drawn = np.zeros((1 + count, *observed.shape[1:]), np.float32)
    age = np.full((1 + count, observed.shape[1]), -1.0, np.float32)
    drawn[0] = mean_representations(observed, held) if mean is None else mean
    age[0, np.any([each["held"] for each in given], axis=0)] = max(now - each["time"] for each in given)
    for c in np.flatnonzero(held.any(axis=0)) if count else ():
        holders = np.flatnonzero(held[:, c])
        rows = rng.choice(holders, count, replace=len(holders) < count)
        drawn[1:, c], age[1:, c] = observed[rows, c], ages[rows]
    return drawn, age


def keep_observations(me: Agent, heard: Mapping[str, Message], features: int, most: int) -> None:
    """Between neighbours: the last observations of each, in place of those before."""
    kept = me.state.setdefault("heard", {})
    for name, message in heard.items():
        if message and accepts_representations(me, name, message, "observations", features, most):
            kept[name] = {"observations": message["observations"], "held": message["held"], "time": me.time}


def accepts_representations(
    me: Node, sender: str, message: Message, array: str, features: int | None, most: int
) -> bool:
    """Whether a message holds means of features by class, at most so many of each, and which classes it has."""
    expect: dict[str, Any] = {array: (None, me.classes, features), "held": np.empty(me.classes, bool)}
    if not me.accepts(sender, message, expect):
        return False
    found = message[array]
    if found.dtype == np.float32 and len(found) <= most:
        return True
    me.refuse(
        sender,
        MessageError(
            f"'{array}' must be at most {most} means of each class, as float32.",
            f"{len(found)}, as {found.dtype}",
            "The sender must run the same protocol.",
        ),
    )
    return False


def check_features(agents: Sequence[Agent], protocol: str, *, by_class: bool) -> None:
    """All features must have one dimension; `by_class`: and, as their means are shared, must not be the samples."""
    first, shown = agents[0], [agent.learner.evaluated_features(agent.shard.x[:2]) for agent in agents]
    for agent, h in zip(agents, shown, strict=True):
        x, model, wanted = agent.shard.x[:2].reshape(len(h), -1), agent.learner.describe(), shown[0].shape[1]
        if h.shape[1] != wanted:
            raise LearnerError(
                f"{protocol} compares features, so those of all agents must have the same dimension.",
                f"agent '{agent.name}' has {model} with {h.shape[1]} features, agent '{first.name}' has "
                f"{first.learner.describe()} with {wanted}",
                f"Project them: TorchLearner(module, projection={wanted}); or exchange outputs: fd, fedmd.",
            )
        if by_class and x.any() and np.array_equal(h, x.astype(h.dtype)):
            raise LearnerError(
                "Data stays home, so features that are shared by class must not be the samples themselves.",
                f"agent '{agent.name}' has {model}, whose features are its input",
                "Give it a hidden layer, or use a protocol that exchanges outputs: fd, fedmd.",
            )


def check_sharing(agents: Sequence[Agent], protocol: Any) -> None:
    """Whom an agent listens to, which classes it releases, and how old knowledge may be: each must leave some."""
    for agent in agents:
        mine = protocol.chosen(agent.choices)
        if mine.listen_to is not None:
            _check_listening(agent, mine.listen_to, chosen="listen_to" in agent.choices)
        beyond = [c for c in mine.release_classes or () if c >= agent.classes]
        if beyond:
            raise RecipeError(
                f"release_classes of agent '{agent.name}' must be classes of the federation, 0 to {agent.classes - 1}.",
                f"{beyond[0]}",
                "Correct it, or leave release_classes out: all classes.",
            )
        if mine.oldest is not None and mine.oldest < 1 and not agent.asynchronous:
            raise RecipeError(
                f"oldest of agent '{agent.name}' must be at least 1 with rounds: what is used is of an earlier round.",
                f"{mine.oldest:g}",
                "Set 1 or more, or leave it out: any age.",
            )


def _check_listening(agent: Agent, listen_to: Sequence[str], *, chosen: bool) -> None:
    """Every name is an agent, and somebody is left; in one's own choice, everybody named is heard, and not oneself."""
    others = [name for name in agent.roster if name != agent.name]
    heard = others if agent.topology.hub else list(agent.topology.sources(agent.name))
    for name in listen_to:
        if name not in agent.roster or (chosen and name not in heard):
            is_own = "itself, " * (name == agent.name)
            raise RecipeError(
                f"listen_to of agent '{agent.name}' must name other agents that it hears.",
                f"{is_own}'{name}'",
                nearest(name, heard) if heard else "Leave it out: it hears nobody.",
            )
    if not set(listen_to) & set(heard):
        raise RecipeError(
            f"listen_to of agent '{agent.name}' must name an agent that it hears.",
            ", ".join(map(repr, listen_to)) or "an empty list",
            f"Name some of {', '.join(heard) or 'nobody'}, or leave it out: all. To send without learning, set "
            "kd_weight and disc_weight to 0.",
        )
