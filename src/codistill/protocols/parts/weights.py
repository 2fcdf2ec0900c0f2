"""Weights that are shared: the same start, who can be averaged, the mean or a robust one, and who gets it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from codistill.protocol import Agent, Hub, LearnerError, Message, MessageError
from codistill.protocols.parts.aggregation import Aggregation
from codistill.wire.codec import AdjacentArrays
from codistill.wire.message import Expectation

_MOST_SAMPLES = 1 << 48
GROWTH = 10  # weights that become larger by this in a round have diverged: as the guard around learners says of outputs
OPTIMISER_STATES = ("fresh", "kept")
_SAID = {"all": "weights", "except batch norm": "body"}  # which digest of what an agent said when it joined

Groups = Sequence[tuple[Sequence[str], Mapping[str, np.ndarray]]]  # agents of one architecture, and their weights

# --- an agent


def same_initial_weights(me: Agent) -> None:
    """Equal initial weights for equal architectures. No message is needed: they derive from the common seed."""
    if len(me.roster) > 1:  # a lone agent keeps its own, and so learns as it would alone
        me.seed_alike("initial weights")
        me.learner.reset()


def shared_weights(me: Agent, average: str) -> dict[str, np.ndarray]:
    """A copy of the weights that all agents share: "all", or "except batch norm"."""
    own = {} if average == "all" else me.learner.batch_norm
    return {name: array for name, array in me.learner.weights().items() if name not in own}


def take_over(protocol: Any, me: Agent, weights: Mapping[str, np.ndarray] | None, t: int) -> None:
    """The hook of that name: load the common weights of round t, and remember the round; None (lost): keep one's own.

    `protocol.optimiser_state`: what the optimiser has kept (momentum, Adam's moments) is of other weights, so it starts
    afresh; "kept": it goes on with it.
    """
    if weights is None:
        return
    me.learner.load(dict(weights))
    alone = len(me.roster) == 1 or (len(me.present) == 1 and not me.sampled)  # then it gets back its own weights
    if protocol.optimiser_state == "fresh" and not alone:
        me.learner.reset_optimiser()
    if me.sampled:
        me.state["holds"] = t


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
        if agent.learner.frozen != first.learner.frozen:
            raise LearnerError(
                f"{protocol} averages the trainable weights only, so all agents must have the same frozen ones.",
                f"agents '{first.name}' and '{agent.name}' have frozen weights of different values",
                "Load them from one file, or build them after the same torch.manual_seed; or freeze nothing.",
            )


# --- the hub: what arrived, and from whom


def accepted_weights(me: Hub, heard: Mapping[str, Message], average: str = "all") -> dict[str, Message]:
    """The messages that hold weights as their sender said when it joined; others are refused by name.

    `samples` may be fewer than it said, as under a safeguard, which holds some out; never more: it is a share in a sum.
    """
    accepted = {}
    for name, message in heard.items():
        said, samples = me.joined.get(name), message.plain.get("samples")
        most = said.samples if said else _MOST_SAMPLES
        if type(samples) is not int or not 0 < samples <= most or len(message.plain) > 1:
            must = f"Weights must come with the number of samples behind them, and nothing else: 1 to {most}."
            found = f"{message.plain}"[:80]
        elif said and message.layout != getattr(said, _SAID[average]):
            must = "Weights must have the names, shapes and dtypes that their sender joined with."
            found = f"{[*message.arrays]}"[:200]
        else:
            accepted[name] = message
            continue
        me.refuse(name, MessageError(must, found, "The sender must join again with the model that it uses."))
    return accepted


def split_message(
    me: Hub, heard: Mapping[str, Message], expect: Expectation
) -> tuple[dict[str, Message], dict[str, Message]]:
    """What stands beside the weights, as expected, and the rest; a message without it is refused by name."""
    beside, weights = {}, {}
    for name, message in heard.items():
        tables = message.arrays, message.plain
        part = Message(*({key: item for key, item in table.items() if key in expect} for table in tables))
        if me.accepts(name, part, expect):
            beside[name] = part
            weights[name] = Message(
                *({key: item for key, item in table.items() if key not in expect} for table in tables)
            )
    return beside, weights


def groups_alike(me: Hub, heard: Mapping[str, Message], *what: str) -> list[tuple[list[str], dict[str, Message]]]:
    """Agents that are present and joined with the same `what` ("weights", "features"), and their messages, if any.

    Groups are kept apart, and nobody is refused: a majority does not decide which architecture is right.
    """
    groups: dict[object, tuple[list[str], dict[str, Message]]] = {}
    for name in me.present:
        said = me.joined.get(name)
        kind = tuple(getattr(said, each) for each in what) if said else name in heard and heard[name].signature
        names, messages = groups.setdefault(kind, ([], {}))
        names.append(name)
        messages |= {name: heard[name]} if name in heard else {}
    return [(names, messages) for names, messages in groups.values() if messages]


def architectures(
    me: Hub, heard: Mapping[str, Message], average: str = "all"
) -> list[tuple[list[str], dict[str, Message]]]:
    """Agents that joined with one architecture, and their messages: mostly one group; the hub remarks on several."""
    groups = groups_alike(me, heard, _SAID[average], "features", "frozen")
    if len(groups) > 1:
        kinds = "; ".join(", ".join(names) for names, _ in groups)
        me.remark(f"agents with different architectures, each averaged separately: {kinds}")
    return groups


def kind_of(me: Hub, name: str) -> str:
    """What an agent joined with: those with other weights, or another number of features, are another group."""
    said = me.joined.get(name)
    return "" if said is None else f"{said.weights} {said.features}{f' {said.frozen}' if said.frozen else ''}"


# --- the mean of weights, and robust ones


def capped_samples(heard: Mapping[str, Message], cap: float = np.inf) -> dict[str, float]:
    """n_k, the `samples` of each message, of which none counts for more than `cap` times the (lower) median of all."""
    counts = {name: message["samples"] for name, message in heard.items()}
    most = cap * sorted(counts.values())[(len(counts) - 1) // 2]
    return {name: min(count, most) for name, count in counts.items()}


def weighted_sum(shares: Mapping[str, float], heard: Mapping[str, Message]) -> dict[str, np.ndarray]:
    """Σ_k q_k w_k for each array of the messages w_k, which have equal names and shapes; in single precision."""
    q = {name: np.float32(share) for name, share in shares.items()}
    tables = [message.arrays for message in heard.values()]
    first = tables[0]
    if isinstance(first, AdjacentArrays) and all(getattr(each, "layout", None) is first.layout for each in tables):
        # All of a model at once: the same additions, in the same order, for each weight.
        whole = [(q[k], cast(AdjacentArrays, message.arrays).numbers) for k, message in heard.items()]
        return AdjacentArrays(first.layout, _sum(whole))
    return {name: _sum([(q[k], message[name]) for k, message in heard.items()]) for name in first}


def _sum(shared: list[tuple[np.float32, np.ndarray]]) -> np.ndarray:
    like = shared[0][1]
    if like.dtype.kind == "b":
        return like  # a mask has no mean
    total = np.zeros(like.shape, dtype=np.float64 if like.dtype.kind in "iu" else like.dtype)
    part = np.empty_like(total)
    with np.errstate(over="ignore"):
        for share, array in shared:
            np.multiply(array, share, out=part)
            total += part
    return _of_dtype(total, like)


def robust_weights(
    heard: Mapping[str, Message], aggregate: str, trim: float, me: Hub | None = None
) -> dict[str, np.ndarray]:
    """The "median" or "trimmed" mean of each weight, in which all agents count alike."""
    robust = Aggregation(kind=aggregate, trim=trim, outputs=False, hub=me)
    return {
        name: _of_dtype(robust.of_all(np.stack([message[name] for message in heard.values()]).astype(np.float64)), like)
        for name, like in next(iter(heard.values())).arrays.items()
    }


def _of_dtype(values: np.ndarray, like: np.ndarray) -> np.ndarray:
    """Finite values of the same dtype: counters of batch norm are integers, to which their mean is rounded."""
    dtype = like.dtype
    if dtype.kind == "f":
        return np.asarray(np.clip(values, np.finfo(dtype).min, np.finfo(dtype).max), dtype=dtype)
    with np.errstate(invalid="ignore"):  # of counters that nothing could have counted
        return np.asarray(np.rint(values), dtype=dtype)


def combined_weights(
    heard: Mapping[str, Message], aggregate: str, trim: float, cap: float, me: Hub | None = None
) -> dict[str, np.ndarray]:
    """The mean, weighted by `samples` as in FedAvg, or a robust one; the messages have equal names and shapes."""
    if aggregate != "mean":
        return robust_weights(heard, aggregate, trim, me)
    n_k = capped_samples(heard, cap)
    n = sum(n_k.values())
    return weighted_sum({k: n_k[k] / n for k in heard}, heard)  # w ← Σ_k n_k / n · w_k


def group_means(
    me: Hub, heard: Mapping[str, Message], aggregate: str, trim: float, cap: float, average: str = "all"
) -> list[tuple[list[str], dict[str, np.ndarray]]]:
    """For each architecture that agents joined with, their names and their combined weights; mostly one group."""
    groups = architectures(me, heard, average)
    means = [(names, combined_weights(group, aggregate, trim, cap, me)) for names, group in groups]
    watch_growth(me, means)
    return means


def watch_growth(me: Hub, means: Groups) -> None:
    """Remark on combined weights of a group of agents that are far beyond those of the round before."""
    for names, mean in means:
        sizes = me.state.setdefault("sizes", {})
        kind, size = kind_of(me, names[0]), size_of(mean)
        if kind in sizes and is_far_beyond(size, sizes[kind], mean):
            factor = size / max(sizes[kind], 1e-9)
            me.remark(f"diverged: the combined weights are {factor:.3g} times as large as before.")
            me.diverged = True
        sizes[kind] = size


def size_of(weights: Mapping[str, np.ndarray]) -> float:
    """The Euclidean norm of all weights together, but counters and masks; infinite where it cannot be computed."""
    with np.errstate(over="ignore", invalid="ignore"):
        lines = [np.ravel(array, order="K") for array in weights.values() if array.dtype.kind == "f"]
        square = float(sum(float(np.dot(line, line)) for line in lines))
    return square**0.5 if np.isfinite(square) else np.inf


def is_far_beyond(size: float, before: float, weights: Mapping[str, np.ndarray]) -> bool:
    """Whether weights have grown tenfold, and are ten on average: small ones may grow faster, from a start at 0."""
    count = sum(array.size for array in weights.values() if array.dtype.kind == "f")
    return not size <= GROWTH * max(before, count**0.5)


# --- who gets them


def to_groups(me: Hub, means: Groups, t: int) -> dict[str, Message]:
    """To each agent that is present the weights of its group, or an empty message where there are none.

    Where only a share of the agents takes part in each round, they are kept: an agent that missed round t gets them
    before its next one. What is sent later in the same round replaces arrays of the same names.
    """
    answers = dict.fromkeys(me.present, Message())
    for names, weights in means:
        answers |= dict.fromkeys(names, Message(weights))
        if me.sampled:
            newest, kind = me.state.setdefault("newest", {}), kind_of(me, names[0])
            earlier = newest[kind]["weights"] if kind in newest and newest[kind]["round"] == t else {}
            newest[kind] = {"round": t, "weights": {**earlier, **weights}}
    return answers
