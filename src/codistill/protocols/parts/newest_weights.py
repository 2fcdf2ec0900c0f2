"""The newest common weights, for agents that missed a round: where only a share of them takes part in each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from codistill.protocol import Agent, Hub, Message

_NONE = -1  # the initial weights, which need no message


def take_over(me: Agent, weights: Mapping[str, np.ndarray] | None, t: int) -> None:
    """Load the common weights of round t, and remember which round they are of; None (lost): keep one's own."""
    if weights is None:
        return
    me.learner.load(dict(weights))
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
            newest[_kind(me, names[0])] = {"round": t, "weights": dict(weights)}


def newest_weights(me: Hub, heard: Mapping[str, Message]) -> dict[str, Message]:
    """To each agent that is present the newest weights of its group; an empty message to one that `holds` them."""
    newest = me.state.get("newest", {})
    made = {kind: Message(kept["weights"]) for kind, kept in newest.items()}  # encoded once for all
    answers = dict.fromkeys(me.present, Message())
    for name, message in heard.items():
        kind = _kind(me, name)
        if kind in newest and message["holds"] != newest[kind]["round"]:
            answers[name] = made[kind]
    return answers


def _kind(me: Hub, name: str) -> str:
    """What an agent joined with: those with other weights, or another number of features, are another group."""
    said = me.hellos.get(name)
    return "" if said is None else f"{said.weights} {said.features}"
