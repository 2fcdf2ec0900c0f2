"""The section of the page about a run on the feature space of its agents."""

from __future__ import annotations

from codistill.reports import html
from codistill.results.summary import Summary

FEATURES = "Feature space"


def features_section(summary: Summary) -> str:
    """A map per round at which features were kept; empty where there was none."""
    if not summary.features:
        return ""
    from codistill.plots.feature_plot import draw_features, shown_agents

    last = summary.features[-1]
    shown = shown_agents(last)
    notes = [
        "Each point is a test sample as one agent sees it: the input of the last layer of its model, brought to two "
        "dimensions by t-SNE, for all agents of a panel together.",
        "Agents whose points of a class lie in the same place have similar features for it; agents whose points lie "
        "apart have features of their own.",
        "Only which points are close has a meaning: axes, sizes and distances between clusters have none, and each "
        "panel is a map of its own.",
        "Points of equal features hide each other.",
        "" if last.labels is None else "The opacity tells the class: from faint for the first to full for the last.",
    ]
    if left := len(summary.agents) - len(shown):
        notes.append(
            f"{left:,} of {len(summary.agents):,} agents are not shown: they have no features, none that are "
            "finite, or another number of them; or there are too many agents."
        )
    figure = draw_features(summary.features, summary.class_names)
    return html.chart(figure, "features", "feature space by round") + html.note(*notes)
