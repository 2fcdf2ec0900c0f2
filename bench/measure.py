"""How everything here is measured: alternating repeats, so that both sides meet the same machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """One line of the table: what was measured, what came out over the repeats, and what was aimed at."""

    name: str
    values: Sequence[float]
    unit: str
    target: str
    met: bool

    @property
    def middle(self) -> float:
        return statistics.median(self.values)


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def alternate(repeats: int, *sides: Callable[[], object], turns: int = 1) -> list[list[float]]:
    """Seconds of each side in each repeat: the sum over `turns`, in which the sides take turns one by one."""
    for side in sides:
        side()
    spent = []
    for _ in range(repeats):
        rows = [[seconds(side) for side in sides] for _ in range(turns)]
        spent.append([sum(column) for column in zip(*rows, strict=True)])
    return [list(column) for column in zip(*spent, strict=True)]


def ratio(name: str, ours: Sequence[float], bare: Sequence[float], at_most: float) -> Figure:
    values = [a / b for a, b in zip(ours, bare, strict=True)]
    return Figure(name, values, "x", f"at most {at_most}", statistics.median(values) <= at_most)


def speedup(name: str, ours: Sequence[float], other: Sequence[float], at_least: float) -> Figure:
    values = [b / a for a, b in zip(ours, other, strict=True)]
    return Figure(name, values, "x", f"at least {at_least}", statistics.median(values) >= at_least)
