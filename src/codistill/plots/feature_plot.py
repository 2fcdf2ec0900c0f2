"""Maps of the feature space by t-SNE, one per round, after Figure 5 of Berdoz et al. (representation sharing)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from sklearn.manifold import TSNE
from threadpoolctl import threadpool_limits

from codistill.plots.axes import plain
from codistill.plots.style import COLOURS, INK, PAPER, STYLE
from codistill.results.feature_space import FeatureSpace

Panel = tuple[str, FeatureSpace, Sequence[str]]  # title, features, names of the classes

MOST_AGENTS = 20  # as many as differ in colour or marker
MOST_POINTS = 2_000  # of a panel
MOST_SHAPES = 1_500  # beyond, an image is smaller than as many shapes
MOST_NAMES = 40  # clusters of a panel that are named
LONGEST_NAME = 8
COLUMNS = 2
_MARKERS = ("o", "s", "^", "D")
_FAINTEST = 0.3  # the opacity of the first class; that of the last is 1
_NEAR = 0.06  # of the map's width: names that are closer would run into one another
_PERPLEXITY = 30.0
_SEED = 0
_SLICES = 20


def shown_agents(space: FeatureSpace) -> list[str]:
    """The agents on a map: finite features, as many of them as most agents have, and not too many agents."""
    finite = [name for name, features in space.by_agent.items() if np.isfinite(features).all()]
    widths = [space.by_agent[name].shape[1] for name in finite]
    width = max(widths, key=widths.count, default=0)
    return [name for name, each in zip(finite, widths, strict=True) if each == width][:MOST_AGENTS]


def draw_features(spaces: Sequence[FeatureSpace], class_names: Sequence[str]) -> Figure:
    """One panel per round: each point is a test sample as one agent sees it."""
    panels = [(f"after round {space.round}", space, class_names) for space in spaces]
    wrapped = [panels[start : start + COLUMNS] for start in range(0, len(panels), COLUMNS)]
    return draw_feature_grid([[*row, *[None] * (COLUMNS - len(row))] for row in wrapped], width=4.5)


def draw_feature_grid(grid: Sequence[Sequence[Panel | None]], width: float = 3.0) -> Figure:
    """Panels in rows of equal length, each so many inches wide; None leaves a place empty."""
    spaces = [panel[1] for row in grid for panel in row if panel is not None]
    names = list(dict.fromkeys(name for space in spaces for name in shown_agents(space)))[:MOST_AGENTS]
    styles = {name: (COLOURS[i % len(COLOURS)], _MARKERS[i // len(COLOURS)]) for i, name in enumerate(names)}
    many = sum(len(shown_agents(space)) * _samples(space) for space in spaces) > MOST_SHAPES
    with matplotlib.rc_context(STYLE):
        size = (width * len(grid[0]), 0.95 * width * len(grid) + 0.4)
        figure = Figure(figsize=size, layout="constrained")
        places = figure.subplots(len(grid), len(grid[0]), squeeze=False)
        for axes, panel in zip(places.flat, itertools.chain.from_iterable(grid), strict=True):
            if panel is None:
                axes.set_axis_off()
                continue
            title, space, class_names = panel
            axes.set(xticks=[], yticks=[], title=plain(title, longest=40))
            axes.spines[:].set_visible(True)
            _points(axes, space, styles, class_names, area=3.6 * width, rasterized=many)
        handles = [
            Line2D([], [], linestyle="", marker=marker, color=colour, markersize=7, label=plain(name))
            for name, (colour, marker) in styles.items()
        ]
        figure.legend(handles=handles, loc="outside upper left", ncols=min(5, max(1, len(handles))))
    return figure


def embed(features: np.ndarray) -> np.ndarray:
    """(n, 2) places of features (n, d) by t-SNE; with one thread, so that they are the same everywhere."""
    if len(features) < 4 or not np.ptp(features, axis=0).any():
        return np.zeros((len(features), 2))  # too few points, or only one place
    init = "pca" if features.shape[1] > 1 else "random"
    perplexity = min(_PERPLEXITY, (len(features) - 1) / 3)
    with threadpool_limits(limits=1):
        made = TSNE(init=init, perplexity=perplexity, random_state=_SEED, n_jobs=1).fit_transform(features)
    places: np.ndarray = made
    return places


def _samples(space: FeatureSpace) -> int:
    """How many samples of each agent are drawn."""
    return min(len(space.samples), MOST_POINTS // max(1, len(shown_agents(space))))


def _points(
    axes: Axes,
    space: FeatureSpace,
    styles: Mapping[str, tuple[str, str]],
    class_names: Sequence[str],
    *,
    area: float,
    rasterized: bool,
) -> None:
    agents, samples = [name for name in shown_agents(space) if name in styles], _samples(space)
    if not agents:
        return
    places = embed(np.concatenate([space.by_agent[name][:samples] for name in agents]))
    labels = np.zeros(samples, int) if space.labels is None else space.labels[:samples]
    opacity = np.linspace(1.0 if space.labels is None else _FAINTEST, 1.0, max(2, int(labels.max(initial=0)) + 1))
    # In slices of samples, each with another agent on top: where agents coincide, none hides all points of another.
    for number, part in enumerate(np.array_split(np.arange(samples), _SLICES)):
        for turn in range(len(agents)):
            index = (turn + number) % len(agents)
            colour, marker = styles[agents[index]]
            x, y = places[index * samples + part].T
            axes.scatter(
                x, y, s=area, marker=marker, linewidths=0, rasterized=rasterized,
                c=[to_rgba(colour, alpha) for alpha in opacity[labels[part]]],
            )  # fmt: skip
    if space.labels is not None:
        _name_clusters(axes, places.reshape(len(agents), samples, 2), labels, class_names)


def _name_clusters(axes: Axes, places: np.ndarray, labels: np.ndarray, class_names: Sequence[str]) -> None:
    """The name of each class at the median of each agent's points of that class, once where these coincide."""
    present = np.unique(labels)
    names = {c: plain(class_names[c]) if c < len(class_names) else str(c) for c in present}
    if len(places) * len(present) > MOST_NAMES or max(map(len, names.values())) > LONGEST_NAME:
        return
    near = _NEAR * np.ptp(places, axis=(0, 1)).max()
    for c in present:
        medians = np.median(places[:, labels == c], axis=1)
        together = np.ptp(medians, axis=0).max() <= near
        for x, y in medians.mean(axis=0, keepdims=True) if together else medians:
            axes.text(
                x, y, names[c], ha="center", va="center", fontsize=8, color=INK, zorder=4,
                bbox={"facecolor": PAPER, "edgecolor": "none", "alpha": 0.75, "pad": 0.8},
            )  # fmt: skip
