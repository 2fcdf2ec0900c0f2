"""Faults that were injected for some rounds, marked in the charts over rounds."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes

from codistill.faults import Fault
from codistill.plots.style import MUTED

_MOST = 4  # more would only hide the lines


def shade_faults(axes: Axes, faults: Sequence[Fault], rounds: int) -> None:
    """A grey band over the rounds of each fault, with its name; none for a fault that lasts for the whole run."""
    shown = [(fault, min(fault.last or rounds, rounds)) for fault in faults if fault.first <= rounds]
    passing = [(fault, last) for fault, last in shown if fault.first > 1 or last < rounds]
    for place, (fault, last) in enumerate(passing[:_MOST]):
        axes.axvspan(fault.first - 0.5, last + 0.5, color=MUTED, alpha=0.12, linewidth=0, zorder=0)
        axes.annotate(
            fault.words, (fault.first - 0.5, 0), xycoords=axes.get_xaxis_transform(), xytext=(4, 4 + 12 * place),
            textcoords="offset points", fontsize=8, color=MUTED,
        )  # fmt: skip
