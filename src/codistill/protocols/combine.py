"""Sharing outputs batch by batch: a client asks for the target that the hub makes out of everybody's outputs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from codistill.protocol import HUB, Agent, Hub, Message
from codistill.protocols.discriminator import Discriminator
from codistill.protocols.parts.aggregation import Aggregation


async def ask(me: Agent, f: np.ndarray, rows: int = 1, **extra: np.ndarray) -> list[np.ndarray] | None:
    """What the others make of a batch, f_-n, and in a second row ∇U_n; None where nobody else was heard."""
    reply = await me.ask_hub(Message.of(f=f, **extra))
    if reply is None or not reply.arrays:
        return None
    told = np.empty((rows, *f.shape), np.float32)
    if not me.accepts(HUB, reply, {"told": told, "clients": int, "own": int}) or reply["clients"] <= reply["own"]:
        return None
    told, clients, own = reply["told"], reply["clients"], reply["own"]
    with np.errstate(over="ignore"):
        # (5): f_-n = (N f̄ - f_n) / (N - 1), where f̄ is the mean over all N clients
        others = ((clients * told[0] - own * f) / (clients - own)).astype(np.float32)
    return [others, *told[1:]] if np.isfinite(others).all() else None


async def combine(
    me: Hub, batches: Iterable[Any], way: Aggregation, discriminator: Discriminator | None = None
) -> None:
    """Han, Shi, Huang. FedAL. Algorithm 1, lines 12-16, with whoever answered; with no discriminator, FedMD.

    Puts into each client's metrics the share of public samples on which its answer is not that of all
    together (`disagreement`), and how often the discriminator knew it (`discriminator_accuracy`).
    """
    if len(me.present) == 1:
        return  # nobody asks: there are no others
    tally = _Tally()
    for ids, _ in batches:
        wanted = np.empty((len(ids), me.classes), np.float32) if way.outputs else (len(ids), None)
        heard = await me.gather(expect={"f": wanted}, alike=True)
        if not heard:
            await me.broadcast(Message())  # everything was lost: all go on without this step
            continue
        f = np.stack([message["f"] for message in heard.values()]).astype(np.float32)
        coverage = _coverage(list(heard.values()), f.shape[-1])
        together = way.of_all(f, coverage)
        gradients = None
        if discriminator is not None:
            gradients, recognised = discriminator.play(me, list(heard), f)
            tally.add("discriminator_accuracy", heard, recognised)
        await me.scatter(_replies(me.present, list(heard), way, f, coverage, together, gradients))
        if way.outputs:
            tally.add("disagreement", heard, (f.argmax(axis=2) != together.argmax(axis=1)).mean(axis=1))
    tally.tell(me)
    if discriminator is not None:
        discriminator.keep(me)


def _replies(
    present: Sequence[str],
    heard: Sequence[str],
    way: Aggregation,
    f: np.ndarray,
    coverage: np.ndarray | None,
    together: np.ndarray,
    gradients: np.ndarray | None,
) -> dict[str, Message]:
    """To each client present: an aggregate, of how many clients it is, and whether it is in it.

    The mean is over all, and a client removes itself (5); from any other aggregate it cannot, so gets its own.
    A client whose outputs were lost on the way is not in it, and has no gradient.
    """
    place = {name: index for index, name in enumerate(heard)}
    others = None if way.kind == "mean" or len(f) == 1 else way.of_others(f, coverage)
    shared: dict[str, Message] = {}
    answers = {}
    for name in present:
        index = place.get(name)
        rows, clients, own = [together], len(f), int(index is not None)
        if others is not None and index is not None:
            rows, clients, own = [others[index]], len(f) - 1, 0
        if gradients is not None:
            rows.append(np.zeros_like(together) if index is None else gradients[index])
        # What is the same for many is one message, encoded once.
        key = str(own) if others is None and gradients is None else name
        if key not in shared:
            shared[key] = Message.of(told=np.stack(rows), clients=clients, own=own)
        answers[name] = shared[key]
    return answers


def _coverage(messages: Sequence[Message], classes: int) -> np.ndarray | None:
    shares = [message.arrays.get("coverage") for message in messages]
    if any(share is None or share.shape != (classes,) for share in shares):
        return None
    return np.clip(np.stack(shares), 0, 1)  # type: ignore[arg-type]


class _Tally:
    """Means over the steps of a round, by figure and client."""

    def __init__(self) -> None:
        self._values: dict[tuple[str, str], list[float]] = {}

    def add(self, figure: str, names: Iterable[str], values: np.ndarray) -> None:
        for name, value in zip(names, values, strict=True):
            self._values.setdefault((name, figure), []).append(float(value))

    def tell(self, me: Hub) -> None:
        for (name, figure), values in self._values.items():
            me.measure(name, **{figure: sum(values) / len(values)})
