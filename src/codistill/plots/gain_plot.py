"""Each agent alone and together, as bars."""

from __future__ import annotations

import math
from collections.abc import Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from codistill.plots.axes import LEGEND, canvas, plain
from codistill.plots.style import BLUE, GREY, INK, STYLE, WORSE
from codistill.results.agent_lines import AgentLine
from codistill.results.metric_text import gain_text, in_percent

MOST_BARS = 30


def draw_gains(lines: Sequence[AgentLine], metric: str, title: str) -> Figure:
    """Bars of the agents whose gain is known; of many agents those that gained or lost most, the best first."""
    shown = with_gain(lines)
    if len(shown) > MOST_BARS:
        largest = sorted(shown, key=lambda line: -abs(line.gain or 0))[:MOST_BARS]
        shown = sorted(largest, key=lambda line: line.gain or 0, reverse=True)
    with matplotlib.rc_context(STYLE):
        figure, axes = canvas(9, 1.1 + 0.36 * len(shown))
        _bars(axes, shown, metric)
        unit = "gain in points" if in_percent(metric) else "gain (positive is better)"
        axes.set_title(f"{title}\nand {unit}", pad=12, linespacing=1.5)
    return figure


def with_gain(lines: Sequence[AgentLine]) -> list[AgentLine]:
    """Those with a gain that can be drawn."""
    return [line for line in lines if line.gain is not None and math.isfinite(line.gain)]


def omitted_agents(lines: Sequence[AgentLine]) -> str:
    """Which agents have no bars, in words; empty if all have."""
    known, agents = len(with_gain(lines)), len(lines)
    notes = []
    if known > MOST_BARS:
        notes.append(f"Of {known:,} agents, the {MOST_BARS} with the largest gain or loss are shown.")
    if known < agents:
        notes.append(f"{agents - known:,} of {agents:,} agents lack a score alone or together.")
    return " ".join(notes)


def _bars(axes: Axes, lines: Sequence[AgentLine], metric: str) -> None:
    places = np.arange(len(lines))
    alone, together = (np.array([getattr(line, which) for line in lines]) for which in ("alone", "together"))
    axes.barh(places - 0.19, alone, 0.36, color=GREY, label="alone")
    axes.barh(places + 0.19, together, 0.36, color=BLUE, label="together")
    gains = [line.gain or 0.0 for line in lines]
    for place, gain, end in zip(places, gains, np.maximum(alone, together), strict=True):
        axes.annotate(
            gain_text(metric, gain), (end, place), xytext=(5, 0), textcoords="offset points", va="center",
            fontsize=9, color=WORSE if gain < 0 else INK,
        )  # fmt: skip
    axes.set_yticks(places, [plain(line.name) for line in lines])
    axes.set_ylim(len(lines) - 0.5, -0.5)
    axes.margins(x=0.12)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
    if in_percent(metric):
        axes.xaxis.set_major_formatter(PercentFormatter(1, symbol=" %"))
    axes.legend(loc="lower right", ncols=2, **LEGEND | {"bbox_to_anchor": (1, 1), "handlelength": 1.2})
