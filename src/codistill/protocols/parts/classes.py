"""Means over classes; and whether there are classes, features and a head that a protocol can use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from codistill.protocol import Ability, Agent, LearnerError, Message

EVERY = slice(None)  # all samples of a batch


# The help of the setting `smallest_group`, wherever there is one.
SMALLEST = "samples of a class below which its mean is not sent; 1: a single sample's values may be"


def class_means(
    values: np.ndarray, shares: np.ndarray, sent: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Σ y_c f / Σ y_c for each class c that occurred, from the sums (K, d) and Σ y_c (K,); and which ones did.

    `sent`: classes to which this is restricted, as of `large_classes`; the others have zeros, as those without samples.
    """
    seen = shares > 0 if sent is None else (shares > 0) & sent
    means = (values / np.where(seen, shares, 1)[:, None]).astype(np.float32)
    return np.where(seen[:, None], means, np.float32(0)), seen


def large_classes(me: Agent, shares: np.ndarray, smallest: int) -> np.ndarray:
    """(K,): which classes have at least `smallest` samples among those that were used, from Σ y_c over these.

    Each sample counts once, also where it was used in several epochs: in the first pass over the shard none comes
    twice, and after it the sum is at least that of the shard. A soft label counts by its share, so that no sample has
    more than 1 / smallest of a mean over the shard.
    """
    sizes = np.minimum(shares, me.shard.targets.sum(axis=0, dtype=np.float64))
    return named_classes(me, sizes, smallest)


def named_classes(me: Agent, sizes: np.ndarray, smallest: int, among: Sequence[int] | None = None) -> np.ndarray:
    """(K,): the classes of at least `smallest` samples; the agent remarks on others that it has, on each once.

    The remark names all classes of which no mean is sent, as others can see: not which of these have samples.
    `among`: classes that would be sent; None: all.
    """
    wanted = np.isin(np.arange(len(sizes)), np.arange(len(sizes)) if among is None else among)
    sizes = np.where(wanted, sizes, 0)
    large: np.ndarray = sizes >= smallest if smallest > 1 else sizes > 0
    left_out = np.flatnonzero((sizes > 0) & ~large).tolist()
    known = me.state.get("left out", [])
    if not set(left_out) <= set(known):
        me.state["left out"] = sorted({*known, *left_out})
        shown = ", ".join(map(str, np.flatnonzero(wanted & ~large)[:100]))
        me.remark(f"it sends no mean of the classes {shown}: fewer than {smallest} samples of each (smallest_group).")
    return large


def class_targets(state: Mapping[str, np.ndarray], y: torch.Tensor) -> tuple[torch.Tensor | slice, torch.Tensor]:
    """Which samples of a batch are of a class with a target (often all), and the target of each of these.

    The state holds the targets (K, d) as "told", and which classes have one as "known"; it may be empty.
    """
    if "told" not in state:  # before the first exchange
        return slice(0), y[:0]
    label, told = y.argmax(dim=1), torch.from_numpy(state["told"])
    if state["known"].all():
        return EVERY, told[label]
    rows = torch.from_numpy(state["known"])[label]
    return rows, told[label[rows]]


def chosen(values: torch.Tensor, rows: torch.Tensor | slice) -> torch.Tensor:
    """Some rows; where these are all of them, the tensor itself, without a step back through a selection."""
    return values if rows is EVERY else values[rows]


def classes_by_holders(heard: Mapping[str, Message]) -> list[tuple[list[str], np.ndarray]]:
    """Who has a class and which classes these are, by what each message says it has `seen`; often one group for all."""
    if not heard:
        return []
    seen = np.stack([message["seen"] for message in heard.values()])
    groups: dict[bytes, list[int]] = {}
    for c in np.flatnonzero(seen.any(axis=0)):
        groups.setdefault(seen[:, c].tobytes(), []).append(int(c))
    names = list(heard)
    return [([names[k] for k in np.flatnonzero(seen[:, of[0]])], np.array(of)) for of in groups.values()]


REAL_VALUES = "avgkd, akd, pkd, ekd; for one value per sample also fedmd, d_distillation"


def are_real_values(agents: Sequence[Agent]) -> bool:
    """Whether the targets are one real value per sample; then there is one output, which is no logit."""
    return all(agent.shard.labels is None and agent.shard.classes == 1 for agent in agents)


def check_classes(agents: Sequence[Agent], protocol: str, *, softmax: bool = True) -> None:
    """Every target must be a label, or probabilities of classes; `softmax`: and outputs for one, not real values."""
    for agent in agents:
        y = agent.shard.targets
        if agent.shard.labels is None and (
            y.shape[1] < 2 or y.min() < 0 or not np.allclose(y.sum(axis=1), 1, atol=1e-3)
        ):
            raise LearnerError(
                f"{protocol} learns classes, so targets must be labels, or probabilities of classes.",
                f"agent '{agent.name}' has real values as targets",
                f"Give labels, or use a protocol for real values: {REAL_VALUES}.",
            )
        if softmax and agent.learner.real_valued and Ability.GRADIENTS in agent.learner.abilities:
            raise LearnerError(
                f"{protocol} takes a softmax of outputs, so a model must be trained by a loss of classes.",
                f"agent '{agent.name}' has {agent.learner.describe()}, trained by a loss of real values",
                f'Train it by loss = "cross_entropy", or use a protocol for real values: {REAL_VALUES}.',
            )


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


def check_head(agents: Sequence[Agent], protocol: str, *, is_sent: bool = False) -> None:
    """There must be classes, and the head a linear map from all features to them: it gets features of others.

    `is_sent`: and its matrix one of the weights, not computed from other ones (`torch.nn.utils.parametrizations`).
    """
    check_classes(agents, protocol)
    for agent in agents:
        head, x = agent.learner.head, agent.shard.x[:1]
        width, wanted = agent.learner.evaluated_features(x).shape[1], (head.in_features, head.out_features)
        if wanted != (width, agent.shard.classes) or (
            is_sent and head_name(agent).split()[0] not in agent.learner.weights()
        ):
            raise LearnerError(
                f"{protocol} applies the head to features of others, so it must be a plain linear layer from all "
                f"features to all classes: {width} to {agent.shard.classes}.",
                f"agent '{agent.name}' has {agent.learner.describe()} with the head '{agent.learner.head_name}', "
                f"{wanted[0]} to {wanted[1]}",
                "End the module with one nn.Linear that gets each sample once, without a parametrization.",
            )


def head_name(me: Agent) -> str:
    """The name of the head's matrix among an agent's weights; after a space that of its bias, if of another layer.

    A matrix that layers share is sent under the name of the first. No name has a space; "-" stands for no bias.
    """
    head, layer = me.learner.head, f"{me.learner.head_name}.".removeprefix(".")
    names = {id(each): name for name, each in me.learner.parameters().items()}
    matrix, bias = names.get(id(head.weight), f"{layer}weight"), "-"
    beside = matrix.removesuffix("weight") + "bias"
    if head.bias is not None:
        bias = names.get(id(head.bias), f"{layer}bias")
    elif beside not in names.values():
        bias = beside
    return matrix if bias == beside else f"{matrix} {bias}"
