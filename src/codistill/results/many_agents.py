"""What is shown of many agents: the best and the worst of them, and quantiles of all."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from codistill.results.agent_lines import AgentLine, counted_lines

MOST_LINES, FEW_LINES = 40, 5  # agents up to which a terminal shows all; otherwise so many best and worst
MOST_ON_PAGE, FEW_ON_PAGE = 500, 50  # the same of a report
_QUANTILES = {"10 % quantile": 0.1, "median": 0.5, "90 % quantile": 0.9}


def shown_lines(lines: Sequence[AgentLine], most: int = MOST_LINES, few: int = FEW_LINES) -> list[AgentLine]:
    """All lines in their order or, of more than `most`, the best and then the worst that count in the means."""
    if len(lines) <= most:
        return list(lines)
    if not any(line.has_scores for line in lines):
        return list(lines[: 2 * few])
    ranked = sorted(counted_lines(lines), key=_badness)
    return ranked if len(ranked) <= 2 * few else [*ranked[:few], *ranked[-few:]]


def shown_text(lines: Sequence[AgentLine], most: int = MOST_LINES, few: int = FEW_LINES) -> str:
    """Which agents are shown, in words; empty if all are."""
    if len(lines) <= most:
        return ""
    if not any(line.has_scores for line in lines):
        return f"agents shown: the first {2 * few}; the metrics have all {len(lines):,}"
    counted = len(counted_lines(lines))
    which = f"all {counted:,}" if counted <= 2 * few else f"the {few} best and the {few} worst of {counted:,}"
    return f"agents shown: {which} that were evaluated at the end, by their scores; the metrics have all {len(lines):,}"


def quantiles(values: Sequence[float | None]) -> dict[str, float | None]:
    """Quantiles of the values that are known, by name; None where none is."""
    known = np.array([value for value in values if value is not None and not math.isnan(value)])
    return {name: float(np.quantile(known, q)) if len(known) else None for name, q in _QUANTILES.items()}


def _badness(line: AgentLine) -> float:
    """The larger, the worse; a score that is not a number is the worst."""
    score = line.together if line.together is not None else line.own_together
    if score is None or math.isnan(score):
        return math.inf
    return -score if line.greater_is_better else score
