"""What a protocol measured, per round."""

from __future__ import annotations

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from codistill.plots.axes import LEGEND, canvas, mean_and_range, plain, rounds_axis
from codistill.plots.fault_bands import shade_faults
from codistill.plots.style import MUTED, STYLE
from codistill.results.measures import Measure


def draw_measure(measure: Measure) -> Figure:
    """Mean per round, lowest to highest agent, and the chance level."""
    with matplotlib.rc_context(STYLE):
        figure, axes = canvas(9, 3.4)
        mean_and_range(axes, measure.rounds, measure.values, agents=measure.agents)
        if measure.chance is not None:
            label = f"chance: 1 in {measure.agents}"
            axes.axhline(measure.chance, color=MUTED, linestyle="dashed", linewidth=1.3, label=label)
        shade_faults(axes, measure.faults, int(max(measure.rounds)))
        axes.set_xlabel("round")
        axes.set_title(plain(measure.title, longest=90), pad=26)
        axes.grid(axis="x", visible=False)
        if measure.is_share:
            axes.yaxis.set_major_formatter(PercentFormatter(1, symbol=" %"))
        axes.legend(loc="lower left", ncols=3, **LEGEND)
        rounds_axis(axes, measure.rounds)
    return figure
