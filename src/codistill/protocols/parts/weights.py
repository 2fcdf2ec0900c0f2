"""Weights that are combined: the same start, the weighted mean or a robust one, and who can take part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np

from codistill.message import Expectation
from codistill.protocol import Agent, Hub, LearnerError, Message, MessageError
from codistill.protocols.parts.aggregation import Aggregation
from codistill.protocols.parts.newest_weights import kind_of
from codistill.wire.layouts import AdjacentArrays

_MOST_SAMPLES = 1 << 48
GROWTH = 10  # weights that become larger by this in a round have diverged: as the guard around learners says of outputs
AVERAGES = ("all", "except batch norm")
_SAID = {"all": "weights", "except batch norm": "body"}  # which digest of what an agent said when it joined


def same_initial_weights(me: Agent) -> None:
    """Equal initial weights for equal architectures. No message is needed: they derive from the common seed."""
    if len(me.roster) > 1:  # a lone agent keeps its own, and so learns as it would alone
        me.seed_alike("initial weights")
        me.learner.reset()


def shared_weights(me: Agent, average: str) -> dict[str, np.ndarray]:
    """A copy of the weights that all agents share: "all", or "except batch norm"."""
    own = {} if average == "all" else me.learner.batch_norm
    return {name: array for name, array in me.learner.weights().items() if name not in own}


def accepted_weights(me: Hub, heard: Mapping[str, Message], average: str = "all") -> dict[str, Message]:
    """The messages that hold weights and `samples` as their sender said when it joined; others are refused by name."""
    accepted = {}
    for name, message in heard.items():
        said, samples = me.hellos.get(name), message.plain.get("samples")
        counts = type(samples) is int and (samples == said.samples if said else 0 < samples < _MOST_SAMPLES)
        if not counts or len(message.plain) > 1:
            wanted = said.samples if said else "at least 1"
            must = f"Weights must come with the number of samples behind them, and nothing else: {wanted}."
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
    """What stands beside the weights, as expected, and the rest; whoever lacks it is refused by name."""
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

    What cannot be combined is kept apart. Which of two groups is right is no question of a majority: nobody is refused.
    """
    groups: dict[object, tuple[list[str], dict[str, Message]]] = {}
    for name in me.present:
        said = me.hellos.get(name)
        kind = tuple(getattr(said, each) for each in what) if said else name in heard and heard[name].signature
        names, messages = groups.setdefault(kind, ([], {}))
        names.append(name)
        messages |= {name: heard[name]} if name in heard else {}
    return [(names, messages) for names, messages in groups.values() if messages]


def group_means(
    me: Hub, heard: Mapping[str, Message], aggregate: str, trim: float, cap: float, average: str = "all"
) -> list[tuple[list[str], dict[str, np.ndarray]]]:
    """For each architecture that agents joined with, their names and their combined weights; mostly one group."""
    groups = groups_alike(me, heard, _SAID[average], "features")
    if len(groups) > 1:
        kinds = "; ".join(", ".join(names) for names, _ in groups)
        me.remark(f"agents with different architectures, each averaged by itself: {kinds}")
    means = [(names, combined_weights(group, aggregate, trim, cap, me)) for names, group in groups]
    for names, mean in means:
        watch_growth(me, names, mean)
    return means


def watch_growth(me: Hub, names: Sequence[str], mean: Mapping[str, np.ndarray]) -> None:
    """Remark on combined weights of a group of agents that are far beyond those of the round before."""
    sizes, kind, size = me.state.setdefault("sizes", {}), kind_of(me, names[0]), size_of(mean)
    if kind in sizes and is_far_beyond(size, sizes[kind], mean):
        me.remark(f"diverged: the combined weights are {size / max(sizes[kind], 1e-9):.3g} times as large as before.")
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


def to_groups(me: Hub, means: Sequence[tuple[Sequence[str], Mapping[str, np.ndarray]]]) -> dict[str, Message]:
    """To each agent that is present the weights of its group; an empty message where there are none."""
    answers = dict.fromkeys(me.present, Message())
    for names, weights in means:
        answers |= dict.fromkeys(names, Message(weights))
    return answers


def combined_weights(
    heard: Mapping[str, Message], aggregate: str, trim: float, cap: float, me: Hub | None = None
) -> dict[str, np.ndarray]:
    """The mean, weighted by samples, or the median or trimmed mean of each weight, in which all count alike.

    The messages hold weights of equal names and shapes, and `samples`.
    """
    if aggregate == "mean":
        return mean_weights(heard, cap)
    robust = Aggregation(kind=aggregate, trim=trim, outputs=False, hub=me)
    return {
        name: _of_dtype(robust.of_all(np.stack([message[name] for message in heard.values()]).astype(np.float64)), like)
        for name, like in next(iter(heard.values())).arrays.items()
    }


def mean_weights(heard: Mapping[str, Message], cap: float = np.inf) -> dict[str, np.ndarray]:
    """w ← Σ_k n_k / n · w_k, where no n_k counts for more than `cap` times the (lower) median of all."""
    counts = {name: message["samples"] for name, message in heard.items()}
    most = cap * sorted(counts.values())[(len(counts) - 1) // 2]
    counts = {name: min(count, most) for name, count in counts.items()}
    n = sum(counts.values())
    shares = {name: np.float32(count / n) for name, count in counts.items()}
    tables = [message.arrays for message in heard.values()]
    first = tables[0]
    if isinstance(first, AdjacentArrays) and all(getattr(each, "layout", None) is first.layout for each in tables):
        # All of a model at once: the same additions, in the same order, for each weight.
        whole = [(shares[k], cast(AdjacentArrays, message.arrays).numbers) for k, message in heard.items()]
        return AdjacentArrays(first.layout, _mean(whole))
    return {name: _mean([(shares[k], message[name]) for k, message in heard.items()]) for name in first}


def _mean(shared: list[tuple[np.float32, np.ndarray]]) -> np.ndarray:
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


def _of_dtype(values: np.ndarray, like: np.ndarray) -> np.ndarray:
    """Finite values of the same dtype: counters of batch norm are integers, to which their mean is rounded."""
    dtype = like.dtype
    if dtype.kind == "f":
        return np.asarray(np.clip(values, np.finfo(dtype).min, np.finfo(dtype).max), dtype=dtype)
    with np.errstate(invalid="ignore"):  # of counters that nothing could have counted
        return np.asarray(np.rint(values), dtype=dtype)


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
