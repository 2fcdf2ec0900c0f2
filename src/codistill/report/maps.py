"""Maps of the feature space by t-SNE, one per round, after Figure 5 of Berdoz et al. (representation sharing)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb, to_rgba
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator, PercentFormatter
from sklearn.manifold import TSNE
from threadpoolctl import threadpool_limits

from codistill.core.text import percent_text
from codistill.report.style import COLOURS, GREY, GRID, HEAT, INK, PAPER, STYLE, plain
from codistill.results.outputs import FeatureSpace, Outputs

Panel = tuple[str, FeatureSpace, Sequence[str]]  # title, features, names of the classes

MOST_AGENTS = 20  # as many as differ in colour or marker
MOST_POINTS = 2_000  # of a panel
MOST_SHAPES = 1_500  # beyond, an image is smaller than as many shapes
MOST_NAMED_CLASSES = 40  # clusters of a panel that are named
LONGEST_NAME = 8
MAP_COLUMNS = 2
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
    panels: list[Panel] = [(f"after round {space.round}", space, class_names) for space in spaces]
    return draw_feature_grid(_wrapped(panels, MAP_COLUMNS), width=4.5)


def draw_feature_grid(grid: Sequence[Sequence[Panel | None]], width: float = 3.0) -> Figure:
    """Panels in rows of equal length, each so many inches wide; None leaves a place empty."""
    spaces = [panel[1] for row in grid for panel in row if panel is not None]
    names = list(dict.fromkeys(name for space in spaces for name in shown_agents(space)))[:MOST_AGENTS]
    styles = {name: (COLOURS[i % len(COLOURS)], _MARKERS[i // len(COLOURS)]) for i, name in enumerate(names)}
    many = sum(len(shown_agents(space)) * _samples(space) for space in spaces) > MOST_SHAPES
    with matplotlib.rc_context(STYLE):
        size = (width * len(grid[0]), 0.95 * width * len(grid) + 0.4)
        figure = Figure(figsize=size, layout="constrained")
        for axes, (title, space, class_names) in _panels(figure, grid):
            axes.set(xticks=[], yticks=[], title=plain(title, longest=40))
            axes.spines[:].set_visible(True)
            _points(axes, space, styles, class_names, area=3.6 * width, rasterized=many)
        handles = [
            Line2D([], [], linestyle="", marker=marker, color=colour, markersize=7, label=plain(name))
            for name, (colour, marker) in styles.items()
        ]
        figure.legend(handles=handles, loc="outside upper left", ncols=min(5, max(1, len(handles))))
    return figure


def _wrapped(panels: Sequence[Any], columns: int) -> list[list[Any]]:
    """Rows of equal length, the last filled up with None."""
    rows = [panels[start : start + columns] for start in range(0, len(panels), columns)]
    return [[*row, *[None] * (columns - len(row))] for row in rows]


def _panels(figure: Figure, grid: Sequence[Sequence[Any]]) -> Iterator[tuple[Axes, Any]]:
    """The axes of each panel, and what it shows; empty places have none."""
    places = figure.subplots(len(grid), len(grid[0]), squeeze=False)
    for axes, panel in zip(places.flat, itertools.chain.from_iterable(grid), strict=True):
        if panel is None:
            axes.set_axis_off()
        else:
            yield axes, panel


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
    if len(places) * len(present) > MOST_NAMED_CLASSES or max(map(len, names.values())) > LONGEST_NAME:
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


# --- The average output against the true class as heat maps, after Figure 2 of the FedAL paper (TMC 2024).

# Title, average outputs or shares of the predicted classes (K, K), and names of the classes.
Map = tuple[str, Outputs | np.ndarray, Sequence[str]]

MOST_NUMBERS = 12  # classes whose cells hold their number
MOST_NAMES = 30  # classes that are named beside the map
MOST_CELLS = 600  # of the small maps of a page that hold their number; beyond, they are images, which are smaller
COLUMNS = 3  # of small maps side by side
_FAINT = 0.005  # below, a cell is empty: its number would be 0


def draw_outputs(outputs: Outputs, names: Sequence[str]) -> Figure:
    """One large map and, beside it, the disagreement by true class."""
    few = outputs.classes <= MOST_NUMBERS
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9, 1.3 + 0.36 * outputs.classes if few else 5.6), layout="constrained")
        grid = figure.add_gridspec(1, 2, width_ratios=[2.4, 1])
        axes = figure.add_subplot(grid[0])
        _heat(axes, outputs.mean, names, width=5.6)
        axes.set_title("average output, in percent", pad=12)
        axes.set(xlabel="output class", ylabel="true class")
        if outputs.disagreement is not None:
            _bars(figure.add_subplot(grid[1], sharey=axes), outputs.disagreement, numbers=few)
    return figure


def draw_maps(maps: Sequence[Map]) -> Figure:
    """Small maps, a few side by side, each with its title and the mean disagreement."""
    cells = sum(_matrix(shown).size for _, shown, _ in maps)
    return draw_grid(_wrapped(maps, COLUMNS), numbers=cells <= MOST_CELLS)


def draw_grid(grid: Sequence[Sequence[Map | None]], *, numbers: bool = True) -> Figure:
    """Small maps in rows of equal length; None leaves a place empty. `numbers`: cells of few classes hold theirs."""
    with matplotlib.rc_context(STYLE | {"font.size": 8, "axes.titlesize": 9}):
        width, height = 3.0, 3.1
        figure = Figure(figsize=(width * len(grid[0]), height * len(grid)), layout="constrained")
        for place, (title, shown, names) in _panels(figure, grid):
            _heat(place, _matrix(shown), names, width=2.3, font=6.5, numbers=numbers)
            apart = shown.mean_disagreement if isinstance(shown, Outputs) else None
            below = "" if apart is None else f"\ndisagreement {percent_text(apart)}"
            place.set_title(plain(title, longest=36) + below, pad=6)
            place.set_xlabel("output class" if isinstance(shown, Outputs) else "predicted class")
            place.set_ylabel("true class")
    return figure


def _matrix(shown: Outputs | np.ndarray) -> np.ndarray:
    return shown.mean if isinstance(shown, Outputs) else shown


def _heat(
    axes: Axes, matrix: np.ndarray, names: Sequence[str], *, width: float, font: float = 9, numbers: bool = True
) -> None:
    """Cells as deep in colour as their value; `width` of the map in inches, to place the names."""
    classes = len(matrix)
    values = np.nan_to_num(matrix).clip(0, 1)  # a class without test samples stays empty
    axes.grid(visible=False)
    axes.set_xlim(-0.5, classes - 0.5)
    axes.set_ylim(classes - 0.5, -0.5)
    axes.spines[:].set_visible(True)
    if numbers and classes <= MOST_NUMBERS:
        for edge in np.arange(classes - 1) + 0.5:
            axes.axhline(edge, color=GRID, linewidth=0.8, zorder=0)
            axes.axvline(edge, color=GRID, linewidth=0.8, zorder=0)
        for row, column in np.argwhere(values >= _FAINT):
            value = float(values[row, column])
            corner = (column - 0.5, row - 0.5)
            axes.add_patch(Rectangle(corner, 1, 1, facecolor=to_rgba(HEAT, value), linewidth=0, zorder=1))
            axes.text(column, row, f"{100 * value:.0f}", ha="center", va="center", fontsize=font, color=INK)
    else:  # as an image: smaller than so many shapes; transparent, so that it fits light and dark pages
        colours = np.broadcast_to((*to_rgb(HEAT), 1.0), (classes, classes, 4)).copy()
        colours[..., 3] = values
        axes.imshow(colours, interpolation="nearest", aspect="auto", zorder=1)
    axes.tick_params(length=0)
    if classes > MOST_NAMES:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        return
    shown = [plain(name) for name in names] if len(names) == classes else [str(index) for index in range(classes)]
    crowded = max(map(len, shown)) * 0.1 > width / classes
    axes.set_xticks(range(classes), shown, rotation=90 if crowded else 0)
    axes.set_yticks(range(classes), shown)


def _bars(axes: Axes, shares: np.ndarray, *, numbers: bool) -> None:
    places, ends = np.arange(len(shares)), np.nan_to_num(shares)
    axes.barh(places, ends, 0.7 if numbers else 1.0, color=GREY)
    if numbers:
        for place, end in zip(places, shares, strict=True):
            text = percent_text(float(end)) if np.isfinite(end) else ""
            axes.annotate(
                text, (np.nan_to_num(end), place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=9
            )
    axes.set_xlim(0, max(0.1, 1.3 * float(ends.max())))
    axes.set_xticks(
        [tick for tick in MaxNLocator(4, steps=[1, 2, 5, 10]).tick_values(*axes.get_xlim()) if 0 <= tick <= 1]
    )
    axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0, symbol=" %"))
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0, labelleft=False)
    axes.set_title("pairs of agents that disagree", pad=12)
