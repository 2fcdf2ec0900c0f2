"""Outputs on public data that agents sent at different times: the relay keeps the latest of each agent and sample.

An agent sends f_n (|P|, K) as "f" and the places of these samples in the public data as "ids". The relay replies with
"told", for each of these samples the aggregate of the latest outputs of those others that have sent any, and with
"known", for which samples there are such others.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from codistill.protocol import Hub, Message, MessageError
from codistill.protocols.parts.aggregation import Aggregation


def expected_latest(f: np.ndarray) -> dict[str, np.ndarray]:
    """What an agent that sent f expects of the relay's reply."""
    return {"told": np.empty(f.shape, np.float32), "known": np.empty(len(f), bool)}


def keep_latest(me: Hub, sender: str, message: Message, most: int, aggregate: str) -> bool:
    """Keep an agent's outputs for some public samples, in place of those before; False: they are refused."""
    shares: dict[str, Any] = {"coverage": np.empty(me.classes, np.float32)} if aggregate == "coverage" else {}
    f, ids = np.empty((0, me.classes), np.float32), np.empty(0, np.int32)
    rows = {"f": (None, me.classes), "ids": (None,)}
    if not me.accepts(sender, message, {**rows, **shares}):
        return False
    sent, about = message["f"], message["ids"]
    if (sent.dtype, about.dtype) != (f.dtype, ids.dtype) or len(sent) != len(about) or not _is_within(about, me, most):
        must = f"Outputs must be float32, for at most {most} public samples, whose places are given as int32."
        found = f"{len(sent)} outputs as {sent.dtype}, {len(about)} places as {about.dtype}"
        me.refuse(sender, MessageError(must, found, "The sender must run the same protocol on the same public data."))
        return False
    nothing = {"f": np.zeros((len(me.public), me.classes), np.float32), "known": np.zeros(len(me.public), bool)}
    kept = me.state.setdefault("latest", {}).setdefault(sender, nothing)
    kept["f"][about], kept["known"][about] = sent, True
    if shares:
        kept["coverage"] = np.clip(message["coverage"], 0, 1)
    return True


def _is_within(ids: np.ndarray, me: Hub, most: int) -> bool:
    return 0 < len(ids) <= most and bool(ids.min() >= 0) and bool(ids.max() < len(me.public))


def latest_of_others(me: Hub, sender: str, ids: np.ndarray, aggregation: Aggregation) -> tuple[np.ndarray, np.ndarray]:
    """(|P|, K): the aggregate of the others' latest outputs for some samples; (|P|,): for which there are any."""
    others = [kept for name, kept in me.state["latest"].items() if name != sender]
    told = np.zeros((len(ids), me.classes), np.float32)
    if not others:
        return told, np.zeros(len(ids), bool)
    f, known = (np.stack([kept[key][ids] for kept in others]) for key in ("f", "known"))
    shares = np.stack([kept["coverage"] for kept in others]) if "coverage" in others[0] else None
    # Samples for which the same agents have outputs are aggregated together.
    groups, group = np.unique(known, axis=1, return_inverse=True)
    for number, who in enumerate(groups.T):
        rows = group.ravel() == number
        if who.any():
            told[rows] = aggregation.of_all(f[who][:, rows], None if shares is None else shares[who])
    return told, np.asarray(known.any(axis=0))
