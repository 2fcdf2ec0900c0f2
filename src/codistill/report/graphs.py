"""The graph of agents: discs, in a deeper colour for a better score, and links as lines.

All lengths are inches: one unit of the axes is one inch of the page, so discs and arrows fit each other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import matplotlib
import networkx
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Circle, PathPatch, Polygon
from matplotlib.path import Path
from scipy.spatial import KDTree

from codistill.core.errors import DataError
from codistill.report.style import AXIS, BLUE, GREY, HEAT, INK, PAPER, STYLE, WORSE, plain
from codistill.results.agents import score_text
from codistill.results.rounds import RunScores
from codistill.topology import Topology
from codistill.topology.graphs import most_square

MOST_NODES = 300
MOST_LABELS = 40
MOST_NAMES = 16  # with longer names, these get them below their discs
MOST_LINES = 3_000  # beyond, an image is smaller than as many lines
MOST_STRESS = 80  # nodes up to which the slower and clearer layout is used
WIDTH, HEIGHT = 9.0, 5.0  # of the picture
HEAD, EDGE = 0.8, 0.55  # of title and legend; between centres of discs and the border
CIRCULAR = ("ring", "complete")
LETTER = 0.085  # how wide a letter is
_FAINTEST = 0.08  # of the colour: what the worst agent gets

Places = dict[str, np.ndarray]


def draw_graph(topology: Topology, run: RunScores) -> tuple[Figure, bool]:
    """The graph, and whether its agents are numbered because there is no room for their names.

    Discs have the gid 'node-<index>' and the colour of the agent's last score.
    """
    places, height, stubs = _places(topology)
    radius = _radius(places)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, height + HEAD))
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set(xlim=(0, WIDTH), ylim=(0, height + HEAD))
        axes.set_axis_off()
        _lines(axes, topology, places, stubs)
        if topology.directed:
            _arrows(axes, topology, places, radius)
        scores = {line.name: line.together for line in run.compared}
        known = [score for score in scores.values() if score is not None and np.isfinite(score)]
        worst, best = (min(known), max(known)) if known else (0.0, 0.0)
        if not run.greater_is_better:
            worst, best = best, worst
        byzantine = {line.name for line in run.lines if line.byzantine}
        for index, (name, place) in enumerate(places.items()):
            shade = _shade(scores.get(name), worst, best)
            _disc(axes, place, radius, shade, f"node-{index}", WORSE if name in byzantine else INK)
        labels = _label(axes, topology, places, radius)
        if known:
            _legend(axes, run, worst, best, height + HEAD)
        else:
            axes.text(0.1, height + HEAD - 0.2, "not evaluated", va="center", fontsize=10)
    return figure, labels == "numbers"


def _places(topology: Topology) -> tuple[Places, float, dict[tuple[str, str], np.ndarray]]:
    """Where each agent is, how high the picture is, and the links of a torus that leave over its sides."""
    names = topology.names
    if topology.kind == "torus":
        return _grid(names)
    if topology.kind in CIRCULAR:
        angles = np.pi / 2 - 2 * np.pi * np.arange(len(names)) / len(names)
        circle = np.stack([np.cos(angles), np.sin(angles)], axis=1) * (HEIGHT / 2 - EDGE) + (WIDTH / 2, HEIGHT / 2)
        return dict(zip(names, circle, strict=True)), HEIGHT, {}
    graph = networkx.Graph([(name, other) for name in names for other in topology.neighbours(name)])
    graph.add_nodes_from(names)
    if len(names) <= MOST_STRESS and topology.unreached is None:
        found = networkx.kamada_kawai_layout(graph)  # draws no random numbers
    else:
        found = networkx.spring_layout(graph, seed=0, iterations=200)
    points = np.array([found[name] for name in names])
    points -= points.min(axis=0)
    points /= np.maximum(points.max(axis=0), 1e-9)
    points = _moved_apart(EDGE + points * (WIDTH - 2 * EDGE, HEIGHT - 2 * EDGE))
    return dict(zip(names, points, strict=True)), HEIGHT, {}


def _moved_apart(points: np.ndarray) -> np.ndarray:
    """Points that were too near to each other for their discs, moved away a little at a time."""
    wanted = 2.3 * _largest(len(points))
    for _ in range(60):
        ways = points[:, None] - points[None]
        lengths = np.hypot(ways[..., 0], ways[..., 1])
        np.fill_diagonal(lengths, np.inf)
        push = np.clip(wanted - lengths, 0, None) / np.maximum(lengths, 1e-9) * 0.3
        if not push.any():
            break
        points = np.clip(points + (push[..., None] * ways).sum(axis=1), EDGE, (WIDTH - EDGE, HEIGHT - EDGE))
    return points


def _largest(discs: int) -> float:
    return float(np.clip(1.6 / np.sqrt(discs), 0.08, 0.26))


def _radius(places: Places) -> float:
    """Of the discs: such that none hides another."""
    points = np.array(list(places.values()))
    nearest, _ = KDTree(points).query(points, k=2)
    return float(max(0.04, min(_largest(len(points)), 0.47 * nearest[:, 1].min())))


def _grid(names: tuple[str, ...]) -> tuple[Places, float, dict[tuple[str, str], np.ndarray]]:
    rows, columns = most_square(len(names))
    apart = min(1.0, (WIDTH - 2 * EDGE) / columns)
    left, height = (WIDTH - apart * (columns - 1)) / 2, apart * (rows - 1) + 2 * EDGE + 0.4 * apart
    spots = [np.array([left + apart * c, height - EDGE - 0.2 * apart - apart * r]) for r in range(rows)
             for c in range(columns)]  # fmt: skip
    stubs: dict[tuple[str, str], np.ndarray] = {}
    for place, name in enumerate(names):
        row, column = divmod(place, columns)
        if column == columns - 1 and columns > 2:
            first, way = names[row * columns], np.array([0.55 * apart, 0])
            stubs[name, first], stubs[first, name] = way, -way
        if row == rows - 1 and rows > 2:
            first, way = names[column], np.array([0, -0.55 * apart])
            stubs[name, first], stubs[first, name] = way, -way
    return dict(zip(names, spots, strict=True)), height, stubs


def _lines(axes: Axes, topology: Topology, places: Places, stubs: Mapping[tuple[str, str], np.ndarray]) -> None:
    """All links as one path, so that the page stays small."""
    points = []
    for name in topology.names:
        for other in topology.neighbours(name):
            if (name, other) in stubs:
                points += [places[name], places[name] + stubs[name, other]]
            elif name < other or not topology.may_send(other, name):
                points += [places[name], places[other]]
    if points:
        many = len(points) > 2 * MOST_LINES
        path = Path(np.array(points), [Path.MOVETO, Path.LINETO] * (len(points) // 2))
        width, alpha = (0.4, 0.35) if many else (1.3, 1.0)
        axes.add_patch(
            PathPatch(path, fill=False, edgecolor=GREY, linewidth=width, alpha=alpha, rasterized=many, gid="links")
        )


def _arrows(axes: Axes, topology: Topology, places: Places, radius: float) -> None:
    size = min(0.14, 0.7 * radius)
    for name in topology.names:
        for other in topology.neighbours(name):
            way = places[other] - places[name]
            way = way / max(1e-9, float(np.hypot(*way)))
            tip, side = places[other] - radius * way, np.array([-way[1], way[0]])
            corners = [tip, tip - size * way + 0.45 * size * side, tip - size * way - 0.45 * size * side]
            axes.add_patch(Polygon(corners, facecolor=GREY, linewidth=0))


def _shade(score: float | None, worst: float, best: float) -> float | None:
    """How deep the colour is, from the worst agent to the best; None without a score."""
    if score is None or not np.isfinite(score):
        return None
    return 1.0 if best == worst else min(1.0, _FAINTEST + (1 - _FAINTEST) * (score - worst) / (best - worst))


def _disc(axes: Axes, place: np.ndarray, radius: float, shade: float | None, gid: str, ink: str) -> None:
    centre = (float(place[0]), float(place[1]))
    axes.add_patch(Circle(centre, radius, facecolor=PAPER, linewidth=0, zorder=3))  # no line shines through
    face = (0.0, 0.0, 0.0, 0.0) if shade is None else to_rgba(HEAT, shade)
    style = "dotted" if shade is None else "solid"
    axes.add_patch(
        Circle(
            centre, radius, facecolor=face, edgecolor=AXIS if ink == INK else ink,
            linewidth=1 if ink == INK else 2.2, linestyle=style, zorder=3, gid=gid,
        )
    )  # fmt: skip


def _label(axes: Axes, topology: Topology, places: Places, radius: float) -> str:
    """Names in the discs or beside them, or numbers; returns which."""
    if len(places) > MOST_LABELS:
        return ""
    inside = max(map(len, places)) * LETTER <= 2 * radius
    beside = not inside and len(places) <= MOST_NAMES
    behind = {"facecolor": PAPER, "edgecolor": "none", "alpha": 0.85, "pad": 0.6} if beside else None
    for number, (name, place) in enumerate(places.items(), 1):
        text = plain(name, longest=14) if inside or beside else str(number)
        x, y = place + _beside(topology, place, radius, len(text)) if beside else place
        axes.text(
            x, y, text, ha="center", va="center_baseline", fontsize=8.5, color=INK, zorder=4, bbox=behind
        )  # fmt: skip
    return "names" if inside or beside else "numbers"


def _beside(topology: Topology, place: np.ndarray, radius: float, letters: int) -> np.ndarray:
    """Where a name goes: outward from a circle, else below."""
    if topology.kind not in CIRCULAR:
        return np.array([0, -radius - 0.13])
    way = place - (WIDTH / 2, HEIGHT / 2)
    outward: np.ndarray = way / np.hypot(*way) * (radius + np.array([0.08 + LETTER * letters / 2, 0.13]))
    return outward


def _legend(axes: Axes, run: RunScores, worst: float, best: float, top: float) -> None:
    """What the colours mean: discs from the worst to the best score."""
    axes.text(0.1, top - 0.2, f"colour: {run.axis_label()}", va="center", fontsize=10)
    values = [worst] if best == worst else list(np.linspace(worst, best, 4))
    for number, value in enumerate(values):
        place = np.array([0.22 + 0.95 * number, top - 0.52])
        _disc(axes, place, 0.1, _shade(value, worst, best), f"shade-{number}", INK)
        axes.text(place[0] + 0.17, place[1], score_text(run.metric, float(value)), va="center_baseline", fontsize=9)


# --- Which agent holds how many samples of which class, as circles.

POINTS_PER_INCH = 72
FONT_SIZE = 8
CIRCLE_LETTER = 0.08  # inches: how wide a letter of this font is at most
MOST_CIRCLES = 1_500  # beyond, an image is smaller than as many shapes


def draw_partition(counts: np.ndarray, agent_names: Sequence[str], class_names: Sequence[str]) -> Figure:
    """Draw agents (columns) by classes (rows); the area of each circle is the number of samples."""
    counts = np.asarray(counts)
    if counts.shape != (len(agent_names), len(class_names)) or counts.size == 0:
        raise DataError(
            "The counts of a partition must be a matrix with a row per agent and a column per class.",
            f"shape {counts.shape} for {len(agent_names)} agents and {len(class_names)} classes",
            "Name every agent and every class.",
        )
    agents, classes = counts.shape
    agent_labels, class_labels = ([plain(name) for name in names] for names in (agent_names, class_names))
    cell = min(0.5, 11 / agents, 11 / classes)
    with matplotlib.rc_context(STYLE):
        figure, axes = _canvas(cell * agents, cell * classes, left=_widest(class_labels), bottom=_widest(agent_labels))
        # A marker's size is the square of its diameter in points, so it is proportional to its area.
        size_of_one = (0.92 * cell * POINTS_PER_INCH) ** 2 / max(1, counts.max())
        column, row = np.nonzero(counts)
        axes.scatter(
            column, row, s=size_of_one * counts[column, row], color=BLUE, linewidths=0,
            rasterized=len(row) > MOST_CIRCLES,
        )  # fmt: skip
        axes.set(xlim=(-0.5, agents - 0.5), ylim=(classes - 0.5, -0.5), xlabel="agent", ylabel="class")
        step = math.ceil(0.15 / cell)  # names as many rows and columns as there is room for
        axes.set_xticks(range(0, agents, step), agent_labels[::step])
        axes.set_yticks(range(0, classes, step), class_labels[::step])
        axes.tick_params(length=0, labelsize=FONT_SIZE)
        if _widest(agent_labels) > cell:
            axes.tick_params(axis="x", labelrotation=90)
        axes.spines[:].set_visible(True)
        _area_legend(axes, _examples(int(counts.max())), size_of_one, cell)
    return figure


def _canvas(width: float, height: float, left: float, bottom: float) -> tuple[Figure, Axes]:
    """Axes of exactly this size in inches, with room for labels and, on the right, the legend."""
    left, right, bottom, top = left + 0.5, 1.4, bottom + 0.5, 0.3
    page_width, page_height = left + width + right, max(2.4, bottom + height + top)
    figure = Figure(figsize=(page_width, page_height))
    lower = 1 - (top + height) / page_height
    return figure, figure.add_axes((left / page_width, lower, width / page_width, height / page_height))


def _examples(largest: int) -> list[int]:
    """Three counts of one digit and zeros, up to the largest count, each about a quarter of the next."""
    digits = [10 ** (len(str(max(1, largest // part))) - 1) for part in (16, 4, 1)]
    sizes = [max(1, largest // part // digit * digit) for part, digit in zip((16, 4, 1), digits, strict=True)]
    return sorted(set(sizes))


def _area_legend(axes: Axes, examples: Sequence[int], size_of_one: float, cell: float) -> None:
    in_letters = cell * POINTS_PER_INCH / FONT_SIZE
    axes.legend(
        handles=[
            axes.scatter([], [], s=size_of_one * count, color=BLUE, linewidths=0, label=f"{count:,}")
            for count in examples
        ],
        title="samples",
        loc="upper left",
        bbox_to_anchor=(1, 1),
        frameon=False,
        fontsize=FONT_SIZE,
        title_fontsize=FONT_SIZE,
        labelspacing=max(0.5, in_letters - 0.7),
        handletextpad=max(0.8, in_letters / 2 - 0.5),
        borderpad=0.8,
    )


def _widest(names: Sequence[str]) -> float:
    return CIRCLE_LETTER * max(map(len, names))
