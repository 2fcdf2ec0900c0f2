"""What a protocol measured of its agents, beside their scores."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from codistill.faults import Fault
from codistill.results.summary import Summary

# What a row may hold beside scores that is not a protocol's measure.
_OTHER_KEYS = {
    "round", "agent", "present", "sent", "received", "steps", "exchanges", "from_hub", "lies", "time", "test_samples",
}  # fmt: skip
# Title and explanation of what the bundled protocols measure.
_KNOWN = {
    "discriminator_accuracy": (
        "accuracy of the discriminator: how often it recognises which agent an output is from",
        "At chance level the discriminator cannot tell the agents apart: it has not learnt yet, or their outputs are "
        "alike.",
    ),
    "consensus_error": (
        "consensus error: squared distance of an agent's soft-decisions from the weighted mean with its neighbours'",
        "At zero, neighbours have the same soft-decisions on the public data. Only neighbours whose messages arrive "
        "are compared, so the effect of a network split shows after it ends.",
    ),
    "safeguard_weight": (
        "weight of the safeguard: how much of an agent's answer is from what it was taught",
        "At zero an agent answers with its own model, as if it were alone; at one, as the protocol taught it.",
    ),
    "own_rounds": (
        "rounds of its own that an agent has completed",
        "In a run without rounds every agent goes on at its own pace; a round of this chart is a period of time.",
    ),
    "accuracy_before_dkd": (
        "accuracy of the mean of weights, before distillation, on samples of an agent's own",
        "A batch of each agent's training samples: what distillation is given.",
    ),
    "accuracy_after_dkd": (
        "accuracy after distillation, on the same samples",
        "Below the accuracy before it, distillation has made the mean worse: its learning rate may be too large.",
    ),
    "loss_before_dkd": (
        "cross-entropy of the mean of weights, before distillation, on samples of an agent's own",
        "A batch of each agent's training samples: what distillation is given.",
    ),
    "loss_after_dkd": (
        "cross-entropy after distillation, on the same samples",
        "Above the loss before it, distillation has made the mean worse: its learning rate may be too large.",
    ),
    "disagreement": (
        "disagreement: public samples on which an agent's prediction differs from that of the mean",
        "At zero all agents predict the same classes, right or wrong.",
    ),
}
_CHANCE = "discriminator_accuracy"  # its chance level is one in the number of agents


@dataclass(frozen=True)
class Measure:
    """One measure, of all rounds in which it was taken."""

    name: str
    agents: int
    rounds: np.ndarray
    values: list[np.ndarray]  # of each such round: those of the honest agents for which it was taken
    faults: tuple[Fault, ...] = ()  # those that were injected

    @property
    def title(self) -> str:
        """What it is, for a person."""
        return _KNOWN[self.name][0] if self.name in _KNOWN else self.name.replace("_", " ")

    @property
    def sentence(self) -> str:
        """How to read it; empty for a measure of a protocol that is not bundled."""
        return _KNOWN[self.name][1] if self.name in _KNOWN else ""

    @property
    def is_share(self) -> bool:
        """Whether all values can be read as percent."""
        return all(values.min() >= 0 and values.max() <= 1 for values in self.values)

    @property
    def chance(self) -> float | None:
        """What guessing would give."""
        return 1 / self.agents if self.name == _CHANCE else None


def measures(summary: Summary) -> list[Measure]:
    """All measures that a protocol has put into the rows."""
    found: dict[str, dict[int, list[float]]] = {}
    others = _OTHER_KEYS | summary.score_keys
    for row in summary.rows:
        if row.get("lies"):
            continue  # as in all means: honest agents only
        for name, value in row.items():
            if name not in others and _is_number(value):
                found.setdefault(name, {}).setdefault(int(row["round"]), []).append(float(value))
    return [_measure(name, by_round, summary) for name, by_round in found.items()]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _measure(name: str, by_round: dict[int, list[float]], summary: Summary) -> Measure:
    rounds = sorted(by_round)
    values = [np.array(by_round[done]) for done in rounds]
    return Measure(name, len(summary.agents), np.array(rounds), values, summary.faults)
