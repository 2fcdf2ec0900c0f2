"""Means over classes: what FD and FedProto have in common, and when there are classes at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from codistill.protocol import Agent, LearnerError
from codistill.protocols.parts.aggregation import Aggregation


def class_means(sums: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """F_c = Σ y_c f / Σ y_c for each class that occurred, and which ones did."""
    seen = counts > 0
    return (sums / np.where(seen, counts, 1)[:, None]).astype(np.float32), seen


def of_known_classes(state: Mapping[str, np.ndarray], y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Which samples of a batch are of a class with a target, and the target of each of these."""
    if "told" not in state:  # before the first exchange
        return torch.zeros(len(y), dtype=torch.bool), y[:0]
    label = y.argmax(dim=1)
    rows = torch.from_numpy(state["known"])[label]
    return rows, torch.from_numpy(state["told"])[label[rows]]


def of_others(rule: Aggregation, values: Mapping[str, np.ndarray], present: Sequence[str]) -> dict[str, np.ndarray]:
    """For each who is present, the aggregate of the others' values; who has no others is left out."""
    if not values:
        return {}
    stacked = np.stack(list(values.values()))
    answers = dict.fromkeys(present, rule.of_all(stacked))
    if len(values) == 1:
        return {name: answer for name, answer in answers.items() if name not in values}
    return answers | dict(zip(values, rule.of_others(stacked), strict=True))


def check_classes(agents: Sequence[Agent], protocol: str) -> None:
    """Every target must be a label, or shares of classes."""
    for agent in agents:
        y = agent.shard.targets
        if agent.shard.labels is None and (y.min() < 0 or not np.allclose(y.sum(axis=1), 1, atol=1e-3)):
            raise LearnerError(
                f"{protocol} learns classes, so targets must be labels, or shares of classes that sum to 1.",
                f"agent '{agent.name}' has real values",
                "Give labels, or use a protocol for real values: avgkd, ekd.",
            )
