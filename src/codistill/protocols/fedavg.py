"""Federated averaging of weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from codistill.learners.ability import Ability
from codistill.protocol import Agent, Hub, LearnerError, Message, MessageError, Protocol, setting


@dataclass(frozen=True, kw_only=True)
class FedAvg(Protocol):
    """McMahan et al. Communication-Efficient Learning of Deep Networks from Decentralized Data. AISTATS 2017.

    In each round every agent trains the common model on its shard and sends the weights w_k; the hub
    returns their mean, weighted by the number of samples n_k. All agents need the same architecture.
    """

    name = "fedavg"
    paper = "McMahan et al., AISTATS 2017"
    exchanges = "weights, to and from the hub"
    needs = Ability.WEIGHTS | Ability.GRADIENTS

    local_epochs: int = setting(1, "epochs of local training per round", at_least=0)
    local_steps: int | None = setting(None, "gradient steps per round, instead of epochs", at_least=0)
    batch_size: int = setting(32, "samples per gradient step", at_least=1)
    synchronise: bool = setting(True, "start all agents from the same initial weights")

    async def begin(self, me: Agent) -> None:
        """Equal initial weights, unless told otherwise."""
        if self.synchronise:
            start_alike(me)

    async def round(self, me: Agent, t: int) -> None:
        """Train, send w_k with n_k, take over the mean."""
        for x, y in me.shard.batches(t, self.batch_size, self.local_epochs, self.local_steps):
            me.learner.descend(me.learner.loss(me.learner(x), y))
        weights = me.learner.weights()
        mean = await me.ask_hub(Message(weights, {"samples": len(me.shard)}), expect=weights)
        if mean is not None:
            me.learner.load({name: mean[name] for name in weights})

    async def hub(self, me: Hub, t: int) -> None:
        """Average whoever answered."""
        heard = with_samples(me, await me.gather(expect={"samples": int}, alike=True))
        if not heard:
            return
        await me.broadcast(Message(mean_weights(heard)))

    def check(self, agents: Sequence[Agent]) -> None:
        """All agents must have the same weights by name and shape."""
        check_equal_weights(agents, self.name)


def check_equal_weights(agents: Sequence[Agent], protocol: str) -> None:
    """Weights can only be averaged among equal architectures."""
    if not agents:
        return  # a group of which none is here
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


def start_alike(me: Agent) -> None:
    """Equal initial weights for equal architectures need no message: they derive from the common seed."""
    if len(me.roster) > 1:  # a lone agent keeps its own: it learns as if alone
        me.seed_alike("initial weights")
        me.learner.reset()


def with_samples(me: Hub, heard: Mapping[str, Message]) -> dict[str, Message]:
    """Messages that can be weighted; others are refused by name."""
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
        return like  # a mask is no number to be averaged
    total = np.zeros(like.shape, dtype=np.float64 if like.dtype.kind in "iu" else like.dtype)
    part = np.empty_like(total)
    for share, array in shared:
        np.multiply(array, share, out=part)
        total += part
    # Counters of batch norm are integers; their mean is rounded back.
    return np.rint(total).astype(like.dtype) if like.dtype.kind in "iu" else total
