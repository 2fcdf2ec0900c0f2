"""The newest common weights, for agents that missed a round: where only a share of them takes part in each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from codistill.protocol import Agent, Hub, Message

OPTIMISER_STATES = ("fresh", "kept")
_NONE = -1  # the initial weights, which need no message


def take_over(me: Agent, weights: Mapping[str, np.ndarray] | None, t: int, optimiser_state: str = "fresh") -> None:
    """Load the common weights of round t, and remember which round they are of; None (lost): keep one's own.

    `optimiser_state`: what the optimiser has kept (momentum, Adam's moments) is of other weights, so it starts afresh;
    "kept": it goes on with it.
    """
    if weights is None:
        return
    me.learner.load(dict(weights))
    alone = len(me.roster) == 1 or (len(me.present) == 1 and not me.sampled)  # then it gets back its own weights
    if optimiser_state == "fresh" and not alone:
        me.learner.reset_optimiser()
    if me.sampled:
        me.state["holds"] = t


def round_held(me: Agent) -> int:
    """Of which round the common weights are that this agent took over last."""
    return int(me.state.get("holds", _NONE))


def keep_newest(me: Hub, means: Sequence[tuple[Sequence[str], Mapping[str, np.ndarray]]], t: int) -> None:
    """At the hub: remember the common weights of round t of each group of agents, for those who missed it."""
    if me.sampled:
        newest = me.state.setdefault("newest", {})
        for names, weights in means:
            newest[kind_of(me, names[0])] = {"round": t, "weights": dict(weights)}


def newest_weights(me: Hub, heard: Mapping[str, Message]) -> dict[str, Message]:
    """To each agent that is present the newest weights of its group; an empty message to one that `holds` them."""
    newest = me.state.get("newest", {})
    made = {kind: Message(kept["weights"]) for kind, kept in newest.items()}  # encoded once for all
    answers = dict.fromkeys(me.present, Message())
    for name, message in heard.items():
        kind = kind_of(me, name)
        if kind in newest and message["holds"] != newest[kind]["round"]:
            answers[name] = made[kind]
    return answers


def kind_of(me: Hub, name: str) -> str:
    """What an agent joined with: those with other weights, or another number of features, are another group."""
    said = me.hellos.get(name)
    return "" if said is None else f"{said.weights} {said.features}"
