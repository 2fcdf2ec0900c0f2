"""What a protocol measured of its agents beside their scores, drawn per round."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from codistill.faults import Fault
from codistill.plots.charts import LEGEND, canvas, mean_and_range, plain, rounds_axis
from codistill.plots.fault_bands import shade
from codistill.plots.style import MUTED, STYLE
from codistill.results.summary import Summary

# What every row may hold without a protocol having measured anything.
_ALWAYS = ("round", "agent", "present", "sent", "received", "from_hub", "lies")
_NO_MEASURES = {*_ALWAYS, "test_samples", "accuracy", "own_accuracy", "rmse", "own_rmse"}
# Title and one sentence of the figures that the bundled protocols measure.
_KNOWN = {
    "discriminator_accuracy": (
        "how often the discriminator tells whose outputs it sees",
        "At chance the discriminator cannot tell the agents apart: either it has not learnt yet, or it is fooled.",
    ),
    "consensus_error": (
        "consensus error: squared distance of an agent's soft-decisions from the mix with its neighbours'",
        "How far an agent is from those neighbours that it hears: at zero they have the same soft-decisions on the "
        "public data. Who is cut off is not compared with: a split shows when it is healed.",
    ),
    "disagreement": (
        "public samples on which an agent's answer differs from the answer of the mean",
        "At zero all agents answer alike, be it right or wrong.",
    ),
}
_CHANCE = "discriminator_accuracy"  # one right answer among as many as there are agents


@dataclass(frozen=True)
class Measure:
    """One figure, of all rounds in which it was measured."""

    name: str
    agents: int
    rounds: np.ndarray
    values: list[np.ndarray]  # of each such round: those of the honest agents of which it was measured
    faults: tuple[Fault, ...] = ()  # those that were injected

    @property
    def title(self) -> str:
        """What it is, for a person."""
        return _KNOWN[self.name][0] if self.name in _KNOWN else self.name.replace("_", " ")

    @property
    def sentence(self) -> str:
        """How to read it; empty where only its protocol knows."""
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
    """All figures that are in the rows because a protocol has put them there."""
    found: dict[str, dict[int, list[float]]] = {}
    for row in summary.rows:
        if row.get("lies"):
            continue  # as in all means: honest agents only
        for name, value in row.items():
            if name not in _NO_MEASURES and _is_number(value):
                found.setdefault(name, {}).setdefault(int(row["round"]), []).append(float(value))
    return [_measure(name, by_round, summary) for name, by_round in found.items()]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _measure(name: str, by_round: dict[int, list[float]], summary: Summary) -> Measure:
    rounds = sorted(by_round)
    values = [np.array(by_round[done]) for done in rounds]
    return Measure(name, len(summary.agents), np.array(rounds), values, summary.faults)


def draw_measure(measure: Measure) -> Figure:
    """Mean per round, lowest to highest agent, and what chance would give."""
    with matplotlib.rc_context(STYLE):
        figure, axes = canvas(9, 3.4)
        mean_and_range(axes, measure.rounds, measure.values, among=measure.agents)
        if measure.chance is not None:
            label = f"chance: 1 of {measure.agents}"
            axes.axhline(measure.chance, color=MUTED, linestyle="dashed", linewidth=1.3, label=label)
        shade(axes, measure.faults, int(max(measure.rounds)))
        axes.set_xlabel("round")
        axes.set_title(plain(measure.title, longest=90), pad=26)
        axes.grid(axis="x", visible=False)
        if measure.is_share:
            axes.yaxis.set_major_formatter(PercentFormatter(1, symbol=" %"))
        axes.legend(loc="lower left", ncols=3, **LEGEND)
        rounds_axis(axes, measure.rounds)
    return figure
