"""Outputs on public data: the distillation loss, the hub's replies to all agents, and the part of the others.

An agent sends f_n (|P|, K), its outputs (or features) on a batch of public data, as the array "f". The hub replies with
the array "told", whose first row is an aggregate of outputs and whose second, if there is one, is a gradient; with
`clients`, the number of agents in the aggregate; and with `own`, whether the receiver is among them (1) or not (0).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.functional import kl_div, log_softmax, softmax

from codistill.protocol import Agent, Hub, Message
from codistill.protocols.parts.aggregation import Aggregation


def distillation(student: torch.Tensor, teacher: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """KL(ψ(teacher, E) ‖ ψ(student, E)), the mean over samples; both are outputs before the softmax.

    Of a single output, which is a real value, (student - teacher)².
    """
    if student.shape[1] == 1:
        return (student - teacher).square().mean()
    if temperature != 1:
        student, teacher = student / temperature, teacher / temperature
    return kl_div(log_softmax(student, dim=1), softmax(teacher, dim=1), reduction="batchmean")


def clip_rows(gradient: np.ndarray, longest: float | None) -> np.ndarray:
    """A copy in which no row is longer than `longest`, in the Euclidean norm; None: as it is."""
    if longest is None:
        return gradient.copy()
    norms = np.linalg.norm(gradient.astype(np.float64), axis=1, keepdims=True)
    clipped: np.ndarray = gradient * np.minimum(1, longest / np.maximum(norms, 1e-300)).astype(np.float32)
    return clipped


def coverage(me: Agent, aggregate: str) -> dict[str, np.ndarray]:
    """The share of each class among an agent's samples; sent only where the aggregate is weighted by it."""
    return {"coverage": me.shard.targets.mean(axis=0, dtype=np.float32)} if aggregate == "coverage" else {}


def expected_outputs(me: Hub, rows: int, aggregate: str) -> dict[str, np.ndarray]:
    """What the hub expects of an agent: outputs for `rows` public samples and, where it is used, the coverage."""
    f = np.empty((rows, me.classes), np.float32)
    return {"f": f, "coverage": np.empty(me.classes, np.float32)} if aggregate == "coverage" else {"f": f}


def output_bytes(protocol: Any, classes: int, public: int) -> int:
    """Bytes of a reply: for each sample of a public batch the aggregate and, with a discriminator, a gradient."""
    rows = 2 if getattr(protocol, "adversarial", 0) else 1
    return 4 * (rows * min(int(protocol.batch_size), public) + 1) * classes


def expected_reply(f: np.ndarray, rows: int = 1) -> dict[str, np.ndarray | type[int]]:
    """What an agent that sent f expects of the hub's reply."""
    return {"told": np.empty((rows, *f.shape), np.float32), "clients": int, "own": int}


def leave_one_out(reply: Message | None, f: np.ndarray) -> np.ndarray | None:
    """f_-n, the aggregate of all others; None where no other agent was heard."""
    if reply is None or reply["clients"] <= reply["own"]:
        return None
    mean, clients, own = reply["told"][0], reply["clients"], reply["own"]
    with np.errstate(over="ignore"):
        # FedAL (5): f_-n = (N f̄ - f_n) / (N - 1), where f̄ is the mean over all N agents
        others: np.ndarray = ((clients * mean - own * f) / (clients - own)).astype(np.float32)
    return others if np.isfinite(others).all() else None


def stacked(heard: Mapping[str, Message]) -> tuple[np.ndarray, np.ndarray | None]:
    """The outputs (n, |P|, K) of all who were heard and, if they have sent it, their coverage (n, K)."""
    f = np.stack([message["f"] for message in heard.values()]).astype(np.float32)
    shares = [message["coverage"] for message in heard.values() if "coverage" in message]
    return f, np.clip(np.stack(shares), 0, 1) if shares else None


def replies(
    present: Sequence[str],
    heard: Sequence[str],
    f: np.ndarray,
    mean: np.ndarray,
    aggregation: Aggregation,
    shares: np.ndarray | None = None,
    gradients: np.ndarray | None = None,
) -> dict[str, Message]:
    """The hub's reply to each agent that is present; `mean` is the aggregate of the outputs f of all who were `heard`.

    The mean is over all, and an agent removes itself by (5). From any other aggregate it cannot, so each gets the
    aggregate of the others. An agent whose outputs were lost is not in the aggregate, and has a gradient of 0.
    """
    place = {name: index for index, name in enumerate(heard)}
    others = None if aggregation.kind == "mean" or len(f) == 1 else aggregation.of_others(f, shares)
    shared: dict[str, Message] = {}
    answers = {}
    for name in present:
        index = place.get(name)
        rows, clients, own = [mean], len(f), int(index is not None)
        if others is not None and index is not None:
            rows, clients, own = [others[index]], len(f) - 1, 0
        if gradients is not None:
            rows.append(np.zeros_like(mean) if index is None else gradients[index])
        # A reply that is the same for many agents is one message, encoded once.
        key = str(own) if others is None and gradients is None else name
        if key not in shared:
            shared[key] = Message.of(told=np.stack(rows), clients=clients, own=own)
        answers[name] = shared[key]
    return answers


def disagreement(f: np.ndarray, mean: np.ndarray) -> np.ndarray:
    """(n,): the share of samples on which an agent's class is not that of the aggregate."""
    share: np.ndarray = (f.argmax(axis=2) != mean.argmax(axis=1)).mean(axis=1)
    return share
