"""Weights that are averaged: the same start, the weighted mean, and who can take part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from codistill.protocol import Agent, Hub, LearnerError, Message, MessageError


def same_initial_weights(me: Agent) -> None:
    """Equal initial weights for equal architectures. No message is needed: they derive from the common seed."""
    if len(me.roster) > 1:  # a lone agent keeps its own, and so learns as it would alone
        me.seed_alike("initial weights")
        me.learner.reset()


def with_samples(me: Hub, heard: Mapping[str, Message]) -> dict[str, Message]:
    """The messages with a positive number of samples; others are refused by name."""
    for name in [name for name, message in heard.items() if message["samples"] < 1]:
        found = f"{heard[name]['samples']} samples"
        me.refuse(name, MessageError("Weights must come with the number of samples behind them.", found, "Look there."))
    return {name: message for name, message in heard.items() if message["samples"] >= 1}


def mean_weights(heard: Mapping[str, Message]) -> dict[str, np.ndarray]:
    """w ← Σ_k n_k / n · w_k, of messages that hold weights of equal names and shapes, and `samples`."""
    n = sum(message["samples"] for message in heard.values())
    shares = {name: np.float32(message["samples"] / n) for name, message in heard.items()}
    names = next(iter(heard.values())).arrays
    return {name: _mean([(shares[k], message[name]) for k, message in heard.items()]) for name in names}


def _mean(shared: list[tuple[np.float32, np.ndarray]]) -> np.ndarray:
    like = shared[0][1]
    if like.dtype.kind == "b":
        return like  # a mask has no mean
    total = np.zeros(like.shape, dtype=np.float64 if like.dtype.kind in "iu" else like.dtype)
    part = np.empty_like(total)
    for share, array in shared:
        np.multiply(array, share, out=part)
        total += part
    # Counters of batch norm are integers; their mean is rounded back.
    return np.rint(total).astype(like.dtype) if like.dtype.kind in "iu" else total


def check_equal_weights(agents: Sequence[Agent], protocol: str) -> None:
    """Weights can only be averaged among equal architectures."""
    if not agents:
        return  # none of this group is here
    first = agents[0]
    wanted = {name: array.shape for name, array in first.learner.weights().items()}
    for agent in agents[1:]:
        if {name: array.shape for name, array in agent.learner.weights().items()} != wanted:
            raise LearnerError(
                f"{protocol} averages weights, so all agents must have the same architecture.",
                f"agent '{agent.name}' has {agent.learner.describe()}, agent '{first.name}' has "
                f"{first.learner.describe()}",
                "Use one architecture, or a protocol that exchanges predictions: fedmd, avgkd.",
            )
